/*
 * Attention, merging: (o, lse) <- the attention over the union of two disjoint key sets.
 *
 *   m = max(lse, lse2)   w = exp(lse - m), w2 = exp(lse2 - m)   o = (o w + o2 w2) / (w + w2)   lse = m + log(w + w2)
 *
 * Mapping  LANES threads a row (a power of two, at most a warp), 16 bytes a time; all lanes of a row read its two
 *          numbers before one of them writes.
 * Traffic  read o, o2, write o: 6 B T H C bytes in bf16, and 12 a row for lse; 65,536 x 768: 302 MB, 70 us at
 *          4.3 TB/s. A few FLOP an element: bound by memory.
 * Needs    rows at multiples of 16 bytes.
 */
#include "attention.cuh"

constexpr int MERGE_THREADS = 256;

struct MergeRows {
    int64_t count; /* B T H */
    int H, C;
    float *lse;
    const float *lse2;
    int64_t lse_ld, lse2_ld;
};

template <class T, int LANES>
__global__ void __launch_bounds__(MERGE_THREADS) attention_merge_kernel(MergeRows m, Rows<T> o, Rows<const T> o2)
{
    constexpr int CHUNK = Pack<T>::COUNT;
    const int lane = threadIdx.x % LANES;
    const int64_t row = blockIdx.x * static_cast<int64_t>(MERGE_THREADS / LANES) + threadIdx.x / LANES;
    const bool inside = row < m.count;
    const int64_t token = inside ? row / m.H : 0, head = inside ? row % m.H : 0;
    float *lse = m.lse + token * m.lse_ld + head;
    const float first = inside ? *lse : -INFINITY;
    const float second = inside ? m.lse2[token * m.lse2_ld + head] : -INFINITY;
    const float most = first > second ? first : second;
    __syncwarp();
    if (most == -INFINITY) return; /* no key in either: o is 0 already */
    const float w = expf(first - most), w2 = expf(second - most), sum = w + w2, scale = 1.0f / sum;
    if (lane == 0) *lse = most + logf(sum);
    for (int c = lane * CHUNK; c < m.C; c += LANES * CHUNK) {
        Pack<T> x = load16(o.at(row) + c);
        const Pack<T> y = load16(o2.at(row) + c);
        UNROLL
        for (int i = 0; i < CHUNK; i++)
            x.v[i] = from_float<T>(fmaf(to_float(y.v[i]), w2, to_float(x.v[i]) * w) * scale);
        store16(o.at(row) + c, x);
    }
}

template <class T, int LANES> static void launch_lanes(Stream *s, const MergeRows &m, const attention_merge_args *a)
{
    const unsigned blocks = static_cast<unsigned>(ceil_div(m.count, MERGE_THREADS / LANES));
    LAUNCH((attention_merge_kernel<T, LANES>), blocks, MERGE_THREADS, 0, cuda_stream(s), m, rows_of<T>(a->o),
           rows_of<const T>(a->o2));
}

template <class T> static void launch_merge(Stream *s, const attention_merge_args *a)
{
    const int64_t H = a->o.dim[2], C = a->o.dim[3];
    const MergeRows m = { a->o.dim[0] * a->o.dim[1] * H, static_cast<int>(H),  static_cast<int>(C),
                          data_of<float>(a->lse),        data_of<const float>(a->lse2), a->lse.ld, a->lse2.ld };
    if (m.count == 0) return;
    if (C <= 8 * Pack<T>::COUNT) launch_lanes<T, 8>(s, m, a);
    else launch_lanes<T, 16>(s, m, a);
}

extern "C" Err cuda_attention_merge(Stream *s, const attention_merge_args *a)
{
    TRY(attention_aligned("o", a->o));
    TRY(attention_aligned("o2", a->o2));
    DISPATCH(a->o.dtype, launch_merge<T>(s, a));
    return ERR_OK;
}
