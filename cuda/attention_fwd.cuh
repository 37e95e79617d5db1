/*
 * Shared parts of the forward kernels of attention (attention_fwd.cu, attention_fwd_hopper.cu): a step of the softmax
 * over a tile of keys, and the end of the rows once all keys have been seen.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_FWD_CUH
#define MEGATRAIN_CUDA_ATTENTION_FWD_CUH

#include "attention.cuh"

/* State of a thread's query rows. */
template <class E> struct FwdRows {
    float max[E::R], sum[E::R]; /* of raw scores; of this thread's share of the columns */
};

/* Scores to weights; the running maximum and sum; o is to be scaled by `factor` to the new maximum. */
template <class E>
__device__ __forceinline__ void softmax_step(typename E::Scores &s, float factor[E::R], FwdRows<E> &rows, float scale2)
{
    UNROLL
    for (int i = 0; i < E::R; i++) {
        float most = rows.max[i];
        UNROLL
        for (int j = 0; j < E::N; j++) most = fmaxf(most, s.at(i, j));
        most = E::row_max(most);
        /* a row that has seen no key yet: subtract 0, so that exp(-inf) = 0 and not exp(NaN) */
        const float base = most == -INFINITY ? 0.0f : most * scale2;
        /* the product is rounded as base is: where no larger score came the factor is 1, and o stays as it is */
        factor[i] = E::exp2(__fmul_rn(rows.max[i], scale2) - base);
        rows.max[i] = most;
        float sum = 0;
        UNROLL
        for (int j = 0; j < E::N; j++) {
            const float p = E::exp2(fmaf(s.at(i, j), scale2, -base));
            s.at(i, j) = p;
            sum += p;
        }
        rows.sum[i] = fmaf(rows.sum[i], factor[i], sum);
    }
}

template <class E>
__device__ __forceinline__ void drop_keys(typename E::Scores &s, const HeadDropout &d, int position, int first_key)
{
    typename E::Keep keep;
    E::template keep_bits<false>(keep, d, position, first_key);
    UNROLL
    for (int i = 0; i < E::R; i++)
        UNROLL
        for (int j = 0; j < E::N; j++) s.at(i, j) = E::kept(keep, i, j) ? s.at(i, j) : 0.0f;
}

/* The sink's score z, to the maximum and sum of a row; returns what o is to be scaled by. */
template <class E> __device__ __forceinline__ float add_sink(float z, float *most, float *sum)
{
    const float top = fmaxf(*most, z), rescale = E::exp2((*most - top) * LOG2_E);
    *sum = fmaf(*sum, rescale, E::exp2((z - top) * LOG2_E));
    *most = top;
    return rescale;
}

/* Numbers that go from one call to the next beside o, where keys come in several calls. */
struct RunningRows {
    WideRows o;
    RowValues max, sum;
    bool unfinished;
};

/* Maximum and sum of a row, `most` and `sum`, become those over the keys of earlier calls, too: o of this call is then
 * to be scaled by *factor, that of the others by *keep. `before` NULL: a row behind the last one, whose place is
 * another warp's. `leader`: the thread that writes. */
template <class E>
__device__ __forceinline__ void join_running(const RunningRows &running, float *before, float *before_sum, bool leader,
                                             float *most, float *sum, float *factor, float *keep)
{
    if (running.o.resumed && before) {
        const float old = *before, top = fmaxf(*most, old), base = top == -INFINITY ? 0.0f : top;
        *factor = E::exp2((*most - base) * LOG2_E);
        *keep = E::exp2((old - base) * LOG2_E);
        *sum = fmaf(*before_sum, *keep, *sum * *factor);
        *most = top;
    }
    __syncwarp(); /* all threads of the row have read */
    if (running.unfinished && leader) *before = *most, *before_sum = *sum;
}

/* o and lse of the block's rows, once the keys of the call have been seen; and the largest score of their head, by
 * logit_order, in logit_max[h]. */
template <class E>
__device__ __forceinline__ void finish_rows(const AttnProblem &p, typename E::Sums &o, const FwdRows<E> &rows,
                                            const RowTile &q, int b, int h, typename E::T *tile,
                                            const Heads<typename E::T> &out, const RowValues &lse,
                                            const RunningRows &running, long long *logit_max)
{
    const typename E::Place at = E::place();
    float factor[E::R], keep[E::R];
    unsigned top = 0;
    UNROLL
    for (int i = 0; i < E::R; i++) {
        const int row = q.row + min(at.row(i), q.count - 1);
        const bool there = at.row(i) < q.count, leader = at.column(0) == 0 && there;
        float sum = E::row_sum(rows.sum[i]), most = rows.max[i] * p.scale;
        factor[i] = keep[i] = 1;
        if (running.max.data)
            join_running<E>(running, there ? running.max.at(p, b, row, h) : nullptr, running.sum.at(p, b, row, h),
                            leader, &most, &sum, &factor[i], &keep[i]);
        /* (fmaxf passes NaN over, a sum does not) */
        if (there) top = max(top, static_cast<unsigned>(logit_order(sum == sum ? most : sum)));
        if (running.unfinished) continue;
        float rescale = 1;
        if (p.sink) {
            const float z = to_float(static_cast<const typename E::T *>(p.sink)[h]);
            rescale = add_sink<E>(z, &most, &sum);
        }
        const bool empty = sum == 0; /* a row with a score sums to 1 or more: its largest gives 1 */
        rescale = empty ? 0.0f : (p.dropout.threshold ? p.dropout.scale : 1.0f) * rescale / sum;
        factor[i] *= rescale, keep[i] *= rescale;
        if (leader) *lse.at(p, b, row, h) = empty ? -INFINITY : most + logf(sum);
    }
    if (logit_max) {
        top = __reduce_max_sync(ALL_LANES, top);
        if (threadIdx.x % WARP == 0) atomicMax(logit_max + h, static_cast<long long>(top));
    }
    const QueryHeads<float> &wide = running.o.rows;
    if (wide.data)
        E::add_wide(o, factor, keep, running.o.resumed, wide.at(p, b, q.row, h), wide.row, q.count, p.V);
    else
        E::store(o, factor, tile, out.at(b, q.row, h), out.row, q.count, p.V);
}

/* ---- Hopper ---- */

/* Whether attention_fwd_hopper has a kernel for this call. */
bool attention_fwd_hopper_fits(const AttnProblem &p, const AttnForward &a);

Err attention_fwd_hopper(Stream *s, const AttnProblem &p, const AttnForward &a);

#endif
