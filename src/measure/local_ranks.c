/* See local_ranks.h. */
#include "measure/local_ranks.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/words.h"

enum { KEYS = LOCAL_RANKS_MOST * LOCAL_RANKS_MOST, KEY_BYTES = 64, VALUE_BYTES = 2048, MESSAGE_BYTES = 1024 };
static const double PATIENCE_S = 60;

/* A key of the store that Gloo's ranks find each other by. */
typedef struct {
    atomic_int ready;
    char key[KEY_BYTES], bytes[VALUE_BYTES];
    int64_t n;
} Stored;

struct LocalRanks {
    Stored store[KEYS];
    atomic_int stored, met, failed; /* failed: 1 + the rank that failed first */
    char secret[33];                /* of this start alone: others of this machine are not let in */
    Err err;
    char message[MESSAGE_BYTES];
};

Err local_shared(int64_t bytes, void **out)
{
    *out = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return err_set(ERR_MEMORY, "no memory to share among processes");
    return ERR_OK;
}

void local_unshare(void *p, int64_t bytes) { munmap(p, (size_t)bytes); }

/* ---- inside ---- */

Err local_ranks_meet(LocalRank *r)
{
    const int turn = atomic_fetch_add(&r->all->met, 1) / r->size;
    const double until = clock_s() + PATIENCE_S;
    while (atomic_load(&r->all->met) < (turn + 1) * r->size) {
        if (clock_s() > until) return err_set(ERR_PEER, "a process of this machine did not come");
        usleep(20);
    }
    return ERR_OK;
}

static Err store_set(void *user, const char *key, const void *bytes, int64_t n)
{
    LocalRanks *all = user;
    const int i = atomic_fetch_add(&all->stored, 1);
    ASSERT(i < KEYS && n <= VALUE_BYTES && strlen(key) < KEY_BYTES);
    strcpy(all->store[i].key, key);
    memcpy(all->store[i].bytes, bytes, (size_t)n);
    all->store[i].n = n;
    atomic_store(&all->store[i].ready, 1);
    return ERR_OK;
}

static const Stored *stored(const LocalRanks *all, const char *key)
{
    for (int i = 0; i < KEYS; i++)
        if (atomic_load(&all->store[i].ready) && !strcmp(all->store[i].key, key)) return &all->store[i];
    return NULL;
}

static Err store_get(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s)
{
    const double until = clock_s() + timeout_s;
    const Stored *found;
    while (!(found = stored(user, key))) {
        if (clock_s() > until) return err_set(ERR_RENDEZVOUS, "a process of this machine did not come");
        usleep(200);
    }
    ASSERT(found->n <= cap);
    memcpy(bytes, found->bytes, (size_t)found->n);
    *n = found->n;
    return ERR_OK;
}

Err local_ranks_connect(LocalRank *r, GlooWorld **out)
{
    return gloo_world_open((GlooOptions){ r->rank,
                                          r->size,
                                          "127.0.0.1",
                                          r->all->secret,
                                          "ranks of this machine",
                                          PATIENCE_S,
                                          { r->all, store_set, store_get } },
                           out);
}

/* ---- outside ---- */

static _Noreturn void be_rank(LocalRank *r, pid_t parent, Err (*body)(LocalRank *r, void *user), void *user)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    const Err err = body(r, user);
    int none = 0;
    if (err && atomic_compare_exchange_strong(&r->all->failed, &none, 1 + r->rank)) {
        r->all->err = err;
        text_cut(r->all->message, MESSAGE_BYTES, err_message());
    }
    _exit(err != ERR_OK);
}

/* The first child that ends with another status than 0 ends the others. */
static bool wait_for_all(pid_t *pid, int size)
{
    bool well = true;
    for (int left = size; left > 0; left--) {
        int status, i = 0;
        const pid_t ended = wait(&status);
        if (ended < 0) return false;
        while (i < size && pid[i] != ended) i++;
        if (i == size) {
            left++; /* a child of somebody else's making */
            continue;
        }
        pid[i] = 0;
        if (well && status != 0)
            for (int k = 0; k < size; k++)
                if (pid[k]) kill(pid[k], SIGKILL);
        well = well && status == 0;
    }
    return well;
}

static Err outcome(const LocalRanks *all, bool well)
{
    if (well) return ERR_OK;
    if (atomic_load(&all->failed)) return err_set(all->err, "%s", all->message);
    return err_set(ERR_INTERNAL, "a process that measures was ended from outside");
}

Err local_ranks_run(int size, Err (*body)(LocalRank *r, void *user), void *user)
{
    pid_t pid[LOCAL_RANKS_MOST] = { 0 }, parent = getpid();
    LocalRanks *all;
    int begun = 0;
    ASSERT(size <= LOCAL_RANKS_MOST);
    TRY(local_shared(sizeof *all, (void **)&all));
    unsigned char random[16];
    if (getentropy(random, sizeof random) != 0) return err_set(ERR_INTERNAL, "the system has no random numbers");
    for (size_t i = 0; i < sizeof random; i++) snprintf(all->secret + 2 * i, 3, "%02x", random[i]);
    fflush(NULL);
    for (; begun < size && (begun == 0 || pid[begun - 1] > 0); begun++)
        if ((pid[begun] = fork()) == 0) be_rank(&(LocalRank){ begun, size, all }, parent, body, user);
    const bool all_began = pid[begun - 1] > 0;
    if (!all_began) begun--;
    for (int i = 0; i < begun && !all_began; i++) kill(pid[i], SIGKILL);
    const bool well = wait_for_all(pid, begun);
    const Err err = all_began ? outcome(all, well) : err_set(ERR_MEMORY, "no further process can be started");
    local_unshare(all, sizeof *all);
    return err;
}
