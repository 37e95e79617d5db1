/* See check_layout.h. The ranks are processes of this one, and what they leave lies in a folder that is removed. */
#include "cli/check_layout.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/file.h"
#include "base/heap.h"
#include "base/log.h"
#include "boot/boot.h"
#include "ckpt/ckpt.h"
#include "cli/small_run.h"
#include "data/indexed.h"
#include "measure/local_ranks.h"
#include "record/history.h"
#include "train/train.h"

enum { FIRST_PORT = 20000, PORTS = 20000, SECRET_BYTES = 16 };

typedef struct {
    Config *cfg;
    char job[64], secret[2 * SECRET_BYTES + 1];
} Run;

/* Documents of many lengths, of bytes that do not repeat. */
static Err write_tokens(const char *prefix, const Config *small)
{
    IndexedWriter *w;
    uint64_t state = 1;
    const int64_t count = (SMALL_STEPS + 1) * (small->derived.global_batch * small->model.seq + 1);
    TRY(indexed_create(prefix, TOKEN_U16, &w));
    Err err = ERR_OK;
    for (int64_t i = 0; i < count && !err; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const int32_t id = (int32_t)(state >> 56);
        err = indexed_add_tokens(w, &id, 1);
        if (!err && state >> 32 & 31) continue;
        if (!err) err = indexed_end_document(w);
    }
    if (!err) err = indexed_end_document(w);
    if (!err) return indexed_finish(w);
    indexed_abandon(w);
    return err;
}

static Err be_rank(LocalRank *r, void *user)
{
    Run *run = user;
    Boot boot = { .launcher = "config check",
                  .rank = r->rank,
                  .size = r->size,
                  .local_rank = r->rank,
                  .local_size = r->size,
                  .addr = "127.0.0.1",
                  .port = FIRST_PORT + (int)(getppid() % PORTS),
                  .port_given = true };
    snprintf(boot.job, sizeof boot.job, "%s", run->job);
    snprintf(boot.secret, sizeof boot.secret, "%s", run->secret);
    log_set_rank(boot.rank, boot.size);
    log_set_level(LOG_ERROR);
    return train_run(run->cfg, &boot, NULL);
}

static Err train(const Config *c, int64_t ranks, const char *words, const char *dir)
{
    ON_HEAP(Config, cfg, 1);
    ON_HEAP(char, all, SMALL_BYTES + PATH_MAX);
    unsigned char random[SECRET_BYTES];
    Run run = { .cfg = cfg };
    if (getentropy(random, sizeof random) != 0) return err_set(ERR_INTERNAL, "the system has no random numbers");
    for (size_t i = 0; i < sizeof random; i++) snprintf(run.secret + 2 * i, 3, "%02x", random[i]);
    snprintf(run.job, sizeof run.job, "check of a layout %d %lld", (int)getpid(), (long long)ranks);
    snprintf(all, SMALL_BYTES + PATH_MAX, "%s run.dir=%s", words, dir);
    Err err = config_for(c, ranks, all, cfg);
    if (!err) err = local_ranks_run((int)ranks, be_rank, &run);
    config_release(cfg);
    return err;
}

/* Digest of all tensors behind the last step, and the losses. */
static Err left(const char *dir, uint64_t *digest, double loss[SMALL_STEPS])
{
    char path[PATH_MAX];
    ON_HEAP(History, h, 1);
    TRY(ckpt_of_step(dir, SMALL_STEPS, path));
    TRY(ckpt_digest(path, digest));
    TRY(history_read(dir, h));
    const Curve *curve = &h->curve[HISTORY_LOSS];
    for (int i = 0; i < SMALL_STEPS; i++) loss[i] = i < curve->count ? curve->points[i].sum : 0;
    history_release(h);
    return ERR_OK;
}

static Err compare(const Config *small, const char *name, const char *several, const char *one)
{
    uint64_t a, b;
    double x[SMALL_STEPS], y[SMALL_STEPS];
    const long long ranks = small->derived.world_size;
    TRY(left(several, &a, x));
    TRY(left(one, &b, y));
    for (int i = 0; i < SMALL_STEPS; i++)
        if (!(x[i] == y[i]))
            return err_set(ERR_NUMERICS,
                           "%s: %lld ranks do not compute what one does: the loss of step %d is %.17g, and %.17g", name,
                           ranks, i + 1, x[i], y[i]);
    if (a != b)
        return err_set(ERR_NUMERICS, "%s: %lld ranks do not compute what one does: tensors differ behind step %d", name,
                       ranks, SMALL_STEPS);
    printf("%s: %lld rank%s the bits of one: %d steps, %lld layers of width %lld, %lld tokens a sample, digest "
           "%016llx\n",
           name, ranks, ranks > 1 ? "s have" : " has", SMALL_STEPS, (long long)small->model.layers,
           (long long)small->model.hidden, (long long)small->model.seq, (unsigned long long)a);
    return ERR_OK;
}

/* In a folder of its own. */
static Err check_in(const char *folder, const Config *c, const char *name)
{
    char data[PATH_MAX], several[PATH_MAX], one[PATH_MAX];
    ON_HEAP(Config, small, 1);
    ON_HEAP(char, words, SMALL_BYTES);
    snprintf(data, sizeof data, "%s/data", folder);
    snprintf(several, sizeof several, "%s/several", folder);
    snprintf(one, sizeof one, "%s/one", folder);
    TRY(small_run_words(c, data, words));
    Err err = config_for(c, 0, words, small);
    if (!err) err = write_tokens(data, small);
    if (!err) err = train(c, small->derived.world_size, words, several);
    if (!err) small_run_alone(small, words);
    if (!err) err = train(c, 1, words, one);
    if (!err) err = compare(small, name, several, one);
    config_release(small);
    return err;
}

Err check_layout(const Config *c, const char *name)
{
    const char *tmp = getenv("TMPDIR");
    char folder[256];
    if (c->derived.world_size > LOCAL_RANKS_MOST)
        return err_set(ERR_CONFIG, "config check --layout starts at most %d ranks, not %lld", LOCAL_RANKS_MOST,
                       (long long)c->derived.world_size),
               err_hint("--world N, with the fewest that the layout takes");
    if (c->parallel.planned)
        return err_set(ERR_CONFIG, "config check --layout: parallel.auto has no layout yet"),
               err_hint("give the layout that megatrain plan --search chose");
    snprintf(folder, sizeof folder, "%.200s/megatrain-layout-XXXXXX", tmp && *tmp && !strchr(tmp, ' ') ? tmp : "/tmp");
    if (!mkdtemp(folder)) return err_set(ERR_STORAGE, "'%s': no folder can be made", folder);
    const Err err = check_in(folder, c, name);
    ErrKept kept;
    if (err) err_keep(&kept);
    (void)file_remove_tree(folder);
    return err ? err_again(&kept, err) : ERR_OK;
}
