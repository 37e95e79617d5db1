/*
 * How long a step takes with the kernels and the habits of other programs: the ops and the messages of our own dry run
 * (tally.h), timed by eight rates (Rates) that all rows share, and by what a row's recipe states (Habits). Where we and
 * they do a thing differently, it is a habit: nothing here belongs to one row.
 */
#ifndef MEGATRAIN_BENCH_OTHERS_H
#define MEGATRAIN_BENCH_OTHERS_H

#include <math.h>

#include "cost/cost.h"
#include "tally.h"

enum { RATES = 8 };

/* The constants. Shares of what data sheets say, unless another unit is named. */
typedef struct {
    double bf16;      /* of the products' peak that large ones reach */
    double fp8;       /* of that in 8 bits */
    double depth;     /* elements of a sum that the start and the end of a tile cost; twice in fp8 */
    double memory;    /* of memory bandwidth that memory work reaches */
    double attention; /* of its kernel's published rate: causal work is uneven, and power is short */
    double link;      /* of link bandwidth that messages reach */
    double overlap;   /* of the shorter of two that go on at once, which they cost in the end */
    double host_us;   /* of the host, a launch that a mixture waits for */
} Rates;

/* Facts of a device (config/config_device.h): bytes and FLOP a second. */
typedef struct {
    double bf16, fp8, memory, link, network; /* one way, of each device */
    int multiprocessors, host_devices;       /* host_devices: that are linked with each other */
    double attention_fwd, attention_bwd;     /* heads 128 wide, long sequences: the best published kernel's */
} Machine;

/* Seconds that a call takes besides its bytes, within a host and between hosts: NCCL's small all-gathers. */
static const double CALL_S = 15e-6, FAR_CALL_S = 30e-6;

typedef struct {
    bool fp8;
    double cast_bytes;     /* an element that a product in 8 bits reads */
    int64_t plain_outputs; /* products with so many outputs stay in bf16: the head's */
    double attention;      /* over the device's rate */
    bool unfused;          /* scores pass memory */
    bool expert_by_expert; /* a launch for each expert, else one for all */
    bool rows_once;        /* a row travels once to each rank and host */
    bool graphs;           /* of what stands around the experts */
    bool hides_tp, hides_dp, hides_ep;
    double gradient_bytes;
    bool sharded;
    double passes;
    bool mixture;
    Recompute recompute;
    int experts, topk, hosts_most; /* hosts_most: that a token goes to, by its router's groups; 0: any */
    double tokens, row_bytes;      /* of a rank's micro-batch, outside tensor-parallel regions */
} Habits;

/* Seconds of a micro-batch, or of a step. */
typedef struct {
    double product, attention, memory, tp, cp, ep, host;
} Shares;

typedef struct {
    Shares unit;
    double forward; /* products and memory work of its forward pass, in it */
    double once;    /* the optimizer, a step */
    double reduce;  /* gradients and weights between ranks, a step */
    double across;  /* what pipeline ranks send each other, a micro-batch */
} RankTime;

static inline double shares_sum(const Shares *s)
{
    return s->product + s->attention + s->memory + s->tp + s->cp + s->ep + s->host;
}

/* a of the one beside b of the other. */
static inline double beside(double a, double b, double overlap) { return fmax(a, b) + overlap * fmin(a, b); }

/* Seconds that b adds to a. They go on at once or not. */
static inline double exposed(double a, double b, double overlap, bool hidden)
{
    return hidden ? beside(a, b, overlap) - a : b;
}

/* ---- products ---- */

/* Seconds of a product: by a library's tiles, or by the bytes that pass memory if they take longer. fp8: in 8 bits;
 * adds: to sums in fp32, which it reads and writes; apart: each is a launch. */
static inline double product_time(const Machine *m, const Rates *r, Product p, bool fp8, bool adds, bool apart)
{
    const double peak = fp8 ? m->fp8 * r->fp8 : m->bf16 * r->bf16, bytes = fp8 ? 1 : 2;
    const double flop = product_flop(p, m->multiprocessors, r->depth * (fp8 ? 2 : 1), apart);
    const double traffic = bytes * p.depth * (p.rows + p.columns) + (adds ? 8 : 2) * p.rows * p.columns;
    return fmax(flop / peak, p.count * traffic / (m->memory * r->memory));
}

static inline void add_product(const Machine *m, const Rates *r, const Habits *h, const TallyLine *l,
                               double calls, RankTime *t)
{
    const bool forward = l->id == OP_linear_fwd || l->id == OP_grouped_fwd;
    const bool dw = l->id == OP_linear_dw || l->id == OP_grouped_dw;
    const double experts = l->side[3] ? (double)l->side[3] : 1, rows = (double)l->side[0] / experts;
    const double outputs = (double)l->side[1], inputs = (double)l->side[2];
    const bool head = l->side[1] == h->plain_outputs,
               router = h->mixture && !l->side[3] && l->side[1] == h->experts;
    Product p = { .rows = rows, .columns = outputs, .depth = inputs, .count = experts };
    if (dw) p.rows = outputs, p.columns = inputs, p.depth = rows;
    else if (!forward) p.columns = inputs, p.depth = outputs;
    const bool fp8 = h->fp8 && !head && !router && !l->fp32;
    const double s = calls * product_time(m, r, p, fp8, dw, h->expert_by_expert);
    const double cast =
        fp8 && !dw ? calls * (double)l->side[0] * (forward ? inputs : outputs) * h->cast_bytes / m->memory
                     : 0;
    t->unit.product += s;
    t->unit.memory += cast / r->memory;
    if (forward && !head) t->forward += s + cast / r->memory;
}

/* ---- attention ---- */

/* flop: of a causal mask over all keys. */
static inline void add_attention(const Machine *m, const Rates *r, const Habits *h, const TallyLine *l,
                                 double flop, RankTime *t)
{
    enum { SHORT = 300 };
    const bool forward = l->id == OP_attention_fwd;
    const double all = (double)l->side[1] / 2,
                 keys = l->side[3] && l->side[3] < all ? (double)l->side[3] : all;
    const double width = l->side[2] <= 64 ? .72 : l->side[2] == 192 ? .85 : 1;
    const double rate = r->attention * width * keys / (keys + SHORT) * h->attention *
                        (forward ? m->attention_fwd : m->attention_bwd);
    double s = flop * keys / all / rate;
    if (h->unfused) { /* two products at half the rate, and scores to and fro in 16 and 32 bits */
        const double scores = flop / (2 * (double)l->side[2]) / (forward ? 1 : 2.5);
        s = 2 * s + (forward ? 8 : 14) * scores / (m->memory * r->memory);
    }
    t->unit.attention += s;
    if (forward) t->forward += s;
}

/* ---- messages ---- */

static inline CommRates rates_of(const Machine *m, const Rates *r)
{
    return (CommRates){ m->link * r->link, m->network * r->link };
}

/* Rate of a ring of so many members. `inner` ranks of other groups lie between two of them. */
static inline double bytes_a_second(const Machine *m, const Rates *r, int members, int inner)
{
    const int all = members * inner, hosts = (all + m->host_devices - 1) / m->host_devices;
    const int here = inner > 0 && m->host_devices > inner ? m->host_devices / inner : 1; /* (0: no experts) */
    return ring_rate(rates_of(m, r), (CommPlace){ members, hosts, here });
}

/* Rows of one trip between `members` ranks that share experts. */
static inline double trip_time(const Machine *m, const Rates *r, const Habits *h, int members)
{
    const double hosts = fmax(1, (double)members / m->host_devices), k = h->topk, n = members;
    double far = h->rows_once ? (hosts - 1) * (1 - pow(1 - 1 / hosts, k)) : k * (hosts - 1) / hosts;
    double near = (h->rows_once ? n * (1 - pow(1 - 1 / n, k)) : k) * fmin(m->host_devices - 1, n - 1) /
                  fmin(m->host_devices, n);
    if (h->hosts_most) far = fmin(far, h->hosts_most * (hosts - 1) / hosts);
    const double bytes = h->tokens * h->row_bytes;
    return spread_time(rates_of(m, r), bytes * far, bytes * near) + 2 * (hosts > 1 ? FAR_CALL_S : CALL_S);
}

static inline void add_messages(const Machine *m, const Rates *r, const Habits *h, const Tally *tally,
                                Grid grid, double units, RankTime *t)
{
    const double gradient = h->gradient_bytes / 4, gathers = h->sharded ? 2 : 1;
    static const GroupKind reduced[] = { GROUP_DP, GROUP_DP_CP, GROUP_EXPERT_DP };
    for (int i = 0; i < 3; i++) {
        const CommWork *sent = tally->sent[reduced[i]];
        const int experts = grid.ep < m->host_devices ? grid.ep : m->host_devices;
        const int inner = reduced[i] == GROUP_EXPERT_DP ? experts : grid.tp;
        const double rate = bytes_a_second(m, r, tally->size[reduced[i]], inner);
        t->reduce += gradient * (double)sent[COMM_REDUCE_SCATTER_TREE_F32].bytes / rate;
        t->reduce += gathers * (double)sent[COMM_ALL_GATHER].bytes / rate;
    }
    t->reduce +=
        (double)tally->sent[GROUP_EMBD][COMM_REDUCE_TREE_F32].bytes * gradient / (m->network * r->link);
    static const GroupKind tensor[] = { GROUP_TP, GROUP_SP };
    for (int i = 0; i < 2; i++) {
        const CommWork gather = tally->sent[tensor[i]][COMM_ALL_GATHER],
                       sum = tally->sent[tensor[i]][COMM_EXCHANGE];
        t->unit.tp += (double)(gather.bytes + sum.bytes) / units / (m->link * r->link) +
                      (double)(gather.calls + sum.calls) / units * CALL_S;
    }
    static const GroupKind context[] = { GROUP_CP, GROUP_CP_HEADS, GROUP_CP_RING };
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < COMM_KIND_COUNT; k++)
            t->unit.cp += (double)tally->sent[context[i]][k].bytes / units /
                          bytes_a_second(m, r, tally->size[context[i]], grid.tp);
    t->across = (double)tally->sent[GROUP_PP][COMM_EXCHANGE].bytes / units / (m->network * r->link);
}

/* ---- a rank ---- */

static inline bool is_elementwise(OpId id)
{
    return id == OP_norm_fwd || id == OP_norm_bwd || id == OP_residual_norm_fwd || id == OP_residual_fwd ||
           id == OP_residual_bwd || id == OP_swiglu_fwd || id == OP_swiglu_bwd || id == OP_gelu_fwd ||
           id == OP_gelu_bwd || id == OP_rope;
}

static inline bool is_forward(OpId id)
{
    const char *name = op_info(id)->name;
    const size_t n = strlen(name);
    return n > 4 && !strcmp(name + n - 4, "_fwd");
}

/* Launches around the experts of a mixture, forward and backward, and those of each expert where it has its own. In 8
 * bits each of its tensors wants three more: its largest or the order of its scales, the cast, the transposed cast. */
static inline double mixture_launches(const Habits *h, int experts)
{
    enum { AROUND = 115, RECORDED = 35, GROUPED = 20, EXPERT = 6, TENSORS = 4, CASTS = 3 };
    const int each = EXPERT + (h->fp8 ? TENSORS * CASTS : 0);
    return AROUND - (h->graphs ? RECORDED : 0) + (h->expert_by_expert ? experts * each : GROUPED);
}

/* `units`: micro-batches of the tally. */
static inline RankTime rank_time(const Machine *m, const Rates *r, const Habits *h, const Tally *tally,
                                 Grid grid, double units)
{
    RankTime t = { 0 };
    double mixtures = 0; /* of a micro-batch */
    for (int i = 0; i < tally->lines; i++) {
        const TallyLine *l = &tally->line[i];
        const double calls = l->calls / units;
        if (is_product(l->id) || is_grouped(l->id)) add_product(m, r, h, l, calls, &t);
        else if (is_attention(l->id)) add_attention(m, r, h, l, l->flop / units, &t);
        else if (l->id == OP_adamw || l->id == OP_grad_stats || l->id == OP_step_finish)
            t.once += l->bytes / (m->memory * r->memory);
        else {
            const double s =
                l->bytes / units * (is_elementwise(l->id) ? h->passes : 1) / (m->memory * r->memory);
            t.unit.memory += s;
            if (is_forward(l->id)) t.forward += s;
        }
        if (l->id == OP_grouped_dw) mixtures += calls / 2;
    }
    add_messages(m, r, h, tally, grid, units, &t);
    /* One of a layer's five gathers and four scatters is always beside a product. */
    t.unit.tp = h->hides_tp ? exposed(t.unit.product, t.unit.tp, r->overlap, true) : t.unit.tp * 8 / 9;
    t.unit.cp = exposed(t.unit.attention, t.unit.cp, r->overlap, true);
    if (h->mixture && grid.ep > 1) {
        static const int trips_of[] = {
            [RECOMPUTE_NONE] = 4, [RECOMPUTE_SELECTIVE] = 5, [RECOMPUTE_FULL] = 6
        };
        const double trips = mixtures * trips_of[h->recompute] * trip_time(m, r, h, grid.ep);
        t.unit.ep =
            exposed(t.unit.product + t.unit.attention + t.unit.memory, trips, r->overlap, h->hides_ep);
    }
    if (h->mixture) {
        /* (added, not hidden: a mixture that drops nothing waits for the device to tell it how many rows there are) */
        const double again = h->recompute == RECOMPUTE_FULL ? 1.4 : 1;
        t.unit.host = mixtures * again * mixture_launches(h, h->experts / grid.ep) * r->host_us * 1e-6;
    }
    return t;
}

#endif
