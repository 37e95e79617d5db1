/*
 * The pictures of a report: curves of all runs (report_chart.c), the load of a run's experts (report_loads.c); and what
 * tells a run from the others, on the page and in them.
 */
#ifndef MEGATRAIN_RECORD_REPORT_PICTURES_H
#define MEGATRAIN_RECORD_REPORT_PICTURES_H

#include <stdio.h>

#include "record/history.h"

typedef struct {
    const char *title;
    HistoryCurve curve;
    const char *set;   /* the losses of this validation set, not the curve itself; NULL: the curve */
    bool by_tokens;    /* x axis; else steps */
    bool from_zero;    /* y axis */
    bool mark_skipped; /* steps, on the lower edge */
    bool is_set;       /* values that somebody sets: a jump is one, nothing is smoothed */
} ReportChart;

/* A figure. `number` tells ids of a page apart. Nothing if no run has a value to show. */
void report_chart(const ReportChart *c, const History *runs, int count, int number, FILE *out);

/* The figure of a run's experts; nothing of a dense model. */
void report_loads(const History *runs, int count, int run, int number, FILE *out);

/* A run's name: its folder's, or the path where another has the same. */
const char *report_name(const History *runs, int count, int run);

/* Classes of a run's colour (6) and dashes (4): all REPORT_RUNS pairs differ. report_mark: which dashes and mark. */
int report_mark(int run);
void report_look(FILE *out, int run);

#endif
