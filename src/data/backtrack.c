/*
 * See backtrack.h. A pattern becomes a list of instructions. No group of a split pattern is repeated (pretoken.c), so
 * an instruction stands at most once on the way to a match, and the stack of places to go back to has a fixed size.
 */
#include "data/backtrack.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <limits.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "data/grow.h"

typedef enum {
    STEP_SET,        /* characters of a set, `least` to `most` of them */
    STEP_FORK,       /* goes on behind it, and later at `target`; lazy: the other way round */
    STEP_JUMP,       /* goes on at `target` */
    STEP_LOOK,       /* a look-ahead begins; behind it stands `target` */
    STEP_LOOK_END,   /* the one that begins at `target` ends */
    STEP_ATOMIC,     /* what lies from here to its end is not tried in another way */
    STEP_ATOMIC_END, /* the one that begins at `target` ends */
    STEP_MATCH
} StepKind;

typedef enum { TAKES_MOST, TAKES_LEAST, TAKES_ALL } Greed; /* greedy, lazy, possessive */

typedef struct {
    StepKind kind;
    Greed greed;
    bool without; /* LOOK: what must not follow */
    int set, target, least, most;
} Step;

/* One character, or a class of them. */
typedef struct {
    char *source; /* as in the pattern */
    size_t size;
    bool folds;
    uint64_t ascii[2]; /* one bit a character */
    pcre2_code *code;  /* NULL: it is one character */
} Set;

struct Backtrack {
    Step *steps;
    Set *sets;
    int64_t step_count, step_capacity, set_count, set_capacity;
};

/* A place to go back to. */
typedef struct {
    int step;
    int64_t at, low; /* SET: where it stands now, and how far down it may go */
} Retry;

/* Which of the first 64 sets have a character. */
typedef struct {
    uint32_t character; /* 0: the place is free */
    uint64_t known, member;
} Remembered;

enum { REMEMBERED = 1024, REMEMBERED_SETS = 64 };

struct BacktrackWork {
    const Backtrack *pattern;
    pcre2_match_data *match;
    Retry *retries; /* one for each step */
    Remembered remembered[REMEMBERED];
};

/* ---- sets ---- */

static bool code_has(const pcre2_code *code, const char *character, int bytes, pcre2_match_data *match)
{
    return pcre2_match(code, (PCRE2_SPTR)character, (PCRE2_SIZE)bytes, 0, PCRE2_NO_UTF_CHECK, match, NULL) >=
           0;
}

static Err no_memory(void) { return err_set(ERR_MEMORY, "no memory for a pattern"); }

/* A class, an escaped character, or one that has other cases: PCRE2 knows which characters those are. */
static Err compile_set(Set *s)
{
    int error;
    PCRE2_SIZE where;
    s->code =
        pcre2_compile((PCRE2_SPTR)s->source, (PCRE2_SIZE)s->size,
                      PCRE2_UTF | PCRE2_ANCHORED | (s->folds ? PCRE2_CASELESS : 0), &error, &where, NULL);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    for (int c = 0; s->code && match && c < 128; c++)
        if (code_has(s->code, &(char){ (char)c }, 1, match)) s->ascii[c / 64] |= 1ull << c % 64;
    pcre2_match_data_free(match);
    return s->code && match ? ERR_OK : no_memory();
}

static Err add_set(Backtrack *b, const char *source, size_t size, bool folds, int *out)
{
    for (*out = 0; *out < b->set_count; ++*out) {
        const Set *s = &b->sets[*out];
        if (s->size == size && s->folds == folds && !memcmp(s->source, source, size)) return ERR_OK;
    }
    TRY(grow_to(&b->sets, &b->set_capacity, b->set_count + 1));
    Set *s = &b->sets[b->set_count];
    *s = (Set){ .source = strndup(source, size), .size = size, .folds = folds };
    if (!s->source) return no_memory();
    b->set_count++;
    const bool one = !folds && *source != '[' && *source != '\\';
    if (!one) return compile_set(s);
    if ((uint8_t)*source < 128) s->ascii[*source / 64] |= 1ull << *source % 64;
    return ERR_OK;
}

/* Beyond ASCII. */
static bool set_has_far(BacktrackWork *w, int set, const char *text, int bytes)
{
    const Set *s = &w->pattern->sets[set];
    if (!s->code) return s->size == (size_t)bytes && !memcmp(s->source, text, (size_t)bytes);
    if (set >= REMEMBERED_SETS) return code_has(s->code, text, bytes, w->match);
    int n;
    const uint32_t c = utf8_get(text, &n);
    const uint64_t bit = 1ull << set;
    Remembered *r = &w->remembered[c % REMEMBERED];
    if (r->character != c) *r = (Remembered){ .character = c };
    if (!(r->known & bit)) {
        r->known |= bit;
        if (code_has(s->code, text, bytes, w->match)) r->member |= bit;
    }
    return r->member & bit;
}

/* Bytes of the character at `at` if the set has it; 0: it has not, or the text ends there. */
static inline int set_takes(BacktrackWork *w, int set, const char *text, int64_t size, int64_t at)
{
    if (at == size) return 0;
    const uint8_t c = (uint8_t)text[at];
    if (c < 128) return w->pattern->sets[set].ascii[c / 64] >> c % 64 & 1;
    const int bytes = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    return set_has_far(w, set, text + at, bytes) ? bytes : 0;
}

/* ---- from a pattern to steps ---- */

typedef struct {
    Backtrack *b;
    const char *at;
} Reading;

static Err add_step(Reading *r, Step s, int *out)
{
    Backtrack *b = r->b;
    TRY(grow_to(&b->steps, &b->step_capacity, b->step_count + 1));
    if (out) *out = (int)b->step_count;
    b->steps[b->step_count++] = s;
    return ERR_OK;
}

static int next_step(const Reading *r) { return (int)r->b->step_count; }

/* What stands there and takes up no place in the way to a match. */
static Err add_nothing(Reading *r, int *out)
{
    return add_step(r, (Step){ .kind = STEP_JUMP, .target = next_step(r) + 1 }, out);
}

static size_t item_bytes(const char *at)
{
    if (*at == '[') {
        size_t n = 1 + (at[1] == '^');
        while (at[n] != ']') n += at[n] == '\\' ? 2 : 1;
        return n + 1;
    }
    int bytes;
    utf8_get(*at == '\\' ? at + 1 : at, &bytes);
    return (size_t)bytes + (*at == '\\');
}

/* ?, *, +, {2}, {2,} or {2,5}; false: once. */
static bool read_count(Reading *r, int *least, int *most)
{
    const char c = *r->at;
    *least = c == '+', *most = c == '?' ? 1 : INT_MAX;
    if (c && strchr("?*+", c)) return r->at++, true;
    *least = *most = 1;
    if (c != '{') return false;
    char *end;
    *least = *most = (int)strtol(r->at + 1, &end, 10);
    if (*end == ',') *most = end[1] == '}' ? INT_MAX : (int)strtol(end + 1, &end, 10);
    r->at = strchr(end, '}') + 1;
    return true;
}

static Greed read_greed(Reading *r)
{
    if (*r->at == '?') return r->at++, TAKES_LEAST;
    if (*r->at == '+') return r->at++, TAKES_ALL;
    return TAKES_MOST;
}

static Err read_item(Reading *r, bool folds)
{
    const size_t size = item_bytes(r->at);
    Step s = { .kind = STEP_SET };
    TRY(add_set(r->b, r->at, size, folds, &s.set));
    r->at += size;
    if (read_count(r, &s.least, &s.most)) s.greed = read_greed(r);
    return add_step(r, s, NULL);
}

static Err read_choices(Reading *r, bool folds);

/* A group, with two free places in front for what a question mark behind it asks for. */
static Err read_group(Reading *r, bool folds)
{
    static const char *const starts[] = { "(?:", "(?i:", "(?=", "(?!" };
    int kind = 0, atomic, fork, look = -1;
    while (strncmp(r->at, starts[kind], strlen(starts[kind])) != 0) kind++;
    r->at += strlen(starts[kind]);
    TRY(add_nothing(r, &atomic));
    TRY(add_nothing(r, &fork));
    if (kind >= 2) TRY(add_step(r, (Step){ .kind = STEP_LOOK, .without = kind == 3 }, &look));
    TRY(read_choices(r, folds || kind == 1));
    r->at++;
    if (look >= 0) TRY(add_step(r, (Step){ .kind = STEP_LOOK_END, .target = look }, NULL));
    if (look >= 0) r->b->steps[look].target = next_step(r);
    if (*r->at != '?') return ERR_OK;
    r->at++;
    const Greed greed = read_greed(r);
    r->b->steps[fork] = (Step){ .kind = STEP_FORK, .greed = greed, .target = next_step(r) };
    if (greed != TAKES_ALL) return ERR_OK;
    r->b->steps[atomic] = (Step){ .kind = STEP_ATOMIC };
    return add_step(r, (Step){ .kind = STEP_ATOMIC_END, .target = atomic }, NULL);
}

static Err read_choice(Reading *r, bool folds)
{
    while (*r->at && !strchr("|)", *r->at)) {
        if (*r->at == '(') TRY(read_group(r, folds));
        else TRY(read_item(r, folds));
    }
    return ERR_OK;
}

/* The jump out of a choice knows where to when the last one is read: until then it holds the one before it. */
static Err read_choices(Reading *r, bool folds)
{
    int out = -1;
    for (;;) {
        int fork;
        TRY(add_nothing(r, &fork));
        TRY(read_choice(r, folds));
        if (*r->at != '|') break;
        r->at++;
        TRY(add_step(r, (Step){ .kind = STEP_JUMP, .target = out }, &out));
        r->b->steps[fork] = (Step){ .kind = STEP_FORK, .target = next_step(r) };
    }
    while (out >= 0) {
        const int before = r->b->steps[out].target;
        r->b->steps[out].target = next_step(r);
        out = before;
    }
    return ERR_OK;
}

Err backtrack_open(const char *pattern, Backtrack **out)
{
    Backtrack *b = calloc(1, sizeof *b);
    if (!b) return no_memory();
    Reading r = { b, pattern };
    Err err = read_choices(&r, false);
    if (!err) err = add_step(&r, (Step){ .kind = STEP_MATCH }, NULL);
    if (err) backtrack_close(b);
    else *out = b;
    return err;
}

void backtrack_close(Backtrack *b)
{
    if (!b) return;
    for (int64_t i = 0; i < b->set_count; i++) {
        free(b->sets[i].source);
        pcre2_code_free(b->sets[i].code);
    }
    free(b->sets);
    free(b->steps);
    free(b);
}

Err backtrack_work_open(const Backtrack *b, BacktrackWork **out)
{
    BacktrackWork *w = calloc(1, sizeof *w);
    if (!w) return no_memory();
    w->pattern = b;
    w->match = pcre2_match_data_create(1, NULL);
    w->retries = calloc((size_t)b->step_count, sizeof *w->retries);
    if (!w->match || !w->retries) return backtrack_work_close(w), no_memory();
    *out = w;
    return ERR_OK;
}

void backtrack_work_close(BacktrackWork *w)
{
    if (!w) return;
    pcre2_match_data_free(w->match);
    free(w->retries);
    free(w);
}

/* ---- matching ---- */

typedef struct {
    BacktrackWork *w;
    const char *text;
    int64_t size, at, *steps;
    int step, count; /* the step that is next; retries */
} Way;

static void push(Way *y, int step, int64_t at, int64_t low)
{
    y->w->retries[y->count++] = (Retry){ step, at, low };
}

/* The step reads its characters; false: there are too few. */
static bool take_set(Way *y, const Step *s)
{
    const int wanted = s->greed == TAKES_LEAST ? s->least : s->most;
    int64_t low = y->at;
    int count = 0;
    for (int bytes; count < wanted && (bytes = set_takes(y->w, s->set, y->text, y->size, y->at)); count++) {
        y->at += bytes;
        if (count < s->least) low = y->at;
        if (--*y->steps < 0) return false;
    }
    if (count < s->least) return false;
    if (s->greed == TAKES_MOST && y->at > low) push(y, y->step, y->at, low);
    if (s->greed == TAKES_LEAST && s->most > s->least) push(y, y->step, y->at, s->most - s->least);
    y->step++;
    return true;
}

/* The group ends: what could be tried again inside of it goes. Returns where it began. */
static int64_t leave_group(Way *y, int begin)
{
    while (y->w->retries[y->count - 1].step != begin) y->count--;
    return y->w->retries[--y->count].at;
}

/* One step on; false: there is none from here. */
static bool go_on(Way *y)
{
    const Step *s = &y->w->pattern->steps[y->step];
    switch (s->kind) {
    case STEP_SET: return take_set(y, s);
    case STEP_FORK:
        push(y, y->step, y->at, 0);
        y->step = s->greed == TAKES_LEAST ? s->target : y->step + 1;
        return true;
    case STEP_JUMP: return y->step = s->target, true;
    case STEP_LOOK:
    case STEP_ATOMIC: return push(y, y->step++, y->at, 0), true;
    case STEP_LOOK_END:
        y->at = leave_group(y, s->target);
        y->step++;
        return !y->w->pattern->steps[s->target].without;
    case STEP_ATOMIC_END: return leave_group(y, s->target), y->step++, true;
    case STEP_MATCH: break;
    }
    return false;
}

/* The greedy one gives a character back, the lazy one takes one more; false: it has been everywhere. */
static bool retry_set(Way *y, Retry *r, const Step *s)
{
    if (s->greed == TAKES_LEAST) {
        const int bytes = r->low > 0 ? set_takes(y->w, s->set, y->text, y->size, r->at) : 0;
        r->at += bytes, r->low--;
        if (!bytes) return false;
    } else {
        while (utf8_is_tail((uint8_t)y->text[--r->at])) {}
        if (r->at == r->low) y->count--;
    }
    y->at = r->at;
    y->step = r->step + 1;
    return true;
}

/* Back to the last place from which there is another way; false: there is none. */
static bool go_back(Way *y)
{
    while (y->count) {
        Retry *r = &y->w->retries[y->count - 1];
        const Step *s = &y->w->pattern->steps[r->step];
        if (--*y->steps < 0) return false;
        if (s->kind == STEP_SET && retry_set(y, r, s)) return true;
        y->count--;
        y->at = r->at;
        if (s->kind == STEP_FORK) return y->step = s->greed == TAKES_LEAST ? r->step + 1 : s->target, true;
        if (s->kind == STEP_LOOK && s->without) return y->step = s->target, true;
    }
    return false;
}

Err backtrack_match(BacktrackWork *w, const char *text, int64_t size, int64_t at, int64_t *steps,
                    int64_t *end)
{
    Way y = { .w = w, .text = text, .size = size, .at = at, .steps = steps };
    bool is_way = true;
    while (is_way && w->pattern->steps[y.step].kind != STEP_MATCH)
        is_way = --*steps >= 0 && (go_on(&y) || go_back(&y));
    *end = is_way ? y.at : -1;
    return *steps < 0 ? err_set(ERR_DATA, "its split pattern takes too long") : ERR_OK;
}
