/*
 * Relations between the keys of sequences that pass through the pipeline in slices (docs/pipeline.md), a part of
 * config_check().
 */
#include "config/config_reader.h"
#include "base/int64.h"

/* Parts of a slice, two on each rank that shares it. */
static int64_t parts_of_slice(const Config *c) { return c->parallel.cp > 1 ? 2 * c->parallel.cp : 1; }

/* Canonical blocks that a slice must have at least: with sp its rows are cut once more, between leaves of biases. */
static int64_t blocks_of_slice(const Config *c) { return max64(parts_of_slice(c), c->parallel.sp ? 2 : 1); }

static bool whole_blocks(const Config *c)
{
    return c->parallel.seq_blocks % (blocks_of_slice(c) * c->parallel.slices) == 0;
}

static bool whole_key_blocks(const Config *c)
{
    return c->model.seq / c->parallel.slices % c->parallel.attn_block == 0;
}

bool config_slices_fit(const Config *c) { return c->parallel.slices == 1 || (whole_blocks(c) && whole_key_blocks(c)); }

static void check_bits(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t blocks = blocks_of_slice(c) * c->parallel.slices;
    const bool layout = c->run.reproducible == RUN_REPRODUCIBLE_LAYOUT;
    char text[160];
    snprintf(text, sizeof text, "slices cut inside a canonical block: %sslices must divide seq_blocks",
             c->parallel.cp > 1 ? "2 x cp x "
             : c->parallel.sp   ? "with sp, 2 x "
                                : "");
    RULE(!layout || whole_blocks(c), text, CFG_run_reproducible, CFG_parallel_slices, CFG_parallel_seq_blocks,
         CFG_parallel_sp, CFG_parallel_cp);
    config_take(r, "parallel.seq_blocks=%lld, or run.reproducible=run", (long long)blocks);
    snprintf(text, sizeof text, "slices cut inside a block of keys: attn_block must divide seq / slices, here %lld",
             (long long)(c->model.seq / c->parallel.slices));
    RULE(!layout || whole_key_blocks(c), text, CFG_parallel_slices, CFG_parallel_attn_block, CFG_model_seq,
         CFG_run_reproducible);
    config_take_near(r, CFG_parallel_slices);
    config_take(r, "run.reproducible=run");
}

void config_check_slices(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t slices = c->parallel.slices, parts = parts_of_slice(c), cp = c->parallel.cp;
    char text[160];
    if (slices == 1) return;
    snprintf(text, sizeof text, "slices are equally long: %s must divide seq",
             cp > 1 ? "2 x cp x slices" : "their number");
    RULE(c->model.seq % (parts * slices) == 0, text, CFG_parallel_slices, CFG_model_seq, CFG_parallel_cp);
    config_take_near(r, CFG_parallel_slices);
    snprintf(text, sizeof text, "with sp, tp must divide micro_batch * seq / slices%s", cp > 1 ? " / cp" : "");
    RULE(!c->parallel.sp || c->train.micro_batch * (c->model.seq / slices / cp) % c->parallel.tp == 0, text,
         CFG_parallel_tp, CFG_parallel_slices, CFG_train_micro_batch, CFG_model_seq, CFG_parallel_cp);
    check_bits(r);
}
