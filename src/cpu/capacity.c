/*
 * Choices that experts of limited capacity drop, and how many rows a rank's experts have room for (device/ops.def,
 * choice_drop, room_limits; docs/moe.md). Threads own lists.
 *
 * The weight behind which choices of a list are dropped is found digit by digit: of the keys, which order as the
 * weights do, 8 bits a pass are counted, from the highest on. No list is sorted.
 */
#include "cpu/rows.h"

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, KEY_BITS = 32 };

/* Integers that order as the weights do; a NaN is the least. */
static uint32_t weight_key(float x)
{
    uint32_t bits;
    x += 0.0f; /* -0 is 0 */
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0;
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

static uint32_t key_of(const choice_drop_args *a, int64_t p)
{
    const int64_t K = a->weight.dim[1], number = ((const int32_t *)a->choice.data)[p];
    return weight_key(row_f32(a->weight, number / K)[number % K]);
}

/* Keys above `key` are kept, and so many of those that equal it. */
typedef struct {
    uint32_t key;
    int64_t equal;
} Cut;

/* The cut of the rows [first, end), which are more than `most`. */
static Cut find_cut(const choice_drop_args *a, int64_t first, int64_t end, int64_t most)
{
    Cut cut = { 0, most };
    uint32_t known = 0; /* the bits that are found */
    for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        int64_t count[DIGITS] = { 0 }, digit = DIGITS - 1;
        for (int64_t p = first; p < end; p++) {
            const uint32_t key = key_of(a, p);
            if ((key & known) == cut.key) count[key >> shift & (DIGITS - 1)]++;
        }
        while (count[digit] < cut.equal) cut.equal -= count[digit--];
        cut.key |= (uint32_t)digit << shift;
        known |= (uint32_t)(DIGITS - 1) << shift;
    }
    return cut;
}

static Cut cut_of(const choice_drop_args *a, int64_t first, int64_t end, int64_t most)
{
    if (most <= 0) return (Cut){ UINT32_MAX, 0 };
    if (a->weight.data && end - first > most) return find_cut(a, first, end, most);
    return (Cut){ 0, most };
}

static void drop_part(const void *args, int64_t first_list, int64_t end_list)
{
    const choice_drop_args *a = args;
    const int32_t *choice = a->choice.data;
    const int64_t *offset = a->offset.data, *limit = a->limit.data;
    const int64_t K = a->kept.dim[1], runs = (a->offset.dim[0] - 1) / a->experts;
    for (int64_t l = first_list; l < end_list; l++) {
        Cut cut = cut_of(a, offset[l], offset[l + 1], limit ? limit[l] : a->most);
        for (int64_t p = offset[l]; p < offset[l + 1]; p++) {
            const uint32_t key = a->weight.data ? key_of(a, p) : 0;
            const bool kept = key > cut.key || (key == cut.key && cut.equal-- > 0);
            int32_t *to = (int32_t *)a->kept.data + choice[p] / K * a->kept.ld + choice[p] % K;
            *to = kept ? (int32_t)(l / runs) : -1;
        }
    }
}

Err CPU(choice_drop)(Stream *s, const choice_drop_args *a)
{
    const int64_t lists = a->offset.dim[0] - 1;
    ASSERT(lists % a->experts == 0 && (!a->limit.data || a->limit.dim[0] == lists));
    par_rows(s, lists, lists ? 8 * a->choice.dim[0] / lists : 0, drop_part, a);
    return ERR_OK;
}

/* ---- the room of a rank's experts ---- */

/* How many rows rank s has for expert e. */
static int64_t piece_rows(const room_limits_args *a, int64_t s, int64_t e)
{
    const int64_t *offset = (const int64_t *)a->all.data + s * a->all.ld;
    return offset[e + 1] - offset[e];
}

/* How many rows the experts [first, end) get if each piece is cut to `most` rows. */
static int64_t rows_cut(const room_limits_args *a, int64_t first, int64_t end, int64_t most)
{
    int64_t sum = 0;
    for (int64_t e = first; e < end; e++)
        for (int64_t s = 0; s < a->all.dim[0]; s++) {
            const int64_t rows = piece_rows(a, s, e);
            sum += rows < most ? rows : most;
        }
    return sum;
}

Err CPU(room_limits)(Stream *s, const room_limits_args *a)
{
    const int64_t E = a->limit.dim[0], ranks = a->all.dim[0], own = a->own;
    (void)s;
    ASSERT(E % own == 0 && a->all.dim[1] == E + 1);
    for (int64_t first = 0; first < E; first += own) {
        int64_t most = 0;
        for (int64_t bit = (int64_t)1 << 31; bit; bit >>= 1)
            if (rows_cut(a, first, first + own, most + bit) <= a->room) most += bit;
        int64_t left = a->room - rows_cut(a, first, first + own, most);
        for (int64_t e = first; e < first + own; e++)
            for (int64_t r = 0; r < ranks; r++) {
                const int64_t rows = piece_rows(a, r, e), more = rows > most && left > 0;
                left -= more;
                if (r == a->rank) ((int64_t *)a->limit.data)[e] = (rows < most ? rows : most) + more;
                if (rows > most + more && a->full.data) flag_raise(a->full);
            }
    }
    return ERR_OK;
}
