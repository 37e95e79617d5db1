#include "data/added.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

static int raw_first_longest_first(const void *a, const void *b)
{
    const AddedToken *x = a, *y = b;
    if (x->normalized != y->normalized) return x->normalized ? 1 : -1;
    if (x->text.size != y->text.size) return x->text.size < y->text.size ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

static void add_start(AddedSet *set, TokenText t)
{
    uint8_t first = (uint8_t)t.bytes[0];
    set->starts[first] = true;
    for (int second = 0; second < 256; second++)
        if (t.size == 1 || second == (uint8_t)t.bytes[1]) set->pairs[first << 8 | second] = true;
}

void added_index(AddedToken *tokens, int64_t count, AddedSet sets[2])
{
    if (count) qsort(tokens, (size_t)count, sizeof *tokens, raw_first_longest_first);
    int64_t raw = 0;
    while (raw < count && !tokens[raw].normalized) raw++;
    sets[0] = (AddedSet){ .tokens = tokens, .count = raw };
    sets[1] = (AddedSet){ .tokens = tokens + raw, .count = count - raw };
    for (int64_t i = 0; i < count; i++) add_start(&sets[i >= raw], tokens[i].text);
}

/* Unicode's White_Space. */
static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* Characters that regular expressions call \w: letters, marks, decimal digits, connectors, joiners, letter-like
 * signs. */
static bool is_word(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: break;
    }
    return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
           (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

/* Start of the character that ends at `at` > 0. */
static int64_t char_before(const char *text, int64_t at)
{
    do at--;
    while (utf8_is_tail((uint8_t)text[at]));
    return at;
}

static bool stands_alone(const char *text, int64_t size, int64_t from, int64_t to)
{
    int n;
    if (from > 0 && is_word(utf8_get(text + char_before(text, from), &n))) return false;
    return to == size || !is_word(utf8_get(text + to, &n));
}

static int64_t blanks_from(const char *text, int64_t low, int64_t at)
{
    int n;
    while (at > low && is_space(utf8_get(text + char_before(text, at), &n))) at -= n;
    return at;
}

static int64_t blanks_to(const char *text, int64_t size, int64_t at)
{
    int n;
    while (at < size && is_space(utf8_get(text + at, &n))) at += n;
    return at;
}

/* The longest token whose text stands at `at`; NULL if none does. */
static const AddedToken *token_at(const AddedSet *set, const char *text, int64_t size, int64_t at)
{
    uint8_t first = (uint8_t)text[at];
    if (!set->starts[first]) return NULL;
    if (at + 1 < size && !set->pairs[first << 8 | (uint8_t)text[at + 1]]) return NULL;
    for (const AddedToken *a = set->tokens; a < set->tokens + set->count; a++)
        if (a->text.size <= size - at && memcmp(text + at, a->text.bytes, (size_t)a->text.size) == 0) return a;
    return NULL;
}

bool added_next(const AddedSet *set, const char *text, int64_t size, int64_t done, int64_t *search, AddedMatch *out)
{
    if (set->count == 0) return false;
    for (int64_t at = *search, next; at < size; at = next) {
        const AddedToken *a = token_at(set, text, size, at);
        next = a ? at + a->text.size : at + 1;
        if (!a || (a->single_word && !stands_alone(text, size, at, next))) continue;
        AddedMatch m = { .from = at, .to = next, .id = a->id };
        /* what lies between this token and a later `done` are blanks */
        if (a->lstrip) m.from = at < done ? done : blanks_from(text, done, at);
        if (a->rstrip) m.to = blanks_to(text, size, next < done ? done : next);
        if (m.from >= m.to) continue; /* blanks that the token before has swallowed */
        *search = next;
        *out = m;
        return true;
    }
    return false;
}

bool added_crosses(const AddedSet *set, char before, char behind)
{
    for (const AddedToken *a = set->tokens; a < set->tokens + set->count; a++) {
        const char *bytes = a->text.bytes;
        int64_t last = a->text.size - 1;
        if (a->rstrip && bytes[last] == before) return true;   /* may swallow what stands behind */
        if (a->single_word && bytes[0] == behind) return true; /* looks at the letter before */
        for (int64_t i = 0; i < last; i++)
            if (bytes[i] == before && bytes[i + 1] == behind) return true;
    }
    return false;
}
