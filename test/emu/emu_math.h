/*
 * CUDA's arithmetic intrinsics, loads with cache hints and min/max, for emu.h. The functions (expf, __expf, ...) are
 * the host's here, with the edges that CUDA documents; with EMU_ROUND=chip they are off by as much as it allows
 * (rough()). So tests compare with tolerances.
 */
#ifndef MEGATRAIN_EMU_MATH_H
#define MEGATRAIN_EMU_MATH_H

/* ---- loads and stores with a cache hint ---- */

#define EMU_LOAD(name) \
    template <class T> T name(const T *p) { return emu::aligned(p, sizeof(T), #name), *p; }
#define EMU_STORE(name) \
    template <class T> void name(T *p, std::common_type_t<T> v) { emu::aligned(p, sizeof(T), #name), *p = v; }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_STORE(__stcs)
EMU_STORE(__stcg)
EMU_STORE(__stwb)
EMU_STORE(__stwt)
#undef EMU_LOAD
#undef EMU_STORE

/* ---- float ---- */

/* expf and its like in kernels are the device's, whose last bits are not the host's. */
namespace emu
{
inline float device_expf(float x) { return rough(expf(x)); }
inline float device_exp2f(float x) { return rough(exp2f(x)); }
inline float device_logf(float x) { return rough(logf(x)); }
inline float device_log1pf(float x) { return rough(log1pf(x)); }
/* ex2.approx.ftz: no subnormal comes out. */
inline float exp2_approx(float x) { return x < -126.0f ? 0.0f : rough(exp2f(x)); }
} // namespace emu
#define expf(x) ::emu::device_expf(x)
#define exp2f(x) ::emu::device_exp2f(x)
#define logf(x) ::emu::device_logf(x)
#define log1pf(x) ::emu::device_log1pf(x)

inline float rsqrtf(float x) { return emu::rough(1.0f / sqrtf(x)); }
/* A chip rounds the exponent's factor first: the error grows with x. */
inline float __expf(float x) { return emu::chip_rounding ? exp2f(x * 1.44269504f) : expf(x); }
inline float __exp10f(float x) { return emu::rough(powf(10.0f, x)); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return emu::rough(log2f(x)); }
inline float __powf(float x, float y) { return emu::rough(powf(x, y)); }
inline float __sinf(float x) { return emu::rough(sinf(x)); }
inline float __cosf(float x) { return emu::rough(cosf(x)); }
inline void __sincosf(float x, float *s, float *c) { *s = __sinf(x), *c = __cosf(x); }
/* Division by way of the divisor's reciprocal, which is 0 from 2^126 on: the result is 0, or NaN for an infinite
 * dividend. */
inline float __fdividef(float a, float b)
{
    return emu::rough(a * (fabsf(b) > 0x1p126f ? copysignf(0.0f, b) : 1.0f / b));
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
/* Never part of a fused multiply-add. */
inline float __fmul_rn(float a, float b)
{
    float product = a * b;
    asm("" : "+x"(product));
    return product;
}
inline float __fadd_rn(float a, float b)
{
    asm("" : "+x"(a), "+x"(b));
    return a + b;
}
inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline int __float_as_int(float x) { return emu::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bits_as<double>(x); }

/* ---- integers ---- */

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift)
{
    return static_cast<unsigned>((static_cast<uint64_t>(hi) << 32 | lo) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift)
{
    return static_cast<unsigned>((static_cast<uint64_t>(hi) << 32 | lo) >> (shift & 31));
}
inline unsigned __brev(unsigned x)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}

/* ---- min and max: CUDA offers them for every pair of one type ---- */

#define EMU_MIN_MAX(T)                               \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

#endif
