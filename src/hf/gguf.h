/*
 * A checkpoint as one GGUF file (version 3), which llama.cpp and what is built on it open: Llama's classes without
 * windows, Mixtral, Qwen2, Qwen3 and Qwen3-MoE. All numbers are little-endian.
 *
 *   "GGUF", u32 3, i64 tensors, i64 keys
 *   keys      text, u32 type, value; a text is u64 bytes and the bytes, an array u32 type, u64 count, values
 *   tensors   text, u32 dims, i64 each, the fastest first, u32 type of numbers, u64 where in the data
 *   data      from a multiple of 32 on; each tensor padded to one
 *
 * Rows of queries and keys stand in another order there where pairs that turn are neighbours (tensors.h). A wrong
 * order, or a key that is missing, gives a file that opens and computes nonsense: only logits tell.
 */
#ifndef MEGATRAIN_HF_GGUF_H
#define MEGATRAIN_HF_GGUF_H

#include "data/tokenizer.h"
#include "hf/class.h"
#include "hf/theirs.h"
#include "layer/spec.h"

typedef struct {
    const char *from; /* a checkpoint's folder */
    const char *to;   /* a file, which is replaced when all is on the disk */
    const char *path; /* its last part is the model's name, for people */
    const Config *cfg;
    const ModelSpec *model; /* the same configuration's */
    const ParamRegistry *whole;
    const Tokenizer *tokenizer; /* NULL: none; the file says so, and its ids have no texts */
    int64_t vocab;              /* rows of the token table */
    Stored stored;              /* type of matrices; vectors and routers are fp32 */
    int threads;
} GgufJob;

/* ERR_CONFIG: GGUF has no class that computes the model; says what it lacks. ERR_CKPT: the checkpoint is damaged, or
 * has numbers that are too large for `stored`. ERR_STORAGE; ERR_MEMORY. */
Err gguf_write(const GgufJob *x);

#endif
