/*
 * The search for the coordinator: looks again and again until there is one, or time is over, and
 * reports what was tried. What one look is depends on the backend. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "net/net.h"

enum {
    REACH_MS = 2 * 1000, /* for one look */
    LEAST_REACH_MS = 50,
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 400,
    HOST_EVERY_MS = 1500, /* to see whether the endpoint's port has become free */
    TRIED_BYTES = TDDP_LAUNCH_MAX_ENDPOINTS * (TDDP_LAUNCH_HOST_BYTES + 16) + TDDP_LAUNCH_WHY_BYTES
};

void tddp_launch_leader_forget(const tddp_launch_node *node, tddp_launch_leader *leader)
{
    if (leader->connection) {
        node->backend->disconnect(leader->connection);
    }
    *leader = (tddp_launch_leader){0};
}

tddp_status tddp_launch_check_job(const tddp_launch_node *node, const char *job)
{
    char mine[TDDP_LAUNCH_JOB_BYTES];
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    tddp_launch_job_text(node->options, mine);
    if (strcmp(job, mine) == 0) {
        return TDDP_OK;
    }
    tddp_launch_endpoint_text(&node->options->endpoints[0], endpoint, sizeof endpoint);
    return tddp_fail(TDDP_MISMATCH,
                     "the job at %s was started with %.128s, this node with %s; expected the same "
                     "on all nodes",
                     endpoint, job, mine);
}

/* How long one look may take. */
static int64_t reach_ms(const tddp_launch_node *node, int64_t until_ns)
{
    int64_t read_ms = (int64_t)node->options->conf.read_timeout * 1000;
    int64_t most = read_ms < REACH_MS ? read_ms : REACH_MS;
    if (until_ns == INT64_MAX) {
        return most;
    }
    int64_t left = (until_ns - tddp_now_ns()) / TDDP_NS_PER_MS;
    most = most < node->times.read_ms ? most : node->times.read_ms;
    return left < LEAST_REACH_MS ? LEAST_REACH_MS : left < most ? left : most;
}

/* Whether another try would be as vain: another secret, say, or no store at all. A node that was in
 * the job knows that it may be otherwise. */
static bool is_permanent(const tddp_launch_node *node, tddp_status status)
{
    return status == TDDP_MISMATCH || status == TDDP_OUT_OF_MEMORY ||
           (!node->was_in &&
            (status == TDDP_STORE || status == TDDP_PROTOCOL || status == TDDP_INVALID_ARGUMENT));
}

/* One look. NOT_FOUND: the job has ended; TIMEOUT: nobody leads. */
static tddp_status look_around(tddp_launch_node *node, tddp_launch_look *seen)
{
    if (node->orders.leave || node->orders.quit) {
        return tddp_fail(TDDP_CANCELED, "told to end");
    }
    for (;;) {
        tddp_status status = node->backend->look(node, seen);
        if (seen->leader.connection || is_permanent(node, status)) {
            return status;
        }
        if (seen->end->kind == TDDP_LAUNCH_MESSAGE_END) {
            return tddp_fail(TDDP_NOT_FOUND, "the job has ended");
        }
        if (status != TDDP_CANCELED) {
            return tddp_fail(TDDP_TIMEOUT, "nobody leads");
        }
        if (!tddp_launch_node_take_orders(node)) {
            return status;
        }
        seen->why[0] = '\0'; /* orders for later: once more */
        seen->gone = false;
    }
}

/* "a:2379, b:2379 (Connection refused)". */
static void describe_tried(const tddp_launch_node *node, const tddp_launch_look *seen,
                           char text[TRIED_BYTES])
{
    size_t used = 0;
    for (int i = 0; i < node->options->endpoint_count && used < TRIED_BYTES; i++) {
        char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
        tddp_launch_endpoint_text(&node->options->endpoints[i], endpoint, sizeof endpoint);
        used += (size_t)snprintf(text + used, TRIED_BYTES - used, "%s%s", i ? ", " : "", endpoint);
    }
    if (used < TRIED_BYTES) {
        (void)snprintf(text + used, TRIED_BYTES - used, " (%s)", seen->why);
    }
}

static tddp_status fail_search(const tddp_launch_node *node, const char *tried)
{
    return tddp_fail(TDDP_TIMEOUT,
                     "no torchrun leads the job \"%s\" within %d s: tried %s; check that %s, and "
                     "that all nodes have the same --rdzv-endpoint and --rdzv-id, or raise "
                     "--rdzv-conf join_timeout",
                     node->run_id, node->options->conf.join_timeout, tried, node->backend->remedy);
}

/* A line for the user, to be followed by another after a while. */
static void report(const tddp_launch_node *node, const char *tried, int64_t *report_at)
{
    if (tddp_now_ns() < *report_at) {
        return;
    }
    char *line = tddp_format("looking for who leads the job \"%s\": tried %s", node->run_id, tried);
    if (line) {
        tddp_launch_rendezvous_send_notification(node->mailbox, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                                 NULL, line);
    }
    free(line);
    *report_at = tddp_deadline_after_ms(node->times.report_ms);
}

/* What a look in vain says of the leader that is lost: when to give up. One whose connections are
 * reset may be about to end, so it is silent only when there was time for an answer. */
static void note_lost(const tddp_launch_node *node, const tddp_launch_look *seen,
                      tddp_launch_search *search, int64_t silent_at, int64_t *deadline)
{
    if (!search->lost) {
        return;
    }
    if (seen->gone) {
        int64_t soon = tddp_deadline_after_ms(search->gone_ms);
        *deadline = !search->gone && soon < *deadline ? soon : *deadline;
        search->gone = true;
    } else if (search->line && !search->reported && tddp_now_ns() >= silent_at) {
        tddp_launch_rendezvous_send_notification(node->mailbox, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                                 NULL, search->line);
        search->reported = true;
    }
}

tddp_status tddp_launch_find_leader(tddp_launch_node *node, tddp_launch_search *search,
                                    tddp_launch_leader *out, tddp_launch_message *end)
{
    char tried[TRIED_BYTES];
    int64_t deadline = tddp_deadline_after_ms(search->limit_ms);
    int64_t report_at = tddp_deadline_after_ms(node->times.report_ms);
    int64_t host_at = tddp_deadline_after_ms(HOST_EVERY_MS);
    int64_t silent_at = tddp_deadline_after_ms(reach_ms(node, deadline));
    int64_t pause = FIRST_PAUSE_MS;
    for (;;) {
        tddp_launch_look seen = {.end = end,
                                 .limit_ms = reach_ms(node, search->exact ? deadline : INT64_MAX)};
        tddp_status status = look_around(node, &seen);
        if (status != TDDP_TIMEOUT) {
            if (status == TDDP_OK) {
                *out = seen.leader;
            }
            return status;
        }
        note_lost(node, &seen, search, silent_at, &deadline);
        describe_tried(node, &seen, tried);
        if (tddp_now_ns() >= deadline) {
            return fail_search(node, tried);
        }
        if (tddp_now_ns() >= host_at) {
            status = tddp_launch_host_late(node);
            if (status != TDDP_OK) {
                return status;
            }
            host_at = tddp_deadline_after_ms(HOST_EVERY_MS);
        }
        report(node, tried, &report_at);
        if (tddp_net_sleep(tddp_deadline_after_ms(pause), tddp_cancel_fd(node->cancel)) !=
                TDDP_OK &&
            !tddp_launch_node_take_orders(node)) {
            return tddp_fail(TDDP_CANCELED, "told to end");
        }
        pause = pause * 2 < LAST_PAUSE_MS ? pause * 2 : LAST_PAUSE_MS;
    }
}
