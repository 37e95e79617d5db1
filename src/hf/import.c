/* A folder becomes a checkpoint (convert.h): parameter by parameter, some rows a job, in the order that ckpt/pieces.c
 * writes them in. */
#include <string.h>

#include "base/file.h"
#include "base/heap.h"
#include "base/int64.h"
#include "data/progress.h"
#include "hf/convert.h"
#include "hf/jobs.h"
#include "hf/weights.h"
#include "param/odd.h"

enum { JOB_FLOATS = 1 << 20 };

typedef struct {
    const HfImport *x;
    HfWeights model;
    int64_t *first_job; /* [parameters + 1] */
    Jobs *jobs;
    Progress progress;
    int64_t done_bytes;
    OddValues odd;
} Import;

static int64_t rows_of_job(const Param *p) { return max64(1, JOB_FLOATS / p->spec.shape[1]); }

/* Some rows of a parameter. */
static Err work(void *user, int64_t index, char *slot, char *scratch, int64_t *size_bytes)
{
    Import *m = user;
    const ParamRegistry *whole = m->x->whole;
    int low = 0, high = whole->count;
    (void)scratch;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (m->first_job[middle] <= index) low = middle;
        else high = middle;
    }
    const Param *p = &whole->items[low];
    const int64_t step = rows_of_job(p), row = (index - m->first_job[low]) * step;
    const Box box = { { row, 0 }, { min64(step, p->spec.shape[0] - row), p->spec.shape[1] } };
    *size_bytes = box_count(box) * (int64_t)sizeof(float);
    TRY(hf_weights_read(&m->model, p, box, (float *)slot, box.shape[1]));
    odd_look(&m->odd, low, (const float *)slot, box_count(box));
    return ERR_OK;
}

static Err next(void *user, const void **data, int64_t *size_bytes)
{
    Import *m = user;
    TRY(jobs_next(m->jobs, data, size_bytes));
    m->done_bytes += *size_bytes;
    progress_show(&m->progress, m->done_bytes, 0);
    return ERR_OK;
}

static Err start(Import *m, SetupArena *a)
{
    const ParamRegistry *whole = m->x->whole;
    int64_t most = JOB_FLOATS;
    TRY(odd_open(&m->odd, whole, a));
    TRY(setup_array(a, whole->count + 1, &m->first_job));
    for (int i = 0; i < whole->count; i++) {
        const Param *p = &whole->items[i];
        const int64_t step = rows_of_job(p);
        m->first_job[i + 1] = m->first_job[i] + (p->spec.shape[0] + step - 1) / step;
        most = max64(most, p->spec.shape[1]);
    }
    progress_open(&m->progress, param_total(whole) * (int64_t)sizeof(float), NULL);
    return jobs_open(&(JobsSpec){ .user = m,
                                  .work = work,
                                  .count = m->first_job[whole->count],
                                  .slot_bytes = most * (int64_t)sizeof(float),
                                  .threads = m->x->threads },
                     a, &m->jobs);
}

static Err save(Import *m, World *world, SetupArena *a)
{
    const ParamRegistry *whole = m->x->whole;
    Device host = { .name = "cpu" }; /* (all that a stream without work is asked for) */
    Stream stream = { .dev = &host };
    ParamStore store = { .reg = whole };
    const ParamSet params = param_set_single(&store, NULL);
    const CkptSource source = { m, next };
    const CkptMeta *meta = m->x->meta;
    const CkptOptions o = { .run_dir = m->x->run_dir,
                            .params = &params,
                            .world = world,
                            .stream = &stream,
                            .to_come = 1,
                            .meta_bytes = (int64_t)(strlen(meta->config) + strlen(meta->data)) + 256,
                            .source = &source };
    Ckpt *c;
    CkptOutcome outcome;
    TRY(setup_array(a, 1, &c));
    TRY(ckpt_open(c, o, a));
    TRY(start(m, a));
    TRY(ckpt_start(c, meta));
    ckpt_collect(c, true, &outcome);
    return outcome.err ? err_again(&outcome.why, outcome.err) : ERR_OK;
}

static Err import(Import *m, SetupArena *a)
{
    const HfImport *x = m->x;
    ON_HEAP(World, world, 1);
    int lock;
    TRY(hf_weights_open(x->from, x->hf, x->cfg, x->whole, a, &m->model));
    TRY(hf_weights_check_twins(&m->model, x->whole));
    if (ckpt_any(x->run_dir)) {
        err_set(ERR_CKPT, "'%s' holds checkpoints", x->run_dir);
        return err_hint("give --to another folder");
    }
    const bool made = !file_exists(x->run_dir);
    TRY(world_open_self(world));
    Err err = ckpt_lock(x->run_dir, &lock);
    if (!err) {
        ErrKept why;
        err = x->keep ? x->keep(x->user, x->run_dir) : ERR_OK;
        if (!err) err = save(m, world, a);
        if (err) err_keep(&why);
        if (err && made) (void)file_remove_tree(x->run_dir);
        file_unlock(lock);
        if (err) err_again(&why, err);
    }
    world_close(world);
    return err;
}

Err hf_import(const HfImport *x)
{
    Import m = { .x = x };
    SetupArena a;
    setup_init(&a);
    Err err = import(&m, &a);
    if (!err) odd_warn(&m.odd, x->from);
    jobs_close(m.jobs);
    progress_close(&m.progress);
    hf_weights_close(&m.model);
    setup_release(&a);
    return err;
}
