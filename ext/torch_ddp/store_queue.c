/*
 * Queues and barriers of a store. Called by Ruby threads that hold the GVL, which the calls release
 * through nogvl.c. An interrupt loses no value: one that was just popped is pushed back.
 */
#include "store_call.h"

static tddp_status body_queue_push(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_queue_push(call->store, call->key, call->value, wait);
}

static tddp_status body_queue_pop(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_queue_pop(call->store, call->key, call->flag, wait, &call->blob);
}

static tddp_status body_queue_len(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_queue_len(call->store, call->key, wait, &call->number);
}

static tddp_status body_barrier(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_barrier(call->store, call->key, (int)call->number, wait);
}

static VALUE store_queue_push(VALUE self, VALUE key, VALUE value)
{
    return tddp_rb_put(self, key, value, body_queue_push);
}

/* An interrupt comes just after a value was popped: pushes it back, to the queue's end, so that it
 * isn't lost. */
static void push_back(store_call *call)
{
    enum { PUSH_BACK_MS = 2000 };
    tddp_wait wait = {.timeout_ms = PUSH_BACK_MS};
    tddp_slice value = {call->blob.data, call->blob.size};
    if (tddp_store_queue_push(call->store, call->key, value, &wait) != TDDP_OK)
        rb_warn(
            "queue_pop: interrupted after a value was popped, which could not be pushed back: %s",
            tddp_error_message());
}

/* queue_pop(key, block: true, timeout: nil) */
static VALUE store_queue_pop(int argc, VALUE *argv, VALUE self)
{
    VALUE key, options;
    VALUE options_given[2] = {Qundef, Qundef};
    ID names[] = {rb_intern("block"), rb_intern("timeout")};
    rb_scan_args(argc, argv, "1:", &key, &options);
    rb_get_kwargs(options, names, 0, 2, options_given);
    key = tddp_rb_bytes(key, "key");
    int64_t timeout_ms = options_given[1] == Qundef ? -1 : tddp_rb_milliseconds(options_given[1]);
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    call.flag = options_given[0] == Qundef || RTEST(options_given[0]);
    tddp_rb_outcome outcome = tddp_rb_blocking(body_queue_pop, &call, timeout_ms, false);
    if (call.blob.data != NULL && outcome.state == 0)
        outcome.state = tddp_rb_run_handlers(); /* else raised as this returns */
    if (call.blob.data != NULL && outcome.state != 0)
        push_back(&call);
    tddp_rb_raise_outcome_blob(outcome, &call);
    RB_GC_GUARD(key);
    return tddp_rb_blob_to_string(&call.blob);
}

static VALUE store_queue_len(VALUE self, VALUE key)
{
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    tddp_rb_raise_outcome(tddp_rb_blocking(body_queue_len, &call, -1, false));
    RB_GC_GUARD(key);
    return LL2NUM(call.number);
}

/* barrier(key, world_size, timeout = nil) */
static VALUE store_barrier(int argc, VALUE *argv, VALUE self)
{
    VALUE key, world_size, timeout;
    rb_scan_args(argc, argv, "21", &key, &world_size, &timeout);
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    call.number = NUM2INT(world_size);
    tddp_rb_raise_outcome(
        tddp_rb_blocking(body_barrier, &call, tddp_rb_milliseconds(timeout), true));
    RB_GC_GUARD(key);
    return Qnil;
}

void tddp_rb_init_store_queues(VALUE store)
{
    rb_define_method(store, "queue_push", store_queue_push, 2);
    rb_define_method(store, "queue_pop", store_queue_pop, -1);
    rb_define_method(store, "queue_len", store_queue_len, 1);
    rb_define_method(store, "barrier", store_barrier, -1);
}
