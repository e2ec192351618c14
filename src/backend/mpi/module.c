/*
 * The backend table "mpi": the transport, and all operations over it (tddp/transport.h). A group
 * has communicators of its ranks, made from MPI_COMM_WORLD by the members alone. Ranks learn each
 * other's place in it through the store, so a rank that does not come is an error in time, not a
 * hang within MPI.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>
#include <tddp/meeting.h>

#include "backend/mpi/mpi.h"

enum { CHECK_MS = 1000, PLACE_BYTES = 32 };

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

static tddp_status make_communicators(tddp_mpi *self, const tddp_backend_opts *opts,
                                      const int *places)
{
    MPI_Group world;
    MPI_Group members;
    MPI_Comm *comms[] = {&self->program, &self->internal};
    tddp_status status = tddp_mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    if (status) {
        return status;
    }
    status =
        tddp_mpi_check(MPI_Group_incl(world, opts->world_size, places, &members), "MPI_Group_incl");
    (void)MPI_Group_free(&world);
    if (status) {
        return status;
    }
    for (size_t i = 0; i < sizeof comms / sizeof *comms && status == TDDP_OK; i++) {
        status = tddp_mpi_check(
            MPI_Comm_create_group(MPI_COMM_WORLD, members, tag_of(opts->group), comms[i]),
            "MPI_Comm_create_group");
        if (status == TDDP_OK) {
            status = tddp_mpi_check(MPI_Comm_set_errhandler(*comms[i], MPI_ERRORS_RETURN),
                                    "MPI_Comm_set_errhandler");
        }
    }
    (void)MPI_Group_free(&members);
    return status;
}

static tddp_status read_largest_tag(tddp_mpi *self)
{
    int *most = NULL;
    int found = 0;
    if (MPI_Comm_get_attr(self->program, MPI_TAG_UB, &most, &found) || !found) {
        return tddp_fail(TDDP_NETWORK, "MPI does not say which tags it has");
    }
    self->largest_tag = *most;
    return TDDP_OK;
}

/* --- life cycle ------------------------------------------------------------------------------ */

static void abort_group(void *context)
{
    tddp_mpi *self = context;
    atomic_store(&self->aborted, true);
    tddp_eventcount_notify(self->events);
}

/* Where MPI was abandoned, the thread, which doesn't call it any more, still ends. */
static void destroy(void *context)
{
    tddp_mpi *self = context;
    MPI_Comm *comms[] = {&self->program, &self->internal};
    tddp_coll_destroy(self->coll);
    for (size_t i = 0; i < sizeof comms / sizeof *comms; i++) {
        if (*comms[i] != MPI_COMM_NULL && !tddp_mpi_is_abandoned()) {
            (void)MPI_Comm_free(comms[i]);
        }
    }
    if (self->owns_events) {
        tddp_eventcount_free(self->events);
    }
    tddp_mpi_remove_group();
    free(self);
}

static tddp_status connect(tddp_mpi *self, const tddp_backend_opts *opts, const tddp_wait *wait)
{
    int *places = calloc((size_t)opts->world_size, sizeof *places);
    if (!places) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = exchange_places(opts, wait, places);
    status = status ? status : make_communicators(self, opts, places);
    status = status ? status : read_largest_tag(self);
    free(places);
    return status;
}

static tddp_status open_coll(tddp_mpi *self, const tddp_backend_opts *opts)
{
    const tddp_coll_opts coll = {.size = sizeof coll,
                                 .transport = &tddp_mpi_transport,
                                 .context = self,
                                 .rank = opts->rank,
                                 .world_size = opts->world_size,
                                 .names = opts->names,
                                 .observer = opts->observer};
    return tddp_coll_create(&coll, &self->coll);
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    tddp_status status = tddp_mpi_begin();
    status = status ? status : tddp_mpi_add_group();
    if (status) {
        return status;
    }
    tddp_mpi *self = calloc(1, sizeof *self);
    if (!self) {
        tddp_mpi_remove_group();
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->program = self->internal = MPI_COMM_NULL;
    self->events = opts->events;
    self->owns_events = !opts->events;
    status = opts->events ? TDDP_OK : tddp_eventcount_create(&self->events);
    status = status ? status : connect(self, opts, wait);
    status = status ? status : open_coll(self, opts);
    if (status) {
        destroy(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

/* --- operations ------------------------------------------------------------------------------ */

static tddp_status run(void *context, const tddp_op *op)
{
    return tddp_coll_run(((tddp_mpi *)context)->coll, op);
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    return tddp_coll_post(((tddp_mpi *)context)->coll, op, request);
}

static tddp_status finish(void *context, void *request, int *source)
{
    return tddp_coll_finish(((tddp_mpi *)context)->coll, request, source);
}

static tddp_status probe(void *context, void *request, int *source)
{
    return tddp_coll_probe(((tddp_mpi *)context)->coll, request, source);
}

static struct tddp_eventcount *events(void *context)
{
    return ((tddp_mpi *)context)->events;
}

static const tddp_backend_v1 backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof(tddp_backend_v1),
    .name = "mpi",
    .device_types = 1u << TDDP_CPU,
    .create = create,
    .abort = abort_group,
    .destroy = destroy,
    .post = post,
    .finish = finish,
    .traits = TDDP_BACKEND_SHARES_HOSTS | TDDP_BACKEND_WHOLE_JOB | TDDP_BACKEND_RESUMES,
    .events = events,
    .probe = probe,
    .drop = tddp_coll_drop,
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
