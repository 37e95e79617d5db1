/*
 * A page that compares runs: their final figures, curves by step and by tokens, what differs in their configurations.
 * One HTML file that needs nothing else: pictures are inline SVG, light or dark as the reader's browser asks, and all
 * of it can be read without its few lines of script, which show values under the mouse.
 */
#ifndef MEGATRAIN_RECORD_REPORT_H
#define MEGATRAIN_RECORD_REPORT_H

#include <stdio.h>

#include "record/history.h"

enum { REPORT_RUNS = 24 };

/* Writes the report of 1 to REPORT_RUNS runs. Names and values are escaped, whatever they hold. */
void report_write(const History *runs, int count, FILE *out);

#endif
