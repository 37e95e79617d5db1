/*
 * How a rank finds rank 0. The port may be taken: by another service, by another job's rank 0, by what is left of
 * the last start. So rank 0 takes the first free port of a fixed sequence, and the others try the same sequence
 * over and over until one answers that has the run's secret (boot/greet.h).
 */
#include "boot/meet.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "boot/supervised.h"

#define PATIENCE_FIRST_S 0.3 /* how long an answer to a greeting may take; it grows with every round */
#define PATIENCE_LAST_S 4.0
#define PATIENCE_TWIN_S 3.0 /* how long a first rank 0 may take: who passes it by would wait in vain */
#define PAUSE_FIRST_S 0.005 /* how long it rests between rounds */
#define PAUSE_LAST_S 0.2

/* Findings about a port. The later in this list, the more worth telling at the end. */
typedef enum { FOUND_NOTHING, FOUND_STRANGER, FOUND_OTHER_JOB, FOUND_HOST, FOUND_REFUSAL } Found;

static double earlier(double a, double b) { return a < b ? a : b; }

/* Who has not the secret is told nothing; what it may be is for the user. */
static Found not_ours(GreetStep step, int port, char *why, size_t size)
{
    const char *whose = step == GREET_OTHER_KEY       ? "another job, or one with another MEGATRAIN_SECRET"
                        : step == GREET_OTHER_VERSION ? "another version of the program"
                                                      : "another service";
    snprintf(why, size, "port %d belongs to %s", port, whose);
    return step == GREET_STRANGER ? FOUND_STRANGER : FOUND_OTHER_JOB;
}

/* With m->key. */
static Found ask(const char *addr, int port, const Hello *hello, double deadline, Meeting *m, char *why, size_t size)
{
    Greeting greeting;
    Link *l = &m->link;
    int fd = net_dial(addr, port, deadline, why, size);
    if (fd < 0) return FOUND_NOTHING;
    link_open(l, fd, 0);
    GreetStep step = GREET_STRANGER;
    if (greet_call(&greeting, l, &m->key, hello, port)) step = greet_until(&greeting, l, &m->welcome, deadline);
    if (step != GREET_DONE) return link_close(l), not_ours(step, port, why, size);
    snprintf(m->addr, sizeof m->addr, "%s", addr);
    m->port = port;
    link_frames(l, STORE_FRAME_MAX);
    if (m->welcome.kind == WELCOME) return FOUND_HOST;
    link_close(l);
    snprintf(why, size, "%s", m->welcome.text);
    return FOUND_REFUSAL;
}

Err meet_outdated(const Boot *boot, const char *why)
{
    if (!boot->supervised) {
        err_set(ERR_RENDEZVOUS, "rank %d: %s", boot->rank, why);
        return err_hint("run.restarts must be above 0 on all ranks, or on none");
    }
    boot->supervised->outdated = true;
    return err_elsewhere(err_set(ERR_PEER, "%s", why));
}

/* The process whose host refuses tells the user; that may be our own, when others were there before us. */
static Err refused(const Boot *boot, const Hello *hello, const Meeting *m, const char *why)
{
    if (m->welcome.kind == WELCOME_OUTDATED) return meet_outdated(boot, why);
    err_set(ERR_RENDEZVOUS, "rank %d was refused at the rendezvous: %s", boot->rank, why);
    Err err =
        err_hint("see that each rank is started once, by the same program (a RANK exported in a batch script gives "
                 "all tasks one rank)");
    bool said_there = m->welcome.kind == WELCOME_FAILED && m->welcome.process != hello->process;
    return said_there ? err_elsewhere(err) : err;
}

static void pause_until(double t)
{
    double left = t - clock_s();
    if (left <= 0) return;
    struct timespec pause = { (time_t)left, (long)((left - (double)(time_t)left) * 1e9) };
    nanosleep(&pause, NULL);
}

static bool told_to_stop(const Boot *boot) { return boot->stop && *boot->stop; }

static int last_port(const Boot *boot)
{
    int last = boot->port + BOOT_PORTS - 1;
    return last > 65535 ? 65535 : last;
}

Err meet_host(const Boot *boot, const Hello *hello, double timeout_s, double deadline, Meeting *out)
{
    char why[512], best_why[512] = "nothing tried";
    double patience = PATIENCE_FIRST_S, pause = PAUSE_FIRST_S;
    bool tried_all = false;
    out->key = greet_key(boot->secret, boot->job);
    do {
        Found best = FOUND_NOTHING;
        for (int port = boot->port; port <= last_port(boot) && (port == boot->port || clock_s() < deadline); port++) {
            if (told_to_stop(boot)) break;
            Found f = ask(boot->addr, port, hello, earlier(deadline, clock_s() + patience), out, why, sizeof why);
            if (f == FOUND_HOST) return ERR_OK;
            if (f == FOUND_REFUSAL) return refused(boot, hello, out, why);
            if (tried_all && clock_s() >= deadline) break; /* cut short: what was found before says more */
            if (port == boot->port || f > best) snprintf(best_why, sizeof best_why, "%s", why), best = f;
        }
        tried_all = true;
        pause_until(earlier(deadline, clock_s() + pause));
        pause = earlier(2 * pause, PAUSE_LAST_S);
        patience = earlier(2 * patience, PATIENCE_LAST_S);
    } while (clock_s() < deadline && !told_to_stop(boot));
    if (told_to_stop(boot)) timeout_s -= deadline - clock_s();
    err_set(ERR_RENDEZVOUS, "rank %d waited %.3g s for rank 0 of %d at '%s', ports %d to %d: %s", boot->rank, timeout_s,
            boot->size, boot->addr, boot->port, last_port(boot), best_why);
    return err_hint("is rank 0 started, is MASTER_ADDR its host, do all ranks have the same MASTER_PORT and size?");
}

/* Our own host answers, by the ranks' address or, where that does not lead back here, by the loopback one. */
static Err reach_own_host(const Boot *boot, const Hello *hello, int port, double deadline, Meeting *out)
{
    const char *addrs[] = { boot->addr, "127.0.0.1" };
    char why[512] = "";
    for (int i = 0; i < 2; i++) {
        double until = i ? deadline : earlier(deadline, clock_s() + 2);
        Found f = ask(addrs[i], port, hello, until, out, why, sizeof why);
        if (f == FOUND_REFUSAL) return refused(boot, hello, out, why);
        if (f != FOUND_HOST) continue;
        if (out->welcome.process == hello->process) return ERR_OK;
        link_close(&out->link);
    }
    return err_set(ERR_RENDEZVOUS, "rank 0 cannot connect to itself at port %d: %s", port, why);
}

Err meet_as_host(const Boot *boot, const Hello *hello, double deadline, Host **host, Meeting *out)
{
    bool here =
        boot->local_size == boot->size && (!strcmp(boot->addr, "127.0.0.1") || !strcmp(boot->addr, "localhost"));
    /* once: sixteen ports that never answer must not take as long as the others wait */
    const double patient_until = clock_s() + PATIENCE_TWIN_S;
    out->key = greet_key(boot->secret, boot->job);
    for (int port = boot->port; port <= last_port(boot); port++) {
        bool taken;
        char why[512];
        int listener = net_listen(port, here, &taken);
        if (listener < 0 && !taken) {
            err_set(ERR_RENDEZVOUS, "rank 0 cannot listen on port %d: %s", port, strerror(errno));
            return err_hint("choose another MASTER_PORT");
        }
        if (listener < 0) { /* perhaps a second process that is rank 0 has it */
            double until = clock_s() + PATIENCE_FIRST_S;
            if (until < patient_until) until = patient_until;
            Found f = ask("127.0.0.1", port, hello, earlier(deadline, until), out, why, sizeof why);
            if (f == FOUND_REFUSAL) return refused(boot, hello, out, why);
            continue;
        }
        TRY(host_open(boot, hello, listener, host));
        return reach_own_host(boot, hello, port, deadline, out);
    }
    err_set(ERR_RENDEZVOUS, "rank 0 finds the ports %d to %d of '%s' all taken", boot->port, last_port(boot),
            hello->host);
    return err_hint("choose another MASTER_PORT");
}

Err meet_again(const Meeting *m, const Hello *hello, double deadline, Link *out)
{
    char why[512];
    Meeting again = { .key = m->key };
    Found f = ask(m->addr, m->port, hello, deadline, &again, why, sizeof why);
    if (f == FOUND_HOST && again.welcome.process == m->welcome.process) return *out = again.link, ERR_OK;
    if (f == FOUND_HOST) link_close(&again.link);
    return err_set(ERR_PEER, "rank 0 (host %s, pid %u) was lost or is frozen: port %d does not answer as it did",
                   m->welcome.host, m->welcome.pid, m->port);
}
