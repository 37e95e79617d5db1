/*
 * Checkpoints of a run that stay: the newest, those of every N-th step, those with the lowest validation loss. Rank 0
 * removes the others after a commit (save.c).
 *
 * c->kept lists those that may still have to go: valid ones, oldest first, behind those that were passed over as
 * damaged (CkptOptions.bad_from), which are nobody's best and go first. One of an N-th step leaves the list when
 * nothing else keeps it, so that a long run's list stays short. The losses are in the manifests: a resumed run knows
 * them.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "ckpt/folder.h"
#include "ckpt/pieces.h"

enum { NAME_ROOM = 96, NEWEST_AT_LEAST = 2 };

static int newest_of(const Ckpt *c) { return c->o.keep < NEWEST_AT_LEAST ? NEWEST_AT_LEAST : c->o.keep; }

static bool is_bad(const Ckpt *c, int64_t step) { return c->o.bad_from && step >= c->o.bad_from; }

static CkptKept kept_of(const Ckpt *c, const CkptMeta *m)
{
    CkptKept k = { .step = m->step, .valid.loss = NAN };
    for (int i = 0; c->o.keep_best && i < m->valid_count; i++) {
        const CkptValid *v = &m->valid[i];
        if (!strcmp(v->set, c->o.best_set)) k.valid = *v;
    }
    k.valid.set = NULL; /* the manifest's text goes */
    return k;
}

/* ---- what is there ---- */

/* The valid ones of e[0..count) into c->kept, oldest first, of which those `bad`. */
static Err list_valid(Ckpt *c, const CkptEntry *e, int count, bool bad)
{
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_MAX];
        SetupArena a;
        Manifest m;
        if (e[i].old || is_bad(c, e[i].step) != bad) continue;
        TRY(entry_path(path, c->folder, e[i]));
        setup_init(&a);
        if (!manifest_read(path, &a, &m) && !manifest_check_files(&m)) c->kept[c->kept_count++] = kept_of(c, &m.meta);
        setup_release(&a);
    }
    return ERR_OK;
}

static Err list_all(Ckpt *c, SetupArena *setup, const CkptEntry *e, int count)
{
    const int64_t most = count + newest_of(c) + c->o.keep_best + 1;
    if (most > INT_MAX) return err_set(ERR_CONFIG, "too many checkpoints to keep: %lld", (long long)most);
    c->kept_capacity = (int)most;
    TRY(setup_array(setup, c->kept_capacity, &c->kept));
    TRY(list_valid(c, e, count, true));
    c->bad_count = c->kept_count;
    return list_valid(c, e, count, false);
}

Err retain_open(Ckpt *c, SetupArena *setup)
{
    CkptEntry *e;
    int count;
    TRY(folder_scan(c->folder, &e, &count));
    Err err = list_all(c, setup, e, count);
    free(e);
    return err;
}

int64_t retain_to_come(const Ckpt *c)
{
    const int64_t kept =
        newest_of(c) + c->o.keep_best + 1 - c->kept_count; /* an old one goes after a new one has come */
    const int64_t more = c->o.keep && kept < c->o.to_come ? kept : c->o.to_come;
    return more > 1 ? more : 1;
}

/* ---- after a save ---- */

/* Under a temporary name first: what is half removed must not look like a checkpoint. */
static Err remove_step(const Ckpt *c, int64_t step)
{
    char path[PATH_MAX], temp[PATH_MAX + NAME_ROOM];
    TRY(entry_path(path, c->folder, (CkptEntry){ step, false }));
    snprintf(temp, sizeof temp, "%s.tmp-%016llx", path, (unsigned long long)c->nonce);
    TRY(file_rename(path, temp));
    return file_remove_tree(temp);
}

static void forget(Ckpt *c, int at)
{
    c->kept_count--;
    c->bad_count -= at < c->bad_count;
    memmove(c->kept + at, c->kept + at + 1, (size_t)(c->kept_count - at) * sizeof *c->kept);
}

/* Enters a checkpoint, once. */
static void remember(Ckpt *c, CkptKept k)
{
    for (int i = c->kept_count; i-- > 0;)
        if (c->kept[i].step == k.step) forget(c, i);
    int at = c->kept_count;
    while (at > c->bad_count && c->kept[at - 1].step > k.step) at--;
    ASSERT(c->kept_count < c->kept_capacity);
    memmove(c->kept + at + 1, c->kept + at, (size_t)(c->kept_count - at) * sizeof *c->kept);
    c->kept[at] = k;
    c->kept_count++;
}

bool ckpt_valid_same_content(const CkptValid *a, const CkptValid *b)
{
    return !a->has_content || !b->has_content || a->content == b->content;
}

bool ckpt_valid_comparable(const CkptValid *a, const CkptValid *b)
{
    return a->samples == b->samples && a->crc == b->crc && ckpt_valid_same_content(a, b);
}

static bool is_better(const CkptKept *a, const CkptKept *b)
{
    return a->valid.loss < b->valid.loss || (a->valid.loss == b->valid.loss && a < b);
}

/* Is it one of o.keep_best, among those whose losses are of the same samples? Of equals the older is better, because it
 * has been kept so far. */
static bool is_best(const Ckpt *c, int at)
{
    const CkptKept *k = c->kept;
    int64_t better = 0;
    if (at < c->bad_count || !isfinite(k[at].valid.loss)) return false;
    for (int i = c->bad_count; i < c->kept_count; i++)
        better += ckpt_valid_comparable(&k[i].valid, &k[at].valid) && is_better(&k[i], &k[at]);
    return better < c->o.keep_best;
}

static bool stays_for_good(const Ckpt *c, int at)
{
    return at >= c->bad_count && c->o.keep_every && c->kept[at].step % c->o.keep_every == 0;
}

void retain(Ckpt *c, const CkptMeta *written)
{
    remember(c, kept_of(c, written));
    int at = 0;
    for (int older = c->kept_count - newest_of(c); older > 0; older--) {
        at += c->kept[at].step == written->step; /* never the one just written */
        if (is_best(c, at)) {
            at++;
            continue;
        }
        if (!stays_for_good(c, at) && remove_step(c, c->kept[at].step))
            log_warn("%s; the new checkpoint is in place", err_message());
        forget(c, at);
    }
}
