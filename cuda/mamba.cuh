/*
 * Mamba-2's recurrence as its kernels see it: mamba.cu, the plain form, and mamba_tiles_fwd.cu and mamba_tiles_bwd.cu,
 * the form by tensor cores.
 */
#ifndef MEGATRAIN_CUDA_MAMBA_CUH
#define MEGATRAIN_CUDA_MAMBA_CUH

#include <initializer_list>
#include <type_traits>

#include "scan.cuh"

/* One call. */
template <class T> struct MambaCall {
    GroupedRows<const T> x, k, q;
    Rows<const float> delta, g;
    const void *skip;
    DType skip_type;
    ScanRows rows;
    int G, H, N, P, group, windows;
    float *workspace;
    int64_t floats; /* of it that a block has */

    __device__ __forceinline__ float skip_of(int head) const
    {
        if (skip_type == BF16) return to_float(static_cast<const bf16 *>(skip)[head]);
        if (skip_type == F16) return to_float(static_cast<const f16 *>(skip)[head]);
        return static_cast<const float *>(skip)[head];
    }
    __device__ __forceinline__ int64_t state_row(int64_t b, int64_t window, int head) const
    {
        return ((b * windows + window) * H + head) * N;
    }
    __device__ __forceinline__ int64_t window_end(int64_t window) const
    {
        const int64_t end = (window + 1) * MAMBA_WINDOW;
        return end < rows.T ? end : rows.T;
    }
};

template <class T> struct MambaFwd {
    MambaCall<T> c;
    GroupedRows<T> o;
    Rows<float> states, after; /* data of after: or NULL */
    Rows<const float> before;
};

template <class T> struct MambaBwd {
    MambaCall<T> c;
    GroupedRows<T> dx, dk, dq;
    GroupedRows<const T> go;
    Rows<float> ddelta, dg, dskip, dbefore, dstates; /* data of dbefore: or NULL */
    Rows<const float> dafter, states;
};

/* ---- the form by tensor cores (mamba_tiles_fwd.cu) ---- */

/* Calls taken: bf16 in rows at multiples of 16 bytes, widths that its tiles hold. rows: of all tensors but gates. */
bool mamba_takes_tiles(Stream *s, Tensor x, Tensor k, std::initializer_list<Tensor> rows);

Err mamba_tiles_fwd(Stream *s, const MambaFwd<bf16> &f);
Err mamba_tiles_bwd(Stream *s, const MambaBwd<bf16> &f);

#endif
