/*
 * Recorded work (device/recorder.h) and steps of it (engine/replays.h), on a device that keeps what it captures as a
 * list of copies: what is replayed is what was given, in its order; digests tell all arguments of all ops apart; what
 * cannot be recorded is refused, and failures leave nothing behind.
 */
#include "test.h"

#include "comm/comm.h"
#include "device/ops.h"
#include "device/recorder.h"
#include "engine/replays.h"

/* ---- a device that captures ---- */

enum { CELLS = 16, COPIES = 32 };

typedef struct {
    void *to;
    const void *from; /* NULL: zeros */
    int64_t bytes;
} Copy;

struct DeviceGraph {
    Copy copy[COPIES];
    int count;
};

static DeviceGraph *capture; /* that is under way */
static int graphs_alive, launched;
static bool fail_to_end;
static DeviceBackend backend;

static Err fake_copy(Stream *s, void *to, const void *from, int64_t bytes)
{
    (void)s;
    if (capture) {
        capture->copy[capture->count++] = (Copy){ to, from, bytes };
        return ERR_OK;
    }
    launched++;
    if (from) memcpy(to, from, (size_t)bytes);
    else memset(to, 0, (size_t)bytes);
    return ERR_OK;
}

static Err fake_zero(Stream *s, void *to, int64_t bytes) { return fake_copy(s, to, NULL, bytes); }

static Err fake_begin(Stream *s)
{
    (void)s;
    CHECK(!capture);
    capture = calloc(1, sizeof *capture);
    return ERR_OK;
}

static Err fake_end(Stream *s, DeviceGraph **out, int64_t *launches)
{
    (void)s;
    DeviceGraph *g = capture;
    CHECK(g);
    capture = NULL;
    *launches = g->count;
    *out = g->count && !fail_to_end ? g : NULL;
    graphs_alive += *out != NULL;
    if (!*out) free(g);
    return fail_to_end ? err_set(ERR_DEVICE, "recording a graph: as was wanted") : ERR_OK;
}

static Err fake_replay(Stream *s, DeviceGraph *g)
{
    CHECK(!capture);
    for (int i = 0; i < g->count; i++) TRY(fake_copy(s, g->copy[i].to, g->copy[i].from, g->copy[i].bytes));
    return ERR_OK;
}

static void fake_free(DeviceGraph *g)
{
    graphs_alive--;
    free(g);
}

/* (an event that a stream must be told to wait for) */
static int waits;

static Err fake_stream_wait(Stream *s, void *mark)
{
    (void)s, (void)mark;
    CHECK(!capture);
    waits++;
    return ERR_OK;
}

static void free_nothing(void *mark) { (void)mark; }

static const EventMarks marks = { fake_stream_wait, NULL, free_nothing };

static Err fake_mark(Stream *s, Event *e)
{
    (void)s;
    CHECK(!capture);
    e->marked = true;
    e->marks = &marks;
    e->mark = e;
    return ERR_OK;
}

typedef struct {
    Device dev;
    Event event;
    int64_t cell[CELLS];
    int made; /* calls */
} Rig;

static void open_rig(Rig *r)
{
    *r = (Rig){ .made = 0 };
    if (device_open(&r->dev, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 })) TEST_FAIL("no device");
    backend = *r->dev.backend;
    backend.copy = fake_copy;
    backend.zero = fake_zero;
    backend.mark = fake_mark;
    backend.record_begin = fake_begin;
    backend.record_end = fake_end;
    backend.replay = fake_replay;
    backend.graph_free = fake_free;
    r->dev.backend = &backend;
    event_init(&r->event);
    for (int i = 0; i < CELLS; i++) r->cell[i] = i + 1;
    launched = waits = 0;
    fail_to_end = false;
}

static void close_rig(Rig *r)
{
    event_release(&r->event);
    device_close(&r->dev);
    CHECK_MSG(graphs_alive == 0, "%d graphs are left", graphs_alive);
}

static Err move(Rig *r, int to, int from)
{
    return device_copy(&r->dev.stream, &r->cell[to], &r->cell[from], sizeof r->cell[0]);
}

typedef struct {
    Rig *rig;
    int cell, by;
} Add;

/* (inside it what is asked of the device is part of it) */
static Err add(Stream *s, const void *args)
{
    const Add *a = args;
    a->rig->made++;
    a->rig->cell[a->cell] += a->by;
    return device_copy(s, &a->rig->cell[a->cell + 1], &a->rig->cell[a->cell], sizeof(int64_t));
}

static Err call_add(Rig *r, int cell, int by)
{
    const Add a = { r, cell, by };
    return device_call(&r->dev.stream, add, &a, sizeof a, digest_int(digest_int(DIGEST_EMPTY, cell), by));
}

/* Its outcome depends on the order of all of it. */
static Err work(void *user)
{
    Rig *r = user;
    TRY(move(r, 1, 0));
    TRY(move(r, 2, 1));
    TRY(call_add(r, 2, 10)); /* cells 2 and 3 */
    TRY(move(r, 4, 3));
    TRY(device_mark(&r->dev.stream, &r->event));
    TRY(stream_wait(&r->dev.stream, &r->event));
    TRY(call_add(r, 4, 100));
    TRY(call_add(r, 5, 1000));
    return move(r, 0, 6);
}

static Err record(Rig *r, Recording *into, uint64_t *digest, UnitWork *of)
{
    Recorder recorder;
    recorder_begin(&recorder, &r->dev.stream, into);
    const Err err = recorder_end(&recorder, &r->dev.stream, of(r));
    *digest = recorder.digest;
    return err;
}

TEST(work_is_replayed_in_its_order)
{
    static Rig plain, recorded;
    Recording x = { 0 };
    uint64_t heard, digest;
    open_rig(&plain);
    CHECK(!work(&plain) && !work(&plain) && !work(&plain));
    const int one_by_one = launched / 3;
    close_rig(&plain);
    open_rig(&recorded);
    CHECK(!record(&recorded, NULL, &heard, work));
    CHECK(!record(&recorded, &x, &digest, work));
    CHECK(heard == digest && x.digest == digest);
    CHECK_MSG(x.graphs == 3 && x.calls == 5 && x.launches == 4, "%lld graphs, %lld calls, %lld launches",
              (long long)x.graphs, (long long)x.calls, (long long)x.launches);
    const int before = launched, waited = waits;
    CHECK(!recording_replay(&x, &recorded.dev.stream));
    CHECK(launched - before == one_by_one && waits - waited == 1);
    CHECK_MSG(!memcmp(plain.cell, recorded.cell, sizeof plain.cell), "cell 0: %lld, %lld", (long long)plain.cell[0],
              (long long)recorded.cell[0]);
    CHECK(plain.made == recorded.made);
    CHECK(recorded.dev.counters.graphs == 3 && recorded.dev.counters.graph_launches == 4 &&
          recorded.dev.counters.graph_calls == 5);
    CHECK(!recorded.dev.recorder);
    recording_release(&x, &recorded.dev);
    close_rig(&recorded);
}

/* ---- digests ---- */

/* Its arguments, all of them absent, or with the `changed`th one of its fields another (from 0); false: it has
 * fewer. */
#define T(name, dims) \
    if (n++ == changed) a->name = tensor_of(some, F32, 4), found = true;
#define S(type, name) \
    if (n++ == changed) memset(&a->name, 1, sizeof a->name), found = true;
#define OP(op_name, flop, args)                                      \
    static bool change_##op_name(void *of, int changed, float *some) \
    {                                                                \
        op_name##_args *a = of;                                      \
        bool found = false;                                          \
        int n = 0;                                                   \
        args (void) some;                                            \
        return found;                                                \
    }
#include "device/ops.def"
#undef OP
#undef S
#undef T

static bool (*const changes[OP_COUNT])(void *, int, float *) = {
#define OP(name, flop, args) change_##name,
#include "device/ops.def"
#undef OP
};

enum { ARGS_BYTES = 4096, FIELDS = 32 };

TEST(digests_tell_all_arguments_apart)
{
    static _Alignas(16) char args[ARGS_BYTES];
    static float some[8];
    int fields = 0;
    for (OpId id = 0; id < OP_COUNT; id++) {
        uint64_t seen[FIELDS + 1];
        int n = 0;
        memset(args, 0, sizeof args);
        seen[n++] = op_digest(id, args);
        for (int i = 0; i < FIELDS; i++) {
            memset(args, 0, sizeof args);
            if (!changes[id](args, i, some)) break;
            seen[n++] = op_digest(id, args);
            fields++;
        }
        for (int i = 0; i < n; i++)
            for (int k = 0; k < i; k++) CHECK_MSG(seen[i] != seen[k], "%s: arguments %d, %d", op_info(id)->name, i, k);
    }
    CHECK_MSG(fields > 4 * OP_COUNT, "%d arguments of %d ops", fields, OP_COUNT);
}

TEST(digests_tell_tensors_apart)
{
    static int64_t rows[2];
    static float data[64];
    const Tensor base = tensor_of(data, F32, 4, 4);
    const Tensor factors = tensor_of(data, F32, 4), more = tensor_of(data + 8, F32, 4);
    Tensor other[9], elsewhere = base;
    for (int i = 0; i < 9; i++) other[i] = base;
    other[0].data = data + 1;
    other[1].dim[0] = 3;
    other[2].dim[1] = 3;
    other[3].ld = 5;
    other[4].dtype = I32;
    other[5].rows = rows;
    other[6].group = 2;
    other[7].ndim = 1;
    other[8].scale = &factors;
    elsewhere.scale = &more;
    for (int i = 0; i < 9; i++)
        CHECK_MSG(digest_tensor(DIGEST_EMPTY, &base) != digest_tensor(DIGEST_EMPTY, &other[i]), "tensor %d", i);
    CHECK(digest_tensor(DIGEST_EMPTY, &other[8]) != digest_tensor(DIGEST_EMPTY, &elsewhere));
}

static int swap_first; /* of the two copies of `two_copies` */

static Err two_copies(void *user)
{
    Rig *r = user;
    TRY(move(r, swap_first ? 2 : 1, 0));
    return move(r, swap_first ? 1 : 2, 0);
}

TEST(digests_tell_orders_apart)
{
    static Rig r;
    uint64_t digest[2];
    open_rig(&r);
    for (int i = 0; i < 2; i++) {
        swap_first = i == 1;
        CHECK(!record(&r, NULL, &digest[i], two_copies));
    }
    CHECK(digest[0] != digest[1]);
    close_rig(&r);
}

/* ---- what cannot be recorded ---- */

static Err copies_and(Rig *r, int what)
{
    int64_t here = 7;
    TRY(move(r, 1, 0));
    if (what == 0) TRY(device_read(&r->dev.stream, &here, &r->cell[1], sizeof here));
    if (what == 1) TRY(device_write(&r->dev.stream, &r->cell[1], &here, sizeof here));
    if (what == 2) TRY(device_wait(&r->dev.stream, &r->event));
    if (what == 3) TRY(device_sync(&r->dev.stream));
    if (what == 4) TRY(device_read_later(&r->dev.copies, &r->cell[8], &r->cell[1], sizeof here));
    if (what == 5) TRY(device_mark(&r->dev.copies, &r->event));
    return move(r, 2, 1);
}

TEST(what_no_recording_can_hold)
{
    for (int what = 0; what < 6; what++) {
        static Rig r;
        Recorder recorder;
        open_rig(&r);
        recorder_begin(&recorder, &r.dev.stream, NULL);
        CHECK(!recorder_end(&recorder, &r.dev.stream, copies_and(&r, what)));
        CHECK_MSG(recorder.refused, "%d is not refused", what);
        CHECK(r.cell[2] == (what == 1 ? 7 : 1));
        close_rig(&r);
    }
}

static Err work_that_fails(void *user)
{
    Rig *r = user;
    TRY(move(r, 1, 0));
    TRY(call_add(r, 2, 1));
    TRY(move(r, 2, 1));
    return err_set(ERR_SHAPE, "of the host code");
}

TEST(failures_leave_nothing_behind)
{
    static Rig r;
    Recording x = { 0 };
    uint64_t digest;
    open_rig(&r);
    CHECK(record(&r, &x, &digest, work_that_fails) == ERR_SHAPE && !strcmp(err_message(), "of the host code"));
    CHECK(!x.count && !r.dev.recorder && !capture && !graphs_alive);
    fail_to_end = true;
    CHECK(record(&r, &x, &digest, work) == ERR_DEVICE && strstr(err_message(), "recording a graph"));
    CHECK(strstr(err_hint_text(), "run.graphs=false"));
    CHECK(!x.count && !r.dev.recorder && !capture && !graphs_alive);
    fail_to_end = false;
    CHECK(!record(&r, &x, &digest, work) && x.count);
    recording_release(&x, &r.dev);
    close_rig(&r);
}

/* ---- calls of communicators ---- */

TEST(calls_of_a_group_of_one_cut_no_piece)
{
    static Rig r;
    Comm one;
    Recording x = { 0 };
    Recorder recorder;
    open_rig(&r);
    comm_open_self(&one, "tp");
    recorder_begin(&recorder, &r.dev.stream, &x);
    Err err = move(&r, 1, 0);
    if (!err) err = comm_sum_i64(&one, &r.dev.stream, &r.cell[1], 1, NULL);
    if (!err) err = move(&r, 2, 1);
    CHECK(!recorder_end(&recorder, &r.dev.stream, err));
    CHECK(x.graphs == 1 && x.calls == 0 && x.launches == 2);
    recording_release(&x, &r.dev);
    comm_close(&one);
    close_rig(&r);
}

static Err submit_sum(Comm *c, const CommRequest *r)
{
    int64_t *cell = r->dst;
    (void)c;
    CHECK(!capture && r->sequence == c->sequence - 1);
    *cell = 2 * *cell;
    event_complete(r->done, ERR_OK, "");
    return ERR_OK;
}

static void close_sum(Comm *c) { (void)c; }

TEST(calls_of_others_are_made_again)
{
    static const CommTable table = { "two", submit_sum, close_sum };
    static Rig r;
    Comm two;
    Recording x = { 0 };
    Recorder recorder;
    open_rig(&r);
    comm_init(&two, &table, "tp", 0, 2, NULL);
    recorder_begin(&recorder, &r.dev.stream, &x);
    Err err = move(&r, 1, 0);
    if (!err) err = comm_sum_i64(&two, &r.dev.stream, &r.cell[1], 1, NULL);
    if (!err) err = move(&r, 0, 1);
    CHECK(!recorder_end(&recorder, &r.dev.stream, err));
    CHECK(r.cell[0] == 2 && x.graphs == 2 && x.calls == 1);
    for (int i = 0; i < 3; i++) CHECK(!recording_replay(&x, &r.dev.stream));
    CHECK_MSG(r.cell[0] == 16, "%lld", (long long)r.cell[0]);
    CHECK(two.calls[COMM_SUM_I64] == 4 && two.sequence == 4);
    recording_release(&x, &r.dev);
    comm_close(&two);
    close_rig(&r);
}

/* ---- steps ---- */

enum { UNITS = 3 };

/* A step: units of one action, of which the first is another than the others, and an action behind. */
static Action step_actions[] = { { .kind = ACT_F, .count = UNITS }, { .kind = ACT_NORM } };
static const ActionList step_list = { .action = step_actions, .count = 2 };

typedef struct {
    Rig *rig;
    int unit, extra; /* extra: in each unit */
    int host_runs;
    bool reads;
} Step;

static Err unit_work(void *user)
{
    Step *x = user;
    x->host_runs++;
    TRY(move(x->rig, x->unit ? 2 : 1, 0));
    TRY(call_add(x->rig, 4, 1));
    if (x->reads) TRY(device_sync(&x->rig->dev.stream));
    return move(x->rig, 3 + x->extra, 4);
}

static Err run_step(Replays *r, Step *x, bool plainly)
{
    replays_begin(r, plainly);
    for (x->unit = 0; x->unit < UNITS; x->unit++) TRY(replays_run(r, &x->rig->dev.stream, 0, x->unit, unit_work, x));
    x->unit = 0;
    TRY(replays_run(r, &x->rig->dev.stream, 1, 0, unit_work, x));
    replays_end(r);
    return ERR_OK;
}

/* How many units' host code the next step runs. */
static int host_runs(Replays *r, Step *x, bool plainly)
{
    const int before = x->host_runs;
    const int64_t cell = x->rig->cell[4];
    CHECK(!run_step(r, x, plainly));
    CHECK_MSG(x->rig->cell[4] == cell + UNITS + 1, "a step is as much work, however it is given");
    return x->host_runs - before;
}

static void open_steps(Rig *r, SetupArena *setup, Replays *replays)
{
    open_rig(r);
    setup_init(setup);
    CHECK(!replays_open(replays, &step_list, setup) && replays->unit_count == UNITS + 1);
}

static void close_steps(Rig *r, SetupArena *setup, Replays *replays)
{
    replays_release(replays, &r->dev);
    setup_release(setup);
    close_rig(r);
}

TEST(the_third_step_is_recorded_and_later_ones_replayed)
{
    static Rig r;
    SetupArena setup;
    Replays replays;
    Step x = { .rig = &r };
    open_steps(&r, &setup, &replays);
    CHECK(host_runs(&replays, &x, true) == UNITS + 1); /* (learns nothing) */
    for (int i = 0; i < 3; i++) CHECK(!replays.ready && host_runs(&replays, &x, false) == UNITS + 1);
    CHECK(replays.ready && replays.recording_count == 2);
    for (int i = 0; i < 2; i++) CHECK(host_runs(&replays, &x, false) == 0);
    CHECK(host_runs(&replays, &x, true) == UNITS + 1);
    CHECK(host_runs(&replays, &x, false) == 0);
    /* other work, of which the device must hear */
    replays_forget(&replays);
    x.extra = 4;
    for (int i = 0; i < 3; i++) CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    r.cell[7] = 0;
    CHECK(host_runs(&replays, &x, false) == 0 && r.cell[7] == r.cell[4]);
    /* what was known before is recorded once */
    replays_forget(&replays);
    x.extra = 0;
    for (int i = 0; i < 3; i++) CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    CHECK(host_runs(&replays, &x, false) == 0 && replays.recording_count == 4);
    close_steps(&r, &setup, &replays);
}

TEST(steps_that_differ_are_not_recorded)
{
    static Rig r;
    SetupArena setup;
    Replays replays;
    Step x = { .rig = &r };
    open_steps(&r, &setup, &replays);
    for (int i = 0; i < 6; i++) {
        x.extra = i % 2 ? 4 : 0;
        CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    }
    CHECK(!replays.recording_count);
    /* one that changes while it is recorded is listened to again */
    CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    x.extra = 5;
    for (int i = 0; i < 3; i++) CHECK(!replays.ready && host_runs(&replays, &x, false) == UNITS + 1);
    r.cell[8] = 0;
    CHECK(replays.ready && host_runs(&replays, &x, false) == 0 && r.cell[8] == r.cell[4]);
    close_steps(&r, &setup, &replays);
}

TEST(steps_that_cannot_be_recorded_run_on)
{
    static Rig r;
    SetupArena setup;
    Replays replays;
    Step x = { .rig = &r, .reads = true };
    open_steps(&r, &setup, &replays);
    /* (a read of the first step, as those that time products, does no harm) */
    CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    x.reads = false;
    for (int i = 0; i < 2; i++) CHECK(!replays.ready && host_runs(&replays, &x, false) == UNITS + 1);
    CHECK(replays.ready);
    replays_forget(&replays);
    x.reads = true;
    for (int i = 0; i < 20; i++) CHECK(host_runs(&replays, &x, false) == UNITS + 1);
    CHECK(replays.off && !replays.ready);
    close_steps(&r, &setup, &replays);
}

TEST_MAIN
