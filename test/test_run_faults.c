/*
 * A whole training run, one of whose calls on a file of the run's folder fails: with EIO, with ENOSPC, with ENOSPC
 * after half of a write; or is interrupted, or does half of what was asked and says so. Each call in turn, with
 * checkpoints written by the step and by a thread.
 *
 *   failing       the run ends with 0 or 5; what it says it saved is there, whole; nothing that looks like a checkpoint
 *                 is not; and run again it gives the bits of the run without a fault
 *   interrupted   nobody notices
 *
 * Runs are children: each has its own threads. MEGATRAIN_DAMAGE=all (make test-files): every call, each fault where the
 * step writes, one in turn where a thread does; else every fifth call, one in turn.
 */
#include "file_calls.h"

#include "token_pair.h"

#include <sys/wait.h>

#include "config/config.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "train/train.h"

typedef enum { FAIL_EIO, FAIL_ENOSPC, FAIL_SHORT, INTERRUPT, HALF, ACTIONS } Action;

static const char *const action_names[ACTIONS] = { "EIO", "ENOSPC", "short and ENOSPC", "EINTR", "half" };

static struct {
    Action action;
    int64_t at, calls;
    bool full; /* the call after a short write fails */
} fault;

static bool may_be_interrupted(FileCallKind k)
{
    return k == CALL_OPEN || k == CALL_READ || k == CALL_WRITE || k == CALL_SYNC || k == CALL_CUT || k == CALL_CLOSE;
}

static bool before_call(FileCall *c)
{
    const bool moves = c->kind == CALL_READ || c->kind == CALL_WRITE;
    if (fault.full) {
        fault.full = false;
        errno = ENOSPC;
        return true;
    }
    if (++fault.calls != fault.at) return false;
    switch (fault.action) {
    case FAIL_SHORT:
        if (c->kind == CALL_WRITE) {
            c->size /= 2;
            fault.full = true;
            return false;
        } /* fall through */
    case FAIL_ENOSPC: errno = ENOSPC; return true;
    case FAIL_EIO: errno = EIO; return true;
    case INTERRUPT: errno = EINTR; return may_be_interrupted(c->kind);
    case HALF:
        if (moves && c->size > 1) c->size /= 2;
        return false;
    case ACTIONS: break;
    }
    return false;
}

/* ---- runs ---- */

enum { STEPS = 4 };

static Err train(const char *dir, bool async, int64_t steps)
{
    char run_dir[256], data[256], stop[64], save[64];
    Config cfg;
    snprintf(run_dir, sizeof run_dir, "run.dir=%s", dir);
    snprintf(data, sizeof data, "data.train=%s", in_dir("tokens"));
    snprintf(stop, sizeof stop, "train.stop_at=%lld", (long long)steps);
    snprintf(save, sizeof save, "checkpoint.async=%s", async ? "true" : "false");
    const char *words[] = { run_dir, data, stop, save, "run.device=cpu", "run.name=x", "model.layers=1",
                            "model.hidden=16", "model.heads=2", "model.seq=16", "train.micro_batch=1",
                            "train.global_batch=2", "train.steps=10", "optim.warmup=1", "checkpoint.every=1",
                            "debug.threads=1" };
    Err err = config_read(&cfg, (ConfigSource){ .overrides = words, .override_count = sizeof words / sizeof *words });
    if (!err) err = train_run(&cfg, &(Boot){ .size = 1 }, NULL);
    config_release(&cfg);
    return err;
}

/* Trains in a child, whose stderr goes to `said`; its exit status. *calls: that it made. */
static int run(const char *dir, bool async, Action action, int64_t at, int64_t *calls, char said[8192])
{
    int64_t counted = 0;
    int ends[2];
    const char *log = in_dir("log");
    if (pipe(ends)) exit(1);
    fflush(stdout), fflush(stderr);
    pid_t pid = fork();
    if (!pid) {
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, 2);
        fault.action = action;
        fault.at = at;
        file_calls.root = dir;
        file_calls.before = before_call;
        Err err = train(dir, async, STEPS);
        file_calls.root = NULL;
        if (err) err_print(err, false);
        _exit(write(ends[1], &fault.calls, sizeof fault.calls) > 0 ? err_exit_code(err) : 99);
    }
    int status = 0;
    close(ends[1]);
    waitpid(pid, &status, 0);
    if (read(ends[0], &counted, sizeof counted) > 0 && calls) *calls = counted;
    close(ends[0]);
    char *text;
    int64_t size;
    OK(file_read_all(log, 1 << 20, &text, &size));
    snprintf(said, 8192, "%s", size > 8000 ? text + size - 8000 : text);
    free(text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

/* ---- what is left ---- */

static uint64_t digest_of(const char *dir, int64_t step)
{
    char path[512];
    uint64_t digest = 0;
    snprintf(path, sizeof path, "%s/checkpoints/step-%08lld", dir, (long long)step);
    if (!file_exists(path) || ckpt_digest(path, &digest)) return 0;
    return digest;
}

/* Checkpoints by name that are not whole. */
static int not_whole(const char *dir)
{
    char path[512];
    int bad = 0;
    for (int step = 0; step <= STEPS; step++)
        for (int old = 0; old < 2; old++) {
            snprintf(path, sizeof path, "%s/checkpoints/step-%08d%s", dir, step, old ? ".old" : "");
            if (file_exists(path)) bad += ckpt_verify(path) != ERR_OK;
        }
    return bad;
}

static struct {
    uint64_t digest;
    int64_t done, went_on, failed, unseen;
} sum;

static void check_run(bool async, Action action, int64_t at)
{
    char said[8192], again[8192];
    const char *dir = in_dir("faulty");
    OK(file_remove_tree(dir));
    int status = run(dir, async, action, at, NULL, said);
    const bool gone_on = strstr(said, "training goes on") != NULL;
#define WHERE "%s at call %lld, async %d: exit %d: %s", action_names[action], (long long)at, async, status, said
    if (action == INTERRUPT || action == HALF) {
        CHECK_MSG(status == 0 && !strstr(said, "warning") && digest_of(dir, STEPS) == sum.digest, WHERE);
        sum.unseen++;
        return;
    }
    CHECK_MSG(status == 0 || status == 5, WHERE);
    CHECK_MSG(not_whole(dir) == 0, WHERE);
    if (status == 0) CHECK_MSG(digest_of(dir, STEPS) == sum.digest, WHERE);
    else CHECK_MSG(strstr(said, "megatrain: error (storage): "), WHERE);
    /* (of a thread's save of the last step but one it may be known after the last one only) */
    if (gone_on && !(async && strstr(said, "checkpoint of step 3: "))) {
        char path[256], *text;
        int64_t size;
        snprintf(path, sizeof path, "%s/metrics.jsonl", dir);
        OK(file_read_all(path, 1 << 20, &text, &size));
        CHECK_MSG(strstr(text, "\"saved\":false"), "no line in the metrics: %s", said);
        free(text);
    }
    sum.went_on += gone_on && status == 0;
    sum.failed += status == 5;
    int second = run(dir, async, action, 0, NULL, again);
    CHECK_MSG(second == 0 && digest_of(dir, STEPS) == sum.digest, "%s at call %lld, run again: exit %d: %s",
              action_names[action], (long long)at, second, again);
}

static void each_call(bool async)
{
    char said[8192];
    int64_t calls = 0;
    const bool all = getenv("MEGATRAIN_DAMAGE") != NULL;
    write_pair("tokens", TOKEN_U16, (int[]){ 900, 700 }, 2, 257);
    memset(&sum, 0, sizeof sum);
    const char *dir = in_dir("whole");
    OK(file_remove_tree(dir));
    CHECK_MSG(run(dir, async, FAIL_EIO, 0, &calls, said) == 0 && calls > 80, "%s", said);
    CHECK((sum.digest = digest_of(dir, STEPS)) != 0);
    for (int64_t at = 1; at <= calls; at += all ? 1 : 5)
        for (Action a = 0; a < ACTIONS; a++) {
            if (!(all && !async) && a != (Action)(at / (all ? 1 : 5) % ACTIONS)) continue;
            check_run(async, a, at);
            sum.done++;
        }
    CHECK(sum.failed > 0 && sum.went_on > 0 && sum.unseen > 0);
    printf("    %lld calls, %lld faults: %lld nobody notices, %lld runs fail, %lld warn and go on\n", (long long)calls,
           (long long)sum.done, (long long)sum.unseen, (long long)sum.failed, (long long)sum.went_on);
}

TEST(a_fault_at_each_call_of_a_run) { each_call(false); }

TEST(a_fault_at_each_call_of_a_run_that_saves_by_a_thread) { each_call(true); }

TEST_MAIN
