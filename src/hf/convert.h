/*
 * Hugging Face's folders to checkpoints of ours and back. Both directions stream: several threads make pieces of some
 * MiB (jobs.h), one writes them, and memory does not depend on the model's size. The way out is gone on with behind the
 * last whole file when it was killed, the way in is started again. Nothing half-written is taken for whole: what is
 * written has another name until all of it is on the disk.
 */
#ifndef MEGATRAIN_HF_CONVERT_H
#define MEGATRAIN_HF_CONVERT_H

#include <limits.h>

#include "ckpt/ckpt.h"
#include "data/tokenizer.h"
#include "hf/class.h"

typedef struct {
    const char *from, *run_dir;
    const HfConfig *hf; /* configuration of `from` */
    const Config *cfg;  /* the same, resolved */
    const ParamRegistry *whole;
    const CkptMeta *meta;
    /* Called before the weights are written, under the folder's lock, for what else it is to keep; or NULL. */
    Err (*keep)(void *user, const char *run_dir);
    void *user;
    int threads;
} HfImport;

/*
 * Writes the weights as a checkpoint of values in run_dir, which is made once the folder has been found to be whole,
 * and removed again where something fails.
 * ERR_CKPT: damage, or run_dir holds checkpoints. ERR_STORAGE; ERR_MEMORY.
 */
Err hf_import(const HfImport *x);

/* A file that goes into the folder under this name. */
typedef struct {
    char path[PATH_MAX];
    const char *name;
} HfCopy;

typedef struct {
    const char *from; /* a checkpoint's folder */
    const char *to;   /* a folder that is not there, or empty */
    const Config *cfg;
    const ParamRegistry *whole;
    HfExport about;       /* its dtype is that of the weights */
    int64_t shard_bytes;  /* most bytes of a file; a larger tensor has its own */
    const HfCopy *copies; /* such as the tokenizer's files; they replace what is written under their names */
    int copy_count, threads;
    /* A tokenizer whose vocabulary and merges lie apart in this folder: tokenizer.json is written, too; NULL: none. */
    const Tokenizer *apart;
    const char *apart_in;
} HfExportJob;

/* Writes a folder. ERR_CONFIG: no class can say what the configuration computes, or `to` holds something. ERR_CKPT: the
 * checkpoint is damaged, or has numbers that the dtype or the class has no place for. ERR_STORAGE; ERR_MEMORY. */
Err hf_export(const HfExportJob *x);

#endif
