/*
 * Checkpoints: safetensors files and a manifest in one folder, written by a commit protocol, loaded in
 * any layout.
 *
 *   DIR/checkpoints/step-00000020/shard-00000.safetensors   one per rank that owns something
 *                                 manifest.json             every piece; CRC32C per 1 MiB of each file
 *                                 manifest.crc              of manifest.json
 *   DIR/checkpoints/LATEST        a hint for people and scripts; never read here
 *
 * Keys of the shards: `NAME` for a whole value tensor, `m/NAME` and `v/NAME` for the moments of AdamW; a
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
 * this rank writes) and allocates nothing;
 * loading holds a chunk, the manifest and one shard's header besides the state. Damage anywhere is found by the
 * CRC of a chunk; those of the pieces then say which tensor it is.
 */
#ifndef MEGATRAIN_CKPT_CKPT_H
#define MEGATRAIN_CKPT_CKPT_H

#include <limits.h>
#include <stdio.h>

#include "ckpt/upcycle.h"

enum { CKPT_FORMAT = 1, CKPT_MAX_COUNTERS = 16, CKPT_MAX_VALID = 32, CKPT_NAME_MAX = 64 };

/* Of a gradient's fixed point: 2^shift and 2^-shift are normal floats, also of a step that is done again. */
enum { CKPT_SHIFT_MIN = -102, CKPT_SHIFT_MAX = 126 };

typedef struct {
    const char *name;
    int64_t value;
} CkptCounter;

/* The loss on a validation set at the checkpoint's step. */
typedef struct {
    const char *set; /* its name; "": the only one */
    double loss;     /* a checkpoint has finite ones only */
} CkptValid;

/* All of a run's state that is not a tensor. Texts belong to the caller, or to the arena of a load. */
typedef struct {
    int64_t step, samples, tokens; /* done; samples = the position in the data order */
    int64_t seed;
    int64_t tp_blocks, seq_blocks, attn_block; /* canonical blocks (docs/determinism.md) */
    const char *reproducible;                  /* run.reproducible as it was resolved */
    const char *program;                       /* version */
    const char *config;                        /* the resolved configuration as INI text */
    const char *data;                          /* identity of the training data */
    const char *overrides; /* keys that changed on the way (train/overrides.h), a line each; "": none */
    CkptCounter counters[CKPT_MAX_COUNTERS]; /* further integers, by name: skipped steps, updates done, ... */
    int counter_count;
    CkptValid valid[CKPT_MAX_VALID];
    int valid_count; /* 0: the step was not evaluated */
} CkptMeta;

int64_t ckpt_counter(const CkptMeta *m, const char *name, int64_t otherwise);

/* Locks a run folder (made if missing) for the life of the process: DIR/lock. ERR_STORAGE: held by another
 * run (named), not writable. */
Err ckpt_lock(const char *run_dir, int *fd_out);

/* ---- saving ---- */

typedef struct {
    const char *run_dir;
    const ParamSet *params;
    World *world;
    Stream *stream;
    int keep;           /* checkpoints to keep, never fewer than 2; 0 = all */
    int64_t meta_bytes; /* most that the texts of a CkptMeta will take together */
    bool async;         /* a thread writes what ckpt_start copied */
    Comm *comm;      /* of all ranks, used by that thread and nobody else; NULL: world->host, without async */
    int64_t to_come; /* saves that are planned, for a warning of too small a disk */
    int64_t bad_from; /* steps from here on, passed over as damaged, do not count and go first; 0 = none */
    /* besides the newest: */
    int64_t keep_every;   /* those of steps that this divides; 0 = none */
    int64_t keep_best;    /* so many, with the lowest loss */
    const char *best_set; /* on this validation set */
} CkptOptions;

/* What became of a save. */
typedef struct {
    int64_t step;
    Err err;
    ErrKept why;
    double seconds; /* of writing, up to the commit and what follows it */
} CkptOutcome;

typedef struct {
    bool open, closing; /* there is a thread; it is to end */
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
    double loss; /* on o.best_set; NaN: not known */
} CkptKept;

typedef struct {
    CkptOptions o;
    CkptSaver saver;
    char *snapshot; /* what this rank writes of its tensors, in the order of its shard; NULL without async */
    char folder[PATH_MAX]; /* DIR/checkpoints */
    int64_t nonce;         /* of this run's temporary folders, agreed by all ranks */
    bool swept;            /* what earlier runs left has been removed, or warned of */
    int states;            /* 3, or 1 without an optimizer */
    char *chunk, *text;
    int64_t text_bytes;
    ShardBox *boxes; /* of one parameter */
    int box_capacity;
    int64_t *file_bytes;   /* [world size]: of every rank's shard; 0 = it writes none */
    int64_t *header_bytes; /* [world size], padded */
    int64_t *crcs;         /* of all shards' chunks, rank after rank; then of all pieces */
    int64_t crc_count, total_bytes, piece_count;
    int64_t *rank_pieces; /* [world size] */
    int32_t *shifts;
    CkptKept *kept; /* bad_count of o.bad_from, then the valid ones, ascending (retain.c; rank 0, keep > 0) */
    int kept_count, kept_capacity, bad_count;
} Ckpt;

/*
 * Collective. Takes all memory that saving will need from `setup`, reads which checkpoints there are. `c` must stay
 * where it is.
 * Stores without moments: checkpoints hold values only. ERR_MEMORY, ERR_INTERNAL for a parameter name with '#'
 * or '/'.
 */
Err ckpt_open(Ckpt *c, CkptOptions o, SetupArena *setup);

/* Waits for a save that is going on. Before the communicators are closed. Does nothing to a Ckpt that is all zero. */
void ckpt_close(Ckpt *c);

/*
 * Collective. Starts a checkpoint of the present state: with o.async the state is copied, and a thread writes the
 * copy; else all is done in here. The outcome is to be collected before the next start; of all ranks it is the same.
 * ERR_STORAGE (no space, input/output error): nothing is left of this checkpoint and the earlier ones are as they were;
 * the caller may warn and go on. No-op on the null device. Fails itself if the device cannot be read.
 */
Err ckpt_start(Ckpt *c, const CkptMeta *meta);
/* False: no save was started, or (unless `wait`) it still goes on. */
bool ckpt_collect(Ckpt *c, bool wait, CkptOutcome *out);

/* What o.async takes of the host's memory on this rank, besides what is taken without. */
Err ckpt_snapshot_bytes(const ParamSet *params, const World *world, int64_t *bytes);

/* Bytes of each rank's shard: [world size] and exact; 0: it writes none. The manifest comes beside them. */
Err ckpt_shard_bytes(const ParamSet *params, const World *world, int64_t *bytes);

/* ---- finding ---- */

/* How often a folder is looked through anew from which a checkpoint vanished while it was read: a run that goes on in
 * it removes those beyond checkpoint.keep, and has newer ones. */
enum { CKPT_RESCANS = 10 };

/*
 * The newest checkpoint with step < below (INT64_MAX: any) whose manifest is right and whose files are there
 * in full size. *found false: there is none and never was. ERR_CKPT: there are, but none is valid; or the
 * newest is of a later format. Damaged ones that were passed over are warned of by file and reason.
 */
Err ckpt_find(const char *run_dir, int64_t below, char path[PATH_MAX], bool *found);

/* The checkpoint of that step. ERR_CKPT: there is none, with the steps that there are, or it is not valid, and why. */
Err ckpt_of_step(const char *run_dir, int64_t step, char path[PATH_MAX]);

/* Calls `visit` with the newest (ckpt_find); if it fails on one that was removed meanwhile, with the newest by then. */
Err ckpt_visit_newest(const char *run_dir, Err (*visit)(const char *path, void *arg), void *arg, bool *found);

/* After a failure to read a checkpoint that was there: ERR_CKPT that says so if it is not any more, else `err`. */
Err ckpt_removed(const char *path, Err err);

/* True if the run folder holds a checkpoint, valid or not. */
bool ckpt_any(const char *run_dir);

/* ---- loading ---- */

typedef struct {
    const char *path;       /* one checkpoint's folder */
    const ParamSet *params; /* registered, allocated; of any layout */
    World *world;
    Stream *stream;
    bool weights_only; /* values alone: moments become 0, shifts stay */
    const Upcycle
        *upcycle; /* of weights alone: from a dense model; what it has nothing for stays. NULL: no */
} CkptLoad;

/*
 * Collective; all ranks return alike. Fills value (and m, v, shifts); padding becomes 0. *damaged (of this
 * rank's outcome): true when the files are at fault, so that an older checkpoint may be tried, false when the
 * checkpoint does not fit the model. ERR_CKPT naming file and reason, or tensor and both values; the stores'
 * contents are then undefined.
 */
Err ckpt_load(const CkptLoad *l, SetupArena *setup, CkptMeta *meta, bool *damaged);

/* The manifest alone. */
Err ckpt_meta(const char *path, SetupArena *setup, CkptMeta *meta);

/* Reads every byte: all checksums, all headers against the manifest. ERR_CKPT naming the file. */
Err ckpt_verify(const char *path);

/*
 * A number that depends on every bit of every tensor, on names and shapes, and on nothing else: not on the
 * layout that wrote them nor on how many files there are. Two checkpoints with the same digest hold the same
 * tensors.
 */
Err ckpt_digest(const char *path, uint64_t *out);

/* What it holds, for people. ERR_CKPT when the manifest is damaged. */
Err ckpt_print(const char *path, FILE *out);

#endif
