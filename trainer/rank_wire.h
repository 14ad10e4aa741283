// Short messages between two processes over TCP. Nothing here waits: a peer that does not read loses its
// connection instead of holding up the sender.
#ifndef TRAINER_RANK_WIRE_H
#define TRAINER_RANK_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum { WIRE_PAYLOAD = 8192 }; // bytes of a message at most

struct wire_message {
    uint32_t type, size;
    unsigned char payload[WIRE_PAYLOAD];
};

struct wire {
    int fd; // -1: closed
    size_t have;
    struct wire_message in; // being received: `have` bytes of it so far
};

// A socket that listens. loopback: for processes of this machine only. port: 0 chooses one; *port is set.
// -1 with errno: it is taken, or there are no sockets.
int wire_listen(int *port, int loopback);
// A connection to host and port, or -1 with errno when there is none within `seconds`.
int wire_connect(const char *host, int port, double seconds);
// One that has come, or -1.
int wire_accept(int listener);

void wire_open(struct wire *wire, int fd);
void wire_close(struct wire *wire);
// 0, or -1 and the wire is closed.
int wire_send(struct wire *wire, uint32_t type, const void *payload, size_t size);
// 1: wire->in is a whole message until the next call; 0: none yet; -1: the peer is gone and the wire closed.
int wire_receive(struct wire *wire);

#endif
