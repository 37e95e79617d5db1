/*
 * From gradients to new weights, over flat float buffers of many tensors at once: statistics, one decision for all of
 * them, AdamW; and conversion between dtypes.
 *
 *   grad_stats    max |g|, and the sum of g^2 as four limbs of 32 bits in units of 2^(-2 shift)
 *   step_finish   norm, clip factor, flags, next shifts: from the statistics of all tensors
 *   adamw         one update of w, m, v; writes w again as the layers read it (copy)
 *   one_moment    the same of w and m, by Lion or SGD with momentum
 *   qk_clip       rows of queries and keys times the factors of their heads
 *   muon_moment   Muon's m of the tensors that are its (muon.cu has the rest)
 *   cast          y = x rounded to nearest
 *
 * The limbs mean what they mean on the CPU (src/cpu/optim.c) and add up over ranks as integers. There every
 * square is rounded by itself; here the squares of 32,768 neighbours are summed in double, in a fixed order, and
 * this sum is rounded once to the limbs' unit, which loses less. Doubles hold the square of every float, so
 * nothing overflows on the way; blocks meet in integer atomics, whose order does not matter. Max, flags and
 * what counts as too large are the CPU's: |g| 2^shift must be below 2^62, and max is the bits of Inf if any g
 * is not finite.
 *
 * Mapping   Blocks have chunks of one tensor each (FlatPart, step.h), which they find in the table by halving: for
 *           hundreds of tensors 8 to 10 loads that L1 keeps. grad_stats: 256 threads for a chunk of 32,768 elements, 16
 *           bytes at a time, 4 under way. step_finish: one block of 256 threads, thread t has the tensors t, t + 256,
 *           ... adamw: 4 blocks a chunk, a thread takes 4 neighbours, twice, 256 * 4 apart: eight loads of 16 bytes
 *           under way, 4 times. one_moment, muon_moment: likewise. cast: likewise, once, over one tensor. qk_clip: a
 *           block a row, which does nothing in most steps.
 * Traffic   per element: grad_stats reads 4 bytes; adamw reads w, m, v, g and writes w, m, v, 28 (with m and v in
 *           bf16 20), and writes a copy of 2: 30; cast to bf16 6. At 4.3 TB/s, for 124 million parameters: 0.12 ms,
 *           0.87 ms, 0.17 ms. grad_stats 3 FLOP, adamw 17 (one division, one root): bound by memory. step_finish moves
 *           56 bytes a tensor, some microseconds.
 *           one_moment reads w, m, g and writes w, m and a copy: 22.
 * Rounding  adamw and one_moment round as the CPU does, operation by operation (IEEE division and root, fma where
 *           written).
 * Needs     16-byte aligned tensors (copy and 16-bit operands: 8) for full speed, else element by element; any
 *           number of elements; F32 accumulators.
 * Source    Loshchilov & Hutter 2019 (AdamW); Chen et al. 2023 (Lion).
 */
#include "kernel.cuh"

constexpr int FLAT_THREADS = 256, FLAT_QUADS = 2, FLAT_BLOCK = FLAT_THREADS * FLAT_QUADS * 4;

/* Four neighbours, moved at once: 16 bytes of float, 8 bytes of a 16-bit dtype. */
template <class T> struct alignas(4 * sizeof(T)) Quad {
    T v[4];
};

__device__ __forceinline__ Quad<float> load_whole(const float *p)
{
    Quad<float> q;
    need_aligned(p, 16);
    *reinterpret_cast<int4 *>(&q) = *reinterpret_cast<const int4 *>(p);
    return q;
}
template <class T> __device__ __forceinline__ Quad<T> load_whole(const T *p)
{
    Quad<T> q;
    need_aligned(p, 8);
    *reinterpret_cast<int2 *>(&q) = *reinterpret_cast<const int2 *>(p);
    return q;
}
__device__ __forceinline__ void store_whole(float *p, const Quad<float> &q)
{
    __stcg(reinterpret_cast<int4 *>(p), *reinterpret_cast<const int4 *>(&q));
}
template <class T> __device__ __forceinline__ void store_whole(T *p, const Quad<T> &q)
{
    __stcg(reinterpret_cast<int2 *>(p), *reinterpret_cast<const int2 *>(&q));
}

/* `left` elements remain, at most 4 of them in this quad; `wide`: p is a multiple of the quad's size. */
template <class T> __device__ __forceinline__ Quad<T> load_quad(const T *p, int64_t left, bool wide)
{
    if (wide && left >= 4) return load_whole(p);
    Quad<T> q;
    for (int i = 0; i < 4; i++) q.v[i] = i < left ? p[i] : T(0.0f);
    return q;
}

template <class T> __device__ __forceinline__ void store_quad(T *p, const Quad<T> &q, int64_t left, bool wide)
{
    if (wide && left >= 4) {
        store_whole(p, q);
        return;
    }
    for (int i = 0; i < 4; i++)
        if (i < left) p[i] = q.v[i];
}

/* Quads of this buffer can be moved at once. */
static bool quads_aligned(Tensor t)
{
    return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(4 * dtype_size(t.dtype)) == 0;
}

/* The tensors of a call. */
struct FlatTable {
    const FlatPart *part;
    int64_t count;
};

static FlatTable flat_table(Tensor parts)
{
    const FlatTable t = { data_of<const FlatPart>(parts), parts.dim[0] };
    return t;
}

/* The part that has a chunk of the table. */
__device__ __forceinline__ FlatPart part_of_chunk(FlatTable t, int64_t chunk)
{
    int64_t low = 0, high = t.count; /* part[low].chunk <= chunk < part[high].chunk */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (t.part[middle].chunk <= chunk) low = middle;
        else high = middle;
    }
    return t.part[low];
}

/* Quads of a part of an aligned buffer can be moved at once where they begin at multiples of 4. */
__device__ __forceinline__ bool part_aligned(const FlatPart &p)
{
    return (p.grad | p.value | p.shard | p.v) % 4 == 0;
}

/* ---- statistics ---- */

constexpr int LIMBS = 4, STATS_QUADS = 4;
constexpr int64_t FLOAT_INF_BITS = 0x7F800000;

/* Adds x >= 0, in the limbs' unit. Nothing is carried: an int64 takes 2^31 such parts, and step_finish carries. */
__device__ __forceinline__ void limbs_add(unsigned long long *limb, double x)
{
    double unit = 0x1p96;
    for (int i = LIMBS - 1; i > 0; i--, unit *= 0x1p-32) {
        const double part = floor(x / unit);
        atomicAdd(limb + i, static_cast<unsigned long long>(part));
        x -= part * unit;
    }
    atomicAdd(limb, static_cast<unsigned long long>(rint(x)));
}

struct StatsArgs {
    int64_t *max;
    Rows<int64_t> sumsq;
    const float *g;
    const int32_t *shift;
    FlatTable table;
    bool wide;
};

__global__ void __launch_bounds__(FLAT_THREADS) grad_stats_kernel(StatsArgs a)
{
    SHARED(double, part, [FLAT_THREADS / WARP]);
    const FlatPart p = part_of_chunk(a.table, blockIdx.x);
    if (!(p.flags & FLAT_COUNTS)) return;
    const int64_t begin = (blockIdx.x - p.chunk) * FLAT_CHUNK;
    const int64_t end = begin + FLAT_CHUNK < p.count ? begin + FLAT_CHUNK : p.count;
    const int shift = a.shift[p.number];
    const float limit = ldexpf(1.0f, 62 - shift), *g = a.g + p.grad;
    const bool wide = a.wide && part_aligned(p);
    double sum = 0;
    int most = 0; /* bits of a float without its sign order as the float does, Inf and NaN above all */
    for (int64_t i = begin + threadIdx.x * 4; i < end; i += STATS_QUADS * FLAT_THREADS * 4) {
        Quad<float> q[STATS_QUADS];
        for (int u = 0; u < STATS_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4;
            q[u] = load_quad(g + at, end - at, wide);
        }
        for (int u = 0; u < STATS_QUADS; u++) {
            for (int k = 0; k < 4; k++) {
                const float x = fabsf(q[u].v[k]);
                const double counts = x < limit ? static_cast<double>(x) : 0.0;
                sum = fma(counts, counts, sum);
                most = __float_as_int(x) > most ? __float_as_int(x) : most;
            }
        }
    }
    for (int d = WARP / 2; d > 0; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    most = __reduce_max_sync(ALL_LANES, most);
    if (threadIdx.x % WARP == 0) {
        const long long bits = most < FLOAT_INF_BITS ? most : FLOAT_INF_BITS;
        part[threadIdx.x / WARP] = sum;
        atomicMax(reinterpret_cast<long long *>(a.max + p.number), bits);
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < FLAT_THREADS / WARP; w++) sum += part[w];
    limbs_add(reinterpret_cast<unsigned long long *>(a.sumsq.at(p.number)), ldexp(sum, 2 * shift));
}

extern "C" Err cuda_grad_stats(Stream *s, const grad_stats_args *a)
{
    if (a->g.dtype != F32) return err_set(ERR_SHAPE, "grad_stats: g is %s", dtype_name(a->g.dtype));
    const StatsArgs args = { data_of<int64_t>(a->max),
                             rows_of<int64_t>(a->sumsq),
                             data_of<const float>(a->g),
                             data_of<const int32_t>(a->shift),
                             flat_table(a->parts),
                             quads_aligned(a->g) };
    LAUNCH(grad_stats_kernel, static_cast<unsigned>(a->chunks), FLAT_THREADS, 0, cuda_stream(s), args);
    return ERR_OK;
}

/* ---- the decision ---- */

/* The same numbers as in src/cpu/optim.c. */
constexpr int SHIFT_MIN = -60, SHIFT_MAX = 100, SHIFT_SPARE = 10;

/* Meaning of a tensor's maximum: a gradient that is not finite, one too large for the limbs' unit, or its size. */
struct MaxFacts {
    bool zero, overflow, nonfinite;
    int log2_max; /* smallest e with max |g| <= 2^e; if there is one and it is finite */
};

__device__ __forceinline__ MaxFacts max_facts(int64_t max, int shift)
{
    const int bits = static_cast<int>(max), mantissa = bits & ((1 << 23) - 1);
    const int denormal = 32 - __clz(bits - 1) - 149, normal = (bits >> 23) - 127 + (mantissa != 0);
    MaxFacts f;
    f.zero = max == 0;
    f.nonfinite = max >= FLOAT_INF_BITS;
    f.log2_max = bits < 1 << 23 ? denormal : normal;
    f.overflow = !f.zero && !f.nonfinite && f.log2_max + shift > 61;
    return f;
}

__device__ __forceinline__ int shift_next(int shift, const MaxFacts &f, int headroom_bits)
{
    const int next = f.zero || f.nonfinite ? shift : 62 - headroom_bits - SHIFT_SPARE - f.log2_max;
    return next < SHIFT_MIN ? SHIFT_MIN : next > SHIFT_MAX ? SHIFT_MAX : next;
}

/* The number that four limbs stand for, times 2^(-2 shift). Ranks' limbs were added: carry first. */
__device__ __forceinline__ double limbs_value(const int64_t *sums, int shift)
{
    int64_t limb[LIMBS];
    for (int i = 0; i < LIMBS; i++) limb[i] = sums[i];
    for (int i = 0; i + 1 < LIMBS; i++) {
        limb[i + 1] += limb[i] >> 32;
        limb[i] &= 0xFFFFFFFF;
    }
    double x = 0;
    for (int i = LIMBS - 1; i >= 0; i--) x = x * 0x1p32 + static_cast<double>(limb[i]);
    return ldexp(x, -2 * shift);
}

struct FinishArgs {
    const int64_t *max, *loss_sums;
    Rows<const int64_t> sumsq;
    const int32_t *shift, *overflow, *over_limit; /* over_limit: or NULL */
    int32_t *next_shift;
    StepValues *step;
    int64_t count;
    int headroom_bits;
};

/* Gradients carry the factor 1 / nominal; the mean is over the tokens that count. */
__device__ __forceinline__ void step_write(const FinishArgs &a, bool overflow, bool nonfinite, double norm)
{
    StepValues *v = a.step;
    const int64_t counted = a.loss_sums[1];
    const bool over_limit = a.over_limit && *a.over_limit, skip = overflow || nonfinite || over_limit || counted <= 0;
    v->overflow = overflow;
    v->nonfinite = nonfinite;
    v->loss_nonfinite = a.loss_sums[2] != 0;
    v->over_limit = over_limit;
    v->skip = skip;
    const double tokens = static_cast<double>(counted), nominal = static_cast<double>(v->nominal);
    const double mean = counted > 0 ? nominal / tokens * static_cast<double>(v->unscale) : 0.0;
    const double clip = v->clip > 0.0f ? static_cast<double>(v->clip) / (norm * mean + 1e-6) : 1.0;
    v->loss_fixed = a.loss_sums[0];
    v->counted = counted;
    v->grad_norm = overflow ? 0.0f : static_cast<float>(norm * mean);
    v->grad_scale = skip ? 0.0f : static_cast<float>(mean * (clip < 1.0 ? clip : 1.0));
}

__global__ void __launch_bounds__(FLAT_THREADS) step_finish_kernel(FinishArgs a)
{
    SHARED(double, part, [FLAT_THREADS]);
    bool overflow = *a.overflow != 0, nonfinite = a.loss_sums[2] != 0;
    double squares = 0;
    for (int64_t i = threadIdx.x; i < a.count; i += FLAT_THREADS) {
        const MaxFacts f = max_facts(a.max[i], a.shift[i]);
        overflow |= f.overflow;
        nonfinite |= f.nonfinite;
        squares += limbs_value(a.sumsq.at(i), a.shift[i]);
        a.next_shift[i] = shift_next(a.shift[i], f, a.headroom_bits);
    }
    part[threadIdx.x] = squares;
    overflow = __syncthreads_or(overflow);
    nonfinite = __syncthreads_or(nonfinite);
    if (threadIdx.x) return;
    for (int t = 1; t < FLAT_THREADS && t < a.count; t++) squares += part[t];
    step_write(a, overflow, nonfinite, sqrt(squares));
}

extern "C" Err cuda_step_finish(Stream *s, const step_finish_args *a)
{
    if (a->acc != F32) return err_set(ERR_SHAPE, "step_finish: accumulators are %s", dtype_name(a->acc));
    const FinishArgs args = { data_of<const int64_t>(a->max),
                              data_of<const int64_t>(a->loss_sums),
                              rows_of<const int64_t>(a->sumsq),
                              data_of<const int32_t>(a->shift),
                              data_of<const int32_t>(a->overflow),
                              data_of<const int32_t>(a->over_limit),
                              data_of<int32_t>(a->next_shift),
                              a->step,
                              a->max.dim[0],
                              a->headroom_bits };
    LAUNCH(step_finish_kernel, 1, FLAT_THREADS, 0, cuda_stream(s), args);
    return ERR_OK;
}

/* ---- AdamW ---- */

constexpr int ADAM_BLOCKS = 4; /* of a chunk */

/* M: dtype of m and v. */
template <class M> struct AdamArgs {
    float *w;
    M *m, *v;
    const float *g;
    const StepValues *step;
    FlatTable table;
    float beta1, beta2, eps, decay, hidden_rate;
    bool wide;
};

/* The same in every element of a tensor. */
struct AdamStep {
    float scale, rest1, rest2, inverse1, inverse2, lr, eps, decay;
};

template <class M> __device__ __forceinline__ AdamStep adam_step(const AdamArgs<M> &a, const FlatPart &p)
{
    const StepValues *s = a.step;
    const float share = p.flags & FLAT_HIDDEN ? a.hidden_rate : 1.0f;
    const AdamStep c = { s->grad_scale,        1.0f - a.beta1, 1.0f - a.beta2, 1.0f / s->correct1,
                         1.0f / s->correct2, s->lr * share,  a.eps * share,  p.flags & FLAT_DECAYS ? a.decay : 0.0f };
    return c;
}

template <class M>
__device__ __forceinline__ float adam_element(const AdamArgs<M> &a, const AdamStep &c, float w, M *pm, M *pv,
                                              float grad)
{
    const float g = grad * c.scale;
    const float m = fmaf(a.beta1, to_float(*pm), c.rest1 * g);
    const float v = fmaf(a.beta2, to_float(*pv), c.rest2 * (g * g));
    const float u = (m * c.inverse1) / (sqrtf(v * c.inverse2) + c.eps);
    *pm = from_float<M>(m);
    *pv = from_float<M>(v);
    return fmaf(-c.lr, fmaf(c.decay, w, u), w);
}

/* C: dtype of copy; void: there is none, and w lies where it would. */
template <class C> struct AdamCopy {
    C *data;
    __device__ __forceinline__ int64_t place(const FlatPart &p) const { return p.shard; }
    /* (those of fp32 are few) */
    __device__ __forceinline__ void put(const FlatPart &p, int64_t i, const Quad<float> &w, int64_t left,
                                        bool wide) const
    {
        C *to = data + p.value;
        if (p.flags & FLAT_WIDE) {
            store_quad(reinterpret_cast<float *>(to) + i, w, left, false);
            return;
        }
        Quad<C> q;
        for (int k = 0; k < 4; k++) q.v[k] = from_float<C>(w.v[k]);
        store_quad(to + i, q, left, wide);
    }
    __device__ __forceinline__ void put(int64_t at, float w) const { data[at] = from_float<C>(w); }
};
template <> struct AdamCopy<void> {
    void *data;
    __device__ __forceinline__ int64_t place(const FlatPart &p) const { return p.value; }
    __device__ __forceinline__ void put(const FlatPart &, int64_t, const Quad<float> &, int64_t, bool) const {}
    __device__ __forceinline__ void put(int64_t, float) const {}
};

/* A block's share of a chunk: FLAT_BLOCK elements at a time. */
template <class C, class M>
__global__ void __launch_bounds__(FLAT_THREADS) adamw_kernel(AdamArgs<M> a, AdamCopy<C> copy)
{
    if (a.step->skip) return;
    const int64_t chunk = blockIdx.x / ADAM_BLOCKS, share = blockIdx.x % ADAM_BLOCKS * (FLAT_CHUNK / ADAM_BLOCKS);
    const FlatPart p = part_of_chunk(a.table, chunk);
    if (p.flags & FLAT_MUON) return;
    const AdamStep c = adam_step(a, p);
    const int64_t begin = (chunk - p.chunk) * FLAT_CHUNK + share, stop = begin + FLAT_CHUNK / ADAM_BLOCKS;
    const int64_t end = stop < p.count ? stop : p.count;
    float *pw = a.w + copy.place(p);
    M *pm = a.m + p.shard, *pv = a.v + p.v;
    const float *pg = a.g + p.grad;
    const bool wide = a.wide && part_aligned(p);
    for (int64_t i = begin + threadIdx.x * 4; i < end; i += FLAT_BLOCK) {
        Quad<float> w[FLAT_QUADS], g[FLAT_QUADS];
        Quad<M> m[FLAT_QUADS], v[FLAT_QUADS];
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4;
            w[u] = load_quad(pw + at, end - at, wide);
            m[u] = load_quad(pm + at, end - at, wide);
            v[u] = load_quad(pv + at, end - at, wide);
            g[u] = load_quad(pg + at, end - at, wide);
        }
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4, left = end - at;
            for (int k = 0; k < 4; k++) w[u].v[k] = adam_element(a, c, w[u].v[k], &m[u].v[k], &v[u].v[k], g[u].v[k]);
            store_quad(pw + at, w[u], left, wide);
            store_quad(pm + at, m[u], left, wide);
            store_quad(pv + at, v[u], left, wide);
            copy.put(p, at, w[u], left, wide);
        }
    }
}

template <class C, class M> static void launch_adamw(Stream *s, const adamw_args *a)
{
    const bool wide = quads_aligned(a->w) && quads_aligned(a->m) && quads_aligned(a->v) && quads_aligned(a->g) &&
                      (!a->copy.data || quads_aligned(a->copy));
    const AdamArgs<M> args = { data_of<float>(a->w),
                               data_of<M>(a->m),
                               data_of<M>(a->v),
                               data_of<const float>(a->g),
                               a->step,
                               flat_table(a->parts),
                               a->beta1,
                               a->beta2,
                               a->eps,
                               a->decay,
                               a->hidden_rate,
                               wide };
    const AdamCopy<C> copy = { data_of<C>(a->copy) };
    const unsigned grid = static_cast<unsigned>(a->chunks * ADAM_BLOCKS);
    LAUNCH((adamw_kernel<C, M>), grid, FLAT_THREADS, 0, cuda_stream(s), args, copy);
}

template <class M> static Err adamw_of(Stream *s, const adamw_args *a)
{
    if (!a->copy.data) launch_adamw<void, M>(s, a);
    else DISPATCH(a->copy.dtype, (launch_adamw<T, M>(s, a)));
    return ERR_OK;
}

extern "C" Err cuda_adamw(Stream *s, const adamw_args *a)
{
    if (a->g.dtype != F32) return err_set(ERR_SHAPE, "adamw: g is %s", dtype_name(a->g.dtype));
    if (a->m.dtype != a->v.dtype)
        return err_set(ERR_SHAPE, "adamw: m is %s, v %s", dtype_name(a->m.dtype), dtype_name(a->v.dtype));
    if (a->m.dtype == F32) return adamw_of<float>(s, a);
    if (a->m.dtype == BF16) return adamw_of<bf16>(s, a);
    return err_set(ERR_SHAPE, "adamw: m is %s", dtype_name(a->m.dtype));
}

/* ---- Lion, and SGD with momentum ---- */

struct OneMomentArgs {
    float *w, *m;
    const float *g;
    const StepValues *step;
    FlatTable table;
    float beta1, beta2, decay, hidden_rate;
    bool lion, wide;
};

/* The same in every element of a tensor. */
struct OneMomentStep {
    float scale, lr, decay;
};

__device__ __forceinline__ float one_moment_element(const OneMomentArgs &a, const OneMomentStep &c, float w, float *pm,
                                                    float grad)
{
    const float g = grad * c.scale, m = *pm;
    const float mixed = fmaf(a.beta1, m, (1.0f - a.beta1) * g);
    const float next = a.lion ? fmaf(a.beta2, m, (1.0f - a.beta2) * g) : fmaf(a.beta1, m, g);
    const float u = !a.lion ? next : mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
    *pm = next;
    return fmaf(-c.lr, fmaf(c.decay, w, u), w);
}

template <class C> __global__ void __launch_bounds__(FLAT_THREADS) one_moment_kernel(OneMomentArgs a, AdamCopy<C> copy)
{
    if (a.step->skip) return;
    const int64_t chunk = blockIdx.x / ADAM_BLOCKS, share = blockIdx.x % ADAM_BLOCKS * (FLAT_CHUNK / ADAM_BLOCKS);
    const FlatPart p = part_of_chunk(a.table, chunk);
    const OneMomentStep c = { a.step->grad_scale, a.step->lr * (p.flags & FLAT_HIDDEN ? a.hidden_rate : 1.0f),
                              p.flags & FLAT_DECAYS ? a.decay : 0.0f };
    const int64_t begin = (chunk - p.chunk) * FLAT_CHUNK + share, stop = begin + FLAT_CHUNK / ADAM_BLOCKS;
    const int64_t end = stop < p.count ? stop : p.count;
    float *pw = a.w + copy.place(p), *pm = a.m + p.shard;
    const float *pg = a.g + p.grad;
    const bool wide = a.wide && part_aligned(p);
    for (int64_t i = begin + threadIdx.x * 4; i < end; i += FLAT_BLOCK) {
        Quad<float> w[FLAT_QUADS], m[FLAT_QUADS], g[FLAT_QUADS];
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4;
            w[u] = load_quad(pw + at, end - at, wide);
            m[u] = load_quad(pm + at, end - at, wide);
            g[u] = load_quad(pg + at, end - at, wide);
        }
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4, left = end - at;
            for (int k = 0; k < 4; k++) w[u].v[k] = one_moment_element(a, c, w[u].v[k], &m[u].v[k], g[u].v[k]);
            store_quad(pw + at, w[u], left, wide);
            store_quad(pm + at, m[u], left, wide);
            copy.put(p, at, w[u], left, wide);
        }
    }
}

template <class C> static void launch_one_moment(Stream *s, const one_moment_args *a)
{
    const bool wide = quads_aligned(a->w) && quads_aligned(a->m) && quads_aligned(a->g) &&
                      (!a->copy.data || quads_aligned(a->copy));
    const OneMomentArgs args = { data_of<float>(a->w),
                                 data_of<float>(a->m),
                                 data_of<const float>(a->g),
                                 a->step,
                                 flat_table(a->parts),
                                 a->beta1,
                                 a->beta2,
                                 a->decay,
                                 a->hidden_rate,
                                 a->lion != 0,
                                 wide };
    const AdamCopy<C> copy = { data_of<C>(a->copy) };
    const unsigned grid = static_cast<unsigned>(a->chunks * ADAM_BLOCKS);
    LAUNCH(one_moment_kernel<C>, grid, FLAT_THREADS, 0, cuda_stream(s), args, copy);
}

extern "C" Err cuda_one_moment(Stream *s, const one_moment_args *a)
{
    if (a->g.dtype != F32) return err_set(ERR_SHAPE, "one_moment: g is %s", dtype_name(a->g.dtype));
    if (!a->copy.data) launch_one_moment<void>(s, a);
    else DISPATCH(a->copy.dtype, launch_one_moment<T>(s, a));
    return ERR_OK;
}

/* ---- QK-clip ---- */

struct ClipArgs {
    float *w;
    const int64_t *logit_max;
    const StepValues *step;
    QkRows rows;
    int64_t first, count, columns;
    float threshold, alpha;
};

/* Factor of a row's elements. */
__device__ __forceinline__ float clip_factor(const ClipArgs &a, int64_t row)
{
    const int kind = qk_row_kind(&a.rows, row);
    if (kind < 0) return 1;
    const float logit = qk_row_logit(&a.rows, row, a.logit_max);
    if (!(logit > a.threshold)) return 1;
    return powf(a.threshold / logit, kind == QK_QUERY ? a.alpha : kind == QK_KEY ? 1 - a.alpha : 1);
}

/* A block has a row of the matrix, as far as w has it. T void: there is no copy. */
template <class T> __global__ void __launch_bounds__(FLAT_THREADS) qk_clip_kernel(ClipArgs a, AdamCopy<T> copy)
{
    const int64_t row = a.first / a.columns + blockIdx.x, at = row * a.columns - a.first;
    const int64_t end = at + a.columns < a.count ? at + a.columns : a.count;
    if (a.step->skip) return;
    const float factor = clip_factor(a, row);
    if (factor == 1) return;
    for (int64_t i = (at > 0 ? at : 0) + threadIdx.x; i < end; i += FLAT_THREADS) {
        const float w = a.w[i] * factor;
        a.w[i] = w;
        copy.put(i, w);
    }
}

template <class T> static Err launch_clip(Stream *s, const qk_clip_args *a)
{
    const int64_t count = a->w.dim[0], rows = ceil_div(a->first + count, a->columns) - a->first / a->columns;
    const ClipArgs args = { data_of<float>(a->w), data_of<const int64_t>(a->logit_max), a->step, a->rows, a->first,
                            count, a->columns, a->threshold, a->alpha };
    const AdamCopy<T> copy = { data_of<T>(a->copy) };
    LAUNCH((qk_clip_kernel<T>), grid_blocks(rows), FLAT_THREADS, 0, cuda_stream(s), args, copy);
    return ERR_OK;
}

extern "C" Err cuda_qk_clip(Stream *s, const qk_clip_args *a)
{
    if (!a->copy.data) return launch_clip<void>(s, a);
    DISPATCH(a->copy.dtype, return launch_clip<T>(s, a));
    return ERR_OK;
}

/* ---- Muon's moment ---- */

struct MomentArgs {
    float *m;
    const float *g;
    const StepValues *step;
    FlatTable table;
    float beta;
    bool wide;
};

__global__ void __launch_bounds__(FLAT_THREADS) muon_moment_kernel(MomentArgs a)
{
    if (a.step->skip) return;
    const int64_t chunk = blockIdx.x / ADAM_BLOCKS, share = blockIdx.x % ADAM_BLOCKS * (FLAT_CHUNK / ADAM_BLOCKS);
    const FlatPart p = part_of_chunk(a.table, chunk);
    if (!(p.flags & FLAT_MUON)) return;
    const int64_t from = share + (chunk - p.chunk) * FLAT_CHUNK, stop = from + FLAT_CHUNK / ADAM_BLOCKS;
    const int64_t end = stop < p.count ? stop : p.count;
    const float scale = a.step->grad_scale, rest = 1.0f - a.beta, *pg = a.g + p.grad;
    float *pm = a.m + p.shard;
    const bool wide = a.wide && part_aligned(p);
    for (int64_t i = from + threadIdx.x * 4; i < end; i += FLAT_BLOCK) {
        Quad<float> m[FLAT_QUADS], g[FLAT_QUADS];
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4;
            m[u] = load_quad(pm + at, end - at, wide);
            g[u] = load_quad(pg + at, end - at, wide);
        }
        for (int u = 0; u < FLAT_QUADS; u++) {
            const int64_t at = i + u * FLAT_THREADS * 4;
            for (int k = 0; k < 4; k++) m[u].v[k] = fmaf(a.beta, m[u].v[k], rest * (g[u].v[k] * scale));
            store_quad(pm + at, m[u], end - at, wide);
        }
    }
}

extern "C" Err cuda_muon_moment(Stream *s, const muon_moment_args *a)
{
    if (a->g.dtype != F32) return err_set(ERR_SHAPE, "muon_moment: g is %s", dtype_name(a->g.dtype));
    const MomentArgs args = { data_of<float>(a->m),  data_of<const float>(a->g), a->step, flat_table(a->parts), a->beta,
                              quads_aligned(a->m) && quads_aligned(a->g) };
    const unsigned grid = static_cast<unsigned>(a->chunks * ADAM_BLOCKS);
    LAUNCH(muon_moment_kernel, grid, FLAT_THREADS, 0, cuda_stream(s), args);
    return ERR_OK;
}

/* ---- cast ---- */

template <class Y, class X>
__global__ void __launch_bounds__(FLAT_THREADS) cast_kernel(Y *y, const X *x, RowCount count, bool wide)
{
    const int64_t n = rows_in_use(count), first = blockIdx.x * static_cast<int64_t>(FLAT_BLOCK) + threadIdx.x * 4;
    Quad<X> from[FLAT_QUADS];
    for (int u = 0; u < FLAT_QUADS; u++) {
        const int64_t at = first + u * FLAT_THREADS * 4;
        from[u] = load_quad(x + at, n - at, wide);
    }
    for (int u = 0; u < FLAT_QUADS; u++) {
        const int64_t at = first + u * FLAT_THREADS * 4;
        Quad<Y> to;
        for (int k = 0; k < 4; k++) to.v[k] = from_float<Y>(to_float(from[u].v[k]));
        store_quad(y + at, to, n - at, wide);
    }
}

template <class X> static Err launch_cast(Stream *s, const cast_args *a)
{
    const bool wide = quads_aligned(a->y) && quads_aligned(a->x);
    const unsigned grid = grid_blocks(ceil_div(a->x.dim[0], FLAT_BLOCK));
    DISPATCH(a->y.dtype, LAUNCH((cast_kernel<T, X>), grid, FLAT_THREADS, 0, cuda_stream(s), data_of<T>(a->y),
                                data_of<const X>(a->x), row_count(a->y, a->x), wide));
    return ERR_OK;
}

extern "C" Err cuda_cast(Stream *s, const cast_args *a)
{
    DISPATCH(a->x.dtype, return launch_cast<T>(s, a));
    return ERR_OK;
}
