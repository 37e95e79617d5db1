/*
 * The delta rule in float64, token by token, forward and backward: with one gate a head's row (the gated delta rule) or
 * one a column of its keys (Kimi Delta Attention).
 */
#ifndef MEGATRAIN_TEST_DELTA_RULE_H
#define MEGATRAIN_TEST_DELTA_RULE_H

#include "scan_case.h"

typedef struct {
    int64_t B, T, K, V, D, E, first;
    int64_t A;          /* gates of a head's row: 1, or D, one a column of keys */
    const int32_t *doc; /* [B][T] or NULL */
    double *q, *k, *v, *g, *beta, *before, *go, *dafter;
    double *o, *after, *dq, *dk, *dv, *dg, *dbeta, *dbefore;
} Rule;

static inline void rule_open(Rule *r)
{
    const int64_t N = r->B * r->T, state = r->B * r->V * r->D * r->E;
    r->q = zeros(N * r->K * r->D), r->k = zeros(N * r->K * r->D), r->v = zeros(N * r->V * r->E);
    r->g = zeros(N * r->V * r->A), r->beta = zeros(N * r->V), r->before = zeros(state);
    r->go = zeros(N * r->V * r->E), r->dafter = zeros(state);
    r->o = zeros(N * r->V * r->E), r->after = zeros(state);
    r->dq = zeros(N * r->K * r->D), r->dk = zeros(N * r->K * r->D), r->dv = zeros(N * r->V * r->E);
    r->dg = zeros(N * r->V * r->A), r->dbeta = zeros(N * r->V), r->dbefore = zeros(state);
}

static inline void rule_close(Rule *r)
{
    double *all[] = { r->q, r->k,     r->v,  r->g,  r->beta, r->before, r->go,    r->dafter,
                      r->o, r->after, r->dq, r->dk, r->dv,   r->dg,     r->dbeta, r->dbefore };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* A row of a head: S, what it was before, and what is read and written. */
typedef struct {
    const double *q, *k, *v, *g;
    double beta;
    bool begins;
} Token;

static inline Token token_of(const Rule *r, int64_t b, int64_t h, int64_t t)
{
    const int64_t n = b * r->T + t, key = n * r->K + h / (r->V / r->K), value = n * r->V + h;
    return (Token){ r->q + key * r->D,   r->k + key * r->D, r->v + value * r->E,
                    r->g + value * r->A, r->beta[value],    r->doc && r->doc[n] == r->first + t };
}

/* The factor that leaves row d of the state. */
static inline double token_left(const Rule *r, const Token *x, int64_t d) { return exp(x->g[r->A > 1 ? d : 0]); }

/* e = v - D^T k with D = exp(g) S */
static inline double token_error(const Rule *r, const Token *x, const double *S, int64_t e)
{
    double y = 0;
    for (int64_t d = 0; d < r->D; d++) y += token_left(r, x, d) * S[d * r->E + e] * x->k[d];
    return x->v[e] - y;
}

static inline void token_forward(const Rule *r, const Token *x, double *S, double *o)
{
    const int64_t size = r->D * r->E;
    if (x->begins) memset(S, 0, (size_t)size * sizeof *S);
    for (int64_t e = 0; e < r->E; e++) {
        const double error = token_error(r, x, S, e);
        o[e] = 0;
        for (int64_t d = 0; d < r->D; d++) {
            double *s = &S[d * r->E + e];
            *s = token_left(r, x, d) * *s + x->k[d] * x->beta * error;
            o[e] += *s * x->q[d];
        }
    }
}

/* S: before the token. dS: behind it; becomes that before it. */
static inline void token_backward(const Rule *r, const Token *x, const double *S, const double *after, double *dS,
                                  int64_t key, int64_t value)
{
    const double *go = r->go + value * r->E;
    for (int64_t e = 0; e < r->E; e++) {
        const double error = token_error(r, x, S, e);
        double dd = 0;
        for (int64_t d = 0; d < r->D; d++) {
            double *ds = &dS[d * r->E + e];
            *ds += x->q[d] * go[e];
            r->dq[key * r->D + d] += after[d * r->E + e] * go[e];
            dd += *ds * x->k[d];
        }
        const double de = x->beta * dd;
        r->dbeta[value] += dd * error;
        r->dv[value * r->E + e] = de;
        for (int64_t d = 0; d < r->D; d++) {
            double *ds = &dS[d * r->E + e];
            const double left = token_left(r, x, d), D = left * S[d * r->E + e];
            r->dk[key * r->D + d] += *ds * x->beta * error - D * de;
            *ds -= x->k[d] * de;
            r->dg[value * r->A + (r->A > 1 ? d : 0)] += *ds * D;
            *ds *= left;
        }
    }
    if (x->begins) memset(dS, 0, (size_t)(r->D * r->E) * sizeof *dS);
}

static inline void rule_forward(const Rule *r)
{
    const int64_t size = r->D * r->E;
    for (int64_t i = 0; i < r->B * r->V; i++) {
        double *S = r->after + i * size;
        memcpy(S, r->before + i * size, (size_t)size * sizeof *S);
        for (int64_t t = 0; t < r->T; t++) {
            const Token x = token_of(r, i / r->V, i % r->V, t);
            token_forward(r, &x, S, r->o + ((i / r->V * r->T + t) * r->V + i % r->V) * r->E);
        }
    }
}

static inline void rule_backward(const Rule *r)
{
    const int64_t size = r->D * r->E;
    double *S = zeros(r->T * size), *after = zeros(r->T * size), *o = zeros(r->E);
    for (int64_t i = 0; i < r->B * r->V; i++) {
        const int64_t b = i / r->V, h = i % r->V;
        double *dS = r->dbefore + i * size;
        memcpy(dS, r->dafter + i * size, (size_t)size * sizeof *S);
        for (int64_t t = 0; t < r->T; t++) {
            const Token x = token_of(r, b, h, t);
            const double *state = t ? after + (t - 1) * size : r->before + i * size;
            for (int64_t j = 0; j < size; j++) after[t * size + j] = S[t * size + j] = x.begins ? 0 : state[j];
            token_forward(r, &x, after + t * size, o);
        }
        for (int64_t t = r->T - 1; t >= 0; t--) {
            const Token x = token_of(r, b, h, t);
            const int64_t n = b * r->T + t;
            token_backward(r, &x, S + t * size, after + t * size, dS, n * r->K + h / (r->V / r->K), n * r->V + h);
        }
    }
    free(S);
    free(after);
    free(o);
}

/* ---- its gradients against finite differences ---- */

static inline double rule_loss(const Rule *r)
{
    double loss = 0;
    rule_forward(r);
    for (int64_t i = 0; i < r->B * r->T * r->V * r->E; i++) loss += r->o[i] * r->go[i];
    for (int64_t i = 0; i < r->B * r->V * r->D * r->E; i++) loss += r->after[i] * r->dafter[i];
    return loss;
}

static inline void check_slopes(const char *name, Rule *r, double *x, const double *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const double at = x[i], step = 1e-5;
        x[i] = at + step;
        const double high = rule_loss(r);
        x[i] = at - step;
        const double slope = (high - rule_loss(r)) / (2 * step);
        x[i] = at;
        CHECK_CLOSE(want[i], slope, 1e-7, "%s %d", name, (int)i);
    }
}

#endif
