/*
 * What the store's measurements share: the clock, messages as bytes, connections to loopback. They
 * do not use the library's own client, so that the server is what is measured.
 */
#ifndef TDDP_BENCH_STORE_BYTES_H
#define TDDP_BENCH_STORE_BYTES_H

#include <endian.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

_Noreturn static inline void fail(const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
    exit(1);
}

static inline double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

typedef struct message {
    char bytes[64 * 256];
    size_t size;
    size_t answer; /* bytes it is answered with */
} message;

static inline void put(message *m, const void *data, size_t size)
{
    memcpy(m->bytes + m->size, data, size);
    m->size += size;
}

static inline void put_number(message *m, uint64_t number)
{
    number = htole64(number);
    put(m, &number, sizeof number);
}

static inline void put_string(message *m, const char *text)
{
    put_number(m, strlen(text));
    put(m, text, strlen(text));
}

/* `flags`: SOCK_NONBLOCK or 0. */
static inline int dial(int port, int flags)
{
    int one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    if (fd < 0 || (connect(fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one)) {
        fail("connect");
    }
    return fd;
}

#endif
