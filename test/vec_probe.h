/*
 * Included once for each instruction set by test_vec.c, with CPU_ISA set and the target switched: builds
 * vec.h under names of that set, and probe_ISA(), which puts the results of every function into one struct,
 * so that they can be compared. (No include guard, on purpose.)
 */
#undef MEGATRAIN_CPU_VEC_H
#undef MEGATRAIN_CPU_VEC_AVX512_H
#undef MEGATRAIN_CPU_VEC_AVX2_H
#undef MEGATRAIN_CPU_VEC_C_H
#undef VF_MAGIC
#undef VL_MAGIC
#undef VL_MAGIC_BITS
#undef VEC_FN
#undef VL_EACH
#undef VL_EACH2
#undef VEC_EACH
#undef VEC_EACH2
#undef VEC_EACH3
#undef VEC_OP
#undef VEC_SAME
#include "cpu/vec.h"

static void PROBE(floats)(const ProbeIn *in, ProbeOut *o)
{
    vf a = vf_load(in->a), b = vf_load(in->b), c = vf_load(in->c);
    vf_store(o->add, vf_add(a, b));
    vf_store(o->sub, vf_sub(a, b));
    vf_store(o->mul, vf_mul(a, b));
    vf_store(o->div, vf_div(a, b));
    vf_store(o->fma, vf_fma(a, b, c));
    vf_store(o->fnma, vf_fnma(a, b, c));
    vf_store(o->max, vf_max(a, b));
    vf_store(o->min, vf_min(a, b));
    vf_store(o->sqrt, vf_sqrt(a));
    vf_store(o->neg, vf_neg(a));
    vf_store(o->abs, vf_abs(a));
    vf_store(o->exp, vf_exp(a));
    vf_store(o->tanh, vf_tanh(a));
    vf_store(o->set1, vf_set1(in->a[3]));
    vf_store(o->zero, vf_zero());
    o->sum = vf_sum(a);
    o->hmax = vf_hmax(a);
    for (int k = 0; k < 16; k++) {
        o->scale2[k] = vf_hmax(vf_scale2(vf_set1(1.25f), vf_set1(VF_MAGIC + (float)(18 * k - 151))));
    }
    for (int n = 0; n <= VEC; n++) {
        vf_store(o->load_n[n], vf_load_n(in->a + VEC - n, n));
        vf_store_n(o->store_n[n], a, n);
        vf_store_bf16_n(o->store_bf16[n], a, n);
        vf_store(o->load_bf16[n], vf_load_bf16_n((const uint16_t *)(const void *)in->x + n, n));
    }
    if (in->key % 2) vf_store_bf16(o->store_bf16[VEC], a);
    if (in->key % 2) vf_store(o->load_bf16[VEC], vf_load_bf16((const uint16_t *)(const void *)in->x + VEC));
    vf_store(o->flush, vf_flush(a));
    vf_store(o->fma_flushed, vf_fma_flushed(vf_flush(a), vf_flush(b), vf_flush(c)));
}

static void PROBE(masks)(const ProbeIn *in, ProbeOut *o)
{
    vf a = vf_load(in->a), b = vf_load(in->b);
    vm lt = vf_lt(a, b), ge = vf_ge(a, b);
    o->lt = vm_bits(lt);
    o->ge = vm_bits(ge);
    o->both = vm_bits(vm_and(lt, vm_first_n(9)));
    o->either = vm_bits(vm_or(lt, vm_first_n(9)));
    o->inverse = vm_bits(vm_not(lt));
    o->any = (uint32_t)vm_any(lt) | (uint32_t)vm_any(vm_first_n(0)) << 1;
    o->of_bits = vm_bits(vm_from_bits(0x5A31));
    o->bad = vm_bits(vf_fix_bad(a, 3.0f));
    vf_store(o->select, vf_select(lt, a, b));
    for (int n = 0; n <= VEC; n++) o->first_n[n] = vm_bits(vm_first_n(n));
}

static void PROBE(integers)(const ProbeIn *in, ProbeOut *o)
{
    vi x = vi_load(in->x), y = vi_load(in->y), low, high;
    vi_store(o->iadd, vi_add(x, y));
    vi_store(o->ixor, vi_xor(x, y));
    vi_store(o->iset1, vi_set1(in->x[5]));
    vi_store(o->iota, vi_iota());
    o->ge_u = vm_bits(vi_ge_u(x, y));
    vi_mul_wide(x, y, &low, &high);
    vi_store(o->mul_low, low);
    vi_store(o->mul_high, high);
    vi r[4];
    philox16(in->key, x, y, vi_iota(), vi_add(x, y), r);
    for (int j = 0; j < 4; j++) vi_store(o->philox[j], r[j]);
    o->keep = philox_keep64(in->key, 0x60000000u, x, y, vi_iota(), vi_add(x, y));
    o->scale = fix_scale(-33);
    o->limit = fix_limit(16);
}

static void PROBE(longs)(const ProbeIn *in, ProbeOut *o)
{
    vl x = vl_load(in->l), y = vl_load(in->m);
    vl_store(o->ladd, vl_add(x, y));
    vl_store(o->lsub, vl_sub(x, y));
    vl_store(o->lset1, vl_set1(in->l[5]));
    vl_store(o->labs, vl_abs(x));
    vl_store(o->lmax, vl_max(x, y));
    vl_store(o->lshr, vl_shr32(x));
    vl_store(o->llow, vl_low32(x));
    vl_store(o->lmul, vl_mul32(x, y));
    vl_store(o->lzero, vl_zero());
    vl_store(o->from_f, vl_from_f(vf_load(in->big)));
    vl_store(o->lround, vl_sub(vl_round(in->big, -0x1p-12), vl_set1(VL_MAGIC_BITS)));
    vf_store(o->from_l, vf_from_l(x));
}

static void PROBE(all)(const ProbeIn *in, ProbeOut *o)
{
    PROBE(floats)(in, o);
    PROBE(masks)(in, o);
    PROBE(integers)(in, o);
    PROBE(longs)(in, o);
}
