/*
 * parallel.auto: the layout of a run that begins is looked for (plan/search.h) by rank 0; one that goes on from a
 * checkpoint keeps the layout that was chosen for it. Layout keys stay as they are given on the command line; those of
 * the file do so if parallel.auto stands there too.
 */
#ifndef MEGATRAIN_CLI_AUTO_LAYOUT_H
#define MEGATRAIN_CLI_AUTO_LAYOUT_H

#include "cli/command.h"
#include "config/config.h"
#include "train/train.h"

typedef struct {
    const char *path; /* the configuration's, and the words beside it */
    Words words;
    const char *may_differ; /* train --override; NULL: nothing */
    const char **given;     /* words of the file, then those */
    int given_count;
    char *texts; /* the file's words */
} AutoLayout;

/* *c, which config_read made or refused, has parallel.auto: reads it anew, as one rank's, for want of a layout. Errors
 * as of config_read. auto_layout_close in any case. */
Err auto_layout_open(AutoLayout *a, const char *path, Words words, Config *c);
void auto_layout_close(AutoLayout *a);

/* How train_run gets the layout. */
LayoutChoice auto_layout_choice(AutoLayout *a);

#endif
