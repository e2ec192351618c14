/*
 * Backends whose operations the host executes: requests, copies of the memory, and operations that
 * end before the host has completed them.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "base/base.h"

#include <tddp/delegate.h>

enum { LONG_MS = 60000 };

typedef struct host_group {
    const tddp_backend_v1 *backend;
    void *context;
    int fd;
    tddp_status status; /* of what a thread runs */
    tddp_op op;
    char text[256];
} host_group;

static tddp_delegate_request *await_request(int fd)
{
    tddp_delegate_request *request;
    while (!(request = tddp_delegate_next())) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        CHECK_INT(poll(&ready, 1, LONG_MS), 1);
    }
    return request;
}

static void *create(void *data)
{
    host_group *self = data;
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(LONG_MS, &store));
    const tddp_backend_opts opts = {.size = sizeof opts,
                                    .world_size = 1,
                                    .store = store,
                                    .timeout_ms = LONG_MS,
                                    .backend = self->backend};
    self->status = self->backend->create(&opts, NULL, &self->context);
    tddp_store_release(store);
    return NULL;
}

static void *run(void *data)
{
    host_group *self = data;
    self->status = self->backend->run[self->op.kind](self->context, &self->op);
    (void)snprintf(self->text, sizeof self->text, "%s", tddp_error_message());
    return NULL;
}

static void *destroy(void *data)
{
    host_group *self = data;
    self->backend->destroy(self->context);
    return NULL;
}

static pthread_t begin(host_group *self, void *(*body)(void *))
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, body, self), 0);
    return thread;
}

static void open_group(host_group *self)
{
    *self = (host_group){0};
    CHECK_OK(tddp_delegate_register("host"));
    CHECK_OK(tddp_backend_find("host", &self->backend));
    CHECK_OK(tddp_delegate_start(&self->fd));
    pthread_t thread = begin(self, create);
    tddp_delegate_request *request = await_request(self->fd);
    CHECK_INT(request->kind, TDDP_DELEGATE_CREATE);
    CHECK_TEXT(request->backend, "host");
    CHECK_INT(request->world_size, 1);
    CHECK_INT(request->store != NULL, true);
    tddp_delegate_complete(request, TDDP_OK, NULL, NULL);
    pthread_join(thread, NULL);
    CHECK_OK(self->status);
}

static void close_group(host_group *self)
{
    pthread_t thread = begin(self, destroy);
    tddp_delegate_request *request = await_request(self->fd);
    CHECK_INT(request->kind, TDDP_DELEGATE_DESTROY);
    tddp_delegate_complete(request, TDDP_OK, NULL, NULL);
    pthread_join(thread, NULL);
}

static tddp_op all_reduce_of(float *values, size_t count, int64_t timeout_ms)
{
    tddp_buffer buffer = {.data = values, .count = count, .dtype = TDDP_FLOAT32};
    return (tddp_op){
        .kind = TDDP_OP_ALL_REDUCE, .input = buffer, .output = buffer, .timeout_ms = timeout_ms};
}

TEST(an_operation_is_executed_on_copies)
{
    host_group group;
    float values[] = {1, 2, 3};
    float copy[3];
    open_group(&group);
    group.op = all_reduce_of(values, 3, LONG_MS);
    pthread_t thread = begin(&group, run);
    tddp_delegate_request *request = await_request(group.fd);
    CHECK_INT(request->kind, TDDP_DELEGATE_RUN);
    CHECK_INT(request->op, TDDP_OP_ALL_REDUCE);
    CHECK_INT(request->input_count, 1);
    CHECK_INT(request->output_count, 1);
    CHECK_INT(request->inputs[0].count, 3);
    CHECK_INT(request->inputs[0].data == NULL, true);
    CHECK_OK(tddp_delegate_read(request, 0, copy));
    copy[2] += 4;
    const void *outputs[] = {copy};
    tddp_delegate_complete(request, TDDP_OK, NULL, outputs);
    pthread_join(thread, NULL);
    CHECK_OK(group.status);
    CHECK_DOUBLE(values[2], 7, 0);
    close_group(&group);
}

TEST(a_failure_has_the_hosts_text)
{
    host_group group;
    open_group(&group);
    group.op = (tddp_op){.kind = TDDP_OP_BARRIER, .timeout_ms = LONG_MS};
    pthread_t thread = begin(&group, run);
    tddp_delegate_request *request = await_request(group.fd);
    CHECK_INT(request->input_count + request->output_count, 0);
    tddp_delegate_complete(request, TDDP_UNSUPPORTED, "there is no barrier", NULL);
    pthread_join(thread, NULL);
    CHECK_INT(group.status, TDDP_UNSUPPORTED);
    CHECK_TEXT(group.text, "there is no barrier");
    close_group(&group);
}

/* The memory is not touched after that. */
static void complete_late(host_group *group, tddp_delegate_request *request, const float *values)
{
    float late[] = {9};
    const void *outputs[] = {late};
    tddp_delegate_request *notice = await_request(group->fd);
    CHECK_INT(notice->kind, TDDP_DELEGATE_ABORT);
    CHECK_INT(notice->context == request->context, true);
    tddp_delegate_complete(notice, TDDP_OK, NULL, NULL);
    CHECK_STATUS(tddp_delegate_read(request, 0, late), TDDP_CANCELED);
    tddp_delegate_complete(request, TDDP_OK, NULL, outputs);
    CHECK_DOUBLE(values[0], 1, 0);
}

TEST(an_operation_whose_time_is_up_is_abandoned)
{
    host_group group;
    float values[] = {1};
    open_group(&group);
    group.op = all_reduce_of(values, 1, 1);
    pthread_t thread = begin(&group, run);
    tddp_delegate_request *request = await_request(group.fd);
    pthread_join(thread, NULL);
    CHECK_INT(group.status, TDDP_TIMEOUT);
    CHECK_CONTAINS(group.text, "backend host has not completed it in time");
    complete_late(&group, request, values);
    close_group(&group);
}

TEST(an_abort_ends_what_runs_and_what_follows)
{
    host_group group;
    float values[] = {1};
    open_group(&group);
    group.op = all_reduce_of(values, 1, LONG_MS);
    pthread_t thread = begin(&group, run);
    tddp_delegate_request *request = await_request(group.fd);
    group.backend->abort(group.context);
    pthread_join(thread, NULL);
    CHECK_INT(group.status, TDDP_GROUP_FAILED);
    complete_late(&group, request, values);
    close_group(&group);
}

TEST(names_are_taken_once)
{
    host_group group;
    open_group(&group);
    CHECK_STATUS(tddp_delegate_register("host"), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_delegate_register("a b"), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_delegate_register(NULL), TDDP_INVALID_ARGUMENT);
    close_group(&group);
}
