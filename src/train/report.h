/*
 * A page that compares runs: their final figures, curves by step and by tokens, what differs in their configurations.
 * One HTML file that needs nothing else: pictures are inline SVG, light or dark as the reader's browser asks, and all
 * of it can be read without its few lines of script, which show values under the mouse.
 */
#ifndef MEGATRAIN_TRAIN_REPORT_H
#define MEGATRAIN_TRAIN_REPORT_H

#include <stdio.h>

#include "train/history.h"

enum { REPORT_RUNS = 24 };

/* Of 1 to REPORT_RUNS runs. Names and values are escaped, whatever they hold. */
void report_write(const History *runs, int count, FILE *out);

/* ---- shared by the files of the report ---- */

/* Text between tags or in quotes: what means something in HTML is escaped, control characters become blanks, bytes
 * that are no UTF-8 the replacement character. */
void report_text(FILE *out, const char *text);

/* What tells a run from the others: its folder's name, or its path where another has the same name. */
const char *report_name(const History *runs, int count, int run);

/* Classes of a run's colour (6) and dashes (4): all REPORT_RUNS pairs differ. report_mark: which dashes and mark. */
int report_mark(int run);
void report_look(FILE *out, int run);

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

#endif
