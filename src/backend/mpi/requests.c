/*
 * Waits. MPI has none with a deadline, so its requests are tested again and again, which is also
 * what moves the data: without sleep by a thread that has nothing else to do, once all ranks take
 * part. Else it sleeps between, longer while ranks are missing, so that other threads can compute.
 */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <time.h>

#include "backend/mpi/mpi.h"

enum { SPINS = 100, YIELDS = 200, AWAITED_YIELDS = 2000, SHORTEST_NS = 20000, LONGEST_NS = 200000 };

int64_t tddp_mpi_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

tddp_mpi_limits tddp_mpi_limits_of(tddp_mpi *self, const tddp_op *op)
{
    return (tddp_mpi_limits){.group = self,
                             .deadline_ns = tddp_mpi_now_ns() + op->timeout_ms * 1000000,
                             .timeout_ms = op->timeout_ms,
                             .awaited = op->awaited != 0};
}

static void pause_for(int64_t ns)
{
    struct timespec left = {0, (long)ns};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
    }
}

/* After the n-th test that found nothing. */
static void pause_after(const tddp_mpi_limits *limits, int n)
{
    if (limits->awaited && n < SPINS) {
        return;
    }
    if ((limits->awaited && limits->arrived) || n < (limits->awaited ? AWAITED_YIELDS : YIELDS)) {
        (void)sched_yield();
        return;
    }
    const int64_t grown = (int64_t)SHORTEST_NS * n / AWAITED_YIELDS;
    pause_for(limits->arrived || grown < SHORTEST_NS ? SHORTEST_NS
              : grown > LONGEST_NS                   ? LONGEST_NS
                                                     : grown);
}

tddp_status tddp_mpi_check_limits(const tddp_mpi_limits *limits)
{
    if (tddp_mpi_given_up() || atomic_load(&limits->group->aborted)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    if (limits->cancel && tddp_cancel_triggered(limits->cancel)) {
        return TDDP_CANCELED;
    }
    if (tddp_mpi_now_ns() >= limits->deadline_ns) {
        return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms", limits->timeout_ms);
    }
    return TDDP_OK;
}

tddp_status tddp_mpi_wait_one(const tddp_mpi_limits *limits, MPI_Request *request, MPI_Status *out)
{
    for (int n = 0;; n++) {
        int done = 0;
        tddp_status status = tddp_mpi_check_limits(limits);
        if (status == TDDP_OK) {
            status = tddp_mpi_check(MPI_Test(request, &done, out), "MPI_Test");
        }
        if (status || done) {
            return status;
        }
        pause_after(limits, n);
    }
}

tddp_status tddp_mpi_wait(const tddp_mpi_limits *limits, int code, MPI_Request *requests, int count,
                          const char *what)
{
    tddp_status status = tddp_mpi_check(code, what);
    for (int i = 0; i < count && status == TDDP_OK; i++) {
        status = tddp_mpi_wait_one(limits, &requests[i], MPI_STATUS_IGNORE);
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
    tddp_status status = tddp_mpi_wait_one(limits, request, out);
    return status ? take_back(request, status) : TDDP_OK;
}
