/*
 * Waits. MPI has none with a deadline, so its requests are tested again and again: without pause
 * for a thread that has nothing else to do, else with pauses that grow, so that other threads can
 * compute.
 */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <time.h>

#include "backend/mpi/mpi.h"

enum { SPINS = 2000, YIELDS = 200, SHORTEST_NS = 20 * 1000, LONGEST_NS = 500 * 1000 };

int64_t tddp_mpi_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

tddp_mpi_limits tddp_mpi_limits_of(tddp_mpi *self, const tddp_op *op)
{
    return (tddp_mpi_limits){self, tddp_mpi_now_ns() + op->timeout_ms * 1000000, op->timeout_ms,
                             op->awaited != 0};
}

static void pause_for(int64_t ns)
{
    struct timespec left = {0, (long)ns};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
    }
}

/* After the n-th test that found nothing. */
static void pause_after(int n, bool spins)
{
    if (n < SPINS && spins) {
        return;
    }
    if (n < (spins ? SPINS + YIELDS : YIELDS)) {
        (void)sched_yield();
        return;
    }
    const int64_t grown = (int64_t)SHORTEST_NS * (n - YIELDS) / 64;
    pause_for(grown < SHORTEST_NS ? SHORTEST_NS : grown > LONGEST_NS ? LONGEST_NS : grown);
}

static tddp_status check_limits(const tddp_mpi_limits *limits, const char *what)
{
    if (tddp_mpi_given_up() || atomic_load(&limits->group->aborted)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    if (tddp_mpi_now_ns() >= limits->deadline_ns) {
        return tddp_fail(TDDP_TIMEOUT,
                         "%s: not done after %" PRId64
                         " ms; MPI does not know which ranks are missing",
                         what, limits->timeout_ms);
    }
    return TDDP_OK;
}

tddp_status tddp_mpi_wait(const tddp_mpi_limits *limits, int code, MPI_Request *requests, int count,
                          const char *what)
{
    tddp_status status = tddp_mpi_check(code, what);
    int done = 0; /* those before it are */
    for (int n = 0; status == TDDP_OK && done < count; n++) {
        int next = 0;
        status = tddp_mpi_check(MPI_Test(&requests[done], &next, MPI_STATUS_IGNORE), what);
        if (status == TDDP_OK && next) {
            done++;
            n = 0;
        } else if (status == TDDP_OK) {
            status = check_limits(limits, what);
            pause_after(n, limits->spins);
        }
    }
    if (status) {
        tddp_mpi_give_up();
    }
    return status;
}

/* A receive that is matched already completes all the same. */
static tddp_status take_back(MPI_Request *request, tddp_status status)
{
    if (tddp_mpi_given_up()) {
        return status;
    }
    if (MPI_Cancel(request) || MPI_Wait(request, MPI_STATUS_IGNORE)) {
        tddp_mpi_give_up();
    }
    return status;
}

tddp_status tddp_mpi_wait_receive(const tddp_mpi_limits *limits, MPI_Request *request,
                                  MPI_Status *out)
{
    int done = 0;
    for (int n = 0;; n++) {
        tddp_status status = check_limits(limits, "recv");
        if (status) {
            return take_back(request, status);
        }
        status = tddp_mpi_check(MPI_Test(request, &done, out), "MPI_Test");
        if (status || done) {
            return status;
        }
        pause_after(n, limits->spins);
    }
}
