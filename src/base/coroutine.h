/*
 * A function with a stack of its own that can stop in the middle and go on later:
 *
 *   coroutine_open(8 << 20, &c);
 *   coroutine_start(c, work, user);
 *   while (coroutine_resume(c)) other_work();      work(user), from one coroutine_yield(c) to the next
 *   coroutine_close(c);
 *
 * All of it is one thread: nothing runs at the same time, and the program says who runs when. What belongs to a thread
 * (the error message, open spans of a trace) is therefore shared by both sides.
 */
#ifndef MEGATRAIN_BASE_COROUTINE_H
#define MEGATRAIN_BASE_COROUTINE_H

#include <stdint.h>

#include "base/err.h"

typedef struct Coroutine Coroutine;

/* stack_bytes of address space, of which pages count once they are used; what runs over its end faults. ERR_MEMORY. */
Err coroutine_open(int64_t stack_bytes, Coroutine **out);
/* NULL is fine. What has not ended is given up where it stands. */
void coroutine_close(Coroutine *c);

/* The next resume calls run(user). What ran before and has not ended is given up. */
void coroutine_start(Coroutine *c, void (*run)(void *user), void *user);
/* Goes on until it yields or ends. false: it has ended, now or before. By the thread that started it. */
bool coroutine_resume(Coroutine *c);
bool coroutine_ended(const Coroutine *c);
/* Back to who resumed it. From inside alone (ASSERT). */
void coroutine_yield(Coroutine *c);

#endif
