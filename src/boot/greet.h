/*
 * Who is at the other end of a connection (inside boot/, and for comm/mesh.c). The ranks of a run share a secret
 * (boot/secret.h).
 * Before either end says anything of the run, each shows the other that it has it, over numbers drawn for this
 * connection:
 *
 *   caller -> host   Call     a number
 *   host -> caller   Answer   a number; proof
 *   caller -> host   Hello    role, rank, process; proof
 *   host -> caller   Welcome  taken, or refused and why; proof
 *
 * A proof is a keyed hash of its own place in this list, both numbers, the port that was called and all that was
 * said so far. So none can be played again, turned around, or handed on by a process that listens on another port.
 * Who has no secret hears a number and a hash, and is left. What follows the greeting has no proofs
 * (docs/security.md).
 */
#ifndef MEGATRAIN_BOOT_GREET_H
#define MEGATRAIN_BOOT_GREET_H

#include "boot/boot.h"
#include "boot/link.h"

#define GREET_MAGIC 0x314E49415254474Du /* "MGTRAIN1" as bytes */
enum { GREET_VERSION = 5, GREET_NUMBER_BYTES = 32, GREET_PROOF_BYTES = 32, GREET_KEY_BYTES = 32 };

/* Key that the secret makes of a job: the ranks of another job with the same secret have another key. */
typedef struct {
    uint8_t bytes[GREET_KEY_BYTES];
} GreetKey;

typedef struct {
    uint64_t magic;
    uint32_t version, zero;
    uint8_t number[GREET_NUMBER_BYTES];
} Call;

typedef struct {
    Call call;
    uint8_t proof[GREET_PROOF_BYTES];
} Answer;

typedef enum { ROLE_STORE, ROLE_WATCH, ROLE_DATA } LinkRole;

typedef struct {
    uint64_t process;             /* a random number of this process */
    uint32_t role, rank, to, pid; /* to: the rank that is called */
    uint32_t attempt, zero;       /* number of the rank's worker */
    char host[LINK_HOST_BYTES];
} Hello;

typedef enum {
    WELCOME,
    WELCOME_REFUSED,
    WELCOME_FAILED,  /* the whole start failed; rank 0 says so */
    WELCOME_OUTDATED /* rank 0 has a later worker: the caller's is to end, without a word */
} WelcomeKind;

typedef struct {
    uint64_t process;
    uint32_t kind, pid; /* a WelcomeKind; the host process */
    char host[LINK_HOST_BYTES];
    char text[512]; /* why it refused; printable characters, as in the name */
} Welcome;

typedef enum {
    GREET_MORE, /* more is to come, or to be sent */
    GREET_DONE, /* the host has a proven hello, or the caller a proven welcome */
    GREET_STRANGER,
    GREET_OTHER_VERSION,
    GREET_OTHER_KEY
} GreetStep;

typedef struct {
    GreetKey key;
    uint32_t port;
    uint8_t numbers[2][GREET_NUMBER_BYTES]; /* the caller's number, the host's number */
    Hello hello;
    bool called; /* caller: the answer was right; host: the call was answered */
} Greeting;

GreetKey greet_key(const char *secret, const char *job);
/* A name that only those with the key can know, and that says nothing of the key. label: what it is the name of. */
uint64_t greet_name(const GreetKey *key, const char *label);
Hello greet_hello(const Boot *boot);
uint64_t greet_random(void);

/*
 * How either end greets on a link that was just opened. It begins with greet_call or greet_expect; no byte behind the
 * greeting is read before it is done. Then it calls greet_caller or greet_host whenever something has arrived, as long
 * as that returns GREET_MORE, and sends what waits for sending (link_flush). The host ends with greet_welcome. False:
 * there is no memory.
 */
bool greet_call(Greeting *g, Link *l, const GreetKey *key, const Hello *hello, int port);
GreetStep greet_caller(Greeting *g, Link *l, Welcome *out);
void greet_expect(Greeting *g, Link *l, const GreetKey *key, int port);
GreetStep greet_host(Greeting *g, Link *l);
/* Who the other end is, after GREET_DONE; its name has printable characters alone. */
Hello greet_introduced(const Greeting *g);
bool greet_welcome(const Greeting *g, Link *l, const Welcome *w);

/* The caller's whole greeting, for which this waits. */
GreetStep greet_until(Greeting *g, Link *l, Welcome *out, double deadline);

#endif
