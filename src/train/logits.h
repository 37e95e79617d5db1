/*
 * Logits of sequences of token ids, as a file that others read: `megatrain eval --ids FILE --logits OUT`.
 */
#ifndef MEGATRAIN_TRAIN_LOGITS_H
#define MEGATRAIN_TRAIN_LOGITS_H

#include "train/run.h"

/*
 * ids: a text file with a sequence a line, ids separated by blanks, as many on each line, at most model.seq.
 * out: becomes a .npy file of fp32 [sequences, positions, vocabulary without padding]; rank 0 writes it. For runs
 * opened as RUN_LOGITS. ERR_DATA naming file and line, or on all ranks those that read other ids. ERR_STORAGE: what was
 * at `out` before is still there.
 */
Err logits_write(Run *r, const char *ids, const char *out);

#endif
