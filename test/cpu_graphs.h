/*
 * Graphs on the CPU, for tests of what is recorded (device/recorder.h): a graph is a list of ops with their arguments,
 * and of copies. What is captured is not done, as on a GPU. One device a thread.
 */
#ifndef MEGATRAIN_TEST_CPU_GRAPHS_H
#define MEGATRAIN_TEST_CPU_GRAPHS_H

#include <stdlib.h>
#include <string.h>

#include "device/ops.h"
#include "engine/trainer.h"

typedef Err CpuOp(const OpTable *table, Stream *s, const void *args);

enum { CPU_FACTORS = 4 };

/* An op, or a copy; zeros: from is NULL. Factors that its tensors point at are kept with it. */
typedef struct CpuNode {
    struct CpuNode *next;
    CpuOp *give;
    void *to;
    const void *from;
    int64_t bytes;
    Tensor factors[CPU_FACTORS];
    int factor_count;
    _Alignas(16) char kept[];
} CpuNode;

struct DeviceGraph {
    CpuNode *first, **last;
    int64_t count;
};

/* What the device of this thread captures, NULL: nothing; and what it is underneath. */
static _Thread_local DeviceGraph *cpu_capture;
static _Thread_local const OpTable *cpu_ops;
static _Thread_local const DeviceBackend *cpu_backend_below;
static _Thread_local DeviceBackend cpu_backend_above;

static inline CpuNode *cpu_node(int64_t args)
{
    CpuNode *n = calloc(1, sizeof *n + (size_t)args);
    *cpu_capture->last = n;
    cpu_capture->last = &n->next;
    cpu_capture->count++;
    return n;
}

static inline void cpu_keep_factors(CpuNode *n, Tensor *t)
{
    if (!t->scale) return;
    ASSERT(n->factor_count < CPU_FACTORS);
    Tensor *own = &n->factors[n->factor_count++];
    *own = *t->scale;
    t->scale = own;
}

#define S(type, name)
#define T(name, dims) cpu_keep_factors(n, &kept->name);
#define OP(name, flop, args)                                                                    \
    static Err cpu_call_##name(const OpTable *table, Stream *s, const void *a)                  \
    {                                                                                           \
        return table->name(s, a);                                                               \
    }                                                                                           \
    static Err cpu_take_##name(Stream *s, const name##_args *a)                                 \
    {                                                                                           \
        if (!cpu_capture) return cpu_ops->name(s, a);                                           \
        CpuNode *n = cpu_node(sizeof *a);                                                       \
        name##_args *kept = memcpy(n->kept, a, sizeof *a);                                      \
        n->give = cpu_call_##name;                                                              \
        args;                                                                                   \
        return ERR_OK;                                                                          \
    }
#include "device/ops.def"
#undef OP
#undef T
#undef S

static const OpTable cpu_taking_ops = {
#define OP(name, flop, args) .name = cpu_take_##name,
#include "device/ops.def"
#undef OP
};

static inline Err cpu_take_copy(Stream *s, void *to, const void *from, int64_t bytes)
{
    if (!cpu_capture && from) return cpu_backend_below->copy(s, to, from, bytes);
    if (!cpu_capture) return cpu_backend_below->zero(s, to, bytes);
    CpuNode *n = cpu_node(0);
    n->to = to, n->from = from, n->bytes = bytes;
    return ERR_OK;
}

static inline Err cpu_take_zero(Stream *s, void *to, int64_t bytes) { return cpu_take_copy(s, to, NULL, bytes); }

static inline Err cpu_record_begin(Stream *s)
{
    (void)s;
    ASSERT(!cpu_capture);
    cpu_capture = calloc(1, sizeof *cpu_capture);
    cpu_capture->last = &cpu_capture->first;
    return ERR_OK;
}

static inline void cpu_graph_free(DeviceGraph *g)
{
    for (CpuNode *n = g->first, *next; n; n = next) next = n->next, free(n);
    free(g);
}

static inline Err cpu_record_end(Stream *s, DeviceGraph **out, int64_t *launches)
{
    (void)s;
    DeviceGraph *g = cpu_capture;
    cpu_capture = NULL;
    *launches = g->count;
    *out = g->count ? g : NULL;
    if (!g->count) cpu_graph_free(g);
    return ERR_OK;
}

static inline Err cpu_replay(Stream *s, DeviceGraph *g)
{
    ASSERT(!cpu_capture);
    for (const CpuNode *n = g->first; n; n = n->next) {
        if (n->give) TRY(n->give(cpu_ops, s, n->kept));
        else TRY(cpu_take_copy(s, n->to, n->from, n->bytes));
    }
    return ERR_OK;
}

/* From now on the device of this thread, which is one of the CPU, has graphs. */
static inline void cpu_graphs_attach(Device *dev)
{
    cpu_capture = NULL;
    cpu_ops = dev->ops;
    cpu_backend_below = dev->backend;
    cpu_backend_above = *dev->backend;
    cpu_backend_above.copy = cpu_take_copy;
    cpu_backend_above.zero = cpu_take_zero;
    cpu_backend_above.record_begin = cpu_record_begin;
    cpu_backend_above.record_end = cpu_record_end;
    cpu_backend_above.replay = cpu_replay;
    cpu_backend_above.graph_free = cpu_graph_free;
    dev->ops = &cpu_taking_ops;
    dev->backend = &cpu_backend_above;
}

/* Before a rank's first step, as TinyRun.before: its steps will be recorded. */
static inline Err cpu_graphs_of_steps(Trainer *t, void *user)
{
    (void)user;
    cpu_graphs_attach(&t->device);
    t->memory.setup.frozen = false;
    const Err err = executor_use_graphs(&t->executor, &t->parts.step.rank[t->world->pp_rank], &t->memory.setup);
    setup_freeze(&t->memory.setup);
    return err;
}

#endif
