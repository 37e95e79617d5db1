/*
 * See megatron.h. Building is bound by memory latency (a shuffle swaps at random places, documents' lengths are
 * looked up in shuffled order), so draws are made some way ahead and what they will touch is fetched meanwhile.
 */
#include "data/megatron.h"

#include <math.h>

/* ---- NumPy's generator ---- */

enum { TWISTER_N = 624, TWISTER_M = 397, AHEAD = 16 /* swaps on their way from memory; a power of two */ };

void twister_seed(Twister *t, uint32_t seed)
{
    for (int i = 0; i < TWISTER_N; i++) {
        t->state[i] = seed;
        seed = 1812433253u * (seed ^ seed >> 30) + (uint32_t)i + 1;
    }
    t->used = TWISTER_N;
}

static void twister_refill(Twister *t)
{
    for (int i = 0; i < TWISTER_N; i++) {
        uint32_t y = (t->state[i] & 0x80000000u) | (t->state[(i + 1) % TWISTER_N] & 0x7fffffffu);
        t->state[i] = t->state[(i + TWISTER_M) % TWISTER_N] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    t->used = 0;
}

static uint32_t twister_next(Twister *t)
{
    if (t->used == TWISTER_N) twister_refill(t);
    uint32_t y = t->state[t->used++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

/* 0 to most, each as likely; most >= 1. */
static uint32_t twister_up_to(Twister *t, uint32_t most)
{
    uint32_t mask = UINT32_MAX >> __builtin_clz(most), draw;
    do draw = twister_next(t) & mask;
    while (draw > most);
    return draw;
}

void twister_shuffle(Twister *t, uint32_t *items, int64_t n)
{
    uint32_t draws[AHEAD];
    int64_t drawn = n - 1; /* the next element to draw a partner for */
    for (int64_t i = n - 1; i > 0; i--) {
        for (; drawn > 0 && drawn > i - AHEAD; drawn--) {
            draws[drawn % AHEAD] = twister_up_to(t, (uint32_t)drawn);
            __builtin_prefetch(items + draws[drawn % AHEAD], 1);
        }
        uint32_t j = draws[i % AHEAD], item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

/* ---- one token file ---- */

static Err too_many(const MegatronIndex *x)
{
    err_set(ERR_DATA, "'%s': data.order=megatron counts documents times epochs, and samples, in 32 bits",
            x->part.file->name);
    err_hint("data.order=keyed has no such limit; or train for fewer steps");
    return ERR_DATA;
}

/* Epochs, and whether the last is apart. */
static Err count_epochs(MegatronIndex *x, int64_t tokens)
{
    const int64_t T = x->part.seq, documents = x->part.to - x->part.from, per_epoch = (tokens - 1) / T;
    int64_t reach;
    if (__builtin_mul_overflow(x->part.wanted, T, &reach) || reach > INT64_MAX / 2) return too_many(x);
    x->epochs = (reach + tokens) / tokens; /* (reach + 1) / tokens, rounded up */
    x->samples = x->first_samples = (x->epochs * tokens - 1) / T;
    x->entries = x->epochs * documents;
    if (x->epochs > UINT32_MAX / documents || x->samples > UINT32_MAX || x->part.to > UINT32_MAX) return too_many(x);
    if (x->epochs == 1) return ERR_OK;
    const int64_t before = ((x->epochs - 1) * tokens - 1) / T;
    if (x->part.wanted - before < (int64_t)(0.80 * (double)per_epoch)) x->first_samples = before;
    return ERR_OK;
}

static void fill_range(uint32_t *items, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++) items[i] = (uint32_t)(first + i);
}

/* The documents of `epochs` epochs, shuffled together. */
static void shuffle_documents(const MegatronIndex *x, Twister *t, uint32_t *out, int64_t epochs)
{
    const int64_t documents = x->part.to - x->part.from;
    for (int64_t e = 0; e < epochs; e++) fill_range(out + e * documents, x->part.from, documents);
    twister_shuffle(t, out, epochs * documents);
}

static void sum_starts(MegatronIndex *x)
{
    int64_t token = 0;
    for (int64_t i = 0; i < x->entries; i++) {
        if (i % MEGATRON_STRIDE == 0) x->start[i / MEGATRON_STRIDE] = token;
        if (i + AHEAD < x->entries) shards_fetch(x->part.file, x->document[i + AHEAD]);
        token += shards_length(x->part.file, x->document[i]);
    }
}

Err megatron_index(MegatronIndex *x, MegatronPart part, SetupArena *mem)
{
    Twister t;
    const int64_t tokens = shards_start(part.file, part.to) - shards_start(part.file, part.from);
    *x = (MegatronIndex){ .part = part };
    ASSERT(tokens > part.seq && part.wanted >= 1);
    TRY(count_epochs(x, tokens));
    TRY(setup_array(mem, x->entries, &x->document));
    TRY(setup_array(mem, x->entries / MEGATRON_STRIDE + 1, &x->start));
    TRY(setup_array(mem, x->samples, &x->shuffle));

    const bool apart = x->first_samples < x->samples;
    const int64_t early = x->epochs - apart, documents = part.to - part.from;
    twister_seed(&t, part.seed);
    shuffle_documents(x, &t, x->document, early);
    if (apart) shuffle_documents(x, &t, x->document + early * documents, 1);
    sum_starts(x);
    fill_range(x->shuffle, 0, x->samples);
    twister_shuffle(&t, x->shuffle, x->first_samples);
    twister_shuffle(&t, x->shuffle + x->first_samples, x->samples - x->first_samples);
    return ERR_OK;
}

/* The entry that holds a token, and the token's place in it. */
static int64_t find_entry(const MegatronIndex *x, int64_t token, int64_t *offset)
{
    int64_t low = 0, high = (x->entries - 1) / MEGATRON_STRIDE; /* the last start at or before the token */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (x->start[middle] <= token) low = middle;
        else high = middle - 1;
    }
    int64_t entry = low * MEGATRON_STRIDE, length;
    token -= x->start[low];
    for (; token >= (length = shards_length(x->part.file, x->document[entry])); entry++) token -= length;
    *offset = token;
    return entry;
}

Err megatron_read(const MegatronIndex *x, int64_t position, int64_t vocab, int32_t *tokens)
{
    const Shards *file = x->part.file;
    int64_t offset, left = x->part.seq + 1;
    ASSERT(position >= 0 && position < x->samples);
    for (int64_t i = find_entry(x, x->shuffle[position] * x->part.seq, &offset); left > 0; i++, offset = 0) {
        int64_t count = shards_length(file, x->document[i]) - offset;
        if (count > left) count = left;
        TRY(shards_read(file, shards_start(file, x->document[i]) + offset, count, vocab, tokens));
        tokens += count;
        left -= count;
    }
    return ERR_OK;
}

/* ---- blends ---- */

enum { CHAINS = 8, SUM_BLOCK = 128 };

double megatron_sum(const double *x, int64_t n)
{
    double sum = 0, chain[CHAINS];
    int64_t i = CHAINS;
    if (n > SUM_BLOCK) {
        int64_t half = n / 2 - n / 2 % CHAINS;
        return megatron_sum(x, half) + megatron_sum(x + half, n - half);
    }
    if (n < CHAINS) {
        for (i = 0; i < n; i++) sum += x[i];
        return sum;
    }
    for (int c = 0; c < CHAINS; c++) chain[c] = x[c];
    for (; i + CHAINS <= n; i += CHAINS)
        for (int c = 0; c < CHAINS; c++) chain[c] += x[i + c];
    sum = ((chain[0] + chain[1]) + (chain[2] + chain[3])) + ((chain[4] + chain[5]) + (chain[6] + chain[7]));
    for (; i < n; i++) sum += x[i];
    return sum;
}

static void normalize(double *weight, int n)
{
    const double sum = megatron_sum(weight, n);
    for (int d = 0; d < n; d++) weight[d] /= sum;
}

static int furthest_behind(const MegatronBlend *b, int64_t q)
{
    const double draws = q > 1 ? (double)q : 1;
    int best = 0;
    double most = b->weight[0] * draws - (double)b->taken[0];
    for (int d = 1; d < b->source_count; d++) {
        double behind = b->weight[d] * draws - (double)b->taken[d];
        if (behind > most) {
            most = behind;
            best = d;
        }
    }
    return best;
}

static void draw_all(MegatronBlend *b)
{
    const int n = b->source_count;
    for (int64_t q = 0; q < b->size; q++) {
        if (q % MEGATRON_BLOCK == 0)
            for (int d = 0; d < n; d++) b->before[q / MEGATRON_BLOCK * n + d] = b->taken[d];
        int d = furthest_behind(b, q);
        b->source[q] = (uint8_t)d;
        b->taken[d]++;
    }
}

Err megatron_blend(MegatronBlend *b, const double *weights, int source_count, int64_t samples, SetupArena *mem)
{
    *b = (MegatronBlend){ .source_count = source_count, .size = samples };
    ASSERT(source_count >= 1 && source_count <= UINT8_MAX + 1 && samples >= 1);
    TRY(setup_array(mem, source_count, &b->weight));
    TRY(setup_array(mem, source_count, &b->wanted));
    TRY(setup_array(mem, source_count, &b->taken));
    TRY(setup_array(mem, samples, &b->source));
    TRY(setup_array(mem, (samples / MEGATRON_BLOCK + 1) * source_count, &b->before));
    for (int d = 0; d < source_count; d++) b->weight[d] = weights[d];
    normalize(b->weight, source_count);
    for (int d = 0; d < source_count; d++)
        b->wanted[d] = (int64_t)ceil(ceil((double)samples * b->weight[d]) * (1 + 0.005));
    normalize(b->weight, source_count); /* twice, as Megatron does: the sum may still be an ulp off 1 */
    draw_all(b);
    return ERR_OK;
}

int megatron_draw(const MegatronBlend *b, int64_t q, int64_t *earlier)
{
    ASSERT(q >= 0 && q < b->size);
    const int d = b->source[q];
    int64_t block = q / MEGATRON_BLOCK, n = b->before[block * b->source_count + d];
    for (int64_t i = block * MEGATRON_BLOCK; i < q; i++) n += b->source[i] == d;
    *earlier = n;
    return d;
}
