/* Before a run: what it would stumble over on this machine, looked for without starting it. */
#ifndef MEGATRAIN_TRAIN_PREFLIGHT_H
#define MEGATRAIN_TRAIN_PREFLIGHT_H

#include "config/config.h"

/*
 * Warns of what the configuration names and is not to be had here: GPU, tokenizer, token files, checkpoints. Opens
 * token files as a run does (their indexes), but reads no tokens. *found: how many warnings. ERR_CONFIG where what is
 * there contradicts the configuration (a vocabulary that is too small, a tokenizer without the token that data.mask_eod
 * goes by). *vocab: model.vocab or the tokenizer's; 0 where neither is known.
 */
Err preflight(const Config *c, int *found, int64_t *vocab);

/* Returns err, of a tokenizer or token files that do not exist, with the commands that make them as its hint. */
Err preflight_hint(const Config *c, Err err);
/* The same of a run that is evaluated: where its paths begin. */
Err preflight_hint_of_run(const Config *c, Err err);

#endif
