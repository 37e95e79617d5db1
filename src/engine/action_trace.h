/*
 * How the actions of a list appear in a trace (base/trace.h): a span each, with what the action is as arguments.
 *
 *   forward, backward, dgrad, wgrad   kind, stage, replica, microbatch, version
 *   wait        for the message that a compute needs, before its span; none where there is no message
 *   messages    a group begins; in it a span for each send and receive: kind, stage, replica, microbatch, peer
 *   reduce ...  the end of a step
 *
 * An arrow goes from each send to the end of the wait for it on the other rank.
 */
#ifndef MEGATRAIN_ENGINE_ACTION_TRACE_H
#define MEGATRAIN_ENGINE_ACTION_TRACE_H

#include "pipeline/schedule.h"

/* "forward", "messages", ...: the span of an action; a literal. */
const char *action_span(ActionKind kind);

/* The span of an action; trace_end ends it. */
void trace_action(const Action *a);

/* A message of the group whose span is open. run: how many lists this rank has run, the same on both ends. */
void trace_message(const Action *a, int64_t run);

/* The wait for the input of unit `unit` of compute `a`, and its end. */
void trace_wait(const Action *a, int unit);
void trace_arrived(const Action *a, int unit, int64_t run);

#endif
