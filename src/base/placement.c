/* See placement.h. */
#include "base/placement.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is given whole ---- */

/* From what is far apart to what is near. */
static const hwloc_obj_type_t levels[] = { HWLOC_OBJ_PACKAGE, HWLOC_OBJ_NUMANODE, HWLOC_OBJ_L3CACHE };
enum { LEVELS = sizeof levels / sizeof *levels };

/* A core, or one of its processors. */
typedef struct {
    hwloc_bitmap_t set;
    int home[LEVELS]; /* the object of that type which it is in */
    int ranks;        /* of the first of a group: how many have the group */
} Unit;

/* The number of the smallest object that has all of `set`; -1: there is none. Nodes may lie in one another (memory of
 * several kinds), or have no processors. */
static int home_of(hwloc_topology_t t, hwloc_obj_type_t type, hwloc_const_bitmap_t set)
{
    int home = -1, least = INT_MAX;
    const int count = hwloc_get_nbobjs_by_type(t, type);
    for (int i = 0; i < count; i++) {
        const hwloc_obj_t o = hwloc_get_obj_by_type(t, type, (unsigned)i);
        const int weight = hwloc_bitmap_weight(o->cpuset);
        if (weight >= least || !hwloc_bitmap_isincluded(set, o->cpuset)) continue;
        home = i;
        least = weight;
    }
    return home;
}

static void units_free(Unit *units, int count)
{
    for (int i = 0; i < count; i++) hwloc_bitmap_free(units[i].set);
    free(units);
}

/* The usable part of each object of this type, in hwloc's order. NULL: no memory. */
static Unit *units_of(hwloc_topology_t t, hwloc_obj_type_t type, hwloc_const_bitmap_t allowed, int *count)
{
    const int all = hwloc_get_nbobjs_by_type(t, type);
    Unit *units = calloc((size_t)(all > 0 ? all : 1), sizeof *units);
    *count = 0;
    for (int i = 0; i < all && units; i++) {
        const hwloc_obj_t o = hwloc_get_obj_by_type(t, type, (unsigned)i);
        if (!hwloc_bitmap_intersects(o->cpuset, allowed)) continue;
        Unit *u = &units[(*count)++];
        for (int l = 0; l < LEVELS; l++) u->home[l] = home_of(t, levels[l], o->cpuset);
        u->set = hwloc_bitmap_alloc();
        if (u->set && !hwloc_bitmap_and(u->set, o->cpuset, allowed)) continue;
        units_free(units, *count);
        return NULL;
    }
    return units;
}

/* ---- dividing ---- */

static void divide_in_line(const Unit *u, int n, int ranks, hwloc_bitmap_t *sets)
{
    for (int i = 0; i < ranks; i++)
        for (int j = (int)((int64_t)i * n / ranks); j < (int)((int64_t)(i + 1) * n / ranks); j++)
            hwloc_bitmap_or(sets[i], sets[i], u[j].set);
}

/* Units of one home come to lie together, otherwise in the order that they have. */
static void sort_by_home(Unit *u, int n, int level)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && u[j - 1].home[level] > u[j].home[level]; j--) {
            const Unit moved = u[j];
            u[j] = u[j - 1];
            u[j - 1] = moved;
        }
}

static int group_size(const Unit *u, int n, int level)
{
    int size = 1;
    while (size < n && u[size].home[level] == u->home[level]) size++;
    return size;
}

/* Ranks are given to the groups one by one, the next where it finds most (and fewest others): so the least that one has
 * is as much as it can be. False: one has less than `least` all the same. */
static bool give_to_groups(Unit *u, int n, int level, int ranks, int least)
{
    for (int i = 0; i < n; i++) u[i].ranks = 0;
    for (int r = 0; r < ranks; r++) {
        int best = 0;
        for (int i = 0, size; i < n; i += size) {
            size = group_size(u + i, n - i, level);
            const int most = group_size(u + best, n - best, level);
            const int64_t here = (int64_t)size * (u[best].ranks + 1), there = (int64_t)most * (u[i].ranks + 1);
            if (here > there || (here == there && u[i].ranks < u[best].ranks)) best = i;
        }
        if (group_size(u + best, n - best, level) / ++u[best].ranks < least) return false;
    }
    return true;
}

/* Into the groups of this level and those below, where each rank then has `least` units; else over their borders. */
static void divide(Unit *u, int n, int level, int ranks, int least, hwloc_bitmap_t *sets)
{
    if (level == LEVELS) return divide_in_line(u, n, ranks, sets);
    sort_by_home(u, n, level);
    if (!give_to_groups(u, n, level, ranks, least)) return divide(u, n, level + 1, ranks, least, sets);
    for (int i = 0, size; i < n; i += size) {
        const int given = u[i].ranks;
        size = group_size(u + i, n - i, level);
        if (given) divide(u + i, size, level + 1, given, least, sets);
        sets += given;
    }
}

static void widen_one(hwloc_topology_t t, hwloc_const_bitmap_t allowed, hwloc_bitmap_t set)
{
    const int nodes = hwloc_get_nbobjs_by_type(t, HWLOC_OBJ_NUMANODE);
    hwloc_bitmap_t own = hwloc_bitmap_dup(set), one = hwloc_bitmap_alloc();
    unsigned cpu;
    if (own && one) {
        hwloc_bitmap_foreach_begin(cpu, own)
        {
            hwloc_bitmap_only(one, cpu);
            const int home = home_of(t, HWLOC_OBJ_NUMANODE, one);
            if (home >= 0 && home < nodes)
                hwloc_bitmap_or(set, set, hwloc_get_obj_by_type(t, HWLOC_OBJ_NUMANODE, (unsigned)home)->cpuset);
        }
        hwloc_bitmap_foreach_end();
    }
    hwloc_bitmap_and(set, set, allowed);
    hwloc_bitmap_free(own);
    hwloc_bitmap_free(one);
}

/* From cores to what `unit` is. */
static void widen(hwloc_topology_t t, hwloc_const_bitmap_t allowed, PlacementUnit unit, int ranks, hwloc_bitmap_t *sets)
{
    for (int i = 0; i < ranks && unit == PLACEMENT_NODE; i++) widen_one(t, allowed, sets[i]);
}

bool placement_of(hwloc_topology_t t, hwloc_const_bitmap_t allowed, PlacementUnit unit, int ranks, hwloc_bitmap_t *sets)
{
    int count = 0;
    Unit *units = units_of(t, HWLOC_OBJ_CORE, allowed, &count);
    if (units && count < ranks) {
        units_free(units, count);
        units = units_of(t, HWLOC_OBJ_PU, allowed, &count);
    }
    const bool fits = units && count >= ranks;
    if (fits) divide(units, count, 0, ranks, count / ranks, sets);
    if (units) units_free(units, count);
    if (fits) widen(t, allowed, unit, ranks, sets);
    return fits;
}

/* ---- this machine ---- */

/* The topology, with devices only where they are wanted, and in `allowed` what this process may use of it. */
static bool topology_open(hwloc_topology_t *t, hwloc_bitmap_t allowed, bool devices)
{
    if (hwloc_topology_init(t)) return false;
    if (devices) hwloc_topology_set_io_types_filter(*t, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (!hwloc_topology_load(*t)) {
        hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(*t));
        hwloc_bitmap_t bound = hwloc_bitmap_alloc();
        if (bound && hwloc_topology_is_thissystem(*t) && !hwloc_get_cpubind(*t, bound, HWLOC_CPUBIND_THREAD))
            hwloc_bitmap_and(allowed, allowed, bound);
        hwloc_bitmap_free(bound);
        if (!hwloc_bitmap_iszero(allowed)) return true;
    }
    hwloc_topology_destroy(*t);
    return false;
}

static int count_in(hwloc_topology_t t, hwloc_obj_type_t type, hwloc_const_bitmap_t allowed)
{
    int count = 0;
    for (int i = 0; i < hwloc_get_nbobjs_by_type(t, type); i++)
        count += hwloc_bitmap_intersects(hwloc_get_obj_by_type(t, type, (unsigned)i)->cpuset, allowed);
    return count;
}

bool machine_look(Machine *m)
{
    hwloc_topology_t t;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
    const bool known = allowed && topology_open(&t, allowed, false);
    *m = (Machine){ 0 };
    if (known) {
        m->nodes = count_in(t, HWLOC_OBJ_NUMANODE, allowed);
        m->cores = count_in(t, HWLOC_OBJ_CORE, allowed);
        m->processors = hwloc_bitmap_weight(allowed);
        m->elsewhere = !hwloc_topology_is_thissystem(t);
        hwloc_topology_destroy(t);
    }
    hwloc_bitmap_free(allowed);
    return known;
}

static void list_sets(hwloc_bitmap_t *sets, int count, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < count && used < size; i++) {
        if (i) used += (size_t)snprintf(text + used, size - used, " ");
        if (used < size) used += (size_t)hwloc_bitmap_list_snprintf(text + used, size - used, sets[i]);
    }
    if (used >= size) snprintf(text + size - 4, 4, "...");
}

static int bind_in(hwloc_topology_t t, hwloc_const_bitmap_t allowed, PlacementChoice c, hwloc_bitmap_t *sets,
                   char *text, size_t size)
{
    const int ranks = c.ranks;
    int least = INT_MAX;
    for (int i = 0; i < ranks; i++)
        if (!(sets[i] = hwloc_bitmap_alloc())) return snprintf(text, size, "no memory"), 0;
    if (!hwloc_topology_is_thissystem(t)) return snprintf(text, size, "hwloc was given another machine's topology"), 0;
    if (!placement_of(t, allowed, PLACEMENT_CORE, ranks, sets))
        return snprintf(text, size, "%d ranks on %d processors", ranks, hwloc_bitmap_weight(allowed)), 0;
    for (int i = 0; i < ranks; i++) {
        const int has = hwloc_bitmap_weight(sets[i]);
        if (has < least) least = has;
    }
    if (c.threads > least)
        return snprintf(text, size, "%d threads, and a rank would have %d processors", c.threads, least), 0;
    const int own = hwloc_bitmap_weight(sets[c.rank]);
    widen(t, allowed, c.unit, ranks, sets);
    if (hwloc_set_cpubind(t, sets[c.rank], HWLOC_CPUBIND_PROCESS))
        return snprintf(text, size, "the system refuses: %s", strerror(errno)), 0;
    list_sets(sets, ranks, text, size);
    return own;
}

int placement_bind(PlacementChoice c, char *text, size_t size)
{
    int bound = 0;
    hwloc_topology_t t;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc(), *sets = calloc((size_t)c.ranks, sizeof *sets);
    snprintf(text, size, "hwloc cannot tell this machine's processors");
    if (allowed && sets && topology_open(&t, allowed, false)) {
        bound = bind_in(t, allowed, c, sets, text, size);
        hwloc_topology_destroy(t);
    }
    for (int i = 0; i < c.ranks && sets; i++) hwloc_bitmap_free(sets[i]);
    free(sets);
    hwloc_bitmap_free(allowed);
    return bound;
}

/* ---- near a device ---- */

bool placement_near(hwloc_topology_t t, hwloc_const_bitmap_t allowed, const char *pci, hwloc_bitmap_t set, char *text,
                    size_t size)
{
    char nodes[64], processors[192];
    const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(t, pci);
    const hwloc_obj_t part = device ? hwloc_get_non_io_ancestor_obj(t, device) : NULL;
    if (!part) return snprintf(text, size, "hwloc does not see PCI device %s", pci), false;
    hwloc_bitmap_and(set, allowed, part->cpuset);
    if (hwloc_bitmap_iszero(set))
        return snprintf(text, size, "PCI device %s is near none of the processors that there are for it", pci), false;
    if (hwloc_bitmap_isequal(set, allowed))
        return snprintf(text, size, "PCI device %s is as near to all processors", pci), false;
    hwloc_bitmap_list_snprintf(nodes, sizeof nodes, part->nodeset);
    hwloc_bitmap_list_snprintf(processors, sizeof processors, set);
    snprintf(text, size, "PCI device %s is near memory node %s, processors %s", pci, nodes, processors);
    return true;
}

void placement_near_device(const char *pci, PlacementNear *out)
{
    hwloc_topology_t t;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc(), set = hwloc_bitmap_alloc();
    *out = (PlacementNear){ .text = "hwloc cannot tell this machine's processors" };
    if (allowed && set && topology_open(&t, allowed, true)) {
        if (placement_near(t, allowed, pci, set, out->text, sizeof out->text)) {
            out->processors = hwloc_bitmap_weight(set);
            hwloc_bitmap_list_snprintf(out->list, sizeof out->list, set);
        }
        hwloc_topology_destroy(t);
    }
    hwloc_bitmap_free(allowed);
    hwloc_bitmap_free(set);
}

/* Why all threads of this process cannot be bound to a list of processors; NULL: they are bound. */
static const char *bind_list(hwloc_topology_t t, hwloc_bitmap_t set, const char *list, char *why, size_t size)
{
    if (!hwloc_topology_is_thissystem(t)) return "hwloc was given another machine's topology";
    if (hwloc_bitmap_list_sscanf(set, list)) return "the list of processors is too long";
    if (!hwloc_set_cpubind(t, set, HWLOC_CPUBIND_PROCESS)) return NULL;
    snprintf(why, size, "the system refuses: %s", strerror(errno));
    return why;
}

bool placement_bind_near(PlacementNear *n)
{
    char refused[128];
    const char *why = "hwloc cannot tell this machine's processors";
    hwloc_topology_t t;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc(), set = hwloc_bitmap_alloc();
    if (allowed && set && topology_open(&t, allowed, false)) {
        why = bind_list(t, set, n->list, refused, sizeof refused);
        hwloc_topology_destroy(t);
    }
    hwloc_bitmap_free(allowed);
    hwloc_bitmap_free(set);
    if (why) snprintf(n->text, sizeof n->text, "%s", why);
    return !why;
}
