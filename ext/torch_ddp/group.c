/*
 * Torch::Distributed::ProcessGroup over <tddp/group.h>: creation, shutdown and getters; its
 * operations are in collectives.c. Called by Ruby threads that hold the GVL; creation and shutdown
 * release it. C keeps only the handle; lib/torch manages names, ranks and the registry of groups.
 */
#include "torch_ddp.h"

#include <tddp/backend.h>

static void group_free(void *group)
{
    tddp_group_release_async(group);
}

static const rb_data_type_t group_type = {
    .wrap_struct_name = "Torch::Distributed::ProcessGroup",
    .function = {.dfree = group_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

tddp_group *tddp_rb_group(VALUE object)
{
    if (!rb_typeddata_is_kind_of(object, &group_type))
        rb_raise(rb_eTypeError, "expected a Torch::Distributed::ProcessGroup, got %" PRIsVALUE,
                 rb_inspect(object));
    tddp_group *group = RTYPEDDATA_DATA(object);
    if (group == NULL)
        tddp_rb_check(tddp_fail(TDDP_GROUP_CLOSED, "this process group is destroyed: make another "
                                                   "with init_process_group"));
    return group;
}

tddp_group *tddp_rb_group_or_null(VALUE object)
{
    return NIL_P(object) ? NULL : tddp_rb_group(object);
}

tddp_rb_outcome tddp_rb_blocking_with(tddp_group *group, tddp_rb_body body, void *data,
                                      int64_t timeout_ms, bool no_restart)
{
    tddp_group *held = group ? tddp_group_retain(group) : NULL;
    tddp_rb_outcome outcome = tddp_rb_blocking(body, data, timeout_ms, no_restart);
    tddp_group_release(held);
    return outcome;
}

/* --- creation and shutdown ------------------------------------------------------------------- */

typedef struct create_call {
    const tddp_group_opts *opts;
    tddp_group *group;
} create_call;

static tddp_status body_create(void *data, const tddp_wait *wait)
{
    create_call *call = data;
    return tddp_group_create(call->opts, wait, &call->group);
}

/* _create(backend, name, store, rank, world_size, timeout, device_index, device_bound, parent =
 * nil, split = false) */
static VALUE group_create(int argc, VALUE *argv, VALUE class)
{
    VALUE backend, name, store, rank, world_size, timeout, device_index, device_bound, parent,
        split;
    rb_scan_args(argc, argv, "82", &backend, &name, &store, &rank, &world_size, &timeout,
                 &device_index, &device_bound, &parent, &split);
    backend = rb_str_new_frozen(StringValue(backend));
    name = rb_str_new_frozen(StringValue(name));
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = StringValueCStr(backend);
    opts.name = StringValueCStr(name);
    opts.store = tddp_rb_store(store);
    opts.rank = NUM2INT(rank);
    opts.world_size = NUM2INT(world_size);
    opts.timeout_ms = tddp_rb_milliseconds(timeout);
    opts.device_index = NIL_P(device_index) ? -1 : NUM2INT(device_index);
    opts.device_bound = RTEST(device_bound);
    opts.split = RTEST(split);
    VALUE self = TypedData_Wrap_Struct(class, &group_type, NULL);
    opts.parent = tddp_rb_group_or_null(parent);
    create_call call = {&opts, NULL};
    tddp_rb_outcome outcome =
        tddp_rb_blocking_with(opts.parent, body_create, &call, opts.timeout_ms, true);
    if (outcome.state == 0)
        RTYPEDDATA_DATA(self) = call.group;
    else /* interrupted just after it was created: nothing refers to it */
        tddp_group_release_async(call.group);
    tddp_rb_raise_outcome(outcome);
    RB_GC_GUARD(backend);
    RB_GC_GUARD(name);
    return self;
}

static tddp_status body_decline(void *group, const tddp_wait *wait)
{
    return tddp_group_decline(group, wait);
}

/* Takes part in the split of this group, in which other ranks make a new one. */
static VALUE group_decline(VALUE self, VALUE timeout)
{
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_raise_outcome(
        tddp_rb_blocking_with(group, body_decline, group, tddp_rb_milliseconds(timeout), true));
    return Qnil;
}

static tddp_status body_drain(void *group, const tddp_wait *wait)
{
    return tddp_group_drain(group, wait);
}

static tddp_status body_shutdown(void *group, const tddp_wait *wait)
{
    if (tddp_group_shutdown_host(group, 0, wait) != TDDP_OK)
        tddp_log(TDDP_LOG_INFO, "group", "\"%s\" has ended here, and its store does now: %s",
                 tddp_group_name(group), tddp_error_message());
    return TDDP_OK;
}

/* _shutdown(drain, host_wait): shuts the group down and releases it, so that its store, and a
 * server behind it, can close too. An interrupt ends the wait for operations, or for the other
 * ranks' use of the store, and is raised after the shutdown. */
static VALUE group_shutdown(VALUE self, VALUE drain, VALUE host_wait)
{
    tddp_group *group = RTYPEDDATA_DATA(self);
    int64_t drain_ms = tddp_rb_milliseconds(drain);
    int64_t host_ms = tddp_rb_milliseconds(host_wait);
    if (group == NULL)
        return Qnil;
    tddp_group_retain(group); /* another thread may shut it down meanwhile */
    tddp_rb_outcome outcome = tddp_rb_blocking(body_drain, group, drain_ms, false);
    if (outcome.state != 0)
        tddp_group_shutdown(group, 0); /* no Ruby code may run before the longjmp continues */
    else /* operations that didn't complete in time are aborted, which is not an error here */
        outcome = tddp_rb_blocking(body_shutdown, group, host_ms, host_ms > 0);
    tddp_group_release(group);
    if (RTYPEDDATA_DATA(self) != NULL) {
        RTYPEDDATA_DATA(self) = NULL;
        tddp_group_release(group);
    }
    tddp_rb_raise_outcome(outcome);
    return Qnil;
}

/* _leave_because(text): what the other ranks read once this one has shut the group down. */
static VALUE group_leave_because(VALUE self, VALUE text)
{
    tddp_group *group = RTYPEDDATA_DATA(self);
    if (group != NULL && tddp_group_set_leave_reason(group, StringValueCStr(text)) != TDDP_OK)
        rb_memerror();
    return self;
}

/* --- getters --------------------------------------------------------------------------------- */

static VALUE group_rank(VALUE self)
{
    return INT2NUM(tddp_group_rank(tddp_rb_group(self)));
}

static VALUE group_size(VALUE self)
{
    return INT2NUM(tddp_group_world_size(tddp_rb_group(self)));
}

static VALUE group_name(VALUE self)
{
    return rb_utf8_str_new_cstr(tddp_group_name(tddp_rb_group(self)));
}

static VALUE group_backend(VALUE self)
{
    return rb_utf8_str_new_cstr(tddp_group_backend(tddp_rb_group(self)));
}

static VALUE group_closed(VALUE self)
{
    const tddp_group *group = RTYPEDDATA_DATA(self);
    return group == NULL || tddp_group_closed(group) ? Qtrue : Qfalse;
}

/* The host and pid of a rank whose process is known to have ended; else nil. */
static VALUE group_ended_peer(VALUE self, VALUE rank)
{
    int ended;
    tddp_peer peer;
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_check(tddp_group_peer_ended(group, NUM2INT(rank), &ended));
    tddp_rb_check(tddp_group_peer(group, NUM2INT(rank), &peer));
    return ended ? rb_sprintf("host %s, pid %" PRId64, peer.host, peer.pid) : Qnil;
}

/* The group's prefix of the store. */
static VALUE group_store(VALUE self)
{
    tddp_group *group = tddp_rb_group(self);
    tddp_store *store = tddp_group_store(group);
    if (store == NULL)
        tddp_rb_check(tddp_fail(TDDP_GROUP_CLOSED, "the process group \"%s\" is destroyed",
                                tddp_group_name(group)));
    VALUE wrapped = tddp_rb_wrap_store(store);
    tddp_store_release(store);
    return wrapped;
}

static VALUE group_timeout(VALUE self)
{
    return DBL2NUM((double)tddp_group_timeout(tddp_rb_group(self)) / 1000);
}

static VALUE group_set_timeout(VALUE self, VALUE seconds)
{
    if (NIL_P(seconds))
        rb_raise(rb_eTypeError, "timeout: expected a number of seconds, got nil");
    tddp_rb_check(tddp_group_set_timeout(tddp_rb_group(self), tddp_rb_milliseconds(seconds)));
    return seconds;
}

/* Loads the backends of a name. Raises if one isn't available. */
static VALUE find_backend(VALUE class, VALUE name)
{
    const tddp_backend_v1 *backends[TDDP_DEVICE_TYPES];
    tddp_rb_check(tddp_backends_find(StringValueCStr(name), backends));
    return Qtrue;
}

void tddp_rb_init_group(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "ProcessGroup", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "_create", group_create, -1);
    rb_define_method(class, "_decline", group_decline, 1);
    rb_define_singleton_method(class, "_find_backend", find_backend, 1);
    rb_define_method(class, "_shutdown", group_shutdown, 2);
    rb_define_method(class, "_leave_because", group_leave_because, 1);
    rb_define_method(class, "_store", group_store, 0);
    rb_define_method(class, "_ended_peer", group_ended_peer, 1);
    rb_define_method(class, "rank", group_rank, 0);
    rb_define_method(class, "size", group_size, 0);
    rb_define_method(class, "name", group_name, 0);
    rb_define_method(class, "backend", group_backend, 0);
    rb_define_method(class, "closed?", group_closed, 0);
    rb_define_method(class, "timeout", group_timeout, 0);
    rb_define_method(class, "timeout=", group_set_timeout, 1);
}
