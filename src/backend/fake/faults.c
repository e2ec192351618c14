/*
 * Parses TDDP_FAKE and injects the requested faults. Parsing happens when a group is created,
 * faults on its threads; nothing changes in between.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "backend/fake/faults.h"

static tddp_status parse_item(const char *word, size_t length, tddp_fake_faults *faults,
                              int64_t *rank)
{
    static const char over[] = "over=";
    const struct {
        const char *name;
        int64_t *value;
    } known[] = {
        {"delay_ms", &faults->delay_ms},       {"fail_at", &faults->fail_at},
        {"drop_at", &faults->drop_at},         {"lose_at", &faults->lose_at},
        {"p2p_fail_at", &faults->p2p_fail_at}, {"p2p_drop_at", &faults->p2p_drop_at},
        {"p2p_lose_at", &faults->p2p_lose_at}, {"post_fail_at", &faults->post_fail_at},
        {"create_fail", &faults->create_fail}, {"rank", rank},
    };
    char text[64];
    if (length < sizeof text) {
        memcpy(text, word, length);
        text[length] = '\0';
        const char *equals = strchr(text, '=');
        if (strncmp(text, over, sizeof over - 1) == 0 &&
            length - (sizeof over - 1) < sizeof faults->over) {
            memcpy(faults->over, text + sizeof over - 1, length - (sizeof over - 1) + 1);
            return TDDP_OK;
        }
        for (size_t i = 0; equals && i < sizeof known / sizeof *known; i++) {
            if (strlen(known[i].name) == (size_t)(equals - text) &&
                strncmp(known[i].name, text, strlen(known[i].name)) == 0 &&
                tddp_parse_int(equals + 1, 0, INT32_MAX, known[i].value)) {
                return TDDP_OK;
            }
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "TDDP_FAKE: \"%.*s\": expected over= and a backend's name, or delay_ms, "
                     "fail_at, drop_at, lose_at, p2p_fail_at, p2p_drop_at, p2p_lose_at, "
                     "post_fail_at, create_fail or rank, then = and a number",
                     (int)length, word);
}

tddp_status tddp_fake_read_faults(int rank, tddp_fake_faults *out)
{
    const tddp_fake_faults none = {.over = "shm"};
    tddp_fake_faults faults = none;
    int64_t only = -1;
    const char *words = getenv("TDDP_FAKE");
    while (words && *words) {
        size_t length = strcspn(words, ",");
        tddp_status status = length ? parse_item(words, length, &faults, &only) : TDDP_OK;
        if (status) {
            memcpy(out->over, faults.over, sizeof out->over);
            return status;
        }
        words += length + (words[length] == ',');
    }
    *out = none;
    memcpy(out->over, faults.over, sizeof out->over);
    if (only < 0 || only == rank) {
        *out = faults;
        out->any = faults.delay_ms || faults.fail_at || faults.drop_at || faults.lose_at ||
                   faults.p2p_fail_at || faults.p2p_drop_at || faults.p2p_lose_at ||
                   faults.post_fail_at;
    }
    return TDDP_OK;
}

/* Sleeps until the deadline, or until one of the tokens is triggered. */
static tddp_status pause_until(int64_t deadline, const tddp_cancel *aborted,
                               const tddp_cancel *interrupt)
{
    struct pollfd entries[2] = {{.fd = tddp_cancel_fd(aborted), .events = POLLIN},
                                {.fd = tddp_cancel_fd(interrupt), .events = POLLIN}};
    while (tddp_now_ns() < deadline) {
        const int64_t own = tddp_cancel_deadline(interrupt);
        if (tddp_cancel_triggered(aborted)) {
            return tddp_fail(TDDP_GROUP_FAILED, "aborted");
        }
        if (interrupt && tddp_cancel_triggered(interrupt)) {
            return tddp_fail(TDDP_CANCELED, "interrupted");
        }
        if (poll(entries, 2, tddp_deadline_poll_ms(own < deadline ? own : deadline)) < 0 &&
            errno != EINTR) {
            return tddp_fail_errno("poll");
        }
    }
    return TDDP_OK;
}

typedef enum fault {
    NONE,
    FAILS,
    LOSES,
    DROPS,
    IS_LATE, /* delayed for longer than it may take */
} fault;

static fault fault_of(const tddp_fake_faults *faults, const tddp_op *op)
{
    const int64_t number = (int64_t)op->sequence;
    const bool p2p = tddp_op_is_p2p(op->kind);
    return number == (p2p ? faults->p2p_drop_at : faults->drop_at)   ? DROPS
           : faults->delay_ms > op->timeout_ms                       ? IS_LATE
           : number == (p2p ? faults->p2p_fail_at : faults->fail_at) ? FAILS
           : number == (p2p ? faults->p2p_lose_at : faults->lose_at) ? LOSES
                                                                     : NONE;
}

bool tddp_fake_ends(const tddp_fake_faults *faults, const tddp_op *op)
{
    return fault_of(faults, op) != NONE;
}

tddp_status tddp_fake_before(const tddp_fake_faults *faults, const tddp_op *op,
                             const tddp_cancel *aborted, tddp_fake_fate *fate)
{
    if (fate->until == 0) {
        fate->fault = fault_of(faults, op);
        fate->timeout_ms = op->timeout_ms;
        const bool waits = fate->fault == DROPS || fate->fault == IS_LATE;
        fate->until = tddp_deadline_after_ms(waits ? op->timeout_ms : faults->delay_ms);
    }
    tddp_status status = pause_until(fate->until, aborted, op->cancel);
    if (status) {
        return status;
    }
    switch ((fault)fate->fault) {
    case FAILS:
        return tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    case LOSES:
        return tddp_fail(TDDP_PEER_LOST, "asked to lose a peer by TDDP_FAKE");
    case DROPS:
    case IS_LATE:
        return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms: %s by TDDP_FAKE",
                         fate->timeout_ms, fate->fault == DROPS ? "dropped" : "delayed");
    case NONE:
        break;
    }
    return TDDP_OK;
}
