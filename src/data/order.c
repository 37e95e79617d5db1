#include "data/order.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/rng.h"

/* Half the bits of the smallest even-bit range that holds 0..n-1, at least 1. */
static int half_bits(int64_t n)
{
    int bits = n > 1 ? 64 - __builtin_clzll((uint64_t)n - 1) : 1;
    return (bits + 1) / 2;
}

int64_t order_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i)
{
    ASSERT(n >= 1 && i >= 0 && i < n && epoch >= 0);
    uint64_t key = rng_key(seed, "data.order"), x = (uint64_t)i;
    int h = half_bits(n);
    uint32_t mask = (uint32_t)((1ull << h) - 1);
    do {
        uint32_t left = (uint32_t)(x >> h), right = (uint32_t)x & mask;
        for (uint32_t r = 0; r < ORDER_ROUNDS; r++) {
            Philox f = philox(key, right, r, (uint32_t)epoch, (uint32_t)((uint64_t)epoch >> 32));
            uint32_t old_left = left;
            left = right;
            right = old_left ^ (f.v[0] & mask);
        }
        x = (uint64_t)left << h | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* ---- blends ---- */

/* Floors first; the units that are left over go to the largest remainders, the first of equals. */
static void round_weights(Blend *b, const double *weights, double sum)
{
    double remainder[BLEND_SOURCES_MAX];
    int left_over = b->block;
    for (int d = 0; d < b->source_count; d++) {
        double exact = weights[d] / sum * b->block;
        b->units[d] = (int32_t)exact;
        remainder[d] = exact - b->units[d];
        left_over -= b->units[d];
    }
    for (; left_over > 0; left_over--) {
        int best = 0;
        for (int d = 1; d < b->source_count; d++)
            if (remainder[d] > remainder[best]) best = d;
        b->units[best]++;
        remainder[best] = -1;
    }
}

/* How many draws before draw k of a block a data set has by its weight, rounded down. */
static int64_t floor_share(const Blend *b, int64_t k, int source) { return k * b->units[source] / b->block; }

/* How many it has had. */
static int64_t had_before(const Blend *b, int64_t k) { return floor_share(b, k, b->source[k]) + b->ahead[k]; }

/* Data sets by a draw's number, the smallest first, and of equals the first data set. */
typedef struct {
    int64_t key[BLEND_SOURCES_MAX]; /* a heap */
    int count;
} Queue;

_Static_assert(BLEND_SOURCES_MAX <= 256, "a key of a Queue, and Blend.source, have 8 bits for a data set");

static void queue_add(Queue *q, int64_t draw, int source)
{
    const int64_t key = draw << 8 | source;
    int i = q->count++;
    for (; i > 0 && q->key[(i - 1) / 2] > key; i = (i - 1) / 2) q->key[i] = q->key[(i - 1) / 2];
    q->key[i] = key;
}

static int queue_take(Queue *q)
{
    const int64_t first = q->key[0], last = q->key[--q->count];
    int i = 0;
    for (int child; (child = 2 * i + 1) < q->count; i = child) {
        if (child + 1 < q->count && q->key[child + 1] < q->key[child]) child++;
        if (q->key[child] >= last) break;
        q->key[i] = q->key[child];
    }
    q->key[i] = last;
    return (int)(first & 255);
}

/*
 * Share c of data set d spans the draws [c * block / units, (c + 1) * block / units). Of those that have begun the one
 * that ends first is drawn. Weights add up to the block, so each is drawn within its span.
 */
static void lay_out(Blend *b)
{
    int32_t taken[BLEND_SOURCES_MAX] = { 0 };
    Queue later = { .count = 0 }, begun = { .count = 0 };
    for (int d = 0; d < b->source_count; d++) queue_add(&later, 0, d);
    for (int32_t k = 0; k < b->block; k++) {
        while (later.count && later.key[0] >> 8 <= k) {
            const int d = queue_take(&later);
            const int64_t units = b->units[d];
            queue_add(&begun, ((taken[d] + 1) * (int64_t)b->block + units - 1) / units, d);
        }
        ASSERT(begun.count);
        const int d = queue_take(&begun);
        const int64_t ahead = taken[d]++ - floor_share(b, k, d);
        ASSERT(ahead == 0 || ahead == 1);
        b->source[k] = (uint8_t)d;
        b->ahead[k] = (uint8_t)ahead;
        queue_add(&later, taken[d] * (int64_t)b->block / b->units[d], d);
    }
}

Err blend_check(const double *weights, int source_count)
{
    if (source_count < 1 || source_count > BLEND_SOURCES_MAX)
        return err_set(ERR_CONFIG, "a blend of %d data sets: 1 to %d are possible", source_count, BLEND_SOURCES_MAX);
    double sum = 0;
    for (int d = 0; d < source_count; d++) {
        if (!(weights[d] > 0) || !(weights[d] < 1e300))
            return err_set(ERR_CONFIG, "weight %g of data set %d is not a positive number", weights[d], d + 1);
        sum += weights[d];
    }
    for (int d = 0; d < source_count; d++)
        if (weights[d] / sum < DBL_MIN)
            return err_set(ERR_CONFIG, "weight %g of data set %d is nothing beside the others", weights[d], d + 1);
    return ERR_OK;
}

static bool rounds_to_nothing(const Blend *b)
{
    for (int d = 0; d < b->source_count; d++)
        if (b->units[d] == 0) return true;
    return false;
}

/* Draws of a block in which each weight has one. */
static Err long_block(const double *weights, double sum, int source_count, int32_t *block)
{
    int least = 0;
    for (int d = 1; d < source_count; d++)
        if (weights[d] < weights[least]) least = d;
    for (*block = BLEND_BLOCK; *block <= BLEND_BLOCK_MOST; *block *= 2)
        if (weights[least] / sum * *block >= 1) return ERR_OK;
    return err_set(ERR_CONFIG, "weight %g of data set %d is less than 1/%d of all weights", weights[least], least + 1,
                   BLEND_BLOCK_MOST);
}

Err blend_init(Blend *b, const double *weights, int source_count, SetupArena *mem)
{
    double sum = 0;
    TRY(blend_check(weights, source_count));
    for (int d = 0; d < source_count; d++) sum += weights[d];
    *b = (Blend){ .source_count = source_count, .block = BLEND_BLOCK };
    round_weights(b, weights, sum);
    if (rounds_to_nothing(b)) {
        TRY(long_block(weights, sum, source_count, &b->block));
        round_weights(b, weights, sum);
    }
    TRY(setup_array(mem, b->block, &b->source));
    TRY(setup_array(mem, b->block, &b->ahead));
    lay_out(b);
    return ERR_OK;
}

int blend_draw(const Blend *b, int64_t q, int64_t *earlier)
{
    ASSERT(q >= 0);
    int64_t k = q % b->block;
    int d = b->source[k];
    *earlier = q / b->block * b->units[d] + had_before(b, k);
    return d;
}

int64_t blend_taken(const Blend *b, int64_t count, int source)
{
    const int64_t whole = count / b->block * b->units[source];
    const uint8_t *last = memrchr(b->source, source, (size_t)(count % b->block));
    return whole + (last ? had_before(b, last - b->source) + 1 : 0);
}
