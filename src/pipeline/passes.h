/*
 * Passes that turn the compute lists of a generator into programs that ranks can run, in this order. schedule_make
 * calls them; ERR_MEMORY is the only way in which they fail on lists that check_compute accepts.
 */
#ifndef MEGATRAIN_PIPELINE_PASSES_H
#define MEGATRAIN_PIPELINE_PASSES_H

#include "pipeline/schedule.h"

/* Every B becomes I W: the gradient travels on before the wgrad. */
Err pass_split(Schedule *s);

/* Adds what ends a step (synchronous), or REDUCE and UPDATE after each batch and the versions that are read. */
Err pass_sync(Schedule *s);

/*
 * Adds messages. A simulation with the costs that stages are expected to have stamps each message with the end of its
 * producer. On each rank computes (by end) and messages (by stamp) are merged; at equal times computes come first, and
 * messages of one stamp form one group, in the order (payload, replica, stage, unit) on both sides.
 *
 * So a receive stands before the compute that runs when its message is sent, not behind it: a rank that computes
 * cannot begin to receive, and until it does the sender's group and all that follow it wait.
 *
 * Why no execution can deadlock, whatever the actions really take: both ends of a message carry the same
 * stamp; its producer ends with it, its consumer ends strictly later. So along every list and across every
 * message the key (time, compute before message) never falls, and equal messages of a rank sit in one group: the
 * order is acyclic.
 */
Err pass_lower(Schedule *s);

/* Gives out boundary buffers (schedule.h): the one that has rested longest is used first. */
Err pass_buffers(Schedule *s);

#endif
