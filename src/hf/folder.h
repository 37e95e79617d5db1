/*
 * Weights of a folder of Hugging Face's: model.safetensors, or shards with model.safetensors.index.json.
 *
 *   {"metadata":{"total_size":BYTES},"weight_map":{"model.norm.weight":"model-00002-of-00002.safetensors",...}}
 *
 * Nothing in it is believed. Files are plain names in the folder, and links stay inside it (in the hub's own cache they
 * lead to ../../blobs, which is allowed). Headers describe their files to the byte (ckpt/safetensors.h), the index and
 * the headers name the same tensors in the same files, and each name is there once. What the tensors mean: tensors.h.
 *
 * Files are read by pieces into memory of the caller, so that a model of any size takes no memory here.
 */
#ifndef MEGATRAIN_HF_FOLDER_H
#define MEGATRAIN_HF_FOLDER_H

#include "ckpt/safetensors.h"

enum { HF_JSON_MOST = 16 << 20 }; /* bytes of a config.json or generation_config.json */

typedef struct {
    StTensor t;
    int file;
    bool used; /* somebody has said what it is: hf_folder_use */
} HfTensor;

typedef struct {
    char *path;
    int fd;
    int64_t size_bytes;
} HfFile;

typedef struct {
    const char *path;
    HfFile *files;
    HfTensor *tensors; /* sorted by name */
    int64_t count;
    int file_count;
} HfFolder;

/* True if the folder holds such weights, and no checkpoint of ours. */
bool hf_folder_is(const char *path);

/* To be called behind an error, which it returns: the hint, if the path is a model's folder in the hub's cache, which
 * holds snapshots. */
Err hf_folder_hint_cache(const char *path, Err err);

/* ERR_CKPT if a file of the folder is a link, but to another of its files, or to the blobs beside the snapshots of the
 * hub's cache: what came from elsewhere must not read other files of this machine. */
Err hf_folder_check_link(const char *folder, const char *path);

/* Takes memory from `a`. Errors, one line each: ERR_CKPT, naming file and tensor. hf_folder_close also after one. */
Err hf_folder_open(const char *path, SetupArena *a, HfFolder *out);
void hf_folder_close(HfFolder *f);

/* NULL if absent. */
const HfTensor *hf_folder_find(const HfFolder *f, const char *name);

/* Marks a tensor as used. NULL if absent. */
const HfTensor *hf_folder_use(HfFolder *f, const char *name);

/* Reads bytes [offset, offset + size_bytes) of a tensor. From any thread. ERR_CKPT. */
Err hf_folder_read(const HfFolder *f, const HfTensor *t, int64_t offset, void *out, int64_t size_bytes);

#endif
