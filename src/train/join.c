/* See join.h. */
#include "train/join.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/identity.h"
#include "train/spec.h"

static Err dump_config(const Config *cfg, char **text)
{
    size_t size = 0;
    FILE *f = open_memstream(text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the configuration's text");
    config_dump(cfg, f, false);
    return fclose(f) ? err_set(ERR_MEMORY, "no memory for the configuration's text") : ERR_OK;
}

/* Facts that all ranks must share: the program to the byte, every key, and what may differ from a checkpoint. */
static Err facts_of(const Config *cfg, const char *config_text, char **facts)
{
    ConfigLine k = { 0 };
    uint32_t crc;
    size_t size = 0;
    TRY(identity_binary(&crc)); /* (two that are unknown would agree) */
    FILE *f = open_memstream(facts, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for what ranks compare");
    fprintf(f, "megatrain: %s\n", identity_program());
    for (const char *at = config_text; config_dump_next(&at, &k);)
        if (k.value_bytes) fprintf(f, "%s.%.*s: %.*s\n", k.section, k.name_bytes, k.name, k.value_bytes, k.value);
    for (int i = 0; i < CFG_COUNT; i++)
        if (cfg->may_differ[i])
            fprintf(f, "--override: %s.%s\n", config_key((ConfigId)i)->section, config_key((ConfigId)i)->name);
    return fclose(f) ? err_set(ERR_MEMORY, "no memory for what ranks compare") : ERR_OK;
}

/* Beside products NCCL gets what max_ctas says, or so many multiprocessors: products count on it (run.c). */
enum { CTAS_BESIDE_PRODUCTS = 16 };

static NcclCtas ctas_of(NcclCtas said, bool beside)
{
    if (said.max || !beside) return said;
    return (NcclCtas){ said.min, said.min > CTAS_BESIDE_PRODUCTS ? said.min : CTAS_BESIDE_PRODUCTS };
}

static NcclCtas dp_ctas(const Config *c)
{
    const bool beside = c->parallel.overlap_grad || c->parallel.overlap_param || c->parallel.zero > 1;
    return ctas_of((NcclCtas){ (int)c->parallel.nccl_dp_min_ctas, (int)c->parallel.nccl_dp_max_ctas }, beside);
}

static NcclCtas tp_ctas(const Config *c)
{
    return ctas_of((NcclCtas){ (int)c->parallel.nccl_tp_min_ctas, (int)c->parallel.nccl_tp_max_ctas },
                   c->parallel.overlap_tp > 1);
}

Carrier join_carrier(const Config *c)
{
    switch (c->parallel.staged) {
    case PARALLEL_STAGED_FALSE: return CARRIER_NCCL;
    case PARALLEL_STAGED_TRUE: return CARRIER_STAGED;
    default: return CARRIER_ANY;
    }
}

static RanksOptions options_of(const Config *c, Grid grid)
{
    return (RanksOptions){ .grid = grid,
                           .timeout_s = c->parallel.timeout_s,
                           .freeze_s = c->parallel.freeze_s,
                           .stall_s = c->parallel.stall_s,
                           .data_port = (int)c->parallel.data_port,
                           .delay_ms = (int)c->debug.comm_delay_ms,
                           .check_calls = c->debug.comm_check,
                           .cuda = c->run.device == RUN_DEVICE_CUDA,
                           .carrier = join_carrier(c),
                           .near = c->run.bind != RUN_BIND_NONE,
                           .tp_ctas = tp_ctas(c),
                           .dp_ctas = dp_ctas(c),
                           .sums_by_message = spec_sums_by_message(c),
                           .any_order = c->run.reproducible == RUN_REPRODUCIBLE_OFF,
                           .row_pieces = c->moe.experts * c->parallel.etp,
                           .saver = c->checkpoint.async,
                           .by_hosts = c->moe.dispatcher == DISPATCH_NODE && !c->debug.ranks_per_host };
}

/* Did the launcher give all ranks the words that this one has? What it gave may begin with those of a wrapper. */
static bool launched_alike(void)
{
    const char *given = getenv("MEGATRAIN_LAUNCHER_WORDS");
    char own[8192];
    FILE *f = given ? fopen("/proc/self/cmdline", "re") : NULL;
    if (!f) return false;
    const size_t size = fread(own, 1, sizeof own - 1, f), first = strnlen(own, size) + 1;
    fclose(f);
    if (size <= first || size == sizeof own - 1) return false;
    for (size_t i = first; i < size - 1; i++)
        if (!own[i]) own[i] = ' ';
    own[size] = 0;
    const size_t words = strlen(own + first), all = strlen(given);
    return words <= all && !strcmp(given + all - words, own + first);
}

/* Leaves the error with launch.sh, which says it where rank 0 has none. False: there is no such file. */
static bool leave_with_launcher(const Boot *boot, Err err)
{
    const char *number = getenv("MEGATRAIN_LAUNCHER_LEFT"), *hint = err_hint_text();
    const int fd = number ? atoi(number) : -1;
    char text[4096];
    struct stat st;
    if (fd < 3 || fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_nlink) return false;
    const int n = snprintf(text, sizeof text, "megatrain: error (%s): rank %d: %s\n%s%s%s", err_name(err), boot->rank,
                           err_message(), *hint ? "hint: " : "", hint, *hint ? "\n" : "");
    return n < (int)sizeof text && write(fd, text, (size_t)n) == n;
}

Err join_said_once(const Boot *boot, Err err)
{
    if (err != ERR_CONFIG || boot->rank == 0) return err;
    if (launched_alike() && leave_with_launcher(boot, err)) return err_elsewhere(err);
    if (getenv("MEGATRAIN_LAUNCHER_WORDS")) return err; /* other words than rank 0 */
    log_warn("%s: %s", err_name(err), err_message());
    return err_elsewhere(err);
}

/* No rank waits for another's answer to a question that it was not asked. */
static Err agree_on_config(Ranks *r, const Config *cfg)
{
    char *text = NULL, *facts = NULL;
    Err err = dump_config(cfg, &text);
    if (!err) err = facts_of(cfg, text, &facts);
    if (!err) err = ranks_agree_on_job(r, facts);
    free(facts);
    free(text);
    return err;
}

Err join_meet(Ranks *r, const Config *cfg, const Boot *boot, const char *folder, const volatile sig_atomic_t *stop,
              bool place)
{
    RanksOptions o = options_of(cfg, (Grid){ 0 });
    o.stop = stop;
    o.folder = folder;
    TRY(ranks_meet(r, boot, &o));
    if (boot->size > 1) TRY(agree_on_config(r, cfg));
    return place ? ranks_place(r, &o) : ERR_OK;
}

Err join_ranks(Ranks *r, const Config *cfg, const Boot *boot, const char *folder, const volatile sig_atomic_t *stop,
               char **text)
{
    Grid grid;
    char *facts = NULL;
    *text = NULL;
    TRY(join_said_once(boot, grid_spec(cfg, &grid)));
    TRY(dump_config(cfg, text));
    if (boot->size > 1) TRY(join_said_once(boot, facts_of(cfg, *text, &facts)));
    RanksOptions o = options_of(cfg, grid);
    o.stop = stop;
    o.folder = folder;
    o.facts = facts;
    Err err = r->met ? ranks_connect(r, &o) : ranks_open(r, boot, &o);
    free(facts);
    return err;
}
