/*
 * Shares of a GPU's rates that megatrain's kernels reach, measured: H100 80GB SXM (1980 MHz, 700 W, CUDA 13.0),
 * 2026-11-27, by bench/cuda/rooflines.c, each op alone at 65,536 tokens and a width of 768; of adamw and grad_stats by
 * the ops of whole steps (bench/cuda/steps.c). Other GPUs are taken to reach the same shares. docs/prediction.md says
 * what was taken before, and how far steps are from it.
 *
 * Kernels that multiply have forms, each with rates of its own.
 */
#ifndef MEGATRAIN_COST_REACHED_H
#define MEGATRAIN_COST_REACHED_H

#include "device/ops.h"

/* The instruction that multiplies: of a warp, as on Ampere; of a warpgroup, on Hopper. */
typedef enum { FORM_MMA_SYNC, FORM_WGMMA, KERNEL_FORMS } KernelForm;

/* The form that the program has of this op in 16 bits. Attention's depends on the width of heads; that of experts'
 * products does not. */
KernelForm kernel_form(OpId id, bool hopper, int64_t width);

/* Memory work: its share of the bandwidth of a copy of device memory. */
double reached_of_copy(OpId id);

/* Products of fp8: over the share of the peak of 16 bits that matrix_share is. */
double reached_by_fp8(void);

/* Experts' products: over the share that experts_share of a device's file is, the forward ones' by mma.sync. */
double reached_by_experts(OpId id, KernelForm form);
/* Shares of 8 bits, over the same share of their peak. */
double reached_by_fp8_experts(OpId id, KernelForm form);

/* Attention by heads so wide, for many keys: over the share that attention_share is, which is that of 128. */
double reached_by_attention(OpId id, KernelForm form, int64_t width);

/* Forms of recurrences: plain, over the peak of fp32; by tensor cores, over that of 16 bits, from window to window or
 * with windows at once. */
typedef enum { SCAN_PLAIN, SCAN_CHAIN, SCAN_CHAIN_BACK, SCAN_ROWS_BACK, SCAN_WINDOWS } ScanForm;
double reached_by_scan(ScanForm form);

/* Keys that a query sees on the average at which half of attention's time goes into begin, end and the diagonal's
 * masked half. */
double reached_short_keys(OpId id, KernelForm form);

#endif
