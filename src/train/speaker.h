/*
 * Which rank says the run's error if the rank that it is about cannot: the lowest that is left. Ranks that do not hear
 * of each other any more agree by a file in the run's folder, which only one of them can make.
 */
#ifndef MEGATRAIN_TRAIN_SPEAKER_H
#define MEGATRAIN_TRAIN_SPEAKER_H

#include <stdbool.h>

/* To be called before the ranks meet: removes what an earlier start has left. */
void speaker_clear(const char *folder);

/* turn: 0 for the rank that is to speak if it lives, 1 for the next, ... Waits for those before it, 3 s at most.
 * True: it is this rank. Where the folder cannot be written turn 0 speaks, and nobody in its place. */
bool speaker_is_me(const char *folder, int turn);

#endif
