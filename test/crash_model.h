/*
 * What a disk may hold after a power cut. The system calls by which this program changes files below one folder are
 * recorded (file_calls.h), and from every prefix of the record all trees are built that a crash there may leave:
 *
 *   data      a write that no sync of its file followed is kept, dropped, or torn at any sector: the file ends there,
 *             or has its full size with zeros from there on, or that sector alone is zeros
 *   entries   a name made, renamed or removed that no sync of its folder followed is kept or dropped, each for itself:
 *             so a rename may be there before the data it publishes, and what came later before what came earlier.
 *             (Syncing a file makes its data safe, not its name.) A rename is one thing: never half of it.
 *
 * This is what POSIX allows, more than file systems do. A disk that lies can be had, too: one sync does nothing.
 */
#ifndef MEGATRAIN_TEST_CRASH_MODEL_H
#define MEGATRAIN_TEST_CRASH_MODEL_H

#include <stdio.h>
#include <stdlib.h>

#include "file_calls.h"

enum { CRASH_OPS = 512, CRASH_NODES = 128, CRASH_NAME = 96, CRASH_DEPTH = 16 };

typedef enum { CRASH_ADD, CRASH_MOVE, CRASH_REMOVE, CRASH_WRITE, CRASH_CUT, CRASH_SYNC } CrashKind;

typedef struct {
    CrashKind kind;
    int node;          /* file or folder itself */
    int dir, to_dir;   /* where its name is, or goes */
    char name[CRASH_NAME], to[CRASH_NAME];
    int64_t offset, size;
    char *data;
    int synced_at; /* the first operation that makes it safe; INT32_MAX: none */
} CrashOp;

/* A tree: of each node its parent and name, and if it is a file its bytes. Node 0 is the folder that is watched. */
typedef struct {
    int parent[CRASH_NODES]; /* -1: has no name */
    char name[CRASH_NODES][CRASH_NAME];
    bool folder[CRASH_NODES];
    char *data[CRASH_NODES];
    int64_t size[CRASH_NODES], room[CRASH_NODES];
} CrashTree;

static struct {
    char root[256];
    CrashOp ops[CRASH_OPS];
    int count, nodes;
    int fd_node[FILE_CALLS_FDS];
    CrashTree now;
    int sector; /* bytes; disks have 512, a smaller one makes more states */
} crash = { .sector = 512 };

/* ---- trees ---- */

static int crash_find(const CrashTree *t, int dir, const char *name)
{
    for (int i = 1; i < CRASH_NODES; i++)
        if (t->parent[i] == dir && !strcmp(t->name[i], name)) return i;
    return -1;
}

static bool crash_empty(const CrashTree *t, int dir)
{
    for (int i = 1; i < CRASH_NODES; i++)
        if (t->parent[i] == dir) return false;
    return true;
}

static void crash_put(CrashTree *t, int node, int64_t offset, const char *data, int64_t size)
{
    int64_t end = offset + size;
    if (end > t->room[node]) {
        t->room[node] = 2 * end;
        t->data[node] = realloc(t->data[node], (size_t)t->room[node]);
    }
    if (offset > t->size[node]) memset(t->data[node] + t->size[node], 0, (size_t)(offset - t->size[node]));
    if (data) memcpy(t->data[node] + offset, data, (size_t)size);
    else if (size) memset(t->data[node] + offset, 0, (size_t)size);
    if (end > t->size[node]) t->size[node] = end;
}

/* `variant`: 0 whole; then for each sector three ways of being torn there. */
static void crash_write(CrashTree *t, const CrashOp *o, int variant)
{
    enum { ENDS, ZEROS, HOLE };
    int64_t kept = (int64_t)(variant - 1) / 3 * crash.sector, hole = o->size - kept;
    if (!variant) {
        crash_put(t, o->node, o->offset, o->data, o->size);
        return;
    }
    if ((variant - 1) % 3 == HOLE && hole > crash.sector) hole = crash.sector;
    crash_put(t, o->node, o->offset, o->data, kept);
    if ((variant - 1) % 3 != ENDS) crash_put(t, o->node, o->offset + kept, NULL, hole);
    if ((variant - 1) % 3 == HOLE)
        crash_put(t, o->node, o->offset + kept + hole, o->data + kept + hole, o->size - kept - hole);
}

/* Does it, if what it needs is there. `variant`: of a write, see crash_variants. */
static void crash_apply(CrashTree *t, const CrashOp *o, int variant)
{
    int there;
    switch (o->kind) {
    case CRASH_ADD:
        if (crash_find(t, o->dir, o->name) >= 0) return;
        t->parent[o->node] = o->dir;
        strcpy(t->name[o->node], o->name);
        return;
    case CRASH_MOVE:
        there = crash_find(t, o->to_dir, o->to);
        if (t->parent[o->node] != o->dir || strcmp(t->name[o->node], o->name)) return;
        if (there >= 0 && t->folder[there] && !crash_empty(t, there)) return;
        if (there >= 0) t->parent[there] = -1;
        t->parent[o->node] = o->to_dir;
        strcpy(t->name[o->node], o->to);
        return;
    case CRASH_REMOVE: /* by inode: a removal that outlives the rename before it still takes the file */
        if (t->folder[o->node] && !crash_empty(t, o->node)) return;
        t->parent[o->node] = -1;
        return;
    case CRASH_WRITE: crash_write(t, o, variant); return;
    case CRASH_CUT: if (t->size[o->node] > o->size) t->size[o->node] = o->size; return;
    case CRASH_SYNC: return;
    }
}

/* Variant 0 is kept, the last one dropped; of a write those between are torn. */
static int crash_variants(const CrashOp *o)
{
    if (o->kind != CRASH_WRITE) return 2;
    return 2 + 3 * (int)((o->size + crash.sector - 1) / crash.sector);
}

/* A tree of no bytes and no names; what it has of room is kept. */
static void crash_clear(CrashTree *t)
{
    for (int i = 0; i < CRASH_NODES; i++) {
        t->parent[i] = -1;
        t->size[i] = 0;
        t->folder[i] = crash.now.folder[i];
    }
}

static bool crash_seen(const CrashTree *t, int node)
{
    for (int up = node, depth = 0; depth < CRASH_DEPTH; up = t->parent[up], depth++)
        if (up <= 0) return up == 0;
    return false;
}

static void crash_path(const CrashTree *t, int node, const char *root, char *out, size_t size)
{
    char rest[512] = "", longer[512];
    for (int up = node; up > 0; up = t->parent[up]) {
        snprintf(longer, sizeof longer, "/%.90s%.400s", t->name[up], rest);
        strcpy(rest, longer);
    }
    snprintf(out, size, "%s%s", root, rest);
}

static uint64_t crash_mix(uint64_t h, const void *data, size_t size)
{
    for (const unsigned char *p = data; size--; p++) h = (h ^ *p) * 0x100000001B3u;
    return h ^ h >> 29;
}

/* Depends on paths and bytes and not on the order of nodes. */
static uint64_t crash_hash(const CrashTree *t)
{
    uint64_t sum = 0;
    char path[512];
    for (int i = 1; i < crash.nodes; i++) {
        if (!crash_seen(t, i)) continue;
        crash_path(t, i, "", path, sizeof path);
        uint64_t h = crash_mix(0xCBF29CE484222325u, path, strlen(path) + 1);
        if (!t->folder[i]) h = crash_mix(h * 31, t->data[i], (size_t)t->size[i]);
        sum += h * 0x9E3779B97F4A7C15u;
    }
    return sum;
}

/* Writes the tree to the disk, below `root`, an empty folder. */
static void crash_build(const CrashTree *t, const char *root)
{
    char path[512];
    bool done[CRASH_NODES] = { true };
    for (int pass = 0; pass < CRASH_DEPTH; pass++)
        for (int i = 1; i < crash.nodes; i++) {
            if (done[i] || !crash_seen(t, i) || !done[t->parent[i]]) continue;
            done[i] = true;
            crash_path(t, i, root, path, sizeof path);
            if (t->folder[i]) {
                syscall(SYS_mkdir, path, 0777);
                continue;
            }
            int fd = (int)syscall(SYS_open, path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
            if (t->size[i] && syscall(SYS_pwrite64, fd, t->data[i], t->size[i], 0L) != t->size[i]) abort();
            syscall(SYS_close, fd);
        }
}

/* ---- the record ---- */

/* The folder of a path below the root, by the tree as it is now, and the last part of its name. */
static int crash_dir(const char *path, char name[CRASH_NAME])
{
    char part[512], *rest = part, *word;
    int dir = 0;
    snprintf(part, sizeof part, "%s", path + strlen(crash.root));
    *name = 0;
    while ((word = strsep(&rest, "/"))) {
        if (!*word) continue;
        if (*name) dir = crash_find(&crash.now, dir, name);
        snprintf(name, CRASH_NAME, "%s", word);
    }
    return dir;
}

static int crash_node(const char *path)
{
    char name[CRASH_NAME];
    int dir = crash_dir(path, name);
    return *name ? crash_find(&crash.now, dir, name) : dir;
}

static void crash_note(CrashOp op)
{
    if (crash.count == CRASH_OPS) abort();
    crash.ops[crash.count++] = op;
    if (op.kind != CRASH_SYNC) crash_apply(&crash.now, &op, 0);
}

/* What is safe from when on; the sync `lost` (-1: none) does nothing. */
static void crash_find_synced(int lost)
{
    for (int i = 0; i < crash.count; i++) {
        CrashOp *q = &crash.ops[i];
        const bool data = q->kind == CRASH_WRITE || q->kind == CRASH_CUT;
        q->synced_at = INT32_MAX;
        for (int k = crash.count - 1; k > i; k--)
            if (crash.ops[k].kind == CRASH_SYNC && k != lost && crash.ops[k].node == (data ? q->node : q->dir))
                q->synced_at = k;
    }
}

static int crash_add(const char *path, bool folder)
{
    CrashOp o = { .kind = CRASH_ADD, .node = crash.nodes };
    if (crash.nodes == CRASH_NODES) abort();
    o.dir = crash_dir(path, o.name);
    crash.now.folder[crash.nodes++] = folder;
    crash_note(o);
    return o.node;
}

static void crash_opened(const FileCall *c)
{
    int node = crash_node(c->path);
    if (c->fd >= FILE_CALLS_FDS) abort();
    if (node < 0 && c->flags & O_CREAT) node = crash_add(c->path, false);
    else if (c->flags & O_TRUNC) crash_note((CrashOp){ .kind = CRASH_CUT, .node = node });
    crash.fd_node[c->fd] = node;
}

static void crash_wrote(const FileCall *c)
{
    CrashOp o = { .kind = CRASH_WRITE, .node = crash.fd_node[c->fd], .offset = c->offset, .size = c->size };
    if (!c->size) return;
    o.data = malloc((size_t)c->size);
    memcpy(o.data, c->data, (size_t)c->size);
    crash_note(o);
}

static void crash_moved(const FileCall *c)
{
    CrashOp o = { .kind = CRASH_MOVE, .node = crash_node(c->path) };
    o.dir = crash_dir(c->path, o.name);
    o.to_dir = crash_dir(c->to, o.to);
    if (o.dir != o.to_dir) abort(); /* would have to be synced twice */
    crash_note(o);
}

static void crash_removed(const FileCall *c)
{
    CrashOp o = { .kind = CRASH_REMOVE, .node = crash_node(c->path) };
    o.dir = crash_dir(c->path, o.name);
    crash_note(o);
}

static void crash_heard(const FileCall *c)
{
    switch (c->kind) {
    case CALL_OPEN: crash_opened(c); break;
    case CALL_WRITE: crash_wrote(c); break;
    case CALL_CUT: crash_note((CrashOp){ .kind = CRASH_CUT, .node = crash.fd_node[c->fd], .size = c->size }); break;
    case CALL_SYNC: crash_note((CrashOp){ .kind = CRASH_SYNC, .node = crash.fd_node[c->fd] }); break;
    case CALL_MKDIR: crash_add(c->path, true); break;
    case CALL_RENAME: crash_moved(c); break;
    case CALL_REMOVE: crash_removed(c); break;
    case CALL_READ:
    case CALL_CLOSE:
    case CALL_KINDS: break;
    }
}

/* Begins with an empty folder `root`, which is safe on the disk. */
static void crash_record(const char *root)
{
    for (int i = 0; i < crash.count; i++) free(crash.ops[i].data);
    crash.count = 0;
    crash.nodes = 1;
    memset(crash.now.folder, 0, sizeof crash.now.folder);
    crash.now.folder[0] = true;
    crash_clear(&crash.now);
    snprintf(crash.root, sizeof crash.root, "%s", root);
    file_calls.root = crash.root;
    file_calls.after = crash_heard;
}

static void crash_recorded(void) { file_calls.root = NULL; }

/* ---- every state ---- */

typedef struct {
    int64_t states, repeated, cut_short; /* cut_short: crash points whose states were drawn, not all listed */
} CrashCount;

typedef struct {
    uint64_t *slot; /* of hashes; 0 = free */
    int64_t room, count;
} CrashSet;

static bool crash_new(CrashSet *s, uint64_t hash)
{
    if (2 * s->count >= s->room) {
        CrashSet grown = { calloc((size_t)(s->room ? 2 * s->room : 4096), sizeof *s->slot),
                           s->room ? 2 * s->room : 4096, 0 };
        for (int64_t i = 0; i < s->room; i++)
            if (s->slot[i]) crash_new(&grown, s->slot[i]);
        free(s->slot);
        *s = grown;
    }
    int64_t at = (int64_t)(hash % (uint64_t)s->room);
    while (s->slot[at] && s->slot[at] != hash) at = (at + 1) % s->room;
    if (s->slot[at]) return false;
    s->slot[at] = hash;
    s->count++;
    return true;
}

typedef struct {
    CrashSet seen;
    CrashTree tree;
    CrashCount count;
    void (*check)(void *user, const CrashTree *t, int point);
    int (*need)(int point); /* what must be there after a crash at this point: part of what makes a state new */
    void *user;
} CrashRun;

static void crash_state(CrashRun *r, int point, const int *loose, const int *variant, int n)
{
    CrashTree *t = &r->tree;
    crash_clear(t);
    for (int i = 0, k = 0; i < point; i++) {
        bool unsafe = k < n && loose[k] == i;
        int v = unsafe ? variant[k++] : 0;
        if (!unsafe || v < crash_variants(&crash.ops[i]) - 1) crash_apply(t, &crash.ops[i], v);
    }
    uint64_t hash = crash_hash(t) * 2 + 1 + (uint64_t)r->need(point) * 0xD6E8FEB86659FD93u;
    if (!crash_new(&r->seen, hash ? hash : 1)) {
        r->count.repeated++;
        return;
    }
    r->count.states++;
    r->check(r->user, t, point);
}

/* All choices at a crash point, or `most` of them drawn, besides all kept, all dropped, and each one thing torn or
 * dropped alone. */
static void crash_point(CrashRun *r, int point, int64_t most, uint64_t *seed)
{
    int loose[CRASH_OPS] = { 0 }, variant[CRASH_OPS] = { 0 }, n = 0;
    double all = 1;
    for (int i = 0; i < point; i++)
        if (crash.ops[i].kind != CRASH_SYNC && crash.ops[i].synced_at >= point) {
            all *= crash_variants(&crash.ops[i]);
            loose[n++] = i;
        }
    if (all <= (double)most) {
        for (;;) {
            int k = 0;
            crash_state(r, point, loose, variant, n);
            while (k < n && ++variant[k] == crash_variants(&crash.ops[loose[k]])) variant[k++] = 0;
            if (k == n) return;
        }
    }
    r->count.cut_short++;
    crash_state(r, point, loose, variant, n);
    for (int k = 0; k < n; k++) {
        const int last = crash_variants(&crash.ops[loose[k]]);
        for (variant[k] = 1; variant[k] < last; variant[k]++) crash_state(r, point, loose, variant, n);
        variant[k] = 0;
    }
    for (int64_t i = 0; i < most; i++) {
        for (int k = 0; k < n; k++) {
            *seed = *seed * 6364136223846793005u + 1442695040888963407u;
            const int last = crash_variants(&crash.ops[loose[k]]) - 1, draw = (int)(*seed >> 33);
            variant[k] = draw % 4 ? draw % 4 == 1 ? last : 0 : draw / 4 % (last + 1);
        }
        crash_state(r, point, loose, variant, n);
    }
}

/* Calls `check` once with every distinct state that a crash before, between or after the recorded operations may
 * leave. most: choices at one crash point. lost: a recorded sync that does nothing; -1: none. */
static CrashCount crash_every_state(int64_t most, int lost, int (*need)(int),
                                    void (*check)(void *, const CrashTree *, int), void *user)
{
    static CrashRun r;
    uint64_t seed = 1;
    free(r.seen.slot);
    r.seen = (CrashSet){ 0 };
    r.count = (CrashCount){ 0 };
    r.check = check, r.need = need, r.user = user;
    crash_find_synced(lost);
    for (int point = 0; point <= crash.count; point++) crash_point(&r, point, most, &seed);
    return r.count;
}

#endif
