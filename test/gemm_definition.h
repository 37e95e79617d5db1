/*
 * The product as gemm.h defines it, one element at a time, and a device to make it on: for the tests of the kernels
 * (test_gemm.c) and of the ops over them (test_linear.c).
 */
#ifndef MEGATRAIN_TEST_GEMM_DEFINITION_H
#define MEGATRAIN_TEST_GEMM_DEFINITION_H

#include "test.h"

#include "base/half.h"
#include "cpu/gemm.h"
#include "dot_step.h"

static uint64_t seed = 1;

static inline int64_t pick(int64_t low, int64_t high)
{
    return low + (int64_t)(test_rand(&seed) % (uint64_t)(high - low + 1));
}

static inline float *random_floats(int64_t n)
{
    float *p = malloc((size_t)(n ? n : 1) * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = (float)test_uniform(&seed, -1, 1);
    return p;
}

static void *copy_of(const void *p, int64_t bytes)
{
    void *q = malloc((size_t)(bytes ? bytes : 1));
    memcpy(q, p, (size_t)bytes);
    return q;
}

static float at(GemmOperand m, int64_t i, int64_t j)
{
    const int64_t n = m.transposed ? j * m.ld + i : i * m.ld + j;
    return m.bf16 ? bf16_to_float(m.bf16[n]) : m.data[n];
}

static DotKind defined_dot; /* of products of bf16 */

static float dot_pairs(const Gemm *g, int64_t i, int64_t j, int64_t k, int64_t end, float c)
{
    for (; k < end; k += 2) {
        const bool two = k + 1 < end;
        c = dot_step(two ? at(g->a, i, k + 1) : 0, two ? at(g->b, k + 1, j) : 0, c);
        c = dot_step(at(g->a, i, k), at(g->b, k, j), c);
    }
    return c;
}

/* Depths of 32, the last one filled up with 0. */
static float dot_depths(const Gemm *g, int64_t i, int64_t j, int64_t k, int64_t end, float c)
{
    for (; k < end; k += 32) {
        float sum[2] = { 0, 0 };
        for (int64_t q = 0; q < 32; q++) {
            const bool there = k + q < end;
            sum[q % 2] = dot_step(there ? at(g->a, i, k + q) : 0, there ? at(g->b, k + q, j) : 0, sum[q % 2]);
        }
        c = flushed(flushed(c) + flushed(sum[0] + sum[1]));
    }
    return c;
}

static float chain(const Gemm *g, int64_t i, int64_t j, int64_t k, int64_t end, float c)
{
    if (g->a.bf16 && defined_dot == DOT_VDPBF16) return dot_pairs(g, i, j, k, end, c);
    if (g->a.bf16 && defined_dot == DOT_AMX) return dot_depths(g, i, j, k, end, c);
    for (; k < end; k++) c = fmaf(at(g->a, i, k), at(g->b, k, j), c);
    return c;
}

static float tree(const Gemm *g, int64_t i, int64_t j)
{
    float stack[64] = { 0 };
    int top = 0;
    int64_t leaf = 0;
    for (int64_t k = 0; k < g->K; k += g->leaf, leaf++) {
        stack[top++] = chain(g, i, j, k, k + g->leaf < g->K ? k + g->leaf : g->K, 0);
        for (int64_t x = leaf; x & 1; x >>= 1, top--) stack[top - 2] += stack[top - 1];
    }
    for (; top > 1; top--) stack[top - 2] += stack[top - 1];
    return stack[0];
}

static bool define_fixed(const Gemm *g, int64_t i, int64_t j)
{
    bool overflow = false;
    int64_t sum = g->beta ? g->fixed[i * g->ldc + j] : 0;
    for (int64_t leaf = 0, k = 0, end; k < g->K; k = end, leaf++) {
        end = g->starts ? g->starts[leaf + 1] - g->starts[0] : k + g->leaf < g->K ? k + g->leaf : g->K;
        float v = ldexpf(chain(g, i, j, k, end, 0), g->shift);
        if (fabsf(v) < ldexpf(1, 62 - g->headroom_bits)) sum += llrintf(v);
        else overflow = true;
    }
    g->fixed[i * g->ldc + j] = sum;
    return overflow;
}

static bool define(const Gemm *g)
{
    bool overflow = false;
    for (int64_t i = 0; i < g->M; i++) {
        for (int64_t j = 0; j < g->N; j++) {
            const GemmNarrow *n = &g->narrow;
            float own = 0, *c = n->c ? &own : g->c + i * g->ldc + j;
            if (g->mode == GEMM_I64) {
                overflow |= define_fixed(g, i, j);
                continue;
            }
            *c = g->mode == GEMM_TREE ? tree(g, i, j) : chain(g, i, j, 0, g->K, g->beta ? *c : 0);
            if (g->bias) *c += g->bias[j];
            if (n->bias) *c += bf16_to_float(n->bias[j]);
            if (n->c) n->c[i * g->ldc + j] = bf16_from_float(own);
        }
    }
    return overflow;
}

/* A device of which gemm may use the threads and a workspace with a guard behind it. */
enum { WORKSPACE_GUARD = 4096 };
static char *workspace;

static Device device(int threads)
{
    if (!workspace) workspace = aligned_alloc(4096, DEVICE_WORKSPACE_BYTES + WORKSPACE_GUARD);
    memset(workspace + DEVICE_WORKSPACE_BYTES, 0x5a, WORKSPACE_GUARD);
    return (Device){ .threads = threads, .workspace = workspace, .workspace_bytes = DEVICE_WORKSPACE_BYTES };
}

#endif
