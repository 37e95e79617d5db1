/*
 * A checkpoint's weights as the tensors that others' files have, streamed one after the other: several threads make
 * pieces of some MiB (jobs.h), and memory does not depend on the model's size. The list of tensors follows from our
 * parameters and the table of names (tensors.h). Whoever writes a kind of file (export.c, gguf.c) takes the list for
 * its header and then the bytes, in the list's order.
 */
#ifndef MEGATRAIN_HF_THEIRS_H
#define MEGATRAIN_HF_THEIRS_H

#include "ckpt/chunks.h"
#include "ckpt/values.h"
#include "data/progress.h"
#include "hf/jobs.h"
#include "hf/tensors.h"
#include "param/odd.h"

/* How numbers are stored. Q8_0: blocks of 32 of a row, an f16 scale and 32 bytes each. */
typedef enum { STORED_F32, STORED_BF16, STORED_F16, STORED_Q8_0 } Stored;

/* Bytes of so many elements; of Q8_0 whole blocks. */
int64_t stored_bytes(Stored s, int64_t count);

typedef struct {
    const Param *param, *rest;        /* rest: whose numbers stand behind (hf_joins); NULL: nobody's */
    int first_part, run, step, parts; /* of the parameter's parts `run` from the first on, and again after each step */
    const char *name;                 /* name of a twin; NULL: the first part's */
    Stored stored;
    int64_t count, width, job_rows; /* elements; of a row; rows of a job */
    int64_t first_job;
} Theirs;

typedef struct {
    const char *from; /* a checkpoint's folder */
    const ParamRegistry *whole;
    int64_t mtp_layers;
    HfNaming naming;
    bool twins; /* tensors that the files hold once more are listed too */
    /* How the numbers of a tensor are stored, from its name and width. */
    Stored (*stored)(const void *user, const Param *p, const char *name, int64_t width);
    const void *user;
    int threads;
} TheirsSpec;

typedef struct {
    TheirsSpec spec;
    CkptValues *values;
    Theirs *items;
    int64_t count, total_bytes; /* number of tensors; bytes of all data */
    int64_t job_count, slot_floats, done_bytes;
    OddValues odd;
    Jobs *jobs;
    Progress progress;
} TheirsList;

/* Checks the checkpoint and makes the list, in memory of `a`. theirs_close also after an error. ERR_CKPT: the
 * checkpoint is damaged, or has numbers that the class has no place for. */
Err theirs_open(const TheirsSpec *spec, SetupArena *a, TheirsList *out);
void theirs_close(TheirsList *l);

void theirs_name(const TheirsList *l, const Theirs *t, char out[HF_NAME_MAX]);
/* Its first part, which has its shape. */
HfPart theirs_part(const TheirsList *l, const Theirs *t);
int64_t theirs_bytes(const Theirs *t);

/* Starts the threads; afterwards theirs_put writes the data of each tensor of the list from `first` on, in its order.
 * The last one warns of weights among them that are NaN or infinite. ERR_CKPT: a number has no place in what is stored.
 */
Err theirs_start(TheirsList *l, int64_t first, SetupArena *a);
Err theirs_put(TheirsList *l, const Theirs *t, ChunkWriter *w);

#endif
