/*
 * Relations between the keys of sequences that several ranks share (docs/context.md), a part of config_check().
 */
#include "config/config_reader.h"
#include "base/heads.h"

/* Can `cp` ranks get equal shares of what a tp rank has: whole key heads, or whole parts of one? */
static bool heads_divide(const Config *c, int64_t cp)
{
    const int64_t heads = c->model.kv_heads, tp = c->parallel.tp, own = heads > tp ? heads / tp : 1;
    const int64_t parts = kv_head_parts(c->parallel.tp_blocks, c->model.heads, heads, c->model.head_dim);
    return own % cp == 0 || (cp % own == 0 && heads * parts / tp % cp == 0);
}

enum { RING_RANKS_MAX = 16, A2A_RANKS_MAX = 8 }; /* (messages of one exchange: comm.h) */

int64_t config_cp_comm(const Config *c, LayerPattern *out)
{
    static const char *const words[CONTEXT_COMMS] = { CONTEXT_COMM_LIST(CHOICE_TEXT) };
    return layer_pattern_read_words(c->parallel.cp_comm, words, CONTEXT_COMMS, out);
}

static bool some_block(const Config *c, ContextComm way) { return layer_pattern_has(&c->derived.cp_comm, way); }

int64_t config_cp_heads(const Config *c)
{
    const int64_t cp = c->parallel.cp;
    if (c->parallel.cp_heads) return c->parallel.cp_heads;
    if (!some_block(c, CONTEXT_HIERARCHICAL)) return 1;
    int64_t heads = cp / 2 > A2A_RANKS_MAX ? A2A_RANKS_MAX : cp / 2;
    while (heads > 1 && (cp % heads || !heads_divide(c, heads))) heads--;
    return heads > 1 ? heads : 1;
}

bool config_meets(const Config *c, MixerWord mixer, ContextComm way)
{
    for (int i = 0; i < (int)c->model.layers; i++)
        if (layer_pattern_at(&c->derived.mixer, i) == mixer && layer_pattern_at(&c->derived.cp_comm, i) == way)
            return true;
    return false;
}

static bool attention_meets(const Config *c, ContextComm way) { return config_meets(c, MIXER_WORD_ATTENTION, way); }

static bool has_state(int64_t mixer) { return mixer != MIXER_WORD_ATTENTION && mixer != MIXER_WORD_NONE; }

/* Blocks without a mixer go with those before them, or behind. */
static bool goes_with_states(const LayerPattern *p, int run)
{
    for (int i = run; i >= 0; i--)
        if (p->value[i] != MIXER_WORD_NONE) return has_state(p->value[i]);
    for (int i = run; i < p->runs; i++)
        if (p->value[i] != MIXER_WORD_NONE) return has_state(p->value[i]);
    return false;
}

void config_ways(const Config *c, const char *state_way, const char *way, char list[CONFIG_WAYS_BYTES])
{
    const LayerPattern *p = &c->derived.mixer;
    size_t n = 0;
    *list = 0;
    for (int i = 0, times = 0; i < p->runs; i++) {
        const bool state = goes_with_states(p, i), last = i + 1 == p->runs, alone = n == 0 && last;
        times += (int)p->times[i];
        if (!last && goes_with_states(p, i + 1) == state) continue;
        n += (size_t)snprintf(list + n, CONFIG_WAYS_BYTES - n, "%s%s", n ? "," : "", state ? state_way : way);
        if (times > 1 && !alone) n += (size_t)snprintf(list + n, CONFIG_WAYS_BYTES - n, "*%d", times);
        times = 0;
    }
}

void config_take_ways(ConfigReader *r, const char *state_way, const char *way)
{
    char list[CONFIG_WAYS_BYTES];
    config_ways(r->config, state_way, way, list);
    config_take(r, "parallel.cp_comm=%s, or parallel.cp_comm=%s parallel.cp_heads=0", list, list);
}

/* Blocks with attention in this way. */
static void take_way(ConfigReader *r, const char *way)
{
    config_take_ways(r, "a2a", way);
    if (config_has_states(r->config)) config_take_ways(r, "state", way);
}

static void take_other_exchange(ConfigReader *r, bool all)
{
    config_take(r, all ? "parallel.cp_comm=hierarchical" : "parallel.cp_heads=0");
    take_way(r, "ring");
}

/* Checks an exchange of heads among so many ranks: all, or neighbours. */
static void check_exchange(ConfigReader *r, bool all, int64_t ranks)
{
    const Config *c = r->config;
    RULE(ranks <= A2A_RANKS_MAX, "heads are exchanged between 8 ranks at most", CFG_parallel_cp_comm, CFG_parallel_cp,
         CFG_parallel_cp_heads);
    take_other_exchange(r, all);
    RULE(!attention_meets(c, all ? CONTEXT_A2A : CONTEXT_HIERARCHICAL) || heads_divide(c, ranks),
         "each rank gets whole key heads of a tp rank, or whole parts of one", CFG_parallel_cp_comm, CFG_parallel_cp,
         CFG_parallel_cp_heads, CFG_parallel_tp, CFG_model_kv_heads, CFG_parallel_tp_blocks);
    take_other_exchange(r, all);
}

static void check_heads(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t cp = c->parallel.cp, heads = c->derived.cp_heads;
    const bool all = some_block(c, CONTEXT_A2A), neighbours = some_block(c, CONTEXT_HIERARCHICAL);
    RULE(neighbours || all || heads <= 1, "only cp_comm = hierarchical has neighbours that exchange heads",
         CFG_parallel_cp_heads, CFG_parallel_cp_comm);
    config_take(r, "parallel.cp_comm=hierarchical, or parallel.cp_heads=0");
    RULE(neighbours || !all || heads <= 1 || heads == cp, "a2a is between all ranks of cp", CFG_parallel_cp_heads,
         CFG_parallel_cp_comm, CFG_parallel_cp);
    config_take(r, "parallel.cp_comm=hierarchical, or parallel.cp_heads=0");
    RULE(!neighbours || cp % heads == 0, "cp_heads must divide cp", CFG_parallel_cp_heads, CFG_parallel_cp);
    config_take_near(r, CFG_parallel_cp_heads);
    if (all) check_exchange(r, true, cp);
    if (neighbours) check_exchange(r, false, heads);
}

/* Ranks that pass keys part by part: all, or those that have the same heads. */
static void check_ring(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t cp = c->parallel.cp, heads = c->derived.cp_heads;
    const int64_t ranks = some_block(c, CONTEXT_RING) ? cp : cp > heads ? cp / heads : 1;
    const int64_t slices = c->parallel.slices, part = c->model.seq / (2 * ranks * slices);
    const bool ring = ranks > 1 && (some_block(c, CONTEXT_RING) || some_block(c, CONTEXT_HIERARCHICAL));
    char text[200];
    RULE(!ring || ranks <= RING_RANKS_MAX, "a ring has at most 16 ranks", CFG_parallel_cp_comm, CFG_parallel_cp);
    take_way(r, "allgather");
    snprintf(text, sizeof text,
             "a ring cuts inside a block of keys: attn_block must divide seq / (2 x its ranks%s), here %lld",
             slices > 1 ? " x slices" : "", (long long)part);
    RULE(!ring || c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || part % c->parallel.attn_block == 0, text,
         CFG_parallel_cp_comm, CFG_parallel_attn_block, CFG_parallel_cp, CFG_model_seq, CFG_parallel_slices);
    take_way(r, "allgather");
}

/* False: no list of ways. */
static bool check_ways(ConfigReader *r)
{
    LayerPattern ways;
    char text[120];
    const int64_t length = config_cp_comm(r->config, &ways), layers = r->config->model.layers;
    RULE(length >= 0,
         config_list_text(length,
                          "must be allgather, ring, a2a, hierarchical or state, or a list of them with repetitions"),
         CFG_parallel_cp_comm);
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)length,
             (long long)layers);
    RULE(length <= layers, text, CFG_parallel_cp_comm, CFG_model_layers);
    return length >= 0;
}

static bool states_meet(const Config *c)
{
    for (int i = 0; i < (int)c->model.layers; i++) {
        const int64_t way = layer_pattern_at(&c->derived.cp_comm, i);
        if (has_state(layer_pattern_at(&c->derived.mixer, i)) && way != CONTEXT_A2A && way != CONTEXT_STATE)
            return false;
    }
    return true;
}

static void check_states(ConfigReader *r)
{
    RULE(states_meet(r->config),
         "blocks with a state exchange positions for heads, or hand it on: theirs must be a2a or state",
         CFG_parallel_cp_comm, CFG_model_mixer, CFG_parallel_cp);
    take_way(r, "allgather");
    take_way(r, "a2a");
    RULE(!attention_meets(r->config, CONTEXT_STATE), "blocks with attention have no state to hand on",
         CFG_parallel_cp_comm, CFG_model_mixer);
    take_way(r, "allgather");
}

/* Sequences over several ranks. */
void config_check_context(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t cp = c->parallel.cp, parts = 2 * cp;
    if (!check_ways(r) || cp == 1) return;
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.seq_blocks % parts == 0,
         "the layout cuts inside a canonical block: 2 x cp must divide seq_blocks", CFG_run_reproducible,
         CFG_parallel_cp, CFG_parallel_seq_blocks);
    config_take(r, "parallel.seq_blocks=%lld, or run.reproducible=run", (long long)parts);
    check_states(r);
    check_heads(r);
    check_ring(r);
}
