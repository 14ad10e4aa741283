// Owns the sockets and the framing of messages: type and size in network order, then the payload as it is in
// memory (hellos make sure that both sides are the same program).
#include "trainer/rank_wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"

enum { WIRE_HEADER = 2 * sizeof(uint32_t), BACKLOG = 1024 };

static void set_flags(int fd)
{
    int one = 1;
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        die("fcntl: %s", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

// Every address: of both families where the machine has IPv6.
static int bind_everywhere(int port)
{
    struct sockaddr_in6 six = {
        .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = IN6ADDR_ANY_INIT};
    struct sockaddr_in four = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)port),
                               .sin_addr.s_addr = htonl(INADDR_ANY)};
    int one = 1, zero = 0;
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero));
        if (bind(fd, (struct sockaddr *)&six, sizeof(six)) == 0)
            return fd;
        int taken = errno == EADDRINUSE;
        close(fd);
        errno = EADDRINUSE;
        if (taken)
            return -1;
    }
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr *)&four, sizeof(four)) == 0)
        return fd;
    close(fd);
    return -1;
}

static int bind_loopback(int port)
{
    struct sockaddr_in four = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr *)&four, sizeof(four)) == 0)
        return fd;
    close(fd);
    return -1;
}

int wire_listen(int *port, int loopback)
{
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } bound;
    socklen_t size = sizeof(bound);
    memset(&bound, 0, sizeof(bound));
    int fd = loopback ? bind_loopback(*port) : bind_everywhere(*port);
    if (fd < 0)
        return -1;
    if (listen(fd, BACKLOG) != 0 || getsockname(fd, &bound.any, &size) != 0) {
        close(fd);
        return -1;
    }
    *port = ntohs(bound.any.sa_family == AF_INET6 ? bound.six.sin6_port : bound.four.sin_port);
    set_flags(fd);
    return fd;
}

static int connect_to(const struct addrinfo *address, double seconds)
{
    int fd = socket(address->ai_family, SOCK_STREAM, 0), failure = 0;
    socklen_t size = sizeof(failure);
    if (fd < 0)
        return -1;
    set_flags(fd);
    if (connect(fd, address->ai_addr, address->ai_addrlen) == 0)
        return fd;
    failure = errno;
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    if (failure == EINPROGRESS) {
        failure = ETIMEDOUT;
        if (poll(&ready, 1, (int)(seconds * 1000.0)) > 0 &&
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &size) != 0)
            failure = errno;
    }
    if (failure == 0)
        return fd;
    close(fd);
    errno = failure;
    return -1;
}

int wire_connect(const char *host, int port, double seconds)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    char service[16];
    int fd = -1;
    snprintf(service, sizeof(service), "%d", port);
    if (getaddrinfo(host, service, &hints, &list) != 0) {
        errno = EADDRNOTAVAIL; // a name that is not known (yet)
        return -1;
    }
    for (const struct addrinfo *at = list; at != NULL && fd < 0; at = at->ai_next)
        fd = connect_to(at, seconds);
    int failure = errno;
    freeaddrinfo(list);
    errno = failure;
    return fd;
}

int wire_accept(int listener)
{
    int fd = accept(listener, NULL, NULL);
    if (fd >= 0)
        set_flags(fd);
    return fd;
}

void wire_open(struct wire *wire, int fd)
{
    wire->fd = fd;
    wire->have = 0;
}

void wire_close(struct wire *wire)
{
    if (wire->fd >= 0)
        close(wire->fd);
    wire->fd = -1;
}

int wire_send(struct wire *wire, uint32_t type, const void *payload, size_t size)
{
    struct {
        uint32_t header[2];
        unsigned char payload[WIRE_PAYLOAD];
    } out = {{htonl(type), htonl((uint32_t)size)}, {0}};
    BUG_UNLESS(size <= WIRE_PAYLOAD);
    if (wire->fd < 0)
        return -1;
    if (size > 0)
        memcpy(out.payload, payload, size);
    ssize_t sent = send(wire->fd, &out, WIRE_HEADER + size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == (ssize_t)(WIRE_HEADER + size))
        return 0;
    // Half a message can not be followed by another; the buffer holds hours of heartbeats.
    wire_close(wire);
    return -1;
}

int wire_receive(struct wire *wire)
{
    unsigned char *buffer = (unsigned char *)&wire->in;
    if (wire->fd < 0)
        return -1;
    if (wire->have >= WIRE_HEADER && wire->have == WIRE_HEADER + wire->in.size)
        wire->have = 0;
    for (;;) {
        size_t wanted = wire->have < WIRE_HEADER ? WIRE_HEADER - wire->have
                                                 : WIRE_HEADER + wire->in.size - wire->have;
        if (wanted == 0)
            return 1;
        ssize_t got = recv(wire->fd, buffer + wire->have, wanted, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (got < 0 && errno == EINTR)
            continue;
        if (got > 0)
            wire->have += (size_t)got;
        if (got > 0 && wire->have == WIRE_HEADER) {
            wire->in.type = ntohl(wire->in.type);
            wire->in.size = ntohl(wire->in.size);
        }
        if (got <= 0 || (wire->have >= WIRE_HEADER && wire->in.size > WIRE_PAYLOAD)) {
            wire_close(wire);
            return -1;
        }
    }
}
