/* What predictions take a GPU's links for, and what bench/cuda/links.c measures against. */
#ifndef MEGATRAIN_BENCH_LINK_H
#define MEGATRAIN_BENCH_LINK_H

/* Bytes a second that a GPU sends over NVLink 4: datasheet, times what NCCL reaches of it. */
static const double LINK = 450e9 * 0.8;

#endif
