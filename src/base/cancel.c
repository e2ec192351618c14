/*
 * Cancel tokens: an eventfd that stays readable once triggered, so that every poll(2) that includes
 * it returns, and later ones at once. Any thread, also a signal handler, may trigger; reading it
 * never consumes the event.
 *
 * Triggers are also counted, when they begin and when they are written, so that querying a token
 * costs no system call. Invariant: a token is triggered while more have begun than were cleared; a
 * reset clears only those written before it read the descriptor, so a concurrent trigger is either
 * cleared or stays entirely.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/base.h"

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
    atomic_fetch_add(&cancel->begun, 1);
    /* Fails only if it was triggered 2^64 - 2 times: then it is readable anyway. */
    ssize_t ignored = write(cancel->fd, &one, sizeof one);
    (void)ignored;
    atomic_fetch_add(&cancel->written, 1);
    errno = saved;
}

void tddp_cancel_reset(tddp_cancel *cancel)
{
    uint32_t begun = atomic_load(&cancel->begun);
    if (begun == atomic_load(&cancel->settled)) {
        return;
    }
    bool complete = atomic_load(&cancel->written) == begun;
    uint64_t count;
    ssize_t ignored = read(cancel->fd, &count, sizeof count);
    (void)ignored;
    if (complete) {
        atomic_store(&cancel->settled, begun);
    }
}

static bool triggered(const tddp_cancel *cancel)
{
    return atomic_load_explicit(&cancel->begun, memory_order_acquire) !=
               atomic_load_explicit(&cancel->settled, memory_order_relaxed) ||
           (cancel->deadline > 0 && tddp_now_ns() >= cancel->deadline);
}

int tddp_cancel_triggered(const tddp_cancel *cancel)
{
    return triggered(cancel) || (cancel->also && triggered(cancel->also));
}

int64_t tddp_cancel_deadline(const tddp_cancel *cancel)
{
    return cancel && cancel->deadline > 0 ? cancel->deadline : INT64_MAX;
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
