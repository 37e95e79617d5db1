/*
 * Programs that are broken on purpose: each must be refused for its own reason. A case takes a good program
 * apart in one place; the untouched one passes, so that the reason is the break.
 */
#include "pipeline/check.h"
#include "pipeline/simulate.h"
#include "test.h"

static Err check_all(const Schedule *s)
{
    TRY(check_compute(s));
    TRY(check_messages(s));
    TRY(check_rendezvous(s));
    return check_cap(s);
}

static void make(Schedule *s, const char *name, int ranks, int microbatches)
{
    OK(schedule_make(&(ScheduleSpec){ name, ranks, microbatches }, s));
    OK(check_all(s));
}

static void refused(Schedule *s, const char *why)
{
    FAILS(check_all(s), ERR_INTERNAL, why);
    schedule_free(s);
}

/* ---- surgery ---- */

/* Place of the n-th action of a kind in a rank's list. */
static int find(const Schedule *s, int rank, ActionKind kind, int n)
{
    const ActionList *list = &s->rank[rank];
    for (int i = 0; i < list->count; i++)
        if (list->action[i].kind == kind && n-- == 0) return i;
    ASSERT(!"no such action");
    return -1;
}

static Action *nth(Schedule *s, int rank, ActionKind kind, int n)
{
    return &s->rank[rank].action[find(s, rank, kind, n)];
}

static Action cut(Schedule *s, int rank, int i)
{
    ActionList *list = &s->rank[rank];
    const Action a = list->action[i];
    memmove(&list->action[i], &list->action[i + 1], (size_t)(list->count - i - 1) * sizeof a);
    list->count--;
    return a;
}

/* The list has room: it held one action more, or its capacity is a power of two above. */
static void paste(Schedule *s, int rank, int i, Action a)
{
    ActionList *list = &s->rank[rank];
    ASSERT(list->count < list->capacity);
    memmove(&list->action[i + 1], &list->action[i], (size_t)(list->count - i) * sizeof a);
    list->action[i] = a;
    list->count++;
}

static void move(Schedule *s, int rank, int from, int to) { paste(s, rank, to, cut(s, rank, from)); }

static void swap(Action *a, Action *b)
{
    const Action kept = *a;
    *a = *b;
    *b = kept;
}

/* ---- computes ---- */

TEST(missing_compute)
{
    Schedule s;
    make(&s, "zb-h1", 2, 4);
    cut(&s, 0, find(&s, 0, ACT_F, 3));
    refused(&s, "comes before its F");
    make(&s, "gpipe", 2, 4);
    s.forward_only = true; /* as if nothing but forwards were promised */
    for (int r = 0; r < 2; r++) s.rank[r].count = 0;
    FAILS(check_compute(&s), ERR_INTERNAL, "missing: F of unit 0 at stage 0");
    schedule_free(&s);
}

TEST(duplicate_compute)
{
    Schedule s;
    make(&s, "1f1b", 2, 4);
    paste(&s, 1, find(&s, 1, ACT_B, 0), *nth(&s, 1, ACT_F, 0));
    refused(&s, "is there twice");
}

TEST(slices_out_of_order)
{
    const ScheduleSpec spec = { "seq1f1b", 2, 3, .slices = 2 };
    Schedule s;
    OK(schedule_make(&spec, &s));
    swap(nth(&s, 0, ACT_F, 0), nth(&s, 0, ACT_F, 1));
    FAILS(check_compute(&s), ERR_INTERNAL, "F of unit 1 at stage 0, replica 0 comes before the slice before it");
    schedule_free(&s);
    OK(schedule_make(&spec, &s));
    swap(nth(&s, 1, ACT_B, 0), nth(&s, 1, ACT_B, 1));
    FAILS(check_compute(&s), ERR_INTERNAL, "B of unit 0 at stage 1, replica 0 comes before the slice behind it");
    schedule_free(&s);
    OK(schedule_make(&(ScheduleSpec){ "seq1f1b", 1, 2, .slices = 2 }, &s));
    move(&s, 0, find(&s, 0, ACT_B, 1), find(&s, 0, ACT_B, 2)); /* B0:0 behind B1:1 */
    FAILS(check_compute(&s), ERR_INTERNAL, "has another micro-batch between its slices");
    schedule_free(&s);
    OK(schedule_make(&spec, &s));
    nth(&s, 0, ACT_F, 2)->slice = 1;
    FAILS(check_compute(&s), ERR_INTERNAL, "says it were another slice");
    schedule_free(&s);
}

TEST(foreign_compute)
{
    Schedule s;
    make(&s, "1f1b", 2, 4);
    nth(&s, 1, ACT_F, 2)->stage = 0;
    refused(&s, "is foreign: another rank has this stage");
    make(&s, "1f1b", 2, 4);
    nth(&s, 0, ACT_F, 3)->microbatch = 4;
    refused(&s, "is foreign: the schedule has no such thing");
    make(&s, "chimera", 2, 2);
    Action *a = nth(&s, 0, ACT_F, 0);
    a->replica = 1;
    a->stage = 1;
    refused(&s, "is foreign: the other replica has this unit");
}

TEST(swapped_lists)
{
    Schedule s;
    make(&s, "1f1b", 4, 8);
    const ActionList kept = s.rank[0];
    s.rank[0] = s.rank[1];
    s.rank[1] = kept;
    refused(&s, "is foreign: another rank has this stage");
}

TEST(weight_before_input)
{
    Schedule s;
    make(&s, "zb-h1", 2, 4);
    swap(nth(&s, 1, ACT_I, 1), nth(&s, 1, ACT_W, 1));
    refused(&s, "comes before its I");
}

TEST(pair_with_a_forward)
{
    Schedule s;
    make(&s, "gpipe", 1, 2);
    nth(&s, 0, ACT_F, 0)->flags |= ACTION_PAIR;
    refused(&s, "is paired with what is no backward");
}

/* Rank 0 wants the gradient of unit 0 before it sends unit 1, rank 1 wants unit 1 first. */
TEST(cycle)
{
    Schedule s;
    Simulation sim;
    make(&s, "gpipe", 2, 2);
    Action *a = s.rank[0].action, *b = s.rank[1].action;
    static const Action first[] = { { .kind = ACT_F, .count = 1 },
                                    { .kind = ACT_B, .count = 1 },
                                    { .kind = ACT_F, .count = 1, .microbatch = 1 },
                                    { .kind = ACT_B, .count = 1, .microbatch = 1 } };
    static const int order[] = { 0, 2, 1, 3 };
    s.rank[0].count = s.rank[1].count = 4;
    for (int i = 0; i < 4; i++) {
        a[i] = first[i];
        b[i] = first[order[i]];
        b[i].stage = 1;
    }
    FAILS(simulate(&s, &(SimulateCosts){ .each = { 1, 1, 1 } }, &sim), ERR_INTERNAL,
          "cycle: rank 0 waits for ever with B of unit 0 at stage 0 for I of unit 0 at stage 1");
    simulation_free(&sim, &s);
    schedule_free(&s);
}

/* ---- versions and updates ---- */

TEST(wrong_version)
{
    Schedule s;
    make(&s, "1f1b", 2, 4);
    nth(&s, 0, ACT_B, 0)->version = 1;
    refused(&s, "reads a version that was never there");
    make(&s, "pipedream", 3, 6);
    nth(&s, 0, ACT_B, 3)->version++; /* what its forward did not read */
    refused(&s, "reads the wrong version of the weights");
    make(&s, "2bw", 3, 3);
    nth(&s, 0, ACT_F, 8)->version = 0; /* the newest, as PipeDream would */
    refused(&s, "reads the wrong version of the weights");
}

TEST(early_update)
{
    Schedule s;
    make(&s, "1f1b", 2, 4);
    move(&s, 0, find(&s, 0, ACT_REDUCE, 0), find(&s, 0, ACT_B, 3));
    refused(&s, "is early: wgrads are still to come");
    make(&s, "1f1b", 2, 4);
    swap(nth(&s, 0, ACT_UPDATE, 0), nth(&s, 0, ACT_NORM, 0));
    refused(&s, "is early: there is no norm yet");
    make(&s, "1f1b", 2, 4);
    move(&s, 0, find(&s, 0, ACT_UPDATE, 0), find(&s, 0, ACT_REDUCE, 0));
    refused(&s, "is early: its gradients are not reduced");
    make(&s, "1f1b", 2, 4);
    nth(&s, 0, ACT_UPDATE, 0)->replica = 1;
    refused(&s, "is foreign: there is no such replica");
    make(&s, "chimera", 2, 4);
    cut(&s, 0, find(&s, 0, ACT_UPDATE, 1));
    refused(&s, "updates of replica");
}

/* ---- messages ---- */

TEST(swapped_sends)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    swap(nth(&s, 0, ACT_SEND, 1), nth(&s, 0, ACT_SEND, 2));
    refused(&s, "comes before what it sends is made");
    make(&s, "dualpipe", 4, 8); /* two that leave in one group, to the same rank */
    bool found = false;
    for (int i = 0; i + 1 < s.rank[1].count && !found; i++) {
        Action *a = &s.rank[1].action[i];
        found = a->kind == ACT_SEND && a->flags & ACTION_MORE && a[1].kind == ACT_SEND && a[1].peer == a->peer;
        if (!found) continue;
        const uint8_t flags = a->flags;
        swap(a, a + 1);
        a[1].flags = a->flags;
        a->flags = flags;
    }
    CHECK(found);
    refused(&s, "order: rank 1 sends");
}

TEST(missing_receive)
{
    Schedule s;
    make(&s, "1f1b", 2, 4);
    cut(&s, 1, find(&s, 1, ACT_RECV, 1));
    refused(&s, "reads what has no RECV before it");
    make(&s, "1f1b", 2, 4);
    cut(&s, 1, find(&s, 1, ACT_SEND, 3));
    refused(&s, "missing: SEND of gradient of unit 3");
}

TEST(late_receive)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    move(&s, 1, find(&s, 1, ACT_RECV, 0), find(&s, 1, ACT_F, 0));
    refused(&s, "reads what has no RECV before it");
}

TEST(duplicate_and_foreign_messages)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    const int i = find(&s, 1, ACT_RECV, 2);
    paste(&s, 1, i, s.rank[1].action[i]);
    refused(&s, "is there twice");
    make(&s, "gpipe", 4, 4);
    nth(&s, 1, ACT_SEND, 0)->peer = 3;
    refused(&s, "is foreign: it is between other ranks");
    make(&s, "gpipe", 2, 4);
    nth(&s, 0, ACT_SEND, 0)->stage = 7;
    refused(&s, "is foreign: the schedule has no such message");
}

/* The receive is there, after another that is sent later: both sides wait. */
TEST(deadlock)
{
    Schedule s;
    make(&s, "gpipe", 3, 3);
    const int early = find(&s, 0, ACT_RECV, 0);
    move(&s, 0, early, find(&s, 0, ACT_SEND, 2)); /* rank 0 wants a gradient before it has sent all units */
    refused(&s, "deadlock: rank 0 waits for ever");
}

TEST(order_of_a_channel)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    /* the receives of units 1 and 2 trade places, with a buffer more; both computes come after both */
    const int extra = s.rank[1].buffers++;
    move(&s, 1, find(&s, 1, ACT_F, 1), find(&s, 1, ACT_F, 2) - 1);
    nth(&s, 1, ACT_RECV, 2)->in = nth(&s, 1, ACT_F, 2)->in = (int16_t)extra;
    swap(nth(&s, 1, ACT_RECV, 1), nth(&s, 1, ACT_RECV, 2));
    refused(&s, "order: rank 0 sends unit 1");
}

TEST(compute_inside_a_group)
{
    Schedule s;
    make(&s, "zb-h2", 2, 4);
    int at = -1;
    for (int i = 0; i < s.rank[0].count && at < 0; i++)
        if (s.rank[0].action[i].flags & ACTION_MORE) at = i;
    CHECK(at >= 0);
    move(&s, 0, find(&s, 0, ACT_W, 0), at + 1);
    FAILS(check_messages(&s), ERR_INTERNAL, "is in a group with what is no message");
    schedule_free(&s);
}

/* ---- buffers and memory ---- */

TEST(buffers)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    nth(&s, 1, ACT_F, 1)->in = (int16_t)s.rank[1].buffers++;
    FAILS(check_messages(&s), ERR_INTERNAL, "reads a buffer that holds something else");
    schedule_free(&s);
    make(&s, "zb-v", 2, 4);
    Action *a = nth(&s, 0, ACT_F, 1);
    a->out = nth(&s, 0, ACT_F, 0)->out;
    const int send = find(&s, 0, ACT_SEND, 0);
    move(&s, 0, send, find(&s, 0, ACT_F, 1) + 1);
    FAILS(check_messages(&s), ERR_INTERNAL, "overwrites a buffer that is still needed");
    schedule_free(&s);
    make(&s, "gpipe", 2, 4);
    s.rank[1].buffers = 0;
    FAILS(check_messages(&s), ERR_INTERNAL, "has no buffer");
    schedule_free(&s);
}

TEST(cap)
{
    Schedule s;
    make(&s, "gpipe", 2, 4);
    s.cap = 3;
    FAILS(check_all(&s), ERR_CONFIG, "holds 4 units on rank 0, more than the cap of 3");
    schedule_free(&s);
    OK(schedule_make(&(ScheduleSpec){ "1f1b", 4, 8, .cap = 4 }, &s));
    schedule_free(&s);
}

TEST_MAIN
