/*
 * A rank's work in a step: ops by what their time depends on, and bytes sent, counted over a dry run of a few
 * micro-batches. Counted once, it can be timed by any rates.
 */
#ifndef MEGATRAIN_BENCH_TALLY_H
#define MEGATRAIN_BENCH_TALLY_H

#include <string.h>

#include "cost/op_ear.h"
#include "engine/trainer_open.h"

enum { TALLY_LINES = 160, TALLY_RANKS = 16 };

/*
 * Calls of one op. side: of a product [rows, outputs, inputs, experts], experts 0 where it is no grouped one; of
 * attention [queries, keys, columns of a query, window].
 */
typedef struct {
    OpId id;
    int64_t side[4];
    bool fp32;
    double calls, bytes, flop;
} TallyLine;

typedef struct {
    OpEar ear; /* the first member: by it an op finds the tally */
    TallyLine line[TALLY_LINES];
    int lines;
    CommWork sent[WORLD_COMMS][COMM_KIND_COUNT];
    int size[WORLD_COMMS];
    int64_t params; /* of the model */
} Tally;

static inline Tensor tally_arg(OpId id, const void *args, const char *name)
{
    const OpInfo *info = op_info(id);
    for (int i = 0; i < info->field_count; i++)
        if (!strcmp(info->fields[i].name, name))
            return *(const Tensor *)((const char *)args + info->fields[i].offset);
    return (Tensor){ 0 };
}

static inline int64_t tally_rows(Tensor t) { return t.expected ? t.expected : tensor_rows(t); }

static inline bool is_product(OpId id)
{
    return id == OP_linear_fwd || id == OP_linear_dx || id == OP_linear_dw;
}
static inline bool is_grouped(OpId id)
{
    return id == OP_grouped_fwd || id == OP_grouped_dx || id == OP_grouped_dw;
}
static inline bool is_attention(OpId id) { return id == OP_attention_fwd || id == OP_attention_bwd; }

/* FLOP of attention as if it had no window: kernels that are not fused work on all causal keys, and others.h takes the
 * window off for those that are. */
static inline double tally_causal_flop(OpId id, const void *args, double flop)
{
    const attention_fwd_args *fwd = args;
    const attention_bwd_args *bwd = args;
    const bool forward = id == OP_attention_fwd;
    const Spans q = forward ? fwd->q_span : bwd->q_span, k = forward ? fwd->k_span : bwd->k_span;
    const int64_t window = forward ? fwd->window : bwd->window, seen = spans_pairs(q, k, window);
    return seen ? flop * (double)spans_pairs(q, k, 0) / (double)seen : flop;
}

static inline TallyLine tally_call(OpId id, const void *args, double flop)
{
    const OpInfo *info = op_info(id);
    TallyLine l = { .id = id, .calls = 1, .flop = flop };
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor t = *(const Tensor *)((const char *)args + f->offset);
        const double used = t.expected ? (double)t.expected / (double)t.dim[0] : 1;
        if (t.data) l.bytes += used * (double)tensor_bytes(t) * (f->read + f->written);
    }
    if (is_product(id) || is_grouped(id)) {
        const bool dw = id == OP_linear_dw || id == OP_grouped_dw;
        const Tensor w = tally_arg(id, args, dw ? "dw" : "w");
        const Tensor x = tally_arg(id, args, id == OP_linear_fwd || id == OP_grouped_fwd ? "x" : "dy");
        const int first = w.ndim - 2;
        l.side[0] = tally_rows(x), l.side[1] = w.dim[first], l.side[2] = w.dim[first + 1];
        l.side[3] = is_grouped(id) ? w.dim[0] : 0;
        l.fp32 = x.dtype == F32;
    }
    if (is_attention(id)) {
        l.flop = tally_causal_flop(id, args, flop);
        const Tensor q = tally_arg(id, args, "q"), k = tally_arg(id, args, "k");
        l.side[0] = q.dim[1], l.side[1] = k.dim[1], l.side[2] = q.dim[3];
        l.side[3] = id == OP_attention_fwd ? ((const attention_fwd_args *)args)->window
                                           : ((const attention_bwd_args *)args)->window;
    }
    return l;
}

static inline void tally_op(OpEar *ear, OpId id, const void *args, double flop)
{
    Tally *t = (Tally *)(void *)ear;
    const TallyLine call = tally_call(id, args, flop);
    TallyLine *l = t->line;
    while (l < t->line + t->lines &&
           (l->id != id || memcmp(l->side, call.side, sizeof l->side) != 0 || l->fp32 != call.fp32))
        l++;
    if (l == t->line + t->lines) {
        ASSERT(t->lines < TALLY_LINES);
        t->lines++;
        *l = call;
    } else l->calls++, l->bytes += call.bytes, l->flop += call.flop;
}

static inline Err tally_step(Trainer *t, Tally *out)
{
    StepReport report;
    *out = (Tally){ .lines = 0 };
    op_ear_attach(&out->ear, &t->device, tally_op);
    CommWork before[WORLD_COMMS][COMM_KIND_COUNT];
    for (int i = 0; i < WORLD_COMMS; i++)
        for (int k = 0; k < COMM_KIND_COUNT; k++)
            before[i][k] = (CommWork){ t->world->comm[i].calls[k], t->world->comm[i].bytes[k], 0 };
    TRY(trainer_step(t, (TokenSource){ 0 }, &report));
    for (int i = 0; i < WORLD_COMMS; i++) {
        const Comm *c = &t->world->comm[i];
        out->size[i] = c->size;
        for (int k = 0; k < COMM_KIND_COUNT; k++)
            out->sent[i][k] =
                (CommWork){ c->calls[k] - before[i][k].calls, c->bytes[k] - before[i][k].bytes, 0 };
    }
    return ERR_OK;
}

/* Counts one rank's work. */
static inline Err tally_rank(const TrainSpec *spec, Grid grid, int rank, Tally *out)
{
    MemoryPlan plan;
    World world;
    Trainer t;
    TRY(trainer_plan(spec, grid, rank, &plan));
    TRY(world_open_null(&world, grid, rank));
    Err err = trainer_open_on(&t, DEVICE_NULL, spec, &world, &plan);
    if (!err) err = tally_step(&t, out);
    out->params = plan.params.model;
    trainer_close(&t);
    world_close(&world);
    return err;
}

#endif
