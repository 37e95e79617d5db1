/*
 * Who hears of a communicator's calls, and how messages are called in a verdict when they do not end. A communicator
 * tells its observer and knows no more of it. The watch (watch.h) is an observer, which tells rank 0.
 */
#ifndef MEGATRAIN_BOOT_OBSERVER_H
#define MEGATRAIN_BOOT_OBSERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Kinds of messages between two ranks, for those who read a verdict. */
typedef enum {
    MESSAGE_PLAIN,
    MESSAGE_ACTIVATION,
    MESSAGE_GRADIENT,
    MESSAGE_KEYS,
    MESSAGE_KEY_SUMS, /* their gradients, summed on the way */
    MESSAGE_SUM,      /* a part of a tensor that is summed over ranks */
    MESSAGE_ROWS,     /* a rank's rows, for a product of all of them */
    MESSAGE_STATE,    /* of a recurrence, and the last rows that its convolution reads; or their gradients */
    MESSAGE_TAIL,
    MESSAGE_KIND_COUNT
} MessageKind;

typedef struct {
    uint16_t kind;  /* a MessageKind */
    uint16_t stage; /* the stage; for keys and their gradients the part of the sequence */
    uint32_t microbatch;
} MessageLabel;

/* "activation of micro-batch 5 for stage 2"; "keys and values of part 3"; "part of a sum"; "message" for a
 * plain one. */
void message_text(MessageLabel label, char *out, size_t size);

enum { OBSERVER_NOBODY = -1 };

/*
 * Any thread may tell it, at no cost to speak of. Collectives are numbered from 1, the same on all members. An exchange
 * is told as number 0, since each member has its own number of them.
 */
typedef struct {
    void *who; /* NULL: nobody hears of it */
    void (*issued)(void *who, uint64_t number);
    void (*completed)(void *who, uint64_t number);
    /* The call that runs waits for this world rank, or no longer (OBSERVER_NOBODY). what: the message of an exchange
     * that the rank is to take (taken), or else to send; NULL: the call is a collective. */
    void (*waits)(void *who, int rank, bool taken, const MessageLabel *what);
} CommObserver;

static inline void observer_issued(CommObserver o, uint64_t number)
{
    if (o.who) o.issued(o.who, number);
}
static inline void observer_completed(CommObserver o, uint64_t number)
{
    if (o.who) o.completed(o.who, number);
}
static inline void observer_waits(CommObserver o, int rank)
{
    if (o.who) o.waits(o.who, rank, false, NULL);
}
static inline void observer_waits_message(CommObserver o, int rank, bool taken, MessageLabel what)
{
    if (o.who) o.waits(o.who, rank, taken, &what);
}

#endif
