/*
 * Parts around the model in a tokenizer.json: normalizer, pre_tokenizer, post_processor, decoder. The first two
 * become stages (tokenizer_impl.h), the decoder becomes the text of each token.
 *
 * One table has all that is supported, with the members that are read; whatever else a file has is refused by name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer_impl.h"

/* A part of a decoder may follow only those of a lower step or its own. */
typedef enum { STEP_REPLACE, STEP_BYTES, STEP_FUSE, STEP_STRIP } DecoderStep;

typedef struct {
    Tokenizer *t;
    bool byte_level, byte_decoder; /* ByteLevel was there as a pre_tokenizer, as a decoder */
    bool decodes;                  /* some other decoder was there */
    DecoderStep step;
    Stage spell[STAGES_MAX];
} Parts;

/* ---- reading ---- */

bool json_is_absent(const Json *j) { return !j || json_is_null(j); }

static bool is_name_in(const char *names, const char *name)
{
    const size_t size = strlen(name);
    for (const char *at = names; size && (at = strstr(at, name)); at += size)
        if ((at == names || at[-1] == ' ') && (at[size] == 0 || at[size] == ' ')) return true;
    return false;
}

Err json_check_members(const Json *j, const char *where, const char *names)
{
    for (void *it = json_iter(j); it; it = json_next(j, it))
        if (!is_name_in(names, json_iter_key(it)))
            return err_set(ERR_DATA, "the member '%s' of %s is not supported", json_iter_key(it), where);
    return ERR_OK;
}

static Err read_text(Parts *p, const Json *j, const char *name, TokenText *out)
{
    int64_t size = 0;
    const char *text = json_text(json_get(j, name), &size);
    if (!text) return err_set(ERR_DATA, "the text '%s' is missing", name);
    return tokenizer_copy_text(p->t, text, size, out);
}

static bool json_is_bool(const Json *j)
{
    return j && !json_is_null(j) && !json_is_string(j) && !json_is_number(j) && !json_is_object(j) && !json_is_array(j);
}

static Err read_bool(const Json *j, const char *name, bool otherwise, bool *out)
{
    const Json *value = json_get(j, name);
    *out = json_is_absent(value) ? otherwise : json_is_true(value);
    if (!json_is_absent(value) && !json_is_bool(value))
        return err_set(ERR_DATA, "'%s' is neither true nor false", name);
    return ERR_OK;
}

/* A text out of a list of them: which one. */
static Err read_choice(const Json *j, const char *name, const char *const *choices, int count, int *out)
{
    const char *text = json_text(json_get(j, name), NULL);
    for (int i = 0; i < count && text; i++)
        if (strcmp(text, choices[i]) == 0) return *out = i, ERR_OK;
    return err_set(ERR_DATA, "%s '%s' is not supported", name, text ? text : "(none)");
}

static Err add_stage(Parts *p, Stage s)
{
    Tokenizer *t = p->t;
    if (t->stage_count == STAGES_MAX) {
        splitter_close(s.splitter);
        return err_set(ERR_DATA, "there are more than %d parts", STAGES_MAX - 2);
    }
    t->stages[t->stage_count++] = s;
    return ERR_OK;
}

/* ---- normalizers ---- */

static Err load_nfc(Parts *p, const Json *j)
{
    (void)j;
    return add_stage(p, (Stage){ .kind = STAGE_NFC });
}

static Err load_prepend(Parts *p, const Json *j)
{
    Stage s = { .kind = STAGE_PREFIX, .rule = PREFIX_ALWAYS };
    TRY(read_text(p, j, "prepend", &s.to));
    return add_stage(p, s);
}

static Err read_replacement(Parts *p, const Json *j, Stage *out)
{
    *out = (Stage){ .kind = STAGE_REPLACE };
    const Json *pattern = json_get(j, "pattern");
    if (json_get(pattern, "Regex")) return err_set(ERR_DATA, "a Regex is not supported");
    TRY(read_text(p, pattern, "String", &out->from));
    if (out->from.size == 0) return err_set(ERR_DATA, "the text that it replaces is empty");
    return read_text(p, j, "content", &out->to);
}

static Err load_replace(Parts *p, const Json *j)
{
    Stage s;
    TRY(read_replacement(p, j, &s));
    return add_stage(p, s);
}

/* ---- pre-tokenizers ---- */

static Err load_split(Parts *p, const Json *j)
{
    static const char *const behaviors[] = { [BEHAVIOR_ISOLATED] = "Isolated",
                                             [BEHAVIOR_REMOVED] = "Removed",
                                             [BEHAVIOR_PREVIOUS] = "MergedWithPrevious",
                                             [BEHAVIOR_NEXT] = "MergedWithNext",
                                             [BEHAVIOR_CONTIGUOUS] = "Contiguous" };
    Stage s = { .kind = STAGE_SPLIT };
    const Json *pattern = json_get(j, "pattern");
    const char *regex = json_text(json_get(pattern, "Regex"), NULL);
    int behavior;
    TRY(read_choice(j, "behavior", behaviors, 5, &behavior));
    TRY(read_bool(j, "invert", false, &s.invert));
    s.behavior = (SplitBehavior)behavior;
    if (regex) {
        TRY(splitter_open(regex, &s.splitter));
    } else {
        TRY(read_text(p, pattern, "String", &s.from));
        if (s.from.size == 0) return err_set(ERR_DATA, "a split pattern is empty");
        TRY(splitter_open_text(s.from.bytes, s.from.size, &s.splitter));
    }
    return add_stage(p, s);
}

static Err load_digits(Parts *p, const Json *j)
{
    bool single;
    Stage s = { .kind = STAGE_SPLIT };
    TRY(read_bool(j, "individual_digits", false, &single));
    s.behavior = single ? BEHAVIOR_ISOLATED : BEHAVIOR_CONTIGUOUS;
    TRY(splitter_open(split_regex(SPLIT_DIGITS), &s.splitter));
    return add_stage(p, s);
}

static Err load_byte_level(Parts *p, const Json *j)
{
    bool prefix, regex;
    Stage split = { .kind = STAGE_SPLIT };
    TRY(read_bool(j, "add_prefix_space", false, &prefix));
    TRY(read_bool(j, "use_regex", true, &regex));
    p->byte_level = true;
    if (prefix) TRY(add_stage(p, (Stage){ .kind = STAGE_PREFIX, .rule = PREFIX_UNLESS_THERE, .to = { " ", 1 } }));
    if (!regex) return ERR_OK;
    TRY(splitter_open(split_regex(SPLIT_GPT2), &split.splitter));
    return add_stage(p, split);
}

/* Older files have add_prefix_space alone. */
static Err read_scheme(const Json *j, int *out)
{
    static const char *const schemes[] = { "first", "always", "never" };
    bool prefix;
    const bool stated = !json_is_absent(json_get(j, "prepend_scheme"));
    TRY(read_bool(j, "add_prefix_space", true, &prefix));
    *out = prefix ? 1 : 2;
    if (stated) TRY(read_choice(j, "prepend_scheme", schemes, 3, out));
    if (!prefix && *out != 2) return err_set(ERR_DATA, "add_prefix_space contradicts prepend_scheme");
    return ERR_OK;
}

static Err load_metaspace(Parts *p, const Json *j)
{
    Stage mark = { .kind = STAGE_REPLACE, .from = { " ", 1 } }, prefix = { .kind = STAGE_PREFIX };
    Stage split = { .kind = STAGE_SPLIT, .behavior = BEHAVIOR_NEXT };
    bool splits;
    int scheme;
    TRY(read_text(p, j, "replacement", &mark.to));
    TRY(read_scheme(j, &scheme));
    TRY(read_bool(j, "split", true, &splits));
    if (mark.to.size == 0) return err_set(ERR_DATA, "its replacement is empty");
    prefix.to = split.from = mark.to;
    prefix.rule = scheme == 0 ? PREFIX_FIRST : PREFIX_UNLESS_THERE;
    TRY(add_stage(p, mark));
    if (scheme != 2) TRY(add_stage(p, prefix));
    if (!splits) return ERR_OK;
    TRY(splitter_open_text(mark.to.bytes, mark.to.size, &split.splitter));
    return add_stage(p, split);
}

/* ---- decoders ---- */

static Err decoder_step(Parts *p, DecoderStep step)
{
    if (step < p->step) return err_set(ERR_DATA, "it is not supported behind the decoders before it");
    p->step = step;
    p->decodes = true;
    return ERR_OK;
}

static Err decode_byte_level(Parts *p, const Json *j)
{
    (void)j;
    p->byte_decoder = true;
    return ERR_OK;
}

static Err add_spell(Parts *p, Stage s)
{
    TRY(decoder_step(p, STEP_REPLACE));
    if (p->t->spell_count == STAGES_MAX) return err_set(ERR_DATA, "there are more than %d decoders", STAGES_MAX);
    p->spell[p->t->spell_count++] = s;
    return ERR_OK;
}

static Err decode_replace(Parts *p, const Json *j)
{
    Stage s;
    TRY(read_replacement(p, j, &s));
    return add_spell(p, s);
}

static Err decode_metaspace(Parts *p, const Json *j)
{
    Stage s = { .kind = STAGE_REPLACE, .to = { " ", 1 } };
    int scheme;
    TRY(read_text(p, j, "replacement", &s.from));
    TRY(read_scheme(j, &scheme));
    if (p->t->spell_count > 0) return err_set(ERR_DATA, "it is not supported behind another decoder");
    if (s.from.size == 0) return err_set(ERR_DATA, "its replacement is empty");
    if (scheme != 2) p->t->join = JOIN_MARKS;
    return add_spell(p, s);
}

static Err decode_bytes(Parts *p, const Json *j)
{
    (void)j;
    p->t->spell_bytes = true;
    return decoder_step(p, STEP_BYTES);
}

static Err decode_fuse(Parts *p, const Json *j)
{
    (void)j;
    return decoder_step(p, STEP_FUSE);
}

static Err decode_strip(Parts *p, const Json *j)
{
    const char *content = json_text(json_get(j, "content"), NULL);
    const bool fused = p->step == STEP_FUSE, blank = content && strcmp(content, " ") == 0;
    if (!fused || !blank || json_int(json_get(j, "start"), -1) != 1 || json_int(json_get(j, "stop"), -1) != 0 ||
        p->t->join != JOIN_PLAIN)
        return err_set(ERR_DATA, "of these only the one is supported that takes one blank from the start, behind Fuse");
    p->t->join = JOIN_STRIP;
    return decoder_step(p, STEP_STRIP);
}

/* The token of a template's item; -1: it is the text, or stands for several tokens. */
static int32_t template_token(const Json *j, const Json *item)
{
    const char *name = json_text(json_get(json_get(item, "SpecialToken"), "id"), NULL);
    const Json *ids = name ? json_get(json_get(json_get(j, "special_tokens"), name), "ids") : NULL;
    const int64_t id = json_count(ids) == 1 ? json_int(json_at(ids, 0), -1) : -1;
    return id >= 0 && id <= INT32_MAX ? (int32_t)id : -1;
}

/* Keeps only the texts that stand right before and behind the text. The rest is left to the caller. */
static Err load_template(Parts *p, const Json *j)
{
    const Json *single = json_get(j, "single");
    const int64_t count = json_count(single);
    for (int64_t i = 0; i < count; i++) {
        if (!json_get(json_at(single, i), "Sequence")) continue;
        if (i == 1) p->t->before = template_token(j, json_at(single, 0));
        if (i == count - 2) p->t->behind = template_token(j, json_at(single, count - 1));
    }
    return ERR_OK;
}

/* Unknown ones are not waved through. */
static Err pass_over(Parts *p, const Json *j)
{
    (void)p, (void)j;
    return ERR_OK;
}

/* ---- all of them ---- */

#define BYTE_LEVEL "add_prefix_space trim_offsets use_regex"
#define METASPACE "replacement prepend_scheme add_prefix_space split str_rep"

static const struct {
    const char *where, *type, *members; /* besides `type` */
    Err (*load)(Parts *p, const Json *j);
} supported[] = {
    { "normalizer", "NFC", "", load_nfc },
    { "normalizer", "Prepend", "prepend", load_prepend },
    { "normalizer", "Replace", "pattern content", load_replace },
    { "pre_tokenizer", "Split", "pattern behavior invert", load_split },
    { "pre_tokenizer", "Digits", "individual_digits", load_digits },
    { "pre_tokenizer", "ByteLevel", BYTE_LEVEL, load_byte_level },
    { "pre_tokenizer", "Metaspace", METASPACE, load_metaspace },
    { "post_processor", "ByteLevel", BYTE_LEVEL, pass_over },
    { "post_processor", "TemplateProcessing", "single pair special_tokens", load_template },
    { "decoder", "ByteLevel", BYTE_LEVEL, decode_byte_level },
    { "decoder", "Replace", "pattern content", decode_replace },
    { "decoder", "Metaspace", METASPACE, decode_metaspace },
    { "decoder", "ByteFallback", "", decode_bytes },
    { "decoder", "Fuse", "", decode_fuse },
    { "decoder", "Strip", "content start stop", decode_strip },
};

/* The part itself, which is no Sequence. */
static Err load_one(Parts *p, const char *where, const char *type, const Json *j)
{
    char text[64], members[96];
    snprintf(text, sizeof text, "the %s '%.32s'", where, type);
    for (size_t i = 0; i < sizeof supported / sizeof *supported; i++) {
        if (strcmp(supported[i].where, where) != 0 || strcmp(supported[i].type, type) != 0) continue;
        snprintf(members, sizeof members, "type %s", supported[i].members);
        TRY(json_check_members(j, text, members));
        if (p->byte_level && strcmp(where, "pre_tokenizer") == 0)
            return err_set(ERR_DATA, "%s is not supported behind ByteLevel", text);
        Err err = supported[i].load(p, j);
        return err ? err_prefix(err, "%s", text) : ERR_OK;
    }
    err_set(ERR_DATA, "%s is not supported", text);
    return err_hint("supported is what byte-level BPE has, and BPE that was made from SentencePiece's");
}

/* `list`: the name of a Sequence's members. */
static Err load_part(Parts *p, const char *where, const char *list, const Json *j)
{
    char members[32];
    if (json_is_absent(j)) return ERR_OK;
    const char *type = json_text(json_get(j, "type"), NULL);
    if (!type) return err_set(ERR_DATA, "the %s has no type", where);
    if (strcmp(type, "Sequence") != 0) return load_one(p, where, type, j);
    const Json *parts = json_get(j, list);
    snprintf(members, sizeof members, "type %s", list);
    TRY(json_check_members(j, "a Sequence", members));
    if (!json_is_array(parts)) return err_set(ERR_DATA, "a Sequence has no list '%s'", list);
    for (int64_t i = 0; i < json_count(parts); i++) {
        if (json_is_absent(json_at(parts, i))) return err_set(ERR_DATA, "a Sequence of '%s' has a hole", list);
        TRY(load_part(p, where, list, json_at(parts, i)));
    }
    return ERR_OK;
}

static Err check_decoder(const Parts *p)
{
    if (p->byte_level && p->decodes)
        return err_set(ERR_DATA, "a decoder other than ByteLevel is not supported with the pre_tokenizer ByteLevel");
    if (!p->byte_level && p->byte_decoder)
        return err_set(ERR_DATA, "the decoder ByteLevel is not supported without the pre_tokenizer ByteLevel");
    if (!p->byte_level && !p->decodes) return err_set(ERR_DATA, "there is neither ByteLevel nor a decoder");
    return ERR_OK;
}

Err tokenizer_load_parts(Tokenizer *t, const Json *j, bool *characters)
{
    Parts p = { .t = t };
    t->before = t->behind = -1;
    if (!json_is_absent(json_get(j, "truncation"))) return err_set(ERR_DATA, "truncation is not supported");
    if (!json_is_absent(json_get(j, "padding"))) return err_set(ERR_DATA, "padding is not supported");
    TRY(add_stage(&p, (Stage){ .kind = STAGE_ADDED, .set = &t->sets[0] }));
    TRY(load_part(&p, "normalizer", "normalizers", json_get(j, "normalizer")));
    t->normalizers = t->stage_count - 1;
    TRY(add_stage(&p, (Stage){ .kind = STAGE_ADDED, .set = &t->sets[1] }));
    TRY(load_part(&p, "pre_tokenizer", "pretokenizers", json_get(j, "pre_tokenizer")));
    TRY(load_part(&p, "post_processor", "processors", json_get(j, "post_processor")));
    TRY(load_part(&p, "decoder", "decoders", json_get(j, "decoder")));
    TRY(check_decoder(&p));
    TRY(setup_array(&t->mem, t->spell_count, &t->spell));
    if (t->spell_count) memcpy(t->spell, p.spell, (size_t)t->spell_count * sizeof *t->spell);
    *characters = !p.byte_level;
    return ERR_OK;
}

Err tokenizer_plain_parts(Tokenizer *t)
{
    Parts p = { .t = t };
    t->before = t->behind = -1;
    return load_byte_level(&p, NULL);
}

/* ---- the texts of tokens ---- */

Err tokenizer_copy_text(Tokenizer *t, const char *text, int64_t size, TokenText *out)
{
    char *bytes;
    TRY(setup_array(&t->mem, size + 1, &bytes));
    if (size) memcpy(bytes, text, (size_t)size); /* (the empty text may be NULL) */
    *out = (TokenText){ bytes, (int32_t)size };
    return ERR_OK;
}

/* The byte that <0xNN> stands for; -1: it is another token. */
static int spelled_byte(TokenText t)
{
    char digits[3] = "", *end;
    if (t.size != 6 || memcmp(t.bytes, "<0x", 3) != 0 || t.bytes[5] != '>') return -1;
    memcpy(digits, t.bytes + 3, 2);
    const long byte = strtol(digits, &end, 16);
    return *end || strchr("+- ", digits[0]) ? -1 : (int)byte;
}

static Err replace_in(Tokenizer *t, const Stage *stages, int count, TokenText token, TokenText *out)
{
    StageBuffer buffers[2] = { { .most = token_most(token.size) }, { .most = token_most(token.size) } };
    const char *text = token.bytes;
    int64_t size = token.size;
    Err err = ERR_OK;
    for (int i = 0; i < count && !err; i++)
        err = stage_rewrite(&stages[i], &text, &size, PLACE_INSIDE, &buffers[i % 2]);
    *out = token;
    const bool same = !err && size == token.size && memcmp(text, token.bytes, (size_t)size) == 0;
    if (!err && !same) err = tokenizer_copy_text(t, text, size, out);
    free(buffers[0].text);
    free(buffers[1].text);
    return err;
}

static Err spell_one(Tokenizer *t, int32_t id)
{
    static const Stage nothing = { .kind = STAGE_REPLACE, .to = { "", 0 } };
    const TokenText token = t->text[id];
    TokenText *text = &t->text[id], *first = t->join == JOIN_PLAIN ? text : &t->first[id];
    TRY(replace_in(t, t->spell, t->spell_count, token, text));
    const int byte = t->spell_bytes ? spelled_byte(*text) : -1;
    if (byte >= 0) {
        const char character = (char)byte;
        TRY(tokenizer_copy_text(t, &character, 1, text));
    }
    *first = *text;
    if (t->join == JOIN_STRIP && text->size > 0 && text->bytes[0] == ' ')
        *first = (TokenText){ text->bytes + 1, text->size - 1 };
    if (t->join == JOIN_MARKS && byte < 0) {
        Stage without = nothing;
        without.from = t->spell[0].from;
        TRY(replace_in(t, &without, 1, token, first));
    }
    return ERR_OK;
}

Err tokenizer_spell(Tokenizer *t)
{
    t->first = t->text;
    if (!t->bpe.characters) return ERR_OK;
    if (t->join != JOIN_PLAIN) TRY(setup_array(&t->mem, t->vocab, &t->first));
    for (int64_t i = 0; i < t->added_count; i++) t->text[t->added[i].id] = t->added[i].text; /* normalized */
    for (int32_t id = 0; id < t->vocab; id++)
        if (t->text[id].bytes) TRY(spell_one(t, id));
    return ERR_OK;
}
