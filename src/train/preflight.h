/* Looks for what a run would stumble over on this machine, without starting it. */
#ifndef MEGATRAIN_TRAIN_PREFLIGHT_H
#define MEGATRAIN_TRAIN_PREFLIGHT_H

#include "config/config.h"

/*
 * Warns of what the configuration names and is not to be had here: GPU, tokenizer, token files, tasks, checkpoints.
 * Opens token files as a run does (their indexes), but reads no tokens. *found: how many warnings. ERR_CONFIG: what is
 * there contradicts the configuration (a vocabulary that is too small, a tokenizer without the token that
 * data.mask_eod goes by). *vocab: model.vocab or the tokenizer's; 0: neither is known.
 */
Err preflight(const Config *c, int *found, int64_t *vocab);

/* Returns err, which says that a tokenizer or token files do not exist; adds the commands that make them as its
 * hint. */
Err preflight_hint(const Config *c, Err err);
/* The same for a run that is evaluated: the hint says where its paths begin. */
Err preflight_hint_of_run(const Config *c, Err err);

#endif
