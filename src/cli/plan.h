/*
 * What `plan` counts (plan_table.c), as rows (plan_figures.c) that two writers print: as text (plan_text.c) and as JSON
 * (plan_json.c). Ranks with the same tp and pp rank hold the same shard and do the same work: a kind.
 */
#ifndef MEGATRAIN_CLI_PLAN_H
#define MEGATRAIN_CLI_PLAN_H

#include "base/json.h"
#include "cli/command.h"
#include "config/config_device.h"
#include "plan/predict.h"
#include "train/spec.h"

/* A kind of ranks, which need the same. */
typedef struct {
    MemoryPlan plan;
    int pp_rank, first_tp_rank, tp_ranks;
    int first_cp_rank, cp_ranks;
} PlanKind;

/* A layout that is faster, and what is most shorter there: that share of the step, and what it is then. */
enum { ADVICE_MOST = 3 };
typedef struct {
    char words[100]; /* "parallel.tp=4" */
    double step_s;
    char share[48];
    double share_s, share_after_s;
} Advice;

typedef struct {
    const Config *cfg;
    const char *path; /* the configuration's, and the words beside it */
    Words words;
    const char *chosen;       /* what train.micro_batch=auto came to; NULL: it is given */
    const DeviceFile *target; /* the GPU to plan for; NULL: this machine, or a CPU */
    TrainSpec spec;
    Grid grid;
    PlanKind *kinds;
    int count;
    int64_t *shards;                        /* how many bytes of a checkpoint each rank writes; 0: none */
    MemoryPlan recomputed[RECOMPUTE_KINDS]; /* of the rank that takes the most, by kind of recomputation */
    bool has_time;
    Prediction predicted; /* of a step, where there is one */
    char no_time[160];    /* else why there is none */
    bool all;             /* print tables of every kind of ranks and every stage */
    bool ops, advised;    /* print its ops, and what would help most: */
    Advice advice[ADVICE_MOST];
    int advice_count, neighbours; /* neighbours: layouts that were looked at */
} PlanTable;

/* A figure of a kind of ranks, in bytes or FLOP, by its names in the JSON, in a line, and above a narrow column. */
typedef struct {
    const char *key, *label, *heading;
    int64_t (*value)(const PlanTable *, const PlanKind *); /* NULL: a member of MemoryPlan, int64_t, at `field` */
    bool (*shown)(const PlanTable *);                      /* is it shown in the text? NULL: always */
    size_t field;
    bool is_count;                       /* it counts FLOP */
    bool (*on_host)(const PlanTable *t); /* it lies in the host's memory even if the total is a GPU's; NULL: never */
} PlanFigure;

/* Counts what cfg, path, words and target of *t ask for, up to `recomputed`; plan_free after a failure, too. Errors:
 * those of train_spec, grid_spec and trainer_plan; ERR_CONFIG: what the run would refuse at its start. ERR_MEMORY. */
Err plan_count(PlanTable *t);
void plan_free(PlanTable *t);

/* Bytes of a rank, the total last; its work in a step. A figure without a key ends each table. */
extern const PlanFigure plan_memory[], plan_work[];
int64_t plan_value(const PlanTable *t, const PlanKind *k, const PlanFigure *f);
/* Bytes of weights, gradients and moments. */
int64_t plan_param_bytes(const PlanTable *t, const PlanKind *k);

/* The rank that takes the most, and what it takes. plan_fits: does that, and what CUDA and its libraries take beside
 * the plan, fit `target`? */
const PlanKind *plan_largest(const PlanTable *t);
int64_t plan_largest_total(const PlanTable *t);
bool plan_fits(const PlanTable *t);
/* The same of any layout, whose rank that takes the most takes `bytes`. */
bool plan_holds(const DeviceFile *target, const Config *cfg, Grid grid, int64_t bytes);
/* Bytes that CUDA, its libraries and NCCL's communicators take at most. */
int64_t plan_library_bytes(const PlanTable *t);
int plan_pairs(const PlanTable *t); /* of ranks on a host (world_pairs) */

double plan_flop(const PlanTable *t);        /* of a step, all ranks together, op by op */
int64_t plan_checkpoint(const PlanTable *t); /* bytes of all shards together */

/* Plans of each kind of recomputation. Errors: those of trainer_plan. */
Err plan_recompute(PlanTable *t);
void plan_put_recompute(const PlanTable *t);
void plan_json_recompute(JsonOut *j, const PlanTable *t);

/* Predicts the time of a step on the target, where its file says what that needs, and draws the step into the file
 * `svg` (NULL: into none). Errors: those of predict. ERR_CONFIG: none is predicted, and a picture, ops or advice are
 * wanted. ERR_STORAGE. */
Err plan_time(PlanTable *t, const char *svg);
void plan_put_time(const PlanTable *t);
/* Looks for what would help most, after plan_time. Errors: those of cost_open; ERR_MEMORY. */
Err plan_advise(PlanTable *t);
void plan_gain(const Prediction *before, const Prediction *after, Advice *out); /* the shares of *out */
void plan_json_time(JsonOut *j, const PlanTable *t);

/* Prints what a plan is asked for first: does it fit, how long does it take, how many bytes. */
void plan_put_answer(const PlanTable *t);

/* Print all that is known to stdout. ERR_MEMORY. */
void plan_print_text(const PlanTable *t);
Err plan_print_json(const PlanTable *t);

/* The vocabulary; with model.vocab given a plan needs no tokenizer. */
Err plan_vocab(const Config *cfg, int64_t *out);

/* plan --search: what was asked for. */
typedef struct {
    const char *config_path, *device;
    Words overrides;
    int64_t world;
    bool max_world;     /* fewer ranks, too */
    const char *memory; /* NULL: the device's */
    int64_t best;
    double price;        /* of a device's hour; NaN: not said */
    const char *compare; /* other layouts, parted by ";"; NULL: none */
    bool as_json;
} PlanSearch;

/* Prints to stdout. ERR_CONFIG: no layout is legal, or a word is wrong. ERR_PLAN: none fits. */
Err plan_search(const PlanSearch *p);

#endif
