/* From configuration to numbers: what the step engine, planning and generation need of a Config. */
#ifndef MEGATRAIN_TRAIN_SPEC_H
#define MEGATRAIN_TRAIN_SPEC_H

#include "config/config.h"
#include "data/dataset.h"
#include "data/tokenizer.h"
#include "engine/trainer.h"

/* vocab: the tokenizer's, unless model.vocab says otherwise. ERR_CONFIG when the two do not fit. */
Err train_spec(const Config *cfg, int64_t vocab, TrainSpec *out);

/* The token that ends a document, -1: none. ERR_CONFIG where there is none and data.mask_eod or data.reset_at_eod goes
 * by it. */
Err spec_eod(const Config *cfg, const Tokenizer *t, int32_t *out);

/* The training data, and the validation data, which must be of the tokenizer (NULL: of any); without a vocabulary. */
DatasetOptions data_spec(const Config *cfg, const Tokenizer *t);
DatasetOptions valid_spec(const Config *cfg, const Tokenizer *t);

/* Says where data.train or data.valid was given, before an ERR_CONFIG about its text; returns err. */
Err data_error(const Config *cfg, ConfigId id, Err err);

/* Learning rates by update. */
LrSchedule lr_spec(const Config *cfg);

/*
 * The ranks' grid, and all that a start refuses of a configuration that config_read takes and of its number of ranks:
 * `config check`, `plan` and every rank of a run call it first. ERR_CONFIG, with the rule and the ways out that pass
 * (spec_allows): a schedule that is not in the table or not for this shape, a layout that is not the model's, what
 * schedule, model and ranks do not have together, a data.train that cannot be read.
 */
Err grid_spec(const Config *cfg, Grid *out);

/* parallel.zero, as reshard (PARALLEL_RESHARD_...) and pp pipeline ranks leave it: weights that stay whole in a step
 * are cut no further than with zero=2. */
ZeroCut spec_zero_cut(int64_t zero, int reshard, int64_t pp);

/* Ranks of a host as far as nobody has met: debug.ranks_per_host, else those of a usual host with GPUs. */
int spec_host_ranks(const Config *cfg);
/* Tensor-parallel ranks sum by messages what has 16 bits, and what leaves in bands. */
bool spec_sums_by_message(const Config *cfg);

/* For who asks of many layouts: as grid_spec, but no way out is looked for; and the grid alone, by the rules that cost
 * nothing to ask. */
Err grid_try(const Config *cfg, Grid *out);
Err grid_read(const Config *cfg, Grid *out);

/* Bytes that CUDA, its libraries and NCCL's communicators take at most of a GPU, beside a rank's plan. */
int64_t spec_library_bytes(const Config *cfg, Grid grid);
int64_t grid_library_bytes(Grid grid, bool sums_by_message, int host_ranks);

/* The same of a configuration with mistakes, as the judge of a ConfigSource: ERR_OK where it goes by a doubtful key. */
Err grid_judge(const Config *cfg, const bool doubtful[CFG_COUNT]);

/* Is the configuration one with these values, "section.key=value", several parted by blanks? The recorded failure is
 * lost. (Of one with mistakes: none is added.) */
bool spec_allows(const Config *cfg, const char *values);

/* And what is known of a start once the vocabulary is: a step of each pipeline rank on the null device. Errors:
 * train_spec's and trainer_plan's. */
Err spec_dry_run(const Config *cfg, Grid grid, int64_t vocab);

#endif
