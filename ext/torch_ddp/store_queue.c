/*
 * Queues and barriers of a store. Entered by Ruby threads that hold the GVL; the calls let go of it
 * by nogvl.c. An interrupt loses no value: what was taken at that moment is given back.
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

/* Someone interrupts the thread at the moment at which it takes a value: rather than to be lost
 * with the jump, the value goes back, if only to the queue's end. */
static void give_back(store_call *call)
{
    enum { GIVE_BACK_MS = 2000 };
    tddp_wait wait = {.timeout_ms = GIVE_BACK_MS};
    tddp_slice value = {call->blob.data, call->blob.size};
    if (tddp_store_queue_push(call->store, call->key, value, &wait) != TDDP_OK)
        rb_warn("queue_pop: a value was taken, and could not be given back: %s",
                tddp_error_message());
}

static VALUE check_interrupts(VALUE nothing)
{
    rb_thread_check_ints();
    return nothing;
}

/* queue_pop(key, block: true, timeout: nil) */
static VALUE store_queue_pop(int argc, VALUE *argv, VALUE self)
{
    VALUE key, options;
    VALUE given[2] = {Qundef, Qundef};
    ID names[] = {rb_intern("block"), rb_intern("timeout")};
    rb_scan_args(argc, argv, "1:", &key, &options);
    rb_get_kwargs(options, names, 0, 2, given);
    key = tddp_rb_bytes(key, "key");
    int64_t timeout_ms = given[1] == Qundef ? -1 : tddp_rb_milliseconds(given[1]);
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    call.flag = given[0] == Qundef || RTEST(given[0]);
    tddp_rb_outcome outcome = tddp_rb_blocking(body_queue_pop, &call, timeout_ms, false);
    if (call.blob.data != NULL && outcome.state == 0)
        rb_protect(check_interrupts, Qnil, &outcome.state); /* would come as this returns */
    if (call.blob.data != NULL && outcome.state != 0)
        give_back(&call);
    tddp_rb_settle_blob(outcome, &call);
    RB_GC_GUARD(key);
    return tddp_rb_blob_to_string(&call.blob);
}

static VALUE store_queue_len(VALUE self, VALUE key)
{
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    tddp_rb_settle(tddp_rb_blocking(body_queue_len, &call, -1, false));
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
    tddp_rb_settle(tddp_rb_blocking(body_barrier, &call, tddp_rb_milliseconds(timeout), true));
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
