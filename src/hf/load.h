/* checkpoint.load of a folder of Hugging Face's: each rank reads the parts that it keeps, in any layout. */
#ifndef MEGATRAIN_HF_LOAD_H
#define MEGATRAIN_HF_LOAD_H

#include "ckpt/ckpt.h"
#include "config/config.h"

/*
 * Collective; all ranks return alike. Fills the stores' values, as ckpt_load with weights_only: path, params, world and
 * stream are that one's. Where the folder's config.json says another model than `cfg` there is a warning. ERR_CKPT: the
 * folder is damaged, or does not fit the model; ERR_CONFIG: it holds a model that is not known.
 */
Err hf_load(const CkptLoad *l, const Config *cfg);

#endif
