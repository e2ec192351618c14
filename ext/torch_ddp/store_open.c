/*
 * Opens each kind of Torch::Distributed::Store, and getters of its settings. Called by Ruby threads
 * that hold the GVL; opening and cloning a TCP store release it through nogvl.c.
 */
#include "torch_ddp.h"

typedef struct opening {
    const tddp_tcp_store_opts *opts;
    tddp_store *origin; /* of a clone */
    tddp_store *opened;
} opening;

/* Sets the object's store, or releases the store after an interrupt or error. */
static void adopt_opened(tddp_rb_outcome outcome, VALUE object, opening *call)
{
    if (outcome.state != 0 || !NIL_P(outcome.error))
        tddp_store_release(call->opened);
    tddp_rb_raise_outcome(outcome);
    tddp_rb_adopt_store(object, call->opened);
}

static tddp_status open_tcp(void *data, const tddp_wait *wait)
{
    opening *call = data;
    return tddp_tcp_store_open(call->opts, wait, &call->opened);
}

static int port_number(VALUE port)
{
    long number = NUM2LONG(port);
    if (number < 0 || number > 65535)
        rb_raise(rb_eArgError, "port: expected 0 to 65535, got %ld", number);
    return (int)number;
}

/* _open(host, port, world_size, is_master, wait_for_workers, timeout, listen_fd) */
static VALUE tcp_open(VALUE self, VALUE host, VALUE port, VALUE world_size, VALUE is_master,
                      VALUE wait_for_workers, VALUE timeout, VALUE listen_fd)
{
    VALUE name = rb_str_new_frozen(StringValue(host));
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = StringValueCStr(name);
    opts.port = port_number(port);
    opts.world_size = NIL_P(world_size) ? 0 : NUM2INT(world_size);
    opts.is_server = RTEST(is_master);
    opts.wait_for_workers = RTEST(wait_for_workers);
    opts.timeout_ms = tddp_rb_milliseconds(timeout);
    opts.listen_fd = NIL_P(listen_fd) ? -1 : NUM2INT(listen_fd);
    opening call = {.opts = &opts};
    adopt_opened(tddp_rb_blocking(open_tcp, &call, opts.timeout_ms, true), self, &call);
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
    tddp_rb_adopt_store(self, store);
    return self;
}

/* _open(timeout) */
static VALUE hash_open(VALUE self, VALUE timeout)
{
    tddp_store *store;
    tddp_rb_check(tddp_hash_store_create(tddp_rb_milliseconds(timeout), &store));
    tddp_rb_adopt_store(self, store);
    return self;
}

/* _open(prefix, store) */
static VALUE prefix_open(VALUE self, VALUE prefix, VALUE inner)
{
    tddp_store *store;
    const char *text = StringValueCStr(prefix);
    tddp_rb_check(tddp_prefix_store_create(text, tddp_rb_store(inner), &store));
    tddp_rb_adopt_store(self, store);
    return self;
}

static tddp_status open_clone(void *data, const tddp_wait *wait)
{
    opening *call = data;
    return tddp_store_clone(call->origin, wait, &call->opened);
}

/* _share(origin): opens a clone of that store. */
static VALUE store_share(VALUE self, VALUE origin)
{
    opening call = {.origin = tddp_store_retain(tddp_rb_store(origin))};
    tddp_rb_outcome outcome = tddp_rb_blocking(open_clone, &call, -1, true);
    tddp_store_release(call.origin);
    adopt_opened(outcome, self, &call);
    return self;
}

/* _clone: another object of the class, with the same instance variables. */
static VALUE store_clone(VALUE self)
{
    VALUE copy = store_share(rb_obj_alloc(rb_obj_class(self)), self);
    rb_copy_generic_ivar(copy, self);
    return copy;
}

/* --- getters --------------------------------------------------------------------------------- */

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

static VALUE store_extended(VALUE self)
{
    return tddp_store_has_extended_api(tddp_rb_store(self)) ? Qtrue : Qfalse;
}

static VALUE define_kind(const char *name, VALUE store)
{
    return rb_define_class_under(tddp_rb_distributed, name, store);
}

void tddp_rb_init_store_kinds(void)
{
    VALUE store = rb_define_class_under(tddp_rb_distributed, "Store", rb_cObject);
    rb_define_method(store, "timeout", store_timeout, 0);
    rb_define_method(store, "timeout=", store_set_timeout, 1);
    rb_define_method(store, "has_extended_api?", store_extended, 0);
    rb_define_method(store, "_clone", store_clone, 0);
    rb_define_private_method(store, "_share", store_share, 1);

    VALUE tcp = define_kind("TCPStore", store);
    rb_define_private_method(tcp, "_open", tcp_open, 7);
    rb_define_method(tcp, "port", store_port, 0);
    rb_define_method(tcp, "host", store_host, 0);
    rb_define_private_method(define_kind("FileStore", store), "_open", file_open, 3);
    rb_define_private_method(define_kind("HashStore", store), "_open", hash_open, 1);
    rb_define_private_method(define_kind("PrefixStore", store), "_open", prefix_open, 2);
}
