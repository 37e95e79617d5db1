/* See groups.h. Ranks are numbers of mixed radix: one digit an axis. */
#include "comm/groups.h"

#include <stdbool.h>

/* TP is an axis of two digits: places inside a kv group, then kv groups. */
enum { KV = 1, KV_GROUPS = 2, TP = KV | KV_GROUPS, CP = 4, EP = 8, DP = 16, PP = 32, AXES = 5 };

/* One grid: its axes from the fastest, each a digit of the rank. */
typedef struct {
    int axis[AXES], size[AXES];
} Digits;

static const struct {
    const char *name;
    int axes;
    bool expert, ends_only; /* ends_only: of the ranks along pp the first and last, or the first */
} kinds[GROUP_KINDS] = {
    [GROUP_TP] = { "tp", TP, false, false },
    [GROUP_KV] = { "kv", KV, false, false },
    [GROUP_CP] = { "cp", CP, false, false },
    [GROUP_DP] = { "dp", DP, false, false },
    [GROUP_PP] = { "pp", PP, false, false },
    [GROUP_DP_CP] = { "dp-cp", DP | CP, false, false },
    [GROUP_TP_PP] = { "tp-pp", TP | PP, false, false },
    [GROUP_TP_CP] = { "tp-cp", TP | CP, false, false },
    [GROUP_TP_DP] = { "tp-dp", TP | DP, false, false },
    [GROUP_TP_DP_CP] = { "tp-dp-cp", TP | DP | CP, false, false },
    [GROUP_EMBD] = { "embd", PP, false, true },
    [GROUP_POS_EMBD] = { "pos-embd", PP, false, true },
    [GROUP_EP] = { "ep", EP, true, false },
    [GROUP_EXPERT_TP] = { "expert-tp", TP, true, false },
    [GROUP_EXPERT_DP] = { "expert-dp", DP, true, false },
    [GROUP_TP_EP] = { "tp-ep", TP | EP, true, false },
    [GROUP_TP_EP_PP] = { "tp-ep-pp", TP | EP | PP, true, false },
};

const char *group_name(GroupKind kind) { return kinds[kind].name; }

int grid_dp(GridShape s) { return s.world / (s.tp * s.cp * s.pp); }

int grid_edp(GridShape s) { return s.world / (s.etp * s.ep * s.pp); }

int grid_fits(GridShape s)
{
    if (s.world < 1 || (s.kv && s.tp % s.kv) || s.world % (s.tp * s.cp * s.pp) ||
        s.world % (s.etp * s.ep * s.pp))
        return false;
    return s.order == ORDER_DP_PP || s.pp == 1 || grid_dp(s) == grid_edp(s);
}

static Digits digits_of(GridShape s, bool expert)
{
    const int kv = s.kv ? s.kv : 1;
    Digits d = { .axis = { KV, KV_GROUPS, expert ? EP : CP, DP, PP },
                 .size = { kv, s.tp / kv, s.cp, grid_dp(s), s.pp } };
    if (expert) d.size[0] = 1, d.size[1] = s.etp, d.size[2] = s.ep, d.size[3] = grid_edp(s);
    if (s.order == ORDER_DP_PP) return d;
    int size = d.size[3];
    d.axis[3] = PP, d.size[3] = d.size[4];
    d.axis[4] = DP, d.size[4] = size;
    return d;
}

static int product(const Digits *d, int axes, bool inside)
{
    int n = 1;
    for (int i = 0; i < AXES; i++)
        if (!!(d->axis[i] & axes) == inside) n *= d->size[i];
    return n;
}

/* The rank whose digits of `axes` are those of `index`, and all others 0; or, not inside, the other way round. */
static int spread(const Digits *d, int axes, bool inside, int index)
{
    int rank = 0, stride = 1;
    for (int i = 0; i < AXES; i++) {
        if (!!(d->axis[i] & axes) == inside) {
            rank += index % d->size[i] * stride;
            index /= d->size[i];
        }
        stride *= d->size[i];
    }
    return rank;
}

/* The index that spread() would make these digits of the rank from. */
static int collect(const Digits *d, int axes, bool inside, int rank)
{
    int index = 0, stride = 1;
    for (int i = 0; i < AXES; i++) {
        if (!!(d->axis[i] & axes) == inside) {
            index += rank % d->size[i] * stride;
            stride *= d->size[i];
        }
        rank /= d->size[i];
    }
    return index;
}

int group_size(GridShape s, GroupKind kind)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    if (kinds[kind].ends_only) return kind == GROUP_EMBD && s.pp > 1 ? 2 : 1;
    return product(&d, kinds[kind].axes, true);
}

int group_count(GridShape s, GroupKind kind)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    return product(&d, kinds[kind].axes, false);
}

void group_members(GridShape s, GroupKind kind, int index, int *members)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = kinds[kind].axes, base = spread(&d, axes, false, index), size = group_size(s, kind);
    for (int i = 0; i < size; i++) {
        int digit = kinds[kind].ends_only && i ? s.pp - 1 : i;
        members[i] = base + spread(&d, axes, true, digit);
    }
}

int group_of(GridShape s, GroupKind kind, int rank)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = kinds[kind].axes, place = collect(&d, axes, true, rank);
    if (kinds[kind].ends_only && place && (kind == GROUP_POS_EMBD || place != s.pp - 1)) return -1;
    return collect(&d, axes, false, rank);
}
