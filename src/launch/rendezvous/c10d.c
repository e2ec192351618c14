/*
 * The rendezvous backends c10d and static: a store that the torchrun at the endpoint serves, and
 * that all nodes, that one too, are clients of. Keys are below torchrun/RUN_ID/. Runs on the
 * rendezvous thread. Invariant: `link->state` is the store, exactly while the link is connected.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "net/net.h"

/* Run IDs have at most 256 bytes. */
enum { KEY_BYTES = 384, PATIENT_MS = 24 * 3600 * 1000 };

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

/* The key "torchrun/RUN_ID/" and two parts more. */
static tddp_slice key_of(const tddp_launch_link *link, const char *first, const char *second,
                         char text[KEY_BYTES])
{
    (void)snprintf(text, KEY_BYTES, "torchrun/%s/%s%s", link->run_id, first, second);
    return slice(text);
}

static bool is_same(const tddp_blob *blob, tddp_slice bytes)
{
    return blob->size == bytes.size && memcmp(blob->data, bytes.data, bytes.size) == 0;
}

/* `patient`: a call that ends before its answer comes gives up the connection, and its keys: so it
 * waits as long as the host's silence ends nothing here. */
static tddp_wait wait_of(const tddp_launch_link *link, bool patient)
{
    const tddp_launch_times *times = &link->times;
    int64_t silence_ms = times->silence_ms > 0 ? times->silence_ms : PATIENT_MS;
    bool elastic = tddp_launch_is_elastic(link->options);
    return (tddp_wait){patient && !elastic ? silence_ms : times->read_ms,
                       patient ? link->cancel : NULL};
}

static void close_link(tddp_launch_link *link)
{
    tddp_store_release(link->state);
    link->state = NULL;
}

/* Whether somebody listens there, which a store's client goes on trying until its time is up. */
static tddp_status probe(tddp_launch_link *link, const tddp_tcp_store_opts *opts)
{
    int fd = -1;
    tddp_status status =
        tddp_net_connect_host(opts->host, opts->port, tddp_deadline_after_ms(opts->timeout_ms),
                              tddp_cancel_fd(link->cancel), &fd);
    link->refused = status == TDDP_NETWORK && errno == ECONNREFUSED;
    tddp_close(fd);
    return status;
}

static tddp_status connect_link(tddp_launch_link *link, int64_t limit_ms)
{
    const tddp_launch_endpoint *endpoint = &link->options->endpoints[0];
    const tddp_wait wait = {limit_ms, link->cancel};
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store = NULL;
    opts.host = link->server ? tddp_store_server_address(link->server) : endpoint->host;
    opts.port = link->server ? tddp_store_server_port(link->server) : endpoint->port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = limit_ms;
    close_link(link);
    tddp_status status = probe(link, &opts);
    if (status == TDDP_OK) {
        status = tddp_tcp_store_open(&opts, &wait, &store);
        link->state = store;
    }
    return status;
}

static tddp_status watch(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view)
{
    char text[KEY_BYTES];
    const tddp_wait wait = {limit_ms, link->cancel};
    const tddp_slice prefix = key_of(link, "", "", text);
    tddp_store_entries found = {0};
    tddp_status status = tddp_store_watch(link->state, prefix, &wait, &found);
    if (status == TDDP_OK) {
        tddp_launch_view_free(view);
    }
    for (size_t i = 0; i < found.keys.count && status == TDDP_OK; i++) {
        status =
            tddp_launch_view_add(view, &found.keys.blobs[i], prefix.size, &found.values.blobs[i]);
    }
    tddp_store_entries_free(&found);
    return status;
}

/* --- entries --------------------------------------------------------------------------------- */

static tddp_status put_entry(tddp_launch_link *link, tddp_slice value, bool again, bool stays)
{
    char text[KEY_BYTES];
    int set;
    const tddp_wait wait = wait_of(link, again);
    const tddp_slice key = key_of(link, "node/", link->id, text);
    return stays ? tddp_store_set(link->state, key, value, &wait)
                 : tddp_store_set_ephemeral(link->state, key, value, link->times.silence_ms, 0,
                                            &wait, &set, NULL);
}

static tddp_status remove_entry(tddp_launch_link *link, const char *id)
{
    char text[KEY_BYTES];
    int deleted;
    const tddp_wait wait = wait_of(link, false);
    return tddp_store_delete_key(link->state, key_of(link, "node/", id, text), &wait, &deleted);
}

/* --- the leader ------------------------------------------------------------------------------ */

static tddp_status lead(tddp_launch_link *link)
{
    char text[KEY_BYTES];
    int set;
    tddp_blob now = {0};
    const tddp_wait wait = wait_of(link, false);
    const tddp_slice key = key_of(link, "leader", "", text);
    const tddp_slice own = slice(link->id);
    const int64_t silence_ms = link->times.silence_ms;
    tddp_status status =
        tddp_store_set_ephemeral(link->state, key, own, silence_ms, 1, &wait, &set, &now);
    if (status == TDDP_OK && !set && is_same(&now, own)) {
        /* It is of an earlier connection of this node, whose end is not known yet. */
        status = tddp_store_set_ephemeral(link->state, key, own, silence_ms, 0, &wait, &set, NULL);
    }
    tddp_blob_free(&now);
    return status == TDDP_OK && !set ? tddp_fail(TDDP_NOT_FOUND, "another torchrun leads") : status;
}

static tddp_status put_state(tddp_launch_link *link, tddp_slice before, tddp_slice now)
{
    char text[KEY_BYTES];
    tddp_blob stored = {0};
    const tddp_wait wait = wait_of(link, false);
    tddp_status status = tddp_store_compare_set(link->state, key_of(link, "state", "", text),
                                                before, now, &wait, &stored);
    if (status == TDDP_OK && !is_same(&stored, now)) {
        status = tddp_fail(TDDP_NOT_FOUND, "another torchrun leads");
    }
    tddp_blob_free(&stored);
    return status;
}

/* --- the workers' keys ----------------------------------------------------------------------- */

static tddp_status clear(tddp_launch_link *link)
{
    static const char kept[] = "torchrun/"; /* of this job, and others that meet here */
    const tddp_wait wait = wait_of(link, false);
    tddp_blob_list keys = {0};
    int deleted;
    tddp_status status = tddp_store_list_keys(link->state, &wait, &keys);
    for (size_t i = 0; i < keys.count && status == TDDP_OK; i++) {
        tddp_slice key = {keys.blobs[i].data, keys.blobs[i].size};
        if (strncmp(key.data, kept, sizeof kept - 1) != 0) {
            status = tddp_store_delete_key(link->state, key, &wait, &deleted);
        }
    }
    tddp_blob_list_free(&keys);
    return status;
}

const tddp_launch_backend tddp_launch_c10d = {
    .connect = connect_link,
    .close = close_link,
    .watch = watch,
    .put_entry = put_entry,
    .remove_entry = remove_entry,
    .lead = lead,
    .put_state = put_state,
    .clear = clear,
    .survives = false,
};
