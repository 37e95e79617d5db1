/*
 * A power cut at any moment of saving: every state that the disk may then hold (test/crash_model.h) resumes, to a
 * checkpoint that is whole and not older than the last one that was reported as saved.
 *
 * MEGATRAIN_CRASH=all lists more choices at each crash point (make test-files).
 */
#include "crash_model.h"

#include "ckpt_fixture.h"

enum { SAVES_MAX = 8, FIRST_OF_SAVES = 2 }; /* after the disk and the run's folder */

static struct {
    char disk[80], after[80]; /* what is recorded; where the states are built */
    int begun[SAVES_MAX], saved[SAVES_MAX]; /* by save: operations recorded when it began, when it had returned */
    int64_t step[SAVES_MAX];
    int saves, lost; /* a sync that does nothing: then one checkpoint may be gone. -1: none */
    int64_t best;    /* a step that stays from when it is saved, for its loss; 0: none */
    int64_t checked, none, newest, fell_back, went_on;
} now;

/* ---- the record ---- */

static const int64_t *steps_to_save; /* ends with 0 */

static Err rank_save_noted(Rank *r)
{
    Ckpt c;
    TRY(rank_open(r));
    TRY(ckpt_open(&c, options_of(r), &r->setup));
    for (int i = 0; steps_to_save[i]; i++) {
        CkptMeta meta = evaluated(r->job, steps_to_save[i]);
        rank_fill(r, meta.step);
        if (!r->rank) now.begun[i] = crash.count;
        TRY(ckpt_save(&c, &meta));
        if (r->rank) continue;
        now.saved[i] = crash.count;
        now.step[i] = meta.step;
        now.saves = i + 1;
    }
    return ERR_OK;
}

/* ---- after the crash ---- */

/* The newest step that had been reported as saved, of a lying disk the one before; 0: none. */
static int need(int point)
{
    int64_t step = 0, before = 0;
    for (int i = 0; i < now.saves; i++)
        if (now.saved[i] <= point && now.step[i] > step) {
            before = step;
            step = now.step[i];
        }
    return (int)(now.lost < 0 ? step : before);
}

/* Has the best one been reported as saved? Then it is there, and whole. */
static bool best_is_there(const char *run, int point)
{
    char path[PATH_MAX];
    for (int i = 0; i < now.saves; i++)
        if (now.step[i] == now.best && now.saved[i] <= point)
            return !ckpt_of_step(run, now.best, path) && !ckpt_verify(path);
    return true;
}

/* Resumes like a run (train/run.c): the newest valid checkpoint; one that proves damaged gives way. -1: it does not
 * start. */
static int64_t resume(const char *dir)
{
    char path[PATH_MAX];
    int64_t below = INT64_MAX;
    for (;;) {
        bool found;
        long long step;
        if (ckpt_find(dir, below, path, &found)) return -1;
        if (!found) return 0;
        if (sscanf(strrchr(path, '/'), "/step-%lld", &step) != 1) return -1;
        if (below != INT64_MAX) now.fell_back++;
        Job j = { .grid = ONE, .path = path, .step = step, .poison = true };
        Err err = run_ranks(&j, rank_load);
        if (!err) return j.wrong[0] || j.meta.step != step ? -1 : step;
        if (!j.damaged) return -1;
        below = step;
    }
}

static void check_state(void *user, const CrashTree *t, int point)
{
    (void)user;
    char run[100];
    int64_t newest = 0, least = need(point);
    for (int i = 0; i < now.saves; i++)
        if (now.begun[i] < point && now.step[i] > newest) newest = now.step[i];
    file_remove_tree(now.after);
    mkdir(now.after, 0777);
    crash_build(t, now.after);
    snprintf(run, sizeof run, "%s/run", now.after);
    int64_t step = resume(run);
    if (step < 0 && now.lost >= 0 && !least && ckpt_any(run)) step = 0; /* its only one is damaged: exit 4 says so */
    CHECK_MSG(step >= least && step <= newest, "crash after operation %d of %d: resumed step %lld, %lld was saved: %s",
              point, crash.count, (long long)step, (long long)least, err_message());
    if (now.best) CHECK_MSG(best_is_there(run, point), "crash after operation %d: %s", point, err_message());
    now.checked++;
    now.none += step == 0;
    now.newest += step == newest;
    if (now.checked % 50) return;
    OK(save(ONE, SMALL, run, 9, 2)); /* the run goes on, and clears up */
    CHECK(resume(run) == 9 && count_entries(run, "tmp\\|old") == 0);
    now.went_on++;
}

static void record(Grid g, const int64_t *steps)
{
    static const double loss[] = { [1] = 2, 3, 4, 5 };
    char run[100];
    Job j = { .grid = g, .run_dir = run, .keep = 2, .keep_best = now.best ? 1 : 0, .loss = loss };
    snprintf(now.disk, sizeof now.disk, "%s/disk", fresh_dir());
    snprintf(now.after, sizeof now.after, "%s/after", fresh_dir());
    snprintf(run, sizeof run, "%s/run", now.disk);
    OK(file_make_dirs(now.disk));
    steps_to_save = steps;
    now.saves = 0;
    now.lost = -1;
    crash_record(now.disk);
    Err err = run_ranks(&j, rank_save_noted);
    crash_recorded();
    OK(err);
}

static bool every_choice(void) { return getenv("MEGATRAIN_CRASH") != NULL; }

/* sector: of the quick form */
static int64_t each_state(Grid g, const int64_t *steps, int sector)
{
    record(g, steps);
    now.checked = now.none = now.newest = now.fell_back = now.went_on = 0;
    crash.sector = every_choice() ? 16 : sector;
    CrashCount n = crash_every_state(every_choice() ? 50000 : 500, -1, need, check_state, NULL);
    CHECK(now.checked == n.states && now.newest > 0 && now.went_on > 0);
    CHECK(now.fell_back == 0); /* without a lying disk nothing that looks whole is damaged */
    printf("    %d operations, %lld states (%lld more times): %lld start anew, %lld take the newest, %lld save again; "
           "at %lld points choices were drawn\n",
           crash.count, (long long)n.states, (long long)n.repeated, (long long)now.none, (long long)now.newest,
           (long long)now.went_on, (long long)n.cut_short);
    return n.states;
}

TEST(a_crash_in_two_saves) { CHECK(each_state(ONE, (const int64_t[]){ 1, 2, 0 }, 24) >= 2000); }

TEST(a_crash_while_older_ones_are_removed)
{
    CHECK(each_state(ONE, (const int64_t[]){ 1, 2, 3, 0 }, 512) >= 200);
}

/* The first is the best and stays, the second goes when the fourth is there. */
TEST(a_crash_while_the_best_is_kept)
{
    now.best = 1;
    CHECK(each_state(ONE, (const int64_t[]){ 1, 2, 3, 4, 0 }, 512) >= 200);
    now.best = 0;
}

TEST(a_crash_in_a_replacement) { CHECK(each_state(ONE, (const int64_t[]){ 1, 2, 2, 0 }, 512) >= 200); }

TEST(a_crash_in_two_saves_of_two_ranks)
{
    CHECK(each_state((Grid){ .tp = 2, .dp = 1 }, (const int64_t[]){ 1, 2, 0 }, 512) >= 200);
}

/* Whichever one sync does nothing: what was damaged by that is seen, and the checkpoint before it is taken. */
TEST(a_disk_that_loses_a_sync)
{
    int64_t states = 0, syncs = 0;
    record(ONE, every_choice() ? (const int64_t[]){ 1, 2, 3, 0 } : (const int64_t[]){ 1, 2, 0 });
    crash.sector = every_choice() ? 64 : 4096;
    now.checked = now.none = now.newest = now.fell_back = now.went_on = 0;
    for (now.lost = 0; now.lost < crash.count; now.lost++) {
        if (crash.ops[now.lost].kind != CRASH_SYNC || crash.ops[now.lost].node < FIRST_OF_SAVES) continue;
        if (syncs++ % 3 && !every_choice()) continue;
        states += crash_every_state(every_choice() ? 1500 : 20, now.lost, need, check_state, NULL).states;
    }
    CHECK(syncs > 12 && now.checked == states && now.fell_back > 0);
    printf("    %lld syncs, %lld states, %lld times an older one was taken\n", (long long)syncs, (long long)states,
           (long long)now.fell_back);
}

int main(int argc, char **argv)
{
    log_set_level(LOG_ERROR); /* damaged ones that are passed over are warned of, thousands of times */
    int status = test_main(argc, argv);
    file_remove_tree(fresh_dir());
    return status;
}
