/*
 * Processors for the ranks of one machine, by hwloc's picture of it: sockets, memory nodes, caches, cores and their
 * hardware threads, each of which is a processor.
 *
 * A process that is bound before it touches its memory gets it on its own node: the kernel takes a page from the node
 * of the thread that touches it first.
 */
#ifndef MEGATRAIN_BASE_PLACEMENT_H
#define MEGATRAIN_BASE_PLACEMENT_H

#include <hwloc.h>
#include <stdbool.h>
#include <stddef.h>

typedef enum { PLACEMENT_CORE, PLACEMENT_NODE } PlacementUnit;

/*
 * The processors of `allowed` for each of `ranks` ranks; sets: so many empty ones, which are filled. It depends on
 * nothing else.
 *
 *   CORE   each has its own cores, neighbours of one another, and all of their processors. The fewest that one has are
 *          as many as they can be. Within a socket, a node, a cache, where that takes none of these. Where there are
 *          more ranks than cores each has processors of its own, and cores are shared.
 *   NODE   the whole nodes in which those lie: others' ranks may have them, too
 *
 * False: there are fewer processors than ranks, or no memory.
 */
bool placement_of(hwloc_topology_t t, hwloc_const_bitmap_t allowed, PlacementUnit unit, int ranks,
                  hwloc_bitmap_t *sets);

/* Processors and memory that this process may use, by hwloc. HWLOC_SYNTHETIC and others of its variables may show
 * another machine; then it is that whole machine, `elsewhere`. False: hwloc cannot say. */
typedef struct {
    int nodes, cores, processors; /* nodes: that have processors of these */
    bool elsewhere;
} Machine;
bool machine_look(Machine *m);

/*
 * Binds all threads of this process, and so those that they will make, to what placement_of gives it as number `rank`.
 * In `text` are the sets of all, as "0-3 4-7", or why nothing was done: among others that a rank has more `threads` (0:
 * whatever it will get) than processors of its own. Returns how many of its own this rank has; 0: nothing was done.
 */
typedef struct {
    PlacementUnit unit;
    int ranks, rank, threads;
} PlacementChoice;
int placement_bind(PlacementChoice c, char *text, size_t size);

/*
 * The processors of `allowed` in the smallest part of the machine that has the PCI device at `pci`, "0000:1b:00.0". In
 * `text`: which they are, or why none are to be named: hwloc does not see the device, or all are as near, or none.
 */
bool placement_near(hwloc_topology_t t, hwloc_const_bitmap_t allowed, const char *pci, hwloc_bitmap_t set, char *text,
                    size_t size);
/* The same on this machine. */
enum { PLACEMENT_LIST_BYTES = 256 };
typedef struct {
    int processors;                  /* their number; 0: none are to be named */
    char list[PLACEMENT_LIST_BYTES]; /* "0-3,8" */
    char text[256];                  /* which they are, or why there are none */
} PlacementNear;
void placement_near_device(const char *pci, PlacementNear *out);
/* Binds all threads of this process to the processors of n. False: n->text says why not. */
bool placement_bind_near(PlacementNear *n);

#endif
