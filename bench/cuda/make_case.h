/*
 * How cases.c, cases_attention.c and cases_moe.c make arguments. A make function reads like the op's line in ops.def:
 * ONCE and TWICE say how often a tensor moves.
 */
#ifndef MEGATRAIN_BENCH_CUDA_MAKE_CASE_H
#define MEGATRAIN_BENCH_CUDA_MAKE_CASE_H

#include "cases.h"

#define MAKE(out, times, fill, t, ...)                                                                   \
    TRY(maker_tensor(m, &a->out, (times), FILL_##fill, (t),                                               \
                    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ }))
/* in the compute dtype: read or written, read and written, neither (so small, or so seldom, that it does not count) */
#define ONCE(out, ...) MAKE(out, 1, UNIFORM, m->dtype, __VA_ARGS__)
#define TWICE(out, ...) MAKE(out, 2, UNIFORM, m->dtype, __VA_ARGS__)
#define UNCOUNTED(out, ...) MAKE(out, 0, UNIFORM, m->dtype, __VA_ARGS__)

/* What every gradient op takes besides. */
#define SHIFT_OF_GRADIENT            \
    MAKE(shift, 0, ZERO, I32, 1);    \
    MAKE(overflow, 0, ZERO, I32, 1)

static inline int64_t tokens_of(const Maker *m) { return m->d->B * m->d->T; }

/* Step values as in the middle of a run, in device memory. */
Err make_step(Maker *m, StepValues **out);

/* ---- attention (cases_attention.c) ---- */

enum { GROUPED = 1, DOCUMENTS, CAPPED }; /* Case.option */

Err make_qkv_split(Maker *m, AnyArgs *any);
Err make_qkv_merge(Maker *m, AnyArgs *any);
Err make_join_columns(Maker *m, AnyArgs *any);
Err make_mla_split(Maker *m, AnyArgs *any);
Err make_mla_merge(Maker *m, AnyArgs *any);
Err make_rope(Maker *m, AnyArgs *any);
Err make_attention_fwd(Maker *m, AnyArgs *any);
Err make_attention_bwd(Maker *m, AnyArgs *any);
Err make_sink_bwd(Maker *m, AnyArgs *any);
Err make_gate_fwd(Maker *m, AnyArgs *any);
Err make_gate_bwd(Maker *m, AnyArgs *any);

/* ---- mixtures of experts (cases_moe.c) ---- */

Err make_router_fwd(Maker *m, AnyArgs *any);
Err make_jitter(Maker *m, AnyArgs *any);
Err make_router_even(Maker *m, AnyArgs *any);
Err make_sinkhorn(Maker *m, AnyArgs *any);
Err make_router_bwd(Maker *m, AnyArgs *any);
Err make_router_count(Maker *m, AnyArgs *any);
Err make_router_balance(Maker *m, AnyArgs *any);
Err make_expert_count(Maker *m, AnyArgs *any);
Err make_expert_bias(Maker *m, AnyArgs *any);
Err make_choice_drop(Maker *m, AnyArgs *any);
Err make_room_limits(Maker *m, AnyArgs *any);
Err make_permute_index(Maker *m, AnyArgs *any);
Err make_dispatch_offsets(Maker *m, AnyArgs *any);
Err make_dispatch_choices(Maker *m, AnyArgs *any);
Err make_take_rows(Maker *m, AnyArgs *any);
Err make_sum_parts(Maker *m, AnyArgs *any);
Err make_permute_rows(Maker *m, AnyArgs *any);
Err make_unpermute_rows(Maker *m, AnyArgs *any);
Err make_unpermute_bwd(Maker *m, AnyArgs *any);
Err make_grouped_fwd(Maker *m, AnyArgs *any);
Err make_grouped_dx(Maker *m, AnyArgs *any);
Err make_grouped_dw(Maker *m, AnyArgs *any);
Err make_grouped_bias(Maker *m, AnyArgs *any);
Err make_grouped_bias_grad(Maker *m, AnyArgs *any);
Err make_gated_add_fwd(Maker *m, AnyArgs *any);
Err make_gated_add_bwd(Maker *m, AnyArgs *any);

#endif
