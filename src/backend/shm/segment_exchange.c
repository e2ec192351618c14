/*
 * Exchanges the descriptors of segments between the processes of a host: each rank requests each
 * other rank's segment at an abstract socket, whose name is in the store. Runs on the thread that
 * joins.
 *
 * Invariant: a rank's socket listens until the rank has sent its segment to all others, so a closed
 * connection means that the rank has ended or given up. Only poll() blocks, until the deadline.
 *
 * Ranks that are threads of one process share the owner's mapping: they send its address, which is
 * trusted because the kernel says which process sent it.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "backend/shm/control.h"

enum { RETRY_MS = 10, CHECK_MS = 100 };

/* The state of the exchange with one peer. */
typedef struct connection {
    int request_fd;  /* to the peer, for its segment; -1: none */
    int accepted_fd; /* accepted, and its request not received yet; in no order; -1: none */
    bool received;   /* the peer's segment */
    bool sent;       /* this rank's segment, to the peer */
} connection;

typedef struct exchange {
    const tddp_shm_segment_exchange *params;
    connection *connections;
    struct pollfd *polls;
    int *lost;
    bool retry;
} exchange;

static tddp_status fail_lost(const exchange *self, int rank)
{
    *self->lost = rank;
    return tddp_fail(TDDP_PEER_LOST, "lost rank %d, which ended while shared memory was set up",
                     tddp_shm_rank_name(self->params->shm, rank));
}

/* --- requesting ------------------------------------------------------------------------------ */

static tddp_status send_request(exchange *self, int rank)
{
    tddp_shm *shm = self->params->shm;
    tddp_status status =
        tddp_shm_request_segment(self->params->addresses[rank], tddp_shm_self(shm)->group_rank,
                                 tddp_shm_rank_name(shm, rank), &self->connections[rank].request_fd,
                                 &shm->peers[rank].same_process);
    if (status == TDDP_TIMEOUT) {
        self->retry = true; /* the backlog is full */
        return TDDP_OK;
    }
    return status == TDDP_PEER_LOST ? fail_lost(self, rank) : status;
}

static tddp_status receive_segment(exchange *self, int rank)
{
    connection *conn = &self->connections[rank];
    tddp_shm_segment *segment = NULL;
    tddp_status status = TDDP_OK;
    tddp_shm_receive_state state =
        tddp_shm_recv_segment(self->params->shm, rank, conn->request_fd, &status, &segment);
    if (state == TDDP_SHM_PENDING) {
        return TDDP_OK;
    }
    if (state == TDDP_SHM_CLOSED) {
        return fail_lost(self, rank);
    }
    tddp_shm_close_request(conn->request_fd, self->params->shm->peers[rank].same_process);
    conn->request_fd = -1;
    if (status == TDDP_OK) {
        tddp_shm_attach(self->params->shm, rank, segment, 0);
        conn->received = true;
    }
    return status;
}

/* --- replying -------------------------------------------------------------------------------- */

/* Ignores a sender that isn't a rank of this host, or already has the segment. */
static tddp_status answer_request(exchange *self, int fd, int group_rank)
{
    tddp_shm *shm = self->params->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        connection *conn = &self->connections[rank];
        if (shm->peers[rank].group_rank == group_rank && rank != shm->rank && !conn->sent) {
            bool same_process = false;
            tddp_status status =
                tddp_shm_check_user(fd, tddp_shm_rank_name(shm, rank), &same_process);
            if (status == TDDP_OK && !tddp_shm_send_segment(shm, fd, same_process)) {
                status = fail_lost(self, rank);
            }
            conn->sent = status == TDDP_OK;
            return status;
        }
    }
    return TDDP_OK;
}

static tddp_status receive_request(exchange *self, int *accepted_fd)
{
    int group_rank;
    tddp_status status = TDDP_OK;
    tddp_shm_receive_state state = tddp_shm_recv_request(*accepted_fd, &group_rank);
    if (state == TDDP_SHM_PENDING) {
        return TDDP_OK;
    }
    if (state == TDDP_SHM_RECEIVED) {
        status = answer_request(self, *accepted_fd, group_rank);
    }
    tddp_close(*accepted_fd);
    *accepted_fd = -1;
    return status;
}

static tddp_status accept_connections(exchange *self)
{
    for (int i = 0; i < self->params->shm->size; i++) {
        int *accepted_fd = &self->connections[i].accepted_fd;
        if (*accepted_fd >= 0) {
            continue;
        }
        *accepted_fd = accept4(self->params->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (*accepted_fd < 0) {
            bool passing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
            return passing ? TDDP_OK : tddp_fail_errno("accept4");
        }
    }
    return TDDP_OK;
}

/* --- the exchange ---------------------------------------------------------------------------- */

static bool is_done(const exchange *self)
{
    const tddp_shm *shm = self->params->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const connection *conn = &self->connections[rank];
        if (rank != shm->rank && !(conn->received && conn->sent)) {
            return false;
        }
    }
    return true;
}

static tddp_status send_missing_requests(exchange *self)
{
    const tddp_shm *shm = self->params->shm;
    tddp_status status = TDDP_OK;
    self->retry = false;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        const connection *conn = &self->connections[rank];
        if (rank != shm->rank && !conn->received && conn->request_fd < 0) {
            status = send_request(self, rank);
        }
    }
    return status;
}

/* Checks the peers that sent their segments but have not requested this rank's. */
static tddp_status check_silent_peers(const exchange *self)
{
    const tddp_shm *shm = self->params->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const tddp_shm_peer *peer = &shm->peers[rank];
        const connection *conn = &self->connections[rank];
        if (rank != shm->rank && conn->received && !conn->sent &&
            (atomic_load(&peer->control->state) != TDDP_SHM_ACTIVE ||
             (!peer->same_process && tddp_shm_segment_owner_ended(peer->segment)))) {
            return fail_lost(self, rank);
        }
    }
    return TDDP_OK;
}

static tddp_status fail_timeout(const exchange *self)
{
    const tddp_shm *shm = self->params->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const connection *conn = &self->connections[rank];
        if (rank != shm->rank && !(conn->received && conn->sent)) {
            return tddp_fail(TDDP_TIMEOUT,
                             "no shared memory with rank %d in the time given: slow, or stuck?",
                             tddp_shm_rank_name(shm, rank));
        }
    }
    return tddp_fail(TDDP_TIMEOUT, "no shared memory in the time given");
}

static tddp_status poll_connections(exchange *self)
{
    const tddp_shm_segment_exchange *params = self->params;
    const int size = params->shm->size;
    struct pollfd *polls = self->polls;
    polls[0] = (struct pollfd){params->cancel_fd, POLLIN, 0};
    polls[1] = (struct pollfd){params->listen_fd, POLLIN, 0};
    for (int i = 0; i < size; i++) {
        polls[2 + 2 * i] = (struct pollfd){self->connections[i].request_fd, POLLIN, 0};
        polls[3 + 2 * i] = (struct pollfd){self->connections[i].accepted_fd, POLLIN, 0};
    }
    int left = tddp_deadline_poll_ms(params->deadline);
    int max_ms = self->retry ? RETRY_MS : CHECK_MS;
    int ready = poll(polls, (nfds_t)(2 + 2 * size), left < max_ms ? left : max_ms);
    if (ready < 0 && errno != EINTR) {
        return tddp_fail_errno("poll");
    }
    if (polls[0].revents) {
        return tddp_fail(TDDP_CANCELED, "interrupted while shared memory was set up");
    }
    if (ready < 0) {
        memset(polls, 0, (size_t)(2 + 2 * size) * sizeof *polls); /* not valid after an error */
    }
    if (ready <= 0) {
        return left == 0 ? fail_timeout(self) : check_silent_peers(self);
    }
    return TDDP_OK;
}

static tddp_status make_progress(exchange *self)
{
    const int size = self->params->shm->size;
    tddp_status status = poll_connections(self);
    for (int i = 0; i < size && status == TDDP_OK; i++) {
        if (self->connections[i].accepted_fd >= 0 && self->polls[3 + 2 * i].revents) {
            status = receive_request(self, &self->connections[i].accepted_fd);
        }
    }
    if (status == TDDP_OK) {
        status = accept_connections(self);
    }
    for (int rank = 0; rank < size && status == TDDP_OK; rank++) {
        if (self->connections[rank].request_fd >= 0 && self->polls[2 + 2 * rank].revents) {
            status = receive_segment(self, rank);
        }
    }
    return status;
}

tddp_status tddp_shm_exchange_segments(const tddp_shm_segment_exchange *params, int *lost)
{
    const size_t size = (size_t)params->shm->size;
    exchange self = {.params = params, .lost = lost};
    self.connections = tddp_alloc_array(size, sizeof *self.connections);
    self.polls = tddp_alloc_array(2 + 2 * size, sizeof *self.polls);
    tddp_status status = self.connections && self.polls ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (size_t i = 0; self.connections && i < size; i++) {
        self.connections[i] = (connection){-1, -1, false, false};
    }
    while (status == TDDP_OK && !is_done(&self)) {
        status = send_missing_requests(&self);
        if (status == TDDP_OK) {
            status = make_progress(&self);
        }
    }
    for (size_t i = 0; self.connections && i < size; i++) {
        tddp_shm_close_request(self.connections[i].request_fd, params->shm->peers[i].same_process);
        tddp_close(self.connections[i].accepted_fd);
    }
    free(self.connections);
    free(self.polls);
    return status;
}
