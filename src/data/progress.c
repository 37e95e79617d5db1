/* See progress.h. */
#include "data/progress.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"

static const double LIVE_S = 0.1, FIRST_LINE_S = 10, LONGEST_PAUSE_S = 600;

void progress_open(Progress *p, int64_t total_bytes)
{
    *p = (Progress){ .total_bytes = total_bytes, .start_bytes = -1, .live = log_is_live() };
    p->pause_s = p->live ? LIVE_S : FIRST_LINE_S;
}

/* Speed counts from the first piece on: what an earlier process did may have had to be read to get there. */
static void begin(Progress *p, int64_t done_bytes, double now)
{
    p->start_bytes = done_bytes;
    p->start_s = now;
    p->next_s = now + p->pause_s;
}

void progress_show(Progress *p, int64_t done_bytes, int64_t tokens)
{
    char text[LOG_STATUS_BYTES], done[UNITS_BYTES], total[UNITS_BYTES], rate[UNITS_BYTES], count[UNITS_BYTES],
        left[UNITS_BYTES];
    double now = clock_s(), elapsed = now - p->start_s;
    if (p->start_bytes < 0) begin(p, done_bytes, now);
    if (now < p->next_s) return;
    double speed = (double)(done_bytes - p->start_bytes) / elapsed;
    snprintf(text, sizeof text, "%5.1f %%  %s of %s  %s/s  %s tokens  %s left",
             100 * (double)done_bytes / (double)p->total_bytes, units_bytes(done, done_bytes),
             units_bytes(total, p->total_bytes), units_bytes(rate, (int64_t)speed),
             units_count(count, (double)tokens),
             units_seconds(left, (double)(p->total_bytes - done_bytes) / speed));
    if (p->live) log_status(text);
    else log_info("%s", text);
    if (!p->live && p->pause_s < LONGEST_PAUSE_S) p->pause_s *= 2;
    p->next_s = now + p->pause_s;
}

void progress_close(Progress *p)
{
    if (p->live) log_status(NULL);
}
