/*
 * Torch::Distributed::Store and its kinds over <tddp/store.h>. Entered by Ruby threads that hold
 * the GVL; every call that can block goes through nogvl.c with its bytes held still: keys and
 * values are frozen copies (which share memory), and several of them lie end to end in one string.
 * No object of Ruby's is kept in C. Leaves defaults and checks of Ruby's arguments to lib/torch.
 */
#include "torch_ddp.h"

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

static void adopt(VALUE self, tddp_store *store)
{
    tddp_store_release(RTYPEDDATA_DATA(self));
    RTYPEDDATA_DATA(self) = store;
}

VALUE tddp_rb_wrap_store(tddp_store *store)
{
    VALUE class = rb_const_get(tddp_rb_distributed, rb_intern("Store"));
    VALUE self = store_allocate(class);
    RTYPEDDATA_DATA(self) = tddp_store_retain(store);
    return self;
}

/* --- a call ---------------------------------------------------------------------------------- */

/* What any of the calls needs and gives. */
typedef struct store_call {
    tddp_store *store;
    tddp_slice key, value, desired;
    const tddp_slice *keys, *values;
    size_t count;
    int64_t number;
    int flag;
    tddp_blob blob;
    tddp_blob *blobs;
    const tddp_tcp_store_opts *tcp;
    tddp_store *opened;
} store_call;

/* A key or value as bytes: a frozen string that shares the memory of the one given. */
static VALUE bytes_of(VALUE object, const char *what)
{
    if (RB_SYMBOL_P(object))
        object = rb_sym2str(object);
    if (!RB_TYPE_P(object, T_STRING))
        rb_raise(rb_eTypeError, "%s: expected a String, got %" PRIsVALUE, what, rb_inspect(object));
    return rb_str_new_frozen(object);
}

static tddp_slice slice_of(VALUE string)
{
    return (tddp_slice){RSTRING_PTR(string), (size_t)RSTRING_LEN(string)};
}

static VALUE blob_to_string(tddp_blob *blob)
{
    VALUE string = rb_str_new(blob->data, (long)blob->size);
    tddp_blob_free(blob);
    return string;
}

/* Lays strings end to end in one that is returned, and writes where each lies. */
static VALUE lay_out(VALUE strings, const char *what, tddp_slice *slices)
{
    long count = RARRAY_LEN(strings);
    VALUE all = rb_str_new(NULL, 0);
    for (long i = 0; i < count; i++) {
        VALUE one = bytes_of(rb_ary_entry(strings, i), what);
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

/* --- opening --------------------------------------------------------------------------------- */

static tddp_status open_tcp(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_tcp_store_open(call->tcp, wait, &call->opened);
}

static int port_number(VALUE port)
{
    long number = NUM2LONG(port);
    if (number < 0 || number > 65535)
        rb_raise(rb_eArgError, "port: expected 0 to 65535, got %ld", number);
    return (int)number;
}

/* _open(host, port, world_size, is_master, wait_for_workers, timeout) */
static VALUE tcp_open(VALUE self, VALUE host, VALUE port, VALUE world_size, VALUE is_master,
                      VALUE wait_for_workers, VALUE timeout)
{
    VALUE name = rb_str_new_frozen(StringValue(host));
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = StringValueCStr(name);
    opts.port = port_number(port);
    opts.world_size = NIL_P(world_size) ? 0 : NUM2INT(world_size);
    opts.is_server = RTEST(is_master);
    opts.wait_for_workers = RTEST(wait_for_workers);
    opts.timeout_ms = tddp_rb_milliseconds(timeout);
    store_call call = {.tcp = &opts};
    tddp_rb_settle(tddp_rb_blocking(open_tcp, &call, opts.timeout_ms, true));
    adopt(self, call.opened);
    RB_GC_GUARD(name);
    return self;
}

/* _open(path, world_size, timeout) */
static VALUE file_open(VALUE self, VALUE path, VALUE world_size, VALUE timeout)
{
    tddp_store *store;
    int world = NIL_P(world_size) ? 0 : NUM2INT(world_size);
    int64_t timeout_ms = tddp_rb_milliseconds(timeout);
    tddp_rb_check(tddp_file_store_open(StringValueCStr(path), world, timeout_ms, &store));
    adopt(self, store);
    return self;
}

/* _open(timeout) */
static VALUE hash_open(VALUE self, VALUE timeout)
{
    tddp_store *store;
    tddp_rb_check(tddp_hash_store_create(tddp_rb_milliseconds(timeout), &store));
    adopt(self, store);
    return self;
}

/* _open(prefix, store) */
static VALUE prefix_open(VALUE self, VALUE prefix, VALUE inner)
{
    tddp_store *store;
    const char *text = StringValueCStr(prefix);
    tddp_rb_check(tddp_prefix_store_create(text, tddp_rb_store(inner), &store));
    adopt(self, store);
    return self;
}

static VALUE store_port(VALUE self)
{
    return INT2NUM(tddp_tcp_store_port(tddp_rb_store(self)));
}

static VALUE store_host(VALUE self)
{
    const char *host = tddp_tcp_store_host(tddp_rb_store(self));
    return host ? rb_utf8_str_new_cstr(host) : Qnil;
}

static VALUE store_timeout(VALUE self)
{
    return DBL2NUM((double)tddp_store_timeout(tddp_rb_store(self)) / 1000);
}

static VALUE store_set_timeout(VALUE self, VALUE seconds)
{
    if (NIL_P(seconds))
        rb_raise(rb_eTypeError, "timeout: expected a number of seconds, got nil");
    tddp_rb_check(tddp_store_set_timeout(tddp_rb_store(self), tddp_rb_milliseconds(seconds)));
    return seconds;
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

static VALUE put(VALUE self, VALUE key, VALUE value, tddp_rb_body body, bool once)
{
    key = bytes_of(key, "key");
    value = bytes_of(value, "value");
    store_call call = {
        .store = tddp_rb_store(self), .key = slice_of(key), .value = slice_of(value)};
    tddp_rb_settle(tddp_rb_blocking(body, &call, -1, once));
    RB_GC_GUARD(key);
    RB_GC_GUARD(value);
    return Qnil;
}

static VALUE store_set(VALUE self, VALUE key, VALUE value)
{
    return put(self, key, value, body_set, false);
}

static VALUE store_append(VALUE self, VALUE key, VALUE value)
{
    return put(self, key, value, body_append, true);
}

static VALUE store_get(VALUE self, VALUE key)
{
    key = bytes_of(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = slice_of(key)};
    tddp_rb_settle(tddp_rb_blocking(body_get, &call, -1, false));
    RB_GC_GUARD(key);
    return blob_to_string(&call.blob);
}

static VALUE store_add(VALUE self, VALUE key, VALUE delta)
{
    key = bytes_of(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = slice_of(key)};
    call.number = NUM2LL(delta);
    tddp_rb_settle(tddp_rb_blocking(body_add, &call, -1, true));
    RB_GC_GUARD(key);
    return LL2NUM(call.number);
}

static VALUE store_compare_set(VALUE self, VALUE key, VALUE expected, VALUE desired)
{
    key = bytes_of(key, "key");
    expected = bytes_of(expected, "expected");
    desired = bytes_of(desired, "desired");
    store_call call = {.store = tddp_rb_store(self),
                       .key = slice_of(key),
                       .value = slice_of(expected),
                       .desired = slice_of(desired)};
    tddp_rb_settle(tddp_rb_blocking(body_compare_set, &call, -1, true));
    RB_GC_GUARD(key);
    RB_GC_GUARD(expected);
    RB_GC_GUARD(desired);
    return blob_to_string(&call.blob);
}

static VALUE store_delete_key(VALUE self, VALUE key)
{
    key = bytes_of(key, "key");
    store_call call = {.store = tddp_rb_store(self), .key = slice_of(key)};
    tddp_rb_settle(tddp_rb_blocking(body_delete_key, &call, -1, true));
    RB_GC_GUARD(key);
    return call.flag ? Qtrue : Qfalse;
}

static VALUE store_num_keys(VALUE self)
{
    store_call call = {.store = tddp_rb_store(self)};
    tddp_rb_settle(tddp_rb_blocking(body_num_keys, &call, -1, false));
    return LL2NUM(call.number);
}

/* --- several keys ---------------------------------------------------------------------------- */

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

/* Runs `body` with slices of `keys`; the caller's other fields are set already. */
static void with_keys(VALUE keys, store_call *call, tddp_rb_body body, int64_t timeout_ms)
{
    VALUE memory;
    Check_Type(keys, T_ARRAY);
    call->count = (size_t)RARRAY_LEN(keys);
    tddp_slice *slices = tddp_rb_scratch(&memory, RARRAY_LEN(keys), sizeof(tddp_slice));
    VALUE all = lay_out(keys, "key", slices);
    call->keys = slices;
    tddp_rb_outcome outcome = tddp_rb_blocking(body, call, timeout_ms, false);
    RB_GC_GUARD(all);
    ALLOCV_END(memory);
    tddp_rb_settle(outcome);
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
        rb_ary_push(values, blob_to_string(&call.blobs[i]));
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
    VALUE all = lay_out(values, "value", slices);
    call.values = slices;
    with_keys(keys, &call, body_multi_set, -1);
    RB_GC_GUARD(all);
    ALLOCV_END(memory);
    return Qnil;
}

static tddp_status body_clone(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    return tddp_store_clone(call->store, wait, &call->opened);
}

/* The same store by a connection of its own, for a thread that does not wait for others' calls. */
static VALUE store_clone(VALUE self)
{
    store_call call = {.store = tddp_rb_store(self)};
    tddp_rb_outcome outcome = tddp_rb_blocking(body_clone, &call, -1, true);
    VALUE clone = outcome.state == 0 && call.opened ? tddp_rb_wrap_store(call.opened) : Qnil;
    tddp_store_release(call.opened); /* An interrupt may come when it has just been made. */
    tddp_rb_settle(outcome);
    return clone;
}

/* Lets go of the connection now rather than when the collector comes by. */
static VALUE store_close(VALUE self)
{
    rb_check_typeddata(self, &store_type);
    adopt(self, NULL);
    return Qnil;
}

static VALUE define_kind(const char *name, VALUE store)
{
    return rb_define_class_under(tddp_rb_distributed, name, store);
}

void tddp_rb_init_store(void)
{
    VALUE store = rb_define_class_under(tddp_rb_distributed, "Store", rb_cObject);
    rb_define_alloc_func(store, store_allocate);
    rb_define_method(store, "timeout", store_timeout, 0);
    rb_define_method(store, "timeout=", store_set_timeout, 1);
    rb_define_method(store, "close", store_close, 0);
    rb_define_method(store, "_clone", store_clone, 0);
    rb_define_method(store, "set", store_set, 2);
    rb_define_method(store, "get", store_get, 1);
    rb_define_method(store, "add", store_add, 2);
    rb_define_method(store, "compare_set", store_compare_set, 3);
    rb_define_method(store, "delete_key", store_delete_key, 1);
    rb_define_method(store, "num_keys", store_num_keys, 0);
    rb_define_method(store, "wait", store_wait, -1);
    rb_define_method(store, "check", store_check, 1);
    rb_define_method(store, "append", store_append, 2);
    rb_define_method(store, "multi_get", store_multi_get, 1);
    rb_define_method(store, "multi_set", store_multi_set, 2);

    VALUE tcp = define_kind("TCPStore", store);
    rb_define_private_method(tcp, "_open", tcp_open, 6);
    rb_define_method(tcp, "port", store_port, 0);
    rb_define_method(tcp, "host", store_host, 0);
    rb_define_private_method(define_kind("FileStore", store), "_open", file_open, 3);
    rb_define_private_method(define_kind("HashStore", store), "_open", hash_open, 1);
    rb_define_private_method(define_kind("PrefixStore", store), "_open", prefix_open, 2);
}
