/* See micro_batch.h. Every plan is a dry run, as that of a run: what fits here fits there. */
#include "plan/micro_batch.h"

#include <stdio.h>

#include "base/heap.h"
#include "base/units.h"
#include "plan/layer_cost.h"
#include "train/spec.h"

const char *micro_batch_word(int64_t samples, char out[MICRO_BATCH_WORD])
{
    snprintf(out, MICRO_BATCH_WORD, "train.micro_batch=%lld", (long long)samples);
    return out;
}

/* c with that micro-batch, and its grid. Release *out in any case. ERR_CONFIG: a rule refuses it. */
static Err with(const Config *c, int64_t samples, Config *out, Grid *grid)
{
    char word[MICRO_BATCH_WORD];
    TRY(config_for(c, c->derived.world_size, micro_batch_word(samples, word), out));
    return grid_try(out, grid);
}

Err micro_batch_allowed(const Config *c, int64_t samples)
{
    ON_HEAP(Config, other, 1);
    Grid grid;
    const Err err = with(c, samples, other, &grid);
    config_release(other);
    return err;
}

/* ---- those that divide the batch ---- */

static int64_t most_samples(const Config *c)
{
    const int64_t high = config_key(CFG_train_micro_batch)->int_high, all = c->derived.global_batch / c->derived.dp;
    return all < high ? all : high;
}

static bool divides(const Config *c, int64_t samples)
{
    return batch_ramp_divides(&c->derived.batch, samples * c->derived.dp);
}

Err micro_batch_least(const Config *c, int64_t *out)
{
    Grid grid;
    for (*out = 1; *out <= most_samples(c); ++*out) {
        const Err err = divides(c, *out) ? micro_batch_allowed(c, *out) : ERR_CONFIG;
        if (err != ERR_CONFIG) return err;
    }
    *out = c->train.micro_batch;
    return grid_spec(c, &grid); /* (says why) */
}

/* ---- what they take ---- */

static bool holds(const Room *room, const Config *c, Grid grid, const MemoryPlan *p)
{
    const int64_t libraries = room->has_nccl ? spec_library_bytes(c, grid) : DEVICE_LIBRARY_BYTES;
    if (!room->gpu) return memory_plan_total(p) <= room->host;
    return memory_plan_total(p) + libraries <= room->gpu && memory_plan_host(p) <= room->host;
}

/* A rank's plan, and the ranks of a pipeline rank of which it is asked: others take what the first or the last ones
 * take. */
enum { CORNERS = 4 };

static int corner_rank(Grid grid, int pp, int corner)
{
    const int tp = corner & 1 ? grid.tp - 1 : 0, cp = corner & 2 && grid.cp > 1 ? grid.cp - 1 : 0;
    return grid_rank_at(grid, pp, tp, cp);
}

/* all: also behind the first rank that does not hold it, so that *bytes is that of the one that takes most. */
static Err plan_ranks(const Config *c, Grid grid, int64_t vocab, const Room *room, bool all, int64_t *bytes, bool *fit)
{
    TrainSpec spec;
    ON_HEAP(MemoryPlan, plan, 1);
    *bytes = 0;
    *fit = true;
    TRY(train_spec(c, vocab, &spec));
    for (int i = 0; i < grid.pp * CORNERS && (*fit || all); i++) {
        const int corner = i % CORNERS;
        if ((corner & 1 && grid.tp == 1) || (corner & 2 && grid.cp <= 1)) continue;
        TRY(trainer_plan(&spec, grid, corner_rank(grid, i / CORNERS, corner), plan));
        *fit = *fit && holds(room, c, grid, plan);
        if (memory_plan_total(plan) > *bytes) *bytes = memory_plan_total(plan);
    }
    return ERR_OK;
}

static Err plan_samples(const Config *c, int64_t vocab, const Room *room, int64_t samples, bool all, int64_t *bytes,
                        bool *fit)
{
    ON_HEAP(Config, other, 1);
    Grid grid;
    Err err = with(c, samples, other, &grid);
    if (!err) err = plan_ranks(other, grid, vocab, room, all, bytes, fit);
    config_release(other);
    return err;
}

/* From the largest on: a larger one may take less, where it leaves a pipeline fewer units in flight. */
Err micro_batch_choose(const Config *c, int64_t vocab, const Room *room, MicroBatch *out)
{
    bool fit = false;
    *out = (MicroBatch){ 0 };
    for (int64_t n = most_samples(c); n > 0 && !fit; n--) {
        const Err err = divides(c, n) ? plan_samples(c, vocab, room, n, false, &out->bytes, &fit) : ERR_CONFIG;
        if (err && err != ERR_CONFIG) return err;
        if (err) continue;
        out->next = out->samples;
        out->samples = n;
    }
    out->fits = fit;
    if (!out->samples) return micro_batch_least(c, &out->samples);
    if (!fit) TRY(plan_samples(c, vocab, room, out->samples, true, &out->bytes, &fit));
    return out->next ? plan_samples(c, vocab, room, out->next, true, &out->next_bytes, &fit) : ERR_OK;
}

const char *micro_batch_text(const MicroBatch *m, const Room *room, char out[MICRO_BATCH_TEXT])
{
    char a[UNITS_BYTES], b[UNITS_BYTES], next[80] = "no larger one divides the batch";
    if (m->next) snprintf(next, sizeof next, "%lld would take %s", (long long)m->next, units_bytes(a, m->next_bytes));
    snprintf(out, MICRO_BATCH_TEXT, "%lld, of which a rank takes %s of %s; %s", (long long)m->samples,
             units_bytes(a, m->bytes), units_bytes(b, room->gpu ? room->gpu : room->host), next);
    return out;
}
