/*
 * Names to addresses. getaddrinfo(3) knows no deadline, so it runs on a helper thread of its own;
 * the caller waits on an eventfd and may return at any time. Both share the request, which is freed
 * by the last of them to release it. A caller that saw the end joins the thread: the resolver's
 * memory of a thread is freed by the thread's end, which a process that ends would else overtake.
 */
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/base.h"
#include "net/net.h"

typedef struct lookup {
    atomic_int owners;
    pthread_t thread; /* the caller's to join or to detach */
    int done_fd;
    char *host;
    int error;        /* of getaddrinfo */
    int system_error; /* errno, for EAI_SYSTEM */
    struct addrinfo *found;
} lookup;

static void lookup_release(lookup *request)
{
    if (atomic_fetch_sub(&request->owners, 1) == 1) {
        if (request->found) {
            freeaddrinfo(request->found);
        }
        tddp_close(request->done_fd);
        free(request->host);
        free(request);
    }
}

static void *lookup_body(void *data)
{
    lookup *request = data;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    request->error = getaddrinfo(request->host, NULL, &hints, &request->found);
    request->system_error = errno;
    uint64_t one = 1;
    ssize_t ignored = write(request->done_fd, &one, sizeof one);
    (void)ignored;
    lookup_release(request);
    return NULL;
}

static tddp_status lookup_start(const char *host, lookup **out)
{
    lookup *request = tddp_alloc(sizeof *request);
    if (!request) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&request->owners, 1);
    request->done_fd = -1;
    tddp_status status = TDDP_OUT_OF_MEMORY;
    request->host = tddp_copy_string(host);
    if (!request->host) {
        goto release;
    }
    request->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (request->done_fd < 0) {
        status = tddp_fail_errno("eventfd");
        goto release;
    }
    atomic_store(&request->owners, 2);
    status = tddp_thread_start(&request->thread, "tddp-resolve", lookup_body, request);
    if (status) {
        atomic_store(&request->owners, 1);
        goto release;
    }
    *out = request;
    return TDDP_OK;
release:
    lookup_release(request);
    return status;
}

static void collect(const struct addrinfo *found, int port, tddp_net_address *out, size_t capacity,
                    size_t *count)
{
    size_t used = 0;
    for (const struct addrinfo *each = found; each && used < capacity; each = each->ai_next) {
        tddp_net_address address = {.length = each->ai_addrlen};
        if (each->ai_addrlen > sizeof address.of) {
            continue;
        }
        memcpy(&address.of, each->ai_addr, each->ai_addrlen);
        if (each->ai_family == AF_INET) {
            address.of.v4.sin_port = htons((uint16_t)port);
        } else if (each->ai_family == AF_INET6) {
            address.of.v6.sin6_port = htons((uint16_t)port);
        } else {
            continue;
        }
        out[used++] = address;
    }
    *count = used;
}

tddp_status tddp_net_resolve(const char *host, int port, int64_t deadline_ns, int cancel_fd,
                             tddp_net_address *out, size_t capacity, size_t *count)
{
    if (tddp_net_parse(host, port, &out[0])) {
        *count = 1;
        return TDDP_OK;
    }
    if (!*host) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the host is empty: expected a name or an address");
    }
    lookup *request = NULL;
    tddp_status status = lookup_start(host, &request);
    if (status) {
        return status;
    }
    status = tddp_net_poll(request->done_fd, POLLIN, deadline_ns, cancel_fd);
    if (status == TDDP_OK) {
        /* Reading, unlike polling, also orders the helper's writes before what follows. */
        uint64_t count_of_one;
        ssize_t ignored = read(request->done_fd, &count_of_one, sizeof count_of_one);
        (void)ignored;
        (void)pthread_join(request->thread, NULL);
    } else {
        (void)pthread_detach(request->thread);
    }
    if (status == TDDP_TIMEOUT) {
        status = tddp_fail(status, "timed out looking up the address of \"%s\"", host);
    } else if (status == TDDP_OK && request->error) {
        const char *reason = request->error == EAI_SYSTEM ? strerror(request->system_error)
                                                          : gai_strerror(request->error);
        status = tddp_fail(TDDP_NETWORK, "cannot find the address of \"%s\": %s", host, reason);
    } else if (status == TDDP_OK) {
        size_t used;
        collect(request->found, port, out, capacity, &used);
        if (used == 0) {
            status =
                tddp_fail(TDDP_NETWORK, "\"%s\" has neither an IPv4 nor an IPv6 address", host);
        } else {
            *count = used;
        }
    }
    lookup_release(request);
    return status;
}
