/*
 * Elementwise ops: residual add with dropout, GELU, squared ReLU, SwiGLU, gates, their backwards, zeros, sums of
 * accumulators.
 *
 * Mapping   a thread takes 2 packs of 16 bytes (PackGrid of kernel.cuh), loads everything it needs of both,
 *           computes in fp32, stores. 256 threads a block, 64 KiB of loads under way on an SM per operand.
 * Traffic   bytes per element with bf16, and the time for 65,536 x 768 (GELU, SwiGLU: x 3072) at 4.3 TB/s:
 *             residual_fwd  read x, residual, write y           6      70 us
 *             residual_bwd  read dy, write dx                   4      47 us
 *             gelu_fwd      read x, write y                     4     187 us
 *             gelu_bwd      read x, dy, write dx                6     281 us
 *             gelu_erf_fwd, gelu_erf_bwd, relu2_fwd, relu2_bwd: as GELU's
 *             swiglu_fwd    read gate, up, write y              6     281 us
 *             swiglu_bwd    read gate, up, dy, write both       10    468 us
 *             gate_fwd      read x, gate, write y               6      70 us
 *             gate_bwd      read dy, x, gate, write both        10    117 us
 *             fill_zero     write                               2      23 us
 *           fp32 takes twice the time. 10 to 20 FLOP an element: bound by memory; but see below.
 * Issue     at 4.3 TB/s an SM has about 213 instruction slots a lane for a pack read and written. GELU takes
 *           two special-function instructions an element (exp, reciprocal; 16 a pack, 60% of their rate), so
 *           16-bit dtypes use the hardware's exp, whose error of 2^-20 is far below their 2^-9; fp32 has half
 *           the elements a pack and takes the exact one. Dropout (residual.cuh): two
 *           Philox calls a pack, 140 slots of 320.
 * Needs     16-byte aligned rows for full speed, else element by element; any width; y may be x or residual.
 * Source    GELU in its tanh form: Hendrycks & Gimpel 2016; SwiGLU: Shazeer 2020; clamped: OpenAI 2025 (gpt-oss).
 */
#include "residual.cuh"

/* ---- maps: y = F(a) or F(a, b) ---- */

/* exp for storage T */
template <class T> __device__ __forceinline__ float exp_of(float x) { return __expf(x); }
template <> __device__ __forceinline__ float exp_of<float>(float x) { return expf(x); }

/* 1 / (1 + exp(-u)); 0 where exp overflows. In eighths: __fdividef has 0 for divisors beyond 2^126. */
template <class T> __device__ __forceinline__ float sigmoid(float u)
{
    return __fdividef(0.125f, fmaf(0.125f, exp_of<T>(-u), 0.125f));
}

/*
 * s = sigmoid(u) and t = 1 - s = e s with e = exp(-u), so that neither loses digits. u is at least -80: e s
 * would else be inf * 0.
 */
template <class T> __device__ __forceinline__ void sigmoid_pair(float u, float *s, float *t)
{
    const float e = exp_of<T>(-u);
    *s = __fdividef(1.0f, 1.0f + e);
    *t = e * *s;
}

constexpr float GELU_C = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
constexpr float GELU_A = 0.044715f;

__device__ __forceinline__ float gelu_inner(float x, float xx) { return GELU_C * x * fmaf(GELU_A, xx, 1.0f); }

struct GeluFwd {
    static constexpr bool TWO = false;
    template <class T> static __device__ __forceinline__ float of(float x, float)
    {
        return x * sigmoid<T>(gelu_inner(x, x * x));
    }
};

/* dy d(x s(u))/dx, where the slope is s + x s (1 - s) u'. Beyond 20 it is 0 or 1; the clamp lets NaN through. */
struct GeluBwd {
    static constexpr bool TWO = true;
    template <class T> static __device__ __forceinline__ float of(float dy, float x)
    {
        float s, t;
        const float c = x < -20.0f ? -20.0f : x > 20.0f ? 20.0f : x, cc = c * c;
        const float u = gelu_inner(c, cc);
        sigmoid_pair<T>(u < -80.0f ? -80.0f : u, &s, &t);
        const float du = GELU_C * fmaf(3.0f * GELU_A, cc, 1.0f);
        return dy * fmaf(c * s * t, du, s);
    }
};

/* The normal distribution's integral and density at x, |x| <= 20: see src/cpu/gelu.h. */
template <class T> __device__ __forceinline__ float normal_integral(float x, float *density)
{
    const float t = __fdividef(1.0f, fmaf(0.26f, fabsf(x), 1.0f)), e = exp_of<T>(-0.5f * x * x);
    float p = 0.030741643f;
    p = fmaf(p, t, -0.153984279f);
    p = fmaf(p, t, 0.253891155f);
    p = fmaf(p, t, -0.153713613f);
    p = fmaf(p, t, 0.162875685f);
    p = fmaf(p, t, 0.0501962236f);
    p = fmaf(p, t, 0.103246431f);
    p = fmaf(p, t, 0.102985821f);
    p = fmaf(p, t, 0.103760922f);
    const float tail = e * (p * t);
    *density = 0.3989422804f * e;
    return x < 0.0f ? tail : 1.0f - tail;
}

/* lets NaN through */
__device__ __forceinline__ float gelu_erf_clamped(float x) { return x < -20.0f ? -20.0f : x > 20.0f ? 20.0f : x; }

struct GeluErfFwd {
    static constexpr bool TWO = false;
    template <class T> static __device__ __forceinline__ float of(float x, float)
    {
        float density;
        return x * normal_integral<T>(gelu_erf_clamped(x), &density);
    }
};

struct GeluErfBwd {
    static constexpr bool TWO = true;
    template <class T> static __device__ __forceinline__ float of(float dy, float x)
    {
        float density;
        const float c = gelu_erf_clamped(x), integral = normal_integral<T>(c, &density);
        return dy * fmaf(c, density, integral);
    }
};

/* max(x, 0); lets NaN through */
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

struct Relu2Fwd {
    static constexpr bool TWO = false;
    template <class T> static __device__ __forceinline__ float of(float x, float)
    {
        const float r = relu(x);
        return r * r;
    }
};

struct Relu2Bwd {
    static constexpr bool TWO = true;
    template <class T> static __device__ __forceinline__ float of(float dy, float x) { return dy * (2.0f * relu(x)); }
};

/* x under a gate */
struct GateFwd {
    static constexpr bool TWO = true;
    template <class T> static __device__ __forceinline__ float of(float x, float gate) { return x * sigmoid<T>(gate); }
};

struct Factor {
    static constexpr bool TWO = false;
    float factor;
    template <class T> __device__ __forceinline__ float of(float x, float) const { return factor * x; }
};

struct Mix {
    static constexpr bool TWO = true;
    float a, b;
    template <class T> __device__ __forceinline__ float of(float x, float y) const { return fmaf(a, x, b * y); }
};

struct Softcap {
    static constexpr bool TWO = false;
    float cap;
    template <class T> __device__ __forceinline__ float of(float x, float) const { return cap * tanhf(x / cap); }
};

template <class T, bool WIDE, class F>
__global__ void __launch_bounds__(PACK_THREADS)
    map_kernel(Rows<T> y, Rows<const T> a, GroupedRows<const T> b, PackGrid g, F f)
{
    const int64_t rows = rows_in_use(g.rows);
    Pack<T> pa[PACK_UNROLL], pb[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        pa[u] = load_pack<T, WIDE>(a.at(p.row) + p.column, p.left);
        if (F::TWO) pb[u] = load_pack<T, WIDE>(b.at(p.row) + p.column, p.left);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            const float second = F::TWO ? to_float(pb[u].v[i]) : 0.0f;
            pa[u].v[i] = from_float<T>(f.template of<T>(to_float(pa[u].v[i]), second));
        }
        store_pack<T, WIDE>(y.at(p.row) + p.column, pa[u], p.left);
    }
}

template <class T, class F> static void launch_map(Stream *s, Tensor y, Tensor a, Tensor b, F f = F())
{
    const PackGrid g = pack_grid(row_count(y, a), 1, y.dim[1], Pack<T>::COUNT);
    const bool wide = rows_aligned(y) && rows_aligned(a) && (!F::TWO || rows_aligned(b));
    const Rows<T> to = rows_of<T>(y);
    const Rows<const T> from = rows_of<const T>(a);
    const GroupedRows<const T> second = grouped_rows_of<const T>(b);
    if (wide) LAUNCH((map_kernel<T, true, F>), g.grid, g.block, 0, cuda_stream(s), to, from, second, g, f);
    else LAUNCH((map_kernel<T, false, F>), g.grid, g.block, 0, cuda_stream(s), to, from, second, g, f);
}

extern "C" Err cuda_mix(Stream *s, const mix_args *a)
{
    const Mix mix = { a->a, a->b };
    DISPATCH(a->x.dtype, (launch_map<T, Mix>(s, a->y, a->x, a->y, mix)));
    return ERR_OK;
}

extern "C" Err cuda_gelu_fwd(Stream *s, const gelu_fwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, GeluFwd>(s, a->y, a->x, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_gelu_bwd(Stream *s, const gelu_bwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, GeluBwd>(s, a->dx, a->dy, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_gelu_erf_fwd(Stream *s, const gelu_erf_fwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, GeluErfFwd>(s, a->y, a->x, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_gelu_erf_bwd(Stream *s, const gelu_erf_bwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, GeluErfBwd>(s, a->dx, a->dy, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_relu2_fwd(Stream *s, const relu2_fwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, Relu2Fwd>(s, a->y, a->x, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_relu2_bwd(Stream *s, const relu2_bwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, Relu2Bwd>(s, a->dx, a->dy, a->x)));
    return ERR_OK;
}

extern "C" Err cuda_scale(Stream *s, const scale_args *a)
{
    const Factor f = { a->factor };
    DISPATCH(a->x.dtype, (launch_map<T, Factor>(s, a->y, a->x, a->x, f)));
    return ERR_OK;
}

extern "C" Err cuda_softcap(Stream *s, const softcap_args *a)
{
    const Softcap f = { a->cap };
    DISPATCH(a->x.dtype, (launch_map<T, Softcap>(s, a->y, a->x, a->x, f)));
    return ERR_OK;
}

extern "C" Err cuda_gate_fwd(Stream *s, const gate_fwd_args *a)
{
    DISPATCH(a->x.dtype, (launch_map<T, GateFwd>(s, a->y, a->x, a->gate)));
    return ERR_OK;
}

/* dx = dy s, dgate = dy x s (1 - s) */
template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS)
    gate_bwd_kernel(Rows<T> dx, GroupedRows<T> dgate, Rows<const T> dy, Rows<const T> x, GroupedRows<const T> gate,
                    PackGrid g)
{
    const int64_t rows = rows_in_use(g.rows);
    Pack<T> d[PACK_UNROLL], px[PACK_UNROLL], pg[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        d[u] = load_pack<T, WIDE>(dy.at(p.row) + p.column, p.left);
        px[u] = load_pack<T, WIDE>(x.at(p.row) + p.column, p.left);
        pg[u] = load_pack<T, WIDE>(gate.at(p.row) + p.column, p.left);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            float s, t;
            const float v = to_float(pg[u].v[i]);
            sigmoid_pair<T>(v < -80.0f ? -80.0f : v, &s, &t);
            const float ds = to_float(d[u].v[i]) * s;
            d[u].v[i] = from_float<T>(ds);
            pg[u].v[i] = from_float<T>(ds * to_float(px[u].v[i]) * t);
        }
        store_pack<T, WIDE>(dx.at(p.row) + p.column, d[u], p.left);
        store_pack<T, WIDE>(dgate.at(p.row) + p.column, pg[u], p.left);
    }
}

template <class T> static void launch_gate_bwd(Stream *s, const gate_bwd_args *a)
{
    const PackGrid g = pack_grid(row_count(a->dx, a->dy), 1, a->dy.dim[1], Pack<T>::COUNT);
    const Rows<T> dx = rows_of<T>(a->dx);
    const Rows<const T> dy = rows_of<const T>(a->dy), x = rows_of<const T>(a->x);
    const GroupedRows<T> dgate = grouped_rows_of<T>(a->dgate);
    const GroupedRows<const T> gate = grouped_rows_of<const T>(a->gate);
    if (rows_aligned(a->dx) && rows_aligned(a->dgate) && rows_aligned(a->dy) && rows_aligned(a->x) &&
        rows_aligned(a->gate))
        LAUNCH((gate_bwd_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), dx, dgate, dy, x, gate, g);
    else LAUNCH((gate_bwd_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), dx, dgate, dy, x, gate, g);
}

extern "C" Err cuda_gate_bwd(Stream *s, const gate_bwd_args *a)
{
    DISPATCH(a->dy.dtype, launch_gate_bwd<T>(s, a));
    return ERR_OK;
}

/* ---- residual and dropout ---- */

/* T: what packs are of, the wider one of Y and X. */
template <class T, class Y, class X, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) residual_kernel(Rows<Y> y, Residual<T, X> r, PackGrid g)
{
    const int64_t rows = rows_in_use(g.rows);
    ResidualPack<T> pack[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (p.used) pack[u] = residual_load<T, WIDE>(r, p.row, p.column, p.left);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        const Pack<T> sum = residual_add<T, WIDE>(r, pack[u], p.row, p.column, p.left);
        store_as<T, WIDE>(y.at(p.row) + p.column, sum, p.left);
    }
}

template <class T, class Y, class X> static void launch_residual(Stream *s, const residual_fwd_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->x), 1, a->x.dim[1], Pack<T>::COUNT);
    const Residual<T, X> r = residual_of<T, X>(a);
    const Rows<Y> y = rows_of<Y>(a->y);
    if (rows_aligned(a->y) && residual_aligned(a))
        LAUNCH((residual_kernel<T, Y, X, true>), g.grid, g.block, 0, cuda_stream(s), y, r, g);
    else LAUNCH((residual_kernel<T, Y, X, false>), g.grid, g.block, 0, cuda_stream(s), y, r, g);
}

extern "C" Err cuda_residual_fwd(Stream *s, const residual_fwd_args *a)
{
    if (a->residual.data && a->residual.dtype != a->y.dtype)
        return err_set(ERR_SHAPE, "residual_fwd on cuda: residual and y are of one dtype");
    DISPATCH_STREAM(a->y.dtype, a->x.dtype, launch_residual<T, T, N>(s, a));
    return ERR_OK;
}

/* The same thing without residual and bias. */
extern "C" Err cuda_residual_bwd(Stream *s, const residual_bwd_args *a)
{
    residual_fwd_args f = {};
    f.y = a->dx, f.x = a->dy, f.position = a->position, f.sample = a->sample, f.dropout = a->dropout;
    DISPATCH_STREAM(a->dy.dtype, a->dx.dtype, launch_residual<T, N, T>(s, &f));
    return ERR_OK;
}

/* ---- SwiGLU: a part is a chunk; its gate lies at twice its column of x, its up behind that ---- */

struct Swiglu {
    template <class T> __device__ __forceinline__ float of(float gate, float up) const
    {
        return gate * sigmoid<T>(gate) * up;
    }

    /* Gradients in the places of gate and up. dgate = dy up s (1 + g (1 - s)), dup = dy g s. Below -80 both slopes are
     * 0 in float. */
    template <class T> __device__ __forceinline__ void slopes(float *gate, float *up, float dy) const
    {
        float s, t;
        const float v = *gate < -80.0f ? -80.0f : *gate;
        sigmoid_pair<T>(v, &s, &t);
        const float ds = dy * s;
        *gate = ds * *up * fmaf(v, t, 1.0f);
        *up = ds * v;
    }
};

struct Geglu {
    template <class T> __device__ __forceinline__ float of(float gate, float up) const
    {
        return GeluFwd::of<T>(gate, 0.0f) * up;
    }

    template <class T> __device__ __forceinline__ void slopes(float *gate, float *up, float dy) const
    {
        const float dgate = GeluBwd::of<T>(dy * *up, *gate);
        *up = dy * GeluFwd::of<T>(*gate, 0.0f);
        *gate = dgate;
    }
};

/* gpt-oss's (ops.def). Clamps let NaN through. */
struct ClampedSwiglu {
    static constexpr float ALPHA = 1.702f;
    float limit;

    __device__ __forceinline__ float of_gate(float gate) const { return gate > limit ? limit : gate; }
    __device__ __forceinline__ float of_up(float up) const { return up > limit ? limit : up < -limit ? -limit : up; }

    template <class T> __device__ __forceinline__ float of(float gate, float up) const
    {
        const float g = of_gate(gate);
        return g * sigmoid<T>(ALPHA * g) * (of_up(up) + 1.0f);
    }

    template <class T> __device__ __forceinline__ void slopes(float *gate, float *up, float dy) const
    {
        float s, t, g = of_gate(*gate);
        g = g < -47.0f ? -47.0f : g; /* ALPHA times that is -80: both slopes are below 1e-32 */
        sigmoid_pair<T>(ALPHA * g, &s, &t);
        const float ds = dy * s, dgate = ds * (of_up(*up) + 1.0f) * fmaf(ALPHA * g, t, 1.0f);
        *gate = *gate > limit ? 0.0f : dgate;
        *up = fabsf(*up) > limit ? 0.0f : ds * g;
    }
};

template <class T, bool WIDE, class F>
__global__ void __launch_bounds__(PACK_THREADS) swiglu_fwd_kernel(Rows<T> y, Rows<const T> x, PackGrid g, F f)
{
    const int64_t rows = rows_in_use(g.rows);
    const int64_t part = blockIdx.z * g.width;
    Pack<T> gate[PACK_UNROLL], up[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        const T *from = x.at(p.row) + 2 * part + p.column;
        gate[u] = load_pack<T, WIDE>(from, p.left);
        up[u] = load_pack<T, WIDE>(from + g.width, p.left);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            const float v = f.template of<T>(to_float(gate[u].v[i]), to_float(up[u].v[i]));
            gate[u].v[i] = from_float<T>(v);
        }
        store_pack<T, WIDE>(y.at(p.row) + part + p.column, gate[u], p.left);
    }
}

template <class T, bool WIDE, class F>
__global__ void __launch_bounds__(PACK_THREADS)
    swiglu_bwd_kernel(Rows<T> dx, Rows<const T> dy, Rows<const T> x, PackGrid g, F f)
{
    const int64_t rows = rows_in_use(g.rows);
    const int64_t part = blockIdx.z * g.width;
    Pack<T> gate[PACK_UNROLL], up[PACK_UNROLL], d[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        const T *from = x.at(p.row) + 2 * part + p.column;
        gate[u] = load_pack<T, WIDE>(from, p.left);
        up[u] = load_pack<T, WIDE>(from + g.width, p.left);
        d[u] = load_pack<T, WIDE>(dy.at(p.row) + part + p.column, p.left);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++) {
            float dgate = to_float(gate[u].v[i]), dup = to_float(up[u].v[i]);
            f.template slopes<T>(&dgate, &dup, to_float(d[u].v[i]));
            gate[u].v[i] = from_float<T>(dgate);
            up[u].v[i] = from_float<T>(dup);
        }
        T *to = dx.at(p.row) + 2 * part + p.column;
        store_pack<T, WIDE>(to, gate[u], p.left);
        store_pack<T, WIDE>(to + g.width, up[u], p.left);
    }
}

/* Both rows and chunks begin at multiples of 16 bytes. */
static bool chunks_aligned(Tensor x, Tensor y, int64_t chunk)
{
    return rows_aligned(x) && rows_aligned(y) && chunk * dtype_size(x.dtype) % 16 == 0;
}

static Err check_chunks(const char *name, Tensor x, Tensor y, int64_t chunk)
{
    if (chunk > 0 && y.dim[1] % chunk == 0 && x.dim[1] == 2 * y.dim[1]) return ERR_OK;
    return err_set(ERR_SHAPE, "%s: %lld columns are not pairs of chunks of %lld for %lld", name,
                   static_cast<long long>(x.dim[1]), static_cast<long long>(chunk),
                   static_cast<long long>(y.dim[1]));
}

/* Args: those of swiglu, or of its other forms. */
template <class T, class F, class Args> static void launch_swiglu_fwd(Stream *s, const Args *a, F f)
{
    const PackGrid g = pack_grid(row_count(a->y, a->x), a->y.dim[1] / a->chunk, a->chunk, Pack<T>::COUNT);
    const Rows<T> y = rows_of<T>(a->y);
    const Rows<const T> x = rows_of<const T>(a->x);
    if (chunks_aligned(a->x, a->y, a->chunk))
        LAUNCH((swiglu_fwd_kernel<T, true, F>), g.grid, g.block, 0, cuda_stream(s), y, x, g, f);
    else LAUNCH((swiglu_fwd_kernel<T, false, F>), g.grid, g.block, 0, cuda_stream(s), y, x, g, f);
}

extern "C" Err cuda_swiglu_fwd(Stream *s, const swiglu_fwd_args *a)
{
    TRY(check_chunks("swiglu_fwd", a->x, a->y, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_fwd<T>(s, a, Swiglu()));
    return ERR_OK;
}

extern "C" Err cuda_geglu_fwd(Stream *s, const geglu_fwd_args *a)
{
    TRY(check_chunks("geglu_fwd", a->x, a->y, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_fwd<T>(s, a, Geglu()));
    return ERR_OK;
}

extern "C" Err cuda_clamped_swiglu_fwd(Stream *s, const clamped_swiglu_fwd_args *a)
{
    const ClampedSwiglu f = { a->limit };
    TRY(check_chunks("clamped_swiglu_fwd", a->x, a->y, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_fwd<T>(s, a, f));
    return ERR_OK;
}

template <class T, class F, class Args> static void launch_swiglu_bwd(Stream *s, const Args *a, F f)
{
    const PackGrid g = pack_grid(row_count(a->dx, a->dy), a->dy.dim[1] / a->chunk, a->chunk, Pack<T>::COUNT);
    const Rows<T> dx = rows_of<T>(a->dx);
    const Rows<const T> dy = rows_of<const T>(a->dy), x = rows_of<const T>(a->x);
    if (chunks_aligned(a->x, a->dy, a->chunk) && rows_aligned(a->dx))
        LAUNCH((swiglu_bwd_kernel<T, true, F>), g.grid, g.block, 0, cuda_stream(s), dx, dy, x, g, f);
    else LAUNCH((swiglu_bwd_kernel<T, false, F>), g.grid, g.block, 0, cuda_stream(s), dx, dy, x, g, f);
}

extern "C" Err cuda_swiglu_bwd(Stream *s, const swiglu_bwd_args *a)
{
    TRY(check_chunks("swiglu_bwd", a->x, a->dy, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_bwd<T>(s, a, Swiglu()));
    return ERR_OK;
}

extern "C" Err cuda_geglu_bwd(Stream *s, const geglu_bwd_args *a)
{
    TRY(check_chunks("geglu_bwd", a->x, a->dy, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_bwd<T>(s, a, Geglu()));
    return ERR_OK;
}

extern "C" Err cuda_clamped_swiglu_bwd(Stream *s, const clamped_swiglu_bwd_args *a)
{
    const ClampedSwiglu f = { a->limit };
    TRY(check_chunks("clamped_swiglu_bwd", a->x, a->dy, a->chunk));
    DISPATCH(a->x.dtype, launch_swiglu_bwd<T>(s, a, f));
    return ERR_OK;
}

/* ---- zeros, of any dtype: by bytes ---- */

constexpr int ZERO_THREADS = 256, ZERO_UNROLL = 4, ZERO_BLOCK = ZERO_THREADS * ZERO_UNROLL;

/* Rows without gaps between them are one long row. */
__global__ void __launch_bounds__(ZERO_THREADS)
    zero_kernel(unsigned char *data, int64_t row_bytes, int64_t ld_bytes, RowCount count, bool wide)
{
    int64_t rows = rows_in_use(count);
    if (row_bytes == ld_bytes) {
        row_bytes *= rows;
        rows = rows > 0;
    }
    const int64_t packs = (row_bytes + 15) / 16;
    for (int u = 0; u < ZERO_UNROLL; u++) {
        const int64_t i = blockIdx.x * static_cast<int64_t>(ZERO_BLOCK) + u * ZERO_THREADS + threadIdx.x;
        if (i >= rows * packs) return;
        const int64_t row = rows > 1 ? i / packs : 0, at = (i - row * packs) * 16, left = row_bytes - at;
        unsigned char *to = data + row * ld_bytes + at;
        if (wide && left >= 16) *reinterpret_cast<int4 *>(to) = make_int4(0, 0, 0, 0);
        else
            for (int64_t k = 0; k < left && k < 16; k++) to[k] = 0;
    }
}

static void launch_zero(Stream *s, Tensor t, int64_t row_bytes, int64_t ld_bytes)
{
    const bool wide =
        reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (ld_bytes == row_bytes || ld_bytes % 16 == 0);
    const int64_t packs =
        ld_bytes == row_bytes ? ceil_div(t.dim[0] * row_bytes, 16) : t.dim[0] * ceil_div(row_bytes, 16);
    const int64_t blocks = packs > 0 ? ceil_div(packs, ZERO_BLOCK) : 1;
    LAUNCH(zero_kernel, static_cast<unsigned>(blocks), ZERO_THREADS, 0, cuda_stream(s),
           data_of<unsigned char>(t), row_bytes, ld_bytes, row_count(t, t), wide);
}

extern "C" Err cuda_fill_zero(Stream *s, const fill_zero_args *a)
{
    const int64_t size = dtype_size(a->x.dtype);
    launch_zero(s, a->x, a->x.dim[1] * size, a->x.ld * size);
    return ERR_OK;
}

extern "C" Err cuda_fill_zero_acc(Stream *s, const fill_zero_acc_args *a)
{
    const int64_t size = dtype_size(a->x.dtype);
    launch_zero(s, a->x, size, size);
    return ERR_OK;
}

/*
 * y += x of accumulators, an element a thread.
 * Traffic  read y and x, write y: 24 bytes an integer, 12 a float; bound by memory: 4.8 TB/s is 200 G integers/s.
 */
template <class T> __global__ void __launch_bounds__(ZERO_THREADS) add_acc_kernel(T *y, const T *x, int64_t count)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(ZERO_THREADS) + threadIdx.x;
    if (i < count) y[i] += x[i];
}

extern "C" Err cuda_add_acc(Stream *s, const add_acc_args *a)
{
    const int64_t count = a->y.dim[0];
    const unsigned blocks = static_cast<unsigned>(ceil_div(count, ZERO_THREADS));
    if (a->x.dtype != a->y.dtype) return err_set(ERR_SHAPE, "add_acc: y and x differ in dtype");
    if (a->y.dtype == F32)
        LAUNCH(add_acc_kernel<float>, blocks, ZERO_THREADS, 0, cuda_stream(s), data_of<float>(a->y),
               data_of<const float>(a->x), count);
    else
        LAUNCH(add_acc_kernel<uint64_t>, blocks, ZERO_THREADS, 0, cuda_stream(s), data_of<uint64_t>(a->y),
               data_of<const uint64_t>(a->x), count);
    return ERR_OK;
}
