/*
 * What a valid schedule is. schedule_make checks all that it makes; tests break schedules and look for the
 * reason. The first thing found is reported, with rank, place in the list, unit and stage.
 *
 * Errors: ERR_INTERNAL, a generator or a pass is wrong; ERR_MEMORY.
 */
#ifndef MEGATRAIN_PIPELINE_CHECK_H
#define MEGATRAIN_PIPELINE_CHECK_H

#include "pipeline/schedule.h"

/*
 * Computes and the end of a step, before or after lowering: every unit passes every stage of one replica once,
 * forward, dgrad, wgrad in that order, on the stage's own rank; pairs are a forward and a backward;
 * of a micro-batch that passes in slices a stage's forwards come in ascending order, its input halves in descending
 * order and none of another micro-batch between them;
 * F, B and I read the version that the schedule promises; REDUCE and UPDATE come neither early nor late.
 */
Err check_compute(const Schedule *s);

/*
 * Messages and buffers, after lowering: every message has both sides, behind its producer and before its
 * consumer; groups hold nothing else; every buffer is written before it is read and read before it is written
 * again.
 */
Err check_messages(const Schedule *s);

/*
 * Runs the program with blocking groups, as one communication stream a rank would: a group ends when each of
 * its messages has met its other side, messages between the same two ranks meet in order. Fails if two that
 * meet differ, or if ranks wait for each other.
 */
Err check_rendezvous(const Schedule *s);

/* At most s->cap units held on any rank, if there is a cap. */
Err check_cap(const Schedule *s);

/* Version of the weights, counted in updates, that F, B and I of a unit must read. */
int check_version(const Schedule *s, int stage, int unit);

#endif
