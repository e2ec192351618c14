/*
 * Cancel tokens: an eventfd that stays readable once triggered, so that every poll(2) that includes
 * it returns, and later ones at once. Any thread, also a signal handler, may trigger; reading it
 * never consumes the event.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/base.h"

struct tddp_cancel {
    int fd;
};

tddp_status tddp_cancel_create(tddp_cancel **out)
{
    tddp_cancel *cancel = tddp_alloc(sizeof *cancel);
    if (!cancel) {
        return TDDP_OUT_OF_MEMORY;
    }
    cancel->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (cancel->fd < 0) {
        free(cancel);
        return tddp_fail_errno("eventfd");
    }
    *out = cancel;
    return TDDP_OK;
}

void tddp_cancel_trigger(tddp_cancel *cancel)
{
    int saved = errno;
    uint64_t one = 1;
    /* Fails only if it was triggered 2^64 - 2 times: then it is readable anyway. */
    ssize_t ignored = write(cancel->fd, &one, sizeof one);
    (void)ignored;
    errno = saved;
}

void tddp_cancel_reset(tddp_cancel *cancel)
{
    uint64_t count;
    ssize_t ignored = read(cancel->fd, &count, sizeof count);
    (void)ignored;
}

int tddp_cancel_triggered(const tddp_cancel *cancel)
{
    struct pollfd entry = {.fd = cancel->fd, .events = POLLIN};
    int ready;
    do {
        ready = poll(&entry, 1, 0);
    } while (ready < 0 && errno == EINTR);
    return ready > 0;
}

void tddp_cancel_free(tddp_cancel *cancel)
{
    if (cancel) {
        tddp_close(cancel->fd);
        free(cancel);
    }
}

int tddp_cancel_fd(const tddp_cancel *cancel)
{
    return cancel ? cancel->fd : -1;
}
