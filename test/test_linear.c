/*
 * The linear ops against the definition of the product (gemm_definition.h), bit for bit, in every build of the kernels:
 * which operand goes where, leaves, row counts, results that start anew; GELU within them.
 */
#include "gemm_definition.h"

#include <math.h>

#include "layer/internal.h"
#include "tested_op.h"

typedef struct {
    Isa isa;
    const OpTable *op;
} Build;

static const Build builds[] = { { ISA_AVX512, &cpu_avx512_ops }, { ISA_AVX2, &cpu_avx2_ops }, { ISA_C, &cpu_c_ops } };
/* An op as one build has it, whatever the machine would choose. */
#define CALL(table, name, ...)              \
    do {                                    \
        OP_IS_TESTED(name);                 \
        OK((table)->name(__VA_ARGS__));     \
    } while (0)
#define EACH_BUILD(b) for (const Build *b = builds; b < builds + 3; b++) if (isa_supported(b->isa))

TEST(linear_ops)
{
    enum { N = 37, O = 50, I = 96, LEAF = 10 };
    static const int64_t counts[] = { -1, 0, 1, 20, 100 }; /* -1: no row count */
    float *x = random_floats(N * I), *w = random_floats(O * I), *dy = random_floats(N * O), *bias = random_floats(O);
    float *y = random_floats(N * O), *dx = random_floats(N * I), *dw = random_floats(O * I);
    EACH_BUILD(b) for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t rows = counts[i] < 0 || counts[i] > N ? N : counts[i];
        const OpTable *op = b->op;
        const char *isa = isa_name(b->isa);
        Device dev = device(2);
        Stream s = { &dev };
        Tensor tx = tensor_of(x, F32, N, I), tw = tensor_of(w, F32, O, I), tdy = tensor_of(dy, F32, N, O);
        if (counts[i] >= 0) tx.rows = tdy.rows = &counts[i];
        float *got = copy_of(y, N * O * 4), *want = copy_of(y, N * O * 4);
        CALL(op, linear_fwd, &s, &(linear_fwd_args){ tensor_of(got, F32, N, O), tx, tw, tensor_of(bias, F32, O),
                                                     .leaf = I / 8 });
        define(&(Gemm){ GEMM_TREE, rows, O, I, I / 8, { x, I, false }, { w, I, true }, want, .ldc = O, .bias = bias });
        CHECK_MSG(!memcmp(got, want, N * O * 4), "%s fwd, %lld rows", isa, (long long)counts[i]);
        free(got), free(want);

        got = copy_of(dx, N * I * 4), want = copy_of(dx, N * I * 4);
        CALL(op, linear_dx, &s, &(linear_dx_args){ tensor_of(got, F32, N, I), tdy, tw, .leaf = O });
        define(&(Gemm){ GEMM_CHAIN, rows, I, O, 0, { dy, O, false }, { w, I, false }, want, .ldc = I });
        CHECK_MSG(!memcmp(got, want, N * I * 4), "%s dx, %lld rows", isa, (long long)counts[i]);
        free(got), free(want);

        got = copy_of(dw, O * I * 4), want = copy_of(dw, O * I * 4);
        int32_t shift = 40, overflow = 0;
        linear_dw_args a = { tensor_of(got, F32, O, I), tdy, tx, tensor_of(&shift, I32, 1),
                             tensor_of(&overflow, I32, 1), .leaf = LEAF, .headroom_bits = 16 };
        CALL(op, linear_dw, &s, &a);
        define(&(Gemm){ GEMM_CHAIN, O, I, rows, 0, { dy, O, true }, { x, I, false }, want, .ldc = I, .beta = true });
        CHECK_MSG(!memcmp(got, want, O * I * 4), "%s dw f32, %lld rows", isa, (long long)counts[i]);
        free(got), free(want);

        int64_t *fixed = calloc(O * I, 8), *want_fixed = calloc(O * I, 8);
        a.dw = tensor_of(fixed, I64, O, I);
        CALL(op, linear_dw, &s, &a);
        define(&(Gemm){ GEMM_I64, O, I, rows, LEAF, { dy, O, true }, { x, I, false }, .fixed = want_fixed, .ldc = I,
                        .beta = true, .shift = shift, .headroom_bits = 16 });
        CHECK_MSG(!memcmp(fixed, want_fixed, O * I * 8), "%s dw i64, %lld rows", isa, (long long)counts[i]);
        CHECK(overflow == 0);
        shift = 60;
        CALL(op, linear_dw, &s, &a);
        CHECK(overflow == (rows > 0));

        shift = 40, a.fresh = 1;
        memset(fixed, 0x55, O * I * 8); /* not read */
        CALL(op, linear_dw, &s, &a);
        define(&(Gemm){ GEMM_I64, O, I, rows, LEAF, { dy, O, true }, { x, I, false }, .fixed = want_fixed, .ldc = I,
                        .shift = shift, .headroom_bits = 16 });
        CHECK_MSG(!memcmp(fixed, want_fixed, O * I * 8), "%s dw i64 fresh, %lld rows", isa, (long long)counts[i]);
        free(fixed), free(want_fixed);
    }
    free(x), free(w), free(dy), free(bias), free(y), free(dx), free(dw);
}

/* GELU within the product and its gradient behind it: the bits of the two ops one after the other. */
TEST(linear_gelu)
{
    enum { N = 37, O = 50, I = 96 };
    static const int64_t counts[] = { -1, 20 }; /* -1: no row count */
    float *x = random_floats(N * I), *w = random_floats(O * I), *dy = random_floats(N * O), *bias = random_floats(O),
          *start = random_floats(N * I);
    EACH_BUILD(b) for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const OpTable *op = b->op;
        const char *isa = isa_name(b->isa);
        Device dev = device(2);
        Stream s = { &dev };
        Tensor tx = tensor_of(x, F32, N, I), tw = tensor_of(w, F32, O, I), tdy = tensor_of(dy, F32, N, O),
               tb = tensor_of(bias, F32, O), out[2][3];
        if (counts[i] >= 0) tx.rows = tdy.rows = &counts[i];
        for (int fused = 0; fused < 2; fused++) {
            Tensor *t = out[fused];
            for (int j = 0; j < 3; j++)
                t[j] = tensor_of(copy_of(start, N * I * 4), F32, N, j == 2 ? I : O);
            CALL(op, linear_fwd, &s, &(linear_fwd_args){ .y = t[0], .x = tx, .w = tw, .bias = tb, .leaf = I / 8,
                                                         .gelu = fused ? t[1] : (Tensor){ 0 } });
            CALL(op, linear_dx, &s, &(linear_dx_args){ .dx = t[2], .dy = tdy, .w = tw, .leaf = O,
                                                       .gelu_x = fused ? tensor_of(x, F32, N, I) : (Tensor){ 0 } });
            if (fused) continue;
            t[0].rows = t[2].rows = tx.rows;
            OK(op->gelu_fwd(&s, &(gelu_fwd_args){ .y = t[1], .x = t[0] }));
            OK(op->gelu_bwd(&s, &(gelu_bwd_args){ .dx = t[2], .dy = t[2], .x = tensor_of(x, F32, N, I) }));
        }
        for (int j = 0; j < 3; j++) {
            CHECK_MSG(!memcmp(out[0][j].data, out[1][j].data, N * I * 4), "%s tensor %d, %lld rows", isa, j,
                      (long long)counts[i]);
            free(out[0][j].data), free(out[1][j].data);
        }
    }
    free(x), free(w), free(dy), free(bias), free(start);
}

/* ---- how long sums are cut ---- */

static int64_t leaf_of(int tp_blocks, int64_t global, int64_t local)
{
    const Ctx c = { .canon = { .exact = true, .tp_blocks = tp_blocks } };
    return tree_leaf(&c, global, local);
}

TEST(leaves_of_long_sums)
{
    static const int64_t vocabs[] = { 251, 257, 2048, 2049, 32000, 50257, 128256, 151936, 1000003 };
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++)
        for (int blocks = 1; blocks <= 64; blocks *= 2) {
            const int64_t K = head_padded_vocab(vocabs[i], blocks), chunk = K / blocks, leaf = leaf_of(blocks, K, K);
            CHECK(K >= vocabs[i] && K % (16 * blocks) == 0 && K - vocabs[i] < blocks * (vocabs[i] / 2048 * 2 + 16));
            CHECK_MSG(leaf <= LEAF_MOST && leaf * 2 > (chunk < LEAF_MOST ? chunk : LEAF_MOST),
                      "%lld in %d chunks: %lld", (long long)vocabs[i], blocks, (long long)leaf);
            /* each rank's part is an aligned run of a power of two of leaves, the same ones whatever tp is */
            CHECK(chunk % leaf == 0 && ((chunk / leaf) & (chunk / leaf - 1)) == 0);
            for (int tp = 1; tp <= blocks; tp *= 2) CHECK(leaf_of(blocks, K, K / tp) == leaf);
        }
    /* short ones are chains, as the chunks are */
    CHECK(leaf_of(8, 3072, 3072) == 384 && leaf_of(1, 1365, 1365) == 1365);
    CHECK(leaf_of(1, 11009, 11009) == 1377 && whole_leaf(4096) == 2048 && whole_leaf(2048) == 2048);
    CHECK(leaf_of(2, 2 * 5001, 5001) == 5001); /* nothing to halve */
}

/* Against double: a sum over a vocabulary is as exact with one chunk as with eight, and one chain is not. */
TEST(long_sums_are_exact_whatever_the_chunks)
{
    enum { M = 4, N = 48, VOCAB = 50257 };
    const int64_t most = head_padded_vocab(VOCAB, 8);
    float *a = random_floats(M * most), *b = random_floats(most * N), *y = random_floats(M * N);
    double error[4] = { 0 }, all = 0;
    for (int way = 0; way < 4; way++) {
        static const int chunks[] = { 1, 1, 2, 8 };
        const int blocks = chunks[way]; /* way 0: one chain */
        const int64_t K = VOCAB;
        define(&(Gemm){ GEMM_TREE, M, N, K, way ? leaf_of(blocks, head_padded_vocab(VOCAB, blocks), K) : K,
                        { a, most, false }, { b, N, false }, y, .ldc = N });
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                double want = 0;
                for (int64_t k = 0; k < K; k++) want += (double)a[i * most + k] * b[k * N + j];
                error[way] += (y[i * N + j] - want) * (y[i * N + j] - want);
                all += way ? 0 : want * want;
            }
        error[way] = sqrt(error[way] / all);
    }
    printf("    one chain %.2e, 1 chunk %.2e, 2 chunks %.2e, 8 chunks %.2e\n", error[0], error[1], error[2], error[3]);
    for (int way = 1; way < 4; way++) CHECK(error[way] < 1e-6 && error[0] > 3 * error[way]);
    free(a), free(b), free(y);
}

TEST_MAIN
