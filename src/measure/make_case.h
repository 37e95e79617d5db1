/*
 * How cases.c, cases_attention.c and cases_moe.c define an op's cases and make their arguments:
 *
 *   BENCH(gelu_fwd, { "" })
 *   {
 *       ONCE(y, tokens_of(m), m->d->F);
 *       ONCE(x, tokens_of(m), m->d->F);
 *       return ERR_OK;
 *   }
 *
 * The cases come first. The function (Maker *m, gelu_fwd_args *a) makes the arguments of m->c, one of them; it reads
 * like the op's line in ops.def: ONCE and TWICE say how often a tensor moves.
 */
#ifndef MEGATRAIN_MEASURE_MAKE_CASE_H
#define MEGATRAIN_MEASURE_MAKE_CASE_H

#include "measure/cases.h"

#define BENCH(name, ...)                                                                                \
    static Err make_##name(Maker *m, name##_args *a);                                                   \
    static Err make_any_##name(Maker *m, AnyArgs *any) { return make_##name(m, &any->name); }           \
    static const Case cases_##name[] = { __VA_ARGS__ };                                                 \
    const OpCases bench_##name = { make_any_##name, cases_##name, sizeof cases_##name / sizeof(Case) }; \
    static Err make_##name(Maker *m, name##_args *a)

#define MAKE(out, times, fill, t, ...)                      \
    TRY(maker_tensor(m, &a->out, (times), FILL_##fill, (t), \
                     (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ }))
/* in the compute dtype: read or written, read and written, neither (so small, or so seldom, that it does not count) */
#define ONCE(out, ...) MAKE(out, 1, UNIFORM, m->dtype, __VA_ARGS__)
#define TWICE(out, ...) MAKE(out, 2, UNIFORM, m->dtype, __VA_ARGS__)
#define UNCOUNTED(out, ...) MAKE(out, 0, UNIFORM, m->dtype, __VA_ARGS__)

/* Arguments that every gradient op takes besides. */
#define SHIFT_OF_GRADIENT         \
    MAKE(shift, 0, ZERO, I32, 1); \
    MAKE(overflow, 0, ZERO, I32, 1)

static inline int64_t tokens_of(const Maker *m) { return m->d->B * m->d->T; }

/* Tokens, outputs and inputs of the case's linear layer. */
void linear_dims(const Maker *m, int64_t *N, int64_t *O, int64_t *I);

/* Outputs and inputs of the case's experts; where each expert's rows begin that were chosen at random. */
void expert_dims(const Maker *m, int64_t *O, int64_t *I);
Err make_offset(Maker *m, Tensor *offset);

/* Step values as in the middle of a run, in device memory. */
Err make_step(Maker *m, StepValues **out);

#endif
