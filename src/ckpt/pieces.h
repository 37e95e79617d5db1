/*
 * A rank's part of a checkpoint: its pieces in file order, the shard file that they make, and their lines in the
 * manifest. Every function takes a rank. Its pieces follow from the registries of all pipeline ranks (ParamSet), so
 * rank 0 describes the files of all.
 */
#ifndef MEGATRAIN_CKPT_PIECES_H
#define MEGATRAIN_CKPT_PIECES_H

#include "ckpt/manifest.h"

/* Goes through the pieces of a rank: all values, then all m, then all v. A Ckpt has one iteration at a time. */
typedef struct {
    const Ckpt *c;
    GridCoords at;
    ParamPlace place;          /* where the rank stands */
    int state, replica, param; /* owner of the current piece */
    int box, box_count;
    Param shard;           /* the parameter as that rank has it */
    Box piece;             /* in the global tensor, in plain order */
    const ShardBox *boxes; /* [count]; their rows make up the piece */
    int count;
} PieceIter;

void piece_first(PieceIter *it, const Ckpt *c, int rank);
bool piece_next(PieceIter *it);                       /* false: no more */
const void *piece_data(const PieceIter *it, int box); /* device memory; the piece must be this rank's */
DType piece_dtype(const PieceIter *it);

/* Takes the memory that iterating needs. It is the first call for a Ckpt whose options are set. */
Err pieces_open(Ckpt *c, SetupArena *setup);
int64_t pieces_bytes(const Ckpt *c, int rank); /* bytes of tensors that the rank writes */

/* Fills c->header_bytes, file_bytes and their sums. */
Err pieces_measure(Ckpt *c);

void shard_name(char out[CKPT_NAME_MAX], int rank);

/* save.c. save_open does what ckpt_open does, but for the thread, on a Ckpt whose options are set. save_now writes the
 * checkpoint that ckpt_start was asked for, on the thread that calls. */
Err save_open(Ckpt *c, SetupArena *setup);
Err save_now(Ckpt *c, const CkptMeta *meta);

/* Retention of checkpoints (retain.c); rank 0 calls these. retain_open lists those that there are. retain enters one
 * that was written and removes those that need not stay, with a warning where it cannot. */
Err retain_open(Ckpt *c, SetupArena *setup);
void retain(Ckpt *c, const CkptMeta *written);
/* How many more checkpoints than now there will be at most at one time. Those of keep_every, which stay for good, are
 * not counted. */
int64_t retain_to_come(const Ckpt *c);

/* Writes and syncs this rank's shard in `dir`, and fills this rank's part of c->crcs. ERR_IO. */
Err shard_write(Ckpt *c, const char *dir);

/* Writes and syncs manifest.json and manifest.crc in `dir`. *crc: the CRC of manifest.json. */
Err manifest_write(Ckpt *c, const CkptMeta *meta, const char *dir, uint32_t *crc, int64_t *size_bytes);

#endif
