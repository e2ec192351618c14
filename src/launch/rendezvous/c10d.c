/*
 * The rendezvous backends c10d and static: a store that the torchrun at the endpoint serves, and
 * that all nodes, that one too, are clients of. Keys are below torchrun/RUN_ID/. Runs on the
 * rendezvous thread. Invariant: `store` is there exactly while the link is connected.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "net/net.h"

enum { LEAST_REACH_MS = 50, KEY_BYTES = 64, PATIENT_MS = 24 * 3600 * 1000 };

typedef struct connection {
    tddp_store *whole; /* the store with all that is in it */
    tddp_store *store; /* the same connection, below the job's prefix */
} connection;

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static tddp_store *store_of(const tddp_launch_link *link)
{
    return ((const connection *)link->state)->store;
}

static tddp_wait answer_wait(const tddp_launch_link *link)
{
    return (tddp_wait){link->times.read_ms, NULL};
}

/* A call that ends before its answer comes gives up the connection, and its keys: so it waits as
 * long as the host's silence ends nothing here. */
static tddp_wait patient_wait(const tddp_launch_link *link)
{
    int64_t silence_ms = link->times.silence_ms > 0 ? link->times.silence_ms : PATIENT_MS;
    return (tddp_wait){tddp_launch_is_elastic(link->options) ? link->times.read_ms : silence_ms,
                       link->cancel};
}

static tddp_status open_link(tddp_launch_link *link)
{
    link->state = tddp_alloc(sizeof(connection));
    return link->state ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

static void disconnect(tddp_launch_link *link)
{
    connection *c = link->state;
    tddp_store_release(c->store);
    tddp_store_release(c->whole);
    c->store = c->whole = NULL;
}

static void close_link(tddp_launch_link *link)
{
    if (link->state) {
        disconnect(link);
        free(link->state);
        link->state = NULL;
    }
}

/* Whether somebody listens there, which a store's client goes on trying until its time is up. */
static tddp_status probe(tddp_launch_link *link, const tddp_tcp_store_opts *opts)
{
    int fd;
    tddp_status status =
        tddp_net_connect_host(opts->host, opts->port, tddp_deadline_after_ms(opts->timeout_ms),
                              tddp_cancel_fd(link->cancel), &fd);
    if (status == TDDP_OK) {
        tddp_close(fd);
    }
    link->refused = status == TDDP_NETWORK && errno == ECONNREFUSED;
    return status;
}

static tddp_status open_store(tddp_launch_link *link, int64_t limit_ms, tddp_store **out)
{
    const tddp_launch_endpoint *endpoint = &link->options->endpoints[0];
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = link->server ? tddp_store_server_address(link->server) : endpoint->host;
    opts.port = link->server ? tddp_store_server_port(link->server) : endpoint->port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = limit_ms;
    tddp_status status = probe(link, &opts);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_wait wait = {opts.timeout_ms, link->cancel};
    status = tddp_tcp_store_open(&opts, &wait, out);
    if (status == TDDP_NETWORK) { /* it may have ended meanwhile */
        char reason[TDDP_LAUNCH_WHY_BYTES];
        (void)snprintf(reason, sizeof reason, "%s", tddp_error_message());
        opts.timeout_ms = LEAST_REACH_MS;
        (void)!probe(link, &opts);
        return tddp_fail(status, "%s", reason);
    }
    return status;
}

static tddp_status connect_link(tddp_launch_link *link, int64_t limit_ms)
{
    connection *c = link->state;
    disconnect(link);
    link->refused = false;
    link->why[0] = '\0';
    tddp_status status = open_store(link, limit_ms, &c->whole);
    char *prefix = status == TDDP_OK ? tddp_format("torchrun/%s", link->run_id) : NULL;
    if (status == TDDP_OK) {
        status =
            prefix ? tddp_prefix_store_create(prefix, c->whole, &c->store) : TDDP_OUT_OF_MEMORY;
    }
    free(prefix);
    if (status != TDDP_OK) {
        (void)snprintf(link->why, sizeof link->why, "%s", tddp_error_message());
    }
    return status;
}

static tddp_status watch(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view)
{
    tddp_wait wait = {limit_ms, link->cancel};
    tddp_store_entries found = {0};
    tddp_status status = tddp_store_watch(store_of(link), slice(""), &wait, &found);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_launch_view_free(view);
    for (size_t i = 0; i < found.keys.count && status == TDDP_OK; i++) {
        const tddp_blob *key = &found.keys.blobs[i];
        const tddp_blob *value = &found.values.blobs[i];
        status = tddp_launch_view_add(view, (tddp_slice){key->data, key->size},
                                      (tddp_slice){value->data, value->size});
    }
    tddp_store_entries_free(&found);
    return status;
}

/* --- entries --------------------------------------------------------------------------------- */

static tddp_slice entry_key(const char *id, char text[KEY_BYTES])
{
    (void)snprintf(text, KEY_BYTES, "node/%s", id);
    return slice(text);
}

static tddp_status put_entry(tddp_launch_link *link, tddp_slice value, bool again)
{
    char key[KEY_BYTES];
    int set;
    tddp_wait wait = again ? patient_wait(link) : answer_wait(link);
    return tddp_store_set_ephemeral(store_of(link), entry_key(link->id, key), value,
                                    link->times.silence_ms, 0, &wait, &set, NULL);
}

static tddp_status leave_entry(tddp_launch_link *link, tddp_slice value)
{
    char key[KEY_BYTES];
    tddp_wait wait = answer_wait(link);
    return tddp_store_set(store_of(link), entry_key(link->id, key), value, &wait);
}

static tddp_status remove_entry(tddp_launch_link *link, const char *id)
{
    char key[KEY_BYTES];
    int deleted;
    tddp_wait wait = answer_wait(link);
    return tddp_store_delete_key(store_of(link), entry_key(id, key), &wait, &deleted);
}

/* --- the leader ------------------------------------------------------------------------------ */

static tddp_status lead(tddp_launch_link *link)
{
    int set;
    tddp_blob now = {0};
    tddp_wait wait = patient_wait(link);
    tddp_slice own = slice(link->id);
    tddp_status status = tddp_store_set_ephemeral(store_of(link), slice("leader"), own,
                                                  link->times.silence_ms, 1, &wait, &set, &now);
    bool earlier = status == TDDP_OK && !set && now.size == own.size &&
                   memcmp(now.data, own.data, own.size) == 0;
    tddp_blob_free(&now);
    if (earlier) { /* of an earlier connection of this node, whose end is not known yet */
        status = tddp_store_set_ephemeral(store_of(link), slice("leader"), own,
                                          link->times.silence_ms, 0, &wait, &set, NULL);
    }
    return status == TDDP_OK && !set ? tddp_fail(TDDP_NOT_FOUND, "another torchrun leads") : status;
}

static tddp_status resign(tddp_launch_link *link)
{
    int deleted;
    tddp_wait wait = answer_wait(link);
    return tddp_store_delete_key(store_of(link), slice("leader"), &wait, &deleted);
}

static tddp_status put_state(tddp_launch_link *link, tddp_slice before, tddp_slice now)
{
    tddp_blob stored = {0};
    tddp_wait wait = answer_wait(link);
    tddp_status status =
        tddp_store_compare_set(store_of(link), slice("state"), before, now, &wait, &stored);
    bool written = status == TDDP_OK && stored.size == now.size &&
                   memcmp(stored.data, now.data, now.size) == 0;
    tddp_blob_free(&stored);
    return status == TDDP_OK && !written ? tddp_fail(TDDP_NOT_FOUND, "another torchrun leads")
                                         : status;
}

/* --- the workers' keys ----------------------------------------------------------------------- */

static tddp_status clear(tddp_launch_link *link)
{
    static const char kept[] = "torchrun/"; /* of this job, and others that meet here */
    tddp_store *whole = ((const connection *)link->state)->whole;
    tddp_wait wait = answer_wait(link);
    tddp_blob_list keys = {0};
    int deleted;
    tddp_status status = tddp_store_list_keys(whole, &wait, &keys);
    for (size_t i = 0; i < keys.count && status == TDDP_OK; i++) {
        tddp_slice key = {keys.blobs[i].data, keys.blobs[i].size};
        if (key.size < sizeof kept - 1 || memcmp(key.data, kept, sizeof kept - 1) != 0) {
            status = tddp_store_delete_key(whole, key, &wait, &deleted);
        }
    }
    tddp_blob_list_free(&keys);
    return status;
}

const tddp_launch_backend tddp_launch_c10d = {
    .open = open_link,
    .close = close_link,
    .connect = connect_link,
    .watch = watch,
    .put_entry = put_entry,
    .leave_entry = leave_entry,
    .remove_entry = remove_entry,
    .lead = lead,
    .resign = resign,
    .put_state = put_state,
    .clear = clear,
    .survives = false,
};
