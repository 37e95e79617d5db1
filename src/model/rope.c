/*
 * Rotary tables: cos and sin of the angle by which pair i of a head's columns turns at position p,
 *
 *   angle = p g_i,   f_i = base^(-2i/d),   i = 0 .. d/2 - 1,   d columns that turn
 *
 * and the usual ways to make angles smaller for sequences longer than those a model was first trained on:
 *
 *   PLAIN    g_i = f_i
 *   LINEAR   g_i = f_i / factor
 *   LLAMA3   by t = original f_i / 2 pi, how often the pair turned in the sequences first trained on:
 *            s = (t - slow) / (fast - slow) within 0 .. 1      g_i = (1 - s) f_i / factor + s f_i
 *   YARN     by i: i(t) = d ln(original / (2 pi t)) / (2 ln base) is the pair that turned t times;
 *            a = i(fast), b = i(slow), with `truncate` rounded down and up, within 0 .. d - 1
 *            r = (i - a) / (b - a) within 0 .. 1               g_i = r f_i / factor + (1 - r) f_i
 *            and cos and sin times `magnitude`: scores grow by its square
 *
 * Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); the Llama 3 report, 2024; Peng et al. 2023 (YaRN).
 */
#include <math.h>

#include "base/mathx.h"
#include "model/model.h"

static const double two_pi = 6.283185307179586;

static double within(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* The pair that turned so often. */
static double yarn_pair(const RopeSpec *r, int columns, double turns)
{
    return columns * m_log(r->original / (two_pi * turns)) / (2 * m_log(r->base));
}

/* f_i: by how much pair i turns from position to position, unscaled. */
static double plain_angle(const RopeSpec *r, int columns, int64_t i)
{
    return m_exp(-2.0 * (double)i / columns * m_log(r->base));
}

double model_rope_share(const RopeSpec *r, int columns, int64_t i)
{
    if (r->scaling == ROPE_PLAIN) return 1;
    if (r->scaling == ROPE_LINEAR) return 1 / r->factor;
    if (r->scaling == ROPE_LLAMA3) {
        const double turns = r->original * plain_angle(r, columns, i) / two_pi;
        const double s = within((turns - r->slow) / (r->fast - r->slow), 0, 1);
        return (1 - s) / r->factor + s;
    }
    double a = yarn_pair(r, columns, r->fast), b = yarn_pair(r, columns, r->slow);
    if (r->truncate) a = floor(a), b = ceil(b);
    a = within(a, 0, columns - 1);
    b = within(b, 0, columns - 1);
    const double ramp = within(((double)i - a) / (b > a ? b - a : 1e-3), 0, 1);
    return ramp / r->factor + (1 - ramp);
}

/* angles [columns / 2] at position 1 */
static Err fill(const ModelSpec *spec, Stream *s, SetupArena *setup, const double *angle, double magnitude,
                RopeTable *out)
{
    const int64_t R = out->cos.dim[1];
    float *row;
    TRY(setup_array(setup, 2 * R, &row));
    for (int64_t p = 0; p < spec->seq; p++) {
        for (int64_t i = 0; i < R; i++) {
            row[i] = (float)(magnitude * m_cos((double)p * angle[i]));
            row[R + i] = (float)(magnitude * m_sin((double)p * angle[i]));
        }
        TRY(device_write(s, tensor_row_slice(out->cos, p, 1).data, row, R * (int64_t)sizeof *row));
        TRY(device_write(s, tensor_row_slice(out->sin, p, 1).data, row + R, R * (int64_t)sizeof *row));
    }
    return ERR_OK;
}

static Err make_table(const ModelSpec *spec, const RopeSpec *r, Stream *s, Arena *state, SetupArena *setup,
                      RopeTable *out)
{
    const int columns = r->columns ? r->columns : spec->head_dim;
    const int64_t R = columns / 2;
    double *angle;
    TRY(tensor_new(state, &out->cos, F32, spec->seq, R));
    TRY(tensor_new(state, &out->sin, F32, spec->seq, R));
    if (s->dev->is_null) return ERR_OK;
    TRY(setup_array(setup, R, &angle));
    for (int64_t i = 0; i < R; i++) angle[i] = plain_angle(r, columns, i) * model_rope_share(r, columns, i);
    return fill(spec, s, setup, angle, r->scaling == ROPE_YARN ? r->magnitude : 1, out);
}

Err model_rope_tables(const ModelSpec *spec, Stream *s, Arena *state, SetupArena *setup, RopeTables *out)
{
    const RopeSpec *r = &spec->rope;
    const RopeSpec local = { .base = r->local_base, .columns = r->columns };
    *out = (RopeTables){ 0 };
    if (!layer_pattern_most(&r->layers)) return ERR_OK;
    TRY(make_table(spec, r, s, state, setup, &out->all));
    if (!(r->local_base > 0) || !layer_pattern_most(&spec->window)) return ERR_OK;
    return make_table(spec, &local, s, state, setup, &out->local);
}
