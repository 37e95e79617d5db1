/*
 * Small kernels for test_emu.cpp, through C functions: right ones that exercise the emulator, and wrong ones that
 * it must catch. All run in `stream`.
 */
#ifndef MEGATRAIN_EMU_KERNELS_H
#define MEGATRAIN_EMU_KERNELS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

/* out[i] = i over all threads of a three-dimensional launch, by thread and block indices. */
void run_indices(int *out, dim3 grid, dim3 block, cudaStream_t stream);
/* sums[b] = sum of x[b * n ..]: block reduction in shared memory. */
void run_block_sum(float *sums, const float *x, int n, int blocks, int threads, cudaStream_t stream);
/* sums of blocks through an atomic ticket; the last block adds them (threadfence). */
void run_ticket_sum(int64_t *sum, int64_t *part, unsigned *ticket, const int *x, int n, int blocks,
                    cudaStream_t stream);
/* Per lane 16 results of warp operations, into out[lane][16]. */
void run_warp(uint32_t *out, cudaStream_t stream);
/* __syncthreads_count, _or, _and with predicates thread < n. out[3] */
void run_votes(int *out, int n, int threads, cudaStream_t stream);
/* d (16 x 8) = a (16 x 16) b (16 x 8), row-major, by ldmatrix and mma; type 0 bf16, 1 f16. */
void run_mma(float *d, const uint16_t *a, const uint16_t *b, int type, cudaStream_t stream);
/* to = from through cp.async, two stages; rows beyond `valid` become zeros. 64 rows of 8 floats. */
void run_pipeline(float *to, const float *from, int valid, cudaStream_t stream);
/* Three groups of copies under way: out[w] of them have landed after the w-th of three waits. */
void run_waits(int *out, const float *from, cudaStream_t stream);
/* Shared arrays of every kind: right sizes, aligned, poisoned at each block's start. out[block]: 1 if so. */
void run_shared(int *out, int blocks, size_t dynamic_bytes, cudaStream_t stream);
/* y[i] = FUNCTION(x[i]), by the device's arithmetic */
enum Function {
    FUNCTION_EXP,
    FUNCTION_FAST_EXP,
    FUNCTION_EXP2,
    FUNCTION_LOG,
    FUNCTION_RECIPROCAL,      /* __fdividef(1, x) */
    FUNCTION_SQUARE_LESS,     /* x x - 1, which nvcc makes one operation */
    FUNCTION_SQUARE_RN_LESS,  /* __fmul_rn(x, x) - 1: two */
    FUNCTION_COUNT
};
void run_function(enum Function f, float *y, const float *x, int n, cudaStream_t stream);
/* y[i] = a y[i] + b */
void run_scale(float *y, float a, float b, int n, cudaStream_t stream);
void allow_shared(int bytes);

/* What each wrong kernel does wrong; run_wrong() launches it on 64 int of `memory`. */
enum Wrong {
    WRONG_SHUFFLE_EXITED,
    WRONG_SHUFFLE_ABSENT,
    WRONG_SHUFFLE_DIVERGENT,
    WRONG_MASK,
    WRONG_BARRIER_DIVERGENT,
    WRONG_DEADLOCK,
    WRONG_SHARED_BEHIND,
    WRONG_DYNAMIC_BEHIND,
    WRONG_SHARED_SIZE,
    WRONG_GLOBAL_BEHIND,
    WRONG_GLOBAL_MARGIN,
    WRONG_GLOBAL_FAR,
    WRONG_LDMATRIX_ALIGN,
    WRONG_LDMATRIX_GLOBAL,
    WRONG_LDG_ALIGN,
    WRONG_VECTOR_ALIGN,
    WRONG_COPY_ALIGN,
    WRONG_COPY_HOST,
    WRONG_COPY_UNWAITED,
    WRONG_MMA_PARTIAL,
    WRONG_STACK,
    WRONG_HOST_POINTER,
    WRONG_HOST_STRUCT,
    WRONG_TRAP,
    WRONG_BOUNDS,     /* more threads than __launch_bounds__ */
    WRONG_SHARED_SUM, /* arrays and the dynamic area are too much together */
    WRONG_COUNT
};
void run_wrong(enum Wrong what, int *memory, cudaStream_t stream);

/* Wrong only in some orders, or only for a sanitizer. */
enum Race {
    RACE_NONE,
    RACE_NO_BARRIER, /* neighbours read before a barrier */
    RACE_NO_WAIT,    /* cp.async without its wait */
    RACE_FROM_NEXT,  /* lanes read what the next lane wrote, without __syncwarp */
    RACE_FROM_LAST,  /* what the last lane wrote */
    RACE_BLOCKS,     /* blocks add to the same element */
    RACE_EARLY_COPY, /* a copy into memory that others still read */
    RACE_COUNT
};
/* out[0..255]; the right answer is the same for all but the wrong order. */
void run_race(enum Race what, int *out, const int *in, cudaStream_t stream);

/* ---- Hopper (wrong_hopper.cu) ---- */

/* out [64][RING_COLUMNS] = a [64][RING_DEPTH] b [RING_COLUMNS][RING_DEPTH], bf16, by a producer, a consumer and stages. */
enum { RING_DEPTH = 512, RING_COLUMNS = 64 };
enum RingWrong {
    RING_RIGHT,
    RING_NO_INIT,
    RING_INIT_TWICE,
    RING_NOT_READY,      /* no fence behind barrier_init */
    RING_FEW_BYTES,      /* those of a alone are expected */
    RING_MANY_BYTES,
    RING_PRODUCER_PHASE, /* waits for the phase that a fresh barrier is in */
    RING_CONSUMER_PHASE, /* never flips it */
    RING_NO_WAIT,        /* for the bytes */
    RING_SELDOM,         /* one thread waits for some phases alone */
    RING_RANK,
    RING_COPY_ALIGN,
    RING_COORDINATE,     /* within 16 bytes */
    RING_NO_MAP,
    RING_BEHIND,         /* a row that the map has and the allocation has not */
    RING_COPY_LEFT,      /* one more than anyone waits for */
    RING_TILE_MOVED,     /* where the swizzle's pattern does not begin: right on the chip as well */
    RING_STRIDE,
    RING_MODE,           /* as TMA counts them */
    RING_BIT,            /* of b's stride */
    RING_RESERVED_BIT,
    RING_KEEP,           /* each stage begins anew */
    RING_UNEQUAL,        /* a warp has another descriptor */
    RING_THREE_WARPS,
    RING_NO_BEGIN,
    RING_CHANGED,        /* d, between wgmma_begin and the product */
    RING_TOUCHED,        /* d, between products */
    RING_WARP_COMMITS,   /* three warps close a group that the fourth does not */
    RING_NO_COMMIT,
    RING_NO_PRODUCT_WAIT,
    RING_GROUP_LATE,     /* the stage is given back one group too early */
    RING_RELEASED_EARLY, /* before the wait */
    RING_RELEASED_BY_ONE, /* by one warp for all */
    RING_RELEASED_BY_ALL, /* by each thread where each warp counts */
    RING_COUNT
};
struct MapShape {
    uint64_t columns, rows, stride; /* bytes from row to row */
    unsigned box_columns, box_rows;
    int swizzle; /* as the driver counts them */
};
bool make_map(CUtensorMap *out, const void *data, const MapShape &m); /* false: the driver does not */

void run_ring(enum RingWrong what, float *out, const uint16_t *a, const uint16_t *b, cudaStream_t stream);

enum Together {
    STORED_RIGHT,
    STORED_NO_FENCE,
    STORED_ONE_FENCE,    /* of one thread for all */
    STORED_FENCE_BEFORE, /* the stores */
    STORED_NO_BARRIER,
    REGISTERS_RIGHT,
    REGISTERS_TOO_MANY,  /* more than the block has */
    REGISTERS_LESS,      /* taken than a thread has */
    REGISTERS_ONE_WARP,
    REGISTERS_UNBOUNDED, /* no __launch_bounds__ */
    NAMED_RIGHT,
    NAMED_ZERO,
    NAMED_COUNT,
    NAMED_NO_ARRIVAL,
    NAMED_LATE,          /* arrives before it writes */
    TOGETHER_COUNT
};
/* out: 384 numbers of 4 bytes */
void run_together(enum Together what, float *out, cudaStream_t stream);

#endif
