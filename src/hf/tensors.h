/*
 * The name of each of our parameters in Hugging Face's files, and the place of each of its elements there.
 *
 * A parameter is made of parts. A part is a box of it in plain order (param/shard.h) and lies in one of their tensors,
 * where an element of the box is found by two strides:
 *
 *   element (r, c) of the box  =  element  first + r * row + c * column  of the tensor
 *
 *   a copy                     row = width of the tensor, column = 1
 *   GPT-2's Conv1D             row = 1, column = width: the transpose
 *   DeepSeek's rotary pairs    rows 0, 2, ... and rows 1, 3, ... of a head are two parts, row = 2 * width
 *   GGUF's rotary pairs        the same, of queries and keys, in Llama's classes
 *   gpt-oss's gate and up      of each expert the transpose, in turn: row = 2, column = width
 *
 * So the same table reads and writes, and whoever wants a box of a parameter reads nothing else. The parts of one of
 * their tensors follow one another. docs/huggingface.md has the table for users.
 */
#ifndef MEGATRAIN_HF_TENSORS_H
#define MEGATRAIN_HF_TENSORS_H

#include "hf/class.h"
#include "param/shard.h"

enum { HF_NAME_MAX = 160, HF_DIMS = 4 };

/* Facts that names and places depend on. */
typedef struct {
    HfClass kind;
    const char *prefix; /* before all names but the head's: "model." */
    bool gguf;          /* names and places of a GGUF file */
    bool halves;        /* DeepSeek's rotary pairs are no neighbours in theirs either: rope_interleave = false,
                           MiniCPM3 */
    bool own_norms;     /* layers in parallel, and each has a norm */
    bool stacked;       /* all experts of a layer are one tensor, where a class has them in either way */
    bool as_saved; /* Kimi Linear, OLMo Hybrid: names and cuts as transformers saves them, not the published ones */
    bool mxfp4;    /* experts are [E, outputs, inputs], as their blocks decode */
    int64_t layers, experts, heads, kv_heads, head_dim;
    int64_t turning;             /* columns of a head that turn */
    int64_t nope, rope, kv_rank; /* latent attention */
    struct {
        int64_t key_heads, value_heads, key, value; /* Gated DeltaNet: heads, and their widths */
    } delta;
    int64_t first_rows, last_rows; /* of two parameters in one tensor: Win and Wsmall of a mixer with states */
    int64_t kda_head;              /* width of a head */
    bool tied;
    /* Divisor of the last norm with muP: their norm is ours divided by it, so their logits need no multiplier. */
    float width;
} HfNaming;

typedef struct {
    char name[HF_NAME_MAX];
    int ndim;
    int64_t shape[HF_DIMS]; /* shape of their tensor */
    Box box;
    int64_t first, row, column;
    /* In a norm: theirs = ours / width - more. Gemma's norms multiply by 1 + w. */
    float width, more;
} HfPart;

/* Are its numbers not just theirs, in another place? */
static inline bool hf_part_differs(const HfPart *p) { return p->more > 0 || p->width < 1 || p->width > 1; }

/* Names with that prefix; NULL: as transformers writes them. */
HfNaming hf_naming(HfClass kind, const Config *cfg, const char *prefix);

/* The naming of a GGUF file (gguf.h); false: it has no names for the class. */
bool hf_naming_gguf(HfClass kind, const Config *cfg, HfNaming *out);

/* The prefixes that names of a class may have, those that transformers writes first; NULL behind the last. */
const char *const *hf_prefixes(HfClass kind, bool wrapped);

/* How many parts a parameter has; 0: the class has no tensor for it, it is 0 there. hf_part_step: after how many of
 * them the same tensors come again, which hold several matrices each. */
int hf_part_count(const HfNaming *n, const Param *p);
/* Its numbers stand in a tensor behind those of the parameter before it. */
bool hf_joins(const HfNaming *n, const Param *p);
int hf_part_step(const HfNaming *n, const Param *p);
HfPart hf_part(const HfNaming *n, const Param *p, int index);

/* Parts outside of [*first, *end) have nothing of rows [row, row_end). */
void hf_part_range(const HfNaming *n, const Param *p, int64_t row, int64_t row_end, int *first, int *end);

/* Tensors that hold a parameter of ours once more, such as a tied head: *name is that of the tensor, *ours that of the
 * parameter. False: there is no such number. Files may lack those that are not `written`. */
typedef struct {
    char name[HF_NAME_MAX], ours[PARAM_NAME_MAX];
    bool written;
} HfTwin;
bool hf_twin(const HfNaming *n, int64_t mtp_layers, int index, HfTwin *out);

/* A tensor that is not read: rotary tables, masks, an image tower; modules of multi-token prediction of a model that is
 * to have none. */
bool hf_ignored(const HfNaming *n, bool wrapped, int64_t mtp_layers, const char *name);

#endif
