// How the processes of a run find each other: rank 0 listens, the others come and say who they are. Only
// processes of the same job, program and configuration are let in.
#ifndef TRAINER_RANK_JOIN_H
#define TRAINER_RANK_JOIN_H

#include <stdint.h>

#include "base/error.h"
#include "trainer/rank_place.h"
#include "trainer/rank_wire.h"

enum rank_message {
    MESSAGE_HELLO = 1, // to rank 0: struct rank_hello
    MESSAGE_WELCOME,   // from rank 0: its own
    MESSAGE_REFUSED,   // from rank 0: text
    MESSAGE_START,     // from rank 0: all have come
    MESSAGE_HEARTBEAT, // both ways: struct heartbeat of rank_control.c
    MESSAGE_SIGNAL,    // both ways: int32_t, a signal's number
    MESSAGE_FAILED,    // to rank 0: int32_t status, then text: the sender can not go on
    MESSAGE_END,       // from rank 0: int32_t status, then text; status 0: a rank is dead
    MESSAGE_LEAVE,     // both ways: the sender closes in good order
    MESSAGE_BYTES,     // from rank 0: for ranks_tell
};

enum { RANK_HOSTS = 5 };

// Where rank 0 can be reached; it may have to be tried out.
struct rank_address {
    char hosts[RANK_HOSTS][256];
    int32_t host_count, port, ports;
    uint64_t token[2]; // those of another job have another one
};

struct rank_identity {
    char program[128]; // version and build
    uint64_t config;   // hash of all keys
    double timeout;    // seconds for all to come
};

struct rank_peer {
    struct wire wire;
    char name[160]; // "rank 2 (node3, process 1234)"
};

// The address as far as the launcher says it; enough for all but rank 0 under MPI, which is told it.
// port: parallel.port.
int rank_join_address(const struct rank_place *place, int64_t port, struct rank_address *address,
                      struct error *err);
// Rank 0: starts to listen, completes the address. told: MPI tells it to the others, so that it may have what the
// launcher does not say: this machine's addresses, a random token.
int rank_join_listen(const struct rank_place *place, bool told, struct rank_address *address,
                     int *listener, struct error *err);
// Rank 0: waits for all others; peers: [size], that of rank 0 stays unused. Closes the listener.
// On failure everybody who has come is told the text.
int rank_join_gather(const struct rank_place *place, const struct rank_address *address,
                     const struct rank_identity *identity, int listener, struct rank_peer *peers,
                     struct error *err);
// Others: peer is rank 0. -1 with an empty text: rank 0 has refused, and says why itself.
int rank_join_connect(const struct rank_place *place, const struct rank_address *address,
                      const struct rank_identity *identity, struct rank_peer *peer,
                      struct error *err);

#endif
