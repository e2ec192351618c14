/*
 * Passing descriptors of segments between the processes of a host: each rank asks each other for
 * its segment, at a socket without a file whose name the store has told it. On the thread that
 * joins.
 *
 * Invariant: a rank's listening socket is open until it has given its segment to all who need it,
 * so who finds a connection closed knows that the other has ended or given up. Only processes of
 * the same user are spoken to. Nothing blocks but poll(), until the deadline.
 *
 * Ranks that are threads of one process share the owner's mapping: what travels is its address,
 * which is believed because the system says who wrote it.
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

enum { MAGIC = 0x7464736d, RETRY_MS = 10, LOOK_MS = 100 };

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

/* What is under way with one peer. */
typedef struct visit {
    int asking;    /* the connection by which this rank asks for its segment; -1: none */
    int guest;     /* one that has come here and not said who it is; in no order */
    bool attached; /* got its segment */
    bool served;   /* it got ours */
} contact;

typedef struct desk {
    const tddp_shm_handover *work;
    contact *visits;
    struct pollfd *polls;
    int *lost;
    bool retry;
} handing;

/* --- sockets --------------------------------------------------------------------------------- */

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

/* Who is at the other end. `*inside`: this process. */
static tddp_status check_user(int fd, int rank_name, bool *inside)
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

static tddp_status fail_lost(const handing *desk, int rank)
{
    *desk->lost = rank;
    return tddp_fail(TDDP_PEER_LOST, "lost rank %d, which ended while shared memory was set up",
                     tddp_shm_name(desk->work->shm, rank));
}

/* --- asking ---------------------------------------------------------------------------------- */

static tddp_status ask(handing *desk, int rank)
{
    tddp_shm *shm = desk->work->shm;
    struct sockaddr_un to;
    request words = {MAGIC, tddp_shm_self(shm)->number};
    int fd = open_socket();
    if (fd < 0) {
        return tddp_fail_errno("socket");
    }
    socklen_t length = fill_address(desk->work->addresses[rank], &to);
    tddp_status status = TDDP_OK;
    if (connect(fd, (struct sockaddr *)&to, length)) {
        if (errno == EAGAIN || errno == EINTR) {
            desk->retry = true; /* too many at a time */
        } else if (errno == ECONNREFUSED) {
            status = fail_lost(desk, rank);
        } else {
            status = tddp_fail_errno("connecting to a local socket");
        }
    } else {
        status = check_user(fd, tddp_shm_name(shm, rank), &shm->peers[rank].inside);
        if (status == TDDP_OK && send(fd, &words, sizeof words, MSG_NOSIGNAL) == sizeof words) {
            desk->visits[rank].asking = fd;
            return TDDP_OK;
        }
        status = status ? status : fail_lost(desk, rank);
    }
    tddp_close(fd);
    return status;
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

static tddp_status attach(handing *desk, int rank, const answer *words, int fd)
{
    tddp_shm *shm = desk->work->shm;
    tddp_shm_segment *segment = NULL;
    if (words->magic != MAGIC || words->number != shm->peers[rank].number ||
        words->bytes != shm->layout.bytes || (fd < 0) == !words->inside ||
        (words->inside && !shm->peers[rank].inside)) {
        tddp_close(fd);
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d speaks of shared memory in another way: expected one version of "
                         "libtddp on all ranks",
                         tddp_shm_name(shm, rank));
    }
    if (words->inside) {
        segment = words->inside;
    } else {
        tddp_status status = tddp_shm_segment_map(fd, shm->layout.bytes, &segment);
        if (status) {
            return status;
        }
    }
    tddp_shm_attach(shm, rank, segment);
    desk->visits[rank].attached = true;
    return TDDP_OK;
}

static tddp_status take_answer(handing *desk, int rank)
{
    contact *visit = &desk->visits[rank];
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
    ssize_t got = recvmsg(visit->asking, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_OK;
    }
    if (got <= 0) {
        return fail_lost(desk, rank);
    }
    int fd = descriptor_of(&message);
    tddp_close(visit->asking);
    visit->asking = -1;
    if (got != sizeof words || message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) {
        words.magic = 0;
    }
    return attach(desk, rank, &words, fd);
}

/* --- answering ------------------------------------------------------------------------------- */

static bool send_answer(const tddp_shm *shm, int to, bool inside)
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

/* Who asks here and is no rank of this host, or has been served, is let go without a word. */
static tddp_status serve(handing *desk, int fd, const request *words)
{
    tddp_shm *shm = desk->work->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        contact *visit = &desk->visits[rank];
        if (shm->peers[rank].number == words->number && rank != shm->rank && !visit->served) {
            bool inside = false;
            tddp_status status = check_user(fd, tddp_shm_name(shm, rank), &inside);
            if (status == TDDP_OK && !send_answer(shm, fd, inside)) {
                status = fail_lost(desk, rank);
            }
            visit->served = status == TDDP_OK;
            return status;
        }
    }
    return TDDP_OK;
}

static tddp_status hear(handing *desk, int *guest)
{
    request words;
    ssize_t got = recv(*guest, &words, sizeof words, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return TDDP_OK;
    }
    tddp_status status = TDDP_OK;
    if (got == sizeof words && words.magic == MAGIC) {
        status = serve(desk, *guest, &words);
    }
    tddp_close(*guest);
    *guest = -1;
    return status;
}

static tddp_status let_in(handing *desk)
{
    for (int i = 0; i < desk->work->shm->size; i++) {
        int *guest = &desk->visits[i].guest;
        if (*guest >= 0) {
            continue;
        }
        *guest = accept4(desk->work->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (*guest < 0) {
            bool passing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
            return passing ? TDDP_OK : tddp_fail_errno("accept4");
        }
    }
    return TDDP_OK;
}

/* --- the desk -------------------------------------------------------------------------------- */

static bool is_done(const handing *desk)
{
    const tddp_shm *shm = desk->work->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const contact *visit = &desk->visits[rank];
        if (rank != shm->rank && !(visit->attached && visit->served)) {
            return false;
        }
    }
    return true;
}

static tddp_status ask_those_left(handing *desk)
{
    const tddp_shm *shm = desk->work->shm;
    tddp_status status = TDDP_OK;
    desk->retry = false;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        const contact *visit = &desk->visits[rank];
        if (rank != shm->rank && !visit->attached && visit->asking < 0) {
            status = ask(desk, rank);
        }
    }
    return status;
}

/* Those whose segments are here already, and who have not come for this one. */
static tddp_status look_at_the_silent(const handing *desk)
{
    const tddp_shm *shm = desk->work->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const tddp_shm_peer *peer = &shm->peers[rank];
        const contact *visit = &desk->visits[rank];
        if (rank != shm->rank && visit->attached && !visit->served &&
            (atomic_load(&peer->control->state) != TDDP_SHM_HERE ||
             (!peer->inside && tddp_shm_segment_is_orphan(peer->segment)))) {
            return fail_lost(desk, rank);
        }
    }
    return TDDP_OK;
}

static tddp_status fail_late(const handing *desk)
{
    const tddp_shm *shm = desk->work->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        const contact *visit = &desk->visits[rank];
        if (rank != shm->rank && !(visit->attached && visit->served)) {
            return tddp_fail(TDDP_TIMEOUT,
                             "no shared memory with rank %d in the time given: slow, or stuck?",
                             tddp_shm_name(shm, rank));
        }
    }
    return tddp_fail(TDDP_TIMEOUT, "no shared memory in the time given");
}

static tddp_status wait_for_any(handing *desk)
{
    const tddp_shm_handover *work = desk->work;
    const int size = work->shm->size;
    struct pollfd *polls = desk->polls;
    polls[0] = (struct pollfd){work->cancel_fd, POLLIN, 0};
    polls[1] = (struct pollfd){work->listen_fd, POLLIN, 0};
    for (int i = 0; i < size; i++) {
        polls[2 + 2 * i] = (struct pollfd){desk->visits[i].asking, POLLIN, 0};
        polls[3 + 2 * i] = (struct pollfd){desk->visits[i].guest, POLLIN, 0};
    }
    int left = tddp_deadline_poll_ms(work->deadline);
    int most = desk->retry ? RETRY_MS : LOOK_MS;
    int ready = poll(polls, (nfds_t)(2 + 2 * size), left < most ? left : most);
    if (ready < 0 && errno != EINTR) {
        return tddp_fail_errno("poll");
    }
    if (polls[0].revents) {
        return tddp_fail(TDDP_CANCELED, "interrupted while shared memory was set up");
    }
    if (ready < 0) {
        memset(polls, 0, (size_t)(2 + 2 * size) * sizeof *polls); /* says nothing then */
    }
    if (ready <= 0) {
        return left == 0 ? fail_late(desk) : look_at_the_silent(desk);
    }
    return TDDP_OK;
}

static tddp_status attend(handing *desk)
{
    const int size = desk->work->shm->size;
    tddp_status status = wait_for_any(desk);
    for (int i = 0; i < size && status == TDDP_OK; i++) {
        if (desk->visits[i].guest >= 0 && desk->polls[3 + 2 * i].revents) {
            status = hear(desk, &desk->visits[i].guest);
        }
    }
    if (status == TDDP_OK) {
        status = let_in(desk);
    }
    for (int rank = 0; rank < size && status == TDDP_OK; rank++) {
        if (desk->visits[rank].asking >= 0 && desk->polls[2 + 2 * rank].revents) {
            status = take_answer(desk, rank);
        }
    }
    return status;
}

tddp_status tddp_shm_hand_over(const tddp_shm_handover *work, int *lost)
{
    const size_t size = (size_t)work->shm->size;
    handing desk = {.work = work, .lost = lost};
    desk.visits = tddp_alloc_array(size, sizeof *desk.visits);
    desk.polls = tddp_alloc_array(2 + 2 * size, sizeof *desk.polls);
    tddp_status status = desk.visits && desk.polls ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (size_t i = 0; desk.visits && i < size; i++) {
        desk.visits[i] = (contact){-1, -1, false, false};
    }
    while (status == TDDP_OK && !is_done(&desk)) {
        status = ask_those_left(&desk);
        if (status == TDDP_OK) {
            status = attend(&desk);
        }
    }
    for (size_t i = 0; desk.visits && i < size; i++) {
        tddp_close(desk.visits[i].asking);
        tddp_close(desk.visits[i].guest);
    }
    free(desk.visits);
    free(desk.polls);
    return status;
}
