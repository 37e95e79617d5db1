/* The cases of delta rules and of Mamba-2, and of what stands around them. See make_case.h. */
#include "measure/make_case.h"

enum { TAPS = 4 };

/* Width of a layer of H heads whose keys and values are C wide. */
static int64_t wide_of(const Maker *m) { return 3 * m->d->H * m->d->C; }

BENCH(conv_silu_fwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, C = wide_of(m);
    ONCE(y, B, T, C);
    ONCE(x, B, T, C);
    ONCE(w, C, TAPS);
    return ERR_OK;
}

BENCH(conv_silu_bwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, C = wide_of(m);
    ONCE(dx, B, T, C);
    MAKE(dw, 2, UNIFORM, m->acc, C, TAPS);
    ONCE(dy, B, T, C);
    ONCE(x, B, T, C);
    ONCE(w, C, TAPS);
    MAKE(shift_w, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->leaf = 16;
    return ERR_OK;
}

BENCH(unit_fwd, { "" })
{
    const int64_t N = tokens_of(m) * m->d->H, D = m->d->C;
    ONCE(y, N, D);
    ONCE(x, N, D);
    a->factor = 1, a->eps = 1e-6f;
    return ERR_OK;
}

BENCH(unit_bwd, { "" })
{
    const int64_t N = tokens_of(m) * m->d->H, D = m->d->C;
    ONCE(dx, N, D);
    ONCE(dy, N, D);
    ONCE(x, N, D);
    a->factor = 1, a->eps = 1e-6f;
    return ERR_OK;
}

BENCH(delta_gates_fwd, { "" })
{
    const int64_t N = tokens_of(m), V = m->d->H;
    MAKE(beta, 1, UNIFORM, F32, N, V);
    MAKE(g, 1, UNIFORM, F32, N, V);
    ONCE(b, N, V);
    ONCE(a, N, V);
    ONCE(a_log, V);
    ONCE(dt_bias, V);
    a->top = 1;
    return ERR_OK;
}

BENCH(delta_gates_bwd, { "" })
{
    const int64_t N = tokens_of(m), V = m->d->H;
    ONCE(db, N, V);
    ONCE(da, N, V);
    MAKE(da_log, 2, UNIFORM, m->acc, V);
    MAKE(ddt_bias, 2, UNIFORM, m->acc, V);
    MAKE(dbeta, 1, UNIFORM, F32, N, V);
    MAKE(dg, 1, UNIFORM, F32, N, V);
    ONCE(b, N, V);
    ONCE(a, N, V);
    ONCE(a_log, V);
    ONCE(dt_bias, V);
    MAKE(shift_a, 0, ZERO, I32, 1);
    MAKE(shift_dt, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->top = 1, a->leaf = 16;
    return ERR_OK;
}

/* Gates that forget nothing and write nothing: timing does not depend on them. */
BENCH(delta_fwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, V = m->d->H, C = m->d->C;
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    ONCE(o, B, T, V, C);
    MAKE(states, 1, UNIFORM, F32, B * windows * V, C, C);
    ONCE(q, B, T, V, C);
    ONCE(k, B, T, V, C);
    ONCE(v, B, T, V, C);
    MAKE(g, 1, ZERO, F32, B, T, V);
    MAKE(beta, 1, ZERO, F32, B, T, V);
    return ERR_OK;
}

/* States are those of a forward pass. */
BENCH(delta_bwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, V = m->d->H, C = m->d->C;
    delta_fwd_args f = { 0 };
    TRY(make_delta_fwd(m, &f));
    TRY(op_delta_fwd(&m->dev->stream, &f));
    ONCE(dq, B, T, V, C);
    ONCE(dk, B, T, V, C);
    ONCE(dv, B, T, V, C);
    MAKE(dg, 1, UNIFORM, F32, B, T, V);
    MAKE(dbeta, 1, UNIFORM, F32, B, T, V);
    ONCE(go, B, T, V, C);
    a->q = f.q, a->k = f.k, a->v = f.v, a->g = f.g, a->beta = f.beta, a->states = f.states;
    return ERR_OK;
}

BENCH(kda_gates_fwd, { "" })
{
    const int64_t N = tokens_of(m), V = m->d->H, D = m->d->C;
    MAKE(beta, 1, UNIFORM, F32, N, V);
    MAKE(g, 1, UNIFORM, F32, N, V, D);
    ONCE(b, N, V);
    ONCE(raw, N, V, D);
    ONCE(a_log, V);
    ONCE(dt_bias, V, D);
    return ERR_OK;
}

BENCH(kda_gates_bwd, { "" })
{
    const int64_t N = tokens_of(m), V = m->d->H, D = m->d->C;
    ONCE(db, N, V);
    ONCE(draw, N, V, D);
    MAKE(da_log, 2, UNIFORM, m->acc, V);
    MAKE(ddt_bias, 2, UNIFORM, m->acc, V, D);
    MAKE(dbeta, 1, UNIFORM, F32, N, V);
    MAKE(dg, 1, UNIFORM, F32, N, V, D);
    ONCE(b, N, V);
    ONCE(raw, N, V, D);
    ONCE(a_log, V);
    ONCE(dt_bias, V, D);
    MAKE(shift_a, 0, ZERO, I32, 1);
    MAKE(shift_dt, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->leaf = 16;
    return ERR_OK;
}

BENCH(kda_fwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, V = m->d->H, C = m->d->C;
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    ONCE(o, B, T, V, C);
    MAKE(states, 1, UNIFORM, F32, B * windows * V, C, C);
    ONCE(q, B, T, V, C);
    ONCE(k, B, T, V, C);
    ONCE(v, B, T, V, C);
    MAKE(g, 1, ZERO, F32, B, T, V, C);
    MAKE(beta, 1, ZERO, F32, B, T, V);
    return ERR_OK;
}

/* States are those of a forward pass. */
BENCH(kda_bwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, V = m->d->H, C = m->d->C;
    kda_fwd_args f = { 0 };
    TRY(make_kda_fwd(m, &f));
    TRY(op_kda_fwd(&m->dev->stream, &f));
    ONCE(dq, B, T, V, C);
    ONCE(dk, B, T, V, C);
    ONCE(dv, B, T, V, C);
    MAKE(dg, 1, UNIFORM, F32, B, T, V, C);
    MAKE(dbeta, 1, UNIFORM, F32, B, T, V);
    ONCE(go, B, T, V, C);
    a->q = f.q, a->k = f.k, a->v = f.v, a->g = f.g, a->beta = f.beta, a->states = f.states;
    return ERR_OK;
}

BENCH(gated_norm_fwd, { "" })
{
    const int64_t N = tokens_of(m) * m->d->H, E = m->d->C;
    ONCE(y, N, E);
    ONCE(x, N, E);
    ONCE(z, N, E);
    ONCE(w, 1, E);
    a->eps = 1e-6f;
    return ERR_OK;
}

BENCH(gated_norm_bwd, { "" })
{
    const int64_t N = tokens_of(m) * m->d->H, E = m->d->C;
    ONCE(dx, N, E);
    ONCE(dz, N, E);
    MAKE(dw, 2, UNIFORM, m->acc, 1, E);
    ONCE(dy, N, E);
    ONCE(x, N, E);
    ONCE(z, N, E);
    ONCE(w, 1, E);
    MAKE(shift, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->eps = 1e-6f, a->leaf = 16;
    return ERR_OK;
}

BENCH(mamba_gates_fwd, { "" })
{
    const int64_t N = tokens_of(m), H = m->d->H;
    MAKE(delta, 1, UNIFORM, F32, N, H);
    MAKE(g, 1, UNIFORM, F32, N, H);
    ONCE(dt, N, H);
    ONCE(a_log, H);
    ONCE(dt_bias, H);
    return ERR_OK;
}

BENCH(mamba_gates_bwd, { "" })
{
    const int64_t N = tokens_of(m), H = m->d->H;
    ONCE(ddt, N, H);
    MAKE(da_log, 2, UNIFORM, m->acc, H);
    MAKE(ddt_bias, 2, UNIFORM, m->acc, H);
    MAKE(ddelta, 1, UNIFORM, F32, N, H);
    MAKE(dg, 1, UNIFORM, F32, N, H);
    ONCE(dt, N, H);
    ONCE(a_log, H);
    ONCE(dt_bias, H);
    MAKE(shift_a, 0, ZERO, I32, 1);
    MAKE(shift_dt, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->leaf = 16;
    return ERR_OK;
}

enum { MAMBA_HEADS = 8, MAMBA_N = 128 }; /* heads of a group, at most; width of a state */

/* One group where there are few heads. Gates that forget nothing and write nothing, as for delta_fwd. */
BENCH(mamba_fwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, H = m->d->H, P = m->d->C, G = H % MAMBA_HEADS ? 1 : H / MAMBA_HEADS;
    const int64_t windows = (T + MAMBA_WINDOW - 1) / MAMBA_WINDOW;
    ONCE(o, B, T, H, P);
    MAKE(states, 1, UNIFORM, F32, B * windows * H, MAMBA_N, P);
    ONCE(x, B, T, H, P);
    ONCE(k, B, T, G, MAMBA_N);
    ONCE(q, B, T, G, MAMBA_N);
    MAKE(delta, 1, ZERO, F32, B, T, H);
    MAKE(g, 1, ZERO, F32, B, T, H);
    ONCE(skip, H);
    return ERR_OK;
}

/* States are those of a forward pass. */
BENCH(mamba_bwd, { "" })
{
    const int64_t B = m->d->B, T = m->d->T, H = m->d->H, P = m->d->C;
    mamba_fwd_args f = { 0 };
    TRY(make_mamba_fwd(m, &f));
    TRY(op_mamba_fwd(&m->dev->stream, &f));
    const int64_t G = f.k.dim[2], R = f.states.dim[0];
    ONCE(dx, B, T, H, P);
    ONCE(dk, B, T, G, MAMBA_N);
    ONCE(dq, B, T, G, MAMBA_N);
    MAKE(ddelta, 1, UNIFORM, F32, B, T, H);
    MAKE(dg, 1, UNIFORM, F32, B, T, H);
    MAKE(dskip, 1, UNIFORM, F32, B, T, H);
    MAKE(dstates, 1, UNIFORM, F32, R, MAMBA_N, P);
    ONCE(go, B, T, H, P);
    a->x = f.x, a->k = f.k, a->q = f.q, a->delta = f.delta, a->g = f.g, a->skip = f.skip, a->states = f.states;
    return ERR_OK;
}
