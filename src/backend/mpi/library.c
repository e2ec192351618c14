/*
 * MPI as a whole: it begins once for the process, with the first group, and ends with the process.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tddp/log.h>

#include "backend/mpi/mpi.h"

/* For the other processes' ends after a failure. */
enum { END_MS = 5000 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t begun_by; /* 0: nobody has begun it here */
static _Atomic bool end_is_limited;

void tddp_mpi_limit_end(void)
{
    atomic_store(&end_is_limited, true);
}

tddp_status tddp_mpi_check(int code, const char *what)
{
    if (code == MPI_SUCCESS) {
        return TDDP_OK;
    }
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    if (MPI_Error_string(code, text, &length)) {
        length = snprintf(text, sizeof text, "error %d", code);
    }
    return tddp_fail(TDDP_NETWORK, "%s failed in MPI: %.*s", what, length, text);
}

/* What follows is who built it, and how. MPICH has a tab between. */
tddp_mpi_name tddp_mpi_library(void)
{
    tddp_mpi_name name = {""};
    int length = 0;
    (void)MPI_Get_library_version(name.text, &length);
    name.text[strcspn(name.text, ",\n")] = '\0';
    for (char *tab = name.text; (tab = strchr(tab, '\t'));) {
        *tab = ' ';
    }
    return name;
}

/* Whether all processes of the job end: MPI_Finalize waits for them without a limit. */
static bool all_end(void)
{
    MPI_Request request;
    int found = 0;
    bool failed = MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS;
    for (int ms = 0; !found && !failed && (ms < END_MS || !atomic_load(&end_is_limited)); ms++) {
        failed = MPI_Test(&request, &found, MPI_STATUS_IGNORE) != MPI_SUCCESS;
        if (!found) {
            (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    }
    return found && !failed;
}

/* A process that fails, or has groups left, does not wait for the others, so that mpirun ends them.
 * A child of a fork has its parent's state, but not its connections. */
static void end(int exit_status, void *data)
{
    int ended = 0;
    (void)data;
    if (exit_status != 0 || begun_by != getpid() || tddp_mpi_is_abandoned() ||
        tddp_mpi_has_groups() || MPI_Finalized(&ended) || ended || !all_end()) {
        tddp_mpi_abandon();
        return;
    }
    (void)MPI_Finalize();
}

#ifndef __GLIBC__
static void end_whatever_the_status(void)
{
    end(0, NULL);
}
#endif

static int end_at_exit(void)
{
#ifdef __GLIBC__
    return on_exit(end, NULL);
#else
    return atexit(end_whatever_the_status);
#endif
}

/* Components of some versions of Open MPI look for its symbols among those of the program. */
static void make_symbols_global(void)
{
    Dl_info info;
    if (dladdr((void *)(uintptr_t)MPI_Init_thread, &info) && info.dli_fname) {
        (void)dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    }
}

static tddp_status begin(void)
{
    int begun = 0;
    int provided = MPI_THREAD_SINGLE;
    tddp_status status = tddp_mpi_check(MPI_Initialized(&begun), "MPI_Initialized");
    if (status) {
        return status;
    }
    if (begun) {
        status = tddp_mpi_check(MPI_Query_thread(&provided), "MPI_Query_thread");
    } else {
        make_symbols_global();
        status = tddp_mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided),
                                "MPI_Init_thread");
        if (status == TDDP_OK && end_at_exit()) {
            status = tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to register what ends MPI");
        }
    }
    if (status) {
        return status;
    }
    begun_by = getpid();
    if (provided < MPI_THREAD_MULTIPLE) {
        return tddp_fail(
            TDDP_UNAVAILABLE,
            "this MPI does not allow several threads to call it (%s): expected one with "
            "MPI_THREAD_MULTIPLE",
            tddp_mpi_library().text);
    }
    return tddp_mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                          "MPI_Comm_set_errhandler");
}

tddp_status tddp_mpi_begin(void)
{
    if (tddp_mpi_is_abandoned()) {
        return tddp_fail(
            TDDP_GROUP_FAILED,
            "an operation over MPI did not end in its time, and MPI cannot take it back: "
            "end this process");
    }
    pthread_mutex_lock(&mutex);
    tddp_status status = TDDP_OK;
    int ended = 0;
    if (begun_by == 0) {
        status = begin();
    } else if (begun_by != getpid()) {
        status = tddp_fail(
            TDDP_FORKED,
            "MPI was begun by process %ld, and this is its child %ld: begin it in the child alone",
            (long)begun_by, (long)getpid());
    } else if (MPI_Finalized(&ended) || ended) {
        status =
            tddp_fail(TDDP_UNAVAILABLE, "MPI has ended in this process, and cannot begin twice");
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
