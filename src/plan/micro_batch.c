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

static bool holds(const Room *room, const MicroBatchNeed *need)
{
    return need->gpu <= room->gpu && need->host <= room->host;
}

static MicroBatchNeed need_of(const Room *room, const Config *c, Grid grid, const MemoryPlan *p)
{
    const int64_t libraries = room->has_nccl ? spec_library_bytes(c, grid) : DEVICE_LIBRARY_BYTES;
    if (!room->gpu) return (MicroBatchNeed){ .host = memory_plan_total(p) };
    return (MicroBatchNeed){ memory_plan_total(p) + libraries, libraries, memory_plan_host(p) };
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* A rank's plan, and the ranks of a pipeline rank of which it is asked: others take what the first or the last ones
 * take. */
enum { CORNERS = 4 };

static int corner_rank(Grid grid, int pp, int corner)
{
    const int tp = corner & 1 ? grid.tp - 1 : 0, cp = corner & 2 && grid.cp > 1 ? grid.cp - 1 : 0;
    return grid_rank_at(grid, pp, tp, cp);
}

/* all: also behind the first rank that does not hold it, so that *most is of the ones that take most. */
static Err plan_ranks(const Config *c, Grid grid, int64_t vocab, const Room *room, bool all, MicroBatchNeed *most,
                      bool *fit)
{
    TrainSpec spec;
    ON_HEAP(MemoryPlan, plan, 1);
    *fit = true;
    TRY(train_spec(c, vocab, &spec));
    for (int i = 0; i < grid.pp * CORNERS && (*fit || all); i++) {
        const int corner = i % CORNERS;
        if ((corner & 1 && grid.tp == 1) || (corner & 2 && grid.cp <= 1)) continue;
        TRY(trainer_plan(&spec, grid, corner_rank(grid, i / CORNERS, corner), plan));
        const MicroBatchNeed need = need_of(room, c, grid, plan);
        *fit = *fit && holds(room, &need);
        *most = (MicroBatchNeed){ larger(most->gpu, need.gpu), need.libraries, larger(most->host, need.host) };
    }
    return ERR_OK;
}

/* ERR_MEMORY: it takes more than a dry run counts. */
static Err plan_samples(const Config *c, int64_t vocab, const Room *room, int64_t samples, bool all,
                        MicroBatchNeed *most, bool *fit)
{
    ON_HEAP(Config, other, 1);
    Grid grid;
    *most = (MicroBatchNeed){ 0 };
    *fit = false;
    Err err = with(c, samples, other, &grid);
    if (!err) err = plan_ranks(other, grid, vocab, room, all, most, fit);
    if (err) *most = (MicroBatchNeed){ 0 }, *fit = false;
    config_release(other);
    return err;
}

/* ---- the choice ---- */

/* Micro-batches, or their slices, of the largest step that a pipeline has with so many samples each. */
static int64_t pipeline_units(const Config *c, int64_t samples)
{
    return c->derived.global_batch / (samples * c->derived.dp) * c->parallel.slices;
}

/* Units of each pipeline rank. With 4 a 1F1B pipeline waits for a fifth of its step. */
enum { RANK_UNITS = 4 };

static bool keeps_busy(const Config *c, int64_t samples)
{
    return c->parallel.pp == 1 || pipeline_units(c, samples) >= RANK_UNITS * c->parallel.pp;
}

/* Why it is not taken. */
static Err look_at_next(const Config *c, int64_t vocab, const Room *room, MicroBatch *out)
{
    bool fit;
    if (!keeps_busy(c, out->next)) return out->next_units = pipeline_units(c, out->next), ERR_OK;
    const Err err = plan_samples(c, vocab, room, out->next, true, &out->next_need, &fit);
    return err == ERR_MEMORY ? ERR_OK : err;
}

/* From the largest on: a larger one may take less, where it leaves a pipeline fewer units in flight. The least, which
 * leaves a pipeline most, is taken whatever it leaves. */
Err micro_batch_choose(const Config *c, int64_t vocab, const Room *room, MicroBatch *out)
{
    bool fit = false;
    *out = (MicroBatch){ .pp = c->parallel.pp, .slices = c->parallel.slices };
    for (int64_t n = most_samples(c); n > 0 && !fit; n--) {
        if (!divides(c, n)) continue;
        const Err err =
            keeps_busy(c, n) ? plan_samples(c, vocab, room, n, false, &out->need, &fit) : micro_batch_allowed(c, n);
        if (err == ERR_CONFIG) continue;
        if (err && err != ERR_MEMORY) return err;
        out->next = out->samples;
        out->samples = n;
    }
    if (!out->samples) return micro_batch_least(c, &out->samples);
    if (!fit) TRY(plan_samples(c, vocab, room, out->samples, true, &out->need, &fit));
    out->fits = fit;
    return out->next ? look_at_next(c, vocab, room, out) : ERR_OK;
}

/* Memory that a rank needs: a GPU's, unless it is the host's that is too little. */
static void put_need(const MicroBatchNeed *n, const Room *room, bool whole, char *out, size_t size)
{
    char need[UNITS_BYTES], have[UNITS_BYTES], libraries[UNITS_BYTES], among[80] = "";
    const bool host = !room->gpu || (n->gpu <= room->gpu && n->host > room->host);
    units_bytes(need, host ? n->host : n->gpu);
    if (!n->gpu && !n->host) snprintf(out, size, "more than can be planned");
    else if (!whole && host == !room->gpu) snprintf(out, size, "%s", need);
    else {
        if (!host)
            snprintf(among, sizeof among, ", %s for CUDA's libraries among them", units_bytes(libraries, n->libraries));
        snprintf(out, size, "%s of its %s of %s memory%s", need, units_bytes(have, host ? room->host : room->gpu),
                 host ? "host" : "GPU", among);
    }
}

const char *micro_batch_text(const MicroBatch *m, const Room *room, char out[MICRO_BATCH_TEXT])
{
    char is[144], more[144], next[176] = "no larger number divides the batch";
    put_need(&m->need, room, true, is, sizeof is);
    put_need(&m->next_need, room, false, more, sizeof more);
    if (m->next_units)
        snprintf(next, sizeof next,
                 "%lld samples would leave the pipeline %lld %s a step, fewer than %d for each of %lld ranks",
                 (long long)m->next, (long long)m->next_units, m->slices > 1 ? "slices" : "micro-batches", RANK_UNITS,
                 (long long)m->pp);
    else if (m->next) snprintf(next, sizeof next, "%lld samples need %s", (long long)m->next, more);
    snprintf(out, MICRO_BATCH_TEXT, "%lld sample%s: a rank needs %s; %s", (long long)m->samples,
             m->samples == 1 ? "" : "s", is, next);
    return out;
}
