/* See sets.h. */
#include "data/sets.h"

#include <string.h>

#include "base/words.h"

static Err refuse(const char *spec, const char *why, const char *word)
{
    err_set(ERR_CONFIG, "validation sets '%s': %s '%s'", spec, why, word);
    err_hint("give one data set, or several as `wiki: prefix  code: 0.7 prefix 0.3 prefix`");
    return ERR_CONFIG;
}

static Err add_name(Sets *s, const char *spec, const char *name)
{
    if (s->count == SETS_MAX) return refuse(spec, "there are too many; the first beyond 32 is", name);
    if (!*name) return refuse(spec, "there is no name before", ":");
    if (strlen(name) >= SET_NAME_BYTES) return refuse(spec, "longer than 39 bytes is", name);
    for (int i = 0; i < s->count; i++)
        if (strcmp(s->set[i].name, name) == 0) return refuse(spec, "two sets have the name", name);
    s->set[s->count++].name = name;
    return ERR_OK;
}

static const char blanks[] = " \t\n\v\f\r"; /* (what ends a word: base/words.h) */

/* Names, and what stands behind each: cut apart in a copy of the text. */
static Err parse(Sets *s, const char *spec, const char *behind[SETS_MAX])
{
    char *at;
    size_t n;
    TRY(setup_strdup(&s->mem, spec, &at));
    for (const char *text = at; *(at += strspn(at, blanks)); at += n) {
        n = word_length(at);
        if (at[n - 1] != ':') {
            if (s->count == 0) return refuse(spec, "there is no name before", spec);
            continue;
        }
        at[n - 1] = 0;
        if (at > text) at[-1] = 0;
        TRY(add_name(s, spec, at));
        behind[s->count - 1] = at + n;
    }
    for (int i = 0; i < s->count; i++)
        if (behind[i][strspn(behind[i], blanks)] == 0)
            return refuse(spec, "there is no data set behind", s->set[i].name);
    return ERR_OK;
}

static bool has_names(const char *spec)
{
    for (size_t n; *(spec += strspn(spec, blanks)); spec += n) {
        n = word_length(spec);
        if (spec[n - 1] == ':') return true;
    }
    return false;
}

static Err open_all(const DatasetOptions *o, Sets *s)
{
    const char *behind[SETS_MAX] = { o->spec };
    if (!(o->split && *o->split) && has_names(o->spec)) TRY(parse(s, o->spec, behind));
    else s->set[s->count++].name = "";
    for (int i = 0; i < s->count; i++) {
        DatasetOptions one = *o;
        one.spec = behind[i];
        NamedSet *set = &s->set[i];
        Err err = dataset_open(&one, &set->data);
        if (err && *set->name) return err_prefix(err, "validation set '%s'", set->name);
        TRY(err);
        set->order_crc = dataset_crc(set->data);
        set->has_content_crc = dataset_content_crc(set->data, &set->content_crc);
    }
    return ERR_OK;
}

Err sets_open(const DatasetOptions *o, Sets *out)
{
    *out = (Sets){ 0 };
    setup_init(&out->mem);
    Err err = open_all(o, out);
    if (err) sets_close(out);
    return err;
}

void sets_close(Sets *s)
{
    for (int i = 0; i < s->count; i++) dataset_close(s->set[i].data);
    setup_release(&s->mem);
    *s = (Sets){ 0 };
}

Err sets_find(const Sets *s, const char *name, const char *key, int *index)
{
    *index = 0;
    if (!*name) return ERR_OK;
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->set[i].name, name)) return *index = i, ERR_OK;
    err_set(ERR_CONFIG, "%s: there is no validation set '%s'", key, name);
    if (!*s->set[0].name) return err_hint("the only one has no name: leave %s empty", key);
    return err_hint("the first is '%s'; names stand in data.valid", s->set[0].name);
}
