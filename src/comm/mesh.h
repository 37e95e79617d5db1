/*
 * A connection between every two ranks, for data (inside comm/ only). Each process listens on one port, where only
 * ranks with the run's secret get in (boot/greet.h): a rank calls those below it, and is called by those above.
 * Whoever else connects, says anything or nothing, costs a slot for some seconds.
 */
#ifndef MEGATRAIN_COMM_MESH_H
#define MEGATRAIN_COMM_MESH_H

#include "base/err.h"

enum { MESH_ADDRESS_BYTES = 64 };

typedef struct Mesh Mesh;

/* Address at which a rank listens: a numeric address of this host, and the first free port of MESH_PORTS: port, port +
 * step, ..., where step is the number of ranks of the host. Port 0: any. */
enum { MESH_PORTS = 16 };
typedef struct {
    const char *address;
    int port, step;
} MeshPlace;

/* Who may connect: the ranks with this secret (boot/secret.h) of this start of a job (store_start). */
typedef struct {
    const char *secret, *start;
} MeshKey;

/* ERR_CONFIG: the address is not numeric, or not of this host; a port would be above 65535. ERR_RENDEZVOUS:
 * all of its ports are taken. */
Err mesh_open(int rank, int size, MeshPlace place, MeshKey key, Mesh **out);
/* Address at which the others reach this rank: "10.1.2.3 40123", the rest of it zeros. */
void mesh_address(const Mesh *m, char out[MESH_ADDRESS_BYTES]);
/* Collective. fds[p]: the connection to rank p, non-blocking, which the caller owns; -1 for this rank and after an
 * error. ERR_RENDEZVOUS: not connected with a rank within timeout_s; no file descriptor is left, at once. */
Err mesh_connect(Mesh *m, const char (*addresses)[MESH_ADDRESS_BYTES], double timeout_s, int *fds);
void mesh_close(Mesh *m); /* NULL is allowed */

#endif
