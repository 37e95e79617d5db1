/*
 * Checkpoints: safetensors files and a manifest in one folder, written by a commit protocol, loaded in
 * any layout.
 *
 *   DIR/checkpoints/step-00000020/shard-00000.safetensors   one per rank that owns something
 *                                 manifest.json             every piece; CRC32C per 1 MiB of each file
 *                                 manifest.crc              the CRC of manifest.json
 *   DIR/checkpoints/LATEST        a hint for people and scripts; never read here
 *
 * Keys of the shards: `NAME` for a whole value tensor, `m/NAME` and `v/NAME` for its moments, as far as its optimizer
 * has them; a
 * piece of a tensor has its first row (and column) behind it: `NAME#128,0`. Parameter names hold neither `#`
 * nor `/`. Everything is stored in plain order: sections undone, padding left out (param/shard.h).
 *
 * A save goes: space check; each rank writes and syncs its file in step-N.tmp-NONCE; rank 0 writes the
 * manifest, syncs, renames the folder to step-N (the commit point), syncs the parent, reads the manifest
 * back, and only then removes what is not to be kept. So at any moment a power cut or kill -9 leaves the previous
 * checkpoint in place and no half-written one that could be taken for whole. A folder that has the wanted
 * name already becomes step-N.old until the new one is in place.
 *
 * Memory: saving uses what ckpt_open took (a chunk of 1 MiB, the tables of CRCs, with CkptOptions.async a copy of what
 * this rank writes) and allocates nothing. Loading holds a chunk, the manifest and one shard's header besides the
 * state. The CRC of a chunk finds damage anywhere in a file; the CRCs of the pieces then say which tensor is damaged.
 */
#ifndef MEGATRAIN_CKPT_CKPT_H
#define MEGATRAIN_CKPT_CKPT_H

#include <limits.h>
#include <stdio.h>

#include "ckpt/upcycle.h"

enum { CKPT_FORMAT = 1, CKPT_MAX_COUNTERS = 16, CKPT_MAX_VALID = 32, CKPT_NAME_MAX = 64 };

/* Bounds of a gradient's fixed-point shift: 2^shift and 2^-shift are normal floats, also in a step that is done
 * again. */
enum { CKPT_SHIFT_MIN = -102, CKPT_SHIFT_MAX = 126 };

typedef struct {
    const char *name;
    int64_t value;
} CkptCounter;

/* The loss on a validation set at the checkpoint's step. */
typedef struct {
    const char *set; /* its name; "": the only one */
    double loss;     /* a checkpoint has finite ones only */
    int64_t samples; /* how many it is the mean of; 0: an earlier version did not say */
    int64_t crc;     /* says which samples: dataset_crc of the set */
    int64_t content; /* says which tokens they have: dataset_content_crc */
    bool has_content;
} CkptValid;

/* False: both have a checksum of their tokens, and these differ. */
bool ckpt_valid_same_content(const CkptValid *a, const CkptValid *b);
/* Are the losses those on the same samples, as far as is known? */
bool ckpt_valid_comparable(const CkptValid *a, const CkptValid *b);

/* All of a run's state that is not a tensor. Texts belong to the caller, or to the arena of a load. */
typedef struct {
    int64_t step, samples, tokens; /* how many are done; samples is also the position in the data order */
    int64_t seed;
    int64_t tp_blocks, seq_blocks, attn_block; /* canonical blocks (docs/determinism.md) */
    const char *reproducible;                  /* run.reproducible as it was resolved */
    const char *program;                       /* the program's version */
    const char *machine;                       /* for people: rank 0's host and processor; NULL or "": not known */
    const char *job;                           /* for people: who started the run; NULL or "": not known */
    const char *config;                        /* the resolved configuration as INI text */
    const char *data;                          /* identity of the training data */
    const char *overrides; /* keys that changed on the way (train/overrides.h), a line each; "": none */
    CkptCounter counters[CKPT_MAX_COUNTERS]; /* further integers, by name: skipped steps, updates done, ... */
    int counter_count;
    CkptValid valid[CKPT_MAX_VALID];
    int valid_count; /* 0: the step was not evaluated */
} CkptMeta;

int64_t ckpt_counter(const CkptMeta *m, const char *name, int64_t otherwise);

/* Locks a run folder, which is made if it is missing, by DIR/lock for the life of the process. ERR_STORAGE: another
 * run, which the message names, holds the lock, or the folder is not writable. */
Err ckpt_lock(const char *run_dir, int *fd_out);

/* ---- saving ---- */

/*
 * Values from elsewhere than a store: next gives bytes that follow one another, in plain order, parameter by parameter
 * as they are registered, and of no two parameters at a time. They stay until the next call. *size_bytes > 0.
 */
typedef struct {
    void *user;
    Err (*next)(void *user, const void **data, int64_t *size_bytes);
} CkptSource;

typedef struct {
    const char *run_dir;
    const ParamSet *params;
    World *world;
    Stream *stream;
    int keep;           /* checkpoints to keep, never fewer than 2; 0 = all */
    int64_t meta_bytes; /* the texts of a CkptMeta will take no more than this together */
    bool async;         /* a thread writes what ckpt_start copied */
    /* Has all ranks, and only that thread uses it. NULL: world->host, without async. */
    Comm *comm;
    int64_t to_come; /* how many saves are planned, for a warning that the disk is too small */
    /* Checkpoints from this step on were passed over as damaged: they do not count and are removed first. 0: none */
    int64_t bad_from;
    /* Besides the newest these stay: */
    int64_t keep_every; /* the checkpoints of steps that this divides; 0: none */
    /* Number of checkpoints with the lowest losses that stay, among those on the same samples. */
    int64_t keep_best;
    const char *best_set; /* the validation set whose losses these are */
    /* Values that the checkpoint holds instead of the stores': those of one rank, whose store has no memory. NULL: the
     * stores'. */
    const CkptSource *source;
} CkptOptions;

/* Outcome of a save. */
typedef struct {
    int64_t step;
    Err err;
    ErrKept why;
    double seconds; /* how long the save took, with the commit and what follows it */
} CkptOutcome;

typedef struct {
    bool open, closing; /* there is a thread; the thread is to end */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum { SAVER_IDLE, SAVER_ASKED, SAVER_ENDED } state;
    CkptMeta meta;
    CkptOutcome outcome;
} CkptSaver;

/* A checkpoint that may be removed one day. */
typedef struct {
    int64_t step;
    CkptValid valid; /* on o.best_set, without the name; a loss of NaN: not known */
} CkptKept;

typedef struct {
    CkptOptions o;
    CkptSaver saver;
    char *snapshot;        /* this rank's part of the tensors, in the order of its shard; NULL without async */
    char folder[PATH_MAX]; /* DIR/checkpoints */
    int64_t nonce;         /* stands in the names of this run's temporary folders; all ranks have the same */
    bool swept;            /* leftovers of earlier runs have been removed, or warned of */
    int states;            /* tensors of a parameter: 3, or 1 without an optimizer */
    char *chunk, *text;
    int64_t text_bytes;
    ShardBox *boxes; /* the boxes of one parameter at a time */
    int box_capacity;
    int64_t *file_bytes;   /* [world size] size of each rank's shard; 0: it writes none */
    int64_t *header_bytes; /* [world size] size of its header, padded */
    int64_t *crcs;         /* the CRCs of all shards' chunks, rank after rank, then those of all pieces */
    int64_t crc_count, total_bytes, piece_count;
    int64_t *rank_pieces; /* [world size] how many pieces each rank writes */
    int32_t *shifts;
    /* On rank 0, if keep > 0: first bad_count checkpoints from o.bad_from on, then the valid ones, ascending
     * (retain.c). */
    CkptKept *kept;
    int kept_count, kept_capacity, bad_count;
} Ckpt;

/*
 * Collective. Takes all memory that saving will need from `setup` and reads which checkpoints there are. `c` must stay
 * where it is. If the stores have no moments, checkpoints hold values only. ERR_MEMORY. ERR_INTERNAL: a parameter's
 * name has '#' or '/'.
 */
Err ckpt_open(Ckpt *c, CkptOptions o, SetupArena *setup);

/* Waits for a save that is going on. To be called before the communicators are closed. Does nothing to a Ckpt that is
 * all zero. */
void ckpt_close(Ckpt *c);

/*
 * Collective. Starts a checkpoint of the present state: with o.async the state is copied, and a thread writes the
 * copy; else all is done in here. The outcome is to be collected before the next start; all ranks get the same one.
 * ERR_STORAGE (no space, input/output error): nothing is left of this checkpoint and the earlier ones are as they were;
 * the caller may warn and go on. No-op on the null device. Fails itself if the device cannot be read.
 */
Err ckpt_start(Ckpt *c, const CkptMeta *meta);
/* False: no save was started, or (unless `wait`) it still goes on. */
bool ckpt_collect(Ckpt *c, bool wait, CkptOutcome *out);

/* How much of the host's memory o.async takes on this rank, besides what a save takes without it. */
Err ckpt_snapshot_bytes(const ParamSet *params, const World *world, int64_t *bytes);

/* bytes [world size]: the exact size of each rank's shard; 0: it writes none. The manifest comes on top. */
Err ckpt_shard_bytes(const ParamSet *params, const World *world, int64_t *bytes);

/* ---- finding ---- */

/* How often a folder is looked through anew when a checkpoint vanished while it was read: a run that goes on in this
 * folder removes old checkpoints (checkpoint.keep), and has newer ones by then. */
enum { CKPT_RESCANS = 10 };

/*
 * Finds the newest checkpoint with step < below (INT64_MAX: any) whose manifest is right and whose files have their
 * full size. *found false: there is none and never was. ERR_CKPT: there are some, but none is valid, or the newest has
 * a later format. A damaged one that was passed over is warned of, with file and reason.
 */
Err ckpt_find(const char *run_dir, int64_t below, char path[PATH_MAX], bool *found);

/* Finds the checkpoint of that step. ERR_CKPT: there is none (the message lists the steps that there are), or it is not
 * valid (the message says why). */
Err ckpt_of_step(const char *run_dir, int64_t step, char path[PATH_MAX]);

/* Calls `visit` with the newest checkpoint (ckpt_find). If that was removed meanwhile, and `visit` fails for it, calls
 * it again with what is the newest by then. */
Err ckpt_visit_newest(const char *run_dir, Err (*visit)(const char *path, void *arg), void *arg, bool *found);

/* To be called when a checkpoint that was there could not be read. If it is gone, returns an ERR_CKPT that says so,
 * else `err`. */
Err ckpt_removed(const char *path, Err err);

/* True if the run folder holds a checkpoint, valid or not. */
bool ckpt_any(const char *run_dir);

/* ---- loading ---- */

typedef struct {
    const char *path;       /* one checkpoint's folder */
    const ParamSet *params; /* registered and allocated, in any layout */
    World *world;
    Stream *stream;
    bool weights_only; /* only values are loaded: moments become 0, shifts stay */
    /* With weights_only the checkpoint may be a dense model's: tensors for which it has nothing stay. NULL: it is
     * not. */
    const Upcycle *upcycle;
} CkptLoad;

/*
 * Collective; all ranks return alike. Fills value (and m, v, shifts); padding becomes 0. *damaged says of this rank's
 * failure: true when the files are at fault, so that an older checkpoint may be tried, false when the checkpoint does
 * not fit the model. ERR_CKPT names file and reason, or the tensor and both values; the stores' contents are then
 * undefined.
 */
Err ckpt_load(const CkptLoad *l, SetupArena *setup, CkptMeta *meta, bool *damaged);

/* Reads the manifest alone. */
Err ckpt_meta(const char *path, SetupArena *setup, CkptMeta *meta);

/* Reads every byte and compares all checksums and headers with the manifest. ERR_CKPT names the file. */
Err ckpt_verify(const char *path);

/*
 * A number that depends on every bit of every tensor, on names and shapes, and on nothing else: not on the
 * layout that wrote them nor on how many files there are. Two checkpoints with the same digest hold the same
 * tensors.
 */
Err ckpt_digest(const char *path, uint64_t *out);

/* Prints for people what a checkpoint holds. ERR_CKPT: the manifest is damaged. */
Err ckpt_print(const char *path, FILE *out);

#endif
