/* See overrides.h. */
#include "train/overrides.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "train/data_id.h"

unsigned overrides_data(const Config *was, const Config *now)
{
    static const ConfigId orders[] = { CFG_data_seed, CFG_data_split, CFG_data_order, CFG_model_seq };
    unsigned parts = 0;
    if (now->may_differ[CFG_data_train]) parts |= DATA_FILES | DATA_ORDER;
    if (now->may_differ[CFG_data_tokenizer]) parts |= DATA_TOKENIZER;
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++)
        if (now->may_differ[orders[i]] && config_differs(was, now, orders[i])) parts |= DATA_ORDER;
    return parts;
}

/* The content of the data counts, not how its files are called. */
static bool differs(const Config *was, const Config *now, ConfigId id, unsigned data)
{
    if (id == CFG_data_train) return data & (DATA_FILES | DATA_ORDER);
    if (id == CFG_data_tokenizer) return data & DATA_TOKENIZER;
    return config_differs(was, now, id);
}

static void full_name(ConfigId id, char out[96])
{
    snprintf(out, 96, "%s.%s", config_key(id)->section, config_key(id)->name);
}

/* Does the checkpoint's run have this from an earlier start? */
static bool known(const CkptMeta *meta, const char *name)
{
    char words[128];
    snprintf(words, sizeof words, ": %s was '", name);
    return strstr(meta->overrides, words) != NULL;
}

static Err not_needed(const Config *now, ConfigId id, const char *name)
{
    char value[CONFIG_VALUE_BYTES];
    return err_set(ERR_CONFIG, "--override: '%s' does not differ from the checkpoint's: '%.600s'", name,
                   config_value(now, id, value)),
           err_hint("give it another value, or leave it out of --override");
}

static Err add(Overrides *o, const Config *was, const Config *now, ConfigId id, SetupArena *setup)
{
    char a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    const char *old = config_value(was, id, a), *new = config_value(now, id, b);
    char *was_text, *is_text;
    TRY(setup_strdup(setup, old, &was_text));
    TRY(setup_strdup(setup, strcmp(old, new) ? new : "the same, with other content", &is_text));
    o->item[o->count++] = (Override){ id, was_text, is_text };
    return ERR_OK;
}

static Err make_text(Overrides *o, const char *earlier, SetupArena *setup)
{
    char *text = NULL, *kept, name[96];
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the list of overrides");
    fputs(earlier, f);
    for (int i = 0; i < o->count; i++) {
        full_name(o->item[i].key, name);
        fprintf(f, "%sfrom step %lld on: %s was '%s' and is '%s'", *earlier || i ? "\n" : "", (long long)o->step, name,
                o->item[i].was, o->item[i].is);
    }
    if (fclose(f)) return err_set(ERR_MEMORY, "no memory for the list of overrides");
    Err err = setup_strdup(setup, text, &kept);
    free(text);
    o->text = kept;
    return err;
}

/* The data are read on where they were left: what train.global_batch says of the steps done must be what was done. */
static Err check_batches(const Config *was, const Config *now, const CkptMeta *meta)
{
    const int64_t samples = batch_ramp_samples(&now->derived.batch, meta->step);
    if (samples == meta->samples) return ERR_OK;
    err_set(ERR_CKPT,
            "train.global_batch = '%s' is %lld samples in the first %lld steps, the checkpoint's run had %lld",
            now->train.global_batch, (long long)samples, (long long)meta->step, (long long)meta->samples);
    if (was->derived.batch.count > 1 || now->derived.batch.count > 1)
        return err_hint("up to step %lld it must say what '%s' did", (long long)meta->step, was->train.global_batch);
    return err_hint("say what was done and what is to come: train.global_batch=%s*%lld,%s", was->train.global_batch,
                    (long long)meta->step, now->train.global_batch);
}

Err overrides_find(Overrides *o, const Config *was, const Config *now, const CkptMeta *meta, unsigned data,
                   SetupArena *setup)
{
    char name[96];
    *o = (Overrides){ .step = meta->step + 1 };
    TRY(check_batches(was, now, meta));
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigId id = (ConfigId)i;
        if (!now->may_differ[i]) continue;
        full_name(id, name);
        if (differs(was, now, id, data)) TRY(add(o, was, now, id, setup));
        else if (!known(meta, name)) return not_needed(now, id, name);
    }
    return make_text(o, meta->overrides, setup);
}

Err overrides_none(const Config *now)
{
    char name[96];
    for (int i = 0; i < CFG_COUNT; i++) {
        if (!now->may_differ[i]) continue;
        full_name((ConfigId)i, name);
        return err_set(ERR_CONFIG, "--override: there is no checkpoint that '%s' could differ from", name),
               err_hint("a run that begins takes all its keys as they are: leave --override out");
    }
    return ERR_OK;
}

void overrides_say(const Overrides *o)
{
    char name[96];
    for (int i = 0; i < o->count; i++) {
        full_name(o->item[i].key, name);
        log_info("from step %lld on: %s was '%s' and is '%s'", (long long)o->step, name, o->item[i].was, o->item[i].is);
    }
}
