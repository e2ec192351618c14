/*
 * Torch::Distributed::Meeting over <tddp/meeting.h>. Called by Ruby threads that hold the GVL;
 * every request to the store releases it through nogvl.c. A meeting owns a reference to its store
 * and group, so other threads may close both meanwhile. Invariant: one call at a time uses the C
 * meeting (`busy`); a second one, of another thread or of a signal handler, is refused.
 */
#include "torch_ddp.h"

#include <inttypes.h>
#include <stdlib.h>

#include <tddp/meeting.h>

enum { NAME_BYTES = 61, CHECK_MS = 250, READ_MS = 1000 };

typedef enum step { GIVE, AWAIT, READ, FAIL, LEAVE, REMOVE } step;

typedef struct handle {
    tddp_meeting_opts opts; /* owns a reference to its store */
    tddp_meeting *meeting;  /* NULL: not open */
    tddp_group *group;      /* NULL: no processes are watched */
    int *members;           /* each rank's in the group */
    step step;              /* of the call under way, and what it gives or says */
    tddp_slice text;
    char name[NAME_BYTES];
    bool busy;
} handle;

static void handle_close(handle *self)
{
    tddp_meeting_close(self->meeting);
    self->meeting = NULL;
    tddp_store_release(self->opts.store);
    self->opts.store = NULL;
    tddp_group_release_async(self->group);
    self->group = NULL;
    free(self->members);
    self->members = NULL;
}

static void handle_free(void *data)
{
    handle_close(data);
    xfree(data);
}

static const rb_data_type_t meeting_type = {
    .wrap_struct_name = "Torch::Distributed::Meeting",
    .function = {.dfree = handle_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE meeting_allocate(VALUE class)
{
    handle *self;
    return TypedData_Make_Struct(class, handle, &meeting_type, self);
}

static handle *idle_handle(VALUE object)
{
    handle *self = rb_check_typeddata(object, &meeting_type);
    if (self->busy)
        rb_raise(rb_eThreadError, "another call of this meeting \"%s\" is under way", self->name);
    return self;
}

static handle *open_handle(VALUE object)
{
    handle *self = idle_handle(object);
    if (self->meeting == NULL)
        rb_raise(rb_eTypeError, "this meeting is closed, or was never opened");
    return self;
}

/* --- opening --------------------------------------------------------------------------------- */

/* While ranks are missing: whether the process of one has ended. */
static tddp_status check_members(void *data)
{
    const handle *self = data;
    for (int rank = 0; rank < self->opts.world_size; rank++) {
        int ended;
        tddp_peer peer;
        const tddp_wait wait = {READ_MS, NULL};
        const int member = self->members[rank];
        tddp_status status = tddp_group_peer_ended(self->group, member, &ended);
        if (status == TDDP_OK && ended && !tddp_meeting_records(self->meeting)[rank].data) {
            status = tddp_meeting_read(self->meeting, &wait);
        } else if (status == TDDP_OK) {
            continue;
        }
        status = status ? status : tddp_group_peer(self->group, member, &peer);
        if (status)
            return status;
        if (!tddp_meeting_records(self->meeting)[rank].data)
            return tddp_fail(TDDP_PEER_LOST, "global rank %d (host %s, pid %" PRId64 ") has ended",
                             peer.global_rank, peer.host, peer.pid);
    }
    return TDDP_OK;
}

static void watch(handle *self, VALUE group, VALUE members)
{
    const long count = self->opts.world_size;
    Check_Type(members, T_ARRAY);
    if (RARRAY_LEN(members) != count)
        rb_raise(rb_eArgError, "members: expected %ld ranks, got %ld", count, RARRAY_LEN(members));
    self->members = malloc((size_t)count * sizeof *self->members);
    if (self->members == NULL)
        rb_memerror();
    for (long i = 0; i < count; i++) {
        tddp_peer peer;
        self->members[i] = NUM2INT(rb_ary_entry(members, i));
        tddp_rb_check(tddp_group_peer(tddp_rb_group(group), self->members[i], &peer));
    }
    self->group = tddp_group_retain(tddp_rb_group(group));
    self->opts.check = check_members;
    self->opts.data = self;
    self->opts.check_ms = CHECK_MS;
}

/* initialize(store, name, rank, world_size, group = nil, members = nil) */
static VALUE meeting_initialize(int argc, VALUE *argv, VALUE object)
{
    VALUE store, name, rank, world_size, group, members;
    rb_scan_args(argc, argv, "42", &store, &name, &rank, &world_size, &group, &members);
    handle *self = idle_handle(object);
    const char *text = StringValueCStr(name);
    const int own = NUM2INT(rank), count = NUM2INT(world_size);
    if (self->opts.store != NULL)
        rb_raise(rb_eTypeError, "this meeting is open");
    if (strlen(text) >= NAME_BYTES)
        rb_raise(rb_eArgError, "name: expected at most %d bytes, got %" PRIsVALUE, NAME_BYTES - 1,
                 rb_inspect(name));
    if (count < 1 || own < 0 || own >= count)
        rb_raise(rb_eArgError, "rank: expected 0 to %d, got %d", count - 1, own);
    if (!NIL_P(group))
        (void)tddp_rb_group(group); /* raises if it is destroyed, before anything is retained */
    strcpy(self->name, text);
    self->opts = (tddp_meeting_opts){.store = tddp_store_retain(tddp_rb_store(store)),
                                     .name = self->name,
                                     .rank = own,
                                     .world_size = count,
                                     .sender = TDDP_MEETING_ALL};
    if (!NIL_P(group))
        watch(self, group, members);
    tddp_rb_check(tddp_meeting_open(&self->opts, &self->meeting));
    return object;
}

static VALUE meeting_close(VALUE object)
{
    handle_close(idle_handle(object));
    return Qnil;
}

/* --- meeting --------------------------------------------------------------------------------- */

static tddp_status body_step(void *data, const tddp_wait *wait)
{
    handle *self = data;
    switch (self->step) {
    case GIVE:
        return tddp_meeting_give(self->meeting, self->text, wait);
    case AWAIT:
        return tddp_meeting_await(self->meeting, wait);
    case READ:
        return tddp_meeting_read(self->meeting, wait);
    case LEAVE:
        return tddp_meeting_leave(self->meeting, wait);
    case REMOVE:
        return tddp_meeting_remove(&self->opts, wait);
    default:
        tddp_meeting_fail(&self->opts, self->text.data); /* two seconds at most */
        return TDDP_OK;
    }
}

/* Takes a step, and raises what it failed with. `text` is what the step gives or says, or nil. */
static VALUE take(VALUE object, step step, VALUE text, VALUE timeout)
{
    handle *self = open_handle(object);
    const int64_t timeout_ms = tddp_rb_milliseconds(timeout);
    self->text = NIL_P(text) ? (tddp_slice){0} : tddp_rb_slice(text);
    self->step = step;
    self->busy = true;
    tddp_rb_outcome outcome = timeout_ms < 0 ? tddp_rb_blocking_brief(body_step, self)
                                             : tddp_rb_blocking(body_step, self, timeout_ms, false);
    self->busy = false;
    tddp_rb_raise_outcome(outcome);
    RB_GC_GUARD(text);
    return Qnil;
}

static VALUE meeting_give(VALUE object, VALUE record)
{
    return take(object, GIVE, tddp_rb_bytes(record, "record"), Qnil);
}

static VALUE meeting_await(VALUE object, VALUE timeout)
{
    if (NIL_P(timeout))
        rb_raise(rb_eTypeError, "timeout: expected a number of seconds, got nil");
    return take(object, AWAIT, Qnil, timeout);
}

static VALUE meeting_read(VALUE object)
{
    return take(object, READ, Qnil, Qnil);
}

static VALUE meeting_fail(VALUE object, VALUE reason)
{
    VALUE copy = rb_str_new_frozen(StringValue(reason));
    (void)StringValueCStr(copy); /* raises on a NUL */
    return take(object, FAIL, copy, Qnil);
}

static VALUE meeting_leave(VALUE object)
{
    return take(object, LEAVE, Qnil, Qnil);
}

static VALUE meeting_remove(VALUE object)
{
    return take(object, REMOVE, Qnil, Qnil);
}

/* --- what was read --------------------------------------------------------------------------- */

static VALUE meeting_records(VALUE object)
{
    const handle *self = open_handle(object);
    const tddp_slice *records = tddp_meeting_records(self->meeting);
    VALUE all = rb_ary_new_capa(self->opts.world_size);
    for (int rank = 0; rank < self->opts.world_size; rank++) {
        const tddp_slice record = records[rank];
        rb_ary_push(all, record.data ? rb_str_new(record.data, (long)record.size) : Qnil);
    }
    return all;
}

static VALUE meeting_failure(VALUE object)
{
    int rank = -1;
    const char *reason = tddp_meeting_failure(open_handle(object)->meeting, &rank);
    return reason == NULL ? Qnil : rb_ary_new_from_args(2, INT2NUM(rank), rb_str_new_cstr(reason));
}

void tddp_rb_init_meeting(void)
{
    VALUE meeting = rb_define_class_under(tddp_rb_distributed, "Meeting", rb_cObject);
    rb_define_alloc_func(meeting, meeting_allocate);
    rb_define_method(meeting, "initialize", meeting_initialize, -1);
    rb_define_method(meeting, "give", meeting_give, 1);
    rb_define_method(meeting, "await", meeting_await, 1);
    rb_define_method(meeting, "read", meeting_read, 0);
    rb_define_method(meeting, "records", meeting_records, 0);
    rb_define_method(meeting, "failure", meeting_failure, 0);
    rb_define_method(meeting, "fail", meeting_fail, 1);
    rb_define_method(meeting, "leave", meeting_leave, 0);
    rb_define_method(meeting, "remove", meeting_remove, 0);
    rb_define_method(meeting, "close", meeting_close, 0);
}
