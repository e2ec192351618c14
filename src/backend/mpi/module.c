/*
 * The backend table "mpi", and a group's context: communicators of its ranks, made from
 * MPI_COMM_WORLD by the members alone. Ranks learn each other's place in it through the store, so a
 * rank that does not come is an error in time, not a hang within MPI.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/mpi/mpi.h"

enum { CHECK_MS = 1000, PLACE_BYTES = 32, SMALL_BYTES = 64 * 1024 };

/* Groups that have not been destroyed: as long as there are some, MPI does not end. */
static _Atomic int alive;

int tddp_mpi_groups(void)
{
    return atomic_load(&alive);
}

/* --- the members ----------------------------------------------------------------------------- */

/* What each rank says of itself: its number among MPI's processes, and how many there are. */
static tddp_status read_places(const tddp_backend_opts *opts, const tddp_slice *records,
                               int expected, int *places)
{
    for (int rank = 0; rank < opts->world_size; rank++) {
        int size = 0;
        if (sscanf(records[rank].data, "%d %d", &places[rank], &size) != 2 || size != expected) {
            return tddp_fail(
                TDDP_MISMATCH,
                "rank %d is in a world of %d MPI processes, rank %d in one of %d: start all by one "
                "mpirun, mpiexec or srun --mpi of %s",
                rank, size, opts->rank, expected, tddp_mpi_library().text);
        }
        for (int other = 0; other < rank; other++) {
            if (places[other] == places[rank]) {
                return tddp_fail(TDDP_MISMATCH,
                                 "ranks %d and %d are both number %d of MPI's processes: start "
                                 "all by one mpirun, mpiexec or srun --mpi of %s",
                                 other, rank, places[rank], tddp_mpi_library().text);
            }
        }
    }
    return TDDP_OK;
}

static tddp_status exchange_places(const tddp_backend_opts *opts, const tddp_wait *wait,
                                   int *places)
{
    char record[PLACE_BYTES];
    int place = 0;
    int size = 0;
    tddp_meeting *meeting;
    if (MPI_Comm_rank(MPI_COMM_WORLD, &place) || MPI_Comm_size(MPI_COMM_WORLD, &size)) {
        return tddp_fail(TDDP_NETWORK, "MPI does not say which process this is");
    }
    int length = snprintf(record, sizeof record, "%d %d", place, size);
    const tddp_meeting_opts meeting_opts = {.store = opts->store,
                                            .name = "mpi",
                                            .rank = opts->rank,
                                            .world_size = opts->world_size,
                                            .sender = TDDP_MEETING_ALL,
                                            .names = opts->names,
                                            .check = opts->check,
                                            .data = opts->check_data,
                                            .check_ms = CHECK_MS};
    tddp_status status = tddp_meeting_open(&meeting_opts, &meeting);
    if (status) {
        return status;
    }
    const tddp_wait limit = {wait && wait->timeout_ms >= 0 ? wait->timeout_ms : opts->timeout_ms,
                             wait ? wait->cancel : NULL};
    status = tddp_meeting_give(meeting, (tddp_slice){record, (size_t)length}, &limit);
    status = status ? status : tddp_meeting_await(meeting, &limit);
    status = status ? status : read_places(opts, tddp_meeting_records(meeting), size, places);
    tddp_meeting_close(meeting);
    return status;
}

/* --- communicators --------------------------------------------------------------------------- */

/* The same on all members, and most likely another for groups that are made at the same time by
 * other threads. */
static int tag_of(const char *name)
{
    return (int)(tddp_digest_fold(tddp_digest(TDDP_DIGEST_START, name, strlen(name))) % 32768);
}

static tddp_status make_communicators(tddp_mpi *self, const char *name, const int *places)
{
    MPI_Group world;
    MPI_Group members;
    MPI_Comm *comms[] = {&self->collectives, &self->headers, &self->payloads};
    tddp_status status = tddp_mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    if (status) {
        return status;
    }
    status = tddp_mpi_check(MPI_Group_incl(world, self->size, places, &members), "MPI_Group_incl");
    (void)MPI_Group_free(&world);
    if (status) {
        return status;
    }
    for (size_t i = 0; i < sizeof comms / sizeof *comms && status == TDDP_OK; i++) {
        status =
            tddp_mpi_check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag_of(name), comms[i]),
                           "MPI_Comm_create_group");
        if (status == TDDP_OK) {
            status = tddp_mpi_check(MPI_Comm_set_errhandler(*comms[i], MPI_ERRORS_RETURN),
                                    "MPI_Comm_set_errhandler");
        }
    }
    (void)MPI_Group_free(&members);
    return status;
}

/* --- life cycle ------------------------------------------------------------------------------ */

static void abort_group(void *data)
{
    tddp_mpi *self = data;
    atomic_store(&self->aborted, true);
}

/* What MPI may still use stays, and the group counts as alive. */
static void destroy(void *data)
{
    tddp_mpi *self = data;
    if (tddp_mpi_given_up() || self->comparing || self->lost) {
        return;
    }
    MPI_Comm *comms[] = {&self->collectives, &self->headers, &self->payloads};
    for (size_t i = 0; i < sizeof comms / sizeof *comms; i++) {
        if (*comms[i] != MPI_COMM_NULL) {
            (void)MPI_Comm_free(comms[i]);
        }
    }
    free((void *)self->sent);
    free(self);
    atomic_fetch_sub(&alive, 1);
}

static tddp_status connect(tddp_mpi *self, const tddp_backend_opts *opts, const tddp_wait *wait)
{
    int *places = calloc((size_t)self->size, sizeof *places);
    if (!places) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = exchange_places(opts, wait, places);
    if (status == TDDP_OK) {
        status = make_communicators(self, opts->group, places);
    }
    free(places);
    return status;
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    tddp_status status = tddp_mpi_begin();
    status = status ? status : tddp_mpi_make_reductions();
    if (status) {
        return status;
    }
    tddp_mpi *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->rank = opts->rank;
    self->size = opts->world_size;
    self->collectives = self->headers = self->payloads = MPI_COMM_NULL;
    self->sent = calloc((size_t)self->size, sizeof *self->sent);
    atomic_fetch_add(&alive, 1);
    status =
        self->sent ? connect(self, opts, wait) : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    if (status) {
        destroy(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

/* --- operations ------------------------------------------------------------------------------ */

static tddp_status run(void *data, const tddp_op *op)
{
    tddp_mpi *self = data;
    tddp_status status = tddp_mpi_begin();
    if (status) {
        return status;
    }
    tddp_mpi_limits limits = tddp_mpi_limits_of(self, op);
    status = tddp_mpi_compare(self, op, &limits);
    if (status || op->kind == TDDP_OP_BARRIER) {
        return status;
    }
    if (tddp_mpi_has_carried(self)) {
        tddp_mpi_take_carried(self, op);
        return TDDP_OK;
    }
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_REDUCE_SCATTER:
        return tddp_mpi_reduce(self, op, &limits);
    default:
        return tddp_mpi_move(self, op, &limits);
    }
}

static const tddp_backend_v1 backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof(tddp_backend_v1),
    .name = "mpi",
    .device_types = 1u << TDDP_CPU,
    .create = create,
    .abort = abort_group,
    .destroy = destroy,
    .post = tddp_mpi_post,
    .finish = tddp_mpi_finish,
    .op_count = TDDP_OP_COUNT,
    .run = {[TDDP_OP_ALL_REDUCE] = run,
            [TDDP_OP_BROADCAST] = run,
            [TDDP_OP_BARRIER] = run,
            [TDDP_OP_ALL_GATHER] = run,
            [TDDP_OP_REDUCE_SCATTER] = run,
            [TDDP_OP_REDUCE] = run,
            [TDDP_OP_GATHER] = run,
            [TDDP_OP_SCATTER] = run,
            [TDDP_OP_ALL_TO_ALL] = run},
};

TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);

const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? &backend : NULL;
}
