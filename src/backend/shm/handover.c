/*
 * Passing descriptors of segments between the processes of a host: each rank asks each other for
 * its segment, at a socket without a file whose name the store has told it. On the thread that
 * joins.
 *
 * Invariant: a rank's listening socket is open until it has given its segment to all who need it,
 * so who finds a connection closed knows that the other has ended or given up. Nothing blocks but
 * poll(), until the deadline.
 *
 * Ranks that are threads of one process share the owner's mapping: what travels is its address,
 * which is believed because the system says who wrote it.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "backend/shm/control.h"

enum { RETRY_MS = 10, LOOK_MS = 100 };

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
    tddp_status status = tddp_shm_dial(desk->work->addresses[rank], tddp_shm_self(shm)->number,
                                       tddp_shm_name(shm, rank), &desk->visits[rank].asking,
                                       &shm->peers[rank].inside);
    if (status == TDDP_TIMEOUT) {
        desk->retry = true; /* too many at a time */
        return TDDP_OK;
    }
    return status == TDDP_PEER_LOST ? fail_lost(desk, rank) : status;
}

static tddp_status take_answer(handing *desk, int rank)
{
    contact *visit = &desk->visits[rank];
    tddp_shm_segment *segment = NULL;
    tddp_status status = TDDP_OK;
    tddp_shm_heard heard = tddp_shm_take(desk->work->shm, rank, visit->asking, &status, &segment);
    if (heard == TDDP_SHM_NOT_YET) {
        return TDDP_OK;
    }
    if (heard == TDDP_SHM_GONE) {
        return fail_lost(desk, rank);
    }
    tddp_close(visit->asking);
    visit->asking = -1;
    if (status == TDDP_OK) {
        tddp_shm_attach(desk->work->shm, rank, segment);
        visit->attached = true;
    }
    return status;
}

/* --- answering ------------------------------------------------------------------------------- */

/* Who asks here and is no rank of this host, or has been served, is let go without a word. */
static tddp_status serve(handing *desk, int fd, int number)
{
    tddp_shm *shm = desk->work->shm;
    for (int rank = 0; rank < shm->size; rank++) {
        contact *visit = &desk->visits[rank];
        if (shm->peers[rank].number == number && rank != shm->rank && !visit->served) {
            bool inside = false;
            tddp_status status = tddp_shm_check_user(fd, tddp_shm_name(shm, rank), &inside);
            if (status == TDDP_OK && !tddp_shm_give(shm, fd, inside)) {
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
    int number;
    tddp_status status = TDDP_OK;
    tddp_shm_heard heard = tddp_shm_hear(*guest, &number);
    if (heard == TDDP_SHM_NOT_YET) {
        return TDDP_OK;
    }
    if (heard == TDDP_SHM_HEARD) {
        status = serve(desk, *guest, number);
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
