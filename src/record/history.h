/*
 * What a run left in its folder, read back for people to look at: metrics.jsonl and config.ini, of a run that has
 * ended, is going on, or was damaged. Whatever cannot be read is left out and told in `notes`.
 */
#ifndef MEGATRAIN_RECORD_HISTORY_H
#define MEGATRAIN_RECORD_HISTORY_H

#include <limits.h>

#include "record/load_map.h"
#include "record/record.h"

typedef enum {
    HISTORY_LOSS,
    HISTORY_GRAD_NORM,
    HISTORY_LR,
    HISTORY_SPEED,
    HISTORY_LOGIT, /* attention's largest; NaN where nobody asked */
    HISTORY_CURVES
} HistoryCurve;

enum { HISTORY_SKIPPED = 12, HISTORY_CHANGES = 32, HISTORY_NOTES = 6, HISTORY_NOTE_BYTES = 1024 };

/* A key that --override changed: the first step that has it, tokens before that. */
typedef struct {
    int64_t step, tokens;
    char *key, *was, *is;
} HistoryChange;

/* Losses of a validation set; NaN: none was finite. */
typedef struct {
    double best, last;
    int64_t best_step, last_step;
} HistoryValid;

typedef struct {
    char *key, *value; /* "section.key" */
} HistoryKey;

/* Steps in which a rank was the slowest by far (LAG_NOTABLE), and by how much in all of them. */
typedef struct {
    int64_t steps;
    double lag;
} HistorySlow;

typedef struct {
    SetupArena memory;               /* memory of all below */
    const char *dir, *name;          /* the folder as it was given; its own name */
    Curve curve[HISTORY_CURVES];     /* the loss's with the validation losses */
    HistoryValid valid[CURVE_NAMES]; /* validation losses by series of that curve */
    LoadMap loads;                   /* loads of experts; empty for a dense model */
    HistorySlow *slow;               /* slow ranks by rank, [slow_count] */
    int slow_count;
    int64_t compared; /* steps in which ranks were; 0: of one rank */
    int64_t last_step, tokens;
    int64_t planned_steps, planned_tokens;       /* the one that train asks for; else 0 */
    int64_t steps, skipped;                      /* with a line; of those, skipped */
    int64_t skipped_step[HISTORY_SKIPPED];       /* the first ones */
    int64_t memory_bytes;                        /* the most of any step */
    double seconds, trained_tokens, mfu_seconds; /* sums over steps; mfu times seconds */
    HistoryKey *keys;
    int key_count;
    HistoryChange change[HISTORY_CHANGES]; /* the first ones */
    int changes;                           /* number of changes */
    char notes[HISTORY_NOTES][HISTORY_NOTE_BYTES];
    int note_count;
} History;

/* ERR_CKPT: no run folder (neither file is there). ERR_MEMORY. Nothing is held after an error. */
Err history_read(const char *dir, History *h);
void history_release(History *h);

/* The value of "section.key"; NULL if config.ini has none. */
const char *history_key(const History *h, const char *key);

#endif
