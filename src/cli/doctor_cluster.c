/*
 * See doctor.h. Each rank writes its line of the table, and its complaints, as text into the store: ranks of other
 * programs can be read, too. A rank that fails at one thing goes on to the next, so that all is said at once.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/held.h"
#include "base/heap.h"
#include "base/identity.h"
#include "base/processors.h"
#include "base/units.h"
#include "cli/doctor.h"
#include "comm/gloo.h"
#include "device/device.h"
#include "train/ranks.h"

enum { TEXT_BYTES = 4096, KEY_BYTES = 64 };
static const double MEET_S = 60, STEP_S = 30, SEEN_S = 5, CLOCK_S = 1;

typedef struct {
    Ranks ranks;
    const char *folder;
    char file[PATH_MAX]; /* in it, of this start alone */
    char complaints[TEXT_BYTES];
    Err worst; /* of the complaints that stop every run */
} Cluster;

__attribute__((format(printf, 3, 4))) static void complain(Cluster *c, Err err, const char *fmt, ...)
{
    const size_t used = strlen(c->complaints);
    va_list args;
    if (!c->worst) c->worst = err;
    if (sizeof c->complaints - used < 2) return; /* full: what came first has been said */
    va_start(args, fmt);
    vsnprintf(c->complaints + used, sizeof c->complaints - used - 1, fmt, args);
    va_end(args);
    strcat(c->complaints, "\n");
}

/* "what/rank", a text. */
static Err put(Cluster *c, const char *what, int rank, const char *text)
{
    char key[KEY_BYTES];
    snprintf(key, sizeof key, "doctor/%s/%d", what, rank);
    return store_set(c->ranks.store, key, text, strlen(text) + 1);
}

static Err get(Cluster *c, const char *what, int rank, char text[TEXT_BYTES])
{
    char key[KEY_BYTES];
    size_t n;
    snprintf(key, sizeof key, "doctor/%s/%d", what, rank);
    TRY(store_get(c->ranks.store, key, text, TEXT_BYTES, &n, MEET_S));
    text[n ? n - 1 : 0] = 0;
    return ERR_OK;
}

/* ---- the folder ---- */

static void read_file(const char *path, char text[TEXT_BYTES])
{
    char *all;
    int64_t n;
    text[0] = 0;
    if (file_read_all(path, TEXT_BYTES - 1, &all, &n)) return;
    snprintf(text, TEXT_BYTES, "%s", all);
    free(all);
}

/* Rank 0 locks a file in the folder for as long as the others look. */
static Err offer_folder(Cluster *c, int *lock, char text[TEXT_BYTES])
{
    *lock = -1;
    if (file_make_dirs(c->folder)) complain(c, ERR_STORAGE, "cannot make the folder: %s", err_message());
    const bool locked = !file_lock(c->file, lock);
    if (!locked)
        complain(c, ERR_OK, "no locks in this folder, so two runs in it would not notice each other: %s",
                 err_message());
    if (held_stands(c->file))
        complain(c, ERR_OK,
                 "no locks in this folder: lock.held stands for one, which a killed run leaves to hosts "
                 "other than its own");
    snprintf(text, TEXT_BYTES, "rank 0 of %llx", (unsigned long long)boot_key(&c->ranks.boot));
    if (!locked && file_replace(c->file, text, (int64_t)strlen(text)))
        complain(c, ERR_STORAGE, "cannot write in the folder: %s", err_message());
    read_file(c->file, text);
    return put(c, "folder", 0, text);
}

/* A rank that sees another file, or none, would write its part of each checkpoint elsewhere. */
static bool sees(const char *path, const char *wanted)
{
    char text[TEXT_BYTES];
    const double end = clock_s() + SEEN_S;
    do {
        read_file(path, text);
        if (*wanted && !strcmp(text, wanted)) return true;
        usleep(100 * 1000);
    } while (clock_s() < end);
    return false;
}

static Err look_at_folder(Cluster *c, const char **folder, const char **locks)
{
    char text[TEXT_BYTES], own[PATH_MAX + 16];
    int lock;
    *folder = "no", *locks = "-";
    TRY(get(c, "folder", 0, text));
    if (!sees(c->file, text)) {
        complain(c, ERR_STORAGE,
                 "does not see the file that rank 0 has made in '%s': give run.dir a folder that all share", c->folder);
        return ERR_OK;
    }
    *folder = "shared";
    snprintf(own, sizeof own, "%s-%d", c->file, c->ranks.boot.rank);
    if (file_replace(own, "", 0)) {
        *folder = "read-only";
        complain(c, ERR_STORAGE, "cannot write in '%s': %s", c->folder, err_message());
    }
    unlink(own);
    const Err err = file_lock(c->file, &lock);
    const char *held = held_stands(c->file) ? "file" : "hold";
    *locks = err == ERR_STORAGE ? held : err ? "none" : "ignored";
    if (!err) file_unlock(lock);
    if (!err)
        complain(c, ERR_OK,
                 "gets the lock that rank 0 holds: locks do not reach over hosts here, so start one run a "
                 "folder (NFS: mount without nolock; Lustre: with flock)");
    return ERR_OK;
}

/* ---- clock, network ---- */

/* Seconds by which this host's clock is ahead of rank 0's, from one question and answer. */
static Err ask_time(Cluster *c, double *ahead)
{
    char text[TEXT_BYTES];
    const int rank = c->ranks.boot.rank;
    TRY(get(c, "turn", rank, text));
    const double before = clock_unix_s();
    TRY(put(c, "ask", rank, ""));
    TRY(get(c, "time", rank, text));
    const double after = clock_unix_s();
    *ahead = (before + after) / 2 - strtod(text, NULL);
    if (!(*ahead<CLOCK_S && * ahead> - CLOCK_S))
        complain(c, ERR_OK, "its clock is %.1f s ahead of rank 0's: times in logs differ by it (chrony or ntpd)",
                 *ahead);
    return ERR_OK;
}

static Err tell_time(Cluster *c)
{
    char text[TEXT_BYTES];
    for (int p = 1; p < c->ranks.boot.size; p++) {
        TRY(put(c, "turn", p, ""));
        TRY(get(c, "ask", p, text));
        snprintf(text, sizeof text, "%.6f", clock_unix_s());
        TRY(put(c, "time", p, text));
    }
    return ERR_OK;
}

static Err set_bytes(void *user, const char *key, const void *bytes, int64_t n)
{
    return store_set(user, key, bytes, (size_t)n);
}

static Err get_bytes(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s)
{
    size_t size;
    TRY(store_get(user, key, bytes, (size_t)cap, &size, timeout_s));
    *n = (int64_t)size;
    return ERR_OK;
}

/* A connection of each with each, as a run's data takes. */
static bool connects(Cluster *c, const char *address, int data_port)
{
    const Boot *b = &c->ranks.boot;
    const bool placed = b->local_rank >= 0 && b->local_size > 0;
    GlooWorld *world = NULL;
    const GlooOptions o = { .rank = b->rank,
                            .size = b->size,
                            .address = address,
                            .secret = b->secret,
                            .start = store_start(c->ranks.store),
                            .timeout_s = STEP_S,
                            .port = data_port ? data_port + (placed ? b->local_rank : b->rank) : 0,
                            .port_step = placed ? b->local_size : b->size,
                            .store = { c->ranks.store, set_bytes, get_bytes } };
    const Err err = gloo_world_open(o, &world);
    if (err == ERR_CONFIG) complain(c, err, "%s%s%s", err_message(), *err_hint_text() ? ": " : "", err_hint_text());
    else if (err)
        complain(c, ERR_RENDEZVOUS, "%s: open the ports between nodes (parallel.data_port fixes them)", err_message());
    gloo_world_close(world);
    return !err;
}

/* ---- a rank's line ---- */

static Err examine(Cluster *c, int data_port)
{
    const Boot *b = &c->ranks.boot;
    char host[64] = "?", address[64] = "?", row[TEXT_BYTES], memory[UNITS_BYTES], why[256], clock[32] = "0 ms";
    const char *folder = "shared", *locks = "hold";
    double ahead = 0;
    int lock = -1;
    gethostname(host, sizeof host - 1);
    TRY(put(c, "program", b->rank, identity_program()));
    if (b->rank == 0) TRY(offer_folder(c, &lock, row));
    else TRY(look_at_folder(c, &folder, &locks));
    if (b->rank == 0 && lock < 0) locks = "none";
    TRY(b->rank == 0 ? tell_time(c) : ask_time(c, &ahead));
    if (b->rank) snprintf(clock, sizeof clock, "%+.1f ms", 1e3 * ahead);
    TRY(store_local_addr(c->ranks.store, address, sizeof address));
    const bool connected = connects(c, address, data_port);
    struct rlimit files = { 0 };
    getrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < 1024)
        complain(c, ERR_OK, "few open files are allowed, %llu: ulimit -n 4096", (unsigned long long)files.rlim_cur);
    snprintf(row, sizeof row, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%llu\t%s\t%d\t%s\t%d\n", b->rank, host, address,
             connected ? "all" : "NOT all", clock, folder, locks, (unsigned long long)files.rlim_cur,
             units_bytes(memory, host_free_bytes()), processors_share(1, 1), isa_name(isa_best()),
             device_cuda_count(why, sizeof why));
    TRY(put(c, "row", b->rank, row));
    TRY(put(c, "complaints", b->rank, c->complaints));
    char worst[16], done[TEXT_BYTES];
    snprintf(worst, sizeof worst, "%d", (int)c->worst);
    TRY(put(c, "worst", b->rank, worst));
    if (b->rank == 0) /* the others have looked at the file when all their lines are there */
        for (int p = 1; p < b->size; p++) TRY(get(c, "worst", p, done));
    if (b->rank == 0) unlink(c->file);
    file_unlock(lock);
    return ERR_OK;
}

/* ---- rank 0's table ---- */

static const char *const heads[] = { "rank",  "host",  "address",     "reaches",    "clock",   "folder",
                                     "locks", "files", "memory free", "processors", "kernels", "gpus" };
enum { COLUMNS = sizeof heads / sizeof *heads };

/* Cuts a line at its tabs; what is missing is "". */
static void cut(char *line, const char *cell[COLUMNS])
{
    for (int i = 0; i < COLUMNS; i++) {
        cell[i] = line;
        line += strcspn(line, "\t\n");
        if (*line) *line++ = 0;
    }
}

static Err print_rows(Cluster *c)
{
    int width[COLUMNS];
    char row[TEXT_BYTES];
    const char *cell[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) width[i] = (int)strlen(heads[i]);
    for (int pass = 0; pass < 2; pass++)
        for (int p = pass ? -1 : 0; p < c->ranks.boot.size; p++) {
            if (p >= 0) TRY(get(c, "row", p, row));
            if (p >= 0) cut(row, cell);
            else memcpy(cell, heads, sizeof heads);
            for (int i = 0; i < COLUMNS; i++) {
                const int n = (int)strlen(cell[i]);
                if (!pass && n > width[i]) width[i] = n;
                if (pass) printf("%-*s%s", i < COLUMNS - 1 ? width[i] : 0, cell[i], i < COLUMNS - 1 ? "  " : "\n");
            }
        }
    return ERR_OK;
}

/* Complaints of all ranks, a line each; *worst: the first that stops every run. */
static Err print_complaints(Cluster *c, int *count, Err *worst)
{
    char text[TEXT_BYTES];
    for (int p = 0; p < c->ranks.boot.size; p++) {
        TRY(get(c, "program", p, text));
        const bool other = strcmp(text, identity_program()) != 0;
        if (other)
            printf("! rank %d is another program, megatrain %s: install the same file on all hosts\n", p, text),
                ++*count;
        if (other && !*worst) *worst = ERR_CONFIG;
        TRY(get(c, "worst", p, text));
        if (!*worst) *worst = (Err)atoi(text);
        TRY(get(c, "complaints", p, text));
        for (char *at = text, *end; (end = strchr(at, '\n')); at = end + 1, ++*count)
            printf("! rank %d: %.*s\n", p, (int)(end - at), at);
    }
    return ERR_OK;
}

static Err print_all(Cluster *c, Err *verdict)
{
    int count = 0;
    printf("program  megatrain %s\nranks    %d by %s, met at port %d of '%s'\nfolder   %s\n", identity_program(),
           c->ranks.boot.size, c->ranks.boot.launcher, store_port(c->ranks.store), c->ranks.boot.addr, c->folder);
    TRY(print_rows(c));
    TRY(print_complaints(c, &count, verdict));
    if (count) printf("%d thing%s to look at, marked with '!'\n", count, count == 1 ? "" : "s");
    else printf("nothing is missing\n");
    return ERR_OK;
}

/* Collective. */
static Err meet_and_look(Cluster *c, const Boot *boot, int data_port, Err *verdict)
{
    const RanksOptions o = { .timeout_s = MEET_S, .freeze_s = MEET_S, .stall_s = 2 * MEET_S, .folder = c->folder };
    snprintf(c->file, sizeof c->file, "%s/.doctor-%016llx", c->folder, (unsigned long long)boot_key(boot));
    Err err = ranks_meet(&c->ranks, boot, &o);
    if (!err) err = examine(c, data_port);
    if (!err && boot->rank == 0) err = print_all(c, verdict);
    return ranks_close(&c->ranks, ranks_end(&c->ranks, err));
}

Err doctor_cluster(const Boot *boot, const char *folder, int data_port)
{
    Err verdict = ERR_OK;
    if (boot->size == 1)
        return err_set(ERR_CONFIG,
                       "doctor --cluster is about the ranks that a launcher starts, and this is one process"),
               err_hint("srun -N2 --ntasks-per-node=1 megatrain doctor --cluster --folder runs");
    ON_HEAP(Cluster, c, 1);
    c->folder = folder;
    const Err err = meet_and_look(c, boot, data_port, &verdict);
    if (err || !verdict) return err;
    return err_set(verdict, "a run of these %d ranks would not start, or not keep its checkpoints", boot->size),
           err_hint("the lines above that begin with '!' say why");
}
