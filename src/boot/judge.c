/*
 * Causes are collected for a moment and ranked (WatchWhat, best first; then the earliest), because one failure
 * brings others after it: when a rank is killed its peers' calls fail, they report, leave, and die in turn, and
 * what arrives first is luck.
 *
 * In a hang everybody stops within milliseconds, so who stopped first says nothing. What says something is who
 * waits for whom: rank a waits for rank b if a has an open collective on a communicator of both that b has not issued,
 * or if b owes it a message in the call that runs. In an exchange nothing else counts: each rank issues as many as it
 * has neighbours to talk to, so that a low number says nothing.
 * The culprit is waited for and waits for nobody.
 */
#include "boot/judge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SILENT_BEATS 4 /* a rank that missed so many is silent */
#define COLLECT_S 0.3
#define COLLECT_REPORT_S 0.6 /* a peer failed: whose death is that, on a host that may be busy? */
#define COLLECT_HANG_S 0.05  /* nothing else is on the way */

typedef struct {
    bool watched, left;
    int exit_code; /* if left */
    char host[STORE_HOST_BYTES];
    int pid;
    double last_beat, last_progress;
    WatchBeat beat; /* freeze_s 0: none yet */
    WatchComm comm[WATCH_COMMS];
    bool accused;
    WatchWhat what;
    double since;
    int code;
    char text[WATCH_TEXT_BYTES];
} Subject;

struct Judge {
    int size;
    Subject *ranks;
    bool met, judging, given;
    double decide_at;
};

static const char *const phase_names[PHASE_COUNT] = { "starting", "loading", "step", "evaluation", "saving", "ending" };

Judge *judge_open(int size)
{
    Judge *j = calloc(1, sizeof *j);
    Subject *ranks = calloc((size_t)size, sizeof *ranks);
    if (!j || !ranks) return free(j), free(ranks), NULL;
    j->size = size;
    j->ranks = ranks;
    return j;
}

void judge_close(Judge *j)
{
    if (!j) return;
    free(j->ranks);
    free(j);
}

/* ---- what is known ---- */

void judge_name(Judge *j, int rank, const char *host, int pid)
{
    j->ranks[rank].pid = pid;
    snprintf(j->ranks[rank].host, sizeof j->ranks[rank].host, "%s", host);
}

void judge_met(Judge *j, double now)
{
    j->met = true;
    for (int r = 0; r < j->size; r++) j->ranks[r].last_beat = now;
}

void judge_watched(Judge *j, double now, int rank)
{
    j->ranks[rank].watched = true;
    j->ranks[rank].last_beat = j->ranks[rank].last_progress = now;
}

bool judge_beat(Judge *j, double now, int rank, const void *beat, size_t bytes)
{
    Subject *s = &j->ranks[rank];
    WatchBeat head;
    WatchComm comm[WATCH_COMMS];
    if (bytes < sizeof head) return false;
    memcpy(&head, beat, sizeof head);
    if (head.comms > WATCH_COMMS || bytes != sizeof head + head.comms * sizeof *comm || head.phase >= PHASE_COUNT ||
        !(head.freeze_s > 0) || !(head.beat_s > 0) || !(head.stall_s >= 0))
        return false;
    memcpy(comm, (const char *)beat + sizeof head, head.comms * sizeof *comm);
    for (uint32_t i = 0; i < head.comms; i++) comm[i].name[WATCH_NAME_BYTES - 1] = 0;
    s->last_beat = now;
    if (head.progress != s->beat.progress || head.step != s->beat.step || head.phase != s->beat.phase ||
        head.comms != s->beat.comms || memcmp(comm, s->comm, head.comms * sizeof *comm))
        s->last_progress = now;
    s->beat = head;
    memcpy(s->comm, comm, head.comms * sizeof *comm);
    return true;
}

void judge_was_away(Judge *j, double seconds)
{
    for (int r = 0; r < j->size; r++) {
        j->ranks[r].last_beat += seconds;
        j->ranks[r].last_progress += seconds;
    }
}

double judge_beat_s(const Judge *j, int rank)
{
    return j->ranks[rank].beat.freeze_s > 0 ? j->ranks[rank].beat.beat_s : 0.5;
}

bool judge_is_judging(const Judge *j) { return j->judging; }

/* ---- accusations ---- */

static void place_text(const Subject *s, char *out, size_t size)
{
    if (!(s->beat.freeze_s > 0)) snprintf(out, size, "before its first beat");
    else if (s->beat.phase == PHASE_STEP) snprintf(out, size, "in step %lld", (long long)s->beat.step);
    else snprintf(out, size, "in phase '%s', step %lld", phase_names[s->beat.phase], (long long)s->beat.step);
}

static void who_text(const Judge *j, int rank, char *out, size_t size)
{
    snprintf(out, size, "rank %d (host %s, pid %d)", rank, j->ranks[rank].host, j->ranks[rank].pid);
}

/* The worst that is known of a rank stays: a rank that reports and then dies was killed. */
static void accuse(Judge *j, double now, int rank, WatchWhat what, int code, const char *text)
{
    Subject *s = &j->ranks[rank];
    if (j->given || (s->accused && s->what <= what)) return;
    double collect = what == WATCH_HUNG ? COLLECT_HANG_S : COLLECT_S;
    if (what == WATCH_ERROR && code == err_exit_code(ERR_PEER)) collect = COLLECT_REPORT_S;
    if (!j->judging || now + collect < j->decide_at) j->decide_at = now + collect;
    j->judging = s->accused = true;
    s->what = what;
    s->since = now;
    s->code = code;
    snprintf(s->text, sizeof s->text, "%s", text);
}

void judge_lost(Judge *j, double now, int rank)
{
    char who[160], place[80], text[WATCH_TEXT_BYTES];
    Subject *s = &j->ranks[rank];
    if (s->left) return;
    who_text(j, rank, who, sizeof who);
    place_text(s, place, sizeof place);
    snprintf(text, sizeof text,
             "%s was lost, last heard of %s: its connection ended without a goodbye (killed, crashed or out "
             "of memory)",
             who, place);
    accuse(j, now, rank, WATCH_KILLED, err_exit_code(ERR_PEER), text);
}

/* Statuses that say "somebody else failed". */
static bool is_second_hand(int code)
{
    return code == err_exit_code(ERR_PEER) || code == err_exit_code(ERR_HANG) || code == err_exit_code(ERR_RENDEZVOUS);
}

void judge_left(Judge *j, double now, int rank, int exit_code, const char *message)
{
    char who[160], text[WATCH_TEXT_BYTES];
    Subject *s = &j->ranks[rank];
    s->left = true;
    s->exit_code = exit_code;
    if (exit_code == 0 || exit_code == err_exit_code(ERR_STOPPED)) return;
    who_text(j, rank, who, sizeof who);
    snprintf(text, sizeof text, "%s left with exit status %d: %.400s", who, exit_code, message);
    accuse(j, now, rank, is_second_hand(exit_code) ? WATCH_ERROR : WATCH_LEFT, exit_code, text);
}

void judge_unwatched(Judge *j, double now, int rank)
{
    const Subject *s = &j->ranks[rank];
    if (!s->watched && !s->left) judge_left(j, now, rank, err_exit_code(ERR_PEER), "before its watch was opened");
}

void judge_report(Judge *j, double now, int rank, int exit_code, const char *message)
{
    char who[160], text[WATCH_TEXT_BYTES];
    who_text(j, rank, who, sizeof who);
    snprintf(text, sizeof text, "%s reports: %.400s", who, message);
    accuse(j, now, rank, is_second_hand(exit_code) ? WATCH_ERROR : WATCH_LEFT, exit_code, text);
}

static void look_for_frozen(Judge *j, double now)
{
    double longest = 0;
    for (int r = 0; r < j->size; r++)
        if (j->ranks[r].beat.freeze_s > longest) longest = j->ranks[r].beat.freeze_s;
    for (int r = 0; r < j->size; r++) {
        Subject *s = &j->ranks[r];
        double limit = s->beat.freeze_s > 0 ? s->beat.freeze_s : longest;
        if ((!s->watched && !j->met) || s->left || !(limit > 0) || now - s->last_beat <= limit) continue;
        char who[160], place[80], text[WATCH_TEXT_BYTES];
        who_text(j, r, who, sizeof who);
        place_text(s, place, sizeof place);
        snprintf(text, sizeof text,
                 "%s gave no sign of life for %.3g s, the last one %s: it is frozen or its host is gone", who, limit,
                 place);
        accuse(j, now, r, WATCH_FROZEN, err_exit_code(ERR_PEER), text);
    }
}

/* ---- hangs ---- */

static const WatchComm *comm_of(const Subject *s, uint32_t id)
{
    for (uint32_t i = 0; i < s->beat.comms; i++)
        if (s->comm[i].id == id) return &s->comm[i];
    return NULL;
}

typedef struct {
    int waiter, culprit;
    WatchComm waiting, lagging;
} Wait;

static bool is_open(const WatchComm *c)
{
    return c->issued > c->completed || c->exchanges_issued > c->exchanges_completed;
}

/* Does the rank of `x` wait for that of `y`, on their communicator: for its message, or for a collective that it has
 * not issued? strict: in the call that runs; else in any. */
static bool waits_on(const WatchComm *x, const WatchComm *y, int rank_y, bool strict)
{
    if (!is_open(x)) return false;
    if (x->waits_for == rank_y) return true;
    const bool exchange = x->waits_for != OBSERVER_NOBODY && x->waits_in != WAITS_IN_COLLECTIVE;
    if (x->issued <= x->completed || (strict && exchange)) return false;
    return strict ? y->issued <= x->completed : y->issued < x->issued;
}

static bool waits_for(const Judge *j, int a, int b, bool strict, Wait *out)
{
    const Subject *s = &j->ranks[a];
    for (uint32_t i = 0; i < s->beat.comms && a != b && !s->left; i++) {
        const WatchComm *x = &s->comm[i], *y = comm_of(&j->ranks[b], x->id);
        if (!y || !waits_on(x, y, b, strict)) continue;
        *out = (Wait){ .waiter = a, .culprit = b, .waiting = *x, .lagging = *y };
        return true;
    }
    return false;
}

static bool waits_for_any(const Judge *j, int a, bool strict)
{
    Wait w;
    for (int b = 0; b < j->size; b++)
        if (waits_for(j, a, b, strict, &w)) return true;
    return false;
}

/* The first that rank a waits for; -1: nobody. */
static int waited_for(const Judge *j, int a, Wait *out)
{
    for (int b = 0; b < j->size; b++)
        if (waits_for(j, a, b, true, out)) return b;
    return -1;
}

/* Finds a circle of ranks that wait for each other. If every rank that is waited for waits, too, the way from any of
 * them leads into one. *out: the wait for the lowest rank of the circle. */
static bool find_circle(const Judge *j, Wait *out)
{
    Wait w;
    int at = 0;
    while (at < j->size && waited_for(j, at, &w) < 0) at++;
    for (int step = 0; step < 2 * j->size && at < j->size;
         step++) { /* at most `size` steps lead into the circle, as many go round */
        at = waited_for(j, at, &w);
        if (at < 0) return false;
        if (step == j->size || (step > j->size && at < out->culprit)) *out = w;
    }
    return at < j->size;
}

static bool is_silent(const Judge *j, double now, int rank)
{
    const Subject *s = &j->ranks[rank];
    return s->watched && !s->left && now - s->last_beat > SILENT_BEATS * judge_beat_s(j, rank);
}

/* May a silent rank be what rank a waits for: one that is a member where a has an open call? Its own counters are of
 * the past, so that they do not say. `beside`: not in calls on the communicator with this id; 0: on any. */
static bool may_wait_for_silence(const Judge *j, double now, int a, uint32_t beside)
{
    const Subject *s = &j->ranks[a];
    for (uint32_t i = 0; i < s->beat.comms; i++) {
        if (!is_open(&s->comm[i]) || (beside && s->comm[i].id == beside)) continue;
        for (int b = 0; b < j->size; b++)
            if (b != a && is_silent(j, now, b) && comm_of(&j->ranks[b], s->comm[i].id)) return true;
    }
    return false;
}

/* Someone waited for who waits for nobody, and for no silent rank. strict: as of waits_on. */
static bool find_end_of_waiting(const Judge *j, double now, bool strict, Wait *out)
{
    for (int b = 0; b < j->size; b++) {
        if (is_silent(j, now, b) || may_wait_for_silence(j, now, b, 0) || waits_for_any(j, b, strict)) continue;
        for (int a = 0; a < j->size; a++)
            if (!is_silent(j, now, a) && waits_for(j, a, b, strict, out)) return true;
    }
    return false;
}

/* A circle that no silent rank can be the cause of. */
static bool find_sure_circle(const Judge *j, double now, Wait *out)
{
    Wait w;
    if (!find_circle(j, out)) return false;
    int at = out->culprit;
    do {
        const int next = waited_for(j, at, &w);
        if (is_silent(j, now, at) || may_wait_for_silence(j, now, at, w.waiting.id)) return false;
        at = next;
    } while (at != out->culprit);
    return true;
}

static bool is_in_a_call(const Subject *s)
{
    for (uint32_t i = 0; i < s->beat.comms; i++)
        if (is_open(&s->comm[i])) return true;
    return false;
}

/* Nobody's counters say whom the others wait for: a rank outside all calls while others are in one, else the one
 * that got on last the longest ago. */
static int first_to_stop(const Judge *j)
{
    int in_calls = 0, best = -1;
    for (int r = 0; r < j->size; r++) in_calls += !j->ranks[r].left && is_in_a_call(&j->ranks[r]);
    for (int r = 0; r < j->size; r++) {
        const Subject *s = &j->ranks[r];
        if (!s->watched || s->left || (in_calls && in_calls < j->size && is_in_a_call(s))) continue;
        if (best < 0 || s->last_progress < j->ranks[best].last_progress) best = r;
    }
    return best;
}

static void wait_text(const Wait *w, char *out, size_t size)
{
    const WatchComm *x = &w->waiting;
    char what[64];
    if (x->waits_for == w->culprit && x->waits_in != WAITS_IN_COLLECTIVE) {
        message_text(x->waits_what, what, sizeof what);
        snprintf(out, size, "rank %d waits on '%s' for it to %s: %s", w->waiter, x->name,
                 x->waits_in == WAITS_IN_SEND ? "take" : "send", what);
    } else if (w->lagging.issued > x->completed)
        snprintf(out, size, "rank %d waits for it in call %llu on '%s'", w->waiter,
                 (unsigned long long)x->completed + 1, x->name);
    else
        snprintf(out, size, "it has issued %llu calls on '%s' and rank %d waits there in call %llu",
                 (unsigned long long)w->lagging.issued, x->name, w->waiter, (unsigned long long)x->completed + 1);
}

/* Whoever beats no more comes before what is not sure: what it said last is of the past, and others seem to wait for
 * each other. -1: all beat. */
static int first_to_fall_silent(const Judge *j, double now)
{
    int best = -1;
    for (int r = 0; r < j->size; r++) {
        const Subject *s = &j->ranks[r];
        if (!is_silent(j, now, r)) continue;
        if (best < 0 || s->last_beat < j->ranks[best].last_beat) best = r;
    }
    return best;
}

static void accuse_of_silence(Judge *j, double now, double limit, int rank)
{
    char who[160], place[80], text[WATCH_TEXT_BYTES];
    const Subject *s = &j->ranks[rank];
    who_text(j, rank, who, sizeof who);
    place_text(s, place, sizeof place);
    snprintf(text, sizeof text,
             "no rank got on for %.4g s, and %s gave no sign of life for %.3g s, the last one %s: it is stopped, "
             "frozen, or its host is gone",
             limit, who, now - s->last_beat, place);
    accuse(j, now, rank, WATCH_HUNG, err_exit_code(ERR_HANG), text);
}

static void accuse_of_hang(Judge *j, double now, double limit)
{
    char who[160], place[80], wait[160] = "", text[WATCH_TEXT_BYTES];
    Wait w = { 0 };
    const bool end = find_end_of_waiting(j, now, true, &w), circle = !end && find_sure_circle(j, now, &w);
    const int silent = end || circle ? -1 : first_to_fall_silent(j, now);
    if (silent >= 0) {
        accuse_of_silence(j, now, limit, silent);
        return;
    }
    const bool found = end || circle || find_end_of_waiting(j, now, false, &w);
    int rank = found ? w.culprit : first_to_stop(j);
    if (rank < 0) return;
    const Subject *s = &j->ranks[rank];
    who_text(j, rank, who, sizeof who);
    place_text(s, place, sizeof place);
    if (found) wait_text(&w, wait, sizeof wait);
    int n = snprintf(text, sizeof text, "no rank got on for %.4g s; the first to look at is %s, %s%s%s%s", limit, who,
                     place, found ? ": " : "", wait,
                     circle ? "; it waits in turn: the ranks wait for each other in a circle" : "");
    if (s->left) snprintf(text + n, sizeof text - (size_t)n, "; it has left with exit status %d", s->exit_code);
    accuse(j, now, rank, WATCH_HUNG, err_exit_code(ERR_HANG), text);
}

static void look_for_hang(Judge *j, double now)
{
    double newest = -1e300, limit = 0;
    int alive = 0;
    for (int r = 0; r < j->size; r++) {
        const Subject *s = &j->ranks[r];
        if (!s->watched || s->left) continue;
        if (!(s->beat.stall_s > 0)) return; /* somebody wants no such judgement now */
        alive++;
        if (s->last_progress > newest) newest = s->last_progress;
        if (s->beat.stall_s > limit) limit = s->beat.stall_s;
    }
    if (alive && now - newest > limit) accuse_of_hang(j, now, limit);
}

/* ---- the verdict ---- */

static void sentence(const Judge *j, Verdict *out)
{
    const Subject *worst = NULL;
    for (int r = 0; r < j->size; r++) {
        const Subject *s = &j->ranks[r];
        if (!s->accused) continue;
        if (!worst || s->what < worst->what || (s->what == worst->what && s->since < worst->since)) worst = s;
    }
    *out =
        (Verdict){ .what = worst->what, .rank = (int)(worst - j->ranks), .pid = worst->pid, .exit_code = worst->code };
    memcpy(out->host, worst->host, sizeof out->host);
    size_t n = (size_t)snprintf(out->text, sizeof out->text, "%s", worst->text);
    int also = 0;
    for (int r = 0; r < j->size && n + 40 < sizeof out->text; r++) {
        const Subject *s = &j->ranks[r];
        if (s == worst || !s->accused || s->what != worst->what || s->what > WATCH_FROZEN) continue;
        n += (size_t)snprintf(out->text + n, sizeof out->text - n, "%s %d", also++ ? "," : "; also lost: rank", r);
    }
}

bool judge_tick(Judge *j, double now, Verdict *out)
{
    if (j->given) return false;
    look_for_frozen(j, now);
    if (!j->judging) look_for_hang(j, now);
    if (!j->judging || now < j->decide_at) return false;
    j->given = true;
    sentence(j, out);
    return true;
}

void judge_rank_0(Verdict *out, WatchWhat what, const char *host, int pid, double silent_s)
{
    *out = (Verdict){ .what = what, .rank = 0, .pid = pid, .exit_code = err_exit_code(ERR_PEER) };
    snprintf(out->host, sizeof out->host, "%s", host);
    if (what == WATCH_KILLED)
        snprintf(out->text, sizeof out->text,
                 "rank 0 (host %s, pid %d) was lost: its connection ended without a goodbye (killed, crashed "
                 "or out of "
                 "memory)",
                 out->host, pid);
    else
        snprintf(out->text, sizeof out->text,
                 "rank 0 (host %s, pid %d) gave no sign of life for %.3g s: it is frozen or its host is gone",
                 out->host, pid, silent_s);
}
