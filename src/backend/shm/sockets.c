/*
 * Abstract Unix sockets between the processes of a host, and the messages on them: a request for a
 * segment, and the segment as the reply. Runs on the thread that joins; never blocks.
 *
 * Only processes of the same user are accepted, by the kernel's credentials (SO_PEERCRED).
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shm/control.h"

enum { MAGIC = 0x7464736d };

typedef struct segment_request {
    uint32_t magic;
    int32_t group_rank;
} segment_request;

typedef struct segment_reply {
    uint32_t magic;
    int32_t group_rank;
    uint64_t bytes;
    tddp_shm_segment *segment; /* same process: a reference for the receiver; else NULL */
} segment_reply;

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

tddp_status tddp_shm_check_user(int fd, int rank_name, bool *same_process)
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

/* --- requests -------------------------------------------------------------------------------- */

tddp_status tddp_shm_request_segment(const char address[TDDP_SHM_ADDRESS_BYTES], int group_rank,
                                     int rank_name, int *out, bool *same_process)
{
    struct sockaddr_un to;
    segment_request message = {MAGIC, group_rank};
    int fd = open_socket();
    if (fd < 0) {
        return tddp_fail_errno("socket");
    }
    tddp_status status = TDDP_OK;
    socklen_t length = fill_address(address, &to);
    if (connect(fd, (struct sockaddr *)&to, length)) {
        status = errno == EAGAIN || errno == EINTR ? TDDP_TIMEOUT
                 : errno == ECONNREFUSED           ? TDDP_PEER_LOST
                                         : tddp_fail_errno("connecting to a local socket");
    }
    if (status == TDDP_OK) {
        status = tddp_shm_check_user(fd, rank_name, same_process);
    }
    ssize_t sent = -1;
    do {
        sent = status ? 0 : send(fd, &message, sizeof message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (status == TDDP_OK && sent != sizeof message) {
        status = TDDP_PEER_LOST;
    }
    if (status) {
        tddp_close(fd);
    } else {
        *out = fd;
    }
    return status;
}

tddp_shm_receive_state tddp_shm_recv_request(int fd, int *group_rank)
{
    segment_request message = {0};
    ssize_t got = recv(fd, &message, sizeof message, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_SHM_PENDING;
    }
    *group_rank = message.group_rank;
    return got == sizeof message && message.magic == MAGIC ? TDDP_SHM_RECEIVED : TDDP_SHM_CLOSED;
}

/* --- replies --------------------------------------------------------------------------------- */

bool tddp_shm_send_segment(const tddp_shm *shm, int to, bool same_process)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    segment_reply message = {MAGIC, tddp_shm_self(shm)->group_rank, segment->bytes,
                             same_process ? tddp_shm_segment_retain(segment) : NULL};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {&message, sizeof message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (!same_process) {
        packet.msg_control = &control;
        packet.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &segment->fd, sizeof(int));
    }
    ssize_t sent;
    do {
        sent = sendmsg(to, &packet, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent != sizeof message && same_process) {
        tddp_shm_segment_release(segment);
    }
    return sent == sizeof message;
}

/* `*fd`: the descriptor that came with the message, or -1. What isn't a reply has no MAGIC, and no
 * segment. */
static ssize_t recv_reply(int from, segment_reply *out, int *fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {out, sizeof *out};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = &control,
                            .msg_controllen = sizeof control};
    *fd = -1;
    ssize_t got = recvmsg(from, &packet, MSG_CMSG_CLOEXEC);
    if (got <= 0) {
        return got;
    }
    if (got != sizeof *out || packet.msg_flags & MSG_TRUNC || out->magic != MAGIC) {
        *out = (segment_reply){0};
    }
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&packet); each; each = CMSG_NXTHDR(&packet, each)) {
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            memcpy(fd, CMSG_DATA(each), sizeof *fd);
        }
    }
    return got;
}

/* Checks a rank's reply. Takes ownership of the descriptor. */
static tddp_status check_reply(const tddp_shm *shm, int rank, const segment_reply *message, int fd,
                               tddp_shm_segment **out)
{
    const tddp_shm_peer *peer = &shm->peers[rank];
    const size_t bytes = tddp_shm_self(shm)->segment->bytes;
    if (message->magic != MAGIC || message->group_rank != peer->group_rank ||
        message->bytes != bytes || (message->segment && !peer->same_process)) {
        tddp_close(fd);
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d uses another protocol for shared memory: expected one version of "
                         "libtddp on all ranks",
                         peer->rank_name);
    }
    if (message->segment) {
        *out = message->segment;
        return TDDP_OK;
    }
    if (fd < 0) {
        return tddp_fail(TDDP_SYSTEM,
                         "no descriptor left for the shared memory of rank %d: raise ulimit -n",
                         peer->rank_name);
    }
    return tddp_shm_segment_map(fd, bytes, out);
}

/* After the shutdown nothing more can be sent to it. */
void tddp_shm_close_request(int fd, bool same_process)
{
    if (fd < 0) {
        return;
    }
    (void)shutdown(fd, SHUT_RD);
    for (;;) {
        segment_reply message = {0};
        int passed = -1;
        ssize_t got = recv_reply(fd, &message, &passed);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        tddp_close(passed);
        tddp_shm_segment_release(same_process ? message.segment : NULL);
    }
    tddp_close(fd);
}

tddp_shm_receive_state tddp_shm_recv_segment(const tddp_shm *shm, int rank, int from,
                                             tddp_status *status, tddp_shm_segment **out)
{
    segment_reply message = {0};
    int fd;
    ssize_t got = recv_reply(from, &message, &fd);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_SHM_PENDING;
    }
    if (got <= 0) {
        return TDDP_SHM_CLOSED;
    }
    *status = check_reply(shm, rank, &message, fd, out);
    return TDDP_SHM_RECEIVED;
}
