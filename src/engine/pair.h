/*
 * The halves of a pair of actions (pipeline/schedule.h, ACTION_PAIR) in turn: the forward of one micro-batch and the
 * backward of another, so that rows of the one travel to their experts while the other computes.
 *
 *   turn       1                   2              3              4          5                        6
 *   forward    attention, router                  experts                   sum, attention, router
 *   backward                       norm, router                  experts                             attention ...
 *   under way                      F to experts   B to experts   F back     B back                   F to experts
 *
 * A half runs until it has to wait for rows. Before it waits, the other half goes on (RowMoves.other_half, which
 * layer/moe_dispatch.c calls), and stops likewise. So all that layers issue is in one order, which follows from the two
 * stages and not from time: the ranks of a group, which run the same two stages, issue their calls in one order, and a
 * device has one stream of work.
 *
 * Each half has a context: its stage, slot and batch, its own scratch and buffers of saves that are offloaded, since
 * both have temporaries at once, and its own event, since both have a call under way. The forward is a coroutine, the
 * backward runs where the executor does.
 * Neither writes what the other reads: a forward reads weights, a backward adds to gradients.
 */
#ifndef MEGATRAIN_ENGINE_PAIR_H
#define MEGATRAIN_ENGINE_PAIR_H

#include "base/coroutine.h"
#include "layer/layer.h"
#include "pipeline/schedule.h"

/* Computes one action. */
typedef Err PairHalf(void *user, const Action *a);

typedef struct {
    Coroutine *forward; /* NULL: pairs are not run in turn, and there is nothing else here */
    Arena *scratch;     /* scratch of forwards in training; others use the executor's */
    Offload *offload;   /* likewise; or NULL */
    Event moved, known; /* events of their rows (RowMoves) */
    Ctx ctx;            /* theirs */
    /* while a pair runs */
    bool running;
    const Action *action; /* its forward, behind which stands its backward */
    PairHalf *half;
    void *user;
    Err err; /* the forward's outcome */
} Pair;

/* Owns a stack: pair_close. ERR_MEMORY. */
Err pair_open(Pair *p, Arena *scratch, Offload *offload);
void pair_close(Pair *p);

/* The context of a forward in training, like `c` but for what each half has of its own. Also for forwards outside
 * pairs: so what they take of which arena does not depend on the place in the list. */
Ctx *pair_forward_context(Pair *p, const Ctx *c);

/*
 * half(user, &a[0]), the forward, and half(user, &a[1]), the backward, in turn; `backward` is the context of the
 * second. The error of the first that fails; the other is given up where it stands.
 */
Err pair_run(Pair *p, Ctx *backward, const Action *a, PairHalf *half, void *user);

#endif
