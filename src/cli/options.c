/* See command.h. Words that begin with '-' are options, until "--"; a list takes all words up to the next. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "base/file.h"
#include "base/quantity.h"
#include "base/words.h"
#include "cli/command.h"

enum { MAX_OPTIONS = 32 };

typedef struct {
    const Command *c;
    const char *const *argv;
    int argc, at;
    bool given[MAX_OPTIONS];
} Reader;

static bool has_option(const Command *c, const char *name)
{
    for (int i = 0; i < c->option_count; i++)
        if (!strcmp(c->options[i].name, name)) return true;
    return false;
}

static bool is_option(const char *word) { return word[0] == '-' && word[1] == '-' && word[2]; }

static bool is_help(const char *word) { return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0; }

/* name: as it was written, without what follows '='. */
static Err unknown_option(const Command *c, const char *word)
{
    const char *names[MAX_OPTIONS], *name = word + strspn(word, "-");
    for (int i = 0; i < c->option_count; i++) names[i] = c->options[i].name;
    const char *nearest = word_nearest(name, names, c->option_count);
    const bool keys = c->rest && strstr(c->rest, "section.key=value");
    char meant[CONFIG_SUGGEST_BYTES];
    err_set(ERR_CONFIG, "'megatrain %s' has no option '%s'", c->name, word);
    if (nearest) return err_hint("did you mean '--%s'?", nearest);
    if (strchr(name, '.')) return err_hint("keys of the configuration are given as section.key=value, without '--'");
    if (keys && *config_suggest("", name, "VALUE", meant)) return err_hint("%s (keys are given without '--')", meant);
    return err_hint("megatrain %s --help", c->name);
}

/* "4k": of two numbers the reader chooses. */
static Err hint_of_letter(const Option *o, const char *text)
{
    int64_t tens;
    char letter;
    if (quantity_whole(text, &tens, &letter) != QUANTITY_WHOLE) return ERR_CONFIG;
    if (letter != 'k' && letter != 'K') return err_hint("--%s %lld", o->name, (long long)tens);
    return err_hint("--%s %lld, or --%s %lld", o->name, (long long)tens, o->name, (long long)tens / 1000 * 1024);
}

static Err read_int(const Option *o, const char *text)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno) {
        err_set(ERR_CONFIG, "--%s wants an integer, not '%s'", o->name, text);
        return hint_of_letter(o, text);
    }
    if ((double)value < o->low || (double)value > o->high)
        return err_set(ERR_CONFIG, "--%s must be %.17g to %.17g, not '%s'", o->name, o->low, o->high, text);
    *(int64_t *)o->out = value;
    return ERR_OK;
}

static Err read_real(const Option *o, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value))
        return err_set(ERR_CONFIG, "--%s wants a number, not '%s'", o->name, text);
    if (!(value >= o->low && value <= o->high))
        return err_set(ERR_CONFIG, "--%s must be %g to %g, not '%s'", o->name, o->low, o->high, text);
    *(double *)o->out = value;
    return ERR_OK;
}

/* --override A --override B is --override A,B. */
static Err join(const Option *o, const char *text)
{
    const char **out = o->out;
    const size_t used = *out == o->join ? strlen(o->join) : 0;
    const int n = snprintf(o->join + used, OPTION_JOIN_BYTES - used, "%s,%s", used ? "" : *out, text);
    if (n >= OPTION_JOIN_BYTES - (int)used) return err_set(ERR_CONFIG, "--%s: the list is too long", o->name);
    *out = o->join;
    return ERR_OK;
}

/* One value, behind '=' or the next word. */
static Err read_value(Reader *r, const Option *o, const char *equals)
{
    const char *text = equals ? equals + 1 : r->at < r->argc ? r->argv[r->at] : NULL;
    if (!text) return err_set(ERR_CONFIG, "--%s wants a value: --%s %s", o->name, o->name, o->value);
    if (!equals && is_option(text)) {
        err_set(ERR_CONFIG, "--%s wants a value: --%s %s", o->name, o->name, o->value);
        return err_hint("a value that begins with '-': --%s='%s'", o->name, text);
    }
    if (!equals) r->at++;
    if (equals && (!strcmp(text, "~") || !strncmp(text, "~/", 2)) && strcmp(o->value, "TEXT") != 0)
        return err_set(ERR_CONFIG, "--%s=%s: a shell knows '~' as the home folder only behind a blank", o->name, text),
               err_hint("--%s %s", o->name, text);
    if (o->kind == OPTION_INT) return read_int(o, text);
    if (o->kind == OPTION_REAL) return read_real(o, text);
    if (o->join && *(const char **)o->out) return join(o, text);
    *(const char **)o->out = text;
    return ERR_OK;
}

static Err read_list(Reader *r, const Option *o, const char *equals)
{
    Words *w = o->out;
    if (equals) return err_set(ERR_CONFIG, "--%s takes several values: --%s %s, not '='", o->name, o->name, o->value);
    w->items = r->argv + r->at;
    w->count = 0;
    while (r->at < r->argc && !is_option(r->argv[r->at]) && strcmp(r->argv[r->at], "--") != 0) {
        w->count++;
        r->at++;
    }
    if (w->count == 0) return err_set(ERR_CONFIG, "--%s wants at least one value: --%s %s", o->name, o->name, o->value);
    return ERR_OK;
}

static Err read_option(Reader *r, const char *word)
{
    char full[64]; /* has the dashes, and not the value */
    const char *equals = strchr(word, '='), *name = full + 2;
    snprintf(full, sizeof full, "%.*s", equals ? (int)(equals - word) : 60, word);
    int i = 0;
    while (i < r->c->option_count && strcmp(name, r->c->options[i].name) != 0) i++;
    if (i == r->c->option_count) return unknown_option(r->c, full);
    const Option *o = &r->c->options[i];
    if (r->given[i] && !o->join)
        return err_set(ERR_CONFIG, "--%s is given twice", name),
               o->kind == OPTION_LIST ? err_hint("it takes several: --%s %s", name, o->value) : ERR_CONFIG;
    r->given[i] = true;
    if (o->kind == OPTION_LIST) return read_list(r, o, equals);
    if (o->kind != OPTION_FLAG) return read_value(r, o, equals);
    if (equals) return err_set(ERR_CONFIG, "--%s takes no value", name);
    *(bool *)o->out = true;
    return ERR_OK;
}

/* first: of the other words, or NULL. */
static Err check_required(const Reader *r, const char *first)
{
    for (int i = 0; i < r->c->option_count; i++) {
        const Option *o = &r->c->options[i];
        if (!o->required || r->given[i]) continue;
        err_set(ERR_CONFIG, "'megatrain %s' needs --%s %s", r->c->name, o->name, o->value);
        if (first && text_ends(first, ".ini") && !strcmp(o->name, "config"))
            return err_hint("did you mean '--config %s'?", first);
        return err_hint("megatrain %s --help", r->c->name);
    }
    return ERR_OK;
}

Err options_read(const Command *c, int argc, const char *const *argv, const char **rest, int *rest_count, bool *help)
{
    Reader r = { .c = c, .argv = argv, .argc = argc };
    bool only_rest = false;
    ASSERT(c->option_count <= MAX_OPTIONS);
    *rest_count = 0;
    *help = false;
    for (int i = 0; i < argc && strcmp(argv[i], "--") && !*help; i++) *help = is_help(argv[i]);
    if (*help) return ERR_OK;
    while (r.at < argc) {
        const char *word = argv[r.at++];
        if (!only_rest && strcmp(word, "--") == 0) only_rest = true;
        else if (!only_rest && is_option(word)) TRY(read_option(&r, word));
        else if (!only_rest && word[0] == '-' && word[1]) return unknown_option(c, word);
        else rest[(*rest_count)++] = word;
    }
    if (*rest_count > 0 && !c->rest) {
        err_set(ERR_CONFIG, "'megatrain %s' does not know what to do with '%s'", c->name, rest[0]);
        return file_is_dir(rest[0]) && has_option(c, "run") ? err_hint("did you mean '--run %s'?", rest[0])
                                                            : err_hint("megatrain %s --help", c->name);
    }
    return check_required(&r, *rest_count ? rest[0] : NULL);
}
