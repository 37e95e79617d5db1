/*
 * What each rank writes: its pieces in file order, the shard file made of them, their lines in the manifest.
 * Every function takes a rank: which pieces a rank has follows from the registries of all pipeline ranks (ParamSet), so
 * rank 0 describes the files of all.
 */
#ifndef MEGATRAIN_CKPT_PIECES_H
#define MEGATRAIN_CKPT_PIECES_H

#include "ckpt/manifest.h"

/* One piece after the other: all values, then all m, then all v. One iteration at a time per Ckpt. */
typedef struct {
    const Ckpt *c;
    GridCoords at;
    ParamPlace place;          /* the rank's */
    int state, replica, param; /* of the current piece */
    int box, box_count;
    Param shard;           /* the parameter as that rank has it */
    Box piece;             /* global, plain */
    const ShardBox *boxes; /* [count], whose rows make up the piece */
    int count;
} PieceIter;

void piece_first(PieceIter *it, const Ckpt *c, int rank);
bool piece_next(PieceIter *it);                        /* false: no more */
const float *piece_data(const PieceIter *it, int box); /* on the device, if the piece is this rank's */

/* Takes what iterating needs, the first thing of a Ckpt whose options are set. */
Err pieces_open(Ckpt *c, SetupArena *setup);
int64_t pieces_bytes(const Ckpt *c, int rank); /* of a rank's tensors */

/* Fills c->header_bytes, file_bytes, and what is summed from them. */
Err pieces_measure(Ckpt *c);

void shard_name(char out[CKPT_NAME_MAX], int rank);

/* save.c. What ckpt_open does but for the thread, of a Ckpt whose options are set; and writes the checkpoint of what
 * ckpt_start took, on the thread that calls. */
Err save_open(Ckpt *c, SetupArena *setup);
Err save_now(Ckpt *c, const CkptMeta *meta);

/* Which checkpoints stay (retain.c), of rank 0: takes the list of those there are; enters one that was written, and
 * removes what is not to be kept, with a warning where it cannot. */
Err retain_open(Ckpt *c, SetupArena *setup);
void retain(Ckpt *c, const CkptMeta *written);
int64_t retain_to_come(
    const Ckpt *c); /* checkpoints that there will be more than now, at most, of those that go again */

/* Writes and syncs this rank's shard in `dir`, and its slice of c->crcs. ERR_IO. */
Err shard_write(Ckpt *c, const char *dir);

/* Writes and syncs manifest.json and manifest.crc in `dir`; the CRC of the former in *crc. */
Err manifest_write(Ckpt *c, const CkptMeta *meta, const char *dir, uint32_t *crc, int64_t *size_bytes);

#endif
