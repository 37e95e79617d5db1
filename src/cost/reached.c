/* See reached.h. */
#include "cost/reached.h"

/* ---- memory work ---- */

/* (what is far below is short, or bound by sorts, atomics and chains of few threads: such shares are of 8 experts, 2 a
 * token) */
static const double of_copy[OP_COUNT] = {
    [OP_bias_grad] = .88,
    [OP_embedding_fwd] = .76,
    [OP_embedding_grad] = .60,
    [OP_scale] = .92,
    [OP_norm_fwd] = .90,
    [OP_residual_norm_fwd] = .93,
    [OP_norm_bwd] = .80,
    [OP_residual_fwd] = .97,
    [OP_residual_bwd] = .70,
    [OP_gelu_fwd] = .96,
    [OP_gelu_bwd] = .99,
    [OP_gelu_erf_fwd] = .96, /* (as gelu's: not measured) */
    [OP_gelu_erf_bwd] = .99,
    [OP_relu2_fwd] = .96, /* (as gelu's, whose memory it has and whose work it has not) */
    [OP_relu2_bwd] = .99,
    [OP_swiglu_fwd] = .96,
    [OP_swiglu_bwd] = .96,
    [OP_geglu_fwd] = .96,
    [OP_geglu_bwd] = .91,
    [OP_clamped_swiglu_fwd] = .97,
    [OP_clamped_swiglu_bwd] = .93,
    [OP_fill_zero] = .96,
    [OP_fill_zero_acc] = 1.06,
    [OP_add_acc] = .61,
    [OP_cast] = 1,
    [OP_xent_row] = .75,
    [OP_adamw] = .97,
    [OP_grad_stats] = .97,
    [OP_rope] = .78,
    [OP_sink_bwd] = .32,
    [OP_qkv_split] = .93,
    [OP_qkv_merge] = .94,
    [OP_gate_fwd] = .97,
    [OP_gate_bwd] = .98,
    [OP_gated_add_fwd] = .97,
    [OP_gated_add_bwd] = .96,
    [OP_join_columns] = .68,
    [OP_mla_split] = .75,
    [OP_mla_merge] = .90,
    [OP_sum_parts] = .66,
    /* mixtures */
    [OP_jitter] = .78,
    [OP_take_rows] = .72,
    [OP_permute_rows] = .73,
    [OP_unpermute_rows] = .76,
    [OP_unpermute_bwd] = .95,
    [OP_grouped_bias] = .98,
    [OP_grouped_bias_grad] = .39,
    [OP_router_fwd] = .021,
    [OP_router_bwd] = .058,
    [OP_router_even] = .044,
    [OP_router_count] = .019,
    [OP_router_balance] = .020,
    [OP_sinkhorn] = .024,
    [OP_choice_drop] = .017,
    [OP_choice_groups] = .13,
    [OP_dispatch_choices] = .012,
    [OP_permute_index] = .031,
};

static const double OTHERWISE = .9; /* what docs/gpu.md wants of a kernel */

double reached_of_copy(OpId id) { return of_copy[id] > 0 ? of_copy[id] : OTHERWISE; }

/* ---- products and attention, by form ---- */

/* (by cuda/attention_fwd_hopper.cu, attention_bwd_hopper.cuh, grouped_hopper.cu) */
KernelForm kernel_form(OpId id, bool hopper, int64_t width)
{
    const bool attention = id == OP_attention_fwd || id == OP_attention_bwd;
    if (!hopper || (attention && width < 40) || (id == OP_attention_bwd && width > 128)) return FORM_MMA_SYNC;
    return FORM_WGMMA;
}

/* ASSUMED: not measured here. Of published runs on H100 and B200 .595 of the peak fits where .71 does for 16 bits
 * (bench/published, docs/published.md). */
double reached_by_fp8(void) { return .84; }

/* (8 experts 1,536 wide: by mma.sync 278 and 294 TFLOP/s forward, 257 and 259 of dx, 262 and 252 of dw; by wgmma 663
 * and 670, 671 and 576, 572 and 573, where the library's products have 688) */
double reached_by_experts(OpId id, KernelForm form)
{
    static const double fwd[KERNEL_FORMS] = { 1, 2.37 }, dx[KERNEL_FORMS] = { .90, 2.22 },
                        dw[KERNEL_FORMS] = { .83, 2.1 };
    const bool sums = id == OP_grouped_dw || id == OP_fp8_grouped_add;
    return (id == OP_grouped_dx ? dx : sums ? dw : fwd)[form];
}

/* ASSUMED: not measured here. By mma.sync of the peak of 8 bits what those of 16 bits reach of theirs. By wgmma that
 * would be 1,486 TFLOP/s of an H100's 1,979 forward, which nobody has: DeepGEMM, whose kernels add each block's sum
 * in fp32 as ours do, gave 1,093 and 1,099 of depth 2048 and 1,288 and 1,297 of depth 7168 on an H800 (README of
 * 2025, grouped, contiguous). Ours is taken to reach the lowest of these, and to be behind in sums over tokens as in
 * 16 bits. */
double reached_by_fp8_experts(OpId id, KernelForm form)
{
    if (form == FORM_MMA_SYNC) return reached_by_experts(id, form);
    return id == OP_fp8_grouped_add ? 1.54 : 1.74;
}

/* (64 wide, mma.sync: 184 and 139 TFLOP/s of 1,024 causal keys, 53 and 39 of 128. 128 and 256 wide: FlashAttention's
 * charts. By wgmma, forward: 64 wide 319 of 1,024 causal keys and 455 of 2,048; 128 wide 519 of 2,048 causal keys, 584
 * of all, 645 of 8,192; 192 wide 533; backward 260 and, 128 wide, 418: docs/gpu.md) */
double reached_by_attention(OpId id, KernelForm form, int64_t width)
{
    static const double rates[2][3][KERNEL_FORMS] = {
        { { .89, 1.66 }, { 1, 2.19 }, { .85, 2.2 } }, /* forward: 64, 128, wider */
        { { .81, 1.60 }, { 1, 2.08 }, { .85, .85 } }, /* backward, of which the widest has one form */
    };
    return rates[id != OP_attention_fwd][width > 128 ? 2 : width > 64][form];
}

/* ASSUMED: not measured. Plain: each multiply-add loads both operands from a cache, a fourth of a warp's lanes at a
 * time, so an eighth of the peak at most. One block on a multiprocessor is taken to hide half of what it waits for.
 * Chain: of a window and 64 columns of a value head, D 128, a multiprocessor of an H100 executes 9.6 MFLOP for 4.2 that
 * count, in 6.4 us at its share of 200 TFLOP/s, as attention by mma.sync has it. 104 KiB pass in 4.7 us, and barriers
 * take 0.5: 48 TFLOP/s of 989 if all have a block. Backward it is 12.3 MFLOP for 8.4 and 184 KiB, 17 us, and then the
 * rows of all windows, 27 MFLOP and 360 KiB for 16.8 of a value head, 256 ns of all. Windows: of a window of a head of
 * Mamba-2, N 128 and P 64, it is 11.1 MFLOP forward and 32 backward for 7.3 and 14.7, 55 and 160 ns. Its rows and
 * states pass in 62 and 120 ns. One block on a multiprocessor is taken to overlap none of it: 63 and 52 TFLOP/s.
 * (Published for five kernels of such a window, forward: 79 ns; docs/gpu.md.) */
double reached_by_scan(ScanForm form)
{
    static const double rates[] = { [SCAN_PLAIN] = .06,
                                    [SCAN_CHAIN] = .048,
                                    [SCAN_CHAIN_BACK] = .066,
                                    [SCAN_ROWS_BACK] = .066,
                                    [SCAN_WINDOWS] = .057 };
    return rates[form];
}

double reached_short_keys(OpId id, KernelForm form)
{
    if (form == FORM_WGMMA) return 345;
    return id == OP_attention_fwd ? 283 : 293;
}
