/*
 * Products of linear layers by operands of 8 bits, or 4 (docs/precision.md). Weights, activations and gradients stay as
 * they are; each operand is cast when a product is made, in scratch, with the dim that it sums over last:
 *
 *   y  = x w^T      x [N, I]            w [O, I]
 *   dx = dy w       dy [N, O]           w transposed [I, O]
 *   dw = dy^T x     dy transposed [O, N]  x transposed [I, N]
 *
 *             one factor for             gradients
 *   tensorwise  the tensor               e5m2
 *   blockwise   1 x 128, w 128 x 128     e4m3
 *   mxfp8       1 x 32                   e4m3
 *   nvfp4       1 x 16, w 16 x 16        e2m1, as all are; factors by the tensor's largest magnitude, too; in dw each
 *                                        16 tokens are mixed, of x and of dy
 *
 * dy is read once for its codes and for those of dy transposed, where dx and dw are of the same rows and dw is made at
 * once. x is cast again in backward, for its codes would take memory until then.
 *
 * The largest magnitude of a whole tensor (tensorwise, nvfp4) is that over all ranks that share it: columns are cut
 * over tp, rows over sp and cp. The maximum over tp and over cp is right for all: where ranks have the same, it changes
 * nothing. That of x is kept from forward to backward, a forward that is made again included, and that of a weight
 * until it changes; so are a weight's codes, both ways, where that is asked for.
 */
#include "layer/internal.h"

static const Tensor none;

/* An operand to cast. */
typedef struct {
    bool weight, gradient;
} Role;

Fp8Blocks fp8_blocks_of(Fp8Recipe recipe, bool weight)
{
    const Fp8Facts *f = fp8_facts(recipe);
    return (Fp8Blocks){ weight ? f->weight_rows : f->block != 0, f->block, f->scale };
}

Err fp8_codes_alloc(Arena *at, DType t, Fp8Blocks b, int64_t rows, int64_t columns, Tensor *codes, Tensor *factor)
{
    TRY(tensor_new(at, codes, t, rows, columns));
    codes->scale = factor;
    if (!b.rows) return tensor_new(at, factor, F32, 1);
    TRY(tensor_new(at, factor, F32, fp8_factor_rows(b, rows), fp8_factor_ld(b, columns)));
    *factor = tensor_row_slice(*factor, 0, fp8_block_count(rows, b.rows));
    *factor = tensor_col_slice(*factor, 0, fp8_block_count(columns, b.columns));
    return ERR_OK;
}

static DType format_of(Fp8Recipe recipe, Role r)
{
    if (fp8_facts(recipe)->bits == 4) return E2M1;
    return r.gradient && fp8_facts(recipe)->wide ? E5M2 : E4M3;
}

static Err alloc_operand(Ctx *c, Fp8Recipe recipe, Role r, int64_t rows, int64_t columns, Fp8Operand *out)
{
    return fp8_codes_alloc(c->scratch, format_of(recipe, r), fp8_blocks_of(recipe, r.weight), rows, columns,
                           &out->codes, &out->factor);
}

/* x as it lies, or transposed, or both. NULL: it is not wanted. */
static Err cast_operand(Ctx *c, Fp8Recipe recipe, Role r, Tensor x, Tensor amax, Fp8Operand *y, Fp8Operand *turned)
{
    const bool mixed = fp8_facts(recipe)->mixes && !r.weight;
    if (turned) TRY(alloc_operand(c, recipe, r, x.dim[1], x.dim[0], turned));
    if (y) TRY(alloc_operand(c, recipe, r, x.dim[0], x.dim[1], y));
    return op(c->s, fp8_cast, .y = y ? y->codes : none, .turned = turned ? turned->codes : none, .x = x,
              .amax = mixed ? tensor_row_slice(amax, 0, 1) : amax,
              .turned_amax = mixed ? tensor_row_slice(amax, 1, 1) : none, .blocks = fp8_blocks_of(recipe, r.weight),
              .mixed = mixed);
}

/* ---- largest magnitudes ---- */

static Err over_ranks(Ctx *c, Tensor amax)
{
    Comm *groups[] = { &c->world->tp, &c->world->cp };
    for (int i = 0; i < 2; i++)
        if (groups[i]->size > 1) TRY(comm_max_i64(groups[i], c->s, amax.data, tensor_count(amax), NULL));
    return ERR_OK;
}

/* Makes one number, or two: for x as it is, and for x as it is mixed. */
static Err make_amax(Ctx *c, Tensor amax, Tensor x)
{
    for (int mixed = 0; mixed < amax.dim[0]; mixed++)
        TRY(op(c->s, fp8_amax, .amax = tensor_row_slice(amax, mixed, 1), .x = x, .fresh = true, .mixed = mixed));
    return over_ranks(c, amax);
}

/* (of weights of some updates ago nothing is kept) */
static Err weight_amax(Ctx *c, int id, Tensor w, Tensor *amax)
{
    ParamStore *s = c->params;
    const bool keeps = c->mode.version == 0;
    if (!keeps) TRY(tensor_new(c->scratch, amax, I64, 1));
    else *amax = tensor_row_slice(s->eights.amax, id, 1);
    if (keeps && s->eights.amax_known[id]) return ERR_OK;
    if (keeps) s->eights.amax_known[id] = true;
    return make_amax(c, *amax, w);
}

static Tensor input_amax(const Ctx *c, Fp8Recipe recipe, int weight)
{
    const int count = fp8_amax_count(recipe);
    return fp8_facts(recipe)->tensor ? tensor_row_slice(c->slot->amax, count * weight, count) : none;
}

/* ---- weights ---- */

static const Role a_weight = { .weight = true };

static Err keep_codes(const ParamStore *s, int id, Fp8Recipe recipe, Arena *state)
{
    const Param *p = &s->reg->items[id];
    ParamCodes *k = &s->eights.codes[id];
    if (!(p->spec.flags & PARAM_EIGHT_BITS)) return ERR_OK;
    for (int turned = 0; turned < 2; turned++) {
        const int64_t rows = p->local[turned], columns = p->local[!turned];
        TRY(fp8_codes_alloc(state, format_of(recipe, a_weight), fp8_blocks_of(recipe, true), rows, columns,
                            &k->codes[turned], &k->factor[turned]));
    }
    return ERR_OK;
}

Err fp8_keep_weights(ParamStore *s, const Fp8Spec *spec, Arena *state)
{
    SetupArena *setup = s->reg->setup;
    if (fp8_facts(spec->recipe)->tensor) {
        TRY(tensor_new(state, &s->eights.amax, I64, s->reg->count));
        TRY(setup_array(setup, s->reg->count, &s->eights.amax_known));
    }
    if (!spec->recipe || !spec->keeps_weights) return ERR_OK;
    TRY(setup_array(setup, s->reg->count, &s->eights.codes));
    TRY(setup_array(setup, s->reg->count, &s->eights.cast));
    for (int id = 0; id < s->reg->count; id++) TRY(keep_codes(s, id, spec->recipe, state));
    return ERR_OK;
}

/* Both ways at once, the first time. */
static Err kept_weight(Ctx *c, Fp8Weight *out, int id, Tensor w, Tensor amax, bool transposed)
{
    const ParamEights *e = &c->params->eights;
    const ParamCodes *k = &e->codes[id];
    out->w = k->codes[transposed];
    out->factor = k->factor[transposed];
    if (e->cast[id]) return ERR_OK;
    e->cast[id] = true;
    return op(c->s, fp8_cast, .y = k->codes[false], .turned = k->codes[true], .x = w, .amax = amax,
              .blocks = fp8_blocks_of(out->recipe, true));
}

static Err cast_weight(Ctx *c, Fp8Weight *out, int id, bool transposed)
{
    const Tensor w = param_value(c, id);
    Tensor amax = none;
    Fp8Operand o;
    if (fp8_facts(out->recipe)->tensor) TRY(weight_amax(c, id, w, &amax));
    if (c->params->eights.codes && c->mode.version == 0) return kept_weight(c, out, id, w, amax, transposed);
    TRY(cast_operand(c, out->recipe, a_weight, w, amax, transposed ? NULL : &o, transposed ? &o : NULL));
    out->w = o.codes;
    out->factor = o.factor;
    return ERR_OK;
}

/* The weight with its factors, which lie in q. */
static Tensor weight_of(const Fp8Weight *q)
{
    Tensor w = q->w;
    w.scale = &q->factor;
    return w;
}

/* ---- who looks on ---- */

typedef struct {
    const char *what;
    Tensor t;
} Shown;

static Err show(Ctx *c, int weight, const Shown *list, int count)
{
    const char *name = c->params->reg->items[weight].name;
    for (int i = 0; c->onlooker.see && i < count; i++)
        if (list[i].t.data) TRY(c->onlooker.see(c->onlooker.user, name, list[i].what, list[i].t));
    return ERR_OK;
}

static Err show_forward(Ctx *c, const Fp8Weight *w, const Fp8Operand *x, const linear_fwd_args *a)
{
    const Shown list[] = { { "forward.x", a->x },
                           { "forward.x.codes", x->codes },
                           { "forward.x.factor", x->factor },
                           { "forward.w", a->w },
                           { "forward.w.codes", w->w },
                           { "forward.w.factor", w->factor },
                           { "forward.bias", a->bias },
                           { "forward.y", a->y } };
    return show(c, w->id, list, (int)(sizeof list / sizeof *list));
}

static Err show_dx(Ctx *c, const Fp8Weight *w, const Fp8Operand *dy, const linear_dx_args *a)
{
    const Shown list[] = { { "dx.dy", a->dy },     { "dx.dy.codes", dy->codes }, { "dx.dy.factor", dy->factor },
                           { "dx.w.codes", w->w }, { "dx.w.factor", w->factor }, { "dx.dx", a->dx } };
    return show(c, w->id, list, (int)(sizeof list / sizeof *list));
}

static Err show_dw(Ctx *c, int weight, const Fp8Operand *dy, const Fp8Operand *x, const linear_dw_args *a)
{
    const Shown list[] = { { "dw.dy", a->dy }, { "dw.dy.codes", dy->codes }, { "dw.dy.factor", dy->factor },
                           { "dw.x", a->x },   { "dw.x.codes", x->codes },   { "dw.x.factor", x->factor } };
    return show(c, weight, list, (int)(sizeof list / sizeof *list));
}

/* ---- forward ---- */

Err fp8_begin_forward(Ctx *c, Fp8Recipe recipe, int weight, Tensor x, Fp8Weight *out)
{
    *out = (Fp8Weight){ .recipe = recipe, .id = weight, .amax = input_amax(c, recipe, weight) };
    if (!recipe) return ERR_OK;
    TRY(cast_weight(c, out, weight, false));
    const bool again = c->mode.pass == PASS_BACKWARD;
    return fp8_facts(recipe)->tensor && !again ? make_amax(c, out->amax, x) : ERR_OK;
}

Err fp8_forward(Ctx *c, const Fp8Weight *w, linear_fwd_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Fp8Operand x;
    TRY(cast_operand(c, w->recipe, (Role){ 0 }, a.x, w->amax, &x, NULL));
    TRY(op(c->s, fp8_product, .y = a.y, .x = x.codes, .w = weight_of(w), .bias = a.bias, .gelu = a.gelu, .leaf = a.leaf,
           .fast = !fp8_facts(w->recipe)->block));
    TRY(show_forward(c, w, &x, &a));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- backward ---- */

/* The largest magnitude of dy is kept as long as wgrad waits. */
Err fp8_begin_backward(Ctx *c, Fp8Recipe recipe, Wgrad *wgrad, Fp8Weight *out)
{
    *out = (Fp8Weight){ .recipe = recipe, .id = wgrad->weight };
    wgrad->fp8 = recipe;
    if (!recipe) return ERR_OK;
    if (fp8_facts(recipe)->tensor) {
        TRY(tensor_new(c->mode.split_backward ? c->into[REGION_W] : c->scratch, &out->amax, I64,
                       fp8_amax_count(recipe)));
        TRY(make_amax(c, out->amax, wgrad->dy));
        wgrad->amax = out->amax;
    }
    return cast_weight(c, out, wgrad->weight, true);
}

Err fp8_dx(Ctx *c, const Fp8Weight *w, linear_dx_args a, Wgrad *whole)
{
    const Role gradient = { .gradient = true };
    Fp8Operand dy, turned;
    ArenaMark mark = arena_mark(c->scratch);
    TRY(cast_operand(c, w->recipe, gradient, a.dy, w->amax, &dy, whole ? &turned : NULL));
    if (whole) whole->turned = turned.codes, whole->factor = turned.factor;
    TRY(op(c->s, fp8_product, .y = a.dx, .x = dy.codes, .w = weight_of(w), .leaf = a.leaf));
    TRY(show_dx(c, w, &dy, &a));
    if (!whole) arena_release(c->scratch, mark);
    return a.gelu_x.data ? op(c->s, gelu_bwd, .dx = a.dx, .dy = a.dx, .x = a.gelu_x) : ERR_OK;
}

/* dy's codes, from before or now. */
static Err turned_gradient(Ctx *c, const Wgrad *w, Tensor dy, Fp8Operand *out)
{
    if (!w->turned.data) return cast_operand(c, w->fp8, (Role){ .gradient = true }, dy, w->amax, NULL, out);
    *out = (Fp8Operand){ w->turned, w->factor };
    out->codes.scale = &out->factor;
    return ERR_OK;
}

Err fp8_dw(Ctx *c, const Wgrad *w, linear_dw_args a)
{
    const ArenaMark mark = arena_mark(c->scratch);
    Fp8Operand dy, x;
    TRY(turned_gradient(c, w, a.dy, &dy));
    TRY(cast_operand(c, w->fp8, (Role){ 0 }, a.x, input_amax(c, w->fp8, w->weight), NULL, &x));
    TRY(op(c->s, fp8_product_add, .dw = a.dw, .dy = dy.codes, .x = x.codes, .shift = a.shift, .overflow = a.overflow,
           .leaf = a.leaf, .headroom_bits = a.headroom_bits, .fresh = a.fresh));
    TRY(show_dw(c, w->weight, &dy, &x, &a));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
