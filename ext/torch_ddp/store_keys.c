/*
 * The operations of a store on several keys at once, and the list of its keys. Called by Ruby
 * threads that hold the GVL; the keys of a call are concatenated in one string, which other threads
 * can't change while nogvl.c releases the GVL.
 */
#include "store_call.h"

#include <ruby/encoding.h>

/* Concatenates strings to one that is returned, and sets their slices of it. */
static VALUE concatenate(VALUE strings, const char *what, tddp_slice *slices)
{
    long count = RARRAY_LEN(strings);
    VALUE all = rb_str_new(NULL, 0);
    for (long i = 0; i < count; i++) {
        VALUE one = tddp_rb_bytes(rb_ary_entry(strings, i), what);
        slices[i].size = (size_t)RSTRING_LEN(one);
        rb_str_cat(all, RSTRING_PTR(one), RSTRING_LEN(one));
    }
    const char *at = RSTRING_PTR(all);
    for (long i = 0; i < count; i++) {
        slices[i].data = at;
        at += slices[i].size;
    }
    return all;
}

static tddp_status body_wait(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_wait(call->store, call->keys, call->count, wait);
}

static tddp_status body_check(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_check(call->store, call->keys, call->count, wait, &call->flag);
}

static tddp_status body_multi_get(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_multi_get(call->store, call->keys, call->count, wait, call->blobs);
}

static tddp_status body_multi_set(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_multi_set(call->store, call->keys, call->values, call->count, wait);
}

static tddp_status body_list_keys(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_list_keys(call->store, wait, &call->list);
}

/* In UTF-8 if it is valid, else binary. */
static VALUE key_to_string(const tddp_blob *key)
{
    VALUE string = rb_utf8_str_new(key->data, (long)key->size);
    if (rb_enc_str_coderange(string) == ENC_CODERANGE_BROKEN)
        rb_enc_associate(string, rb_ascii8bit_encoding());
    return string;
}

static VALUE store_list_keys(VALUE self)
{
    store_call call = {.store = tddp_rb_store(self)};
    tddp_rb_outcome outcome = tddp_rb_blocking(body_list_keys, &call, -1, false);
    if (outcome.state != 0)
        tddp_blob_list_free(&call.list);
    tddp_rb_raise_outcome(outcome);
    VALUE keys = rb_ary_new();
    for (size_t i = 0; i < call.list.count; i++)
        rb_ary_push(keys, key_to_string(&call.list.blobs[i]));
    tddp_blob_list_free(&call.list);
    return keys;
}

/* Runs `body` with slices of `keys`; the caller's other fields are set already. */
static void with_keys(VALUE keys, store_call *call, tddp_rb_body body, int64_t timeout_ms)
{
    VALUE memory;
    Check_Type(keys, T_ARRAY);
    call->count = (size_t)RARRAY_LEN(keys);
    tddp_slice *slices = tddp_rb_scratch(&memory, RARRAY_LEN(keys), sizeof(tddp_slice));
    VALUE all = concatenate(keys, "key", slices);
    call->keys = slices;
    tddp_rb_outcome outcome = tddp_rb_blocking(body, call, timeout_ms, false);
    RB_GC_GUARD(all);
    ALLOCV_END(memory);
    tddp_rb_raise_outcome(outcome);
}

static VALUE store_wait(int argc, VALUE *argv, VALUE self)
{
    VALUE keys, timeout;
    rb_scan_args(argc, argv, "11", &keys, &timeout);
    store_call call = {.store = tddp_rb_store(self)};
    with_keys(rb_Array(keys), &call, body_wait, tddp_rb_milliseconds(timeout));
    return Qnil;
}

static VALUE store_check(VALUE self, VALUE keys)
{
    store_call call = {.store = tddp_rb_store(self)};
    with_keys(rb_Array(keys), &call, body_check, -1);
    return call.flag ? Qtrue : Qfalse;
}

static VALUE store_multi_get(VALUE self, VALUE keys)
{
    VALUE memory;
    store_call call = {.store = tddp_rb_store(self)};
    Check_Type(keys, T_ARRAY);
    keys = rb_ary_dup(keys);
    long count = RARRAY_LEN(keys);
    call.blobs = tddp_rb_scratch(&memory, count, sizeof(tddp_blob));
    with_keys(keys, &call, body_multi_get, -1);
    VALUE values = rb_ary_new_capa(count);
    for (long i = 0; i < count; i++)
        rb_ary_push(values, tddp_rb_blob_to_string(&call.blobs[i]));
    ALLOCV_END(memory);
    return values;
}

static VALUE store_multi_set(VALUE self, VALUE keys, VALUE values)
{
    VALUE memory;
    store_call call = {.store = tddp_rb_store(self)};
    Check_Type(keys, T_ARRAY);
    Check_Type(values, T_ARRAY);
    keys = rb_ary_dup(keys);
    values = rb_ary_dup(values);
    long count = RARRAY_LEN(values);
    if (RARRAY_LEN(keys) != count)
        rb_raise(rb_eArgError, "multi_set: %ld keys, but %ld values", RARRAY_LEN(keys), count);
    tddp_slice *slices = tddp_rb_scratch(&memory, count, sizeof(tddp_slice));
    VALUE all = concatenate(values, "value", slices);
    call.values = slices;
    with_keys(keys, &call, body_multi_set, -1);
    RB_GC_GUARD(all);
    ALLOCV_END(memory);
    return Qnil;
}

void tddp_rb_init_store_keys(VALUE store)
{
    rb_define_method(store, "wait", store_wait, -1);
    rb_define_method(store, "check", store_check, 1);
    rb_define_method(store, "multi_get", store_multi_get, 1);
    rb_define_method(store, "multi_set", store_multi_set, 2);
    rb_define_method(store, "list_keys", store_list_keys, 0);
}
