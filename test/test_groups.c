/*
 * Groups of the process grid: against worked examples written out by hand, and for hundreds of shapes against what
 * must hold whatever the shape is: groups of a kind part the ranks, and two ranks share a group exactly when they
 * differ in its axes alone (a definition that works on coordinates counted one by one).
 */
#include "comm/grid.h"

#include "test.h"

/* "(01)(23)" of a kind; ranks above 9 are parted by commas in both. */
static const char *text_of(GridShape s, GroupKind kind)
{
    static char text[4096];
    int n = 0, members[64];
    for (int g = 0; g < group_count(s, kind); g++) {
        group_members(s, kind, g, members);
        n += sprintf(text + n, "(");
        for (int i = 0; i < group_size(s, kind); i++)
            n += sprintf(text + n, s.world > 10 && i ? ",%d" : "%d", members[i]);
        n += sprintf(text + n, ")");
    }
    return text;
}

static void expect(GridShape s, GroupKind kind, const char *want)
{
    CHECK(grid_fits(s));
    CHECK_MSG(!strcmp(text_of(s, kind), want), "%s: %s, want %s", group_name(kind), text_of(s, kind), want);
}

TEST(worked_examples)
{
    GridShape a = { .world = 8, .tp = 2, .cp = 1, .pp = 2, .ep = 1, .etp = 2 };
    expect(a, GROUP_TP, "(01)(23)(45)(67)");
    expect(a, GROUP_DP, "(02)(13)(46)(57)");
    expect(a, GROUP_PP, "(04)(15)(26)(37)");
    expect(a, GROUP_TP_PP, "(0145)(2367)");
    expect(a, GROUP_TP_DP, "(0123)(4567)");
    a.order = ORDER_PP_DP;
    expect(a, GROUP_TP, "(01)(23)(45)(67)");
    expect(a, GROUP_PP, "(02)(13)(46)(57)");
    expect(a, GROUP_DP, "(04)(15)(26)(37)");
    expect(a, GROUP_TP_PP, "(0123)(4567)");
    expect(a, GROUP_TP_DP, "(0145)(2367)");
    expect(a, GROUP_KV, "(0)(1)(2)(3)(4)(5)(6)(7)");
    expect(a, GROUP_OWNERS, "(0)(1)(2)(3)(4)(5)(6)(7)");
    a.owners = true;
    expect(a, GROUP_OWNERS, "(0145)(2367)");
    a.two_replicas = true;
    expect(a, GROUP_OWNERS, "(01234567)");
    GridShape o = { .world = 8, .tp = 1, .cp = 1, .pp = 4, .ep = 1, .etp = 1, .two_replicas = true, .owners = true };
    expect(o, GROUP_OWNERS, "(0167)(2345)");
    GridShape k = { .world = 16, .tp = 8, .cp = 1, .pp = 1, .ep = 1, .etp = 4, .kv = 2 };
    expect(k, GROUP_KV, "(0,1)(2,3)(4,5)(6,7)(8,9)(10,11)(12,13)(14,15)");
    expect(k, GROUP_TP, "(0,1,2,3,4,5,6,7)(8,9,10,11,12,13,14,15)");
    expect(k, GROUP_DP, "(0,8)(1,9)(2,10)(3,11)(4,12)(5,13)(6,14)(7,15)");
    expect(k, GROUP_EXPERT_TP, "(0,1,2,3)(4,5,6,7)(8,9,10,11)(12,13,14,15)");
    k.kv = 4;
    expect(k, GROUP_KV, "(0,1,2,3)(4,5,6,7)(8,9,10,11)(12,13,14,15)");
    GridShape b = { .world = 8, .tp = 2, .cp = 2, .pp = 1, .ep = 4, .etp = 1, .experts = true };
    expect(b, GROUP_CP, "(02)(13)(46)(57)");
    expect(b, GROUP_DP, "(04)(15)(26)(37)");
    expect(b, GROUP_DP_CP, "(0246)(1357)");
    expect(b, GROUP_TP_CP, "(0123)(4567)");
    expect(b, GROUP_EP, "(0123)(4567)");
    expect(b, GROUP_EXPERT_DP, "(04)(15)(26)(37)");
    expect(b, GROUP_EXPERT_TP, "(0)(1)(2)(3)(4)(5)(6)(7)");
    GridShape c = { .world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 4, .etp = 1, .experts = true };
    expect(c, GROUP_CP, "(0,2)(1,3)(4,6)(5,7)(8,10)(9,11)(12,14)(13,15)");
    expect(c, GROUP_DP, "(0,4)(1,5)(2,6)(3,7)(8,12)(9,13)(10,14)(11,15)");
    expect(c, GROUP_DP_CP, "(0,2,4,6)(1,3,5,7)(8,10,12,14)(9,11,13,15)");
    expect(c, GROUP_TP_PP, "(0,1,8,9)(2,3,10,11)(4,5,12,13)(6,7,14,15)");
    expect(c, GROUP_EP, "(0,1,2,3)(4,5,6,7)(8,9,10,11)(12,13,14,15)");
    expect(c, GROUP_TP_EP_PP, "(0,1,2,3,8,9,10,11)(4,5,6,7,12,13,14,15)");
    GridShape d = { .world = 16, .tp = 2, .cp = 1, .pp = 4, .ep = 1, .etp = 2 };
    expect(d, GROUP_PP, "(0,4,8,12)(1,5,9,13)(2,6,10,14)(3,7,11,15)");
    expect(d, GROUP_EMBD, "(0,12)(1,13)(2,14)(3,15)");
    expect(d, GROUP_POS_EMBD, "(0)(1)(2)(3)");
    d.embd[0] = 2; /* further readers of the table: on pp rank 2, and then on the last as well */
    expect(d, GROUP_EMBD, "(0,8)(1,9)(2,10)(3,11)");
    d.embd[1] = 3;
    expect(d, GROUP_EMBD, "(0,8,12)(1,9,13)(2,10,14)(3,11,15)");
    d.order = ORDER_PP_DP;
    expect(d, GROUP_EMBD, "(0,4,6)(1,5,7)(8,12,14)(9,13,15)");
}

TEST(groups_of_zero)
{
    GridShape a = { .world = 16, .tp = 2, .cp = 1, .pp = 2, .ep = 2, .etp = 1, .experts = true, .zero_group = 2 };
    expect(a, GROUP_ZERO, "(0,2)(1,3)(4,6)(5,7)(8,10)(9,11)(12,14)(13,15)");
    expect(a, GROUP_ZERO_FAR, "(0,4)(1,5)(2,6)(3,7)(8,12)(9,13)(10,14)(11,15)");
    expect(a, GROUP_DP, "(0,2,4,6)(1,3,5,7)(8,10,12,14)(9,11,13,15)");
    expect(a, GROUP_EXPERT_ZERO, "(0,2)(1,3)(4,6)(5,7)(8,10)(9,11)(12,14)(13,15)");
    expect(a, GROUP_EXPERT_ZERO_FAR, "(0,4)(1,5)(2,6)(3,7)(8,12)(9,13)(10,14)(11,15)");
    a.ep = 8; /* larger than a group: each of its ranks has experts of its own */
    expect(a, GROUP_EXPERT_ZERO, "(0)(1)(2)(3)(4)(5)(6)(7)(8)(9)(10)(11)(12)(13)(14)(15)");
    expect(a, GROUP_EXPERT_ZERO_FAR, "(0)(1)(2)(3)(4)(5)(6)(7)(8)(9)(10)(11)(12)(13)(14)(15)");
    a.ep = 2, a.order = ORDER_PP_DP;
    expect(a, GROUP_ZERO, "(0,4)(1,5)(2,6)(3,7)(8,12)(9,13)(10,14)(11,15)");
    expect(a, GROUP_ZERO_FAR, "(0,8)(1,9)(2,10)(3,11)(4,12)(5,13)(6,14)(7,15)");
    GridShape b = { .world = 8, .tp = 1, .cp = 2, .pp = 1, .ep = 2, .etp = 1, .zero_group = 4 };
    expect(b, GROUP_ZERO, "(0123)(4567)");
    expect(b, GROUP_ZERO_FAR, "(04)(15)(26)(37)");
    b.zero_group = 3;
    CHECK(!grid_fits(b));
    b.zero_group = 1;
    CHECK(!grid_fits(b));
}

/* Coordinates {tp, cp or ep, dp, pp} of a rank, by counting up to it. */
static void coordinates(GridShape s, int expert, int rank, int at[4])
{
    int size[4] = { expert ? s.etp : s.tp, expert ? s.ep : s.cp, expert ? grid_edp(s) : grid_dp(s), s.pp };
    const int order[2][4] = { { 0, 1, 2, 3 }, { 0, 1, 3, 2 } };
    memset(at, 0, 4 * sizeof *at);
    for (int r = 0; r < rank; r++)
        for (int i = 0; i < 4; i++) {
            int axis = order[s.order][i];
            if (++at[axis] < size[axis]) break;
            at[axis] = 0;
        }
}

TEST(groups_part_the_ranks_by_their_coordinates)
{
    static const struct {
        GroupKind kind;
        int expert, free[4]; /* axes in which the members differ */
    } rules[] = { { GROUP_TP, 0, { 1, 0, 0, 0 } },       { GROUP_CP, 0, { 0, 1, 0, 0 } },
                  { GROUP_DP, 0, { 0, 0, 1, 0 } },       { GROUP_PP, 0, { 0, 0, 0, 1 } },
                  { GROUP_DP_CP, 0, { 0, 1, 1, 0 } },    { GROUP_TP_PP, 0, { 1, 0, 0, 1 } },
                  { GROUP_TP_CP, 0, { 1, 1, 0, 0 } },    { GROUP_TP_DP, 0, { 1, 0, 1, 0 } },
                  { GROUP_TP_DP_CP, 0, { 1, 1, 1, 0 } }, { GROUP_EP, 1, { 0, 1, 0, 0 } },
                  { GROUP_EXPERT_TP, 1, { 1, 0, 0, 0 } }, { GROUP_EXPERT_DP, 1, { 0, 0, 1, 0 } },
                  { GROUP_TP_EP, 1, { 1, 1, 0, 0 } },    { GROUP_TP_EP_PP, 1, { 1, 1, 0, 1 } } };
    int shapes = 0, wrong = 0;
    for (int n = 0; n < 4000; n++) {
        GridShape s = { .world = 1 + (int)(test_uniform(&(uint64_t){ (uint64_t)n * 7 + 1 }, 0, 48)),
                        .tp = 1 + n % 4, .cp = 1 + n / 4 % 3, .pp = 1 + n / 12 % 4, .ep = 1 + n / 48 % 4,
                        .etp = 1 + n / 192 % 3, .order = n % 2 ? ORDER_PP_DP : ORDER_DP_PP,
                        .kv = n % 5, .experts = true };
        if (!grid_fits(s)) continue;
        shapes++;
        for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
            const GroupKind kind = rules[k].kind;
            int seen[64] = { 0 }, members[64], a[4], b[4];
            wrong += group_size(s, kind) * group_count(s, kind) != s.world;
            for (int g = 0; g < group_count(s, kind); g++) {
                group_members(s, kind, g, members);
                for (int i = 0; i < group_size(s, kind); i++) {
                    seen[members[i]]++;
                    wrong += group_of(s, kind, members[i]) != g || (i && members[i] <= members[i - 1]);
                    coordinates(s, rules[k].expert, members[0], a);
                    coordinates(s, rules[k].expert, members[i], b);
                    for (int x = 0; x < 4; x++) wrong += a[x] != b[x] && !rules[k].free[x];
                }
            }
            for (int r = 0; r < s.world; r++) wrong += seen[r] != 1;
        }
    }
    CHECK_MSG(shapes > 100, "%d shapes", shapes);
    CHECK_MSG(wrong == 0, "%d wrong in %d shapes", wrong, shapes);
}

/* Written out by hand: with two replicas pp ranks r and pp-1-r share their stages. */
TEST(groups_of_one_stage)
{
    GridShape s = { .world = 8, .tp = 1, .cp = 1, .pp = 4, .ep = 1, .etp = 1 };
    for (int order = 0; order < 2; order++) { /* a group of one each without two replicas, and without sp */
        s.order = order ? ORDER_PP_DP : ORDER_DP_PP;
        expect(s, GROUP_STAGE_LOW, "(0)(1)(2)(3)(4)(5)(6)(7)");
        expect(s, GROUP_SP, "(0)(1)(2)(3)(4)(5)(6)(7)");
        expect(s, GROUP_WORLD, "(01234567)");
        expect(s, GROUP_HOST, "(01234567)");
    }
    s.two_replicas = true;
    s.order = ORDER_DP_PP; /* ranks of pp rank r: 2r, 2r + 1 */
    expect(s, GROUP_STAGE_LOW, "(0167)(2345)");
    expect(s, GROUP_STAGE_HIGH, "(0167)(2345)");
    expect(s, GROUP_EMBD, "(06)(17)");
    s.order = ORDER_PP_DP; /* r and r + 4 */
    expect(s, GROUP_STAGE_LOW, "(0347)(1256)");
    expect(s, GROUP_EMBD, "(03)(47)");
    s = (GridShape){ .world = 8, .tp = 2, .cp = 1, .pp = 2, .ep = 1, .etp = 2, .sp = true, .two_replicas = true };
    expect(s, GROUP_STAGE_HIGH, "(0246)(1357)");
    expect(s, GROUP_SP, "(01)(23)(45)(67)");
    s.pp = 4;
    expect(s, GROUP_STAGE_LOW, "(06)(17)(24)(35)");
    s.pp = 1;
    CHECK(!grid_fits(s));
    s = (GridShape){ .world = 16, .tp = 1, .cp = 2, .pp = 4, .ep = 2, .etp = 1, .two_replicas = true };
    expect(s, GROUP_STAGE_LOW, "(0,1,2,3,12,13,14,15)(4,5,6,7,8,9,10,11)"); /* ranks of pp rank r: 4r to 4r + 3 */
    expect(s, GROUP_DP_CP, "(0,1,2,3)(4,5,6,7)(8,9,10,11)(12,13,14,15)");
    s.order = ORDER_PP_DP; /* 2r, 2r + 1, and 8 more */
    expect(s, GROUP_STAGE_HIGH, "(0,1,6,7,8,9,14,15)(2,3,4,5,10,11,12,13)");
    expect(s, GROUP_DP_CP, "(0,1,8,9)(2,3,10,11)(4,5,12,13)(6,7,14,15)");
    s.zero_group = 2; /* those with the same place in their groups of ZeRO, in four of them */
    expect(s, GROUP_ZERO, "(0,1)(2,3)(4,5)(6,7)(8,9)(10,11)(12,13)(14,15)");
    expect(s, GROUP_STAGE_LOW, "(0,6,8,14)(1,7,9,15)(2,4,10,12)(3,5,11,13)");
    s.zero_group = 4; /* a group has all copies of a replica */
    expect(s, GROUP_STAGE_HIGH, "(0,6)(1,7)(8,14)(9,15)(2,4)(3,5)(10,12)(11,13)");
    s.order = ORDER_DP_PP;
    expect(s, GROUP_ZERO, "(0,1,2,3)(4,5,6,7)(8,9,10,11)(12,13,14,15)");
    expect(s, GROUP_STAGE_LOW, "(0,12)(1,13)(2,14)(3,15)(4,8)(5,9)(6,10)(7,11)");
    expect(s, GROUP_ZERO_FAR, "(0)(1)(2)(3)(4)(5)(6)(7)(8)(9)(10)(11)(12)(13)(14)(15)");
}

/* For many shapes, of every kind: place and index lead back to the rank, and who is in no group is in no list. */
TEST(ranks_find_themselves_in_their_groups)
{
    int shapes = 0, outside = 0;
    for (int n = 0; n < 2000; n++) {
        GridShape s = { .tp = 1 + n % 3, .cp = 1 + n / 3 % 2, .pp = 1 + n / 6 % 6, .ep = 1, .etp = 1 + n % 3,
                        .order = n / 36 % 2 ? ORDER_PP_DP : ORDER_DP_PP, .sp = n / 72 % 2,
                        .two_replicas = n / 144 % 2, .experts = n % 7 > 2 };
        if (n % 5 == 1) s.zero_group = s.cp * (1 + n / 7 % 2);
        if (s.pp > 2) s.embd[0] = n % 5 % 2, s.embd[1] = n % 5 == 3 ? s.pp - 1 : 0;
        s.world = s.tp * s.cp * s.pp * (1 + n / 288 % 3);
        s.ep = s.cp;
        if (!grid_fits(s)) continue;
        shapes++;
        for (GroupKind kind = 0; kind < GROUP_KINDS; kind++) {
            int members[128], seen = 0;
            for (int g = 0; g < group_count(s, kind); g++) {
                group_members(s, kind, g, members);
                for (int i = 0; i < group_size(s, kind); i++, seen++)
                    CHECK(group_of(s, kind, members[i]) == g && group_rank(s, kind, members[i]) == i &&
                          (!i || members[i] > members[i - 1]));
            }
            for (int rank = 0; rank < s.world; rank++) {
                const bool none = group_of(s, kind, rank) < 0;
                CHECK(none == (group_rank(s, kind, rank) < 0));
                outside += none;
                seen += none;
            }
            CHECK(seen == s.world);
        }
    }
    CHECK_MSG(shapes > 500 && outside > 500, "%d shapes, %d ranks in no group", shapes, outside);
}

TEST(worlds_that_do_not_fit)
{
    CHECK(!grid_fits((GridShape){ .world = 6, .tp = 1, .cp = 1, .pp = 3, .ep = 1, .etp = 1, .two_replicas = true }));
    CHECK(!grid_fits((GridShape){ .world = 6, .tp = 4, .cp = 1, .pp = 1, .ep = 1, .etp = 1 }));
    CHECK(!grid_fits((GridShape){ .world = 8, .tp = 1, .cp = 1, .pp = 1, .ep = 3, .etp = 1 }));
    CHECK(grid_fits((GridShape){ .world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 4, .etp = 1, .order = ORDER_PP_DP }));
    CHECK(!grid_fits((GridShape){ .world = 16, .tp = 2, .cp = 1, .pp = 2, .ep = 4, .etp = 2, .order = ORDER_PP_DP }));
    CHECK(!grid_fits((GridShape){ .world = 0, .tp = 1, .cp = 1, .pp = 1, .ep = 1, .etp = 1 }));
}

typedef struct {
    Comm *comm[WORLD_COMMS];
    int opened, most;
} Opening;

/* The last one finds no memory. */
static Err open_some(void *user, Comm *c, GroupKind kind, const int *members, int size)
{
    Opening *o = user;
    CHECK(size == 0 || members[0] >= 0);
    if (o->opened == o->most) return err_set(ERR_MEMORY, "no memory for group %d", o->opened);
    comm_open_self(c, group_name(kind));
    o->comm[o->opened++] = c;
    return ERR_OK;
}

TEST(groups_that_were_opened_are_closed_when_another_is_not)
{
    static World w;
    const Grid g = { .tp = 2, .dp = 2, .pp = 2 };
    Opening o = { .most = 1000 };
    OK(world_open(&w, g, 3, (CommOpener){ &o, open_some }));
    const int groups = o.opened;
    CHECK(groups > 3);
    world_close(&w);
    for (int most = 0; most < groups; most++) {
        o = (Opening){ .most = most };
        FAILS(world_open(&w, g, 3, (CommOpener){ &o, open_some }), ERR_MEMORY, "no memory for group");
        CHECK(o.opened == most);
        for (int kind = 0; kind < WORLD_COMMS; kind++) CHECK(!w.comm[kind].table);
    }
}

TEST_MAIN

static int64_t letter(const void *hosts, int rank) { return ((const char *)hosts)[rank]; }

/* Hosts that the groups of ep x etp ranks are spread over, from a letter a rank; 0: not evenly. */
TEST(hosts_of_experts)
{
    static const struct {
        int ep, etp, want;
        const char *hosts;
    } cases[] = {
        { 4, 1, 1, "aaaaaaaa" }, { 4, 1, 2, "aabbccdd" }, { 8, 1, 2, "aaaabbbb" }, { 8, 1, 8, "abcdefgh" },
        { 4, 2, 2, "aaaabbbb" }, { 4, 2, 4, "aabbccdd" }, { 2, 4, 0, "aabbccdd" }, { 1, 8, 0, "aaaabbbb" },
        { 4, 1, 0, "aaabbbbb" }, { 4, 1, 0, "aaaabbcc" }, { 4, 1, 0, "aabbcccc" }, { 2, 1, 1, "aabbbbbb" },
        { 8, 1, 0, "aaabbbcc" }, { 4, 1, 0, "abbacddc" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Grid g = { .tp = 1, .dp = 8, .ep = cases[i].ep, .etp = cases[i].etp };
        const int got = grid_ep_hosts(g, letter, cases[i].hosts);
        CHECK_MSG(got == cases[i].want, "ep %d etp %d on %s: %d", g.ep, g.etp, cases[i].hosts, got);
    }
}
