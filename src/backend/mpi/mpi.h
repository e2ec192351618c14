/*
 * What the files of this module share: a group's context, and how its calls of MPI are waited for.
 *
 * MPI cannot take back what has begun, a message that was received in part or a collective: if its
 * time is over, its memory may be written later. Where that is only this module's own, since ranks
 * still wait for one that does not come, the group is lost and its memory stays. Else the process
 * is done with MPI: `given_up` is set, no thread calls MPI again, and every group fails. In both
 * cases the end of the process is not announced to MPI, so that mpirun ends the others.
 */
#ifndef TDDP_MPI_H
#define TDDP_MPI_H

#include <mpi.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <tddp/backend.h>
#include <tddp/call.h>

/* Elements, or bytes, of one call of MPI, whose counts are ints. */
enum { TDDP_MPI_MOST = 1 << 30 };

enum { TDDP_MPI_CARRIED = 208 };

/* What all ranks reduce before an operation: the greatest of each number, and the sum, or another
 * reduction, of data that are so small that they come along. */
typedef struct tddp_mpi_comparison {
    uint64_t digest;
    uint64_t inverse;
    uint64_t differing; /* 1: parts differ in size, so that one digest does not say all */
    uint64_t carried;   /* elements */
    uint32_t dtype;
    uint32_t reduce;
    _Alignas(8) char data[TDDP_MPI_CARRIED];
} tddp_mpi_comparison;

typedef struct tddp_mpi {
    int rank;
    int size;
    MPI_Comm collectives;
    MPI_Comm headers; /* of messages */
    MPI_Comm payloads;
    _Atomic bool aborted;
    _Atomic uint32_t *sent; /* messages to each rank so far */

    /* The operation that is compared: it may be left, and be resumed by another thread. */
    bool comparing;
    bool lost; /* the comparison can no longer end: MPI may still write to `all` */
    MPI_Request request;
    int64_t deadline_ns;
    tddp_call call;
    tddp_call before; /* what all ranks called last */
    tddp_mpi_comparison mine;
    tddp_mpi_comparison all;
} tddp_mpi;

/* When a wait ends, and how it pauses. */
typedef struct tddp_mpi_limits {
    tddp_mpi *group;
    int64_t deadline_ns;
    int64_t timeout_ms;
    tddp_cancel *cancel; /* NULL: it cannot be left */
    bool awaited;        /* the thread has nothing else to do */
    bool arrived;        /* all ranks take part already */
} tddp_mpi_limits;

/* --- library.c ------------------------------------------------------------------------------- */

/* Begins MPI if nobody has. Any thread. Errors: TDDP_UNAVAILABLE, with what is missing. */
TDDP_NODISCARD tddp_status tddp_mpi_begin(void);

/* TDDP_OK for MPI_SUCCESS, else TDDP_NETWORK with MPI's text. */
TDDP_NODISCARD tddp_status tddp_mpi_check(int code, const char *what);

/* Name and version of the MPI that is linked. */
typedef struct tddp_mpi_name {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
} tddp_mpi_name;
tddp_mpi_name tddp_mpi_library(void);

/* No further call of MPI in this process; see above. */
void tddp_mpi_give_up(void);
bool tddp_mpi_given_up(void);

/* --- module.c -------------------------------------------------------------------------------- */

/* Groups that are not destroyed. */
int tddp_mpi_groups(void);

/* --- requests.c ------------------------------------------------------------------------------ */

int64_t tddp_mpi_now_ns(void);
tddp_mpi_limits tddp_mpi_limits_of(tddp_mpi *self, const tddp_op *op);

/* TDDP_OK, or why a wait ends now. */
TDDP_NODISCARD tddp_status tddp_mpi_check_limits(const tddp_mpi_limits *limits);

/* Waits for a request, which is still under way after a failure. */
TDDP_NODISCARD tddp_status tddp_mpi_wait_one(const tddp_mpi_limits *limits, MPI_Request *request,
                                             MPI_Status *status);

/* Waits for all of `count` requests; `code` is what starting them returned. After a failure the
 * process has given up MPI. */
TDDP_NODISCARD tddp_status tddp_mpi_wait(const tddp_mpi_limits *limits, int code,
                                         MPI_Request *requests, int count, const char *what);

/* Waits for a receive, which can be taken back if nothing comes: other groups go on. */
TDDP_NODISCARD tddp_status tddp_mpi_wait_receive(const tddp_mpi_limits *limits,
                                                 MPI_Request *request, MPI_Status *status);

/* --- calls.c --------------------------------------------------------------------------------- */

/* Compares the operation with those of the other ranks; all have arrived afterwards, and `limits`
 * say so. TDDP_CANCELED: call it again with the same operation. */
TDDP_NODISCARD tddp_status tddp_mpi_compare(tddp_mpi *self, const tddp_op *op,
                                            tddp_mpi_limits *limits);

/* Whether the ranks that were compared have reduced the data as well. */
bool tddp_mpi_has_carried(const tddp_mpi *self);

/* --- types.c --------------------------------------------------------------------------------- */

typedef struct tddp_mpi_reduction {
    MPI_Datatype type;
    MPI_Op op;
} tddp_mpi_reduction;

/* Makes MPI's types and operations, once for the process. */
TDDP_NODISCARD tddp_status tddp_mpi_make_reductions(void);

/* Of a tddp_mpi_comparison. */
tddp_mpi_reduction tddp_mpi_comparing(void);

/* MPI's own where it has them, else those of tddp_combine(). */
TDDP_NODISCARD tddp_status tddp_mpi_reduction_of(tddp_dtype dtype, tddp_reduce_op op,
                                                 tddp_mpi_reduction *out);

/* Before MPI ends. */
void tddp_mpi_free_reductions(void);

/* --- blocking.c ------------------------------------------------------------------------------ */

/* A reduction of as many elements as one call of MPI takes. */
typedef struct tddp_mpi_piece {
    const void *from;
    void *into;
    int count;
    tddp_mpi_reduction how;
    int root; /* < 0: for all ranks */
} tddp_mpi_piece;

/* By MPI's blocking call. After a failure the process has given up MPI. */
TDDP_NODISCARD tddp_status tddp_mpi_reduce_blocking(const tddp_mpi_limits *limits,
                                                    const tddp_mpi_piece *what);

/* --- reductions.c, moves.c, messages.c: slots of the table ----------------------------------- */

void tddp_mpi_carry(const tddp_mpi *self, const tddp_op *op, tddp_mpi_comparison *out);
void tddp_mpi_take_carried(const tddp_mpi *self, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_mpi_reduce(tddp_mpi *self, const tddp_op *op,
                                           const tddp_mpi_limits *limits);
TDDP_NODISCARD tddp_status tddp_mpi_move(tddp_mpi *self, const tddp_op *op,
                                         const tddp_mpi_limits *limits);
tddp_status tddp_mpi_post(void *context, const tddp_op *op, void **request);
tddp_status tddp_mpi_finish(void *context, void *request, int *source);

#endif
