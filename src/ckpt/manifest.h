/*
 * manifest.json of one checkpoint, read and believed only after its CRC (manifest.crc) and these checks:
 * the format is ours; files are plain names in the folder; every piece lies inside its tensor; the pieces of
 * a tensor's state tile it exactly once. What is on the disk otherwise is checked by manifest_check_files and
 * by whoever reads the shards.
 *
 *   {"format":1,"program":...,"machine":..,"job":..,"step":...,"samples":...,"tokens":...,"seed":...,
 *    "reproducible":...,"blocks":{"tp":..,"seq":..,"attn":..},"counters":{...},"data":...,"overrides":..,"config":...,
 *    "valid":[{"set":"wiki","loss":3.25},...],
 *    "parameters":[{"name":"embed.weight","shape":[256,64],"shift":24},...],
 *    "pieces":[{"name":..,"state":"value","dtype":"F32","global":[256,64],"offset":[0,0],"shape":[128,64],
 *               "file":"shard-00000.safetensors","crc32c":...},...],
 *    "files":[{"name":"shard-00000.safetensors","size":...,"crc32c":[...]},...]}
 */
#ifndef MEGATRAIN_CKPT_MANIFEST_H
#define MEGATRAIN_CKPT_MANIFEST_H

#include "ckpt/chunks.h"
#include "ckpt/ckpt.h"
#include "ckpt/safetensors.h"
#include "param/shard.h"

enum { CKPT_STATES = 3, KEY_MAX = PARAM_NAME_MAX + 48 };

/* The size that a manifest may have: larger ones are neither read nor written. It is 4 GiB, and less in tests. */
extern int64_t manifest_max_bytes;

/* The tensors that are stored for a parameter; their names are what keys begin with. */
typedef enum { STATE_VALUE, STATE_M, STATE_V } CkptState;
extern const char *const ckpt_state_names[CKPT_STATES];

typedef struct {
    const char *name;
    int ndim;
    int64_t shape[2]; /* columns 1 for vectors */
    int32_t shift;
    bool has[CKPT_STATES];
} ManifestParam;

typedef struct {
    int param, state, file;
    DType dtype; /* F32; of moments BF16, too */
    Box box;
    int64_t crc; /* -1: a version that did not write CRCs of pieces wrote this one */
} ManifestPiece;

typedef struct {
    const char *name, *path;
    int64_t size_bytes;
    uint32_t *crcs;
} ManifestFile;

typedef struct {
    const char *folder;
    CkptMeta meta;
    ManifestParam *params; /* in registration order */
    ManifestPiece *pieces; /* ordered by file, then as we write them */
    ManifestFile *files;
    int param_count, file_count;
    int64_t piece_count;
    int *by_name; /* indices into params, sorted by name */
    int64_t format;
} Manifest;

/* Takes memory of about one and a half times the file's size. ERR_CKPT names the file. m->format is set as soon as it
 * is known, also when it is too new for us. ERR_STORAGE: a folder step-N is a link that belongs to another user
 * (file_check_link). */
Err manifest_read(const char *folder, SetupArena *a, Manifest *m);
Err manifest_check_files(const Manifest *m);            /* ERR_CKPT: a file is missing, or has another size */
int manifest_find(const Manifest *m, const char *name); /* index into params; -1 if absent */

/* The text of manifest.crc. */
void manifest_crc_text(char out[64], uint32_t crc, int64_t size_bytes);

/* F32 or BF16, as safetensors calls it. */
const char *ckpt_dtype_name(DType dtype);

/* The key of a piece of a tensor with this global shape. */
void ckpt_key(char out[KEY_MAX], int state, const char *name, int ndim, Box piece, const int64_t global[2]);

/* Finds the piece in its file's header. ERR_CKPT: the header does not agree with the manifest. */
Err manifest_tensor(const Manifest *m, const ManifestPiece *p, const StFile *f, const StTensor **out);

/* To be called when reading the file failed with `err`: if the file is damaged, the message then names the tensors.
 * Returns err. */
Err manifest_blame(const Manifest *m, const ChunkReader *r, Err err);

/* Opens a file of the manifest and parses its header, of which every byte is checked. */
Err manifest_open(const Manifest *m, int file, char *chunk, SetupArena *a, ChunkReader *r, StFile *out);

#endif
