/*
 * Counter-based random numbers: Philox4x32-10. A pure function of (key, counter), the same on every
 * device, so anything drawn is keyed by *global* coordinates and does not know the layout that draws it.
 *
 *   key      64 bits   the seed, mixed with the site (which tensor, which dropout)
 *   counter  128 bits  global coordinates: element index; or feature block, position, sample
 *
 * Vector forms of the same function are in src/cpu/vec.h; test_mathx holds both to the published vectors.
 * Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
 */
#ifndef MEGATRAIN_BASE_RNG_H
#define MEGATRAIN_BASE_RNG_H

#include <stdint.h>

#ifdef __CUDACC__
#define RNG_FN static inline __host__ __device__ /* the kernels draw by the same code */
#else
#define RNG_FN static inline
#endif

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

typedef struct {
    uint32_t v[4];
} Philox;

RNG_FN Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int r = 0; r < PHILOX_ROUNDS; r++) {
        uint64_t a = (uint64_t)PHILOX_M0 * c0, b = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return (Philox){ { c0, c1, c2, c3 } };
}

/* Bijective 64-bit mixer (splitmix64), for deriving keys from seeds and names. */
RNG_FN uint64_t rng_mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Key of a named stream: the same name gives the same numbers wherever the tensor lives. */
static inline uint64_t rng_key(uint64_t seed, const char *name)
{
    uint64_t h = 0xCBF29CE484222325u; /* FNV-1a */
    for (; *name; name++) h = (h ^ (uint8_t)*name) * 0x100000001B3u;
    return rng_mix(rng_mix(seed) ^ h);
}

/*
 * Dropout. One Philox call serves four neighbouring features. A feature is kept when its 32-bit draw is
 * at or above the threshold p * 2^32; kept values are scaled by 1 / (1 - p).
 *
 *   key      rng_key(seed, site name)           site: "embedding", "layers.3.attn.residual", ...
 *   counter  {feature / 4, position, sample low, sample high}      hidden dropout
 *            {key position / 4, query position, sample low, sample high << 16 | head}   attention dropout
 */
static inline uint32_t dropout_threshold(float p)
{
    double t = (double)p * 4294967296.0;
    return t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

RNG_FN int dropout_keep(uint64_t key, uint32_t threshold, int64_t sample, int64_t position, int64_t feature)
{
    Philox r = philox(key, (uint32_t)(feature >> 2), (uint32_t)position, (uint32_t)sample, (uint32_t)(sample >> 32));
    return r.v[feature & 3] >= threshold;
}

/*
 * Uniform numbers of [0, 1) for four neighbouring features, `feature` being the first; counters as of dropout.
 */
RNG_FN void uniform_4(uint64_t key, int64_t sample, int64_t position, int64_t feature, float u[4])
{
    Philox r = philox(key, (uint32_t)(feature >> 2), (uint32_t)position, (uint32_t)sample, (uint32_t)(sample >> 32));
    for (int i = 0; i < 4; i++) u[i] = (float)(r.v[i] >> 8) * 0x1p-24f;
}

RNG_FN int dropout_keep_attn(uint64_t key, uint32_t threshold, int64_t sample, int64_t head, int64_t query,
                             int64_t keypos)
{
    Philox r = philox(key, (uint32_t)(keypos >> 2), (uint32_t)query, (uint32_t)sample,
                      (uint32_t)(sample >> 32) << 16 | (uint32_t)head);
    return r.v[keypos & 3] >= threshold;
}

#endif
