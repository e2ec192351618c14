/*
 * Exchanges the descriptors of segments between the processes of a host: each rank listens at an
 * abstract socket, whose name the others know from the first meeting, and sends its segment to each
 * of theirs, by a connection for this one message. Runs on the thread that joins.
 *
 * Invariant: a rank listens until it has sent and received all segments, or the second meeting has
 * why it will not. So where nobody listens, the process has ended or the meeting says why.
 *
 * Both ends accept only processes of the same user, by the kernel's credentials (SO_PEERCRED).
 * Ranks that are threads of one process share the owner's mapping: they send its address, which is
 * trusted because the kernel says which process sent it.
 */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shm/control.h"
#include "net/net.h"

enum {
    MAGIC = 0x7464736e,
    RETRY_MS = 10,    /* before a segment is sent again that could not be sent at once */
    CHECK_MS = 100,   /* between two checks of the ranks that have sent nothing */
    MESSAGE_MS = 1000 /* from a connection to its message, which is sent at once */
};

typedef struct message {
    uint32_t magic;
    int32_t group_rank;
    uint64_t bytes;
    tddp_shm_segment *segment; /* same process: a reference for the receiver; else NULL */
} message;

/* Room for a descriptor beside a message. */
typedef union attachment {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} attachment;

static socklen_t fill_address(const char *name, struct sockaddr_un *out)
{
    size_t length = strlen(name);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, name, length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

static int open_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

tddp_status tddp_shm_listen(int backlog, int *fd, char address[TDDP_SHM_ADDRESS_BYTES])
{
    uint64_t random[2];
    struct sockaddr_un at;
    if (getrandom(random, sizeof random, 0) != sizeof random) {
        return tddp_fail_errno("getrandom");
    }
    (void)snprintf(address, TDDP_SHM_ADDRESS_BYTES, "tddp-shm-%016llx%016llx",
                   (unsigned long long)random[0], (unsigned long long)random[1]);
    int made = open_socket();
    if (made < 0) {
        return tddp_fail_errno("socket");
    }
    if (bind(made, (struct sockaddr *)&at, fill_address(address, &at)) || listen(made, backlog)) {
        tddp_fail_errno("listening on a local socket");
        tddp_close(made);
        return TDDP_SYSTEM;
    }
    *fd = made;
    return TDDP_OK;
}

/* A connection to a rank; *out is -1 if it can't be made just now. Errors: TDDP_PEER_LOST, without
 * a text: nobody listens. */
static tddp_status connect_to(const char *address, int *out)
{
    struct sockaddr_un to;
    const socklen_t length = fill_address(address, &to);
    tddp_status status = TDDP_OK;
    *out = open_socket();
    if (*out < 0) {
        return tddp_fail_errno("socket");
    }
    if (connect(*out, (struct sockaddr *)&to, length)) {
        status = errno == EAGAIN || errno == EINTR ? TDDP_OK
                 : errno == ECONNREFUSED           ? TDDP_PEER_LOST
                                         : tddp_fail_errno("connecting to a local socket");
        tddp_close(*out);
        *out = -1;
    }
    return status;
}

bool tddp_shm_is_listening(const char *address)
{
    int fd;
    const tddp_status status = connect_to(address, &fd);
    tddp_close(fd);
    return status != TDDP_PEER_LOST;
}

static tddp_status check_user(int fd, int rank_name, bool *same_process)
{
    struct ucred other;
    socklen_t length = sizeof other;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &length)) {
        return tddp_fail_errno("SO_PEERCRED");
    }
    if (other.uid != geteuid()) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "it belongs to user %u, rank %d to user %u: expected one user",
                         (unsigned)geteuid(), rank_name, (unsigned)other.uid);
    }
    *same_process = other.pid == tddp_process_id();
    return TDDP_OK;
}

/* --- sending --------------------------------------------------------------------------------- */

/* `*sent` is false after success if it can't be sent just now: too many descriptors are on their
 * way, or the receiver has not waited. */
static tddp_status send_message(const tddp_shm *shm, int to, bool same_process, bool *sent)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    message it = {MAGIC, tddp_shm_self(shm)->group_rank, segment->bytes,
                  same_process ? tddp_shm_segment_retain(segment) : NULL};
    attachment attached = {0};
    struct iovec part = {&it, sizeof it};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (!same_process) {
        packet.msg_control = &attached;
        packet.msg_controllen = sizeof attached;
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &segment->fd, sizeof(int));
    }
    ssize_t done;
    do {
        done = sendmsg(to, &packet, MSG_NOSIGNAL);
    } while (done < 0 && errno == EINTR);
    const bool later =
        errno == EAGAIN || errno == ETOOMANYREFS || errno == EPIPE || errno == ECONNRESET;
    *sent = done >= 0;
    if (!*sent) {
        tddp_shm_segment_release(it.segment);
    }
    return *sent || later ? TDDP_OK : tddp_fail_errno("sending a shared segment");
}

/* Errors: TDDP_PEER_LOST, without a text: it does not listen. */
static tddp_status send_segment(tddp_shm_exchange *self, int rank)
{
    int fd;
    bool same_process;
    tddp_status status = connect_to(self->addresses[rank], &fd);
    if (fd >= 0) {
        status = check_user(fd, tddp_shm_rank_name(self->shm, rank), &same_process);
        if (status == TDDP_OK) {
            status = send_message(self->shm, fd, same_process, &self->sent[rank]);
        }
        tddp_close(fd);
    }
    return status;
}

static tddp_status send_missing(tddp_shm_exchange *self)
{
    tddp_status status = TDDP_OK;
    self->retry = false;
    for (int rank = 0; rank < self->shm->size && status == TDDP_OK; rank++) {
        if (!self->sent[rank]) {
            status = send_segment(self, rank);
            self->lost = status == TDDP_PEER_LOST ? rank : -1;
            self->retry = self->retry || !self->sent[rank];
        }
    }
    return status;
}

/* --- receiving ------------------------------------------------------------------------------- */

/* `*fd`: the descriptor that came with the message, or -1. False: it is none. */
static bool recv_message(int from, message *out, int *fd)
{
    attachment attached;
    struct iovec part = {out, sizeof *out};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = &attached,
                            .msg_controllen = sizeof attached};
    ssize_t got;
    *fd = -1;
    do {
        got = recvmsg(from, &packet, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return false;
    }
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&packet); each; each = CMSG_NXTHDR(&packet, each)) {
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            memcpy(fd, CMSG_DATA(each), sizeof *fd);
        }
    }
    const bool good = got == sizeof *out && !(packet.msg_flags & MSG_TRUNC) && out->magic == MAGIC;
    if (!good) {
        tddp_close(*fd);
    }
    return good;
}

/* Attaches a rank's segment, as it was received. Takes ownership of the descriptor. */
static tddp_status take_segment(tddp_shm *shm, int rank, const message *got, int fd,
                                bool same_process)
{
    const size_t bytes = tddp_shm_self(shm)->segment->bytes;
    tddp_shm_segment *segment = got->segment;
    tddp_status status = TDDP_OK;
    if (got->bytes != bytes || (segment && !same_process)) {
        tddp_close(fd);
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d uses another protocol for shared memory: expected one version of "
                         "libtddp on all ranks",
                         tddp_shm_rank_name(shm, rank));
    }
    if (!segment && fd < 0) {
        return tddp_fail(TDDP_SYSTEM,
                         "no descriptor left for the shared memory of rank %d: raise ulimit -n",
                         tddp_shm_rank_name(shm, rank));
    }
    if (!segment) {
        status = tddp_shm_segment_map(fd, bytes, &segment);
    }
    if (status == TDDP_OK) {
        tddp_shm_attach(shm, rank, segment, 0);
    }
    return status;
}

/* Ignores a sender that is no rank of this host, or whose segment is there. */
static tddp_status receive_segment(tddp_shm_exchange *self, int from)
{
    tddp_shm *shm = self->shm;
    message got = {0};
    int fd;
    bool same_process;
    int rank = 0;
    const int64_t until = tddp_deadline_after_ms(MESSAGE_MS);
    tddp_status status = tddp_net_poll(
        from, POLLIN, until < self->deadline ? until : self->deadline, self->cancel_fd);
    if (status || !recv_message(from, &got, &fd)) {
        return status == TDDP_TIMEOUT ? TDDP_OK : status;
    }
    while (rank < shm->size && shm->peers[rank].group_rank != got.group_rank) {
        rank++;
    }
    if (rank == shm->size || shm->peers[rank].segment) {
        tddp_close(fd);
        return TDDP_OK;
    }
    status = check_user(from, tddp_shm_rank_name(shm, rank), &same_process);
    if (status) {
        tddp_close(fd);
        return status;
    }
    return take_segment(shm, rank, &got, fd, same_process);
}

static int accept_one(int listen_fd)
{
    int fd;
    do {
        fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    return fd;
}

static tddp_status receive_waiting(tddp_shm_exchange *self)
{
    for (;;) {
        const int fd = accept_one(self->listen_fd);
        if (fd < 0) {
            return errno == EAGAIN ? TDDP_OK : tddp_fail_errno("accept4");
        }
        const tddp_status status = receive_segment(self, fd);
        tddp_close(fd);
        if (status) {
            return status;
        }
    }
}

/* After the shutdown nobody can connect; segments that have come in vain are released. */
void tddp_shm_stop_listening(int *listen_fd)
{
    if (*listen_fd < 0) {
        return;
    }
    (void)shutdown(*listen_fd, SHUT_RD);
    for (int from; (from = accept_one(*listen_fd)) >= 0; tddp_close(from)) {
        message got = {0};
        bool same_process;
        int fd;
        if (check_user(from, -1, &same_process) == TDDP_OK && recv_message(from, &got, &fd)) {
            tddp_close(fd);
            tddp_shm_segment_release(same_process ? got.segment : NULL);
        }
    }
    tddp_close(*listen_fd);
    *listen_fd = -1;
}

/* --- the exchange ---------------------------------------------------------------------------- */

/* The first rank whose segment is missing, or that this rank has not sent its own; -1: none is. */
static int first_pending(const tddp_shm_exchange *self)
{
    for (int rank = 0; rank < self->shm->size; rank++) {
        if (!self->sent[rank] || !self->shm->peers[rank].segment) {
            return rank;
        }
    }
    return -1;
}

static tddp_status check_missing(tddp_shm_exchange *self)
{
    for (int rank = 0; rank < self->shm->size; rank++) {
        if (!self->shm->peers[rank].segment && !tddp_shm_is_listening(self->addresses[rank])) {
            self->lost = rank;
            return TDDP_PEER_LOST;
        }
    }
    return TDDP_OK;
}

static tddp_status await_segments(tddp_shm_exchange *self)
{
    const int64_t until = tddp_deadline_after_ms(self->retry ? RETRY_MS : CHECK_MS);
    tddp_status status = tddp_net_poll(
        self->listen_fd, POLLIN, until < self->deadline ? until : self->deadline, self->cancel_fd);
    if (status == TDDP_TIMEOUT && tddp_now_ns() < self->deadline) {
        return check_missing(self);
    }
    return status ? status : receive_waiting(self);
}

tddp_status tddp_shm_exchange_segments(tddp_shm_exchange *self)
{
    int pending = 0;
    self->lost = -1;
    self->sent = tddp_alloc_array((size_t)self->shm->size, sizeof *self->sent);
    if (!self->sent) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->sent[self->shm->rank] = true;
    tddp_status status = send_missing(self);
    while (status == TDDP_OK && (pending = first_pending(self)) >= 0) {
        status = await_segments(self);
        status = status ? status : send_missing(self);
    }
    free(self->sent);
    return status != TDDP_TIMEOUT
               ? status
               : tddp_fail(status,
                           "no shared memory with rank %d in the time given: slow, or stuck?",
                           tddp_shm_rank_name(self->shm, pending));
}
