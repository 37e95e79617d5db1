/* What the page of a report and its pictures share: escaped text, and how each run is told from the others. */
#ifndef MEGATRAIN_RECORD_REPORT_LOOK_H
#define MEGATRAIN_RECORD_REPORT_LOOK_H

#include <stdio.h>

#include "record/history.h"

/* Text between tags or in quotes: what means something in HTML is escaped, control characters become blanks, bytes
 * that are no UTF-8 the replacement character. */
void report_text(FILE *out, const char *text);

/* What tells a run from the others: its folder's name, or its path where another has the same name. */
const char *report_name(const History *runs, int count, int run);

/* Classes of a run's colour (6) and dashes (4): all REPORT_RUNS pairs differ. report_mark: which dashes and mark. */
int report_mark(int run);
void report_look(FILE *out, int run);

#endif
