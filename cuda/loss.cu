/*
 * Cross entropy over a vocabulary that ranks share, and the sums of a step's losses.
 *
 *   xent_stats  per row and block of `block` columns: m = max l, s = sum exp(l - m)
 *   xent_loss   per row: M = max m, S = sum of s exp(m - M), loss = log S + M - l[target]
 *   xent_bwd    l <- (exp(l - M) / S - onehot) * scale, in place
 *   xent_row    all three of a row, where one rank has all columns
 *   loss_sum    fixed-point sum, count, and whether all are finite
 *
 * Mapping   xent_stats: a thread block per (row, block of columns), up to 512 threads; a thread keeps a running
 *           maximum and the sum below it over 4 packs at a time, so that the logits are read once. xent_bwd: a
 *           thread block per 1024 packs of a row, 4 packs a thread. Rows may begin anywhere: columns before the
 *           first 16-byte boundary and after the last are taken one by one.
 *           xent_loss: a thread per row, blocks of all ranks in ascending order. loss_sum: integers, so the
 *           order of its atomics does not matter. xent_row: a thread block of up to 512 per row, which it reads as
 *           xent_stats does, in one block of columns, and then again for the gradient: from L2, which holds the rows
 *           under way (264 of 100 KB, 27 MB, with 50,304 columns of bf16 on 132 multiprocessors).
 * Traffic   a logit of bf16 is read by xent_stats (2 bytes), read and written by xent_bwd (4): for 8,192 rows of
 *           50,304 columns 0.82 GB, 192 us, and 1.65 GB, 383 us, at 4.3 TB/s; by xent_row, 1.65 GB in all. One exp
 *           and about 7 (stats), 11 (bwd) instructions a logit, of 13 and 27 that fit beside the traffic: bound by
 *           memory. xent_loss and loss_sum move 8 R J + 12 bytes a row, a few microseconds.
 * Bad rows  as on the CPU: a NaN or +Inf logit, or a block of nothing but -Inf, makes S NaN; the loss is then not
 *           finite and loss_sum raises sums[2].
 * Source    Milakov & Gimelshein 2018 (the running maximum); Shoeybi et al. 2019, section 3 (the cut over ranks).
 */
#include "kernel.cuh"

constexpr int XENT_PACKS = 4;
constexpr int STATS_THREADS_MOST = 512, ROW_THREADS_MOST = 512;
constexpr int ROW_BLOCKS = 2; /* rows that a multiprocessor works on at once: one is read while another is written */
constexpr int BWD_THREADS = 256, BWD_BLOCK = BWD_THREADS * XENT_PACKS;
constexpr int ROW_THREADS = 128, SUM_THREADS = 256, SUM_BLOCKS_MOST = 64;

/* A loss beyond this many nats counts as not finite: 2^16 * 2^LOSS_FIXED_BITS * 2^19 tokens fit an int64. */
constexpr float LOSS_LIMIT = 65536.0f;

/* exp for logits of type T: 16-bit ones are coarser by far than the hardware's 2^-20. */
template <class T> __device__ __forceinline__ float logit_exp(float x) { return __expf(x); }
template <> __device__ __forceinline__ float logit_exp<float>(float x) { return expf(x); }

/* Columns of this rank that are words, not padding. */
static int64_t columns_used(int64_t V, int64_t first, int64_t vocab)
{
    const int64_t n = vocab - first;
    return n < 0 ? 0 : n < V ? n : V;
}

/* n neighbours from p on: `head` single ones up to a 16-byte boundary, whole packs, `tail` single ones. */
template <class T> struct PackCut {
    int head, tail;
    int64_t packs;
    __device__ __forceinline__ PackCut(const T *p, int64_t n)
    {
        constexpr int COUNT = Pack<T>::COUNT;
        const int past = static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % COUNT);
        const int to = (COUNT - past) % COUNT;
        head = n < to ? static_cast<int>(n) : to;
        packs = (n - head) / COUNT;
        tail = static_cast<int>(n - head - packs * COUNT);
    }
    /* Place of single number i, i < head + tail. */
    __device__ __forceinline__ int64_t single(int i) const { return i < head ? i : i + packs * Pack<T>::COUNT; }
};

/* ---- statistics ---- */

/* max, and sum of exp(l - max); while max is -inf, nothing but -inf (sum 0) or NaN (sum NaN) was seen. */
struct Softmax {
    float max, sum;
};

template <class T, int COUNT> __device__ __forceinline__ void softmax_add(Softmax *s, const T (&l)[COUNT])
{
    float most = s->max;
    for (int i = 0; i < COUNT; i++) most = fmaxf(most, to_float(l[i]));
    const float from = most == -INFINITY ? 0.0f : most; /* -inf - -inf would be NaN */
    float sum = s->sum * logit_exp<T>(s->max - from);
    for (int i = 0; i < COUNT; i++) sum += logit_exp<T>(to_float(l[i]) - from);
    s->max = most;
    s->sum = sum;
}

/* Over all threads of the block; the same in each. */
template <class T> __device__ __forceinline__ Softmax softmax_block(Softmax s, float *part)
{
    Softmax all;
    all.max = block_max(s.max, part);
    all.sum = block_sum(s.sum * logit_exp<T>(s.max - all.max), part);
    if (all.max == -INFINITY) all.sum = NAN; /* also where -inf - -inf made it so */
    return all;
}

/* This thread's share of n logits from l on, as `cut` has them. */
template <class T> __device__ __forceinline__ Softmax softmax_part(const T *l, const PackCut<T> &cut)
{
    Softmax s = { -INFINITY, 0.0f };
    for (int64_t i = threadIdx.x; i < cut.packs; i += XENT_PACKS * blockDim.x) {
        T v[XENT_PACKS * Pack<T>::COUNT];
        for (int u = 0; u < XENT_PACKS; u++) {
            Pack<T> p;
            for (int k = 0; k < Pack<T>::COUNT; k++) p.v[k] = from_float<T>(-INFINITY);
            const int64_t q = i + u * static_cast<int64_t>(blockDim.x);
            if (q < cut.packs) p = load16(l + cut.head + q * Pack<T>::COUNT);
            for (int k = 0; k < Pack<T>::COUNT; k++) v[u * Pack<T>::COUNT + k] = p.v[k];
        }
        softmax_add(&s, v);
    }
    if (static_cast<int>(threadIdx.x) < cut.head + cut.tail) {
        const T v[1] = { l[cut.single(threadIdx.x)] };
        softmax_add(&s, v);
    }
    return s;
}

struct StatsArgs {
    Rows<float> block_max, block_sum;
    float *target_logit;
    const int32_t *target;
    RowCount rows;
    int64_t J, block, used, first;
};

template <class T>
__global__ void __launch_bounds__(STATS_THREADS_MOST) xent_stats_kernel(StatsArgs a, Rows<const T> logits)
{
    SHARED(float, part, [STATS_THREADS_MOST / WARP]);
    const int64_t row = blockIdx.x / a.J, j = blockIdx.x % a.J, at = j * a.block, left = a.used - at;
    if (row >= rows_in_use(a.rows)) return;
    const T *l = logits.at(row) + at;
    const PackCut<T> cut(l, left < 0 ? 0 : left < a.block ? left : a.block);
    const Softmax s = softmax_block<T>(softmax_part(l, cut), part);
    if (threadIdx.x != 0) return;
    a.block_max.at(row)[j] = s.max;
    a.block_sum.at(row)[j] = left > 0 ? s.sum : 0.0f;
    if (j == 0) {
        const int64_t t = a.target[row] - a.first;
        a.target_logit[row] = t >= 0 && t < a.used ? to_float(logits.at(row)[t]) : 0.0f;
    }
}

/* Threads for `block` columns: all packs in one go where `most` are enough, and one for each that stands alone. */
template <class T> static unsigned stats_threads(int64_t block, int most)
{
    const int64_t n = ceil_div(ceil_div(block, XENT_PACKS * Pack<T>::COUNT), WARP) * WARP;
    return static_cast<unsigned>(n < most ? n : most);
}

extern "C" Err cuda_xent_stats(Stream *s, const xent_stats_args *a)
{
    const int64_t V = a->logits.dim[1], N = a->logits.dim[0], J = a->block_max.dim[1];
    const StatsArgs args = { rows_of<float>(a->block_max),
                             rows_of<float>(a->block_sum),
                             data_of<float>(a->target_logit),
                             data_of<const int32_t>(a->target),
                             row_count(a->block_max, a->logits),
                             J,
                             a->block,
                             columns_used(V, a->first, a->vocab),
                             a->first };
    const unsigned grid = grid_blocks(N * J);
    DISPATCH(a->logits.dtype, LAUNCH((xent_stats_kernel<T>), grid, stats_threads<T>(a->block, STATS_THREADS_MOST), 0,
                                     cuda_stream(s), args, rows_of<const T>(a->logits)));
    return ERR_OK;
}

/* ---- loss ---- */

struct LossArgs {
    float *loss, *row_max, *row_sum;
    Rows<const float> block_max, block_sum, target_logit;
    const int32_t *target;
    RowCount rows;
    int64_t N, R, J;
};

/* -log of the target's probability. */
__device__ __forceinline__ float nats_of(float max, float sum, float target_logit)
{
    const double below = static_cast<double>(max) - static_cast<double>(target_logit);
    return static_cast<float>(log(static_cast<double>(sum)) + below);
}

__global__ void __launch_bounds__(ROW_THREADS) xent_loss_kernel(LossArgs a)
{
    const int64_t n = blockIdx.x * static_cast<int64_t>(ROW_THREADS) + threadIdx.x;
    if (n >= rows_in_use(a.rows)) return;
    float max = -INFINITY, sum = 0.0f, target_logit = 0.0f;
    for (int64_t r = 0; r < a.R; r++)
        for (int64_t j = 0; j < a.J; j++) max = fmaxf(max, a.block_max.at(r * a.N + n)[j]);
    for (int64_t r = 0; r < a.R; r++) {
        const float *m = a.block_max.at(r * a.N + n), *s = a.block_sum.at(r * a.N + n);
        /* an empty block's exp(-inf - max) must not become NaN when max is not finite */
        for (int64_t j = 0; j < a.J; j++) sum += s[j] == 0.0f ? 0.0f : s[j] * expf(m[j] - max);
        target_logit += a.target_logit.at(r)[n];
    }
    a.row_max[n] = max;
    a.row_sum[n] = sum;
    a.loss[n] = a.target[n] >= 0 ? nats_of(max, sum, target_logit) : 0.0f;
}

extern "C" Err cuda_xent_loss(Stream *s, const xent_loss_args *a)
{
    const int64_t N = a->loss.dim[0];
    const LossArgs args = { data_of<float>(a->loss),
                            data_of<float>(a->row_max),
                            data_of<float>(a->row_sum),
                            rows_of<const float>(a->block_max),
                            rows_of<const float>(a->block_sum),
                            rows_of<const float>(a->target_logit),
                            data_of<const int32_t>(a->target),
                            row_count(a->loss, a->target),
                            N,
                            a->target_logit.dim[0],
                            a->block_max.dim[2] };
    LAUNCH(xent_loss_kernel, grid_blocks(ceil_div(N, ROW_THREADS)), ROW_THREADS, 0, cuda_stream(s), args);
    return ERR_OK;
}

__global__ void __launch_bounds__(SUM_THREADS)
loss_sum_kernel(int64_t *sums, const float *loss, const int32_t *target, RowCount count)
{
    const int64_t rows = rows_in_use(count), step = static_cast<int64_t>(gridDim.x) * SUM_THREADS;
    unsigned long long *total = reinterpret_cast<unsigned long long *>(sums);
    long long fixed = 0, counted = 0;
    for (int64_t n = blockIdx.x * static_cast<int64_t>(SUM_THREADS) + threadIdx.x; n < rows; n += step) {
        counted += target[n] >= 0;
        if (fabsf(loss[n]) < LOSS_LIMIT) fixed += llrintf(loss[n] * static_cast<float>(1 << LOSS_FIXED_BITS));
        else atomicExch(total + 2, 1ull);
    }
    for (int d = WARP / 2; d > 0; d /= 2) {
        fixed += __shfl_xor_sync(ALL_LANES, fixed, d);
        counted += __shfl_xor_sync(ALL_LANES, counted, d);
    }
    if (threadIdx.x % WARP) return;
    atomicAdd(total, static_cast<unsigned long long>(fixed));
    atomicAdd(total + 1, static_cast<unsigned long long>(counted));
}

extern "C" Err cuda_loss_sum(Stream *s, const loss_sum_args *a)
{
    const int64_t n = ceil_div(a->loss.dim[0], SUM_THREADS);
    LAUNCH(loss_sum_kernel, grid_blocks(n < SUM_BLOCKS_MOST ? n : SUM_BLOCKS_MOST), SUM_THREADS, 0, cuda_stream(s),
           data_of<int64_t>(a->sums), data_of<const float>(a->loss), data_of<const int32_t>(a->target),
           row_count(a->loss, a->target));
    return ERR_OK;
}

/* ---- backward ---- */

struct BwdArgs {
    const float *row_max, *row_sum;
    const int32_t *target;
    const StepValues *step;
    RowCount rows;
    int64_t V, used, first, parts; /* parts: thread blocks of a row */
    float weight, softcap;
};

/* Numbers by which a row turns a logit into its gradient. */
struct GradRow {
    float max, inverse, scale, softcap;
    int64_t words, target; /* columns that are not 0; column of the target, if it lies here */
};

template <class T> __device__ __forceinline__ T logit_grad(const GradRow &r, T l, int64_t column)
{
    const float p = logit_exp<T>(to_float(l) - r.max) * r.inverse;
    float g = (p - (column == r.target ? 1.0f : 0.0f)) * r.scale;
    if (r.softcap > 0.0f) {
        const float t = to_float(l) / r.softcap;
        g *= fmaf(-t, t, 1.0f);
    }
    return from_float<T>(column < r.words ? g : 0.0f);
}

/* Packs begin + thread, + threads + thread, ...: XENT_PACKS of them a thread; with the first the single ones. */
template <class T>
__device__ __forceinline__ void grad_packs(T *l, const PackCut<T> &cut, const GradRow &r, int64_t begin, int threads)
{
    T *first = l + cut.head + (begin + threadIdx.x) * Pack<T>::COUNT;
    Pack<T> p[XENT_PACKS];
    for (int u = 0; u < XENT_PACKS; u++) {
        const int64_t q = begin + u * threads + threadIdx.x;
        if (q < cut.packs) p[u] = load16(first + u * threads * Pack<T>::COUNT);
    }
    for (int u = 0; u < XENT_PACKS; u++) {
        const int64_t q = begin + u * threads + threadIdx.x, column = cut.head + q * Pack<T>::COUNT;
        if (q >= cut.packs) continue;
        for (int k = 0; k < Pack<T>::COUNT; k++) p[u].v[k] = logit_grad(r, p[u].v[k], column + k);
        store16_global(first + u * threads * Pack<T>::COUNT, p[u]);
    }
    if (begin == 0 && static_cast<int>(threadIdx.x) < cut.head + cut.tail) {
        const int64_t column = cut.single(threadIdx.x);
        l[column] = logit_grad(r, l[column], column);
    }
}

template <class T> __global__ void __launch_bounds__(BWD_THREADS) xent_bwd_kernel(BwdArgs a, Rows<T> logits)
{
    const int64_t row = blockIdx.x / a.parts, begin = blockIdx.x % a.parts * BWD_BLOCK;
    if (row >= rows_in_use(a.rows)) return;
    T *l = logits.at(row);
    const GradRow r = { a.row_max[row], 1.0f / a.row_sum[row], a.step->loss_scale * a.weight, a.softcap,
                        a.target[row] >= 0 ? a.used : 0, a.target[row] - a.first };
    grad_packs(l, PackCut<T>(l, a.V), r, begin, BWD_THREADS);
}

extern "C" Err cuda_xent_bwd(Stream *s, const xent_bwd_args *a)
{
    const int64_t V = a->logits.dim[1], N = a->logits.dim[0], packs = ceil_div(V, 16 / dtype_size(a->logits.dtype));
    const BwdArgs args = { data_of<const float>(a->row_max),
                           data_of<const float>(a->row_sum),
                           data_of<const int32_t>(a->target),
                           a->step,
                           row_count(a->logits, a->target),
                           V,
                           columns_used(V, a->first, a->vocab),
                           a->first,
                           ceil_div(packs, BWD_BLOCK),
                           a->weight,
                           a->softcap };
    const unsigned grid = grid_blocks(N * args.parts);
    DISPATCH(a->logits.dtype,
             LAUNCH((xent_bwd_kernel<T>), grid, BWD_THREADS, 0, cuda_stream(s), args, rows_of<T>(a->logits)));
    return ERR_OK;
}

/* ---- all three ---- */

struct RowArgs {
    float *loss;
    const int32_t *target;
    const StepValues *step;
    RowCount rows;
    int64_t V, used; /* columns; those that are words */
    float weight, softcap;
};

template <class T>
__global__ void __launch_bounds__(ROW_THREADS_MOST, ROW_BLOCKS) xent_row_kernel(RowArgs a, Rows<T> logits)
{
    SHARED(float, part, [ROW_THREADS_MOST / WARP]);
    const int64_t row = blockIdx.x;
    if (row >= rows_in_use(a.rows)) return;
    T *l = logits.at(row);
    const int64_t target = a.target[row];
    const float own = target >= 0 && target < a.used ? to_float(l[target]) : 0.0f;
    /* (its barriers stand between what is read here and what is written below) */
    const Softmax s = softmax_block<T>(softmax_part<T>(l, PackCut<T>(l, a.used)), part);
    if (threadIdx.x == 0) a.loss[row] = target >= 0 ? nats_of(s.max, s.sum, own) : 0.0f;
    const GradRow r = { s.max, 1.0f / s.sum, a.step->loss_scale * a.weight, a.softcap,
                        target >= 0 ? a.used : 0, target };
    const PackCut<T> cut(l, a.V);
    const int threads = blockDim.x;
    for (int64_t begin = 0; begin == 0 || begin < cut.packs; begin += threads * XENT_PACKS)
        grad_packs(l, cut, r, begin, threads);
}

extern "C" Err cuda_xent_row(Stream *s, const xent_row_args *a)
{
    const int64_t V = a->logits.dim[1];
    const RowArgs args = { data_of<float>(a->loss), data_of<const int32_t>(a->target), a->step,
                           row_count(a->loss, a->logits), V, columns_used(V, 0, a->vocab), a->weight, a->softcap };
    DISPATCH(a->logits.dtype, LAUNCH((xent_row_kernel<T>), grid_blocks(a->logits.dim[0]),
                                     stats_threads<T>(V, ROW_THREADS_MOST), 0, cuda_stream(s), args,
                                     rows_of<T>(a->logits)));
    return ERR_OK;
}
