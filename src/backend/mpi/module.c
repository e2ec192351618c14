/*
 * A group's communicators, and the module. They are made from MPI_COMM_WORLD by the members alone,
 * whose addresses are their places in it: a rank that does not come is an error of the ranks'
 * meeting in time, not a hang within MPI.
 */
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>

#include "backend/mpi/mpi.h"

/* The same on all members, and most likely another for groups that are made at the same time by
 * other threads. */
static int tag_of(const char *name)
{
    return (int)(tddp_digest_fold(tddp_digest(TDDP_DIGEST_START, name, strlen(name))) % 32768);
}

static tddp_status open_transport(const tddp_backend_opts *opts, void **context,
                                  tddp_slice *address)
{
    tddp_status status = tddp_mpi_begin();
    tddp_mpi *self = status ? NULL : calloc(1, sizeof *self);
    if (!self) {
        return status ? status : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->rank = opts->rank;
    self->size = opts->world_size;
    self->creation_tag = tag_of(opts->group);
    self->events = opts->events;
    self->program = self->internal = MPI_COMM_NULL;
    if (MPI_Comm_rank(MPI_COMM_WORLD, &self->place.number) ||
        MPI_Comm_size(MPI_COMM_WORLD, &self->place.processes)) {
        status = tddp_fail(TDDP_NETWORK, "MPI does not say which process this is");
    }
    status = status ? status : tddp_mpi_add_group();
    if (status) {
        free(self);
        return status;
    }
    *context = self;
    *address = (tddp_slice){(const char *)&self->place, sizeof self->place};
    return TDDP_OK;
}

/* The numbers of all ranks' processes, which are of one job. */
static tddp_status read_places(const tddp_mpi *self, const tddp_slice *addresses, int *numbers)
{
    for (int rank = 0; rank < self->size; rank++) {
        tddp_mpi_place place = {0};
        if (addresses[rank].size == sizeof place) {
            memcpy(&place, addresses[rank].data, sizeof place);
        }
        if (place.processes != self->place.processes) {
            return tddp_fail(
                TDDP_MISMATCH,
                "rank %d is in a world of %d MPI processes, rank %d in one of %d: start all by one "
                "mpirun, mpiexec or srun --mpi of %s",
                rank, place.processes, self->rank, self->place.processes, tddp_mpi_library().text);
        }
        numbers[rank] = place.number;
        for (int other = 0; other < rank; other++) {
            if (numbers[other] == numbers[rank]) {
                return tddp_fail(TDDP_MISMATCH,
                                 "ranks %d and %d are both number %d of MPI's processes: start "
                                 "all by one mpirun, mpiexec or srun --mpi of %s",
                                 other, rank, numbers[rank], tddp_mpi_library().text);
            }
        }
    }
    return TDDP_OK;
}

static tddp_status make_communicators(tddp_mpi *self, const int *numbers)
{
    MPI_Group world;
    MPI_Group members;
    MPI_Comm *comms[] = {&self->program, &self->internal};
    tddp_status status = tddp_mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    if (status) {
        return status;
    }
    status = tddp_mpi_check(MPI_Group_incl(world, self->size, numbers, &members), "MPI_Group_incl");
    (void)MPI_Group_free(&world);
    if (status) {
        return status;
    }
    for (size_t i = 0; i < sizeof comms / sizeof *comms && status == TDDP_OK; i++) {
        status = tddp_mpi_check(
            MPI_Comm_create_group(MPI_COMM_WORLD, members, self->creation_tag, comms[i]),
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

static tddp_status connect(void *context, const tddp_slice *addresses, const tddp_wait *wait,
                           int *peer)
{
    tddp_mpi *self = context;
    int *numbers = calloc((size_t)self->size, sizeof *numbers);
    (void)wait; /* all have come, and MPI connects them */
    (void)peer;
    if (!numbers) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = read_places(self, addresses, numbers);
    status = status ? status : make_communicators(self, numbers);
    status = status ? status : read_largest_tag(self);
    free(numbers);
    return status;
}

static void close_transport(void *context, int64_t ms)
{
    tddp_mpi *self = context;
    tddp_mpi_await_sent(self, ms);
    atomic_store(&self->closed, true);
    tddp_eventcount_notify(self->events);
}

static void failed(void *context)
{
    tddp_mpi *self = context;
    atomic_store(&self->failed, true);
    tddp_mpi_limit_end();
}

/* A message that comes later, after a failure, would be taken for one of another group with the
 * same communicator: so that stays. */
static void destroy(void *context)
{
    tddp_mpi *self = context;
    MPI_Comm *comms[] = {&self->program, &self->internal};
    const bool frees = !atomic_load(&self->failed) && !tddp_mpi_is_abandoned();
    for (size_t i = 0; frees && i < sizeof comms / sizeof *comms; i++) {
        if (*comms[i] != MPI_COMM_NULL) {
            (void)MPI_Comm_free(comms[i]);
        }
    }
    tddp_mpi_remove_group();
    free(self);
}

static const tddp_transport_ops transport = {
    .size = sizeof(tddp_transport_ops),
    .name = "mpi",
    .traits = TDDP_BACKEND_SHARES_HOSTS | TDDP_BACKEND_WHOLE_JOB,
    .open = open_transport,
    .connect = connect,
    .send = tddp_mpi_send,
    .recv = tddp_mpi_recv,
    .test = tddp_mpi_test,
    .release = tddp_mpi_release,
    .progress = tddp_mpi_progress,
    .arm = tddp_mpi_arm,
    .close = close_transport,
    .destroy = destroy,
    .failed = failed,
};

TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);

const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? tddp_transport_backend(&transport) : NULL;
}
