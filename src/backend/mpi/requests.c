/*
 * The unfinished requests of all groups, and the thread that tests them while no caller does. MPI
 * has nothing to sleep on: the thread tests again and again, with pauses that grow. A caller that
 * is about to sleep arms it; since all that wait do so again within ARMED_NS, it rests once nobody
 * has for longer.
 *
 * Any thread. Invariant: a request is posted, tested and canceled with the mutex held, so by one
 * thread at a time; only communicators are made and freed without it.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/mpi/mpi.h"

#define NS_PER_MS INT64_C(1000000)
/* Who waits checks for other reasons to end, and arms again, each 20 ms. */
#define ARMED_NS (200 * NS_PER_MS)
/* For what MPI has begun to receive, and for peers to take what was sent. */
#define CANCEL_NS (500 * NS_PER_MS)

enum { FIRST_REQUESTS = 16, YIELDS = 200, STEP_NS = 500, LONGEST_NS = 100 * 1000 };

/* Process-wide, as MPI is. */
static struct {
    pthread_mutex_t mutex; /* guards the list, and what the thread waits for */
    MPI_Request *requests;
    tddp_mpi_transfer **transfers; /* whose they are */
    size_t count;
    size_t capacity;

    pthread_mutex_t groups_mutex; /* held while the thread starts or ends; the first one to take */
    _Atomic int groups;
    pthread_t thread;
    pthread_cond_t wake;
    bool stopping;
    _Atomic bool sleeping;
    _Atomic int64_t armed_until;
    _Atomic bool polled; /* by a caller, since the thread has looked */
    _Atomic bool abandoned;
} all = {.mutex = PTHREAD_MUTEX_INITIALIZER,
         .groups_mutex = PTHREAD_MUTEX_INITIALIZER,
         .wake = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 * NS_PER_MS + now.tv_nsec;
}

static void sleep_for(int64_t ns)
{
    struct timespec left = {0, (long)ns};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
    }
}

void tddp_mpi_abandon(void)
{
    atomic_store(&all.abandoned, true);
}

bool tddp_mpi_is_abandoned(void)
{
    return atomic_load(&all.abandoned);
}

/* --- the list: with the mutex held ----------------------------------------------------------- */

static bool has_room(void)
{
    if (all.count < all.capacity) {
        return true;
    }
    const size_t capacity = all.capacity ? 2 * all.capacity : FIRST_REQUESTS;
    MPI_Request *requests = realloc(all.requests, capacity * sizeof *requests);
    all.requests = requests ? requests : all.requests;
    tddp_mpi_transfer **transfers =
        requests ? realloc(all.transfers, capacity * sizeof *transfers) : NULL;
    all.transfers = transfers ? transfers : all.transfers;
    all.capacity = transfers ? capacity : all.capacity;
    return transfers != NULL;
}

static void complete(size_t index, int code, int source)
{
    tddp_mpi_transfer *transfer = all.transfers[index];
    all.count--;
    all.requests[index] = all.requests[all.count];
    all.transfers[index] = all.transfers[all.count];
    all.transfers[index]->index = index;
    transfer->code = code;
    transfer->source = source;
    atomic_fetch_sub(&transfer->group->sending, transfer->sends);
    atomic_store(&transfer->complete, true);
    tddp_eventcount_notify(transfer->group->events);
}

/* Tests all; returns whether one is complete. */
static bool poll_all(void)
{
    bool found = false;
    int done = 1;
    while (done && all.count > 0 && !tddp_mpi_is_abandoned()) {
        int index = MPI_UNDEFINED;
        MPI_Status status;
        const int code = MPI_Testany((int)all.count, all.requests, &index, &done, &status);
        if (code != MPI_SUCCESS && index == MPI_UNDEFINED) {
            tddp_mpi_abandon(); /* none can be told to have failed */
            return true;
        }
        if (index == MPI_UNDEFINED) {
            return found;
        }
        complete((size_t)index, code, status.MPI_SOURCE);
        found = true;
    }
    return found;
}

/* --- transfers ------------------------------------------------------------------------------- */

tddp_status tddp_mpi_start(tddp_mpi_transfer *transfer, const tddp_mpi_message *it)
{
    const bool sends = transfer->sends;
    int code = MPI_SUCCESS;
    pthread_mutex_lock(&all.mutex);
    const bool room = has_room();
    if (room) {
        MPI_Request *request = &all.requests[all.count];
        code = sends
                   ? MPI_Isend(it->data, it->count, it->type, it->peer, it->tag, it->comm, request)
                   : MPI_Irecv(it->data, it->count, it->type, it->peer, it->tag, it->comm, request);
    }
    if (room && code == MPI_SUCCESS) {
        transfer->index = all.count;
        atomic_fetch_add(&transfer->group->sending, sends);
        all.transfers[all.count++] = transfer;
    }
    pthread_mutex_unlock(&all.mutex);
    return room ? tddp_mpi_check(code, sends ? "send" : "recv")
                : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
}

/* A receive without a message ends at once. MPI can't cancel others: these end by themselves, or
 * MPI is abandoned. */
void tddp_mpi_end(tddp_mpi_transfer *transfer)
{
    int64_t deadline = 0;
    pthread_mutex_lock(&all.mutex);
    while (!transfer->complete && !tddp_mpi_is_abandoned()) {
        if (deadline == 0) {
            deadline = now_ns() + CANCEL_NS;
            if (!transfer->sends) {
                (void)MPI_Cancel(&all.requests[transfer->index]);
            }
        } else if (now_ns() > deadline) {
            tddp_mpi_abandon();
        }
        if (!poll_all()) {
            pthread_mutex_unlock(&all.mutex);
            sleep_for(LONGEST_NS);
            pthread_mutex_lock(&all.mutex);
        }
    }
    pthread_mutex_unlock(&all.mutex);
}

void tddp_mpi_progress(void *context)
{
    (void)context;
    atomic_store(&all.polled, true);
    if (pthread_mutex_trylock(&all.mutex) == 0) { /* else another thread does it */
        (void)poll_all();
        pthread_mutex_unlock(&all.mutex);
    }
}

void tddp_mpi_await_sent(const tddp_mpi *group, int64_t ms)
{
    const int64_t end = now_ns() + ms * NS_PER_MS;
    while (atomic_load(&group->sending) > 0 && now_ns() < end && !tddp_mpi_is_abandoned()) {
        tddp_mpi_progress(NULL);
        sleep_for(LONGEST_NS);
    }
}

/* --- the thread ------------------------------------------------------------------------------ */

/* It sees the new time before it sleeps, or is seen to sleep. */
void tddp_mpi_arm(void *context)
{
    (void)context;
    atomic_store(&all.armed_until, now_ns() + ARMED_NS);
    if (atomic_load(&all.sleeping)) {
        pthread_mutex_lock(&all.mutex);
        pthread_cond_signal(&all.wake);
        pthread_mutex_unlock(&all.mutex);
    }
}

/* With the mutex held: sleeps until it is armed, or is to end. */
static void await_work(void)
{
    atomic_store(&all.sleeping, true);
    while (!all.stopping && (tddp_mpi_is_abandoned() || now_ns() > atomic_load(&all.armed_until))) {
        pthread_cond_wait(&all.wake, &all.mutex);
    }
    atomic_store(&all.sleeping, false);
}

/* After `rounds` that found nothing. A caller that tests as well needs the core more. */
static void pause_after(int rounds)
{
    const int64_t ns = (int64_t)STEP_NS * (rounds - YIELDS);
    if (atomic_exchange(&all.polled, false)) {
        sleep_for(LONGEST_NS);
    } else if (ns <= 0) {
        (void)sched_yield();
    } else {
        sleep_for(ns < LONGEST_NS ? ns : LONGEST_NS);
    }
}

static void *run(void *data)
{
    int rounds = 0;
    pthread_mutex_lock(&all.mutex);
    while (!all.stopping) {
        if (tddp_mpi_is_abandoned() || now_ns() > atomic_load(&all.armed_until)) {
            await_work();
            rounds = 0;
            continue;
        }
        rounds = poll_all() ? 0 : rounds + 1;
        pthread_mutex_unlock(&all.mutex);
        pause_after(rounds);
        pthread_mutex_lock(&all.mutex);
    }
    pthread_mutex_unlock(&all.mutex);
    return data;
}

/* Signals are the host language's. */
static int start_thread(void)
{
    sigset_t every;
    sigset_t before;
    sigfillset(&every);
    int error = pthread_sigmask(SIG_SETMASK, &every, &before);
    if (error == 0) {
        all.stopping = false;
        error = pthread_create(&all.thread, NULL, run, NULL);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return error;
}

tddp_status tddp_mpi_add_group(void)
{
    pthread_mutex_lock(&all.groups_mutex);
    const int error = atomic_load(&all.groups) > 0 ? 0 : start_thread();
    atomic_fetch_add(&all.groups, error == 0);
    pthread_mutex_unlock(&all.groups_mutex);
    return error ? tddp_fail(TDDP_SYSTEM, "cannot start a thread for MPI: %s", strerror(error))
                 : TDDP_OK;
}

void tddp_mpi_remove_group(void)
{
    pthread_mutex_lock(&all.groups_mutex);
    if (atomic_fetch_sub(&all.groups, 1) == 1) {
        pthread_mutex_lock(&all.mutex);
        all.stopping = true;
        pthread_cond_signal(&all.wake);
        pthread_mutex_unlock(&all.mutex);
        (void)pthread_join(all.thread, NULL);
        free(all.requests);
        free(all.transfers);
        all.requests = NULL;
        all.transfers = NULL;
        all.count = all.capacity = 0;
    }
    pthread_mutex_unlock(&all.groups_mutex);
}

bool tddp_mpi_has_groups(void)
{
    return atomic_load(&all.groups) > 0;
}
