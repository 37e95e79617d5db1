/*
 * A model in a folder of Hugging Face's, whose every tensor is known to be what it should be, and reading boxes of our
 * parameters out of it, whatever their files store: fp32, bf16, fp16, fp8 (e4m3) in blocks of rows and columns with a
 * scale each, or MXFP4.
 */
#ifndef MEGATRAIN_HF_WEIGHTS_H
#define MEGATRAIN_HF_WEIGHTS_H

#include "hf/folder.h"
#include "hf/tensors.h"

typedef struct {
    HfFolder folder;
    HfNaming naming;
    int64_t block_rows, block_cols; /* blocks of fp8 */
    int64_t mtp_layers;
} HfWeights;

/*
 * Opens a folder that holds a model of this configuration, which `whole` registers. ERR_CKPT, one line that names the
 * tensor: one is missing or too many, has another shape, or a dtype that is none of weights. hf_weights_close also
 * after an error.
 */
Err hf_weights_open(const char *path, const HfConfig *hf, const Config *cfg, const ParamRegistry *whole, SetupArena *a,
                    HfWeights *out);
void hf_weights_close(HfWeights *m);

/* Tensors that the files hold twice (hf_twin) are alike. Reads them whole. ERR_CKPT. */
Err hf_weights_check_twins(const HfWeights *m, const ParamRegistry *whole);

/*
 * Reads a box of a parameter, in plain order: element (r, c) of it goes to out[r * ld + c]. p: as `whole` has it. From
 * any thread. ERR_CKPT.
 */
Err hf_weights_read(const HfWeights *m, const Param *p, Box box, float *out, int64_t ld);

#endif
