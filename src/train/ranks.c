/* See ranks.h. */
#include "train/ranks.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/run_files.h"
#include "boot/secret.h"
#include "boot/supervised.h"

enum { HOST_ID_BYTES = 128, LAST_WORDS_US = 500 * 1000, JUDGED_S = 10, LEAVE_S = 10 };
enum { RUN_FILES = 8 };
enum { ABORT_S = 3 }; /* launch.sh kills a rank 5 s after another failed */

/* ---- hosts ---- */

/* Place where a rank runs: its machine and the processors that it may use there. */
typedef struct Place {
    char host[HOST_ID_BYTES];
    cpu_set_t cpus;
} Place;

/* The same for all processes of one running system, different for any other. */
static Err host_id(char id[HOST_ID_BYTES])
{
    char boot[IDENTITY_BOOT_BYTES], name[64];
    errno = 0;
    const int full = !identity_boot(boot) && (errno == EMFILE || errno == ENFILE) ? errno : 0;
    if (full) {
        err_set(ERR_RENDEZVOUS, "no file descriptor is left: %s", strerror(full));
        return err_hint_descriptors(full);
    }
    if (gethostname(name, sizeof name)) return err_set(ERR_RENDEZVOUS, "this host has no name: %m");
    name[sizeof name - 1] = 0;
    snprintf(id, HOST_ID_BYTES, "%s %s", name, boot);
    return ERR_OK;
}

static int64_t host_of(const void *places, int rank)
{
    const Place *all = places;
    int first = 0;
    while (strcmp(all[first].host, all[rank].host) != 0) first++;
    return first;
}

/* Experts' rows are to cross the network host by host: by the hosts on which the ranks are. */
static Err spread_over_hosts(Ranks *r)
{
    const Place *places = r->places;
    char runs[256] = "";
    int used = 0;
    if (!r->grid.ep) return ERR_OK;
    r->grid.ep_hosts = grid_ep_hosts(r->grid, host_of, places);
    if (r->grid.ep_hosts) return ERR_OK;
    for (int first = 0, end; first < r->boot.size && used < (int)sizeof runs - 80; first = end) {
        for (end = first; end < r->boot.size && host_of(places, end) == host_of(places, first);) end++;
        used += snprintf(runs + used, sizeof runs - (size_t)used, "%s%d-%d on '%.40s'", first ? ", " : "", first,
                         end - 1, places[first].host);
    }
    err_set(ERR_CONFIG,
            "moe.dispatcher=node: hosts have unequal parts of a group of ep x etp = %d x %d ranks, or a part "
            "of an expert without the others: ranks %s%s",
            r->grid.ep, r->grid.etp, runs, used < (int)sizeof runs - 80 ? "" : ", ...");
    return err_hint("start as many ranks on each host, neighbours together; or moe.dispatcher=alltoall");
}

static Err post_place(Ranks *r)
{
    char key[32];
    Place own = { 0 };
    TRY(host_id(own.host));
    if (sched_getaffinity(0, sizeof own.cpus, &own.cpus)) CPU_ZERO(&own.cpus); /* then all are taken to share */
    r->host_free_bytes = host_free_bytes(); /* no rank goes on before all have posted, and so read it */
    snprintf(key, sizeof key, "host/%d", r->boot.rank);
    return store_set(r->store, key, &own, sizeof own);
}

/* Places that all ranks posted; forget_places frees them, after an error too. */
static Err read_places(Ranks *r, double timeout_s)
{
    char key[32];
    size_t n;
    Place *places = r->places = calloc((size_t)r->boot.size, sizeof *places);
    if (!places) return err_set(ERR_MEMORY, "no memory for the names of %d hosts", r->boot.size);
    for (int p = 0; p < r->boot.size; p++) {
        snprintf(key, sizeof key, "host/%d", p);
        TRY(store_get(r->store, key, &places[p], sizeof places[p], &n, timeout_s));
    }
    return ERR_OK;
}

static void forget_places(Ranks *r)
{
    free(r->places);
    r->places = NULL;
}

/* Every rank counts the same hosts. */
static void count_hosts(Ranks *r)
{
    const Place *places = r->places, *own = &places[r->boot.rank];
    r->local_rank = r->local_size = r->cpu_sharers = r->hosts = 0;
    for (int p = 0; p < r->boot.size; p++) {
        bool here = !strcmp(places[p].host, own->host), known = false;
        r->local_size += here;
        r->local_rank += here && p < r->boot.rank;
        r->cpu_sharers += here && CPU_EQUAL(&places[p].cpus, &own->cpus);
        for (int q = 0; q < p && !known; q++) known = !strcmp(places[q].host, places[p].host);
        r->hosts += !known;
    }
}

/* ---- verdicts ---- */

static Err kind_of(const Verdict *v)
{
    for (Err e = ERR_OK; e < ERR_COUNT; e++)
        if (e != ERR_IO && err_exit_code(e) == v->exit_code) return e;
    return ERR_PEER;
}

/* Can the culprit still print its own error? */
static bool speaks_itself(const Verdict *v) { return v->what == WATCH_LEFT || v->what == WATCH_ERROR; }

typedef struct {
    NcclWorld *world;
    char why[WATCH_TEXT_BYTES];
    sem_t done;
} Aborting;

static void *abort_nccl(void *arg)
{
    Aborting *a = arg;
    nccl_world_abort(a->world, a->why);
    sem_post(&a->done);
    return NULL;
}

/* Work on the GPU ends, and peers hear of it; but NCCL may hang in that, too: then without. */
static void abort_within(NcclWorld *world, const char *why)
{
    static Aborting a; /* the thread may outlive this call */
    pthread_t thread;
    struct timespec until;
    if (!world) return;
    a.world = world;
    snprintf(a.why, sizeof a.why, "%s", why);
    sem_init(&a.done, 0, 0);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ABORT_S;
    if (pthread_create(&thread, NULL, abort_nccl, &a)) return;
    pthread_detach(thread);
    while (sem_clockwait(&a.done, CLOCK_MONOTONIC, &until) && errno == EINTR) continue;
}

/* On the watch thread; whatever the main thread is waiting for, the process ends here. */
static void on_verdict(void *context, const Verdict *v)
{
    Ranks *r = context;
    log_set_rank(r->boot.rank, r->boot.size);
    supervised_cause(r->boot.supervised, v->text);
    if (speaks_itself(v) && v->rank == r->boot.rank) return; /* the main thread is about to */
    if (r->boot.supervised) r->boot.supervised->judged = true;
    /* (the culprit of a hang may live when nobody else can speak) */
    const bool last = v->what == WATCH_HUNG && v->rank == r->boot.rank;
    const int turn = last ? r->boot.size - 1 : r->boot.rank - (v->rank < r->boot.rank);
    if (!speaks_itself(v) && (last || v->rank != r->boot.rank) && speaker_is_me(&r->speaker, turn)) {
        err_set(kind_of(v), "%s", v->text);
        if (v->what == WATCH_KILLED || v->what == WATCH_FROZEN)
            err_hint("look at that rank's host and log; the run goes on from its newest checkpoint %s",
                     r->boot.supervised ? "by itself (run.restarts)" : "when started again");
        else err_hint("parallel.stall_s is the limit; megatrain doctor and a stack trace of that rank tell more");
        err_print(kind_of(v), false);
    }
    /* (it speaks on its own stderr; rank 0 has the log) */
    if (speaks_itself(v)) log_copy("megatrain: error (%s): %s", err_name(kind_of(v)), v->text);
    abort_within(__atomic_load_n(&r->nccl, __ATOMIC_ACQUIRE), v->text);
    if (r->boot.rank == 0) usleep(LAST_WORDS_US); /* its server still serves: all hear the verdict */
    _exit(v->exit_code);
}

/* ---- opening ---- */

static Err gloo_set(void *user, const char *key, const void *bytes, int64_t n)
{
    return store_set(user, key, bytes, (size_t)n);
}

static Err gloo_get(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s)
{
    size_t size = 0;
    TRY(store_get(user, key, bytes, (size_t)cap, &size, timeout_s));
    *n = (int64_t)size;
    return ERR_OK;
}

static Err connect_ranks(Ranks *r, const RanksOptions *o)
{
    char address[64];
    fault_point("connect");
    TRY(store_local_addr(r->store, address, sizeof address));
    if (r->hosts > 1 && (!strncmp(address, "127.", 4) || !strcmp(address, "::1")))
        return err_set(ERR_RENDEZVOUS, "the ranks are on %d hosts, and rank %d reaches rank 0 as '%s'", r->hosts,
                       r->boot.rank, address),
               err_hint("MASTER_ADDR must be an address of rank 0's host that the other hosts reach");
    GlooOptions g = { .rank = r->boot.rank,
                      .size = r->boot.size,
                      .address = address,
                      .secret = r->boot.secret,
                      .start = store_start(r->store),
                      .timeout_s = o->timeout_s,
                      .delay_ms = o->delay_ms,
                      .port = o->data_port ? o->data_port + r->local_rank : 0,
                      .port_step = r->local_size,
                      .store = { r->store, gloo_set, gloo_get } };
    return gloo_world_open(g, &r->gloo);
}

/* GPUs know each other through the same store. */
static Err connect_gpus(Ranks *r, const RanksOptions *o)
{
    if (r->boot.rank == 0 && r->gpu.nccl)
        log_info("between GPUs: %s%s", r->gpu.text,
                 o->any_order             ? ", with NVLS: repeats may differ"
                 : nccl_gathers_by_nvls() ? ", with NVLS for gathers alone, so that repeats agree"
                                          : ", without NVLS, so that repeats agree");
    if (r->boot.rank == 0 && !r->gpu.nccl) log_warn("between GPUs: %s", r->gpu.text);
    if (!r->gpu.nccl) return ERR_OK;
    NcclOptions n = { .rank = r->boot.rank,
                      .size = r->boot.size,
                      .gpu = r->gpu.index,
                      .own_host = r->gpu.own_host,
                      .timeout_s = o->timeout_s,
                      .delay_ms = o->delay_ms,
                      .any_order = o->any_order,
                      .store = { r->store, gloo_set, gloo_get } };
    NcclWorld *world;
    TRY(nccl_world_open(&n, &world));
    __atomic_store_n(&r->nccl, world, __ATOMIC_RELEASE); /* the watch thread looks */
    return ERR_OK;
}

static NcclUse use_of(const Ranks *r, GroupKind kind)
{
    NcclUse use = { .messages = group_messages(grid_shape(r->grid), kind, r->sums_by_message) };
    switch (kind) {
    case GROUP_TP:
    case GROUP_SP:
    case GROUP_KV: use.ctas = r->tp_ctas; break;
    case GROUP_DP:
    case GROUP_DP_CP:
    case GROUP_STAGE_LOW:
    case GROUP_STAGE_HIGH:
    case GROUP_ZERO:
    case GROUP_ZERO_FAR:
    case GROUP_EXPERT_ZERO:
    case GROUP_EXPERT_ZERO_FAR: use.ctas = r->dp_ctas; break;
    case GROUP_TP_EP:
    case GROUP_EP_HOST:
    case GROUP_EP_RAIL: use.pieces = r->row_pieces; break;
    default: break;
    }
    return use;
}

/* The host's group carries what lies in host memory, whatever the device. */
static Err open_group(void *user, Comm *c, GroupKind kind, const int *members, int size)
{
    Ranks *r = user;
    const char *name = group_name(kind);
    if (!r->cuda || kind == GROUP_HOST) return comm_open_gloo(r->gloo, c, name, members, size);
    if (!r->nccl) return comm_open_staged(r->gpu.index, r->gloo, c, name, members, size);
    return comm_open_nccl(r->nccl, r->gloo, c, name, members, size, use_of(r, kind));
}

/* One id for each group of the run: its kind and its first member. */
static void watch_group(Ranks *r, GroupKind kind)
{
    Comm *c = &r->world.comm[kind];
    if (c->size == 1) return;
    uint32_t id = (uint32_t)(WORLD_COMMS * world_first_member(&r->world, kind) + (int)kind);
    comm_observe(c, watch_join(r->watch, id, c->name));
}

/* For the thread that writes checkpoints: calls of its own, through the host. */
static Err open_saver(Ranks *r)
{
    const int size = r->boot.size;
    int *members = calloc((size_t)size, sizeof *members);
    if (!members) return err_set(ERR_MEMORY, "no memory for a group of %d ranks", size);
    for (int i = 0; i < size; i++) members[i] = i;
    Err err = comm_open_gloo(r->gloo, &r->save, "save", members, size);
    free(members);
    if (err) return err;
    const uint32_t id = (uint32_t)(WORLD_COMMS * size); /* behind those of watch_group */
    comm_observe(&r->save, watch_join(r->watch, id, "save"));
    return ERR_OK;
}

/* Leaves the error to one rank if rank 0 cannot be asked: the next one speaks, the others say what they know without
 * calling it the error. */
static Err leave_to_one(const Ranks *r, Err err)
{
    if (!err || err_is_elsewhere()) return err;
    if (speaker_is_me(&r->speaker, r->boot.rank > 1 ? r->boot.rank - 1 : 0)) return err;
    log_warn("%s: %s", err_name(err), err_message());
    return err_elsewhere(err);
}

/* To meet takes some, and data, logs and checkpoints open files while the run goes on: better no start than no
 * checkpoint. */
static Err leave_files(void)
{
    if (file_descriptors_left(RUN_FILES)) return ERR_OK;
    err_set(ERR_RENDEZVOUS, "less than %d file descriptors are left for the run", RUN_FILES);
    return err_hint_descriptors(EMFILE);
}

static Err meet(Ranks *r, const RanksOptions *o)
{
    char job[sizeof r->boot.job + 32];
    const bool from_file = !*r->boot.secret;
    const double began = clock_s();
    TRY(leave_files());
    snprintf(job, sizeof job, "%s, worker %d", r->boot.job, r->boot.attempt); /* each start has its word */
    speaker_open_job(&r->speaker, o->folder, r->boot.secret, job);
    fault_point("rendezvous");
    if (from_file) TRY(secret_find(&r->boot, o->folder, o->timeout_s));
    Err err = store_open(&r->boot, o->timeout_s - (from_file && r->boot.rank ? clock_s() - began : 0), &r->store);
    if (from_file) secret_forget(&r->boot, o->folder);
    TRY(err);
    speaker_open(&r->speaker, o->folder, r->boot.secret, store_start(r->store));
    fault_point("met");
    return watch_open(r->store, o->freeze_s, o->stall_s, on_verdict, r, &r->watch);
}

Err ranks_agree_on_job(Ranks *r, const char *facts)
{
    const Agreement job = { .facts = facts,
                            .err = ERR_CONFIG,
                            .what = "the ranks do not run the same job",
                            .way = "start every rank with the same program and the same configuration" };
    return ranks_agree(r, &job);
}

Err ranks_place(Ranks *r, const RanksOptions *o)
{
    const bool placed = r->placed, several = r->boot.size > 1;
    r->placed = true;
    if (placed) return ERR_OK;
    if (!several) r->host_free_bytes = host_free_bytes();
    if (!several) return ERR_OK;
    TRY(post_place(r));
    TRY(read_places(r, o->timeout_s));
    count_hosts(r);
    const GpuChoice c = { r->boot.rank, r->boot.size, r->local_rank, r->local_size, o->carrier, o->near, o->timeout_s };
    return o->cuda ? rank_gpu_choose(r->store, &c, &r->gpu) : ERR_OK;
}

static Err open_many(Ranks *r, const RanksOptions *o)
{
    TRY(ranks_agree_on_job(r, o->facts));
    TRY(ranks_place(r, o));
    if (o->by_hosts) TRY(spread_over_hosts(r));
    forget_places(r);
    TRY(connect_ranks(r, o));
    if (o->cuda) TRY(connect_gpus(r, o));
    TRY(world_open(&r->world, r->grid, r->boot.rank, (CommOpener){ r, open_group }));
    r->world_open = true;
    for (int kind = 0; kind < WORLD_COMMS; kind++) watch_group(r, kind);
    if (o->saver) TRY(open_saver(r));
    TRY(leave_files());
    if (!o->check_calls) return ERR_OK;
    for (int i = 0; i < WORLD_COMMS; i++) comm_check_calls(&r->world.comm[i], true);
    return ERR_OK;
}

Err ranks_meet(Ranks *r, const Boot *boot, const RanksOptions *o)
{
    const double begin = clock_s();
    *r = (Ranks){ .boot = *boot,
                  .local_size = 1,
                  .cpu_sharers = 1,
                  .hosts = 1,
                  .gpu = { .sharers = 1, .neighbours = 1 },
                  .timeout_s = o->timeout_s,
                  .met = true };
    r->boot.stop = o->stop;
    if (boot->size == 1) return ERR_OK;
    log_set_rank(boot->rank, boot->size);
    TRY(leave_to_one(r, meet(r, o)));
    r->ready_s = clock_s() - begin;
    return ERR_OK;
}

Err ranks_tell(Ranks *r, const char *key, char *text, size_t size)
{
    size_t n = 0;
    if (r->boot.size == 1) return ERR_OK;
    if (!r->boot.rank) return store_set(r->store, key, text, strlen(text));
    TRY(store_get(r->store, key, text, size - 1, &n, r->timeout_s));
    text[n] = 0;
    return ERR_OK;
}

Err ranks_least(Ranks *r, const char *key, int64_t *value)
{
    char name[48];
    int64_t other;
    size_t n;
    if (r->boot.size == 1) return ERR_OK;
    snprintf(name, sizeof name, "%s/%d", key, r->boot.rank);
    TRY(store_set(r->store, name, value, sizeof *value));
    for (int p = 0; p < r->boot.size; p++) {
        snprintf(name, sizeof name, "%s/%d", key, p);
        TRY(store_get(r->store, name, &other, sizeof other, &n, r->timeout_s));
        if (other < *value) *value = other;
    }
    return ERR_OK;
}

static const double LOOK_S = 20, LOOK_EVERY_S = 0.05; /* a network file system may show a file a little later */

static Err leave_mark(Ranks *r, const char *path)
{
    FileWriter mark;
    TRY_AS(ERR_STORAGE, file_create(path, &mark));
    TRY_AS(ERR_STORAGE, file_sync_close(&mark));
    Err err = store_set(r->store, "folder/mark", path, strlen(path));
    for (int other = 1; other < r->boot.size && !err; other++) {
        char key[48];
        snprintf(key, sizeof key, "folder/seen/%d", other);
        err = store_get(r->store, key, NULL, 0, NULL, r->timeout_s);
    }
    unlink(path);
    return err;
}

static Err look_for_mark(Ranks *r, const char *folder)
{
    char path[PATH_MAX], key[48], host[STORE_HOST_BYTES] = "";
    size_t n = 0;
    TRY(store_get(r->store, "folder/mark", path, sizeof path - 1, &n, r->timeout_s));
    path[n] = 0;
    /* (rank 0 waits for timeout_s: the rank that says why is to end before that) */
    const double look_s = r->timeout_s / 2 < LOOK_S ? r->timeout_s / 2 : LOOK_S;
    for (const double until = clock_s() + look_s; !file_exists(path);) {
        if (clock_s() < until) {
            usleep((useconds_t)(1e6 * LOOK_EVERY_S));
            continue;
        }
        gethostname(host, sizeof host - 1);
        err_set(ERR_STORAGE, "rank %d on host '%s' does not see what rank 0 wrote into run.dir = '%s'", r->boot.rank,
                host, folder);
        return err_hint("run.dir must be one folder that all hosts share, by the same name on each of them");
    }
    snprintf(key, sizeof key, "folder/seen/%d", r->boot.rank);
    return store_set(r->store, key, "", 0);
}

Err ranks_see_folder(Ranks *r, const char *folder)
{
    char path[PATH_MAX];
    if (r->boot.size == 1) return ERR_OK;
    if (r->boot.rank) return look_for_mark(r, folder);
    if (snprintf(path, sizeof path, "%s/" RUN_SHARED_MARK "%d-%llx", folder, (int)getpid(),
                 (unsigned long long)(1e6 * clock_unix_s())) >= PATH_MAX)
        return err_set(ERR_CONFIG, "run.dir is too long: '%s'", folder);
    return leave_mark(r, path);
}

Err ranks_agree(Ranks *r, const Agreement *a)
{
    return r->boot.size == 1 ? ERR_OK : store_agree(r->store, a, r->timeout_s);
}

Err ranks_connect(Ranks *r, const RanksOptions *o)
{
    const double begin = clock_s();
    r->grid = o->grid;
    r->cuda = o->cuda;
    r->sums_by_message = o->sums_by_message;
    r->row_pieces = o->row_pieces;
    r->tp_ctas = o->tp_ctas;
    r->dp_ctas = o->dp_ctas;
    if (r->boot.size > 1) {
        TRY(open_many(r, o));
        r->ready_s += clock_s() - begin;
        return ERR_OK;
    }
    TRY(ranks_place(r, o));
    TRY(world_open_self(&r->world));
    comm_open_self(&r->save, "save");
    r->world_open = true;
    return ERR_OK;
}

Err ranks_open(Ranks *r, const Boot *boot, const RanksOptions *o)
{
    TRY(ranks_meet(r, boot, o));
    return ranks_connect(r, o);
}

/* ---- closing ---- */

/* Finds whose fault it was. The verdict says who prints: this rank, or another, and on_verdict ends this process. */
static Err await_verdict(Ranks *r, Err outcome)
{
    Verdict v;
    if (outcome == ERR_STOPPED) return r->boot.rank ? err_elsewhere(outcome) : outcome; /* agreed on */
    if (!outcome) return outcome;
    /* (what is another's failure is not reported: it would be this rank's) */
    bool judged = watch_report(r->watch, err_is_elsewhere() ? ERR_OK : outcome, err_message(), &v);
    if (!judged) return leave_to_one(r, outcome);
    if (v.rank == r->boot.rank)
        return err_prefix(err_exit_code(outcome) == v.exit_code ? outcome : kind_of(&v), "rank %d", v.rank);
    sleep(JUDGED_S);
    return outcome;
}

Err ranks_end(Ranks *r, Err outcome)
{
    ErrKept first = { 0 };
    if (r->watch) outcome = await_verdict(r, outcome);
    if (!outcome) return ERR_OK;
    err_keep(&first);
    if (r->gloo) gloo_world_abort(r->gloo, first.message); /* nobody waits for peers that are left alone */
    abort_within(r->nccl, first.message);
    return err_again(&first, outcome);
}

Err ranks_close(Ranks *r, Err outcome)
{
    ErrKept first = { 0 };
    if (outcome) err_keep(&first);
    forget_places(r);
    comm_close(&r->save);
    if (r->world_open) world_close(&r->world);
    nccl_world_close(__atomic_exchange_n(&r->nccl, NULL, __ATOMIC_ACQ_REL));
    gloo_world_close(r->gloo);
    watch_close(r->watch, err_exit_code(outcome), first.message);
    /* rank 0 serves until the last one is done */
    Err closed = store_close(r->store, outcome ? LEAVE_S : r->timeout_s);
    *r = (Ranks){ .local_size = 1 };
    return outcome ? err_again(&first, outcome) : closed;
}
