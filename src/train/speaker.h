/*
 * Chooses the rank that says the run's error if the rank that it is about cannot: the lowest that is left. Ranks that
 * do not hear of each other any more agree by a file in the run's folder, which only one of them can make. The file's
 * name is a hash of the start's key, so that another start in the folder neither takes the word from this one nor gives
 * it back.
 */
#ifndef MEGATRAIN_TRAIN_SPEAKER_H
#define MEGATRAIN_TRAIN_SPEAKER_H

#include <limits.h>
#include <stdbool.h>
#include <time.h>

typedef struct {
    char path[PATH_MAX];   /* "": the folder's name is too long */
    struct timespec since; /* an older file is of an earlier start of the job; 0: there is none */
} Speaker;

/* secret, start: what the ranks of this start have in common, and no other start has. Takes away the files that starts
 * of long ago have left. */
void speaker_open(Speaker *s, const char *folder, const char *secret, const char *start);
/* The same before the ranks have met: job is what other starts may have in common with this one, one after the other,
 * so that the age of a file decides. */
void speaker_open_job(Speaker *s, const char *folder, const char *secret, const char *job);

/* Takes away what earlier starts have left, whatever its age: nobody of theirs is there. */
void speaker_forget(const char *folder);

/* turn: 0 for the rank that is to speak if it lives, 1 for the next, ... Waits for those before it, 3 s at most.
 * True: it is this rank. Where the folder cannot be written turn 0 speaks, and nobody in its place. */
bool speaker_is_me(const Speaker *s, int turn);

#endif
