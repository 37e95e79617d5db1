/* See greet.h. The hash is BLAKE2b with a key, of libsodium, which also compares proofs in constant time. */
#include "boot/greet.h"

#include <sodium.h>
#include <string.h>
#include <unistd.h>

enum { CALLER, HOST };

/* The word that a proof belongs to. */
typedef enum { PROOF_ANSWER = 1, PROOF_HELLO, PROOF_WELCOME } Proof;

typedef struct {
    Hello hello;
    uint8_t proof[GREET_PROOF_BYTES];
} ProvenHello;

typedef struct {
    Welcome welcome;
    uint8_t proof[GREET_PROOF_BYTES];
} ProvenWelcome;

GreetKey greet_key(const char *secret, const char *job)
{
    GreetKey short_secret, key;
    const size_t n = sizeof key.bytes;
    crypto_generichash(short_secret.bytes, n, (const uint8_t *)secret, strlen(secret), NULL, 0);
    crypto_generichash(key.bytes, n, (const uint8_t *)job, strlen(job), short_secret.bytes, n);
    return key;
}

uint64_t greet_name(const GreetKey *key, const char *label)
{
    uint8_t hash[GREET_KEY_BYTES];
    uint64_t name;
    crypto_generichash(hash, sizeof hash, (const uint8_t *)label, strlen(label), key->bytes, sizeof key->bytes);
    memcpy(&name, hash, sizeof name);
    return name;
}

uint64_t greet_random(void)
{
    uint64_t x;
    randombytes_buf(&x, sizeof x);
    return x;
}

/* (what another process wrote need not end) */
static void make_printable(char *text, size_t size)
{
    text[size - 1] = 0;
    net_make_printable(text);
}

Hello greet_hello(const Boot *boot)
{
    Hello hello = { .process = greet_random(),
                    .rank = (uint32_t)boot->rank,
                    .pid = (uint32_t)getpid(),
                    .attempt = (uint32_t)boot->attempt };
    net_host_name(hello.host);
    make_printable(hello.host, sizeof hello.host);
    return hello;
}

/* `welcome`: of a PROOF_WELCOME. */
static void prove(const Greeting *g, Proof what, const Welcome *welcome, uint8_t proof[GREET_PROOF_BYTES])
{
    const uint32_t head[] = { (uint32_t)what, GREET_VERSION, g->port };
    crypto_generichash_state s;
    crypto_generichash_init(&s, g->key.bytes, sizeof g->key.bytes, GREET_PROOF_BYTES);
    crypto_generichash_update(&s, (const uint8_t *)head, sizeof head);
    crypto_generichash_update(&s, g->numbers[0], sizeof g->numbers);
    if (what != PROOF_ANSWER) crypto_generichash_update(&s, (const uint8_t *)&g->hello, sizeof g->hello);
    if (welcome) crypto_generichash_update(&s, (const uint8_t *)welcome, sizeof *welcome);
    crypto_generichash_final(&s, proof, GREET_PROOF_BYTES);
}

static bool proven(const Greeting *g, Proof what, const Welcome *welcome, const uint8_t proof[GREET_PROOF_BYTES])
{
    uint8_t right[GREET_PROOF_BYTES];
    prove(g, what, welcome, right);
    return sodium_memcmp(right, proof, sizeof right) == 0;
}

/* ---- what both ends do with a call ---- */

static Call draw_call(uint8_t number[GREET_NUMBER_BYTES])
{
    Call call = { .magic = GREET_MAGIC, .version = GREET_VERSION };
    randombytes_buf(number, GREET_NUMBER_BYTES);
    memcpy(call.number, number, sizeof call.number);
    return call;
}

/* The first bytes of `l` are a call, as far as they go. */
static GreetStep look_at_call(const Link *l)
{
    const uint64_t magic = GREET_MAGIC;
    Call call;
    if (!l->in_size) return GREET_MORE;
    if (memcmp(l->in, &magic, l->in_size < sizeof magic ? l->in_size : sizeof magic)) return GREET_STRANGER;
    if (l->in_size < sizeof call) return GREET_MORE;
    memcpy(&call, l->in, sizeof call);
    return call.version == GREET_VERSION ? GREET_DONE : GREET_OTHER_VERSION;
}

/* ---- the caller ---- */

bool greet_call(Greeting *g, Link *l, const GreetKey *key, const Hello *hello, int port)
{
    *g = (Greeting){ .key = *key, .port = (uint32_t)port, .hello = *hello };
    const Call call = draw_call(g->numbers[CALLER]);
    link_limit(l, sizeof(Answer));
    return link_put_raw(l, &call, sizeof call);
}

static GreetStep take_answer(Greeting *g, Link *l)
{
    Answer answer;
    ProvenHello own = { .hello = g->hello };
    const GreetStep seen = look_at_call(l);
    if (seen != GREET_DONE) return seen;
    if (l->in_size < sizeof answer) return GREET_MORE;
    memcpy(&answer, l->in, sizeof answer);
    link_drop(l, sizeof answer);
    memcpy(g->numbers[HOST], answer.call.number, sizeof g->numbers[HOST]);
    if (!proven(g, PROOF_ANSWER, NULL, answer.proof)) return GREET_OTHER_KEY;
    prove(g, PROOF_HELLO, NULL, own.proof);
    link_limit(l, sizeof(ProvenWelcome));
    g->called = true;
    return link_put_raw(l, &own, sizeof own) ? GREET_MORE : GREET_STRANGER;
}

GreetStep greet_caller(Greeting *g, Link *l, Welcome *out)
{
    ProvenWelcome w;
    if (!g->called) return take_answer(g, l);
    if (l->in_size < sizeof w) return GREET_MORE;
    memcpy(&w, l->in, sizeof w);
    link_drop(l, sizeof w);
    if (!proven(g, PROOF_WELCOME, &w.welcome, w.proof)) return GREET_OTHER_KEY;
    *out = w.welcome;
    make_printable(out->host, sizeof out->host);
    make_printable(out->text, sizeof out->text);
    return GREET_DONE;
}

GreetStep greet_until(Greeting *g, Link *l, Welcome *out, double deadline)
{
    for (;;) {
        if (!link_flush_until(l, deadline)) return GREET_STRANGER;
        const size_t before = l->in_size;
        if (!link_wait_bytes(l, before + 1, deadline)) return GREET_STRANGER;
        const GreetStep step = greet_caller(g, l, out);
        if (step != GREET_MORE) return step;
    }
}

/* ---- the host ---- */

void greet_expect(Greeting *g, Link *l, const GreetKey *key, int port)
{
    *g = (Greeting){ .key = *key, .port = (uint32_t)port };
    link_limit(l, sizeof(Call));
}

/* Another version hears which one this is, and that is all. */
static GreetStep take_call(Greeting *g, Link *l)
{
    Call call;
    Answer answer;
    const GreetStep seen = look_at_call(l);
    if (seen == GREET_MORE || seen == GREET_STRANGER) return seen;
    memcpy(&call, l->in, sizeof call);
    link_drop(l, sizeof call);
    memcpy(g->numbers[CALLER], call.number, sizeof g->numbers[CALLER]);
    answer.call = draw_call(g->numbers[HOST]);
    prove(g, PROOF_ANSWER, NULL, answer.proof);
    link_limit(l, sizeof(ProvenHello));
    g->called = true;
    if (!link_put_raw(l, &answer, sizeof answer)) return GREET_STRANGER;
    return seen == GREET_DONE ? GREET_MORE : seen;
}

GreetStep greet_host(Greeting *g, Link *l)
{
    ProvenHello h;
    if (!g->called) return take_call(g, l);
    if (l->in_size < sizeof h) return GREET_MORE;
    memcpy(&h, l->in, sizeof h);
    link_drop(l, sizeof h);
    g->hello = h.hello;
    if (!proven(g, PROOF_HELLO, NULL, h.proof)) return GREET_OTHER_KEY;
    return GREET_DONE;
}

Hello greet_introduced(const Greeting *g)
{
    Hello hello = g->hello;
    make_printable(hello.host, sizeof hello.host);
    return hello;
}

bool greet_welcome(const Greeting *g, Link *l, const Welcome *w)
{
    ProvenWelcome own = { .welcome = *w };
    prove(g, PROOF_WELCOME, w, own.proof);
    return link_put_raw(l, &own, sizeof own);
}
