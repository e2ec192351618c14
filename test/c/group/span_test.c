/* Operations in a trace: the spans' fields, of collectives, messages, and failures. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <tddp/trace.h>

#include "ranks.h"
#include "recorded.h"

enum { TEXT_BYTES = 1 << 16 };

static char folder[64];
static char text[TEXT_BYTES];

static void begin(void)
{
    strcpy(folder, "/tmp/tddp_span_XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    CHECK_OK(tddp_trace_open(folder, 0));
}

/* Ends the trace and reads it. */
static void end(void)
{
    char path[100];
    tddp_trace_close();
    snprintf(path, sizeof path, "%s/trace_rank_0.json", folder);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t size = fread(text, 1, sizeof text - 1, file);
    text[size] = '\0';
    fclose(file);
    CHECK_INT(remove(path), 0);
    CHECK_INT(remove(folder), 0);
}

static int spans(void)
{
    int found = 0;
    for (const char *at = strstr(text, "\"X\""); at; at = strstr(at + 1, "\"X\"")) {
        found++;
    }
    return found;
}

static void operations(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    float values[4] = {1, 2, 3, 4};
    tddp_buffer all = {values, 4, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    tddp_group *group = make_group("fake", rank, world_size, store, 5000);
    CHECK_OK(tddp_all_reduce(group, all, TDDP_REDUCE_SUM, 0, NULL));
    CHECK_OK(tddp_broadcast(group, all, 1, NULL));
    if (rank == 0) {
        CHECK_OK(tddp_send(group, all, 1, 7, NULL));
    } else {
        CHECK_OK(tddp_recv(group, all, 0, 7, NULL));
    }
    tddp_group_release(group);
}

TEST(each_operation_has_a_span)
{
    begin();
    run_ranks(2, operations, NULL);
    end();
    CHECK_INT(spans(), 6);
    CHECK_CONTAINS(text,
                   "\"cat\": \"communication\", \"name\": \"all_reduce\", \"args\": "
                   "{\"sequence\": 1, \"bytes\": 16, \"dtype\": \"float32\", \"queued_us\": ");
    CHECK_CONTAINS(text, "\"name\": \"broadcast\", \"args\": {\"sequence\": 2, \"bytes\": 16, "
                         "\"dtype\": \"float32\", \"root\": 1, \"queued_us\": ");
    CHECK_CONTAINS(text, "\"name\": \"send\", \"args\": {\"sequence\": 1, \"bytes\": 16, "
                         "\"dtype\": \"float32\", \"peer\": 1, \"tag\": 7, \"queued_us\": ");
    CHECK_CONTAINS(text, "\"name\": \"recv\", \"args\": {\"sequence\": 1, \"bytes\": 16, ");
    CHECK_CONTAINS(text, ", \"group\": \"default_pg\"}}");
}

TEST(a_failure_has_its_status)
{
    setenv("TDDP_FAKE", "fail_at=2", 1);
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    begin();
    tddp_group *group = make_group("fake", 0, 1, store, 5000);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_NETWORK);
    /* Refused, not executed. */
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    tddp_group_release(group);
    tddp_store_release(store);
    end();
    CHECK_INT(spans(), 2);
    CHECK_CONTAINS(text, "\"name\": \"barrier\", \"args\": {\"sequence\": 1, \"queued_us\": ");
    CHECK_CONTAINS(text, "\"group\": \"default_pg\", \"status\": \"TDDP_NETWORK\"}}");
}

TEST(operations_started_before_the_trace_are_not_in_it)
{
    setenv("TDDP_FAKE", "delay_ms=100", 1);
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group *group = make_group("fake", 0, 1, store, 5000);
    tddp_work *work;
    CHECK_OK(tddp_barrier(group, &work));
    await_started(group, 1);
    begin();
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
    tddp_store_release(store);
    end();
    CHECK_INT(spans(), 1);
    CHECK_CONTAINS(text, "\"sequence\": 2");
}
