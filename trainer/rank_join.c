// Owns the meeting of the ranks; what they say to each other afterwards is rank_control's.
#include "trainer/rank_join.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"

enum { HELLO_MAGIC = 0x4e525444, PROTOCOL = 1, STRANGERS = 64, PAUSE = 50 /* milliseconds */ };
static const double answer_seconds = 5.0; // for a hello and for its answer

struct rank_hello {
    uint32_t magic, protocol; // these two first in every protocol
    int32_t rank, size;
    uint64_t token[2], config;
    int64_t process;
    char program[128], host[64];
};

static struct rank_hello make_hello(const struct rank_place *place,
                                    const struct rank_address *address,
                                    const struct rank_identity *identity)
{
    struct rank_hello hello;
    memset(&hello, 0, sizeof(hello));
    hello.magic = HELLO_MAGIC;
    hello.protocol = PROTOCOL;
    hello.rank = place->rank;
    hello.size = place->size;
    memcpy(hello.token, address->token, sizeof(hello.token));
    hello.config = identity->config;
    hello.process = getpid();
    memcpy(hello.program, identity->program, sizeof(hello.program));
    if (gethostname(hello.host, sizeof(hello.host) - 1) != 0)
        strcpy(hello.host, "unknown host");
    return hello;
}

static void name_peer(struct rank_peer *peer, struct rank_hello *hello)
{
    hello->host[sizeof(hello->host) - 1] = '\0';
    hello->program[sizeof(hello->program) - 1] = '\0';
    snprintf(peer->name, sizeof(peer->name), "rank %d (%s, process %lld)", (int)hello->rank,
             hello->host, (long long)hello->process);
}

int rank_join_address(const struct rank_place *place, int64_t port, struct rank_address *address,
                      struct error *err)
{
    memset(address, 0, sizeof(*address));
    if (port > 0 && port == place->held_port)
        return error_set(err,
                         "parallel.port: %lld is MASTER_PORT, on which torchrun itself listens; "
                         "give another one, or none",
                         (long long)port);
    if (place->host[0] != '\0')
        memcpy(address->hosts[address->host_count++], place->host, sizeof(place->host));
    bool chosen = port > 0 && place->launcher != LAUNCHER_OWN; // the supervisor listens already
    address->port = chosen ? (int32_t)port : place->port;
    address->ports = chosen ? 1 : place->ports;
    address->token[0] = place->job;
    return 0;
}

// This machine's addresses, for processes on others.
static void add_own_addresses(struct rank_address *address)
{
    struct ifaddrs *list = NULL;
    if (getifaddrs(&list) != 0)
        return;
    for (const struct ifaddrs *at = list; at != NULL && address->host_count < RANK_HOSTS;
         at = at->ifa_next) {
        char *host = address->hosts[address->host_count];
        if (at->ifa_addr == NULL || at->ifa_addr->sa_family != AF_INET ||
            (at->ifa_flags & IFF_UP) == 0 || (at->ifa_flags & IFF_LOOPBACK) != 0)
            continue;
        if (getnameinfo(at->ifa_addr, sizeof(struct sockaddr_in), host, sizeof(address->hosts[0]),
                        NULL, 0, NI_NUMERICHOST) == 0)
            address->host_count++;
    }
    freeifaddrs(list);
}

int rank_join_listen(const struct rank_place *place, bool told, struct rank_address *address,
                     int *listener, struct error *err)
{
    if (place->listen_fd >= 0) {
        *listener = place->listen_fd;
        return 0;
    }
    int first = address->port;
    *listener = -1;
    for (int i = 0; *listener < 0 && i < (first > 0 ? address->ports : 1); i++) {
        int port = first > 0 ? first + i : 0;
        *listener = wire_listen(&port, place->one_machine);
        if (*listener >= 0)
            address->port = (int32_t)port;
    }
    if (*listener < 0)
        return error_set(
            err, "rank 0 can not listen on TCP port %d%s: %s; parallel.port chooses another", first,
            first > 0 && address->ports > 1 ? " or those after it" : "", strerror(errno));
    address->ports = 1;
    if (told && !place->one_machine)
        add_own_addresses(address);
    if (told &&
        getrandom(address->token, sizeof(address->token), 0) != (ssize_t)sizeof(address->token))
        die("getrandom: %s", strerror(errno));
    return 0;
}

// What a process that has come says, against what rank 0 knows. 0: it belongs here; 1: a stranger; -1.
static int judge(const struct rank_hello *own, struct rank_hello *hello, uint32_t size,
                 struct rank_peer *peers, struct error *err)
{
    struct rank_peer who;
    if (size < 2 * sizeof(uint32_t) || hello->magic != HELLO_MAGIC)
        return 1;
    if (size != sizeof(*hello) || hello->protocol != PROTOCOL)
        return error_set(err,
                         "a process of another version of dtrain wants to join (its protocol is "
                         "%u, here it is %d); every rank must run the same program",
                         hello->protocol, PROTOCOL);
    if (memcmp(hello->token, own->token, sizeof(own->token)) != 0)
        return 1;
    name_peer(&who, hello);
    if (hello->size != own->size)
        return error_set(err,
                         "%s was told of %d ranks, rank 0 of %d; the launcher must say the same to "
                         "all",
                         who.name, (int)hello->size, (int)own->size);
    if (hello->rank <= 0 || hello->rank >= own->size || peers[hello->rank].wire.fd >= 0)
        return error_set(err,
                         "%s wants to join, and there is such a rank already: two processes have "
                         "the same number",
                         who.name);
    if (strcmp(hello->program, own->program) != 0)
        return error_set(err,
                         "%s runs dtrain %s, rank 0 runs %s; every rank must run the same program",
                         who.name, hello->program, own->program);
    if (hello->config != own->config)
        return error_set(err,
                         "%s has another configuration than rank 0; every rank must be given the "
                         "same file and the same --set",
                         who.name);
    return 0;
}

// Those who have come and not said who they are yet.
struct strangers {
    struct wire *wires;     // [STRANGERS]
    double came[STRANGERS]; // when
    const struct rank_hello *own;
};

static void let_in(struct strangers *strangers, int listener)
{
    for (int i = 0; i < STRANGERS; i++) {
        if (strangers->wires[i].fd >= 0)
            continue;
        int fd = wire_accept(listener);
        if (fd < 0)
            return;
        wire_open(&strangers->wires[i], fd);
        strangers->came[i] = timer_now();
    }
}

// 1: one has become a peer; 0: nothing; -1.
static int hear(struct strangers *strangers, int i, struct rank_peer *peers, struct error *err)
{
    struct wire *wire = &strangers->wires[i];
    struct rank_hello hello;
    if (wire->fd < 0)
        return 0;
    int got = wire_receive(wire);
    if (got == 0 && timer_now() - strangers->came[i] > answer_seconds)
        wire_close(wire);
    if (got != 1)
        return 0;
    memset(&hello, 0, sizeof(hello));
    memcpy(&hello, wire->in.payload, wire->in.size < sizeof(hello) ? wire->in.size : sizeof(hello));
    int verdict = wire->in.type == MESSAGE_HELLO
                      ? judge(strangers->own, &hello, wire->in.size, peers, err)
                      : 1;
    if (verdict < 0)
        wire_send(wire, MESSAGE_REFUSED, err->text, strlen(err->text) + 1);
    if (verdict != 0) {
        wire_close(wire);
        return verdict < 0 ? -1 : 0;
    }
    struct rank_peer *peer = &peers[hello.rank];
    name_peer(peer, &hello);
    wire_open(&peer->wire, wire->fd);
    wire->fd = -1;
    wire_send(&peer->wire, MESSAGE_WELCOME, strangers->own, sizeof(*strangers->own));
    return 1;
}

// Also notices those who leave again. Returns how many have come, -1.
static int hear_all(struct strangers *strangers, struct rank_peer *peers, int size,
                    struct error *err)
{
    int come = 0;
    for (int i = 0; i < STRANGERS; i++)
        if (hear(strangers, i, peers, err) < 0)
            return -1;
    for (int rank = 1; rank < size; rank++) {
        if (peers[rank].wire.fd < 0)
            continue;
        if (wire_receive(&peers[rank].wire) < 0)
            return error_set(err, "%s ended while the ranks were meeting; its own messages say why",
                             peers[rank].name);
        come++;
    }
    return come;
}

static int report_missing(const struct rank_place *place, const struct rank_address *address,
                          const struct rank_identity *identity, const struct rank_peer *peers,
                          struct error *err)
{
    char list[512] = "";
    size_t at = 0;
    for (int rank = 1; rank < place->size && at < sizeof(list) - 16; rank++)
        if (peers[rank].wire.fd < 0)
            at += (size_t)snprintf(list + at, sizeof(list) - at, "%s%d", at > 0 ? ", " : "", rank);
    return error_set(err,
                     "of %d ranks, these have not come to %s, port %d, within %.0f s "
                     "(parallel.timeout): %s",
                     place->size, address->host_count > 0 ? address->hosts[0] : "rank 0",
                     (int)address->port, identity->timeout, list);
}

static int gather(struct strangers *strangers, const struct rank_place *place,
                  const struct rank_address *address, const struct rank_identity *identity,
                  int listener, struct rank_peer *peers, struct error *err)
{
    double deadline = timer_now() + identity->timeout;
    for (;;) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        poll(&ready, 1, PAUSE);
        let_in(strangers, listener);
        int come = hear_all(strangers, peers, place->size, err);
        if (come < 0)
            return -1;
        if (come == place->size - 1)
            return 0;
        if (timer_now() > deadline)
            return report_missing(place, address, identity, peers, err);
    }
}

// Those who come late learn for a while why the run does not start; else they would knock until their time is up.
static void refuse_late(struct strangers *strangers, int listener, int missing, const char *text)
{
    double deadline = timer_now() + answer_seconds;
    while (missing > 0 && timer_now() < deadline) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        poll(&ready, 1, PAUSE);
        let_in(strangers, listener);
        for (int i = 0; i < STRANGERS; i++) {
            struct wire *wire = &strangers->wires[i];
            struct rank_hello hello;
            if (wire->fd < 0 || wire_receive(wire) != 1 || wire->in.size != sizeof(hello))
                continue;
            memcpy(&hello, wire->in.payload, sizeof(hello));
            if (memcmp(hello.token, strangers->own->token, sizeof(hello.token)) == 0) {
                wire_send(wire, MESSAGE_REFUSED, text, strlen(text) + 1);
                missing--;
            }
            wire_close(wire);
        }
    }
}

int rank_join_gather(const struct rank_place *place, const struct rank_address *address,
                     const struct rank_identity *identity, int listener, struct rank_peer *peers,
                     struct error *err)
{
    const struct rank_hello own = make_hello(place, address, identity);
    struct strangers *strangers = memory_alloc(1, sizeof(*strangers));
    strangers->own = &own;
    strangers->wires = memory_alloc(STRANGERS, sizeof(*strangers->wires));
    for (int i = 0; i < STRANGERS; i++)
        strangers->wires[i].fd = -1;
    int result = gather(strangers, place, address, identity, listener, peers, err);
    int missing = place->size - 2; // of the others, but for the one that was refused
    for (int rank = 1; rank < place->size; rank++) {
        if (peers[rank].wire.fd < 0)
            continue;
        if (result == 0) {
            wire_send(&peers[rank].wire, MESSAGE_START, NULL, 0);
            continue;
        }
        missing--;
        wire_send(&peers[rank].wire, MESSAGE_REFUSED, err->text, strlen(err->text) + 1);
        wire_close(&peers[rank].wire);
    }
    if (result != 0)
        refuse_late(strangers, listener, missing, err->text);
    for (int i = 0; i < STRANGERS; i++)
        wire_close(&strangers->wires[i]);
    free(strangers->wires);
    free(strangers);
    close(listener);
    return result;
}

// The next message, 1; 0: none in time; -1: the other side has closed.
static int await(struct wire *wire, double deadline)
{
    for (;;) {
        int got = wire_receive(wire);
        if (got != 0)
            return got;
        if (timer_now() > deadline)
            return 0;
        struct pollfd ready = {.fd = wire->fd, .events = POLLIN};
        poll(&ready, 1, PAUSE);
    }
}

// 1: this is rank 0 and it takes us; 0: not, or not yet; -1: it refuses.
static int knock(const struct rank_hello *hello, const char *host, int port, struct rank_peer *peer,
                 struct error *why)
{
    int fd = wire_connect(host, port, answer_seconds);
    if (fd < 0) {
        error_set(why, "%s", strerror(errno));
        return 0;
    }
    wire_open(&peer->wire, fd);
    wire_send(&peer->wire, MESSAGE_HELLO, hello, sizeof(*hello));
    int got = await(&peer->wire, timer_now() + answer_seconds);
    if (got == 1 && peer->wire.in.type == MESSAGE_WELCOME &&
        peer->wire.in.size == sizeof(struct rank_hello)) {
        struct rank_hello other;
        memcpy(&other, peer->wire.in.payload, sizeof(other));
        name_peer(peer, &other);
        return 1;
    }
    error_set(why, "what listens there is not rank 0 of this run");
    wire_close(&peer->wire);
    return got == 1 && peer->wire.in.type == MESSAGE_REFUSED ? -1 : 0;
}

static int find(const struct rank_address *address, const struct rank_hello *hello, double timeout,
                struct rank_peer *peer, struct error *err)
{
    double deadline = timer_now() + timeout;
    struct error why = {0};
    int pause = PAUSE;
    for (;;) {
        for (int host = 0; host < address->host_count; host++)
            for (int port = 0; port < address->ports; port++) {
                int found = knock(hello, address->hosts[host], address->port + port, peer, &why);
                if (found != 0)
                    return found == 1 ? 0 : -1;
                if (timer_now() > deadline)
                    return error_set(err,
                                     "rank 0 has not answered on %s, port %d%s, within %.0f s "
                                     "(parallel.timeout): %s",
                                     address->hosts[0], (int)address->port,
                                     address->ports > 1 ? " or those after it" : "", timeout,
                                     why.text);
            }
        poll(NULL, 0, pause);
        pause = pause < 500 ? 2 * pause : pause;
    }
}

int rank_join_connect(const struct rank_place *place, const struct rank_address *address,
                      const struct rank_identity *identity, struct rank_peer *peer,
                      struct error *err)
{
    const struct rank_hello hello = make_hello(place, address, identity);
    err->text[0] = '\0';
    if (find(address, &hello, identity->timeout, peer, err) != 0)
        return -1;
    int got = await(&peer->wire, timer_now() + identity->timeout + answer_seconds);
    if (got == 1 && peer->wire.in.type == MESSAGE_START)
        return 0;
    wire_close(&peer->wire);
    if (got == 1 && peer->wire.in.type == MESSAGE_REFUSED)
        return -1;
    return error_set(err, "%s %s while the ranks were meeting", peer->name,
                     got < 0 ? "ended" : "was silent");
}
