/* Rates that predictions assume for a GPU's links; bench/cuda/links.c measures against them. */
#ifndef MEGATRAIN_BENCH_LINK_H
#define MEGATRAIN_BENCH_LINK_H

/* Bytes a second that a GPU sends over NVLink 4: datasheet, times what NCCL reaches of it. */
static const double LINK = 450e9 * 0.8;

#endif
