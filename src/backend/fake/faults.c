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
#include "base/base.h"

static tddp_status parse_item(const char *word, size_t length, tddp_fake_faults *faults,
                              int64_t *rank)
{
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
        char *equals = strchr(text, '=');
        for (size_t i = 0; equals && i < sizeof known / sizeof *known; i++) {
            if (strlen(known[i].name) == (size_t)(equals - text) &&
                strncmp(known[i].name, text, strlen(known[i].name)) == 0 &&
                tddp_parse_int(equals + 1, 0, INT32_MAX, known[i].value)) {
                return TDDP_OK;
            }
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "TDDP_FAKE: \"%.*s\": expected delay_ms, fail_at, drop_at, lose_at, "
                     "p2p_fail_at, p2p_drop_at, p2p_lose_at, post_fail_at, create_fail or rank, "
                     "then = and a number",
                     (int)length, word);
}

tddp_status tddp_fake_read_faults(int rank, tddp_fake_faults *out)
{
    tddp_fake_faults faults = {0};
    int64_t only = -1;
    const char *words = getenv("TDDP_FAKE");
    while (words && *words) {
        size_t length = strcspn(words, ",");
        tddp_status status = length ? parse_item(words, length, &faults, &only) : TDDP_OK;
        if (status) {
            return status;
        }
        words += length + (words[length] == ',');
    }
    *out = only < 0 || only == rank ? faults : (tddp_fake_faults){0};
    return TDDP_OK;
}

/* Sleeps until the deadline; true if the token was triggered before. */
static bool pause_until(int64_t deadline, const tddp_cancel *cancel)
{
    struct pollfd entry = {.fd = tddp_cancel_fd(cancel), .events = POLLIN};
    int ready;
    do {
        ready = poll(&entry, 1, tddp_deadline_poll_ms(deadline));
    } while ((ready < 0 && errno == EINTR) || (ready == 0 && tddp_now_ns() < deadline));
    return ready > 0;
}

tddp_status tddp_fake_before(const tddp_fake_faults *faults, const tddp_op *op, tddp_cancel *cancel)
{
    int64_t number = (int64_t)op->sequence;
    bool p2p = tddp_op_is_p2p(op->kind);
    bool drops = number == (p2p ? faults->p2p_drop_at : faults->drop_at);
    int64_t length = drops || faults->delay_ms > op->timeout_ms ? op->timeout_ms : faults->delay_ms;
    if (length > 0 && pause_until(tddp_deadline_after_ms(length), cancel)) {
        return tddp_fail(TDDP_CANCELED, "aborted");
    }
    if (drops || faults->delay_ms > op->timeout_ms) {
        return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms: %s by TDDP_FAKE",
                         op->timeout_ms, drops ? "dropped" : "delayed");
    }
    if (number == (p2p ? faults->p2p_fail_at : faults->fail_at)) {
        return tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    if (number == (p2p ? faults->p2p_lose_at : faults->lose_at)) {
        return tddp_fail(TDDP_PEER_LOST, "asked to lose a peer by TDDP_FAKE");
    }
    return TDDP_OK;
}
