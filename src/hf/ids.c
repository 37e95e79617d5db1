/* See ids.h. */
#include "hf/ids.h"

#include <limits.h>

#include "base/file.h"
#include "base/log.h"
#include "hf/folder.h"

enum { NO_ID = -1 };

/* A config.json of a model with images may have them in that of its text model alone. */
static const Json *member(const Json *root, const char *key)
{
    const Json *here = json_get(root, key);
    return here && !json_is_null(here) ? here : json_get(json_get(root, "text_config"), key);
}

/* A number below 0 is how some files say none. */
static int64_t one_id(const char *path, const Json *root, const char *key)
{
    const Json *v = member(root, key);
    if (v && !json_is_null(v) && !json_is_int(v)) log_warn("%s: '%s' is no id of a token: it is left out", path, key);
    return json_int(v, NO_ID) < 0 ? NO_ID : json_int(v, NO_ID);
}

static void read_ends(const char *path, const Json *root, HfIds *out)
{
    static const char key[] = "eos_token_id";
    const Json *v = member(root, key);
    if (!json_is_array(v)) {
        out->ends[0] = one_id(path, root, key);
        out->end_count = out->ends[0] >= 0;
        return;
    }
    int64_t left_out = 0;
    for (int64_t i = 0; i < json_count(v); i++) {
        const int64_t id = json_int(json_at(v, i), NO_ID);
        if (id >= 0 && out->end_count < HF_ENDS_MOST) out->ends[out->end_count++] = id;
        else left_out++;
    }
    if (left_out)
        log_warn("%s: of the %lld ids in '%s' %lld are left out: no ids of tokens, or more than %d", path,
                 (long long)json_count(v), key, (long long)left_out, HF_ENDS_MOST);
}

Err hf_ids_read(const char *path, HfIds *out)
{
    Json *root;
    *out = (HfIds)HF_NO_IDS;
    TRY_AS(ERR_CKPT, json_read_file(path, HF_JSON_MOST, &root));
    out->begin = one_id(path, root, "bos_token_id");
    out->pad = one_id(path, root, "pad_token_id");
    read_ends(path, root, out);
    json_free(root);
    return ERR_OK;
}

bool hf_ids_end(const HfIds *x, int64_t id)
{
    for (int i = 0; i < x->end_count; i++)
        if (x->ends[i] == id) return true;
    return false;
}

void hf_ids_put_ends(JsonOut *j, const HfIds *x)
{
    static const char key[] = "eos_token_id";
    if (x->end_count == 0) json_put_null(j, key);
    if (x->end_count == 1) json_put_int(j, key, x->ends[0]);
    if (x->end_count <= 1) return;
    json_open(j, key, '[');
    for (int i = 0; i < x->end_count; i++) json_put_int(j, NULL, x->ends[i]);
    json_close(j, ']');
}

Err hf_ids_write(const HfIds *x, const char *folder)
{
    char text[256 + 24 * HF_ENDS_MOST], path[PATH_MAX];
    JsonOut j;
    json_out_init(&j, text, sizeof text);
    json_open(&j, NULL, '{');
    json_put_bool(&j, "_from_model_config", true);
    if (x->begin >= 0) json_put_int(&j, "bos_token_id", x->begin);
    if (x->end_count) hf_ids_put_ends(&j, x);
    if (x->pad >= 0) json_put_int(&j, "pad_token_id", x->pad);
    json_close(&j, '}');
    ASSERT(json_out_ok(&j));
    if (snprintf(path, sizeof path, "%s/generation_config.json", folder) >= (int)sizeof path)
        return err_set(ERR_STORAGE, "'%s': the path is too long", folder);
    TRY_AS(ERR_STORAGE, file_replace(path, text, j.used_bytes));
    return ERR_OK;
}
