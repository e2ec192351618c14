/*
 * While workers run: each node shows that it lives, the host looks that all do, and the first node
 * to know that the round is over tells the others. Runs on the rendezvous thread.
 *
 * Keys:
 *
 *   N/done      counts the nodes whose workers have all succeeded in round N
 *   N/over      how round N ended: "done", "failed TEXT" or "stopped TEXT"; the first one stands
 *   beat/RANK   counts up once a second while the node's torchrun lives
 *   here, left  count the nodes beside the host that use its store, and those that need it no more
 *   gone        set when all of them have left
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/nodes.h"

enum { BEAT_MS = 1000, LEAVE_MS = 3000, KEY_BYTES = 48 };

/* What the host knows of another node's sign of life. */
typedef struct pulse {
    int64_t count;
    int64_t seen_ns;
} pulse;

static const struct {
    const char *word;
    tddp_launch_news news;
} endings[] = {
    {"done", TDDP_LAUNCH_NEWS_DONE},
    {"failed", TDDP_LAUNCH_NEWS_FAILED},
    {"stopped", TDDP_LAUNCH_NEWS_STOPPED},
};

static void round_key(char key[KEY_BYTES], int round, const char *name)
{
    (void)snprintf(key, KEY_BYTES, "%d/%s", round, name);
}

static tddp_status declare(const tddp_launch_nodes *nodes, int round, const char *word,
                           const char *text)
{
    char key[KEY_BYTES];
    char value[TDDP_LAUNCH_NEWS_BYTES + 16];
    tddp_blob holder;
    tddp_wait wait = tddp_launch_short_wait();
    round_key(key, round, "over");
    (void)snprintf(value, sizeof value, "%s %s", word, text);
    tddp_status status =
        tddp_store_compare_set(nodes->store, tddp_launch_slice(key), tddp_launch_slice(""),
                               tddp_launch_slice(value), &wait, &holder);
    if (status == TDDP_OK) {
        tddp_blob_free(&holder);
    }
    return status;
}

static tddp_status declare_done(const tddp_launch_nodes *nodes, int round)
{
    char key[KEY_BYTES];
    int64_t count;
    tddp_wait wait = tddp_launch_short_wait();
    round_key(key, round, "done");
    tddp_status status = tddp_store_add(nodes->store, tddp_launch_slice(key), 1, &wait, &count);
    if (status == TDDP_OK && count == nodes->options->max_nodes) {
        status = declare(nodes, round, "done", "");
    }
    return status;
}

bool tddp_launch_nodes_obey(tddp_launch_nodes *nodes, int round)
{
    tddp_launch_orders orders = tddp_launch_orders_take(nodes->mailbox);
    tddp_status status = TDDP_OK;
    if (orders.tell == TDDP_LAUNCH_NEWS_DONE) {
        status = declare_done(nodes, round);
    } else if (orders.tell == TDDP_LAUNCH_NEWS_FAILED) {
        status = declare(nodes, round, "failed", orders.text);
    } else if (orders.tell == TDDP_LAUNCH_NEWS_STOPPED) {
        status = declare(nodes, round, "stopped", orders.text);
    }
    /* If the store is gone the next wait on it finds out and says so. */
    return status == TDDP_OK ? !orders.quit && orders.tell != TDDP_LAUNCH_NEWS_STOPPED
                             : !orders.quit;
}

tddp_launch_news tddp_launch_nodes_ended(tddp_launch_nodes *nodes, int round, char *text)
{
    char key[KEY_BYTES];
    tddp_blob value;
    int there = 0;
    tddp_wait wait = tddp_launch_short_wait();
    round_key(key, round, "over");
    tddp_slice slice = tddp_launch_slice(key);
    if (tddp_store_check(nodes->store, &slice, 1, &wait, &there) != TDDP_OK || !there ||
        tddp_store_get(nodes->store, slice, &wait, &value) != TDDP_OK) {
        return TDDP_LAUNCH_NEWS_NONE;
    }
    tddp_launch_news news = TDDP_LAUNCH_NEWS_ERROR;
    const char *rest = value.data;
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        size_t length = strlen(endings[i].word);
        if (strncmp(value.data, endings[i].word, length) == 0 && value.data[length] == ' ') {
            news = endings[i].news;
            rest = value.data + length + 1;
        }
    }
    (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "%s", rest);
    tddp_blob_free(&value);
    return news;
}

static tddp_status beat(const tddp_launch_nodes *nodes, int rank, int64_t by, int64_t *count)
{
    char key[KEY_BYTES];
    tddp_wait wait = {(int64_t)nodes->options->conf.heartbeat_timeout * 1000, NULL};
    (void)snprintf(key, sizeof key, "beat/%d", rank);
    return tddp_store_add(nodes->store, tddp_launch_slice(key), by, &wait, count);
}

static tddp_status count_nodes(const tddp_launch_nodes *nodes, const char *key, int64_t by,
                               int64_t *count)
{
    tddp_wait wait = tddp_launch_short_wait();
    return tddp_store_add(nodes->store, tddp_launch_slice(key), by, &wait, count);
}

tddp_status tddp_launch_nodes_arrive(const tddp_launch_nodes *nodes)
{
    int64_t count;
    return count_nodes(nodes, "here", 1, &count);
}

/* One node less that the host has to wait for at the end: this one, or one that is lost. */
static tddp_status count_leaving(const tddp_launch_nodes *nodes)
{
    int64_t here;
    int64_t left;
    tddp_status status = count_nodes(nodes, "left", 1, &left);
    if (status == TDDP_OK) {
        status = count_nodes(nodes, "here", 0, &here);
    }
    if (status == TDDP_OK && left >= here) {
        tddp_wait wait = tddp_launch_short_wait();
        status =
            tddp_store_set(nodes->store, tddp_launch_slice("gone"), tddp_launch_slice("1"), &wait);
    }
    return status;
}

/* The host's look at the others; whoever has shown nothing for too long is lost. */
static tddp_status look_after_others(const tddp_launch_nodes *nodes, int round, pulse *pulses)
{
    int64_t patience = (int64_t)nodes->options->conf.heartbeat_timeout * TDDP_NS_PER_S;
    for (int rank = 0; rank < nodes->options->max_nodes; rank++) {
        int64_t count;
        tddp_status status = rank == nodes->rank ? TDDP_OK : beat(nodes, rank, 0, &count);
        if (status != TDDP_OK) {
            return status;
        }
        if (rank == nodes->rank) {
            continue;
        }
        int64_t now = tddp_now_ns();
        if (count != pulses[rank].count || pulses[rank].seen_ns == 0) {
            pulses[rank] = (pulse){count, now};
        } else if (now - pulses[rank].seen_ns >= patience) {
            char text[128];
            (void)snprintf(text, sizeof text, "node %d is lost: no sign of life for %d s", rank,
                           nodes->options->conf.heartbeat_timeout);
            status = declare(nodes, round, "failed", text);
            return status == TDDP_OK ? count_leaving(nodes) : status;
        }
    }
    return TDDP_OK;
}

static tddp_launch_news host_lost(const tddp_launch_nodes *nodes, char *text)
{
    (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES,
                   "the torchrun that hosts the rendezvous at %s:%d is lost: %s", nodes->host,
                   nodes->port, tddp_error_message());
    return TDDP_LAUNCH_NEWS_ERROR;
}

static tddp_status show_life(const tddp_launch_nodes *nodes, int round, pulse *pulses)
{
    int64_t count;
    tddp_status status = beat(nodes, nodes->rank, 1, &count);
    if (status == TDDP_OK && nodes->hosting) {
        status = look_after_others(nodes, round, pulses);
    }
    return status;
}

static tddp_launch_news watch(tddp_launch_nodes *nodes, int round, pulse *pulses, char *text)
{
    char key[KEY_BYTES];
    round_key(key, round, "over");
    tddp_slice over = tddp_launch_slice(key);
    int64_t beat_at = tddp_now_ns();
    for (;;) {
        tddp_wait wait = tddp_launch_wait(nodes, tddp_deadline_poll_ms(beat_at));
        tddp_status status = tddp_store_wait(nodes->store, &over, 1, &wait);
        if (status == TDDP_OK) {
            tddp_launch_news news = tddp_launch_nodes_ended(nodes, round, text);
            return news == TDDP_LAUNCH_NEWS_NONE ? host_lost(nodes, text) : news;
        }
        if (status == TDDP_CANCELED && !tddp_launch_nodes_obey(nodes, round)) {
            (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "torchrun was told to end");
            return TDDP_LAUNCH_NEWS_STOPPED;
        }
        if (status != TDDP_CANCELED && status != TDDP_TIMEOUT) {
            return host_lost(nodes, text);
        }
        if (tddp_now_ns() >= beat_at) {
            if (show_life(nodes, round, pulses) != TDDP_OK) {
                return host_lost(nodes, text);
            }
            beat_at = tddp_deadline_after_ms(BEAT_MS);
        }
    }
}

tddp_launch_news tddp_launch_nodes_watch(tddp_launch_nodes *nodes, int round, char *text)
{
    pulse *pulses = tddp_alloc_array((size_t)nodes->options->max_nodes, sizeof *pulses);
    if (!pulses) {
        (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "%s", tddp_error_message());
        return TDDP_LAUNCH_NEWS_ERROR;
    }
    tddp_launch_news news = watch(nodes, round, pulses, text);
    free(pulses);
    return news;
}

void tddp_launch_nodes_leave(tddp_launch_nodes *nodes)
{
    int64_t here;
    int64_t left;
    if (!nodes->store) {
        return;
    }
    if (!nodes->hosting) {
        (void)!count_leaving(nodes);
        return;
    }
    if (count_nodes(nodes, "here", 0, &here) == TDDP_OK &&
        count_nodes(nodes, "left", 0, &left) == TDDP_OK && left < here) {
        tddp_slice gone = tddp_launch_slice("gone");
        tddp_wait wait = tddp_launch_wait(nodes, LEAVE_MS);
        (void)!tddp_store_wait(nodes->store, &gone, 1, &wait);
    }
}
