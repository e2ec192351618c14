/*
 * The operations of Torch::Distributed::Store over <tddp/store.h>. Called by Ruby threads that hold
 * the GVL; every call that can block releases it through nogvl.c. Keys and values are frozen copies
 * (which share memory), so they don't change meanwhile. C keeps no Ruby object. store_open.c opens
 * stores, store_keys.c has operations on several keys, store_queue.c queues.
 */
#include "store_call.h"

static void store_free(void *store)
{
    tddp_store_release(store);
}

static const rb_data_type_t store_type = {
    .wrap_struct_name = "Torch::Distributed::Store",
    .function = {.dfree = store_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE store_allocate(VALUE class)
{
    return TypedData_Wrap_Struct(class, &store_type, NULL);
}

tddp_store *tddp_rb_store(VALUE object)
{
    if (!rb_typeddata_is_kind_of(object, &store_type))
        rb_raise(rb_eTypeError, "expected a Torch::Distributed::Store, got %" PRIsVALUE,
                 rb_inspect(object));
    tddp_store *store = RTYPEDDATA_DATA(object);
    if (store == NULL)
        rb_raise(rb_eTypeError, "this store is closed, or was never opened");
    return store;
}

void tddp_rb_adopt_store(VALUE object, tddp_store *store)
{
    rb_check_typeddata(object, &store_type);
    tddp_store_release(RTYPEDDATA_DATA(object));
    RTYPEDDATA_DATA(object) = store;
}

VALUE tddp_rb_wrap_store(tddp_store *store)
{
    VALUE class = rb_const_get(tddp_rb_distributed, rb_intern("Store"));
    VALUE self = store_allocate(class);
    RTYPEDDATA_DATA(self) = tddp_store_retain(store);
    return self;
}

/* --- a call ---------------------------------------------------------------------------------- */

VALUE tddp_rb_bytes(VALUE object, const char *what)
{
    if (RB_SYMBOL_P(object))
        object = rb_sym2str(object);
    if (!RB_TYPE_P(object, T_STRING))
        rb_raise(rb_eTypeError, "%s: expected a String, got %" PRIsVALUE, what, rb_inspect(object));
    return rb_str_new_frozen(object);
}

void tddp_rb_raise_outcome_blob(tddp_rb_outcome outcome, store_call *call)
{
    if (outcome.state != 0 || !NIL_P(outcome.error))
        tddp_blob_free(&call->blob);
    tddp_rb_raise_outcome(outcome);
}

VALUE tddp_rb_blob_to_string(tddp_blob *blob)
{
    VALUE string = rb_str_new(blob->data, (long)blob->size);
    tddp_blob_free(blob);
    return string;
}

/* --- one key --------------------------------------------------------------------------------- */

static tddp_status body_set(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_set(call->store, call->key, call->value, wait);
}

static tddp_status body_append(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_append(call->store, call->key, call->value, wait);
}

static tddp_status body_get(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_get(call->store, call->key, wait, &call->blob);
}

static tddp_status body_add(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_add(call->store, call->key, call->number, wait, &call->number);
}

static tddp_status body_compare_set(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_compare_set(call->store, call->key, call->value, call->desired, wait,
                                  &call->blob);
}

static tddp_status body_delete_key(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_delete_key(call->store, call->key, wait, &call->flag);
}

static tddp_status body_num_keys(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_num_keys(call->store, wait, &call->number);
}

VALUE tddp_rb_put(VALUE self, VALUE key, VALUE value, tddp_rb_body body)
{
    key = tddp_rb_bytes(key, "key");
    value = tddp_rb_bytes(value, "value");
    store_call call = {
        .store = tddp_rb_store(self), .key = tddp_rb_slice(key), .value = tddp_rb_slice(value)};
    tddp_rb_raise_outcome(tddp_rb_blocking_brief(body, &call));
    RB_GC_GUARD(key);
    RB_GC_GUARD(value);
    return Qnil;
}

static VALUE store_set(VALUE self, VALUE key, VALUE value)
{
    return tddp_rb_put(self, key, value, body_set);
}

static VALUE store_append(VALUE self, VALUE key, VALUE value)
{
    return tddp_rb_put(self, key, value, body_append);
}

static VALUE store_get(VALUE self, VALUE key)
{
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    tddp_rb_raise_outcome_blob(tddp_rb_blocking(body_get, &call, -1, false), &call);
    RB_GC_GUARD(key);
    return tddp_rb_blob_to_string(&call.blob);
}

static VALUE store_add(VALUE self, VALUE key, VALUE delta)
{
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    call.number = NUM2LL(delta);
    tddp_rb_raise_outcome(tddp_rb_blocking_brief(body_add, &call));
    RB_GC_GUARD(key);
    return LL2NUM(call.number);
}

static VALUE store_compare_set(VALUE self, VALUE key, VALUE expected, VALUE desired)
{
    key = tddp_rb_bytes(key, "key");
    expected = tddp_rb_bytes(expected, "expected");
    desired = tddp_rb_bytes(desired, "desired");
    store_call call = {.store = tddp_rb_store(self),
                       .key = tddp_rb_slice(key),
                       .value = tddp_rb_slice(expected),
                       .desired = tddp_rb_slice(desired)};
    tddp_rb_raise_outcome_blob(tddp_rb_blocking_brief(body_compare_set, &call), &call);
    RB_GC_GUARD(key);
    RB_GC_GUARD(expected);
    RB_GC_GUARD(desired);
    return tddp_rb_blob_to_string(&call.blob);
}

static VALUE store_delete_key(VALUE self, VALUE key)
{
    key = tddp_rb_bytes(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = tddp_rb_slice(key)};
    tddp_rb_raise_outcome(tddp_rb_blocking_brief(body_delete_key, &call));
    RB_GC_GUARD(key);
    return call.flag ? Qtrue : Qfalse;
}

static VALUE store_num_keys(VALUE self)
{
    store_call call = {.store = tddp_rb_store(self)};
    tddp_rb_raise_outcome(tddp_rb_blocking(body_num_keys, &call, -1, false));
    return LL2NUM(call.number);
}

/* --- closing ---------------------------------------------------------------------------------- */

static VALUE store_closed(VALUE self)
{
    rb_check_typeddata(self, &store_type);
    return RTYPEDDATA_DATA(self) == NULL ? Qtrue : Qfalse;
}

/* Releases the connection now, not at the next garbage collection. */
static VALUE store_close(VALUE self)
{
    tddp_rb_adopt_store(self, NULL);
    return Qnil;
}

void tddp_rb_init_store(void)
{
    VALUE store = rb_define_class_under(tddp_rb_distributed, "Store", rb_cObject);
    rb_define_alloc_func(store, store_allocate);
    rb_define_method(store, "close", store_close, 0);
    rb_define_method(store, "closed?", store_closed, 0);
    rb_define_method(store, "set", store_set, 2);
    rb_define_method(store, "get", store_get, 1);
    rb_define_method(store, "add", store_add, 2);
    rb_define_method(store, "compare_set", store_compare_set, 3);
    rb_define_method(store, "delete_key", store_delete_key, 1);
    rb_define_method(store, "num_keys", store_num_keys, 0);
    rb_define_method(store, "append", store_append, 2);
    tddp_rb_init_store_keys(store);
    tddp_rb_init_store_queues(store);
    tddp_rb_init_store_kinds(store);
}
