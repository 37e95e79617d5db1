/*
 * Rules of a valid schedule. schedule_make checks all that it makes; tests break schedules and look for the reason. The
 * first mistake that is found is reported, with rank, position in the list, unit and stage.
 *
 * Errors: ERR_INTERNAL, a generator or a pass is wrong; ERR_MEMORY.
 */
#ifndef MEGATRAIN_PIPELINE_CHECK_H
#define MEGATRAIN_PIPELINE_CHECK_H

#include "pipeline/schedule.h"

/*
 * Checks computes and the end of a step, before or after lowering. Every unit passes every stage of one replica once,
 * with forward, dgrad and wgrad in that order, on the stage's own rank. Pairs are a forward and a backward. If a
 * micro-batch passes in slices, a stage takes its forwards in ascending order and its input halves in descending order,
 * and no other micro-batch's come between. F, B and I read the version that the schedule promises. REDUCE and UPDATE
 * come neither early nor late.
 */
Err check_compute(const Schedule *s);

/*
 * Checks messages and buffers, after lowering. Every message has both sides, behind its producer and before its
 * consumer. Groups hold nothing else. Every buffer is written before it is read, and read before it is written again.
 */
Err check_messages(const Schedule *s);

/*
 * Runs the program with blocking groups, as one communication stream a rank would: a group ends when each of its
 * messages has met its other side, and messages between the same two ranks meet in order. Fails if two that meet
 * differ, or if ranks wait for each other.
 */
Err check_rendezvous(const Schedule *s);

/* Checks that no rank holds more than s->cap units, if there is a cap. */
Err check_cap(const Schedule *s);

/* Version of the weights, counted in updates, that F, B and I of a unit must read. */
int check_version(const Schedule *s, int stage, int unit);

#endif
