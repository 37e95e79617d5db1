/*
 * Environment -> Boot. One function per launcher fills rank, size, local ranks and what it knows of the
 * meeting point; what is common (MASTER_ADDR, MASTER_PORT, checks, job text) comes afterwards.
 */
#include "boot/boot.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "boot/link.h"

enum { DEFAULT_PORT = 29500, SLURM_PORT = 20000, SLURM_PORTS = 9000, RANKS_MAX = 1 << 20 };
enum { LAST_PORT = 65535, LAST_FIRST_PORT = LAST_PORT - BOOT_PORTS + 1 };

typedef struct {
    BootGet get;
    void *context;
    char id[160]; /* the launcher's name of this job; "" if it has none */
} Env;

static const char *value_of(const Env *e, const char *name)
{
    const char *v = e->get(e->context, name);
    return v && *v ? v : NULL;
}

static bool have(const Env *e, const char *name) { return value_of(e, name) != NULL; }

/* Makes a value of somebody else's environment fit an error of one line. */
static const char *printable(const char *value, char out[64])
{
    snprintf(out, 64, "%s", value);
    net_make_printable(out);
    return out;
}

/* The variable as an integer of [low, high]; left alone if not set. */
static Err number(const Env *e, const char *name, int low, int high, int *out)
{
    const char *v = value_of(e, name);
    if (!v) return ERR_OK;
    char *end, text[64];
    errno = 0;
    long x = strtol(v, &end, 10);
    if (errno || *end || !isdigit((unsigned char)*v) || x < low || x > high) {
        err_set(ERR_CONFIG, "environment: %s='%s' is not an integer of %d..%d", name, printable(v, text), low, high);
        return err_hint("the launcher sets %s; set it right or take it out of the environment", name);
    }
    *out = (int)x;
    return ERR_OK;
}

/* Like number(), for a variable that must be there. */
static Err need(const Env *e, const char *because, const char *name, int low, int high, int *out)
{
    if (!have(e, name)) {
        err_set(ERR_CONFIG, "environment: %s is set but %s is not", because, name);
        return err_hint("set both, or take %s out of the environment to run as one process", because);
    }
    return number(e, name, low, high, out);
}

static uint64_t hash(const char *text)
{
    uint64_t h = 0xCBF29CE484222325u; /* FNV-1a */
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001B3u;
    return h;
}

uint64_t boot_key(const Boot *b) { return hash(b->job); }

/* First host of a Slurm node list: "gpu[003-010,12],x7" -> "gpu003". */
static void first_host(const char *list, char *out, size_t size)
{
    size_t n = 0;
    bool in_brackets = false, skipping = false;
    for (const char *p = list; *p && (in_brackets || *p != ','); p++) {
        if (*p == '[') in_brackets = true;
        else if (*p == ']') in_brackets = skipping = false;
        else if (in_brackets && (*p == '-' || *p == ',')) skipping = true;
        else if (!skipping && n + 1 < size) out[n++] = *p;
    }
    out[n] = 0;
}

/* Entry `node` of Slurm's "2(x3),1" (tasks of each node), or -1. */
static int tasks_of_node(const char *list, int node)
{
    for (const char *p = list; *p;) {
        char *end;
        long tasks = strtol(p, &end, 10), times = 1;
        if (end == p || tasks < 1 || tasks > RANKS_MAX) return -1;
        if (end[0] == '(' && end[1] == 'x') {
            times = strtol(end + 2, &end, 10);
            if (*end++ != ')' || times < 1) return -1;
        }
        if (node < times) return (int)tasks;
        node -= (int)times;
        if (*end && *end != ',') return -1;
        p = *end ? end + 1 : end;
    }
    return -1;
}

static Err read_plain(const Env *e, Boot *b)
{
    TRY(need(e, "RANK", "WORLD_SIZE", 1, RANKS_MAX, &b->size));
    TRY(need(e, "WORLD_SIZE", "RANK", 0, RANKS_MAX, &b->rank));
    TRY(number(e, "LOCAL_RANK", 0, RANKS_MAX, &b->local_rank));
    TRY(number(e, "LOCAL_WORLD_SIZE", 1, RANKS_MAX, &b->local_size));
    TRY(number(e, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 20, &b->restart));
    return ERR_OK;
}

static void name_plain(Env *e, Boot *b)
{
    const char *run = value_of(e, "TORCHELASTIC_RUN_ID");
    b->launcher = run ? "torchrun" : "environment";
    if (run) snprintf(e->id, sizeof e->id, "%s", run);
}

static Err read_openmpi(Env *e, Boot *b)
{
    b->launcher = "mpirun";
    TRY(need(e, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", 1, RANKS_MAX, &b->size));
    TRY(need(e, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", 0, RANKS_MAX, &b->rank));
    TRY(number(e, "OMPI_COMM_WORLD_LOCAL_RANK", 0, RANKS_MAX, &b->local_rank));
    TRY(number(e, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, RANKS_MAX, &b->local_size));
    const char *id = value_of(e, "PMIX_NAMESPACE");
    if (!id) id = value_of(e, "OMPI_MCA_ess_base_jobid");
    if (id) snprintf(e->id, sizeof e->id, "%s", id);
    return ERR_OK;
}

static Err read_pmi(const Env *e, Boot *b)
{
    b->launcher = "mpiexec";
    TRY(need(e, "PMI_RANK", "PMI_SIZE", 1, RANKS_MAX, &b->size));
    TRY(need(e, "PMI_SIZE", "PMI_RANK", 0, RANKS_MAX, &b->rank));
    TRY(number(e, "MPI_LOCALRANKID", 0, RANKS_MAX, &b->local_rank));
    TRY(number(e, "MPI_LOCALNRANKS", 1, RANKS_MAX, &b->local_size));
    return ERR_OK;
}

static Err read_slurm(Env *e, Boot *b)
{
    int nodes = 0, node = 0;
    b->launcher = "srun";
    TRY(need(e, "SLURM_STEP_ID", "SLURM_PROCID", 0, RANKS_MAX, &b->rank));
    TRY(need(e, "SLURM_STEP_ID", have(e, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1,
             RANKS_MAX, &b->size));
    TRY(number(e, "SLURM_LOCALID", 0, RANKS_MAX, &b->local_rank));
    TRY(number(e, "SLURM_NODEID", 0, RANKS_MAX, &node));
    TRY(number(e, "SLURM_RESTART_COUNT", 0, 1 << 20, &b->restart));
    TRY(number(e, have(e, "SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES", 1, RANKS_MAX, &nodes));
    const char *tasks = value_of(e, "SLURM_STEP_TASKS_PER_NODE"), *hosts = value_of(e, "SLURM_STEP_NODELIST");
    if (tasks) b->local_size = tasks_of_node(tasks, node);
    if (nodes == 1) b->local_size = b->size;
    if (!hosts) hosts = value_of(e, "SLURM_JOB_NODELIST");
    if (hosts && nodes != 1) first_host(hosts, b->addr, sizeof b->addr);
    const char *job = value_of(e, "SLURM_JOB_ID"), *ports = value_of(e, "SLURM_STEP_RESV_PORTS");
    snprintf(e->id, sizeof e->id, "%s.%s", job ? job : "", value_of(e, "SLURM_STEP_ID"));
    b->port = SLURM_PORT + (int)(hash(e->id) % SLURM_PORTS);
    if (ports) { /* "12000-12003", "12000,12002" */
        long first = strtol(ports, NULL, 10);
        if (first > 0 && first <= LAST_PORT) b->port = (int)first, b->port_given = true;
    }
    return ERR_OK;
}

/* salloc, or a batch script: the tasks are there for srun to start. */
static int tasks_without_step(const Env *e)
{
    const char *tasks = value_of(e, "SLURM_NTASKS");
    if (!have(e, "SLURM_JOB_ID") || !tasks) return 0;
    const long n = strtol(tasks, NULL, 10);
    return n > 0 && n <= RANKS_MAX ? (int)n : 0;
}

/* srun --mpi=pmi2 sets PMI_*, too; Slurm's variables then say more. Hydra's proxies, started by srun, have others. */
static bool pmi_is_slurms(const Env *e)
{
    const char *rank = value_of(e, "SLURM_PROCID"), *pmi = value_of(e, "PMI_RANK");
    return have(e, "SLURM_STEP_ID") && !have(e, "MPI_LOCALRANKID") && rank && pmi && !strcmp(rank, pmi);
}

static Err read_launcher(Env *e, Boot *b)
{
    bool pmi = have(e, "PMI_RANK") || have(e, "PMI_SIZE");
    if (have(e, "RANK") || have(e, "WORLD_SIZE")) {
        TRY(read_plain(e, b));
        name_plain(e, b);
        return ERR_OK;
    }
    if (have(e, "OMPI_COMM_WORLD_RANK") || have(e, "OMPI_COMM_WORLD_SIZE")) return read_openmpi(e, b);
    if (pmi && !pmi_is_slurms(e)) return read_pmi(e, b);
    if (have(e, "SLURM_STEP_ID")) return read_slurm(e, b);
    b->launcher = "none";
    b->local_rank = 0;
    b->job_tasks = tasks_without_step(e);
    return ERR_OK;
}

static Err check_ranks(const Boot *b)
{
    if (b->rank >= b->size) {
        err_set(ERR_CONFIG, "environment: rank %d of %d ranks (%s): ranks count from 0", b->rank, b->size, b->launcher);
        return err_hint("check what sets the rank and the number of ranks");
    }
    if (b->local_size > b->size)
        return err_set(ERR_CONFIG, "environment: %d ranks on this node but %d in all (%s)", b->local_size, b->size,
                       b->launcher);
    return ERR_OK;
}

static bool is_loopback(const char *addr)
{
    return !strcmp(addr, "localhost") || !strncmp(addr, "127.", 4) || !strcmp(addr, "::1");
}

/* Copies an address, in the form that URLs have: "[::1]" is the address ::1. */
static void copy_address(const char *text, char *out)
{
    const size_t n = strlen(text);
    const bool brackets = n > 2 && text[0] == '[' && text[n - 1] == ']';
    sprintf(out, "%.*s", (int)(brackets ? n - 2 : n), text + brackets);
}

static Err read_address(const Env *e, Boot *b)
{
    const char *addr = value_of(e, "MASTER_ADDR");
    if (addr && strlen(addr) >= sizeof b->addr) return err_set(ERR_CONFIG, "environment: MASTER_ADDR is too long");
    if (addr) copy_address(addr, b->addr);
    if (b->size == 1) b->local_size = 1;
    bool one_node = b->local_size == b->size;
    if (!*b->addr && one_node) strcpy(b->addr, "127.0.0.1");
    if (!*b->addr) {
        err_set(ERR_CONFIG, "environment: %d ranks (%s), perhaps on several nodes, and no MASTER_ADDR", b->size,
                b->launcher);
        return err_hint("set MASTER_ADDR to the host of rank 0 (mpirun: -x MASTER_ADDR=HOST); 127.0.0.1 if there "
                        "is one node only");
    }
    if (is_loopback(b->addr) && b->local_size < 0) b->local_size = b->size; /* nobody else can reach rank 0 */
    if (b->local_rank < 0 && b->local_size == b->size) b->local_rank = b->rank;
    if (b->local_size > 0 && b->local_rank >= b->local_size) {
        err_set(ERR_CONFIG, "environment: local rank %d of %d on this node (%s): they count from 0", b->local_rank,
                b->local_size, b->launcher);
        return err_hint("check what sets the local rank and how many ranks there are on a node");
    }
    return ERR_OK;
}

static Err read_port(const Env *e, Boot *b)
{
    int given = 0;
    TRY(number(e, "MASTER_PORT", 1, LAST_PORT, &given));
    if (given) b->port = given, b->port_given = true;
    const char *shared = value_of(e, "TORCHELASTIC_USE_AGENT_STORE");
    if (given && shared && (!strcasecmp(shared, "true") || !strcmp(shared, "1"))) {
        /* torchrun's agent listens on MASTER_PORT itself. The restart count keeps clear of what is left of the
         * last start. */
        int next = given + 1 + b->restart % 1024;
        b->port = next <= LAST_FIRST_PORT ? next : given - BOOT_PORTS - b->restart % 1024;
    }
    return ERR_OK;
}

static Err read_secret(const Env *e, Boot *b)
{
    const char *secret = value_of(e, "MEGATRAIN_SECRET");
    const size_t bytes = secret ? strlen(secret) : 0;
    if (!secret) return ERR_OK;
    if (bytes < BOOT_SECRET_MIN || bytes >= sizeof b->secret) {
        err_set(ERR_CONFIG, "environment: MEGATRAIN_SECRET has %zu bytes, not %d to %zu", bytes, BOOT_SECRET_MIN,
                sizeof b->secret - 1);
        return err_hint("64 random digits are right: od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'");
    }
    strcpy(b->secret, secret);
    return ERR_OK;
}

Err boot_read(Boot *out, BootGet get, void *context)
{
    Env e = { .get = get, .context = context };
    Boot b = { .size = 1, .local_rank = -1, .local_size = -1, .port = DEFAULT_PORT };
    TRY(read_launcher(&e, &b));
    TRY(check_ranks(&b));
    TRY(read_address(&e, &b));
    TRY(read_port(&e, &b));
    TRY(read_secret(&e, &b));
    const char *id = value_of(&e, "MEGATRAIN_JOB"); /* stands in where a launcher has no name for a job */
    if (!id) id = e.id;
    snprintf(b.job, sizeof b.job, "%s '%.150s', %d ranks, port %d, start %d", b.launcher, id, b.size, b.port,
             b.restart);
    *out = b;
    return ERR_OK;
}

static const char *from_environment(void *context, const char *name)
{
    (void)context;
    return getenv(name);
}

Err boot_from_env(Boot *out) { return boot_read(out, from_environment, NULL); }
