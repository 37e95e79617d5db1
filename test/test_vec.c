/*
 * vec.h: every function in all three builds that this machine can run, in one program: bit-equal with each
 * other, and right by scalar C, llrint, float64 libm and base/rng.h. Names of vec.h are given a suffix per
 * instruction set by the list below (vec_probe.h is included once for each).
 */
#include "test.h"

#include <immintrin.h>

#include "base/half.h"
#include "base/rng.h"
#include "device/device.h"

#define ISA_PASTE2(name, isa) name##_##isa
#define ISA_PASTE(name, isa) ISA_PASTE2(name, isa)
#define ISA_NAME(name) ISA_PASTE(name, CPU_ISA)
#define PROBE(name) ISA_PASTE(probe_##name, CPU_ISA)

#define VEC ISA_NAME(VEC)
#define bits_spread4 ISA_NAME(bits_spread4)
#define fix_limit ISA_NAME(fix_limit)
#define fix_scale ISA_NAME(fix_scale)
#define philox16 ISA_NAME(philox16)
#define philox_keep64 ISA_NAME(philox_keep64)
#define vec_abs ISA_NAME(vec_abs)
#define vec_abs64 ISA_NAME(vec_abs64)
#define vec_add_odd ISA_NAME(vec_add_odd)
#define vec_beyond52 ISA_NAME(vec_beyond52)
#define vec_bf16 ISA_NAME(vec_bf16)
#define vec_bits ISA_NAME(vec_bits)
#define vec_from_bf16 ISA_NAME(vec_from_bf16)
#define vec_d2 ISA_NAME(vec_d2)
#define vec_doubles ISA_NAME(vec_doubles)
#define vec_f2 ISA_NAME(vec_f2)
#define vec_f4 ISA_NAME(vec_f4)
#define vec_f_from_l ISA_NAME(vec_f_from_l)
#define vec_fma2 ISA_NAME(vec_fma2)
#define vec_fma ISA_NAME(vec_fma)
#define vec_i4 ISA_NAME(vec_i4)
#define vec_l2 ISA_NAME(vec_l2)
#define vec_l_from_d ISA_NAME(vec_l_from_d)
#define vec_l_from_small ISA_NAME(vec_l_from_small)
#define vec_load ISA_NAME(vec_load)
#define vec_low32 ISA_NAME(vec_low32)
#define vec_max ISA_NAME(vec_max)
#define vec_max64 ISA_NAME(vec_max64)
#define vec_min ISA_NAME(vec_min)
#define vec_mul_wide ISA_NAME(vec_mul_wide)
#define vec_scale2 ISA_NAME(vec_scale2)
#define vec_select ISA_NAME(vec_select)
#define vec_shr32 ISA_NAME(vec_shr32)
#define vec_round ISA_NAME(vec_round)
#define vec_sqrt ISA_NAME(vec_sqrt)
#define vec_sticky ISA_NAME(vec_sticky)
#define vec_u4 ISA_NAME(vec_u4)
#define vf ISA_NAME(vf)
#define vf_abs ISA_NAME(vf_abs)
#define vf_add ISA_NAME(vf_add)
#define vf_div ISA_NAME(vf_div)
#define vf_exp ISA_NAME(vf_exp)
#define vf_fix_bad ISA_NAME(vf_fix_bad)
#define vf_flush ISA_NAME(vf_flush)
#define vf_fma ISA_NAME(vf_fma)
#define vf_fma_flushed ISA_NAME(vf_fma_flushed)
#define vf_fnma ISA_NAME(vf_fnma)
#define vf_from_l ISA_NAME(vf_from_l)
#define vf_ge ISA_NAME(vf_ge)
#define vf_hmax ISA_NAME(vf_hmax)
#define vf_load ISA_NAME(vf_load)
#define vf_load_bf16 ISA_NAME(vf_load_bf16)
#define vf_load_bf16_n ISA_NAME(vf_load_bf16_n)
#define vf_load_n ISA_NAME(vf_load_n)
#define vf_lt ISA_NAME(vf_lt)
#define vf_max ISA_NAME(vf_max)
#define vf_min ISA_NAME(vf_min)
#define vf_mul ISA_NAME(vf_mul)
#define vf_neg ISA_NAME(vf_neg)
#define vf_scale2 ISA_NAME(vf_scale2)
#define vf_select ISA_NAME(vf_select)
#define vf_set1 ISA_NAME(vf_set1)
#define vf_sqrt ISA_NAME(vf_sqrt)
#define vf_store ISA_NAME(vf_store)
#define vf_store_bf16 ISA_NAME(vf_store_bf16)
#define vf_store_bf16_n ISA_NAME(vf_store_bf16_n)
#define vf_store_n ISA_NAME(vf_store_n)
#define vf_sub ISA_NAME(vf_sub)
#define vf_sum ISA_NAME(vf_sum)
#define vf_tanh ISA_NAME(vf_tanh)
#define vf_zero ISA_NAME(vf_zero)
#define vi ISA_NAME(vi)
#define vi_add ISA_NAME(vi_add)
#define vi_ge_u ISA_NAME(vi_ge_u)
#define vi_iota ISA_NAME(vi_iota)
#define vi_load ISA_NAME(vi_load)
#define vi_mul_wide ISA_NAME(vi_mul_wide)
#define vi_set1 ISA_NAME(vi_set1)
#define vi_store ISA_NAME(vi_store)
#define vi_xor ISA_NAME(vi_xor)
#define vl ISA_NAME(vl)
#define vl_abs ISA_NAME(vl_abs)
#define vl_add ISA_NAME(vl_add)
#define vl_from_f ISA_NAME(vl_from_f)
#define vl_load ISA_NAME(vl_load)
#define vl_low32 ISA_NAME(vl_low32)
#define vl_max ISA_NAME(vl_max)
#define vl_mul32 ISA_NAME(vl_mul32)
#define vl_round ISA_NAME(vl_round)
#define vl_set1 ISA_NAME(vl_set1)
#define vl_shr32 ISA_NAME(vl_shr32)
#define vl_store ISA_NAME(vl_store)
#define vl_sub ISA_NAME(vl_sub)
#define vl_zero ISA_NAME(vl_zero)
#define vm ISA_NAME(vm)
#define vm_and ISA_NAME(vm_and)
#define vm_any ISA_NAME(vm_any)
#define vm_bits ISA_NAME(vm_bits)
#define vm_cast ISA_NAME(vm_cast)
#define vm_first_n ISA_NAME(vm_first_n)
#define vm_from_bits ISA_NAME(vm_from_bits)
#define vm_not ISA_NAME(vm_not)
#define vm_or ISA_NAME(vm_or)

typedef struct {
    float a[16], b[16], c[16], big[16];
    int32_t x[16], y[16];
    int64_t l[16], m[16];
    uint64_t key;
} ProbeIn;

typedef struct {
    float add[16], sub[16], mul[16], div[16], fma[16], fnma[16], max[16], min[16], sqrt[16], neg[16], abs[16];
    float exp[16], tanh[16], set1[16], zero[16], select[16], from_l[16], scale2[16], load_n[17][16], store_n[17][16];
    float flush[16], fma_flushed[16], load_bf16[17][16];
    float sum, hmax, scale, limit;
    int32_t iadd[16], ixor[16], iset1[16], iota[16], mul_low[16], mul_high[16], philox[4][16];
    int64_t ladd[16], labs[16], lmax[16], lshr[16], llow[16], lmul[16], lzero[16], from_f[16];
    int64_t lsub[16], lset1[16], lround[16];
    uint64_t keep;
    uint32_t lt, ge, both, either, inverse, any, of_bits, bad, ge_u, first_n[17];
    uint16_t store_bf16[17][16];
} ProbeOut;

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma,avx2")
#define CPU_ISA avx512
#define CPU_ISA_avx512
#include "vec_probe.h"
#undef CPU_ISA
#undef CPU_ISA_avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define CPU_ISA avx2
#define CPU_ISA_avx2
#include "vec_probe.h"
#undef CPU_ISA
#undef CPU_ISA_avx2
#pragma GCC pop_options

#define CPU_ISA c
#include "vec_probe.h"

static void (*const probes[ISA_COUNT])(const ProbeIn *, ProbeOut *) = {
    [ISA_AVX512] = probe_all_avx512, [ISA_AVX2] = probe_all_avx2, [ISA_C] = probe_all_c,
};

/* ---- inputs ---- */

static float special(uint64_t *state)
{
    static const float table[] = { 0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, -1e-45f, 3e38f, 1.0f, -1.5f,
                                   88.7f, 88.8f, -87.4f, -103.9f, -104.1f, 0x1p-126f };
    return table[test_rand(state) % (sizeof table / sizeof *table)];
}

static float sized(uint64_t *state, int low, int high)
{
    int e = low + (int)(test_rand(state) % (uint64_t)(high - low));
    return (float)ldexp(test_uniform(state, -2, 2), e);
}

static ProbeIn make_input(uint64_t *state, bool wild)
{
    ProbeIn in = { .key = test_rand(state) };
    bool small = test_rand(state) % 2;
    for (int i = 0; i < 16; i++) {
        bool odd = wild && test_rand(state) % 4 == 0;
        in.a[i] = odd ? special(state) : sized(state, -20, wild ? 8 : 6);
        in.b[i] = odd && i % 2 ? special(state) : wild && i % 5 == 0 ? in.a[i] : sized(state, -20, 8);
        in.c[i] = sized(state, -20, 8);
        in.big[i] = i % 4 == 3 ? (float)((int)(test_rand(state) % 4096) - 2048) + 0.5f : sized(state, -3, 61);
        in.x[i] = (int32_t)test_rand(state);
        in.y[i] = i % 7 == 0 ? in.x[i] : (int32_t)test_rand(state);
        in.l[i] = (int64_t)test_rand(state) >> (test_rand(state) % 63);
        if (small) in.l[i] >>= 12; /* AVX2 converts these in another way */
        if (small) in.big[i] = fabsf(in.big[i]) < 4096 ? in.big[i] : in.big[i] * 0x1p-12f;
        if (i % 5 == 0 && !small)
            in.l[i] = in.l[i] < 0 ? -(1LL << 53) - 1 - (1LL << 29) : (1LL << 54) + (1LL << 30) + i % 2;
        in.m[i] = (int64_t)test_rand(state) >> (test_rand(state) % 63);
    }
    return in;
}

/* NaN stays NaN; its bits are not promised. */
static void canonical_nan(ProbeOut *o)
{
    for (float *p = &o->add[0]; p <= &o->limit; p++)
        if (isnan(*p)) *p = NAN;
}

static bool same(float x, float y)
{
    return isnan(x) ? isnan(y) : memcmp(&x, &y, sizeof x) == 0;
}

#define EACH(got, want) \
    for (int i = 0; i < 16; i++) \
    CHECK_MSG(same((got)[i], (want)), "%s lane %d: %a, inputs %a %a %a", #got, i, (got)[i], in->a[i], \
              in->b[i], in->c[i])
#define EACH_INT(got, want)                                                                       \
    for (int i = 0; i < 16; i++) CHECK_MSG((int64_t)(got)[i] == (int64_t)(want), "%s lane %d", #got, i)

/* ---- against scalars ---- */

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* fma of flushed numbers; doubles have room for what a float loses below 2^-126. */
static float fma_flushed(float a, float b, float c)
{
    const double exact = (double)flushed(a) * (double)flushed(b) + (double)flushed(c);
    const float r = fmaf(flushed(a), flushed(b), flushed(c));
    return fabs(exact) < 0x1p-126 ? copysignf(0.0f, r) : r;
}

static void check_floats(const ProbeIn *in, const ProbeOut *o)
{
    const float *a = in->a, *b = in->b, *c = in->c;
    EACH(o->add, a[i] + b[i]);
    EACH(o->sub, a[i] - b[i]);
    EACH(o->mul, a[i] * b[i]);
    EACH(o->div, a[i] / b[i]);
    EACH(o->fma, fmaf(a[i], b[i], c[i]));
    EACH(o->fnma, fmaf(-a[i], b[i], c[i]));
    EACH(o->max, a[i] > b[i] ? a[i] : b[i]);
    EACH(o->min, a[i] < b[i] ? a[i] : b[i]);
    EACH(o->sqrt, sqrtf(a[i]));
    EACH(o->neg, copysignf(a[i], signbit(a[i]) ? 1.0f : -1.0f));
    EACH(o->abs, copysignf(a[i], 1.0f));
    EACH(o->set1, a[3]);
    EACH(o->zero, 0.0f);
    EACH(o->select, a[i] < b[i] ? a[i] : b[i]);
    EACH(o->from_l, (float)in->l[i]);
    EACH(o->scale2, (float)ldexp(1.25, 18 * i - 151));
    for (int n = 0; n <= 16; n++) {
        EACH(o->load_n[n], i < n ? a[16 - n + i] : 0.0f);
        EACH(o->store_n[n], i < n ? a[i] : -7.0f);
    }
    EACH(o->flush, flushed(a[i]));
    EACH(o->fma_flushed, fma_flushed(a[i], b[i], c[i]));
    for (int n = 0; n <= 16; n++) {
        const uint16_t *narrow = (const uint16_t *)(const void *)in->x + n;
        EACH(o->load_bf16[n], i < n ? bf16_to_float(narrow[i]) : 0.0f);
        for (int i = 0; i < n; i++) CHECK(o->store_bf16[n][i] == bf16_from_float(a[i]));
    }
    CHECK(o->scale == 0x1p-33f && o->limit == 0x1p46f);
}

static void check_folds(const ProbeIn *in, const ProbeOut *o)
{
    const float *a = in->a;
    float s[8], m[8];
    for (int i = 0; i < 8; i++) s[i] = a[i] + a[i + 8], m[i] = a[i] > a[i + 8] ? a[i] : a[i + 8];
    for (int n = 4; n >= 1; n /= 2)
        for (int i = 0; i < n; i++) s[i] = s[i] + s[i + n], m[i] = m[i] > m[i + n] ? m[i] : m[i + n];
    CHECK(same(o->sum, s[0]));
    CHECK(same(o->hmax, m[0]));
}

static void check_masks(const ProbeIn *in, const ProbeOut *o)
{
    uint32_t lt = 0, ge = 0, bad = 0, ge_u = 0;
    for (int i = 0; i < 16; i++) {
        lt |= (uint32_t)(in->a[i] < in->b[i]) << i;
        ge |= (uint32_t)(in->a[i] >= in->b[i]) << i;
        bad |= (uint32_t) !(fabsf(in->a[i]) < 3.0f) << i;
        ge_u |= (uint32_t)((uint32_t)in->x[i] >= (uint32_t)in->y[i]) << i;
        CHECK(o->first_n[i] == (1u << i) - 1);
    }
    CHECK(o->first_n[16] == 0xFFFF);
    CHECK(o->lt == lt && o->ge == ge && o->bad == bad && o->ge_u == ge_u);
    CHECK(o->both == (lt & 0x1FF) && o->either == (lt | 0x1FF) && o->inverse == (~lt & 0xFFFF));
    CHECK(o->any == (lt != 0) && o->of_bits == 0x5A31);
}

static void check_integers(const ProbeIn *in, const ProbeOut *o)
{
    EACH_INT(o->iadd, (int32_t)((uint32_t)in->x[i] + (uint32_t)in->y[i]));
    EACH_INT(o->ixor, in->x[i] ^ in->y[i]);
    EACH_INT(o->iset1, in->x[5]);
    EACH_INT(o->iota, i);
    EACH_INT(o->mul_low, (int32_t)((uint32_t)in->x[i] * (uint32_t)in->y[i]));
    EACH_INT(o->mul_high, (int32_t)(((uint64_t)(uint32_t)in->x[i] * (uint32_t)in->y[i]) >> 32));
    for (int i = 0; i < 16; i++) {
        uint32_t x = (uint32_t)in->x[i], y = (uint32_t)in->y[i];
        Philox r = philox(in->key, x, y, (uint32_t)i, x + y);
        for (int j = 0; j < 4; j++) {
            CHECK((uint32_t)o->philox[j][i] == r.v[j]);
            CHECK((o->keep >> (4 * i + j) & 1) == (r.v[j] >= 0x60000000u));
        }
    }
    EACH_INT(o->ladd, (int64_t)((uint64_t)in->l[i] + (uint64_t)in->m[i]));
    EACH_INT(o->lsub, (int64_t)((uint64_t)in->l[i] - (uint64_t)in->m[i]));
    EACH_INT(o->lset1, in->l[5]);
    EACH_INT(o->labs, in->l[i] < 0 ? -in->l[i] : in->l[i]);
    EACH_INT(o->lmax, in->l[i] > in->m[i] ? in->l[i] : in->m[i]);
    EACH_INT(o->lshr, (int64_t)((uint64_t)in->l[i] >> 32));
    EACH_INT(o->llow, in->l[i] & 0xFFFFFFFF);
    EACH_INT(o->lmul, (int64_t)((uint64_t)(uint32_t)in->l[i] * (uint32_t)in->m[i]));
    EACH_INT(o->lzero, 0);
    EACH_INT(o->from_f, llrint((double)in->big[i]));
    EACH_INT(o->lround, llrint((double)in->big[i] * -0x1p-12));
}

static double exp_ulps(float x, float got)
{
    double want = exp((double)x), ulp = ldexp(1, fmax(ilogb(want), -126) - 23);
    return fabs((double)got - want) / ulp;
}

static void check_exp(const ProbeIn *in, const ProbeOut *o)
{
    for (int i = 0; i < 16; i++) {
        float x = in->a[i], y = o->exp[i];
        if (isnan(x)) CHECK(isnan(y));
        else if (x < -104.0f) CHECK(y == 0.0f && !signbit(y));
        else if (x > 88.73f) CHECK(y == INFINITY);
        else CHECK_MSG(exp_ulps(x, y) <= 2.0, "exp(%a) = %a, %g ulp", x, y, exp_ulps(x, y));
    }
}

static double tanh_ulps(float x, float got)
{
    double want = tanh((double)x), ulp = ldexp(1, fmax(ilogb(want), -126) - 23);
    return fabs((double)got - want) / ulp;
}

static void check_tanh(const ProbeIn *in, const ProbeOut *o)
{
    for (int i = 0; i < 16; i++) {
        float x = in->a[i], y = o->tanh[i];
        if (isnan(x)) CHECK(isnan(y));
        else if (isinf(x)) CHECK(y == copysignf(1, x));
        else if (x == 0) CHECK(y == 0);
        else CHECK_MSG(tanh_ulps(x, y) <= 2.0, "tanh(%a) = %a, %g ulp", x, y, tanh_ulps(x, y));
    }
}

static ProbeOut run(Isa isa, const ProbeIn *in)
{
    ProbeOut o;
    memset(&o, 0, sizeof o);
    for (int n = 0; n <= 16; n++)
        for (int i = 0; i < 16; i++) o.store_n[n][i] = -7.0f;
    probes[isa](in, &o);
    return o;
}

/* Byte for byte; a difference is told by its place in the struct. */
static void check_same(const ProbeOut *o, const ProbeOut *plain)
{
    const char *p = (const char *)o, *q = (const char *)plain;
    size_t at = 0;
    while (at < sizeof *o && p[at] == q[at]) at++;
    CHECK_MSG(at == sizeof *o, "byte %zu differs (exp at %zu, fma at %zu)", at, offsetof(ProbeOut, exp),
              offsetof(ProbeOut, fma));
}

static void check_isa(Isa isa)
{
    if (!isa_supported(isa)) SKIP("this processor has no %s", isa_name(isa));
    uint64_t state = 11;
    for (int round = 0; round < 400; round++) {
        ProbeIn in = make_input(&state, round % 2);
        ProbeOut o = run(isa, &in), plain = run(ISA_C, &in);
        check_floats(&in, &o);
        check_folds(&in, &o);
        check_masks(&in, &o);
        check_integers(&in, &o);
        check_exp(&in, &o);
        check_tanh(&in, &o);
        canonical_nan(&o);
        canonical_nan(&plain);
        check_same(&o, &plain);
    }
}

TEST(avx512_lanes)
{
    check_isa(ISA_AVX512);
}

TEST(avx2_lanes)
{
    check_isa(ISA_AVX2);
}

TEST(c_lanes)
{
    check_isa(ISA_C);
}

/* The whole range of exp in fine steps, on the best instruction set. */
TEST(exp_accuracy)
{
    double worst = 0;
    Isa isa = isa_best();
    for (float x = -87.3f; x < 88.7f;) {
        ProbeIn in = { .key = 0 };
        for (int i = 0; i < 16; i++, x += 0.00137f) in.a[i] = x < 88.7f ? x : 0.0f;
        ProbeOut o = run(isa, &in);
        for (int i = 0; i < 16; i++) worst = fmax(worst, exp_ulps(in.a[i], o.exp[i]));
    }
    printf("    largest error of vf_exp: %.3f ulp\n", worst);
    CHECK(worst <= 1.5);
}

TEST(tanh_accuracy)
{
    double worst = 0;
    Isa isa = isa_best();
    for (float x = -10; x < 10;) {
        ProbeIn in = { .key = 0 };
        for (int i = 0; i < 16; i++, x += 0.00037f) in.a[i] = x == 0 ? 1 : x;
        ProbeOut o = run(isa, &in);
        for (int i = 0; i < 16; i++) worst = fmax(worst, tanh_ulps(in.a[i], o.tanh[i]));
    }
    printf("    largest error of vf_tanh: %.3f ulp\n", worst);
    CHECK(worst <= 1.75);
}

TEST_MAIN
