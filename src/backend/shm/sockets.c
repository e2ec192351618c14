/*
 * Sockets between processes of a host, by names that no file has, and what travels on them: who
 * asks, and a segment in answer. On the thread that joins; nothing blocks.
 *
 * Only processes of the same user are spoken to, as the system tells them.
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

typedef struct request {
    uint32_t magic;
    int32_t number;
} request;

typedef struct answer {
    uint32_t magic;
    int32_t number;
    uint64_t bytes;
    tddp_shm_segment *inside; /* counted for the one that gets it */
} answer;

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

tddp_status tddp_shm_check_user(int fd, int rank_name, bool *inside)
{
    struct ucred other;
    socklen_t length = sizeof other;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &length)) {
        return tddp_fail_errno("SO_PEERCRED");
    }
    if (other.uid != geteuid()) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "it is user %u's, and rank %d user %u's: expected one user's",
                         (unsigned)geteuid(), rank_name, (unsigned)other.uid);
    }
    *inside = other.pid == tddp_process_id();
    return TDDP_OK;
}

/* --- asking ---------------------------------------------------------------------------------- */

tddp_status tddp_shm_dial(const char address[TDDP_SHM_ADDRESS_BYTES], int number, int rank_name,
                          int *out, bool *inside)
{
    struct sockaddr_un to;
    request words = {MAGIC, number};
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
        status = tddp_shm_check_user(fd, rank_name, inside);
    }
    if (status == TDDP_OK && send(fd, &words, sizeof words, MSG_NOSIGNAL) != sizeof words) {
        status = TDDP_PEER_LOST;
    }
    if (status) {
        tddp_close(fd);
    } else {
        *out = fd;
    }
    return status;
}

tddp_shm_heard tddp_shm_hear(int fd, int *number)
{
    request words = {0};
    ssize_t got = recv(fd, &words, sizeof words, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_SHM_NOT_YET;
    }
    *number = words.number;
    return got == sizeof words && words.magic == MAGIC ? TDDP_SHM_HEARD : TDDP_SHM_GONE;
}

/* --- answering ------------------------------------------------------------------------------- */

bool tddp_shm_give(const tddp_shm *shm, int to, bool inside)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    answer words = {MAGIC, tddp_shm_self(shm)->number, shm->layout.bytes,
                    inside ? tddp_shm_segment_retain(segment) : NULL};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec place = {&words, sizeof words};
    struct msghdr message = {.msg_iov = &place, .msg_iovlen = 1};
    if (!inside) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &segment->fd, sizeof(int));
    }
    bool sent = sendmsg(to, &message, MSG_NOSIGNAL) == sizeof words;
    if (!sent && inside) {
        tddp_shm_segment_release(segment);
    }
    return sent;
}

/* What came with the message, or -1. */
static int descriptor_of(struct msghdr *message)
{
    int fd = -1;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each)) {
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            memcpy(&fd, CMSG_DATA(each), sizeof fd);
        }
    }
    return fd;
}

/* What came in answer from a rank; the descriptor is taken over. */
static tddp_status accept_answer(const tddp_shm *shm, int rank, const answer *words, int fd,
                                 tddp_shm_segment **out)
{
    const tddp_shm_peer *peer = &shm->peers[rank];
    if (words->magic != MAGIC || words->number != peer->number ||
        words->bytes != shm->layout.bytes || (words->inside && !peer->inside)) {
        tddp_close(fd);
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d speaks of shared memory in another way: expected one version of "
                         "libtddp on all ranks",
                         peer->name);
    }
    if (words->inside) {
        *out = words->inside;
        return TDDP_OK;
    }
    if (fd < 0) {
        return tddp_fail(TDDP_SYSTEM,
                         "no descriptor left for the shared memory of rank %d: raise ulimit -n",
                         peer->name);
    }
    return tddp_shm_segment_map(fd, shm->layout.bytes, out);
}

tddp_shm_heard tddp_shm_take(const tddp_shm *shm, int rank, int from, tddp_status *status,
                             tddp_shm_segment **out)
{
    answer words = {0};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec place = {&words, sizeof words};
    struct msghdr message = {.msg_iov = &place,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t got = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_SHM_NOT_YET;
    }
    if (got <= 0) {
        return TDDP_SHM_GONE;
    }
    words.magic = got == sizeof words && !(message.msg_flags & MSG_TRUNC) ? words.magic : 0;
    *status = accept_answer(shm, rank, &words, descriptor_of(&message), out);
    return TDDP_SHM_HEARD;
}
