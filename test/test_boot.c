/* Environments of every launcher -> rank, size and meeting point. */
#include "test.h"

#include "boot/boot.h"

/* "NAME=value NAME=value ..." (values without blanks; an empty one is allowed) */
static const char *get(void *context, const char *name)
{
    static char values[64][256];
    static int turn;
    char *value = values[turn++ % 64];
    size_t n = strlen(name);
    for (const char *p = context; *p;) {
        size_t word = strcspn(p, " ");
        if (word > n && !strncmp(p, name, n) && p[n] == '=') {
            snprintf(value, sizeof values[0], "%.*s", (int)(word - n - 1), p + n + 1);
            return value;
        }
        p += word + (p[word] == ' ');
    }
    return NULL;
}

typedef struct {
    const char *env, *launcher;
    int rank, size, local_rank, local_size;
    const char *addr;
    int port; /* 0: any of Slurm's */
    bool port_given;
    int restart;
} Case;

#define TORCH \
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=4000 TORCHELASTIC_RUN_ID=r "
#define OMPI "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
#define STEP "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 SLURM_NODEID=1 "

static const Case cases[] = {
    { "", "none", 0, 1, 0, 1, "127.0.0.1", 29500, false, 0 },
    { "RANK= WORLD_SIZE=", "none", 0, 1, 0, 1, "127.0.0.1", 29500, false, 0 },
    { "MASTER_ADDR=n7", "none", 0, 1, 0, 1, "n7", 29500, false, 0 },
    /* by hand and scripts/launch.sh */
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", "environment", 1, 2, 1, 2, "127.0.0.1", 29500, false, 0 },
    { "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=500", "environment", 1, 2, 1, 2, "127.0.0.1",
      500, true, 0 },
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=n0", "environment", 1, 2, -1, -1, "n0", 29500, false, 0 },
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=[::1]", "environment", 1, 2, 1, 2, "::1", 29500, false, 0 },
    /* torchrun, whose agent may sit on MASTER_PORT */
    { TORCH, "torchrun", 3, 8, 1, 2, "n0", 4000, true, 0 },
    { TORCH "TORCHELASTIC_USE_AGENT_STORE=False", "torchrun", 3, 8, 1, 2, "n0", 4000, true, 0 },
    { TORCH "TORCHELASTIC_USE_AGENT_STORE=True", "torchrun", 3, 8, 1, 2, "n0", 4001, true, 0 },
    { TORCH "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2", "torchrun", 3, 8, 1, 2, "n0", 4003, true,
      2 },
    { "RANK=0 WORLD_SIZE=1 MASTER_ADDR=n0 MASTER_PORT=65530 TORCHELASTIC_RUN_ID=r TORCHELASTIC_USE_AGENT_STORE=True",
      "torchrun", 0, 1, 0, 1, "n0", 65514, true, 0 },
    /* Open MPI, also inside an allocation of Slurm, where SLURM_PROCID is 0 everywhere */
    { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=4", "mpirun", 1, 4, 1, 4, "127.0.0.1", 29500, false, 0 },
    { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=7000", "mpirun", 1, 4, 1, 2, "n0", 7000, true, 0 },
    { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
      "mpirun", 1, 4, 1, 4, "127.0.0.1", 29500, false, 0 },
    { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=4 RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0", "environment", 0, 2, -1, -1, "n0", 29500,
      false, 0 },
    /* hydra, also with proxies started by srun */
    { "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3", "mpiexec", 2, 3, 2, 3, "127.0.0.1", 29500, false,
      0 },
    { "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=n0 SLURM_STEP_ID=0 SLURM_PROCID=2",
      "mpiexec", 2, 3, 0, 1, "n0", 29500, false, 0 },
    /* srun */
    { STEP "SLURM_STEP_NUM_NODES=1", "srun", 2, 3, 0, 3, "127.0.0.1", 0, false, 0 },
    { STEP "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[003-010,12],x7 SLURM_STEP_TASKS_PER_NODE=2,1", "srun", 2, 3,
      0, 1, "gpu003", 0, false, 0 },
    { STEP "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=r[1-2]n[03-04]-ib SLURM_STEP_TASKS_PER_NODE=3(x4)", "srun", 2, 3,
      0, 3, "r1n03-ib", 0, false, 0 },
    { STEP "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[0-1] MASTER_ADDR=127.0.0.1 MASTER_PORT=81", "srun", 2, 3, 0, 3,
      "127.0.0.1", 81, true, 0 },
    { STEP "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=a,b SLURM_STEP_RESV_PORTS=12000-12003 SLURM_RESTART_COUNT=4",
      "srun", 2, 3, 0, -1, "a", 12000, true, 4 },
    { STEP "SLURM_STEP_NUM_NODES=1 PMI_RANK=2 PMI_SIZE=3", "srun", 2, 3, 0, 3, "127.0.0.1", 0, false, 0 },
    /* in the batch script itself: nobody else is there */
    { "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0", "none", 0, 1, 0, 1, "127.0.0.1", 29500, false,
      0 },
};

TEST(every_launcher)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Case *c = &cases[i];
        Boot b;
        Err err = boot_read(&b, get, (void *)c->env);
        CHECK_MSG(!err, "%s: %s", c->env, err_message());
        if (err) continue;
        CHECK_MSG(!strcmp(b.launcher, c->launcher), "%s: launcher %s", c->env, b.launcher);
        CHECK_MSG(b.rank == c->rank && b.size == c->size, "%s: rank %d of %d", c->env, b.rank, b.size);
        CHECK_MSG(b.local_rank == c->local_rank && b.local_size == c->local_size, "%s: local rank %d of %d", c->env,
                  b.local_rank, b.local_size);
        CHECK_MSG(!strcmp(b.addr, c->addr), "%s: %s", c->env, b.addr);
        CHECK_MSG(c->port ? b.port == c->port : b.port >= 20000 && b.port < 29500, "%s: port %d", c->env, b.port);
        CHECK_MSG(b.port_given == c->port_given && b.restart == c->restart, "%s: %d %d", c->env, b.port_given,
                  b.restart);
    }
}

static const struct {
    const char *env, *text;
} bad[] = {
    { "RANK=0", "RANK is set but WORLD_SIZE is not" },
    { "WORLD_SIZE=2", "WORLD_SIZE is set but RANK is not" },
    { "RANK=0 WORLD_SIZE=", "RANK is set but WORLD_SIZE is not" },
    { "RANK=one WORLD_SIZE=2", "RANK='one' is not an integer" },
    { "RANK=1x WORLD_SIZE=2", "RANK='1x'" },
    { "RANK=-1 WORLD_SIZE=2", "RANK='-1'" },
    { "RANK=0 WORLD_SIZE=+4", "WORLD_SIZE='+4' is not an integer" },
    { "RANK=0 WORLD_SIZE=4\nmegatrain:error(numerics)\x1b\xff", "WORLD_SIZE='4?megatrain:error(numerics)?" },
    { "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0 MEGATRAIN_SECRET=too-short", "MEGATRAIN_SECRET has 9 bytes, not 16 to 255" },
    { "RANK=1 WORLD_SIZE=99999999999", "WORLD_SIZE='99999999999'" },
    { "RANK=2 WORLD_SIZE=2 MASTER_ADDR=n0", "rank 2 of 2" },
    { "RANK=0 WORLD_SIZE=0", "WORLD_SIZE='0'" },
    { "RANK=0 WORLD_SIZE=2", "no MASTER_ADDR" },
    { "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=n0", "3 ranks on this node but 2 in all" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n0", "local rank 2 of 2 on this node" },
    { "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=70000", "MASTER_PORT='70000'" },
    { "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=http", "MASTER_PORT='http'" },
    { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=2", "no MASTER_ADDR" },
    { "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not" },
    { "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", "no MASTER_ADDR" },
    { "PMI_SIZE=3", "PMI_SIZE is set but PMI_RANK is not" },
    { "SLURM_STEP_ID=0 SLURM_JOB_ID=1 SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID is not" },
    { STEP "SLURM_STEP_NUM_NODES=2", "no MASTER_ADDR" },
};

TEST(slurm_tasks_that_srun_did_not_start)
{
    static const struct {
        const char *env;
        int tasks;
    } all[] = { { "SLURM_JOB_ID=77 SLURM_NTASKS=2", 2 },
                { "SLURM_JOB_ID=77 SLURM_NTASKS=2 SLURM_PROCID=0", 2 }, /* a batch script */
                { "SLURM_JOB_ID=77", 0 },
                { "SLURM_NTASKS=2", 0 },
                { "SLURM_JOB_ID=77 SLURM_NTASKS=x", 0 },
                { STEP "SLURM_NTASKS=3 MASTER_ADDR=n0", 0 },
                { OMPI "OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_JOB_ID=77 SLURM_NTASKS=4", 0 } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        Boot b;
        OK(boot_read(&b, get, (void *)all[i].env));
        CHECK_MSG(b.job_tasks == all[i].tasks, "%s: %d", all[i].env, b.job_tasks);
    }
}

TEST(one_clear_error)
{
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Boot b;
        FAILS(boot_read(&b, get, (void *)bad[i].env), ERR_CONFIG, bad[i].text);
        CHECK_MSG(*err_hint_text() || strstr(bad[i].env, "LOCAL_WORLD_SIZE=3"), "no hint: %s", bad[i].env);
    }
}

static uint64_t key_of(const char *env)
{
    Boot b;
    OK(boot_read(&b, get, (void *)env));
    return boot_key(&b);
}

TEST(jobs_have_different_keys)
{
#define HAND " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
    uint64_t key = key_of("RANK=0" HAND);
    CHECK(key == key_of("RANK=1" HAND));
    CHECK(key == key_of("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost")); /* one host has several names */
    CHECK(key != key_of("RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1"));
    CHECK(key != key_of("RANK=0 MASTER_PORT=29501" HAND));
    CHECK(key != key_of("RANK=0 TORCHELASTIC_RESTART_COUNT=1" HAND));
    CHECK(key != key_of("RANK=0 TORCHELASTIC_RUN_ID=a" HAND));
    CHECK(key_of("RANK=0 MEGATRAIN_JOB=a" HAND) != key_of("RANK=0 MEGATRAIN_JOB=b" HAND));
    CHECK(key_of(STEP "SLURM_STEP_NUM_NODES=1") != key_of("SLURM_JOB_ID=78 SLURM_STEP_ID=0 SLURM_PROCID=2 "
                                                          "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=1"));
}

TEST_MAIN
