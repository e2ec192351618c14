/*
 * The stand-ins: the linker's --wrap sends the rooms' calls here. Any thread. The count covers all
 * threads, so that the nth call is not always the same one: a test tries many n.
 *
 * close() is left alone: Linux frees the descriptor even where it fails. So is write(): the rooms
 * write to eventfds, where nothing can fail, and log lines. A connect() that does not block is not
 * interrupted.
 */
#include "faults/system_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static _Atomic calls_mode how;
static atomic_long wanted;
static atomic_long counted;
static _Atomic(const char *) failed = "";
static atomic_uint interruptions;

void calls_arm(calls_mode mode, long nth)
{
    atomic_store(&how, CALLS_PASS);
    atomic_store(&counted, 0);
    atomic_store(&failed, "");
    atomic_store(&wanted, nth);
    atomic_store(&how, mode);
}

long calls_count(void)
{
    return atomic_load(&counted);
}

const char *calls_failed(void)
{
    return atomic_load(&failed);
}

static bool fails(const char *name)
{
    if (atomic_load(&how) == CALLS_PASS) {
        return false;
    }
    long number = atomic_fetch_add(&counted, 1) + 1;
    if (atomic_load(&how) != CALLS_FAIL_NTH || number != atomic_load(&wanted)) {
        return false;
    }
    atomic_store(&failed, name);
    return true;
}

/* Half of them, in no pattern: a loop of two calls must not meet the same answer for ever. */
static bool interrupted(void)
{
    unsigned number = atomic_fetch_add(&interruptions, 1) + 1;
    return atomic_load(&how) == CALLS_INTERRUPTED && (number * 2654435761u) >> 31;
}

static size_t cut(size_t bytes)
{
    return atomic_load(&how) == CALLS_SHORT && bytes > 1 ? 1 : bytes;
}

/* A packet is passed as a whole or not at all. */
static size_t cut_stream(int fd, size_t bytes);

/* Fails or goes on to the real call. */
#define WRAP(type, name, parameters, arguments, error) \
    type __real_##name parameters;                     \
    type __wrap_##name parameters;                     \
    type __wrap_##name parameters                      \
    {                                                  \
        if (fails(#name)) {                            \
            errno = (error);                           \
            return -1;                                 \
        }                                              \
        return __real_##name arguments;                \
    }

/* The same for a call that signals may interrupt. */
#define WRAP_SLOW(type, name, parameters, arguments, error) \
    type __real_##name parameters;                          \
    type __wrap_##name parameters;                          \
    type __wrap_##name parameters                           \
    {                                                       \
        if (fails(#name) || interrupted()) {                \
            errno = *calls_failed() ? (error) : EINTR;      \
            return -1;                                      \
        }                                                   \
        return __real_##name arguments;                     \
    }

WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), EMFILE)
WRAP(int, bind, (int fd, const struct sockaddr *address, socklen_t length), (fd, address, length),
     EACCES)
WRAP(int, listen, (int fd, int backlog), (fd, backlog), EOPNOTSUPP)
WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t length),
     (fd, address, length), ENETUNREACH)
WRAP(int, getsockname, (int fd, struct sockaddr *address, socklen_t *length), (fd, address, length),
     ENOBUFS)
WRAP(int, getpeername, (int fd, struct sockaddr *address, socklen_t *length), (fd, address, length),
     ENOTCONN)
WRAP(int, getsockopt, (int fd, int level, int name, void *value, socklen_t *length),
     (fd, level, name, value, length), ENOBUFS)
WRAP(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t length),
     (fd, level, name, value, length), ENOBUFS)
WRAP(int, epoll_create1, (int flags), (flags), EMFILE)
WRAP(int, epoll_ctl, (int fd, int op, int other, struct epoll_event *event), (fd, op, other, event),
     ENOSPC)
WRAP(int, eventfd, (unsigned start, int flags), (start, flags), EMFILE)
WRAP(int, fstat, (int fd, struct stat *out), (fd, out), EIO)
WRAP(int, ftruncate, (int fd, off_t length), (fd, length), EIO)
WRAP(int, getifaddrs, (struct ifaddrs * *out), (out), ENOBUFS)
WRAP(int, unlink, (const char *path), (path), EACCES)

WRAP_SLOW(int, accept4, (int fd, struct sockaddr *address, socklen_t *length, int flags),
          (fd, address, length, flags), EMFILE)
WRAP_SLOW(int, epoll_wait, (int fd, struct epoll_event *events, int most, int timeout),
          (fd, events, most, timeout), ENOMEM)
WRAP_SLOW(int, poll, (struct pollfd * entries, nfds_t count, int timeout),
          (entries, count, timeout), ENOMEM)
WRAP_SLOW(int, flock, (int fd, int operation), (fd, operation), ENOLCK)
/* An eventfd gives its eight bytes at once or not at all. */
WRAP_SLOW(ssize_t, read, (int fd, void *data, size_t bytes),
          (fd, data, bytes == sizeof(uint64_t) ? bytes : cut(bytes)), EIO)
WRAP_SLOW(ssize_t, pread, (int fd, void *data, size_t bytes, off_t at), (fd, data, cut(bytes), at),
          EIO)
WRAP_SLOW(ssize_t, pwrite, (int fd, const void *data, size_t bytes, off_t at),
          (fd, data, cut(bytes), at), ENOSPC)
WRAP_SLOW(ssize_t, recv, (int fd, void *data, size_t bytes, int flags),
          (fd, data, cut_stream(fd, bytes), flags), ECONNRESET)
WRAP_SLOW(ssize_t, send, (int fd, const void *data, size_t bytes, int flags),
          (fd, data, cut_stream(fd, bytes), flags), EPIPE)

static size_t cut_stream(int fd, size_t bytes)
{
    int type = SOCK_STREAM;
    socklen_t length = sizeof type;
    (void)__real_getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length);
    return type == SOCK_STREAM ? cut(bytes) : bytes;
}

/* Calls of other shapes. */

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (fails("open") || interrupted()) {
        errno = *calls_failed() ? EMFILE : EINTR;
        return -1;
    }
    return __real_open(path, flags, mode);
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *data);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *data);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *data)
{
    return fails("pthread_create") ? EAGAIN : __real_pthread_create(thread, attributes, body, data);
}

int __real_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out)
{
    return fails("getaddrinfo") ? EAI_MEMORY : __real_getaddrinfo(host, service, hints, out);
}
