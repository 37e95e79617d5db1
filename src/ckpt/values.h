/*
 * Reading boxes of a checkpoint's weights, from several threads, in memory that does not depend on its size but for a
 * byte a chunk. No number comes out of a chunk that is not as it was written; what nobody reads is not checked.
 */
#ifndef MEGATRAIN_CKPT_VALUES_H
#define MEGATRAIN_CKPT_VALUES_H

#include "ckpt/ckpt.h"

typedef struct CkptValues CkptValues;

/* Takes all memory from `a`; ckpt_values_close also after an error. ERR_CKPT names the file. */
Err ckpt_values_open(const char *path, SetupArena *a, CkptValues **out);
void ckpt_values_close(CkptValues *v);

/* A box of a parameter, in plain order: element (r, c) of it goes to out[r * ld + c]. ERR_CKPT: the checkpoint has no
 * such tensor, cannot be read or is damaged there. */
Err ckpt_values_read(const CkptValues *v, const char *name, Box box, float *out, int64_t ld);

/* ERR_CKPT: the checkpoint's tensors have other names or shapes than the registry's, which is a whole model's. */
Err ckpt_values_fit(const CkptValues *v, const ParamRegistry *whole);

/* The shape of a tensor, columns 1 for vectors. ERR_CKPT: it is not there, or the manifest is damaged. */
Err ckpt_tensor_shape(const char *path, const char *name, int64_t shape[2]);

#endif
