/* Finding rank 0 (inside boot/ only): the greeting of one connection. */
#ifndef MEGATRAIN_BOOT_MEET_H
#define MEGATRAIN_BOOT_MEET_H

#include "boot/greet.h"
#include "boot/host.h"
#include "boot/store.h"

typedef struct {
    Link link;       /* has been greeted and welcomed */
    Welcome welcome; /* who rank 0 is */
    GreetKey key;
    char addr[256];
    int port;
} Meeting;

/* Rank 0 calls this: listens, starts the host and connects to it. */
Err meet_as_host(const Boot *boot, const Hello *hello, double deadline, Host **host, Meeting *out);
/* The others call this: looks for rank 0 until the deadline. */
Err meet_host(const Boot *boot, const Hello *hello, double timeout_s, double deadline, Meeting *out);
/* Error of a rank whose start is over, as rank 0 says in `why`. A worker says nothing: its supervisor starts the
 * next. */
Err meet_outdated(const Boot *boot, const char *why);
/* Makes one more connection to where `m` leads. */
Err meet_again(const Meeting *m, const Hello *hello, double deadline, Link *out);

/* The host that an open Store met, and the greeting: for the watch connection, which leads to the same host. */
const Meeting *store_meeting(const Store *s);
const Hello *store_hello(const Store *s);
struct Supervised *store_supervised(const Store *s); /* as in Boot */

#endif
