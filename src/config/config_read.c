/*
 * Reading: inih splits lines into section, key and value; everything it would pass over in silence is caught
 * here, where each line goes by before inih sees it: lines that are neither, broken or unknown section
 * heads, lines longer than inih's buffer (it would cut them; it gets a placeholder instead, and the value is
 * taken from the text). Leading blanks are removed, because inih takes an indented line for a continuation.
 * A mistake never ends the reading: it adds a line to the report, and the key keeps its default.
 */
#include <ini.h>
#include <stdlib.h>
#include <string.h>

#include "config/config_reader.h"
#include "base/file.h"
#include "base/log.h"
#include "base/quantity.h"
#include "base/words.h"

/* ---- one value ---- */

/* Each takes the text, stores the value, or returns what is wrong with it (NULL: nothing). */

/* Steps and tokens are counted in powers of ten, whatever 64k is of a width or a sequence. */
static bool counts_in_tens(const ConfigKey *key)
{
    static const char *const sections[] = { "train", "optim", "checkpoint", "log" };
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (!strcmp(key->section, sections[i])) return strcmp(key->name, "micro_batch") != 0;
    return false;
}

/* "64k" of a size: one of two numbers, and the line that says the usual one. */
static const char *ask_which(const ConfigKey *key, int64_t value, char letter)
{
    static _Thread_local char why[200];
    double usual = (double)value;
    for (const char *at = "kMBT"; *at; at++) {
        usual *= 1.024;
        if (*at == letter || letter == 'K') break;
    }
    snprintf(why, sizeof why, "%lld or %.0f? write %s.%s=%.0f, or the other", (long long)value, usual, key->section,
             key->name, usual);
    return why;
}

static const char *parse_int(const ConfigKey *key, const char *text, int64_t *out)
{
    static _Thread_local char why[80];
    int64_t value = 0;
    char letter;
    if (key->has_auto && !strcmp(text, "auto")) return *out = CONFIG_AUTO, NULL;
    const Quantity found = quantity_whole(text, &value, &letter);
    if (found == QUANTITY_NONE) return key->has_auto ? "not an integer, nor auto" : "not an integer";
    if (found == QUANTITY_WHOLE && letter && !counts_in_tens(key)) return ask_which(key, value, letter);
    snprintf(why, sizeof why, "must lie between %lld and %lld", (long long)key->int_low, (long long)key->int_high);
    if (found == QUANTITY_BEYOND || value < key->int_low || value > key->int_high) return why;
    *out = value;
    return NULL;
}

/* Unit in which a key counts time, in seconds; 0: it counts none. */
static double seconds_of(const ConfigKey *key)
{
    if (text_ends(key->name, "_minutes")) return 60;
    return text_ends(key->name, "_s") ? 1 : 0;
}

static const char *parse_real(const ConfigKey *key, const char *text, double *out)
{
    static _Thread_local char why[80];
    const double unit = seconds_of(key);
    char *end;
    double value = strtod(text, &end);
    if (key->has_auto && !strcmp(text, "auto")) return *out = -1, NULL;
    if (end == text || *end) {
        if (!unit || !quantity_seconds(text, &value)) return unit ? "not a number, or such as 2h30m" : "not a number";
        value /= unit;
    }
    snprintf(why, sizeof why, "must lie between %g and %g", key->real_low, key->real_high);
    if (!(value >= key->real_low && value <= key->real_high)) return why;
    *out = value == 0 ? 0 : value; /* no -0: it would print as '-0' */
    return NULL;
}

static bool parse_truth(const char *text, int *out)
{
    static const char *const words[][2] = { { "false", "true" }, { "no", "yes" }, { "off", "on" }, { "0", "1" } };
    for (int i = 0; i < 8; i++) {
        if (strcmp(text, words[i / 2][i % 2]) != 0) continue;
        *out = i % 2;
        return true;
    }
    return false;
}

static const char *parse_bool(const ConfigKey *key, const char *text, int *out)
{
    if (key->has_auto && strcmp(text, "auto") == 0) {
        *out = -1;
        return NULL;
    }
    if (parse_truth(text, out)) return NULL;
    return key->has_auto ? "must be true, false or auto" : "must be true or false";
}

static bool find_choice(const ConfigKey *key, const char *text, unsigned *out)
{
    const size_t n = strlen(text);
    unsigned index = 0;
    for (const char *word = key->choices; *word; word += strcspn(word, " ") + 1, index++) {
        if (n != strcspn(word, " ") || strncmp(word, text, n) != 0) continue;
        *out = index;
        return true;
    }
    return false;
}

/* All words for true and false are read, too, where a key has choices beside these. */
static const char *parse_pick(const ConfigKey *key, const char *text, unsigned *out)
{
    static _Thread_local char why[160];
    int on;
    if (find_choice(key, text, out)) return NULL;
    if (parse_truth(text, &on) && find_choice(key, on ? "true" : "false", out)) return NULL;
    snprintf(why, sizeof why, "must be one of: %.*s", (int)strlen(key->choices) - 1, key->choices);
    return why;
}

static bool is_quoted(const char *text)
{
    const size_t n = strlen(text);
    return n > 1 && (*text == '"' || *text == '\'') && text[n - 1] == *text;
}

/* The next '~' that a path begins with: the text, or one of its words, also behind '@', ',' or a quote. NULL: none. */
static const char *find_home(const char *text, const char *from)
{
    for (const char *at = from; (at = strchr(at, '~')); at++)
        if (at == text || strchr(" @,'\"", at[-1])) return at;
    return NULL;
}

/* "~/" is the home folder, as in a shell, which leaves alone what it reads of "run.dir=~/x". Versions that did so, too,
 * made a folder '~': where the path as it is written exists, it may be the one that is meant. */
static const char *expand_home(ConfigReader *r, const char *text, const char **out)
{
    const char *home = getenv("HOME"), *from = text, *whole = "";
    for (const char *at; (at = find_home(text, from)); from = at + 1) {
        if (at[1] != '/') return "'~' is the home folder before '/' alone: write the whole path, or './~...'";
        if (!home || *home != '/') return "HOME is not set, so that '~' has no meaning: write the whole path";
        whole = config_keep(r, "%s%.*s%s", whole, (int)(at - from), from, home);
    }
    *out = config_keep(r, "%s%s", whole, from);
    if (*text != '~' || !file_exists(text)) return NULL;
    return config_keep(r, "'%s' or './%s', which exists? write the one that is meant", *out, text);
}

/* A text that a run wrote is taken as it is, and no shell leaves a comment in a word. */
static const char *parse_text(ConfigReader *r, ConfigId id, const char *text, const char **out)
{
    const bool words = id == CFG_data_train || id == CFG_data_valid;
    const char *why = config_text_fault(text);
    if (!why && r->bare && config_seems_commented(text)) why = "must not contain '#' after a blank";
    if (!why && !r->written && !words && is_quoted(text)) why = "leave the quotes out";
    if (!why && !r->written && id != CFG_run_name) return expand_home(r, text, out);
    if (!why) *out = config_keep(r, "%s", text);
    return why;
}

static const char *parse_value(ConfigReader *r, ConfigId id, const char *text)
{
    const ConfigKey *key = config_key(id);
    void *at = (char *)r->config + key->offset;
    switch (key->kind) {
    case CONFIG_INT: return parse_int(key, text, at);
    case CONFIG_REAL: return parse_real(key, text, at);
    case CONFIG_BOOL: return parse_bool(key, text, at);
    case CONFIG_PICK: return parse_pick(key, text, at);
    case CONFIG_TEXT: return parse_text(r, id, text, at);
    }
    return "of no known kind";
}

static void place_text(const ConfigReader *r, ConfigOrigin o, char *out, int size_bytes)
{
    if (o.kind == ORIGIN_FILE) snprintf(out, (size_t)size_bytes, "%s:%d", r->config->path, o.line);
    else snprintf(out, (size_t)size_bytes, "command line");
}

/* "model.layers" in a file: the section stands in a line of its own. False: that is no key either. */
static bool suggest_section(const char *name, char out[CONFIG_SUGGEST_BYTES])
{
    char section[16];
    const char *dot = strchr(name, '.');
    ConfigId id;
    if (!dot || dot - name >= (int)sizeof section) return false;
    snprintf(section, sizeof section, "%.*s", (int)(dot - name), name);
    if (!config_find(section, dot + 1, &id)) return false;
    snprintf(out, CONFIG_SUGGEST_BYTES, "in a file it is the line '%s = ...' under a line [%s]", dot + 1, section);
    return true;
}

static void complain_unknown(ConfigReader *r, const char *place, const char *section, const char *name,
                             const char *value)
{
    char meant[CONFIG_SUGGEST_BYTES] = "";
    if (!config_report_is_full(r) && !suggest_section(name, meant))
        config_suggest(section, name, *section ? value : NULL, meant);
    config_complain(r, "%s: unknown key '%s%s%s'%s%s", place, section, *section ? "." : "", name, *meant ? "; " : "",
                    meant);
}

/* '#' begins a comment where it begins a line only; quotes are part of a value. */
static const char *value_hint(const ConfigKey *key, const char *text, ConfigOrigin origin)
{
    if (origin.kind == ORIGIN_FILE && (config_seems_commented(text) || strstr(text, "\t#")))
        return key->kind == CONFIG_TEXT ? "; a comment behind a value begins with ';', even an empty one, before "
                                          "which '#' is part of the value"
                                        : "; a comment behind a value begins with ';'";
    return key->kind != CONFIG_TEXT && is_quoted(text) ? "; leave the quotes out" : "";
}

static void set_value(ConfigReader *r, const char *section, const char *name, const char *text, ConfigOrigin origin)
{
    ConfigId id;
    char place[512];
    place_text(r, origin, place, sizeof place);
    if (!config_find(section, name, &id)) {
        complain_unknown(r, place, section, name, text);
        return;
    }
    ConfigOrigin *before = &r->config->origin[id];
    if (before->kind == ORIGIN_FILE && origin.kind == ORIGIN_FILE) {
        config_complain(r, "%s: %s.%s is given twice, first in line %d", place, section, name, before->line);
        return;
    }
    const char *why = parse_value(r, id, text);
    if (why)
        config_complain(r, "%s: %s.%s = '%s': %s%s", place, section, name, text, why,
                        value_hint(config_key(id), text, origin));
    r->bad[id] = why != NULL;
    *before = origin;
}

/* ---- the file ---- */

typedef struct {
    ConfigReader *r;
    const char *next; /* rest of the text */
    int line;
    bool expected, handled; /* the last line should give, has given, a key */
    bool skip_section;      /* keys of an unknown section */
    bool commented;         /* the last line has a comment, so that its value ends before it */
    char *long_value;       /* of a line that inih cannot take whole; else NULL */
} IniText;

static const char *const blanks = " \t\r\n\v\f";

static void complain_line(const IniText *t, const char *what)
{
    config_complain(t->r, "%s:%d: %s", t->r->config->path, t->line, what);
}

static void finish_line(IniText *t)
{
    if (t->expected && !t->handled) complain_line(t, "neither [section] nor key = value");
    t->expected = t->handled = false;
    free(t->long_value);
    t->long_value = NULL;
}

/* A line "[name]": is there such a section? Returns its bytes without a comment, which may be too long for inih. */
static int section_line(IniText *t, const char *line, int length)
{
    char name[64];
    const char *end = memchr(line, ']', (size_t)length), *rest;
    t->skip_section = true;
    if (!end) {
        complain_line(t, "section without ']'");
        return length;
    }
    for (rest = end + 1; rest < line + length && strchr(blanks, *rest);) rest++;
    if (rest < line + length && *rest != ';' && *rest != '#') /* inih would pass over it */
        complain_line(t, "only a comment may stand behind [section]");
    snprintf(name, sizeof name, "%.*s", (int)(end - line) - 1, line + 1);
    for (int i = 0; i < CFG_COUNT && t->skip_section; i++)
        t->skip_section = strcmp(config_key((ConfigId)i)->section, name) != 0;
    const char *nearest = t->skip_section && !config_report_is_full(t->r) ? config_nearest_section(name) : NULL;
    if (t->skip_section)
        config_complain(t->r, "%s:%d: unknown section '[%s]'%s%s%s", t->r->config->path, t->line, name,
                        nearest ? "; did you mean '[" : "", nearest ? nearest : "", nearest ? "]'?" : "");
    return (int)(end - line) + 1;
}

/* Keeps the value of a long line aside and gives inih "key = -" instead. */
static void long_line(IniText *t, const char *line, int length, char *out, int size_bytes)
{
    int key = 0;
    while (key < length && line[key] != '=' && line[key] != ':') key++;
    snprintf(out, (size_t)size_bytes, ";\n");
    if (key == length || key > 64) return; /* no key: finish_line complains */
    t->long_value = strndup(line + key + 1, (size_t)(length - key - 1));
    if (!t->long_value) t->r->memory = ERR_MEMORY;
    else snprintf(out, (size_t)size_bytes, "%.*s= -\n", key, line);
}

static bool has_comment(const char *line, int length)
{
    for (int i = 1; i < length; i++)
        if (line[i] == ';' && strchr(blanks, line[i - 1])) return true;
    return false;
}

/* inih asks for the next line. */
static char *next_line(char *out, int size_bytes, void *stream)
{
    IniText *t = stream;
    finish_line(t);
    if (!*t->next) return NULL;
    t->line++;
    t->next += strspn(t->next, " \t");
    const char *line = t->next;
    int length = (int)strcspn(line, "\n");
    t->next += length + (line[length] == '\n');

    if (line[0] == '[') length = section_line(t, line, length);
    else t->expected = length > 0 && !strchr("\r;#", line[0]);
    t->commented = has_comment(line, length);
    if (length <= size_bytes - 2) snprintf(out, (size_t)size_bytes, "%.*s\n", length, line);
    else if (t->expected) long_line(t, line, length, out, size_bytes);
    else snprintf(out, (size_t)size_bytes, ";\n"); /* a long comment */
    return out;
}

/* Trims like inih: cuts at a comment and removes the blanks around. */
static const char *trim_value(char *text)
{
    text += strspn(text, blanks);
    for (char *p = text; *p; p++)
        if (*p == ';' && (p == text || strchr(blanks, p[-1]))) *p = 0;
    size_t n = strlen(text);
    while (n && strchr(blanks, text[n - 1])) text[--n] = 0;
    return text;
}

static int one_key(void *user, const char *section, const char *name, const char *value)
{
    IniText *t = user;
    t->handled = true;
    if (t->long_value) value = trim_value(t->long_value);
    t->r->bare = !t->r->written && !t->commented;
    if (!t->skip_section) set_value(t->r, section, name, value, (ConfigOrigin){ ORIGIN_FILE, t->line });
    t->r->bare = false;
    return 1;
}

/* inih's callbacks have one user pointer for lines and one for keys: both are the IniText. */
void config_read_text(ConfigReader *r, const char *text)
{
    IniText t = { .r = r, .next = text };
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) t.next += 3; /* byte order mark */
    int before = r->mistakes, bad_line = ini_parse_stream(next_line, &t, one_key, &t);
    free(t.long_value);
    if (bad_line && r->mistakes == before) config_complain(r, "%s:%d: not understood", r->config->path, bad_line);
}

Err config_read_file(ConfigReader *r, const char *path)
{
    char *text;
    int64_t size_bytes;
    TRY_AS(ERR_CONFIG, file_read_all(path, CONFIG_FILE_MAX_BYTES, &text, &size_bytes));
    if ((int64_t)strlen(text) != size_bytes) config_complain(r, "%s: not a text file: it holds a 0 byte", path);
    else config_read_text(r, text);
    free(text);
    return ERR_OK;
}

/* ---- the command line ---- */

/* A word that is no section.key=value: a key without its section, a file without --config, or nothing known. */
static void complain_word(ConfigReader *r, const char *word)
{
    char name[80], meant[CONFIG_SUGGEST_BYTES] = "";
    const size_t n = strcspn(word, "=");
    snprintf(name, sizeof name, "%.*s", (int)n, word);
    if (text_ends(word, ".ini")) snprintf(meant, sizeof meant, "did you mean '--config %.200s'?", word);
    else if (word[n] && !config_report_is_full(r)) config_suggest("", name, word + n + 1, meant);
    config_complain(r, "command line: '%s' is not section.key=value%s%s", word, *meant ? "; " : "", meant);
}

void config_read_override(ConfigReader *r, const char *text)
{
    char *copy = strdup(text);
    if (!copy) {
        r->memory = ERR_MEMORY;
        return;
    }
    char *equals = strchr(copy, '='), *dot = strchr(copy, '.');
    if (!equals || !dot || dot > equals) {
        complain_word(r, text);
    } else {
        *equals = *dot = 0;
        size_t n = strlen(equals + 1);
        while (n && strchr(blanks, equals[n])) equals[n--] = 0;
        set_value(r, copy, dot + 1, equals + 1 + strspn(equals + 1, blanks), (ConfigOrigin){ ORIGIN_COMMAND_LINE, 0 });
    }
    free(copy);
}

/* ---- texts of older programs ---- */

static void set_before(ConfigReader *r, ConfigId id, const char *value)
{
    const ConfigKey *key = config_key(id);
    if (r->config->origin[id].kind == ORIGIN_DEFAULT)
        set_value(r, key->section, key->name, value, (ConfigOrigin){ ORIGIN_FILE, 0 });
}

/* Programs that had no train.eval_samples wrote down 1 and 1f1b for what was left to layout, vpp and slices. Given so,
 * it would have been refused. (No word of a command line has been read yet, which may have that key.) */
static void open_pipeline(Config *c)
{
    const ConfigOrigin *vpp = &c->origin[CFG_parallel_vpp], *schedule = &c->origin[CFG_parallel_schedule];
    if (c->origin[CFG_train_eval_samples].kind != ORIGIN_DEFAULT) return;
    if (vpp->kind == ORIGIN_FILE && c->parallel.vpp == 1) c->parallel.vpp = 0;
    if (schedule->kind == ORIGIN_FILE && !strcmp(c->parallel.schedule, "1f1b")) c->parallel.schedule = "auto";
}

void config_read_before(ConfigReader *r)
{
    ConfigId self;
    open_pipeline(r->config);
#define ANY(section, key) self = CFG_##section##_##key;
#define BEFORE(value) set_before(r, self, value);
#include "config/config.def"
}
