/* See going_on.h. */
#include "cli/going_on.h"

#include <string.h>

#include "ckpt/ckpt.h"

typedef struct {
    SetupArena setup;
    CkptMeta meta;
} Kept;

static Err read_meta(const char *path, void *kept)
{
    Kept *k = kept;
    return ckpt_meta(path, &k->setup, &k->meta);
}

static Err read_config(const Kept *k, Config *was)
{
    const Err err = config_read(was, (ConfigSource){ .path = "the checkpoint's configuration",
                                                     .text = k->meta.config,
                                                     .earlier = true,
                                                     .compared = true,
                                                     .world_size = CONFIG_ANY_WORLD });
    if (!err) return ERR_OK;
    config_release(was);
    return err_as(err, ERR_CKPT);
}

Err going_on(const Config *c, Config *was, int64_t *step, bool *found)
{
    const char *how = c->checkpoint.resume;
    Kept k = { 0 };
    Err err = ERR_OK;
    *found = false;
    if (!strcmp(how, "none")) return ERR_OK;
    setup_init(&k.setup);
    if (!strcmp(how, "auto")) err = ckpt_visit_newest(c->run.dir, read_meta, &k, found);
    else err = read_meta(how, &k), *found = true;
    if (!err && *found) err = read_config(&k, was);
    *found = *found && !err;
    *step = k.meta.step;
    setup_release(&k.setup);
    return err;
}
