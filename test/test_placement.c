/* Processors that ranks of a machine are given, on machines that are made up by hwloc: tables written by hand, and for
 * every number of ranks, on whole machines and on parts of them, what must hold of any good placement. */
#include <sched.h>

#include "test.h"

#include "base/placement.h"

enum { MOST = 64 };

typedef struct {
    hwloc_topology_t t;
    hwloc_bitmap_t all;
    hwloc_bitmap_t sets[MOST];
} Made;

static Made make_machine(const char *synthetic)
{
    Made m = { 0 };
    CHECK(!hwloc_topology_init(&m.t) && !hwloc_topology_set_synthetic(m.t, synthetic) && !hwloc_topology_load(m.t));
    m.all = hwloc_bitmap_dup(hwloc_topology_get_topology_cpuset(m.t));
    for (int i = 0; i < MOST; i++) m.sets[i] = hwloc_bitmap_alloc();
    return m;
}

static void end_machine(Made *m)
{
    for (int i = 0; i < MOST; i++) hwloc_bitmap_free(m->sets[i]);
    hwloc_bitmap_free(m->all);
    hwloc_topology_destroy(m->t);
}

static bool place(Made *m, hwloc_const_bitmap_t allowed, PlacementUnit unit, int ranks)
{
    for (int i = 0; i < MOST; i++) hwloc_bitmap_zero(m->sets[i]);
    return placement_of(m->t, allowed, unit, ranks, m->sets);
}

/* allowed: "", or a list. want: the sets of all ranks, a blank between them. */
static void expect(const char *machine, const char *allowed, PlacementUnit unit, int ranks, const char *want)
{
    char got[1024] = "";
    Made m = make_machine(machine);
    if (*allowed) hwloc_bitmap_list_sscanf(m.all, allowed);
    CHECK(place(&m, m.all, unit, ranks) == (*want != 0));
    for (int i = 0; i < ranks && *want; i++) {
        const size_t n = strlen(got);
        if (i) strcat(got, " ");
        hwloc_bitmap_list_snprintf(got + strlen(got), sizeof got - n - 2, m.sets[i]);
    }
    if (strcmp(got, want)) TEST_FAIL("%d ranks on '%s' [%s]: %s, want %s", ranks, machine, allowed, got, want);
    end_machine(&m);
}

/* two sockets of four nodes, each with four cores of two processors: 64 */
#define EIGHT_NODES "pack:2 numa:4 core:4 pu:2"

TEST(equal_parts_of_two_sockets)
{
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 1, "0-63");
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 2, "0-31 32-63");
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 4, "0-15 16-31 32-47 48-63");
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 8, "0-7 8-15 16-23 24-31 32-39 40-47 48-55 56-63");
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 16,
           "0-3 4-7 8-11 12-15 16-19 20-23 24-27 28-31 32-35 36-39 40-43 44-47 48-51 52-55 56-59 60-63");
    expect(EIGHT_NODES, "", PLACEMENT_NODE, 8, "0-7 8-15 16-23 24-31 32-39 40-47 48-55 56-63");
    expect(EIGHT_NODES, "", PLACEMENT_NODE, 16,
           "0-7 0-7 8-15 8-15 16-23 16-23 24-31 24-31 32-39 32-39 40-47 40-47 48-55 48-55 56-63 56-63");
    expect(EIGHT_NODES, "", PLACEMENT_NODE, 2, "0-31 32-63");
}

TEST(uneven_numbers_of_ranks)
{
    /* seven nodes hold a rank each, and the eighth none: a second one would be far from what the first has */
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 7, "0-7 8-15 16-23 24-31 32-39 40-47 48-55");
    /* twelve: six to each socket, of two cores or more */
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 12, "0-3 4-7 8-11 12-15 16-23 24-31 32-35 36-39 40-43 44-47 48-55 56-63");
    /* six have five cores each, more than a node has; but none lies on both sockets */
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 6, "0-9 10-19 20-31 32-41 42-51 52-63");
    /* three have ten cores: the middle one has some of each socket */
    expect(EIGHT_NODES, "", PLACEMENT_CORE, 3, "0-19 20-41 42-63");
    expect(EIGHT_NODES, "", PLACEMENT_NODE, 3, "0-23 16-47 40-63");
    /* nodes of three cores, four ranks: each has one, and nobody two nodes */
    expect("numa:2 core:3 pu:1", "", PLACEMENT_CORE, 4, "0 1-2 3 4-5");
    expect("numa:2 core:3 pu:1", "", PLACEMENT_CORE, 5, "0 1 2 3 4-5");
}

TEST(more_ranks_than_cores_share_cores)
{
    expect("core:2 pu:2", "", PLACEMENT_CORE, 2, "0-1 2-3");
    expect("core:2 pu:2", "", PLACEMENT_CORE, 3, "0 1 2-3");
    expect("core:2 pu:2", "", PLACEMENT_CORE, 4, "0 1 2 3");
    expect("core:2 pu:2", "", PLACEMENT_CORE, 5, "");
    expect("core:2 pu:2", "", PLACEMENT_NODE, 5, "");
}

TEST(a_part_of_a_machine)
{
    /* as of a control group or taskset: nothing outside it */
    expect(EIGHT_NODES, "8-23", PLACEMENT_CORE, 2, "8-15 16-23");
    expect(EIGHT_NODES, "12-19", PLACEMENT_CORE, 2, "12-15 16-19");
    expect(EIGHT_NODES, "12-19", PLACEMENT_NODE, 2, "12-15 16-19");
    /* one processor of each core */
    expect("numa:2 core:2 pu:2", "0,2,4,6", PLACEMENT_CORE, 2, "0,2 4,6");
    expect("numa:2 core:2 pu:2", "0,2,4,6", PLACEMENT_CORE, 4, "0 2 4 6");
    expect("numa:2 core:2 pu:2", "0,2,4,6", PLACEMENT_CORE, 5, "");
    /* nodes of which unequal parts are left: three cores and one */
    expect("numa:2 core:4 pu:1", "0-2,7", PLACEMENT_CORE, 4, "0 1 2 7");
    expect("numa:2 core:4 pu:1", "0-2,7", PLACEMENT_CORE, 2, "0-1 2,7");
    expect("numa:2 core:4 pu:1", "0-2,7", PLACEMENT_CORE, 3, "0 1-2 7");
}

TEST(processors_numbered_as_linux_does)
{
    /* the second processors of all cores behind the first ones of all: 0 and 8 are one core */
    expect("pack:2 core:4 pu:2(indexes=2*8:1*2)", "", PLACEMENT_CORE, 2, "0-3,8-11 4-7,12-15");
    expect("pack:2 core:4 pu:2(indexes=2*8:1*2)", "", PLACEMENT_CORE, 8, "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15");
}

/* ---- what must hold ---- */

/* Cores of `allowed` in each object of a type, and how many ranks these could hold of `least` cores. */
static int room(const Made *m, hwloc_const_bitmap_t allowed, hwloc_obj_type_t type, int least)
{
    int ranks = 0;
    for (int i = 0; i < hwloc_get_nbobjs_by_type(m->t, type); i++) {
        int cores = 0;
        for (int c = 0; c < hwloc_get_nbobjs_by_type(m->t, HWLOC_OBJ_CORE); c++) {
            const hwloc_const_bitmap_t core = hwloc_get_obj_by_type(m->t, HWLOC_OBJ_CORE, (unsigned)c)->cpuset;
            cores += hwloc_bitmap_intersects(core, allowed) &&
                     hwloc_bitmap_isincluded(core, hwloc_get_obj_by_type(m->t, type, (unsigned)i)->cpuset);
        }
        ranks += cores / least;
    }
    return ranks;
}

static int objects_in(const Made *m, hwloc_obj_type_t type, hwloc_const_bitmap_t set)
{
    int n = 0;
    for (int i = 0; i < hwloc_get_nbobjs_by_type(m->t, type); i++)
        n += hwloc_bitmap_intersects(hwloc_get_obj_by_type(m->t, type, (unsigned)i)->cpuset, set);
    return n;
}

static void hold_all(Made *m, hwloc_const_bitmap_t allowed, int ranks)
{
    const int cores = objects_in(m, HWLOC_OBJ_CORE, allowed), least = cores / ranks;
    static const hwloc_obj_type_t wholes[] = { HWLOC_OBJ_PACKAGE, HWLOC_OBJ_NUMANODE };
    hwloc_bitmap_t used = hwloc_bitmap_alloc();
    CHECK(place(m, allowed, PLACEMENT_CORE, ranks) == (hwloc_bitmap_weight(allowed) >= ranks));
    for (int i = 0; i < ranks && hwloc_bitmap_weight(allowed) >= ranks; i++) {
        hwloc_const_bitmap_t set = m->sets[i];
        CHECK(!hwloc_bitmap_iszero(set) && hwloc_bitmap_isincluded(set, allowed)); /* something, of what it may have */
        CHECK(!hwloc_bitmap_intersects(set, used));                                /* which nobody else has */
        hwloc_bitmap_or(used, used, set);
        if (!least) continue;
        CHECK(objects_in(m, HWLOC_OBJ_CORE, set) >= least); /* a part as large as the others' */
        for (int c = 0; c < hwloc_get_nbobjs_by_type(m->t, HWLOC_OBJ_CORE); c++) {
            hwloc_bitmap_t core = hwloc_bitmap_dup(hwloc_get_obj_by_type(m->t, HWLOC_OBJ_CORE, (unsigned)c)->cpuset);
            hwloc_bitmap_and(core, core, allowed); /* of a core all or nothing */
            CHECK(!hwloc_bitmap_intersects(core, set) || hwloc_bitmap_isincluded(core, set));
            hwloc_bitmap_free(core);
        }
        for (int w = 0; w < 2; w++) /* in one whole wherever wholes have room for all ranks */
            CHECK(room(m, allowed, wholes[w], least) < ranks || objects_in(m, wholes[w], set) == 1);
    }
    hwloc_bitmap_free(used);
}

TEST(every_number_of_ranks_on_parts_of_machines)
{
    static const char *const machines[] = { EIGHT_NODES, "pack:2 l3:2 core:3 pu:2", "numa:3 core:5 pu:1",
                                            "pack:4 numa:1 core:2 pu:4", "core:7 pu:1" };
    uint32_t random = 1;
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        Made m = make_machine(machines[i]);
        hwloc_bitmap_t part = hwloc_bitmap_alloc();
        const int all = hwloc_bitmap_weight(m.all);
        for (int ranks = 1; ranks <= all; ranks++) hold_all(&m, m.all, ranks);
        for (int k = 0; k < 100; k++) {
            hwloc_bitmap_zero(part);
            for (int cpu = 0; cpu < all; cpu++) {
                random = 1664525 * random + 1013904223;
                if (random >> 30) hwloc_bitmap_set(part, (unsigned)cpu); /* three of four */
            }
            if (!hwloc_bitmap_iszero(part)) hold_all(&m, part, 1 + (int)((random >> 8) % 12));
        }
        hwloc_bitmap_free(part);
        end_machine(&m);
    }
}

TEST(this_machine)
{
    Machine m;
    CHECK(machine_look(&m));
    CHECK(m.nodes >= 1 && m.cores >= 1 && m.processors >= m.cores && !m.elsewhere);
}

int main(int argc, char **argv) { return test_main(argc, argv); }

/* ---- near a device ---- */

#define PCI_DEVICE(n, bus)                                                                                        \
    "<object type='Bridge' gp_index='" n "0' bridge_type='0-1' depth='0' bridge_pci='0000:[" bus "-" bus "]'>"     \
    "<object type='PCIDev' gp_index='" n "1' pci_busid='0000:" bus ":00.0' pci_type='0302 [10de:2330] [10de:1] a1' " \
    "pci_link_speed='0'/></object>"
#define SETS(mask, nodes)                                                                                         \
    "cpuset='" mask "' complete_cpuset='" mask "' nodeset='" nodes "' complete_nodeset='" nodes "'"
#define PU(n, mask, nodes) "<object type='PU' os_index='" n "' gp_index='2" n "' " SETS(mask, nodes) "/>"
#define HALF(n, mask, nodes, units, devices)                                                                      \
    "<object type='Package' os_index='" n "' gp_index='1" n "' " SETS(mask, nodes) ">"                            \
    "<object type='NUMANode' os_index='" n "' gp_index='3" n "' local_memory='1000000' " SETS(mask, nodes) "/>"   \
    units devices "</object>"

/* Two sockets of two processors, a GPU at each and one that is at neither. */
static const char with_devices[] =
    "<?xml version='1.0' encoding='UTF-8'?><!DOCTYPE topology SYSTEM 'hwloc2.dtd'><topology version='2.0'>"
    "<object type='Machine' os_index='0' gp_index='1' allowed_cpuset='0x0000000f' allowed_nodeset='0x00000003' "
    SETS("0x0000000f", "0x00000003") ">"
    HALF("0", "0x00000003", "0x00000001", PU("0", "0x00000001", "0x00000001") PU("1", "0x00000002", "0x00000001"),
         PCI_DEVICE("4", "1b"))
    HALF("1", "0x0000000c", "0x00000002", PU("2", "0x00000004", "0x00000002") PU("3", "0x00000008", "0x00000002"),
         PCI_DEVICE("5", "9a"))
    PCI_DEVICE("6", "c1") "</object></topology>";

static void expect_near(const char *pci, const char *allowed, const char *want, const char *words)
{
    char got[64] = "", text[256];
    hwloc_topology_t t;
    hwloc_bitmap_t all = hwloc_bitmap_alloc(), set = hwloc_bitmap_alloc();
    CHECK(!hwloc_topology_init(&t) && !hwloc_topology_set_io_types_filter(t, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) &&
          !hwloc_topology_set_xmlbuffer(t, with_devices, sizeof with_devices) && !hwloc_topology_load(t));
    hwloc_bitmap_list_sscanf(all, allowed);
    const bool near = placement_near(t, all, pci, set, text, sizeof text);
    if (near) hwloc_bitmap_list_snprintf(got, sizeof got, set);
    if (near != (*want != 0) || strcmp(got, want) || !strstr(text, words))
        TEST_FAIL("%s of [%s]: '%s' (%s), want '%s' (%s)", pci, allowed, got, text, want, words);
    hwloc_bitmap_free(all);
    hwloc_bitmap_free(set);
    hwloc_topology_destroy(t);
}

TEST(processors_near_a_device)
{
    expect_near("0000:1b:00.0", "0-3", "0-1", "0000:1b:00.0 is near memory node 0, processors 0-1");
    expect_near("0000:9a:00.0", "0-3", "2-3", "memory node 1, processors 2-3");
    expect_near("0000:9a:00.0", "1-2", "2", "memory node 1, processors 2");
    expect_near("0000:9a:00.0", "0-1", "", "near none of the processors");
    expect_near("0000:9a:00.0", "2-3", "", "as near to all");
    expect_near("0000:c1:00.0", "0-3", "", "as near to all");
    expect_near("0000:2b:00.0", "0-3", "", "does not see PCI device 0000:2b:00.0");
    expect_near("nonsense", "0-3", "", "does not see");
}

/* (the environment may show hwloc another machine) */
TEST(bound_to_a_list)
{
    cpu_set_t was, now;
    Machine m;
    int first = 0;
    PlacementNear near = { .processors = 1 };
    CHECK(!sched_getaffinity(0, sizeof was, &was));
    while (!CPU_ISSET(first, &was)) first++;
    snprintf(near.list, sizeof near.list, "%d", first);
    const bool bound = placement_bind_near(&near), here = machine_look(&m) && !m.elsewhere;
    CHECK(!sched_getaffinity(0, sizeof now, &now) && !sched_setaffinity(0, sizeof was, &was));
    CHECK_MSG(bound == here, "%d: %s", bound, near.text);
    CHECK(bound ? CPU_COUNT(&now) == 1 && CPU_ISSET(first, &now) : CPU_EQUAL(&now, &was) && *near.text);
}
