/* See groups.h. Ranks are numbers of mixed radix: one digit an axis. */
#include "comm/groups.h"

/* TP is an axis of two digits: places inside a kv group, then kv groups. So is CP: ranks that exchange heads, then
 * rings of these. And EP: places on a host, then hosts. And DP: places in a group of ZeRO, then groups. */
enum { KV = 1, KV_GROUPS = 2, TP = KV | KV_GROUPS, CP_HEADS = 4, CP_RING = 8, CP = CP_HEADS | CP_RING };
enum { EP_PLACE = 16, EP_HOSTS = 32, EP = EP_PLACE | EP_HOSTS, DP_NEAR = 64, DP_FAR = 128, DP = DP_NEAR | DP_FAR };
enum { PP = 256, AXES = 7 };

/* One grid: its axes from the fastest, each a digit of the rank. */
typedef struct {
    int axis[AXES], size[AXES];
} Digits;

typedef enum { ALL, FIRST, ENDS, MIRROR, STAGE } Members;
enum { ALWAYS = 0, WITH_SP = 1, WITH_TWO_REPLICAS = 2, WITH_EXPERTS = 4, WITH_HEADS = 8, WITH_EP_HOSTS = 16 };
enum { WITH_ZERO_GROUP = 32, WITH_ONE_REPLICA = 64, WITH_OWNERS = 128 };
enum { DENSE, EXPERT };

static const struct {
    const char *name;
    int axes;
    bool expert;
    Members members;
    int used;
} kinds[GROUP_KINDS] = {
#define COMM(kind, field, name, axes, grid, members, used) [GROUP_##kind] = { name, axes, grid, members, used },
#define GROUP(kind, name, axes, grid, members, used) [GROUP_##kind] = { name, axes, grid, members, used },
#include "comm/groups.def"
};

const char *group_name(GroupKind kind) { return kinds[kind].name; }

bool group_of_copies(GroupKind kind) { return kinds[kind].axes & DP && !(kinds[kind].axes & TP); }

int grid_dp(GridShape s) { return s.world / (s.tp * s.cp * s.pp); }

int grid_edp(GridShape s) { return s.world / (s.etp * s.ep * s.pp); }

/* Ranks of a group of ZeRO along dp: of dense weights, and of the experts on the same ranks. */
static int near_dense(GridShape s) { return s.zero_group ? s.zero_group / s.cp : grid_dp(s); }

static int near_expert(GridShape s)
{
    const int ranks = s.zero_group * s.tp, experts = s.etp * s.ep;
    if (!s.zero_group) return grid_edp(s);
    return ranks > experts ? ranks / experts : 1;
}

static bool zero_fits(GridShape s)
{
    const int ranks = s.zero_group * s.tp, experts = s.etp * s.ep;
    if (!s.zero_group) return true;
    if (s.zero_group % s.cp || grid_dp(s) % near_dense(s)) return false;
    return (ranks % experts == 0 || experts % ranks == 0) && grid_edp(s) % near_expert(s) == 0;
}

bool grid_fits(GridShape s)
{
    if (s.two_replicas && s.pp % 2) return false;
    if (s.ep_hosts && s.ep % s.ep_hosts) return false;
    if (s.world < 1 || (s.kv && s.tp % s.kv) || (s.cp_heads && s.cp % s.cp_heads) || s.world % (s.tp * s.cp * s.pp) ||
        s.world % (s.etp * s.ep * s.pp))
        return false;
    if (!zero_fits(s)) return false;
    return s.order == ORDER_DP_PP || s.pp == 1 || grid_dp(s) == grid_edp(s);
}

static Digits digits_of(GridShape s, bool expert)
{
    const int kv = s.kv ? s.kv : 1, heads = s.cp_heads ? s.cp_heads : 1, hosts = s.ep_hosts ? s.ep_hosts : 1;
    const int near = expert ? near_expert(s) : near_dense(s);
    const int far = (expert ? grid_edp(s) : grid_dp(s)) / near;
    Digits d = { .axis = { KV, KV_GROUPS, CP_HEADS, CP_RING }, .size = { kv, s.tp / kv, heads, s.cp / heads } };
    if (expert)
        d = (Digits){ .axis = { KV, KV_GROUPS, EP_PLACE, EP_HOSTS }, .size = { 1, s.etp, s.ep / hosts, hosts } };
    const bool pp_last = s.order == ORDER_DP_PP;
    d.axis[pp_last ? 6 : 4] = PP, d.size[pp_last ? 6 : 4] = s.pp;
    d.axis[pp_last ? 4 : 5] = DP_NEAR, d.size[pp_last ? 4 : 5] = near;
    d.axis[pp_last ? 5 : 6] = DP_FAR, d.size[pp_last ? 5 : 6] = far;
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

/* The axes of a kind in this shape. */
static int axes_of(GridShape s, GroupKind kind)
{
    const int has = (s.sp ? WITH_SP : 0) | (s.two_replicas ? WITH_TWO_REPLICAS : 0) | (s.experts ? WITH_EXPERTS : 0) |
                    (s.cp_heads > 1 ? WITH_HEADS : 0) | (s.ep_hosts > 1 ? WITH_EP_HOSTS : 0) |
                    (s.zero_group ? WITH_ZERO_GROUP : 0) | (s.two_replicas ? 0 : WITH_ONE_REPLICA) |
                    (s.owners ? WITH_OWNERS : 0);
    const bool pairs = kinds[kind].members == MIRROR && s.zero_group; /* of what groups of ZeRO have summed */
    if (kinds[kind].used & ~has) return 0;
    if (pairs) return kinds[kind].axes & ~(DP_NEAR | CP);
    return kinds[kind].members == STAGE && !s.two_replicas ? kinds[kind].axes & ~PP : kinds[kind].axes;
}

static Members members_of(GridShape s, GroupKind kind)
{
    if (kinds[kind].members != STAGE) return kinds[kind].members;
    return s.two_replicas ? MIRROR : ALL;
}

/* The i-th of the ENDS, or behind them 0. */
static int end_at(GridShape s, int i)
{
    if (i == 0 || i > 2) return 0;
    return i == 1 && !s.embd[0] ? s.pp - 1 : s.embd[i - 1];
}

static bool is_end(GridShape s, int pp_rank) { return !pp_rank || pp_rank == end_at(s, 1) || pp_rank == end_at(s, 2); }

/* Ranks along pp of one group. */
static int size_along_pp(GridShape s, GroupKind kind)
{
    if (kinds[kind].members == FIRST || s.pp == 1) return 1;
    if (kinds[kind].members == ENDS) return 2 + (end_at(s, 2) > 0);
    return members_of(s, kind) == ALL ? s.pp : 2;
}

int group_size(GridShape s, GroupKind kind)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), size = product(&d, axes, true);
    return axes & PP ? size / s.pp * size_along_pp(s, kind) : size;
}

int group_count(GridShape s, GroupKind kind)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), count = product(&d, axes, false);
    return axes && members_of(s, kind) == MIRROR ? count * s.pp / 2 : count;
}

/* In a mirrored kind pp ranks r and pp-1-r form a group, the r-th of those whose other axes are the same. */
static int mirror_pp_rank(GridShape s, int low, bool high) { return high ? s.pp - 1 - low : low; }

/* Ranks that differ in those of `axes` that vary faster than pp. */
static int before_pp(const Digits *d, int axes)
{
    int n = 1;
    for (int i = 0; i < AXES && d->axis[i] != PP; i++)
        if (d->axis[i] & axes) n *= d->size[i];
    return n;
}

/* The digits of `axes` of the i-th member of a group, as an index for spread(). */
static int member_index(GridShape s, GroupKind kind, int low, int i)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), fast = before_pp(&d, axes);
    if (!axes) return 0;
    switch (members_of(s, kind)) {
    case STAGE:
    case ALL: return i;
    case FIRST: return 0;
    case ENDS: return end_at(s, i);
    case MIRROR: break;
    }
    return i % fast + fast * (mirror_pp_rank(s, low, i / fast % 2) + s.pp * (i / fast / 2));
}

void group_members(GridShape s, GroupKind kind, int index, int *members)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), others = product(&d, axes, false), size = group_size(s, kind);
    const int base = spread(&d, axes, false, index % others);
    for (int i = 0; i < size; i++) members[i] = base + spread(&d, axes, true, member_index(s, kind, index / others, i));
}

GroupMessages group_messages(GridShape s, GroupKind kind, bool sums_by_message)
{
    switch (kind) {
    case GROUP_TP: return sums_by_message && !s.sp ? MESSAGES_ALL_PAIRS : MESSAGES_NONE; /* else in sp */
    case GROUP_SP:
    case GROUP_KV: return sums_by_message ? MESSAGES_ALL_PAIRS : MESSAGES_NONE;
    case GROUP_CP:
    case GROUP_CP_HEADS:
    case GROUP_CP_RING:
    case GROUP_TP_EP:
    case GROUP_EP_HOST:
    case GROUP_OWNERS:
    case GROUP_EP_RAIL: return MESSAGES_ALL_PAIRS;
    case GROUP_PP: return MESSAGES_NEIGHBOURS;
    default: return MESSAGES_NONE;
    }
}

int group_of(GridShape s, GroupKind kind, int rank)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), others = product(&d, axes, false);
    const int index = collect(&d, axes, false, rank), pp_rank = collect(&d, PP, true, rank);
    switch (axes ? members_of(s, kind) : ALL) {
    case STAGE:
    case ALL: break;
    case FIRST: return pp_rank ? -1 : index;
    case ENDS: return is_end(s, pp_rank) ? index : -1;
    case MIRROR: return index + others * (pp_rank < s.pp / 2 ? pp_rank : s.pp - 1 - pp_rank);
    }
    return index;
}

int group_rank(GridShape s, GroupKind kind, int rank)
{
    const Digits d = digits_of(s, kinds[kind].expert);
    const int axes = axes_of(s, kind), index = group_of(s, kind, rank), place = collect(&d, axes, true, rank);
    if (index < 0) return -1;
    if (members_of(s, kind) == ALL) return place;
    for (int i = 0; i < group_size(s, kind); i++)
        if (member_index(s, kind, index / product(&d, axes, false), i) == place) return i;
    return -1;
}
