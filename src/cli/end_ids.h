/*
 * Ids of tokens that end a text of a checkpoint's model, beside the tokenizer's own end of a document.
 *
 * They are those of the tokenizer that is used, if a generation_config.json lies beside it. A model that was converted
 * from a folder without a tokenizer that is understood has them in RUN/generation_config.json. These hold for the
 * weights as they came, so for checkpoints that speak of no tokenizer: whoever trains on says by data.tokenizer what
 * ends a document.
 */
#ifndef MEGATRAIN_CLI_END_IDS_H
#define MEGATRAIN_CLI_END_IDS_H

#include <limits.h>

#include "hf/ids.h"

/* Ids of the checkpoint in that folder; data: what it says of what it was trained on. path: the file, or "": there is
 * none. ERR_CKPT, ERR_MEMORY. */
Err end_ids_of(const char *checkpoint, const char *data, const char *tokenizer, char path[PATH_MAX], HfIds *out);
/* Ids of a run's checkpoint of that step, or of its newest (step < 0). */
Err end_ids_of_run(const char *run_dir, int64_t step, const char *tokenizer, HfIds *out);

/* Keeps those of a folder of Hugging Face's in `to`: its generation_config.json, or one with what config.json says.
 * ERR_CKPT: the file is damaged. ERR_STORAGE, ERR_MEMORY. */
Err end_ids_keep(const char *folder, const char *to);

#endif
