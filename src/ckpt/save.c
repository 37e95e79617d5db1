/*
 * The commit protocol; see ckpt.h for its steps. Rank 0 does everything that concerns the folder as a whole;
 * after each part all ranks agree on its outcome, so that none waits for another that has given up.
 *
 * What comes after the commit (LATEST, removing others: retain.c) cannot undo it: a failure there is a warning.
 */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/log.h"
#include "base/units.h"
#include "ckpt/folder.h"
#include "ckpt/pieces.h"

enum { NAME_ROOM = 96, MESSAGE_MAX = 1024 };

/* The folders of one save. */
typedef struct {
    char temp[PATH_MAX], final[PATH_MAX], old[PATH_MAX];
    bool moved; /* what was called `final` is called `old` now */
} Names;

/* ---- opening ---- */

static Err check_names(const ParamRegistry *reg)
{
    for (int i = 0; i < reg->count; i++)
        if (strpbrk(reg->items[i].name, "#/"))
            return err_set(ERR_INTERNAL, "parameter name '%s' has '#' or '/', which keys of a checkpoint use",
                           reg->items[i].name);
    return ERR_OK;
}

static Err allocate(Ckpt *c, SetupArena *setup)
{
    int size = c->o.world->size;
    c->text_bytes = 6 * c->o.meta_bytes + 8192; /* JSON escapes make a byte six */
    TRY(pieces_open(c, setup));
    TRY(setup_array(setup, CHUNK_BYTES, &c->chunk));
    TRY(setup_array(setup, c->text_bytes, &c->text));
    TRY(setup_array(setup, size, &c->file_bytes));
    TRY(setup_array(setup, size, &c->header_bytes));
    TRY(setup_array(setup, size, &c->rank_pieces));
    TRY(setup_array(setup, c->o.params->whole->count, &c->shifts));
    TRY(pieces_measure(c));
    return setup_array(setup, c->crc_count + c->piece_count, &c->crcs);
}

/* All ranks' outcome of a part: ERR_OK, or this rank's failure, or one that says whose it was. */
static Err agree(Ckpt *c, Err mine)
{
    int64_t worst = mine ? (int64_t)mine << 32 | c->o.world->rank : 0;
    char why[MESSAGE_MAX];
    snprintf(why, sizeof why, "%s", mine ? err_message() : "");
    TRY(comm_max_i64(c->o.comm, c->o.stream, &worst, 1, NULL));
    if (!worst) return ERR_OK;
    Err code = mine ? mine : (Err)(worst >> 32);
    if (code == ERR_IO) code = ERR_STORAGE;
    if (mine) return err_set(code, "%s", why);
    return err_elsewhere(err_set(code, "rank %lld failed", (long long)(worst & 0xFFFFFFFF)));
}

/* Removes what an interrupted save left: temporary folders, and `olds`, step-N.old where step-N is in place. What
 * cannot be removed is in nobody's way, since names are unique; of what this run leaves itself, whoever left it has
 * warned. */
static Err sweep(Ckpt *c, bool olds)
{
    DIR *d = opendir(c->folder);
    Err err = ERR_OK;
    if (!d) return err_set(ERR_IO, "cannot read folder '%s': %m", c->folder);
    for (struct dirent *entry; !err && (entry = readdir(d));) {
        char path[PATH_MAX], final[PATH_MAX];
        CkptEntry e;
        bool remove = entry_is_temporary(entry->d_name);
        if (snprintf(path, sizeof path, "%s/%s", c->folder, entry->d_name) >= (int)sizeof path) continue;
        if (olds && entry_parse(entry->d_name, &e) && e.old) {
            err = entry_path(final, c->folder, (CkptEntry){ e.step, false });
            remove = !err && file_is_dir(final);
        }
        if (remove && file_remove_tree(path) && !c->swept)
            log_warn("%s, what an earlier save left; saving goes on", err_message());
    }
    closedir(d);
    c->swept = true;
    return err;
}

static Err open_folder(Ckpt *c, SetupArena *setup)
{
    if (c->o.world->rank) return ERR_OK;
    if (getrandom(&c->nonce, sizeof c->nonce, 0) != (ssize_t)sizeof c->nonce)
        return err_set(ERR_INTERNAL, "no random number for the names of temporary folders: %m");
    c->nonce &= INT64_MAX;
    if (file_exists(c->folder)) TRY(file_check_link(c->folder));
    if (file_is_dir(c->folder)) TRY(sweep(c, false)); /* (the run may have resumed from a step-N.old) */
    return c->o.keep ? retain_open(c, setup) : ERR_OK;
}

/* An upper bound of what the manifest will take. */
static int64_t manifest_most(const Ckpt *c)
{
    return c->text_bytes + c->piece_count * (PARAM_NAME_MAX + 408) +
           c->o.params->whole->count * (PARAM_NAME_MAX + 128) + c->crc_count * 12 +
           c->o.world->size * (CKPT_NAME_MAX + 64);
}

/* Known before step 1: a checkpoint that nobody could read would be found out when it is needed. */
static Err check_manifest(const Ckpt *c)
{
    if (manifest_most(c) <= manifest_max_bytes) return ERR_OK;
    err_set(ERR_CONFIG,
            "the manifest of a checkpoint of %lld pieces of tensors from %d ranks may take %lld bytes, "
            "%lld are allowed",
            (long long)c->piece_count, c->o.world->size, (long long)manifest_most(c), (long long)manifest_max_bytes);
    return err_hint("fewer ranks, or parallel.zero=0: each rank then has fewer pieces to write");
}

/* Bytes that a save will take on the disk. */
static int64_t space_wanted(const Ckpt *c) { return c->total_bytes + manifest_most(c) + c->o.world->size * 4096; }

/* Told before step 1, when nothing is lost yet. (What others write meanwhile, and quotas that the file system does not
 * tell of, are not known.) */
static void warn_of_space(const Ckpt *c)
{
    char a[UNITS_BYTES], b[UNITS_BYTES], d[UNITS_BYTES];
    const int64_t more = retain_to_come(c), each = space_wanted(c);
    int64_t free_bytes;
    if (c->o.world->rank || file_free_bytes(c->folder, &free_bytes) || free_bytes / more >= each) return;
    log_warn("checkpoints take up to %s each, %s for the %lld that there may be besides those there are, and "
             "'%s' has %s free: a save "
             "that finds no room fails (checkpoint.keep, run.dir)",
             units_bytes(a, each), units_bytes(b, each * more), (long long)more, c->folder, units_bytes(d, free_bytes));
}

Err save_open(Ckpt *c, SetupArena *setup)
{
    TRY(folder_name(c->folder, c->o.run_dir));
    TRY(check_names(c->o.params->whole));
    TRY(allocate(c, setup));
    TRY(check_manifest(c));
    if (c->o.stream->dev->is_null) return ERR_OK;
    TRY(agree(c, open_folder(c, setup)));
    warn_of_space(c);
    return comm_max_i64(c->o.comm, c->o.stream, &c->nonce, 1, NULL);
}

/* ---- before the shards ---- */

static Err prepare(Ckpt *c, const Names *n)
{
    int64_t free_bytes;
    char a[UNITS_BYTES], b[UNITS_BYTES];
    if (c->o.world->rank) return ERR_OK;
    TRY(file_make_dirs(c->folder));
    TRY(file_check_link(c->folder));
    TRY(sweep(c, true));
    TRY(file_free_bytes(c->folder, &free_bytes));
    if (free_bytes < space_wanted(c))
        return err_set(ERR_STORAGE, "a checkpoint takes %s, and '%s' has %s free", units_bytes(a, space_wanted(c)),
                       c->folder, units_bytes(b, free_bytes));
    return file_make_dirs(n->temp);
}

/* ---- commit ---- */

/* Whatever has the wanted name already steps aside, and can come back. */
static Err make_way(Names *n)
{
    if (!file_exists(n->final)) return ERR_OK;
    TRY(file_remove_tree(n->old));
    TRY(file_rename(n->final, n->old));
    n->moved = true;
    return ERR_OK;
}

/* After a failure: the new folder under its temporary name again, the old one back in place. Best effort:
 * what cannot be undone is still either whole or not looked at. */
static void step_back(Names *n, bool renamed)
{
    if (renamed && file_rename(n->final, n->temp)) log_warn("%s", err_message());
    if (n->moved && file_rename(n->old, n->final)) log_warn("%s", err_message());
    n->moved = false;
}

/* Reads the committed manifest again, and looks for the files. */
static Err read_back(Ckpt *c, const Names *n, uint32_t crc, int64_t size_bytes)
{
    char path[PATH_MAX + NAME_ROOM], name[CKPT_NAME_MAX];
    uint32_t found = 0;
    int64_t found_bytes;
    snprintf(path, sizeof path, "%s/manifest.json", n->final);
    for (int64_t at = 0; at < size_bytes; at += CHUNK_BYTES) {
        int64_t part = size_bytes - at < CHUNK_BYTES ? size_bytes - at : CHUNK_BYTES;
        TRY(file_read_at(path, at, c->chunk, part));
        found = crc32c(found, c->chunk, (size_t)part);
    }
    if (found != crc) return err_set(ERR_IO, "'%s' reads back with checksum %08x, %08x was written", path, found, crc);
    for (int rank = 0; rank < c->o.world->size; rank++) {
        if (!c->file_bytes[rank]) continue;
        shard_name(name, rank);
        snprintf(path, sizeof path, "%s/%s", n->final, name);
        TRY(file_size(path, &found_bytes));
        if (found_bytes != c->file_bytes[rank])
            return err_set(ERR_IO, "'%s' has %lld bytes, %lld were written", path, (long long)found_bytes,
                           (long long)c->file_bytes[rank]);
    }
    return ERR_OK;
}

static Err commit(Ckpt *c, const CkptMeta *meta, Names *n)
{
    uint32_t crc;
    int64_t size_bytes;
    if (c->o.world->rank) return ERR_OK;
    TRY(manifest_write(c, meta, n->temp, &crc, &size_bytes));
    if (size_bytes > manifest_max_bytes)
        return err_set(ERR_STORAGE, "'%s/manifest.json' has %lld bytes, more than the %lld that are read", n->temp,
                       (long long)size_bytes, (long long)manifest_max_bytes);
    TRY(file_sync_dir(n->temp));
    TRY(make_way(n));
    Err err = file_rename(n->temp, n->final);
    bool renamed = !err;
    if (!err) err = file_sync_dir(c->folder);
    if (!err) err = read_back(c, n, crc, size_bytes);
    if (!err) return ERR_OK;
    char why[MESSAGE_MAX];
    snprintf(why, sizeof why, "%s", err_message());
    step_back(n, renamed);
    return err_set(err, "%s", why);
}

/* ---- after the commit ---- */

static void warn_if(Err err)
{
    if (err) log_warn("%s; the new checkpoint is in place", err_message());
}

static void tidy(Ckpt *c, const Names *n, const CkptMeta *meta)
{
    char path[PATH_MAX + NAME_ROOM], text[64];
    warn_if(file_remove_tree(n->old)); /* ours, or that of a replacement that was killed */
    snprintf(path, sizeof path, "%s/LATEST", c->folder);
    int length = snprintf(text, sizeof text, "step-%08lld\n", (long long)meta->step);
    warn_if(file_replace(path, text, length));
    if (c->o.keep) retain(c, meta);
}

/* ---- the whole ---- */

static Err save(Ckpt *c, const CkptMeta *meta, Names *n)
{
    const int64_t crcs = c->crc_count + c->piece_count;
    memset(c->crcs, 0, (size_t)crcs * sizeof *c->crcs);
    TRY(agree(c, prepare(c, n)));
    TRY(agree(c, shard_write(c, n->temp)));
    TRY(comm_sum_i64(c->o.comm, c->o.stream, c->crcs, crcs, NULL));
    return agree(c, commit(c, meta, n));
}

static Err make_names(const Ckpt *c, int64_t step, Names *n)
{
    n->moved = false;
    TRY(entry_path(n->final, c->folder, (CkptEntry){ step, false }));
    TRY(entry_path(n->old, c->folder, (CkptEntry){ step, true }));
    if (snprintf(n->temp, PATH_MAX, "%s.tmp-%016llx", n->final, (unsigned long long)c->nonce) >= PATH_MAX)
        return err_set(ERR_CONFIG, "path is too long: '%s'", n->final);
    return ERR_OK;
}

Err save_now(Ckpt *c, const CkptMeta *meta)
{
    Names n;
    ErrKept why;
    TRY(make_names(c, meta->step, &n));
    Err err = save(c, meta, &n);
    if (!err) {
        if (!c->o.world->rank) tidy(c, &n, meta);
        return ERR_OK;
    }
    err_keep(&why);
    if (!c->o.world->rank && file_remove_tree(n.temp)) log_warn("%s", err_message());
    return err_prefix(err_again(&why, err), "cannot save the checkpoint of step %lld", (long long)meta->step);
}
