/*
 * Relations between the keys of a mixture of experts (docs/moe.md), a part of config_check().
 */
#include "config/config_reader.h"
#include "base/layer_set.h"

/* Keys that say how a mixture is, given for a dense model. */
static void check_dense(ConfigReader *r)
{
    for (ConfigId id = CFG_moe_topk; id <= CFG_moe_overflow; id++) {
        bool same = config_is_default(r->config, id);
        if (id == CFG_moe_normalize) same = !r->config->moe.normalize; /* these are filled in */
        if (id == CFG_moe_aux_coeff) same = !(r->config->moe.aux_coeff > 0);
        if (id == CFG_moe_slack) same = !(r->config->moe.slack > 0);
        RULE(same, "only a mixture has it: give moe.experts", id, CFG_moe_experts);
    }
}

static void check_groups(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t experts = c->moe.experts, groups = c->moe.groups, most = c->moe.group_topk;
    char text[160];
    snprintf(text, sizeof text, "a token cannot be sent to more groups than there are: at most %lld",
             (long long)groups);
    RULE(most <= groups, text, CFG_moe_group_topk, CFG_moe_groups);
    if (experts % groups || most > groups || c->moe.topk > experts) return;
    snprintf(text, sizeof text, "the chosen groups hold fewer: group_topk * experts / groups is %lld",
             (long long)(most * (experts / groups)));
    RULE(c->moe.topk <= most * (experts / groups), text, CFG_moe_topk, CFG_moe_group_topk, CFG_moe_groups,
         CFG_moe_experts);
}

/* Has some block of the set a feed-forward layer? */
static bool meets_ffn(const Config *c, const LayerSet *set)
{
    for (int i = 0; i < (int)c->model.layers; i++)
        if (layer_set_has(set, i) && layer_pattern_at(&c->derived.ffn_layers, i)) return true;
    return false;
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
    if (count != c->model.layers || !layer_set_count(&set)) return;
    RULE(meets_ffn(c, &set), "no block that would be a mixture has a feed-forward layer", CFG_moe_every,
         CFG_model_ffn_layers);
    config_take(r, "moe.every=1, or model.ffn_layers=1");
}

/* Checks the places of a mixture's experts and of its rows. */
static void check_expert_layout(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t tp = c->parallel.tp, cp = c->parallel.cp, slices = c->parallel.slices, cuts = cp * slices;
    char text[200], of_rank[24] = "";
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.tp_blocks % c->parallel.etp == 0,
         "the layout cuts inside a canonical block: etp must divide tp_blocks", CFG_run_reproducible, CFG_parallel_etp,
         CFG_parallel_tp_blocks);
    config_take(r, "parallel.tp_blocks=%lld, or run.reproducible=run", (long long)c->parallel.etp);
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
    RULE(*c->checkpoint.load, "there is no dense model to begin as: give checkpoint.load", CFG_checkpoint_upcycle,
         CFG_checkpoint_load);
    RULE(!c->moe.shared_ffn, "a dense model has nothing that a shared expert could begin as", CFG_checkpoint_upcycle,
         CFG_moe_shared_ffn);
    config_take(r, "moe.shared_ffn=0, or moe.shared_ffn=0 moe.shared_gate=false");
    RULE(!c->moe.latent, "parts of a dense layer read and write rows as wide as the model", CFG_checkpoint_upcycle,
         CFG_moe_latent);
    config_take(r, "moe.latent=0");
    RULE(c->model.ffn % c->moe.ffn == 0, "experts begin as equal parts of a dense layer: moe.ffn must divide model.ffn",
         CFG_checkpoint_upcycle, CFG_moe_ffn, CFG_model_ffn);
    snprintf(text, sizeof text,
             "a dense layer becomes model.ffn / moe.ffn = %lld experts, which must divide experts and topk",
             (long long)parts);
    RULE(parts && c->moe.experts % parts == 0 && c->moe.topk % parts == 0, text, CFG_checkpoint_upcycle,
         CFG_moe_experts, CFG_moe_topk);
    RULE(c->moe.router == ROUTER_SOFTMAX || c->moe.router == ROUTER_SOFTMAX_PRE || c->moe.normalize,
         "weights that add up to no known number cannot give what the dense layer gave", CFG_checkpoint_upcycle,
         CFG_moe_router, CFG_moe_normalize);
    config_take(r, "moe.normalize=true, or moe.router=softmax");
}

void config_check_moe(ConfigReader *r)
{
    const Config *c = r->config;
    char text[160];
    int64_t slots;
    if (!c->moe.experts) {
        check_dense(r);
        return;
    }
    snprintf(text, sizeof text, "a token cannot be sent to more experts than there are: at most %lld",
             (long long)c->moe.experts);
    RULE(c->moe.topk <= c->moe.experts, text, CFG_moe_topk, CFG_moe_experts);
    check_groups(r);
    check_every(r);
    RULE(!__builtin_mul_overflow(c->train.micro_batch * c->model.seq, c->moe.topk, &slots) && slots <= INT32_MAX,
         "micro_batch * seq * topk must be below 2^31", CFG_train_micro_batch, CFG_model_seq, CFG_moe_topk);
    RULE(!dispatcher_numbers((DispatcherKind)c->moe.dispatcher) ||
             slots <= INT32_MAX / (c->parallel.ep * c->parallel.etp),
         "where choices of all ranks' tokens are numbered, ep * etp * micro_batch * seq * topk must be below "
         "2^31",
         CFG_moe_dispatcher, CFG_parallel_ep, CFG_parallel_etp, CFG_train_micro_batch, CFG_model_seq, CFG_moe_topk);
    check_upcycle(r);
    check_expert_layout(r);
}
