/* The cases of attention. See make_case.h. */
#include <math.h>

#include "measure/make_case.h"

enum { GROUPED = 1, DOCUMENTS, CAPPED }; /* Case.option */

static int64_t kv_heads(const Maker *m) { return m->c->option == GROUPED ? m->d->K : m->d->H; }

BENCH(qkv_split, { "" }, { "grouped", .option = GROUPED })
{
    int64_t N = tokens_of(m), H = m->d->H, K = kv_heads(m), C = m->d->C;
    ONCE(q, N, H * C);
    ONCE(k, N, K * C);
    ONCE(v, N, K * C);
    ONCE(qkv, N, (H + 2 * K) * C);
    a->chunks = K;
    return ERR_OK;
}

BENCH(qkv_merge, { "" })
{
    int64_t N = tokens_of(m), H = m->d->H, K = kv_heads(m), C = m->d->C;
    ONCE(qkv, N, (H + 2 * K) * C);
    ONCE(q, N, H * C);
    ONCE(k, N, K * C);
    ONCE(v, N, K * C);
    a->chunks = K;
    return ERR_OK;
}

/* k and v of a group's head, from two ranks. */
BENCH(join_columns, { "" })
{
    int64_t N = 2 * tokens_of(m), C = m->d->C;
    ONCE(y, N, 2, C / 2);
    ONCE(x, 2, N, C / 2);
    return ERR_OK;
}

/* Heads of 2 C columns without positions, C with them, values of 2 C: as DeepSeek-V3's of 128, 64 and 128. */
BENCH(mla_split, { "" })
{
    int64_t N = tokens_of(m), H = m->d->H, C = m->d->C;
    ONCE(k, N, H, 3 * C);
    ONCE(v, N, H, 2 * C);
    ONCE(kv, N, H, 4 * C);
    ONCE(pe, N, C);
    return ERR_OK;
}

BENCH(mla_merge, { "" })
{
    int64_t N = tokens_of(m), H = m->d->H, C = m->d->C;
    ONCE(kv, N, H, 4 * C);
    ONCE(pe, N, C);
    ONCE(k, N, H, 3 * C);
    ONCE(v, N, H, 2 * C);
    a->chunk = H;
    return ERR_OK;
}

BENCH(rope, { "q" })
{
    int64_t N = tokens_of(m), R = m->d->C / 2;
    TWICE(x, N, m->d->H, m->d->C);
    MAKE(position, 1, POSITIONS, I32, N);
    MAKE(cos, 1, UNIFORM, F32, m->d->T, R);
    MAKE(sin, 1, UNIFORM, F32, m->d->T, R);
    return ERR_OK;
}

BENCH(attention_fwd, { "causal" }, { "causal, grouped", .option = GROUPED },
      { "8 documents, FLOP of 1", .option = DOCUMENTS }, { "causal, capped, sinks", .option = CAPPED })
{
    int64_t B = m->d->B, T = m->d->T, H = m->d->H, K = kv_heads(m), C = m->d->C;
    ONCE(o, B, T, H, C);
    MAKE(lse, 1, UNIFORM, F32, B, T, H);
    ONCE(q, B, T, H, C);
    ONCE(k, B, T, K, C);
    ONCE(v, B, T, K, C);
    MAKE(sample, 0, SAMPLES, I64, B);
    if (m->c->option == DOCUMENTS) MAKE(doc, 1, DOCUMENTS, I32, B, T);
    if (m->c->option == CAPPED) {
        UNCOUNTED(sink, H);
        a->softcap = 30;
    }
    a->q_span = a->k_span = spans_whole(T);
    a->scale = 1 / sqrtf((float)C);
    a->block = 64;
    return ERR_OK;
}

/* o and lse are those of a forward pass. */
BENCH(attention_bwd, { "causal" }, { "causal, grouped", .option = GROUPED },
      { "8 documents, FLOP of 1", .option = DOCUMENTS }, { "causal, capped", .option = CAPPED })
{
    int64_t B = m->d->B, T = m->d->T, H = m->d->H, K = kv_heads(m), C = m->d->C;
    attention_fwd_args f = { 0 };
    TRY(make_attention_fwd(m, &f));
    TRY(op_attention_fwd(&m->dev->stream, &f));
    ONCE(dq, B, T, H, C);
    ONCE(dk, B, T, K, C);
    ONCE(dv, B, T, K, C);
    ONCE(go, B, T, H, C);
    MAKE(delta, 2, UNIFORM, F32, B, T, H);
    a->q = f.q, a->k = f.k, a->v = f.v, a->o = f.o, a->lse = f.lse, a->sample = f.sample, a->doc = f.doc;
    a->q_span = f.q_span, a->k_span = f.k_span;
    a->scale = f.scale, a->softcap = f.softcap;
    a->block = f.block;
    a->chunk = m->d->H / K;
    a->leaf = T < 128 ? T : 128;
    a->positions = T;
    return ERR_OK;
}

BENCH(sink_bwd, { "" })
{
    int64_t N = tokens_of(m), H = m->d->H;
    ONCE(dsink, N, H);
    UNCOUNTED(sink, H);
    MAKE(lse, 1, UNIFORM, F32, N, H);
    MAKE(delta, 1, UNIFORM, F32, N, H);
    return ERR_OK;
}

BENCH(gate_fwd, { "" })
{
    int64_t N = tokens_of(m), F = m->d->H * m->d->C;
    ONCE(y, N, F);
    ONCE(x, N, F);
    ONCE(gate, N, F);
    return ERR_OK;
}

BENCH(gate_bwd, { "" })
{
    int64_t N = tokens_of(m), F = m->d->H * m->d->C;
    ONCE(dx, N, F);
    ONCE(dgate, N, F);
    ONCE(dy, N, F);
    ONCE(x, N, F);
    ONCE(gate, N, F);
    return ERR_OK;
}
