/*
 * Relations between the keys of a mixture of experts (docs/moe.md), a part of config_check().
 */
#include <string.h>

#include "base/config_reader.h"
#include "base/layer_set.h"

/* Keys that say how a mixture is, given for a dense model. */
static void check_dense(ConfigReader *r)
{
    char value[CONFIG_VALUE_BYTES], start[CONFIG_VALUE_BYTES];
    for (ConfigId id = CFG_moe_topk; id <= CFG_moe_overflow; id++) {
        const char *given = config_value(r->config, id, value);
        bool same = strcmp(given, config_value(&config_defaults, id, start)) == 0;
        if (id == CFG_moe_normalize) same = !r->config->moe.normalize; /* these two are filled in */
        if (id == CFG_moe_aux_coeff) same = !(r->config->moe.aux_coeff > 0);
        RULE(same, "only a mixture has it: give moe.experts", id, CFG_moe_experts);
    }
}

/* "nearest that do: 4 and 8", of the divisors of n */
static void nearest_divisors(char *out, size_t size, int64_t n, int64_t x)
{
    int64_t below = x < n ? x : n, above = x;
    while (below > 1 && n % below) below--;
    while (above < n && n % above) above++;
    if (above >= x && above <= n && above != below)
        snprintf(out, size, "; nearest that do: %lld and %lld", (long long)below, (long long)above);
    else snprintf(out, size, "; nearest that does: %lld", (long long)below);
}

static void check_groups(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t experts = c->moe.experts, groups = c->moe.groups, most = c->moe.group_topk;
    char text[160], nearest[80];
    nearest_divisors(nearest, sizeof nearest, experts, groups);
    snprintf(text, sizeof text, "groups must divide experts%s", nearest);
    RULE(experts % groups == 0, text, CFG_moe_groups, CFG_moe_experts);
    snprintf(text, sizeof text, "a token cannot be sent to more groups than there are: at most %lld",
             (long long)groups);
    RULE(most <= groups, text, CFG_moe_group_topk, CFG_moe_groups);
    nearest_divisors(nearest, sizeof nearest, c->moe.topk, most);
    snprintf(text, sizeof text, "group_topk must divide topk: a group counts by its topk / group_topk best%s",
             nearest);
    RULE(c->moe.topk % most == 0, text, CFG_moe_group_topk, CFG_moe_topk);
    if (experts % groups || most > groups || c->moe.topk > experts) return;
    snprintf(text, sizeof text, "the chosen groups hold fewer: group_topk * experts / groups is %lld",
             (long long)(most * (experts / groups)));
    RULE(c->moe.topk <= most * (experts / groups), text, CFG_moe_topk, CFG_moe_group_topk, CFG_moe_groups,
         CFG_moe_experts);
}

static void check_every(ConfigReader *r)
{
    const Config *c = r->config;
    char text[160];
    LayerSet set = { { 0 } };
    const int64_t count = layer_set_read(c->moe.every, (int)c->model.layers, &set);
    RULE(count >= 0, "must be an integer from 1 on, or a list of 0 and 1 with repetitions such as 0*3,1*58",
         CFG_moe_every);
    if (count < 0) return;
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)count,
             (long long)c->model.layers);
    RULE(count == c->model.layers, text, CFG_moe_every, CFG_model_layers);
    RULE(count != c->model.layers || layer_set_count(&set), "no block is a mixture: give a 1, or experts = 0",
         CFG_moe_every, CFG_moe_experts);
}

static void check_balance(ConfigReader *r)
{
    const Config *c = r->config;
    const bool none = c->moe.balance == MOE_BALANCE_NONE, bias = c->moe.balance == MOE_BALANCE_BIAS;
    const bool sinkhorn = c->moe.balance == MOE_BALANCE_SINKHORN,
               forced = c->moe.balance == MOE_BALANCE_FORCED, aux = c->moe.aux_coeff > 0;
    RULE(!none || !aux, "there is no balance loss to weigh: give balance", CFG_moe_aux_coeff,
         CFG_moe_balance);
    RULE(!forced || c->moe.groups == 1, "experts take turns in no groups: give groups = 1", CFG_moe_balance,
         CFG_moe_groups);
    RULE(!forced || !aux, "forced balance has no loss: give aux_coeff = 0", CFG_moe_aux_coeff,
         CFG_moe_balance);
    RULE(!forced || !(c->moe.jitter > 0),
         "forced balance does not ask the router, so noise on its input does nothing", CFG_moe_jitter,
         CFG_moe_balance);
    RULE(!sinkhorn || !aux, "sinkhorn balances by itself, without a loss: give aux_coeff = 0",
         CFG_moe_aux_coeff, CFG_moe_balance);
    RULE(none || bias || forced || sinkhorn || aux,
         "the balance loss would count for nothing: aux_coeff must be above 0", CFG_moe_aux_coeff,
         CFG_moe_balance);
    RULE(!bias || c->moe.router == MOE_ROUTER_SIGMOID || c->moe.router == MOE_ROUTER_SQRT_SOFTPLUS,
         "biases are added to scores of 0 and up: take router = sigmoid or sqrt_softplus", CFG_moe_balance,
         CFG_moe_router);
    RULE(c->train.micro_batch % c->moe.unit == 0,
         "a micro-batch must hold whole balance units: unit must divide it", CFG_moe_unit,
         CFG_train_micro_batch);
    RULE(c->moe.unit == 1 || c->moe.balance != MOE_BALANCE_SEQ_AUX,
         "seq_aux counts over single samples: take unit = 1, or balance = aux", CFG_moe_unit,
         CFG_moe_balance);
}

static void check_capacity(ConfigReader *r)
{
    const Config *c = r->config;
    const bool limited = c->moe.capacity > 0;
    const bool bounded = c->moe.slack > 0, drops = c->moe.overflow == MOE_OVERFLOW_DROP;
    RULE(limited || (bounded && drops) || c->moe.drop == MOE_DROP_PROBS, "nothing is dropped: give capacity",
         CFG_moe_drop, CFG_moe_capacity);
    RULE(!bounded || c->moe.slack >= 1, "not even an even load would have room: take 1 or more, or 0",
         CFG_moe_slack);
    RULE(bounded || c->moe.overflow == MOE_OVERFLOW_STOP,
         "there is room for all rows that can come: give slack", CFG_moe_overflow, CFG_moe_slack);
    RULE(!drops || c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT,
         "what is dropped depends on the layout: take reproducible = run, or overflow = stop",
         CFG_moe_overflow, CFG_run_reproducible);
    RULE(limited || !c->moe.pad, "there is no capacity to pad to: give capacity", CFG_moe_pad,
         CFG_moe_capacity);
}

/* Where the experts of a mixture lie, and where its rows do. */
static void check_expert_layout(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t ep = c->parallel.ep, tp = c->parallel.tp, plane = tp * c->parallel.cp;
    const int64_t cp = c->parallel.cp, slices = c->parallel.slices, cuts = cp * slices;
    char text[200], of_rank[24] = "";
    RULE(c->moe.experts % ep == 0, "ep must divide experts: each of its ranks has as many", CFG_parallel_ep,
         CFG_moe_experts);
    RULE(c->parallel.etp <= 64, "at most 64 ranks can share an expert", CFG_parallel_etp);
    RULE(c->moe.ffn % c->parallel.etp == 0, "etp must divide the width of an expert", CFG_parallel_etp,
         CFG_moe_ffn);
    RULE(!c->parallel.overlap_moe || ep * c->parallel.etp > 1,
         "rows do not travel where each rank has all experts: take ep or etp = 2 or more, or overlap_moe = "
         "false",
         CFG_parallel_overlap_moe, CFG_parallel_ep, CFG_parallel_etp);
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.tp_blocks % c->parallel.etp == 0,
         "the layout cuts inside a canonical block: etp must divide tp_blocks; or take reproducible = run",
         CFG_run_reproducible, CFG_parallel_etp, CFG_parallel_tp_blocks);
    RULE(c->parallel.order != PARALLEL_ORDER_TP_CP_EP_PP_DP || c->parallel.pp == 1 ||
             ep * c->parallel.etp == plane,
         "with pipeline ranks before data-parallel ones, ep x etp must be tp x cp; or take order = "
         "tp-cp-ep-dp-pp",
         CFG_parallel_order, CFG_parallel_ep, CFG_parallel_etp, CFG_parallel_tp, CFG_parallel_cp);
    RULE(tp == 1 || c->parallel.sp,
         "beside experts tp needs sp: without it each of its ranks would send experts the same rows",
         CFG_parallel_sp, CFG_parallel_tp, CFG_moe_experts);
    snprintf(of_rank, sizeof of_rank, "%s%s", cp > 1 ? " / cp" : "", slices > 1 ? " / slices" : "");
    snprintf(text, sizeof text,
             "with sp a rank of a mixture must have whole leaves of gradients: tp must divide micro_batch x "
             "seq_blocks%s, here %lld x %lld",
             of_rank, (long long)c->train.micro_batch, (long long)(c->parallel.seq_blocks / cuts));
    RULE(!c->parallel.sp || c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT ||
             c->train.micro_batch * c->parallel.seq_blocks % (tp * cuts) == 0,
         text, CFG_parallel_tp, CFG_train_micro_batch, CFG_parallel_seq_blocks);
}

/* Experts that begin as parts of a dense layer. */
static void check_upcycle(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t parts = c->model.ffn / c->moe.ffn;
    char text[160];
    if (!c->checkpoint.upcycle) return;
    RULE(*c->checkpoint.load, "there is no dense model to begin as: give checkpoint.load",
         CFG_checkpoint_upcycle, CFG_checkpoint_load);
    RULE(!c->moe.shared_ffn,
         "a dense model has nothing that a shared expert could begin as: take shared_ffn = 0",
         CFG_checkpoint_upcycle, CFG_moe_shared_ffn);
    RULE(c->model.ffn % c->moe.ffn == 0,
         "experts begin as equal parts of a dense layer: moe.ffn must divide model.ffn",
         CFG_checkpoint_upcycle, CFG_moe_ffn, CFG_model_ffn);
    snprintf(text, sizeof text,
             "a dense layer becomes model.ffn / moe.ffn = %lld experts, which must divide experts and topk",
             (long long)parts);
    RULE(parts && c->moe.experts % parts == 0 && c->moe.topk % parts == 0, text, CFG_checkpoint_upcycle,
         CFG_moe_experts, CFG_moe_topk);
    RULE(
        c->moe.router == MOE_ROUTER_SOFTMAX || c->moe.router == MOE_ROUTER_SOFTMAX_PRE || c->moe.normalize,
        "weights that add up to no known number cannot give what the dense layer gave: take normalize = true",
        CFG_checkpoint_upcycle, CFG_moe_router, CFG_moe_normalize);
}

void config_check_moe(ConfigReader *r)
{
    const Config *c = r->config;
    char text[160];
    int64_t slots;
    if (!c->moe.experts) {
        check_dense(r);
        RULE(c->parallel.ep == 1, "a dense model has no experts to spread: give moe.experts, or ep = 1",
             CFG_parallel_ep, CFG_moe_experts);
        RULE(!c->checkpoint.upcycle, "a dense model has no experts to begin as another: give moe.experts",
             CFG_checkpoint_upcycle, CFG_moe_experts);
        RULE(c->parallel.etp == 1, "a dense model has no experts to cut: give moe.experts, or etp = 1",
             CFG_parallel_etp, CFG_moe_experts);
        RULE(!c->parallel.overlap_moe,
             "a dense model has no rows that travel to experts: give moe.experts, or overlap_moe = false",
             CFG_parallel_overlap_moe, CFG_moe_experts);
        return;
    }
    snprintf(text, sizeof text, "a token cannot be sent to more experts than there are: at most %lld",
             (long long)c->moe.experts);
    RULE(c->moe.topk <= c->moe.experts, text, CFG_moe_topk, CFG_moe_experts);
    check_groups(r);
    check_every(r);
    RULE(c->moe.shared_ffn || !c->moe.shared_gate, "there is no shared expert to gate: give shared_ffn",
         CFG_moe_shared_gate, CFG_moe_shared_ffn);
    RULE(c->moe.ffn % c->parallel.tp_blocks == 0, "tp_blocks must divide the width of an expert", CFG_moe_ffn,
         CFG_parallel_tp_blocks);
    RULE(c->moe.shared_ffn % c->parallel.tp_blocks == 0, "tp_blocks must divide shared_ffn",
         CFG_moe_shared_ffn, CFG_parallel_tp_blocks);
    const bool softmax = c->moe.router == MOE_ROUTER_SOFTMAX;
    RULE(!softmax || c->moe.normalize,
         "the weights of softmax add up to 1 by themselves: normalize must be auto or true",
         CFG_moe_normalize, CFG_moe_router);
    RULE(softmax || !c->moe.normalize || c->moe.topk > 1,
         "the one weight of a token would always be 1: normalize needs topk > 1", CFG_moe_normalize,
         CFG_moe_topk);
    RULE(!__builtin_mul_overflow(c->train.micro_batch * c->model.seq, c->moe.topk, &slots) &&
             slots <= INT32_MAX,
         "micro_batch * seq * topk must be below 2^31", CFG_train_micro_batch, CFG_model_seq, CFG_moe_topk);
    RULE(c->moe.dispatcher != MOE_DISPATCHER_ALLGATHER ||
             slots <= INT32_MAX / (c->parallel.ep * c->parallel.etp),
         "where all ranks' tokens are gathered, ep * etp * micro_batch * seq * topk must be below 2^31",
         CFG_moe_dispatcher, CFG_parallel_ep, CFG_parallel_etp, CFG_train_micro_batch, CFG_model_seq,
         CFG_moe_topk);
    check_balance(r);
    check_capacity(r);
    check_upcycle(r);
    check_expert_layout(r);
}
