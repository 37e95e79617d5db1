/*
 * Ids of tokens that a folder of Hugging Face's names: those that end a text (often several, as the end of a document
 * and that of a turn), the one that begins it, the one that pads. They are rows of the model's table of tokens, and
 * stand in generation_config.json, in older folders in config.json alone.
 */
#ifndef MEGATRAIN_HF_IDS_H
#define MEGATRAIN_HF_IDS_H

#include "base/json.h"

enum { HF_ENDS_MOST = 64 };

typedef struct {
    int64_t begin, pad; /* -1: none */
    int64_t ends[HF_ENDS_MOST];
    int end_count;
} HfIds;

#define HF_NO_IDS              \
    {                          \
        .begin = -1, .pad = -1 \
    }

/* Ids of a generation_config.json or a config.json; values that are no ids are warned of and left out. ERR_CKPT: the
 * file is damaged. ERR_MEMORY. */
Err hf_ids_read(const char *path, HfIds *out);
bool hf_ids_end(const HfIds *x, int64_t id);

/* The member eos_token_id: null, an id or a list, as transformers writes it. */
void hf_ids_put_ends(JsonOut *j, const HfIds *x);
/* Writes the file generation_config.json of a folder. ERR_STORAGE. */
Err hf_ids_write(const HfIds *x, const char *folder);

#endif
