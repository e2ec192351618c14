/*
 * MPI as a transport (tddp/transport.h): what the files of this module share.
 *
 * MPI moves data only while it is called, and can't stop a message whose data are on their way. So
 * one list has the requests of all groups, tested by threads that wait and by one of the process's
 * (requests.c). If a transfer that must end doesn't, MPI may still use its memory: the process is
 * done with MPI then, no thread calls it again, and every group fails.
 */
#ifndef TDDP_MPI_H
#define TDDP_MPI_H

#include <mpi.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <tddp/backend.h>
#include <tddp/transport.h>

/* A process among those that one launcher has started. */
typedef struct tddp_mpi_place {
    int number;
    int processes;
} tddp_mpi_place;

/* A rank of a group. */
typedef struct tddp_mpi {
    int rank;
    int size;
    tddp_mpi_place place;
    int creation_tag;
    MPI_Comm program;  /* for messages with a program's own tags */
    MPI_Comm internal; /* for all others */
    int largest_tag;
    struct tddp_eventcount *events;
    _Atomic int sending; /* sends that are not complete */
    _Atomic bool closed;
    _Atomic bool failed;
} tddp_mpi;

typedef struct tddp_mpi_transfer {
    tddp_mpi *group;
    size_t index; /* of its request in the list, until it is complete */
    bool sends;
    int code; /* MPI's, once it is complete */
    int source;
    _Atomic bool complete;
} tddp_mpi_transfer;

/* What MPI_Isend and MPI_Irecv get. */
typedef struct tddp_mpi_message {
    void *data;
    int count;
    MPI_Datatype type;
    int peer;
    int tag;
    MPI_Comm comm;
} tddp_mpi_message;

/* --- library.c ------------------------------------------------------------------------------- */

/* Begins MPI if nobody has. Any thread. Errors: TDDP_UNAVAILABLE, with what is missing. */
TDDP_NODISCARD tddp_status tddp_mpi_begin(void);

/* A group has failed, and others may never end: the end of this process waits for theirs for a
 * moment at most. */
void tddp_mpi_limit_end(void);

/* TDDP_OK for MPI_SUCCESS, else TDDP_NETWORK with MPI's text. */
TDDP_NODISCARD tddp_status tddp_mpi_check(int code, const char *what);

/* Name and version of the MPI that is linked. */
typedef struct tddp_mpi_name {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
} tddp_mpi_name;
tddp_mpi_name tddp_mpi_library(void);

/* --- requests.c ------------------------------------------------------------------------------ */

/* One more group, or one less: the thread runs while there is one. Errors: TDDP_SYSTEM. */
TDDP_NODISCARD tddp_status tddp_mpi_add_group(void);
void tddp_mpi_remove_group(void);
bool tddp_mpi_has_groups(void);

/* No further call of MPI in this process; see above. */
void tddp_mpi_abandon(void);
bool tddp_mpi_is_abandoned(void);

/* Posts a message, which is tested from then on. Errors: TDDP_OUT_OF_MEMORY, TDDP_NETWORK. */
TDDP_NODISCARD tddp_status tddp_mpi_start(tddp_mpi_transfer *transfer,
                                          const tddp_mpi_message *message);

/* Cancels it if it is not complete, and returns when MPI doesn't use its memory any more. */
void tddp_mpi_end(tddp_mpi_transfer *transfer);

/* Returns once the group's sends are complete, or after so many milliseconds. */
void tddp_mpi_await_sent(const tddp_mpi *group, int64_t ms);

void tddp_mpi_progress(void *context);
void tddp_mpi_arm(void *context);

/* --- transfers.c ----------------------------------------------------------------------------- */

tddp_status tddp_mpi_send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                          void **transfer);
tddp_status tddp_mpi_recv(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                          void **transfer);
tddp_status tddp_mpi_test(void *context, void *transfer, int *complete, int *source);
void tddp_mpi_release(void *context, void *transfer);

#endif
