/*
 * Token embedding, cut over tp by vocabulary, plus learned positions, plus dropout.
 * Each rank looks up the tokens of its rows of the table and gives 0 for the others; of the summands of one
 * token only one is not 0, so the sum over tp is exact.
 */
#include "base/rng.h"
#include "layer/internal.h"

ParamSpec embedding_table(const ModelSpec *spec, bool shared, int flags)
{
    return (ParamSpec){ .name = EMBEDDING_TABLE,
                        .ndim = 2,
                        .shape = { spec->vocab, spec->hidden },
                        .padded_rows = spec->padded_vocab,
                        .cut = { CUT_TP },
                        .partial = shared ? PARTIAL_STAGES : PARTIAL_NONE,
                        .init = INIT_NORMAL,
                        .std = spec->init_std,
                        .flags = PARAM_DECAY | PARAM_TABLE | flags };
}

Err embedding_register(Embedding *e, ParamRegistry *reg, const ModelSpec *spec, bool shared)
{
    *e = (Embedding){ .position = -1, .dropout_key = rng_key(spec->seed, "embedding.dropout"), .spec = spec };
    TRY(param_add(reg, embedding_table(spec, shared, 0), &e->table));
    e->vocab_rows = reg->items[e->table].local[0];
    if (!spec->learned_positions) return ERR_OK;
    return param_add(reg,
                     (ParamSpec){ .name = "embedding.position.weight",
                                  .ndim = 2,
                                  .shape = { spec->seq, spec->hidden },
                                  .partial = PARTIAL_ROWS,
                                  .init = INIT_NORMAL,
                                  .std = spec->init_std,
                                  .flags = PARAM_DECAY | PARAM_TABLE },
                     &e->position);
}

void embedding_share(Embedding *e, const ParamRegistry *reg, const ModelSpec *spec, const char *owner, int table)
{
    *e = (Embedding){ .table = table,
                      .position = -1,
                      .vocab_rows = reg->items[table].local[0],
                      .dropout_key = model_key(spec, owner, "embedding.dropout"),
                      .spec = spec };
}

static int64_t first_row(const Embedding *e, const Ctx *c) { return e->vocab_rows * c->world->tp.rank; }

/* In place, where the model scales its embeddings. */
static Err scale_rows(const Embedding *e, Ctx *c, Tensor x)
{
    const float factor = e->spec->embed_scale;
    const bool scaled = factor > 0 && (factor < 1 || factor > 1);
    return scaled ? op(c->s, scale, .y = x, .x = x, .factor = factor) : ERR_OK;
}

static Err dropout_in_place(const Embedding *e, Ctx *c, Tensor y)
{
    const Dropout d = ctx_dropout(c, e->spec->dropout, e->dropout_key);
    return d.threshold ? residual_add(c, &(ResidualSum){ .sum = y, .branch = y, .dropout = d }) : ERR_OK;
}

Err embedding_forward(const Embedding *e, Ctx *c, Tensor token, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor partial;
    TRY(partial_alloc(c, y, &partial));
    TRY(op(c->s, embedding_fwd, .y = partial, .table = param_value(c, e->table), .index = token,
           .first = first_row(e, c)));
    TRY(reduce_rows(c, partial, y));
    arena_release(c->scratch, mark);
    TRY(scale_rows(e, c, y));
    if (e->position >= 0)
        TRY(op(c->s, embedding_fwd, .y = y, .table = param_value(c, e->position),
               .index = ctx_row_slice(c, ctx_doc_position(c)), .add = 1));
    return dropout_in_place(e, c, y);
}

Err embedding_backward(const Embedding *e, Ctx *c, Tensor token, Tensor dy)
{
    ArenaMark mark = arena_mark(c->scratch);
    Dropout d = ctx_dropout(c, e->spec->dropout, e->dropout_key);
    Tensor full;
    if (d.threshold)
        TRY(op(c->s, residual_bwd, .dx = dy, .dy = dy, .position = ctx_row_slice(c, c->batch->position),
               .sample = ctx_row_slice(c, c->batch->sample), .dropout = d));
    if (e->position >= 0) TRY(grad_add_rows(c, e->position, dy, ctx_row_slice(c, ctx_doc_position(c)), 0));
    TRY(scale_rows(e, c, dy));
    TRY(gather_rows(c, dy, &full));
    TRY(grad_add_rows(c, e->table, full, token, first_row(e, c)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
