/* Stores while system calls and allocations fail: every cleanup path, nothing left behind. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/store.h>

#include "check.h"
#include "faults/scenario.h"

static tddp_slice text(const char *bytes)
{
    return (tddp_slice){bytes, strlen(bytes)};
}

static tddp_status expect(tddp_status status, tddp_blob *blob, const char *wanted)
{
    if (status == TDDP_OK) {
        CHECK_TEXT(blob->data, wanted);
    }
    tddp_blob_free(blob);
    return status;
}

/* One of each; ends at the first that fails. */
static tddp_status use(tddp_store *store)
{
    tddp_slice keys[2] = {text("a"), text("b")};
    tddp_slice values[2] = {text("1"), text("22")};
    tddp_blob blob = {0};
    tddp_blob blobs[2] = {{0}, {0}};
    int64_t number = 0;
    int flag = 0;
    tddp_status status = tddp_store_multi_set(store, keys, values, 2, NULL);
    if (status == TDDP_OK) {
        status = tddp_store_wait(store, keys, 2, NULL);
    }
    if (status == TDDP_OK) {
        status = expect(tddp_store_get(store, keys[1], NULL, &blob), &blob, "22");
    }
    if (status == TDDP_OK) {
        status = tddp_store_append(store, keys[0], text("x"), NULL);
    }
    if (status == TDDP_OK) {
        status = tddp_store_multi_get(store, keys, 2, NULL, blobs);
    }
    if (status == TDDP_OK) {
        CHECK_TEXT(blobs[0].data, "1x");
    }
    tddp_blob_free(&blobs[0]);
    tddp_blob_free(&blobs[1]);
    if (status == TDDP_OK) {
        status = expect(tddp_store_compare_set(store, keys[0], text("1x"), text("y"), NULL, &blob),
                        &blob, "y");
    }
    if (status == TDDP_OK) {
        status = tddp_store_add(store, text("n"), 41, NULL, &number);
    }
    if (status == TDDP_OK) {
        status = tddp_store_check(store, keys, 2, NULL, &flag);
    }
    if (status == TDDP_OK) {
        status = tddp_store_delete_key(store, keys[0], NULL, &flag);
    }
    if (status == TDDP_OK) {
        status = tddp_store_num_keys(store, NULL, &number);
    }
    return status;
}

static tddp_status tcp(void)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *host = NULL;
    tddp_store *clone = NULL;
    opts.host = "127.0.0.1";
    opts.is_server = 1;
    opts.world_size = 1;
    opts.timeout_ms = scenario_patience_ms;
    tddp_status status = tddp_tcp_store_open(&opts, NULL, &host);
    if (status == TDDP_OK) {
        status = tddp_store_clone(host, NULL, &clone);
    }
    if (status == TDDP_OK) {
        status = use(clone);
    }
    tddp_store_release(clone);
    tddp_store_release(host);
    return status;
}

static tddp_status file(void)
{
    char path[64];
    tddp_store *store = NULL;
    tddp_store *view = NULL;
    (void)snprintf(path, sizeof path, "/tmp/tddp-faults-%d", (int)getpid());
    tddp_status status = tddp_file_store_open(path, 1, scenario_patience_ms, &store);
    if (status == TDDP_OK) {
        status = tddp_prefix_store_create("view", store, &view);
    }
    if (status == TDDP_OK) {
        status = use(view);
    }
    tddp_store_release(view);
    tddp_store_release(store);
    (void)unlink(path);
    return status;
}

static tddp_status hash(void)
{
    tddp_store *store = NULL;
    tddp_status status = tddp_hash_store_create(scenario_patience_ms, &store);
    if (status == TDDP_OK) {
        status = use(store);
    }
    tddp_store_release(store);
    return status;
}

MULTI_TEST(tcp_store_survives_failing_calls, 1, 100)
{
    scenario_fail_system_calls(tcp);
}

MULTI_TEST(tcp_store_survives_failing_allocations, 1, 100)
{
    scenario_fail_allocations(tcp);
}

TEST(tcp_store_stands_interruptions)
{
    scenario_disturb(tcp);
}

MULTI_TEST(file_store_survives_failing_calls, 1, 100)
{
    scenario_fail_system_calls(file);
}

MULTI_TEST(file_store_survives_failing_allocations, 1, 100)
{
    scenario_fail_allocations(file);
}

TEST(file_store_stands_interruptions)
{
    scenario_disturb(file);
}

TEST(hash_store_survives_failing_allocations)
{
    scenario_fail_allocations(hash);
}
