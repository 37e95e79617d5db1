/* report: one HTML page that compares runs (record/report.h). */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "cli/command.h"
#include "record/report.h"

static const char *output;

static const Option options[] = {
    { "output", OPTION_TEXT, &output, .value = "FILE", .help = "where the page goes; none: stdout" },
};

static Err write_page(const History *runs, int count)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the page");
    report_write(runs, count, f);
    const bool whole = !ferror(f);
    Err err = fclose(f) || !whole ? err_set(ERR_MEMORY, "no memory for the page") : ERR_OK;
    if (!err && output) file_sweep_beside(output), err = err_as(file_replace(output, text, (int64_t)size), ERR_STORAGE);
    else if (!err) fwrite(text, 1, size, stdout); /* a failure stays with the stream until it is flushed */
    free(text);
    return err;
}

/* A path may be no run: a file in runs/, or a folder that has been removed. */
static bool may_lack(Err err)
{
    if (err == ERR_CKPT) log_warn("%s: it is left out", err_message());
    return err == ERR_CKPT;
}

static Err report(Words rest)
{
    History *runs;
    int count = 0;
    Err err = ERR_OK;
    if (rest.count == 0) return err_set(ERR_CONFIG, "'megatrain report' needs the DIR of a run");
    if (rest.count > REPORT_RUNS)
        return err_set(ERR_CONFIG, "'megatrain report' compares at most %d runs, not %d", REPORT_RUNS, rest.count);
    if (output) TRY(file_check_replaces(output, "<html lang"));
    runs = calloc((size_t)rest.count, sizeof *runs);
    if (!runs) return err_set(ERR_MEMORY, "no memory for %d runs", rest.count);
    for (int i = 0; i < rest.count && !err; i++) {
        err = history_read(rest.items[i], &runs[count]);
        if (!err) count++;
        else if ((count || i + 1 < rest.count) && may_lack(err)) err = ERR_OK;
    }
    for (int i = 0; i < count && !err; i++)
        for (int k = 0; k < runs[i].note_count; k++) log_warn("%s: %s", runs[i].dir, runs[i].notes[k]);
    if (!err) err = write_page(runs, count);
    for (int i = 0; i < count; i++) history_release(&runs[i]);
    free(runs);
    return err;
}

const Command command_report = {
    .name = "report",
    .summary = "one HTML page that compares runs",
    .rest = "DIR...",
    OPTIONS(options),
    .run = report,
};
