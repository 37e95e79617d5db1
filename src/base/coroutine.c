/*
 * See coroutine.h. Stacks are switched by libc (ucontext). AddressSanitizer is told of each switch: it has to know
 * which stack it is on.
 */
#include "base/coroutine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* A stack for AddressSanitizer: where it lies, and what is kept of it while another is used. */
typedef struct {
    const void *bottom;
    size_t size_bytes;
    void *kept;
} KnownStack;

typedef enum { ENDED, STOPPED, RUNNING } State;

struct Coroutine {
    ucontext_t own, caller;
    KnownStack own_stack, caller_stack;
    void (*run)(void *user);
    void *user;
    State state;
    char *mapped; /* a page that faults, then the stack, which grows towards it */
    size_t mapped_bytes;
};

/* Before a switch; from NULL: that stack is left for good. After it, and what was learned of where it came from. */
#ifdef __SANITIZE_ADDRESS__
static void leave(KnownStack *from, const KnownStack *to)
{
    __sanitizer_start_switch_fiber(from ? &from->kept : NULL, to->bottom, to->size_bytes);
}

static void arrive(KnownStack *on, KnownStack *from)
{
    __sanitizer_finish_switch_fiber(on->kept, from ? &from->bottom : NULL, from ? &from->size_bytes : NULL);
}

/* Clears the marks that a coroutine, given up where it stood, has left around the variables of its functions. */
static void forget_frames(Coroutine *c) { __asan_unpoison_memory_region(c->mapped, c->mapped_bytes); }
#else
static void leave(KnownStack *from, const KnownStack *to) { (void)from, (void)to; }
static void arrive(KnownStack *on, KnownStack *from) { (void)on, (void)from; }
static void forget_frames(Coroutine *c) { (void)c; }
#endif

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

Err coroutine_open(int64_t stack_bytes, Coroutine **out)
{
    const size_t page = page_bytes(), bytes = page + ((size_t)stack_bytes + page - 1) / page * page;
    Coroutine *c = calloc(1, sizeof *c);
    char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!c || mapped == MAP_FAILED || mprotect(mapped, page, PROT_NONE)) {
        err_set(ERR_MEMORY, "no memory for a stack of %lld bytes: %s", (long long)stack_bytes, strerror(errno));
        if (mapped != MAP_FAILED) munmap(mapped, bytes);
        free(c);
        return ERR_MEMORY;
    }
    c->mapped = mapped;
    c->mapped_bytes = bytes;
    *out = c;
    return ERR_OK;
}

void coroutine_close(Coroutine *c)
{
    if (!c) return;
    forget_frames(c);
    munmap(c->mapped, c->mapped_bytes);
    free(c);
}

/* The first function on the stack. makecontext() passes integers alone, so a pointer comes in halves. */
static void enter(unsigned high, unsigned low)
{
    Coroutine *c = (Coroutine *)((uintptr_t)high << 16 << 16 | low);
    arrive(&c->own_stack, &c->caller_stack);
    c->run(c->user);
    c->state = ENDED;
    leave(NULL, &c->caller_stack);
    setcontext(&c->caller);
    ASSERT(!"a stack cannot be left");
}

void coroutine_start(Coroutine *c, void (*run)(void *user), void *user)
{
    const size_t page = page_bytes();
    const uintptr_t self = (uintptr_t)c;
    ASSERT(c->state != RUNNING);
    forget_frames(c);
    c->run = run;
    c->user = user;
    c->state = STOPPED;
    c->own_stack = (KnownStack){ c->mapped + page, c->mapped_bytes - page, NULL };
    getcontext(&c->own);
    c->own.uc_stack.ss_sp = c->mapped + page;
    c->own.uc_stack.ss_size = c->mapped_bytes - page;
    c->own.uc_link = NULL;
    makecontext(&c->own, (void (*)(void))enter, 2, (unsigned)(self >> 16 >> 16), (unsigned)self);
}

bool coroutine_resume(Coroutine *c)
{
    if (c->state == ENDED) return false;
    ASSERT(c->state == STOPPED);
    c->state = RUNNING;
    leave(&c->caller_stack, &c->own_stack);
    swapcontext(&c->caller, &c->own);
    arrive(&c->caller_stack, NULL);
    return c->state != ENDED;
}

bool coroutine_ended(const Coroutine *c) { return c->state == ENDED; }

void coroutine_yield(Coroutine *c)
{
    ASSERT(c->state == RUNNING);
    c->state = STOPPED;
    leave(&c->own_stack, &c->caller_stack);
    swapcontext(&c->own, &c->caller);
    arrive(&c->own_stack, &c->caller_stack);
}
