/*
 * residual + dropout(x + bias), multiplied by dropout.scale whether something is dropped or not, pack by pack: what the
 * residual add (elementwise.cu) and its fusion with the norm behind it (norm.cu) share.
 *
 * Dropout is keyed by global coordinates and drawn 4 features a call, by the code the CPU uses (base/rng.h): what
 * is kept is the same on every device and in every layout.
 */
#ifndef MEGATRAIN_CUDA_RESIDUAL_CUH
#define MEGATRAIN_CUDA_RESIDUAL_CUH

#include "kernel.cuh"

/* Sums are T, what is added X: T, or of 16 bits beside float. */
template <class T, class X> struct Residual {
    Rows<const T> residual; /* data may be NULL */
    Rows<const X> x;
    const X *bias; /* may be NULL */
    Dropout dropout;
    const int32_t *position;
    const int64_t *sample;
};

/* Residual from the arguments of any op that has these members. */
template <class T, class X, class Args> static inline Residual<T, X> residual_of(const Args *a)
{
    Residual<T, X> r = { rows_of<const T>(a->residual),       rows_of<const X>(a->x),
                         data_of<const X>(a->bias),           a->dropout,
                         data_of<const int32_t>(a->position), data_of<const int64_t>(a->sample) };
    return r;
}

template <class Args> static inline bool residual_aligned(const Args *a)
{
    return rows_aligned(a->x) && (!a->residual.data || rows_aligned(a->residual)) &&
           (!a->bias.data || rows_aligned(a->bias));
}

/* Loads of a pack. A thread makes those of all its packs first, so that they are under way together. */
template <class T> struct ResidualPack {
    Pack<T> x, residual;
};

template <class T, bool WIDE, class X>
__device__ __forceinline__ ResidualPack<T> residual_load(const Residual<T, X> &r, int64_t row, int64_t column,
                                                         int64_t left)
{
    ResidualPack<T> p;
    p.x = load_as<T, WIDE>(r.x.at(row) + column, left);
    if (r.residual.data) p.residual = load_pack<T, WIDE>(r.residual.at(row) + column, left);
    return p;
}

template <class T, bool WIDE, class X>
__device__ __forceinline__ Pack<T> residual_add(const Residual<T, X> &r, const ResidualPack<T> &p, int64_t row,
                                                int64_t column, int64_t left)
{
    constexpr int COUNT = Pack<T>::COUNT;
    float v[COUNT];
    Pack<T> sum;
    for (int i = 0; i < COUNT; i++) v[i] = to_float(p.x.v[i]);
    if (r.bias) {
        const Pack<T> bias = load_as<T, WIDE>(r.bias + column, left);
        for (int i = 0; i < COUNT; i++) v[i] += to_float(bias.v[i]);
    }
    if (r.dropout.threshold) {
        const uint64_t sample = static_cast<uint64_t>(r.sample[row]);
        const uint32_t position = static_cast<uint32_t>(r.position[row]);
        for (int i = 0; i < COUNT; i += 4) {
            const Philox draw = philox(r.dropout.key, static_cast<uint32_t>((column + i) / 4), position,
                                       static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32));
            for (int j = 0; j < 4; j++)
                v[i + j] = draw.v[j] >= r.dropout.threshold ? v[i + j] * r.dropout.scale : 0.0f;
        }
    } else {
        for (int i = 0; i < COUNT; i++) v[i] *= r.dropout.scale;
    }
    for (int i = 0; i < COUNT; i++)
        sum.v[i] = from_float<T>(r.residual.data ? to_float(p.residual.v[i]) + v[i] : v[i]);
    return sum;
}

#endif
