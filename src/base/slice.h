/*
 * How soon a thread that was woken gets a processor that another thread is computing on.
 *
 * Threads that move bytes sleep most of the time and work for microseconds; when training threads
 * keep every core busy, Linux may let a woken one wait for its next tick (4 ms at 250 Hz). A thread
 * that asks for a short time slice is let in at once, as its share of the processor allows
 * (sched_setattr(2); EEVDF honours it since Linux 6.12, older kernels ignore it). It needs no
 * privilege.
 */
#ifndef TDDP_BASE_SLICE_H
#define TDDP_BASE_SLICE_H

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The shortest slice that Linux grants. */
#define TDDP_SHORT_SLICE_NS UINT64_C(100000)

/* Sets the calling thread's slice, also inherited by threads that it starts; 0: the system's own.
 * What the system refuses is left as it is: only latency is lost. errno is kept. */
static inline void tddp_thread_slice(uint64_t nanoseconds)
{
    /* struct sched_attr of the kernel's interface, in its first version (48 bytes). */
    struct {
        uint32_t size;
        uint32_t policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime;
        uint64_t deadline;
        uint64_t period;
    } attributes = {0, 0, 0, 0, 0, 0, 0, 0};
    int saved = errno;
    attributes.size = sizeof attributes;
    /* Keeps policy and niceness as they are. */
    if (syscall(SYS_sched_getattr, 0, &attributes, (unsigned)sizeof attributes, 0u) == 0) {
        attributes.size = sizeof attributes;
        attributes.runtime = nanoseconds;
        (void)syscall(SYS_sched_setattr, 0, &attributes, 0u);
    }
    errno = saved;
}

#endif
