/*
 * Every op of device/ops.def at the shapes of training, to be timed (measure/calibrate.h, bench/cuda/rooflines.c):
 * which arguments, and the fewest bytes that the call must move (each input read once, each output written once, what
 * is changed in place both).
 */
#ifndef MEGATRAIN_MEASURE_CASES_H
#define MEGATRAIN_MEASURE_CASES_H

#include "device/ops.h"

/* A model's widths and one micro-batch of it; V is the padded vocabulary, P the elements of flat buffers. */
typedef struct {
    const char *name;
    int64_t B, T, D, F, V, P;
    int64_t H, K, C;       /* query heads, key/value heads of the grouped cases, head width */
    int64_t experts, topk; /* of a mixture; an expert is F / topk wide, so that a token meets as much as without */
    bool skewed;           /* the first experts have most tokens: the first one 1 / sqrt(experts) of all */
} Dims;

/* Contents of a tensor: timing on zeros flatters matrix units, and indices must be valid. */
typedef enum {
    FILL_UNIFORM,
    FILL_POSITIVE,
    FILL_TOKENS,
    FILL_POSITIONS,
    FILL_DOCUMENTS, /* first positions of eight documents a sample */
    FILL_SAMPLES,
    FILL_EXPERTS, /* each as often as any other, unless `skewed` */
    FILL_ZERO,
    FILL_COUNT
} Fill;

/* Products of the model; O outputs, I inputs. */
typedef enum { NO_SHAPE, QKV, PROJ, FC1, FC2, HEAD } LinearShape;

typedef struct {
    const char *what;
    LinearShape shape;
    int option; /* as the op's make function reads it */
} Case;

enum { PATTERN_ITEMS = 1 << 22 }; /* fills repeat after so many elements */

typedef struct {
    Device *dev;
    Arena *arena;
    const Dims *d;
    DType dtype, acc; /* compute; gradients' accumulators, F32 or I64 */
    const Case *c;
    void *pattern[FILL_COUNT][DTYPE_COUNT]; /* device memory, where there is one; see maker_open */
    int32_t *tokens;                        /* host copy of the token pattern */
    int64_t pattern_items, bytes;           /* bytes: of the arguments made last */
    Tensor factors[2];                      /* factors of their codes */
} Maker;

typedef union {
#define OP(name, flop, args) name##_args name;
#include "device/ops.def"
#undef OP
} AnyArgs;

/* Measurements of an op. An op without them does not link: see BENCH (make_case.h). */
typedef struct {
    Err (*make)(Maker *m, AnyArgs *a); /* makes the arguments of m->c */
    const Case *cases;
    int count;
} OpCases;

extern const OpCases *const bench_ops[OP_COUNT];

/* Fills the patterns, in the maker's arena. pattern_items: a multiple of T, PATTERN_ITEMS say. ERR_MEMORY. */
Err maker_open(Maker *m, Device *dev, Arena *arena, const Dims *d, DType dtype, DType acc, int64_t pattern_items);
void maker_close(Maker *m); /* the arena is the caller's to release */

/* A dense tensor in the arena with such contents; the op moves it `times` times. */
Err maker_tensor(Maker *m, Tensor *out, int times, Fill fill, DType t, int ndim, const int64_t *dim);

/* Arguments of one case of an op in the arena, filled; bytes in m->bytes. ERR_MEMORY. */
Err maker_make(Maker *m, OpId id, const Case *c, AnyArgs *out);

/* The op itself, through op_begin and the device's table. */
Err run_any(Stream *s, OpId id, const AnyArgs *a);

#endif
