#include "data/dataset.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/file.h"
#include "base/words.h"
#include "data/megatron.h"
#include "data/order.h"
#include "data/shards.h"

typedef struct {
    char *word; /* names its files */
    Shards file;
    int64_t from, to;                     /* the sequences of the part */
    int64_t first_token, tokens, samples; /* what the part has */
    int64_t before;                       /* samples that earlier stages took of the same file */
    MegatronIndex index;                  /* ORDER_MEGATRON */
} Source;

/* Tokens read from a position on. */
typedef struct {
    int64_t first;     /* position */
    int source, count; /* first of its sources, and how many */
    char *spec;
    bool blended; /* weights were given */
    double weights[BLEND_SOURCES_MAX];
    Blend blend;
} Stage;

struct Dataset {
    SetupArena mem;
    Stage *stages;
    int stage_count;
    Source *sources; /* stage by stage */
    int source_count;
    int64_t seq, vocab;
    uint64_t seed;
    DataOrder order;
    bool blended; /* this and the next two: ORDER_MEGATRON */
    int64_t run_samples;
    MegatronBlend draws; /* when blended */
};

/* ---- splits ---- */

static Err parse_split(const char *split, double weights[PART_COUNT], double *sum)
{
    const char *at = split;
    char *end;
    *sum = 0;
    for (int p = 0; p < PART_COUNT; p++) {
        weights[p] = 0;
        if (!*at) continue; /* missing weights are 0 */
        weights[p] = strtod(at, &end);
        if (end == at || !(weights[p] >= 0) || !(weights[p] < 1e300)) break;
        *sum += weights[p];
        while (isspace((unsigned char)*end)) end++;
        if (*end && *end != ',') break;
        at = *end ? end + 1 : end;
    }
    if (!*at && *sum > 0) return ERR_OK;
    err_set(ERR_CONFIG, "split '%s' is not up to three weights", split);
    err_hint("for example 969,30,1 for train, valid, test");
    return ERR_CONFIG;
}

Err split_documents(const char *split, int64_t documents, int64_t bounds[PART_COUNT + 1])
{
    double weights[PART_COUNT], sum, upto = 0;
    TRY(parse_split(split, weights, &sum));
    bounds[0] = 0;
    for (int p = 0; p < PART_COUNT; p++) {
        upto += weights[p] / sum;
        bounds[p + 1] = (int64_t)rint(upto * (double)documents); /* half to even */
    }
    return ERR_OK;
}

/* ---- opening ---- */

/* Sequences, not documents, are what Megatron counts here; for GPT data they are the same. */
static Err choose_part(Source *s, const DatasetOptions *o)
{
    static const char *const names[] = { "train", "valid", "test" };
    int64_t bounds[PART_COUNT + 1], from = 0, to = s->file.sequences;
    if (o->split && *o->split) {
        TRY(split_documents(o->split, s->file.sequences, bounds));
        from = bounds[o->part];
        to = bounds[o->part + 1];
        if (from >= to) {
            err_set(ERR_DATA, "'%s': split '%s' leaves none of its %lld document%s for %s", s->file.name, o->split,
                    (long long)s->file.sequences, s->file.sequences == 1 ? "" : "s", names[o->part]);
            err_hint("split by document needs more documents (`preprocess --split-blank-lines` "
                     "makes many)");
            return ERR_DATA;
        }
    }
    s->from = from;
    s->to = to;
    s->first_token = shards_start(&s->file, from);
    s->tokens = shards_start(&s->file, to) - s->first_token;
    s->samples = s->tokens > 0 ? (s->tokens - 1) / o->seq : 0;
    if (s->samples > 0) return ERR_OK;
    err_set(ERR_DATA, "'%s': %lld token%s for %s %s too few for one sample of %lld + 1", s->file.name,
            (long long)s->tokens, s->tokens == 1 ? "" : "s", names[o->part], s->tokens == 1 ? "is" : "are",
            (long long)o->seq);
    err_hint("use more text or a smaller model.seq");
    return ERR_DATA;
}

/* Next word of a text, cut off in place; NULL at the end. */
static char *next_word(char **at)
{
    while (isspace((unsigned char)**at)) ++*at;
    if (!**at) return NULL;
    char *word = *at;
    *at += word_length(word);
    if (**at) *(*at)++ = 0;
    return word_bare(word);
}

static Err blend_syntax(const char *spec)
{
    err_set(ERR_CONFIG, "cannot read the data set '%s'", spec);
    if (strchr(spec, ' ') && !shards_missing(spec))
        return err_hint("a name with blanks stands in quotes: \"%s\"", spec);
    return err_hint("give one prefix, or `weight prefix weight prefix ...`; a name with blanks stands in quotes");
}

/* Weights, and names of files into `files`, of one stage. One word alone is a name. */
static Err parse_blend(Dataset *d, Stage *g, char **files)
{
    char *words[2 * BLEND_SOURCES_MAX], *text, *end;
    int n = 0;
    TRY(setup_strdup(&d->mem, g->spec, &text));
    for (char *word; (word = next_word(&text)); words[n++] = word)
        if (n == 2 * BLEND_SOURCES_MAX)
            return err_set(ERR_CONFIG, "more than %d sets of token files in a blend", BLEND_SOURCES_MAX);
    if (n == 0 || (n > 1 && n % 2)) return blend_syntax(g->spec);
    g->count = n == 1 ? 1 : n / 2;
    g->blended = n > 1;
    for (int i = 0; i < g->count; i++) {
        files[i] = words[n == 1 ? 0 : 2 * i + 1];
        g->weights[i] = n == 1 ? 1 : strtod(words[2 * i], &end);
        if (n > 1 && *end) return blend_syntax(g->spec);
    }
    return ERR_OK;
}

/* The next "@N" of a text, a word by itself; NULL: none. */
static char *find_stage(char *text)
{
    for (char *at = text; *at; at += word_length(at)) {
        while (isspace((unsigned char)*at)) at++;
        if (*at == '@' && isdigit((unsigned char)at[1])) return at;
    }
    return NULL;
}

static Err stage_syntax(const char *what, const char *word)
{
    err_set(ERR_CONFIG, "'%.*s' in data.train: %s", (int)strcspn(word, " \t"), word, what);
    return err_hint("`web @9001 0.7 books 0.3 web` reads web in 9000 steps and the blend from step 9001 on");
}

/* Cuts the next stage off what is at *at, which is "@N ..." but for the first one. */
static Err cut_stage(const DatasetOptions *o, char **at, int64_t *step, char **spec)
{
    const int64_t before = *step;
    char *word = *at, *end = word;
    *step = 1;
    if (before) *step = strtoll(word + 1, &end, 10);
    if (before && *end && !isspace((unsigned char)*end)) return stage_syntax("no number of a step", word);
    if (before && (*step <= before || *step == INT64_MAX))
        return stage_syntax("each stage must begin at a later step than the one before, from 2 on", word);
    if (before && !o->ramp) return stage_syntax("only training data have stages", word);
    if (before && o->order == ORDER_MEGATRON) {
        stage_syntax("data.order=megatron is an order of one data set", word);
        return err_hint("take data.order=keyed, or name one data set in data.train, without '@N'");
    }
    if (before && o->split && *o->split) return stage_syntax("stages need data.valid, not data.split", word);
    *at = find_stage(end);
    if (*at && *at > end) (*at)[-1] = 0;
    for (size_t n = strlen(end); n && isspace((unsigned char)end[n - 1]);) end[--n] = 0;
    *spec = end + strspn(end, " \t\n\v\f\r");
    return ERR_OK;
}

/* The stages with their texts, and where they begin. */
static Err parse_stages(Dataset *d, const DatasetOptions *o)
{
    char *text;
    int64_t step = 0;
    int count = 1;
    TRY(setup_strdup(&d->mem, o->spec, &text));
    for (char *at = find_stage(text); at; at = find_stage(at + 1)) count++;
    TRY(setup_array(&d->mem, count, &d->stages));
    for (char *at = text; at && d->stage_count < count;) {
        Stage *g = &d->stages[d->stage_count++];
        TRY(cut_stage(o, &at, &step, &g->spec));
        g->first = o->ramp ? batch_ramp_samples(o->ramp, step - 1) : 0;
    }
    return ERR_OK;
}

static int count_words(const char *text)
{
    int n = 0;
    for (const char *at = text; *at; at += word_length(at)) {
        while (isspace((unsigned char)*at)) at++;
        n += *at != 0;
    }
    return n;
}

static Err parse_spec(Dataset *d, const DatasetOptions *o)
{
    char *files[BLEND_SOURCES_MAX];
    TRY(parse_stages(d, o));
    TRY(setup_array(&d->mem, count_words(o->spec), &d->sources)); /* (half of them may be weights) */
    for (int k = 0; k < d->stage_count; k++) {
        Stage *g = &d->stages[k];
        g->source = d->source_count;
        TRY(parse_blend(d, g, files));
        TRY(o->order == ORDER_MEGATRON ? blend_check(g->weights, g->count)
                                       : blend_init(&g->blend, g->weights, g->count, &d->mem));
        for (int i = 0; i < g->count; i++) d->sources[d->source_count++].word = files[i];
    }
    return ERR_OK;
}

/* Samples that the blend takes beyond what it asked for: Megatron's own order ends there too. */
static Err check_draws(const Dataset *d, int source)
{
    const Source *s = &d->sources[source];
    if (d->draws.taken[source] <= s->index.samples) return ERR_OK;
    err_set(ERR_DATA, "'%s': the blend takes %lld samples, Megatron's order holds %lld", s->file.name,
            (long long)d->draws.taken[source], (long long)s->index.samples);
    err_hint("change train.steps or the weight a little, or take data.order=keyed");
    return ERR_DATA;
}

/*
 * With a split, weights make a blend even of one file; without, one file is none whatever its weight. So it is in
 * Megatron, with --data-path and --split, and with --train-data-path.
 */
static Err open_order(Dataset *d, const DatasetOptions *o)
{
    const double *weights = d->stages->weights;
    ASSERT(o->samples >= 1 && o->seed <= UINT32_MAX && d->stage_count == 1);
    d->run_samples = o->samples;
    d->blended = d->stages->blended && (d->source_count > 1 || (o->split && *o->split));
    if (d->blended) TRY(megatron_blend(&d->draws, weights, d->source_count, o->samples, &d->mem));
    for (int i = 0; i < d->source_count; i++) {
        Source *s = &d->sources[i];
        MegatronPart part = { .file = &s->file,
                              .from = s->from,
                              .to = s->to,
                              .seq = d->seq,
                              .wanted = d->blended ? d->draws.wanted[i] : o->samples,
                              .seed = (uint32_t)o->seed };
        TRY(megatron_index(&s->index, part, &d->mem));
        if (d->blended) TRY(check_draws(d, i));
    }
    return ERR_OK;
}

/* Samples that stage k, as long as it lasts, takes of the file. */
static int64_t taken(const Dataset *d, int k, const char *name)
{
    const Stage *g = &d->stages[k];
    int64_t n = 0;
    for (int i = 0; i < g->count; i++)
        if (!strcmp(d->sources[g->source + i].file.name, name))
            n += blend_taken(&g->blend, d->stages[k + 1].first - g->first, i);
    return n;
}

static Err open_stage(Dataset *d, int k, const DatasetOptions *o)
{
    Stage *g = &d->stages[k];
    for (int i = g->source; i < g->source + g->count; i++) {
        Source *s = &d->sources[i];
        TRY(shards_open(s->word, &d->mem, &s->file));
        if (o->tokenizer) TRY(shards_check_tokenizer(&s->file, o->tokenizer_crc, o->tokenizer));
        TRY(choose_part(s, o));
        for (int earlier = 0; earlier < k; earlier++) s->before += taken(d, earlier, s->file.name);
    }
    return ERR_OK;
}

Err dataset_check_text(const DatasetOptions *o)
{
    Dataset d = { .seq = o->seq };
    int64_t bounds[PART_COUNT + 1];
    setup_init(&d.mem);
    Err err = o->split && *o->split ? split_documents(o->split, 1, bounds) : ERR_OK;
    if (!err) err = parse_spec(&d, o);
    setup_release(&d.mem);
    return err;
}

static Err open_sources(Dataset *d, const DatasetOptions *o)
{
    TRY(parse_spec(d, o));
    for (int k = 0; k < d->stage_count; k++) TRY(open_stage(d, k, o));
    return o->order == ORDER_MEGATRON ? open_order(d, o) : ERR_OK;
}

Err dataset_open(const DatasetOptions *o, Dataset **out)
{
    ASSERT(o->seq >= 1 && o->part >= 0 && o->part < PART_COUNT);
    Dataset *d = calloc(1, sizeof *d);
    if (!d) return err_set(ERR_MEMORY, "no memory for a data set");
    setup_init(&d->mem);
    d->seq = o->seq;
    d->vocab = o->vocab;
    d->seed = o->seed;
    d->order = o->order;
    Err err = open_sources(d, o);
    if (err) dataset_close(d);
    else *out = d;
    return err;
}

void dataset_close(Dataset *d)
{
    if (!d) return;
    for (int i = 0; i < d->source_count && d->sources; i++) shards_close(&d->sources[i].file);
    setup_release(&d->mem);
    free(d);
}

/* ---- samples ---- */

static const Stage *stage_at(const Dataset *d, int64_t position)
{
    int k = d->stage_count - 1;
    while (k > 0 && d->stages[k].first > position) k--;
    return &d->stages[k];
}

DatasetPlace dataset_place(const Dataset *d, int64_t position)
{
    const Stage *g = stage_at(d, position);
    DatasetPlace p;
    int64_t own;
    ASSERT(d->order != ORDER_MEGATRON);
    p.source = g->source + blend_draw(&g->blend, position - g->first, &own);
    const Source *s = &d->sources[p.source];
    own += s->before;
    p.epoch = own / s->samples;
    p.sample = own % s->samples;
    if (d->order == ORDER_KEYED) p.sample = order_permute(d->seed, p.epoch, s->samples, p.sample);
    p.first_token = s->first_token + p.sample * d->seq;
    return p;
}

static Err megatron_get(const Dataset *d, int64_t position, int32_t *tokens)
{
    int64_t own = position;
    if (position >= d->run_samples)
        return err_set(ERR_DATA, "sample %lld is beyond the %lld that Megatron's order was made for",
                       (long long)position, (long long)d->run_samples);
    const int source = d->blended ? megatron_draw(&d->draws, position, &own) : 0;
    return megatron_read(&d->sources[source].index, own, d->vocab, tokens);
}

Err dataset_get(const Dataset *d, int64_t position, int32_t *tokens)
{
    if (d->order == ORDER_MEGATRON) return megatron_get(d, position, tokens);
    DatasetPlace p = dataset_place(d, position);
    return shards_read(&d->sources[p.source].file, p.first_token, d->seq + 1, d->vocab, tokens);
}

Err dataset_check(const Dataset *d, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        DatasetPlace p = dataset_place(d, i);
        TRY(shards_check(&d->sources[p.source].file, p.first_token, d->seq + 1, d->vocab));
    }
    return ERR_OK;
}

/* ---- questions ---- */

DatasetStage dataset_stage(const Dataset *d, int64_t position)
{
    const Stage *g = stage_at(d, position);
    DatasetStage out = { (int)(g - d->stages), d->stage_count, g->first, g->spec, 0 };
    for (int i = 0; i < g->count; i++) out.samples += d->sources[g->source + i].samples;
    return out;
}

int64_t dataset_seq(const Dataset *d) { return d->seq; }

int64_t dataset_samples(const Dataset *d)
{
    int64_t n = 0;
    for (int i = 0; i < d->source_count; i++) n += d->sources[i].samples;
    return n;
}

int64_t dataset_tokens(const Dataset *d)
{
    int64_t n = 0;
    for (int i = 0; i < d->source_count; i++) n += d->sources[i].tokens;
    return n;
}

int64_t dataset_index_bytes(const Dataset *d) { return d->mem.total_bytes; }

int dataset_source_count(const Dataset *d) { return d->source_count; }

const char *dataset_source_name(const Dataset *d, int source) { return d->sources[source].file.name; }

bool dataset_source_ends_with(const Dataset *d, int source, int32_t id)
{
    return shards_end_with(&d->sources[source].file, id);
}

DatasetSource dataset_source(const Dataset *d, int source)
{
    const Shards *x = &d->sources[source].file;
    int k = d->stage_count - 1;
    while (d->stages[k].source > source) k--;
    DatasetSource s = { .name = x->name,
                        .first = d->stages[k].first,
                        .files = x->count,
                        .bytes = x->bytes,
                        .documents = x->documents,
                        .tokens = x->tokens,
                        .index_crc = shards_index_crc(x, 0) };
    s.has_content_crc = shards_content_crc(x, &s.content_crc);
    return s;
}

const char *dataset_file(const Dataset *d, int source, int file)
{
    const Shards *x = &d->sources[source].file;
    return file < x->count ? x->file[file].bin.path : NULL;
}

/* Checksum of what Megatron's order depends on besides; the run's length matters only where it changes that of an
 * epoch. */
static uint32_t order_crc(const Dataset *d, int source, uint32_t crc)
{
    const MegatronIndex *x = &d->sources[source].index;
    int64_t length[] = { x->epochs, x->first_samples };
    crc = crc32c(crc, length, sizeof length);
    return d->blended ? crc32c(crc, &d->draws.weight[source], sizeof *d->draws.weight) : crc;
}

/* Nothing is drawn in the file's order. Checkpoints of earlier versions have the seed all the same: mostly this one. */
static const int64_t NO_SEED = 1234;

bool dataset_content_crc(const Dataset *d, uint32_t *crc)
{
    *crc = 0;
    for (int i = 0; i < d->source_count; i++) {
        uint32_t content;
        if (!shards_content_crc(&d->sources[i].file, &content)) return false;
        *crc = crc32c(*crc, &content, sizeof content);
    }
    return true;
}

uint32_t dataset_crc(const Dataset *d)
{
    const int64_t seed = d->order == ORDER_FILE ? NO_SEED : (int64_t)d->seed;
    int64_t head[] = { d->seq, seed, d->order, d->source_count };
    uint32_t crc = crc32c(0, head, sizeof head);
    for (int k = 0; k < d->stage_count; k++) {
        const Stage *g = &d->stages[k];
        if (k) crc = crc32c(crc, &g->first, sizeof g->first);
        for (int i = g->source; i < g->source + g->count; i++) {
            const Source *s = &d->sources[i];
            int64_t part[] = { g->blend.units[i - g->source], s->first_token, s->tokens };
            crc = crc32c(crc, part, sizeof part);
            crc = shards_index_crc(&s->file, crc);
            if (d->order == ORDER_MEGATRON) crc = order_crc(d, i, crc);
        }
    }
    return crc;
}
