/*
 * Relations between the keys of a mixture of experts (docs/moe.md), a part of config_check().
 */
#include <string.h>

#include "config/config_reader.h"
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

static void check_groups(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t experts = c->moe.experts, groups = c->moe.groups, most = c->moe.group_topk;
    char text[160];
    RULE(experts % groups == 0, "groups must divide experts", CFG_moe_groups, CFG_moe_experts);
    config_take_near(r, CFG_moe_groups);
    snprintf(text, sizeof text, "a token cannot be sent to more groups than there are: at most %lld",
             (long long)groups);
    RULE(most <= groups, text, CFG_moe_group_topk, CFG_moe_groups);
    RULE(c->moe.topk % most == 0, "group_topk must divide topk: a group counts by its topk / group_topk best",
         CFG_moe_group_topk, CFG_moe_topk);
    config_take_near(r, CFG_moe_group_topk);
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
    RULE(count != c->model.layers || layer_set_count(&set), "no block is a mixture: give a 1", CFG_moe_every,
         CFG_moe_experts);
    config_take(r, "moe.every=1, or moe.experts=0 moe.every=1");
}

static void check_balance(ConfigReader *r)
{
    const Config *c = r->config;
    const bool none = c->moe.balance == MOE_BALANCE_NONE, bias = c->moe.balance == MOE_BALANCE_BIAS;
    const bool sinkhorn = c->moe.balance == MOE_BALANCE_SINKHORN,
               forced = c->moe.balance == MOE_BALANCE_FORCED, aux = c->moe.aux_coeff > 0;
    RULE(!none || !aux, "there is no balance loss to weigh: give balance", CFG_moe_aux_coeff,
         CFG_moe_balance);
    RULE(!forced || c->moe.groups == 1, "experts take turns in no groups", CFG_moe_balance, CFG_moe_groups);
    config_take(r, "moe.groups=1, or moe.groups=1 moe.group_topk=1");
    RULE(!forced || !aux, "forced balance has no loss", CFG_moe_aux_coeff, CFG_moe_balance);
    config_take(r, "moe.aux_coeff=0");
    RULE(!forced || !(c->moe.jitter > 0),
         "forced balance does not ask the router, so noise on its input does nothing", CFG_moe_jitter,
         CFG_moe_balance);
    config_take(r, "moe.jitter=0");
    RULE(!sinkhorn || !aux, "sinkhorn balances by itself, without a loss", CFG_moe_aux_coeff,
         CFG_moe_balance);
    config_take(r, "moe.aux_coeff=0");
    RULE(none || bias || forced || sinkhorn || aux,
         "the balance loss would count for nothing: aux_coeff must be above 0", CFG_moe_aux_coeff,
         CFG_moe_balance);
    RULE(!bias || c->moe.router == MOE_ROUTER_SIGMOID || c->moe.router == MOE_ROUTER_SQRT_SOFTPLUS,
         "biases are added to scores of 0 and up", CFG_moe_balance, CFG_moe_router);
    config_take(r, "moe.router=sigmoid, or moe.router=sqrt_softplus");
    RULE(c->train.micro_batch % c->moe.unit == 0,
         "a micro-batch must hold whole balance units: unit must divide it", CFG_moe_unit,
         CFG_train_micro_batch);
    config_take_near(r, CFG_moe_unit);
    RULE(c->moe.unit == 1 || c->moe.balance != MOE_BALANCE_SEQ_AUX, "seq_aux counts over single samples",
         CFG_moe_unit, CFG_moe_balance);
    config_take(r, "moe.unit=1, or moe.balance=aux");
}

static void check_capacity(ConfigReader *r)
{
    const Config *c = r->config;
    const bool limited = c->moe.capacity > 0;
    const bool bounded = c->moe.slack > 0, drops = c->moe.overflow == MOE_OVERFLOW_DROP;
    RULE(limited || (bounded && drops) || c->moe.drop == MOE_DROP_PROBS, "nothing is dropped: give capacity",
         CFG_moe_drop, CFG_moe_capacity);
    RULE(!bounded || c->moe.slack >= 1, "not even an even load would have room: it is 1 or more, or 0",
         CFG_moe_slack);
    config_take(r, "moe.slack=1, or moe.slack=0, or moe.slack=0 moe.overflow=stop");
    RULE(bounded || c->moe.overflow == MOE_OVERFLOW_STOP,
         "there is room for all rows that can come: give slack", CFG_moe_overflow, CFG_moe_slack);
    RULE(!drops || c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT, "what is dropped depends on the layout",
         CFG_moe_overflow, CFG_run_reproducible);
    config_take(r, "run.reproducible=run, or moe.overflow=stop, or moe.overflow=stop moe.drop=probs");
    RULE(limited || !c->moe.pad, "there is no capacity to pad to: give capacity", CFG_moe_pad,
         CFG_moe_capacity);
    config_take(r, "moe.pad=false");
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
         "rows do not travel where each rank has all experts: ep or etp must be 2 or more",
         CFG_parallel_overlap_moe, CFG_parallel_ep, CFG_parallel_etp);
    config_take(r, "parallel.overlap_moe=false");
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.tp_blocks % c->parallel.etp == 0,
         "the layout cuts inside a canonical block: etp must divide tp_blocks", CFG_run_reproducible,
         CFG_parallel_etp, CFG_parallel_tp_blocks);
    config_take(r, "parallel.tp_blocks=%lld, or run.reproducible=run", (long long)c->parallel.etp);
    RULE(c->parallel.order != PARALLEL_ORDER_TP_CP_EP_PP_DP || c->parallel.pp == 1 ||
             ep * c->parallel.etp == plane,
         "with pipeline ranks before data-parallel ones, ep x etp must be tp x cp", CFG_parallel_order,
         CFG_parallel_ep, CFG_parallel_etp, CFG_parallel_tp, CFG_parallel_cp);
    config_take(r, "parallel.order=tp-cp-ep-dp-pp");
    RULE(tp == 1 || c->parallel.sp,
         "beside experts tp needs sp: without it each of its ranks would send experts the same rows",
         CFG_parallel_sp, CFG_parallel_tp, CFG_moe_experts);
    config_take(r, "parallel.sp=auto");
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
    char text[160];
    if (!c->checkpoint.upcycle || !c->moe.ffn) return; /* (no width at all is a mistake of its own) */
    const int64_t parts = c->model.ffn / c->moe.ffn;
    RULE(*c->checkpoint.load, "there is no dense model to begin as: give checkpoint.load",
         CFG_checkpoint_upcycle, CFG_checkpoint_load);
    RULE(!c->moe.shared_ffn, "a dense model has nothing that a shared expert could begin as",
         CFG_checkpoint_upcycle, CFG_moe_shared_ffn);
    config_take(r, "moe.shared_ffn=0, or moe.shared_ffn=0 moe.shared_gate=false");
    RULE(c->model.ffn % c->moe.ffn == 0,
         "experts begin as equal parts of a dense layer: moe.ffn must divide model.ffn",
         CFG_checkpoint_upcycle, CFG_moe_ffn, CFG_model_ffn);
    snprintf(text, sizeof text,
             "a dense layer becomes model.ffn / moe.ffn = %lld experts, which must divide experts and topk",
             (long long)parts);
    RULE(parts && c->moe.experts % parts == 0 && c->moe.topk % parts == 0, text, CFG_checkpoint_upcycle,
         CFG_moe_experts, CFG_moe_topk);
    RULE(c->moe.router == MOE_ROUTER_SOFTMAX || c->moe.router == MOE_ROUTER_SOFTMAX_PRE || c->moe.normalize,
         "weights that add up to no known number cannot give what the dense layer gave",
         CFG_checkpoint_upcycle, CFG_moe_router, CFG_moe_normalize);
    config_take(r, "moe.normalize=true, or moe.router=softmax");
}

void config_check_moe(ConfigReader *r)
{
    const Config *c = r->config;
    char text[160];
    int64_t slots;
    if (!c->moe.experts) {
        check_dense(r);
        RULE(c->parallel.ep == 1, "a dense model has no experts to spread: give moe.experts", CFG_parallel_ep,
             CFG_moe_experts);
        config_take(r, "parallel.ep=1");
        RULE(!c->checkpoint.upcycle, "a dense model has no experts to begin as another: give moe.experts",
             CFG_checkpoint_upcycle, CFG_moe_experts);
        RULE(c->parallel.etp == 1, "a dense model has no experts to cut: give moe.experts", CFG_parallel_etp,
             CFG_moe_experts);
        config_take(r, "parallel.etp=1");
        RULE(!c->parallel.overlap_moe, "a dense model has no rows that travel to experts: give moe.experts",
             CFG_parallel_overlap_moe, CFG_moe_experts);
        config_take(r, "parallel.overlap_moe=false");
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
