/*
 * How rows of tokens get to the ranks that hold their experts, declared once: the choices of moe.dispatcher, the
 * layers' kinds and their functions (layer/moe_dispatch.c, moe_node.c), and what a rule of the configuration goes by.
 * Where one rank has all experts rows stay where they are, whichever is chosen.
 */
#ifndef MEGATRAIN_BASE_DISPATCHER_H
#define MEGATRAIN_BASE_DISPATCHER_H

#include <stdbool.h>

/* ROW(NAME, "in configurations", numbers, functions); numbers: it numbers the choices of other ranks' tokens, too,
 * which must then be below 2^31 */
#define DISPATCHERS(ROW)                                        \
    ROW(ALLTOALL, "alltoall", false, moe_dispatcher_alltoall)   \
    ROW(ALLGATHER, "allgather", true, moe_dispatcher_allgather) \
    ROW(NODE, "node", true, moe_dispatcher_node)

#define DISPATCHER_KIND(name, text, numbers, functions) DISPATCH_##name,
typedef enum { DISPATCHERS(DISPATCHER_KIND) } DispatcherKind;
#undef DISPATCHER_KIND

static inline bool dispatcher_numbers(DispatcherKind d)
{
#define DISPATCHER_NUMBERS(name, text, numbers, functions) numbers,
    static const bool all[] = { DISPATCHERS(DISPATCHER_NUMBERS) };
#undef DISPATCHER_NUMBERS
    return all[d];
}

static inline const char *dispatcher_text(DispatcherKind d)
{
#define DISPATCHER_TEXT(name, text, numbers, functions) text,
    static const char *const all[] = { DISPATCHERS(DISPATCHER_TEXT) };
#undef DISPATCHER_TEXT
    return all[d];
}

#endif
