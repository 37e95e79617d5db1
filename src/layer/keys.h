/*
 * Attention whose keys come block by block: this rank's own, those of other ranks and of earlier slices
 * (docs/context.md has the picture). Shared by keys*.c alone.
 */
#ifndef MEGATRAIN_LAYER_KEYS_H
#define MEGATRAIN_LAYER_KEYS_H

#include "layer/context.h"
#include "layer/reshard.h"

typedef struct KeyWalk KeyWalk;

/*
 * Source of the keys of a slice, block by block, and in backward the destination of their gradients. (A whole sequence
 * is one slice.) In scratch: what `open` takes there is released behind the slice's last block, what `begin` takes
 * stays until the caller releases it.
 */
typedef struct {
    bool in_parts;                  /* several blocks of a slice */
    Err (*open)(KeyWalk *w);        /* for slice w->slice, of which w->kv are this rank's; sets w->blocks */
    Err (*next)(KeyWalk *w, int i); /* fills w->at for the slice's block i, which then is there */
    /* in backward */
    Err (*begin)(KeyWalk *w);  /* before the first block */
    Err (*give)(KeyWalk *w);   /* this rank's queries on w->at: adds to dq, and sends dk and dv on their way */
    Err (*finish)(KeyWalk *w); /* behind the last block: dk and dv of this rank's keys of the slice at work */
} KeySource;

/* Decisions before the first message, for one layer. */
typedef struct {
    ReshardPlan change;
    Comm *ranks; /* ranks that then have zigzag parts of each slice; NULL: every rank has whole slices */
    const KeySource *source;
} KeyPlan;

/* The plan of the layer at work. It follows from c->block.context, c->cut, the ranks of cp, slices, and whether bits
 * are promised. */
KeyPlan key_plan(const Ctx *c);

/* ---- the walk (keys.c) ---- */

/* Keys (0) and values (1) that one call of attention takes. */
typedef struct {
    Tensor kv[2]; /* [B, positions, K, C]; not to be read unless seen */
    Spans span;
    int part;  /* part of a ring; -1: all of the slice */
    bool seen; /* some of this rank's queries see it */
    bool more; /* others that are seen come behind it */
} KeyBlock;

/* Parts of a slice, and the ranks that see them (keys_ring.c): rank i of n has the parts i and 2 n - 1 - i. */
typedef struct {
    Comm *group;
    int parts, rank;
    int64_t length, window; /* positions of a part */
    int64_t first, behind;  /* position of the first key, and from there to the first query of all ranks */
    int64_t half[2][4];     /* shapes of a part's keys and of its values: [B, length, K, C] */
    DType dtype;
} Ring;

struct KeyWalk {
    Ctx *c;
    const KeyPlan *plan;
    int64_t window;
    Tensor own[2];         /* this rank's keys and values of the slice at work */
    Spans span;            /* their positions */
    attention_bwd_args *a; /* in backward, of own queries; NULL in forward */
    SliceGrads mine;       /* in backward: what the slice at work gives to its own keys (keys_sums.c) */
    int slice;             /* the slice whose keys come */
    bool seen;             /* some query of the slice at work sees it, on any rank */
    int block, blocks;     /* block of this slice at work; number of blocks */
    Tensor kv[2];
    KeyBlock at;
    ArenaMark mark;
    /* what a source in parts keeps */
    Ring ring;
    Tensor held[2];           /* parts, [2 parts, count] each */
    bool moving;              /* an exchange is on its way */
    Tensor pair, sums, share; /* keys_rotate.c */
};

/* ---- parts (keys_ring.c) ---- */

/* The ring of the ranks that share slice w->slice. */
Ring ring_of(const KeyWalk *w);
/* Elements of a part: keys and values. */
int64_t ring_part_count(const Ring *r);
/* Has `rank` a query that may see a key of the part, by causality and window? */
bool ring_sees(const Ring *r, int rank, int part);
/* Keys (0) or values (1) of a part, which is one row of `parts`, of any dtype. */
Tensor ring_half(const Ring *r, Tensor parts, int row, int half);
/* Both parts of this rank, from rows w->kv to parts [2, count]. */
Err ring_pack(const KeyWalk *w, Tensor parts);
/* Part `part`, whose keys and values are a row of `parts`, is at work. */
void ring_put(KeyWalk *w, int part, Tensor parts, int row);

/* In the order of positions. */
Err position_open(KeyWalk *w);
Err position_next(KeyWalk *w, int part);

/* In the order of arrival, with the gradients that follow the parts (keys_rotate.c). */
Err arrival_open(KeyWalk *w);
Err arrival_next(KeyWalk *w, int block);
Err arrival_begin(KeyWalk *w);
Err arrival_give(KeyWalk *w);
Err arrival_finish(KeyWalk *w);

/* ---- gradients that wait for their owner (keys_sums.c) ---- */

/* Functions of a source whose gradients are summed where they are made. */
Err sums_begin(KeyWalk *w);
Err sums_give(KeyWalk *w);
Err sums_finish(KeyWalk *w);
/* How many gradients, each as large as a rank's keys of a slice, wait in a layer at most. */
int sums_places(const Ctx *c);
/* The op's arguments for own queries and the keys at work. */
attention_bwd_args keys_bwd_args(const KeyWalk *w, Tensor dk, Tensor dv);

#endif
