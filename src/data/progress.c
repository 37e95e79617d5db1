/* See progress.h. */
#include "data/progress.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"

static const double LIVE_S = 0.1, FIRST_LINE_S = 10, LONGEST_PAUSE_S = 600;

void progress_open(Progress *p, int64_t total, const char *what)
{
    *p = (Progress){ .total = total, .start = -1, .what = what, .live = log_is_live() };
    p->pause_s = p->live ? LIVE_S : FIRST_LINE_S;
}

/* Is it time for a line? Speed counts from the first piece on: what an earlier process did may have had to be read to
 * get there. */
static bool is_time(Progress *p, int64_t done, double now)
{
    if (p->start < 0) {
        p->start = done;
        p->start_s = now;
        p->next_s = now + p->pause_s;
    }
    return now >= p->next_s;
}

static void put(Progress *p, const char *text, double now)
{
    if (p->live) log_status(text);
    else log_info("%s", text);
    if (!p->live && p->pause_s < LONGEST_PAUSE_S) p->pause_s *= 2;
    p->next_s = now + p->pause_s;
}

void progress_show(Progress *p, int64_t done_bytes, int64_t count)
{
    char text[LOG_STATUS_BYTES], done[UNITS_BYTES], total[UNITS_BYTES], rate[UNITS_BYTES],
        items[UNITS_BYTES + 32] = "", left[UNITS_BYTES];
    const double now = clock_s();
    if (!is_time(p, done_bytes, now)) return;
    const double speed = (double)(done_bytes - p->start) / (now - p->start_s);
    units_bytes(done, done_bytes);
    units_bytes(rate, (int64_t)speed);
    if (p->what) snprintf(items, sizeof items, "  %s %s", units_count(left, (double)count), p->what);
    if (p->total)
        snprintf(text, sizeof text, "%5.1f %%  %s of %s  %s/s%s  %s left", 100 * (double)done_bytes / (double)p->total,
                 done, units_bytes(total, p->total), rate, items,
                 units_seconds(left, (double)(p->total - done_bytes) / speed));
    else snprintf(text, sizeof text, "%s  %s/s%s", done, rate, items);
    put(p, text, now);
}

void progress_items(Progress *p, int64_t done)
{
    char text[LOG_STATUS_BYTES];
    const double now = clock_s();
    if (!is_time(p, done, now)) return;
    snprintf(text, sizeof text, "%5.1f %%  %lld of %lld %s", 100 * (double)done / (double)p->total, (long long)done,
             (long long)p->total, p->what);
    put(p, text, now);
}

void progress_close(Progress *p)
{
    if (p->live) log_status(NULL);
}
