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
    [OP_norm_bwd] = .64,
    [OP_residual_fwd] = .97,
    [OP_residual_bwd] = .70,
    [OP_gelu_fwd] = .96,
    [OP_gelu_bwd] = .99,
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
    [OP_xent_row] = .62,
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

KernelForm kernel_form(OpId id)
{
    (void)id;
    return FORM_MMA_SYNC;
}

/* The last form up to this one that was measured. */
static double measured(const double rate[KERNEL_FORMS], KernelForm form)
{
    while (form > 0 && !(rate[form] > 0)) form--;
    return rate[form];
}

/* (278 and 294 TFLOP/s forward, 257 and 259 of dx, 262 and 252 of dw, of 8 experts 1,536 wide) */
double reached_by_experts(OpId id, KernelForm form)
{
    static const double fwd[KERNEL_FORMS] = { [FORM_MMA_SYNC] = 1 },
                        dx[KERNEL_FORMS] = { [FORM_MMA_SYNC] = .90 },
                        dw[KERNEL_FORMS] = { [FORM_MMA_SYNC] = .83 };
    return measured(id == OP_grouped_dx ? dx : id == OP_grouped_dw ? dw : fwd, form);
}

/* (64 wide: 184 and 139 TFLOP/s of 1,024 causal keys, 53 and 39 of 128. 128 and 256 wide: FlashAttention's charts) */
double reached_by_attention(OpId id, KernelForm form, int64_t width)
{
    static const double fwd64[KERNEL_FORMS] = { [FORM_MMA_SYNC] = .89 },
                        bwd64[KERNEL_FORMS] = { [FORM_MMA_SYNC] = .81 },
                        wide[KERNEL_FORMS] = { [FORM_MMA_SYNC] = .85 },
                        one[KERNEL_FORMS] = { [FORM_MMA_SYNC] = 1 };
    if (width > 128) return measured(wide, form);
    if (width > 64) return measured(one, form);
    return measured(id == OP_attention_fwd ? fwd64 : bwd64, form);
}

double reached_short_keys(OpId id) { return id == OP_attention_fwd ? 283 : 293; }
