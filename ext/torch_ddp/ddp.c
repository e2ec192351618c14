/*
 * The core of DistributedDataParallel over tddp_ddp of <tddp/torch.h>. Called by Ruby threads that
 * hold the GVL; libtorch's backward calls tddp_rb_blocking_in_backward(). C keeps no Ruby object,
 * and autograd's hooks don't call Ruby. lib/torch collects the parameters, decides when to
 * synchronize, and keeps the module.
 */
#include "torch_ddp.h"

/* Guarded by the GVL. A call that releases the GVL counts as a user: another Ruby thread may
 * release the core meanwhile, and the last user then frees it. */
typedef struct core {
    tddp_ddp *ddp;
    unsigned users;
    bool released;
} core;

static void core_free(void *data)
{
    core *mine = data;
    tddp_ddp_free(mine->ddp);
    xfree(mine);
}

static const rb_data_type_t ddp_type = {
    .wrap_struct_name = "Torch::Distributed::GradientSync",
    .function = {.dfree = core_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static core *core_of(VALUE self)
{
    core *mine = rb_check_typeddata(self, &ddp_type);
    if (mine->ddp == NULL || mine->released)
        rb_raise(rb_eRuntimeError, "the core of a DistributedDataParallel was released: its owner "
                                   "uses another one");
    return mine;
}

static tddp_ddp *ddp_of(VALUE self)
{
    return core_of(self)->ddp;
}

static core *core_acquire(VALUE self)
{
    core *mine = core_of(self);
    mine->users++;
    return mine;
}

static void free_if_unused(core *mine)
{
    if (mine->users > 0 || !mine->released)
        return;
    tddp_ddp *ddp = mine->ddp;
    mine->ddp = NULL;
    tddp_ddp_free(ddp);
}

/* Ends a call that acquired the core: raises its outcome, or returns nil. */
static VALUE core_release(core *mine, tddp_rb_outcome outcome)
{
    mine->users--;
    free_if_unused(mine);
    tddp_rb_raise_outcome(outcome);
    return Qnil;
}

/* Releases the parameters now, not at the next garbage collection. */
static VALUE ddp_release(VALUE self)
{
    core *mine = core_of(self);
    mine->released = true;
    free_if_unused(mine);
    return Qnil;
}

/* The arguments of tddp_ddp_create(), in memory that the garbage collector may free. */
typedef struct create_call {
    tddp_group *group;
    tddp_ddp_param *params;
    size_t param_count;
    tddp_tensor **buffers;
    size_t buffer_count;
    tddp_ddp_opts opts;
    tddp_ddp *ddp;
} create_call;

static tddp_status body_create(void *data, const tddp_wait *wait)
{
    create_call *call = data;
    return tddp_ddp_create(call->group, call->params, call->param_count, call->buffers,
                           call->buffer_count, &call->opts, wait, &call->ddp);
}

/* The String that is returned owns the names. */
static VALUE read_names(VALUE names, tddp_ddp_param *params)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    tddp_slice *texts = tddp_rb_scratch_for(names, sizeof(*texts), &memory, &count);
    VALUE all = tddp_rb_concatenate(names, "names", texts);
    for (size_t i = 0; i < count; i++) {
        if (strlen(texts[i].data) != texts[i].size)
            rb_raise(rb_eArgError, "names[%zu]: expected a String without NUL", i);
        params[i].name = texts[i].data;
    }
    return all;
}

static VALUE read_params(create_call *call, VALUE params, VALUE names, VALUE flags,
                         volatile VALUE *holder)
{
    call->params = tddp_rb_scratch_for(params, sizeof(*call->params), holder, &call->param_count);
    const long count = (long)call->param_count;
    Check_Type(names, T_ARRAY);
    Check_Type(flags, T_ARRAY);
    if (RARRAY_LEN(names) != count || RARRAY_LEN(flags) != count)
        rb_raise(rb_eArgError, "%ld parameters, but %ld names and %ld flags", count,
                 RARRAY_LEN(names), RARRAY_LEN(flags));
    for (long i = 0; i < count; i++) {
        call->params[i].tensor = tddp_rb_tensor(rb_ary_entry(params, i));
        call->params[i].flags = NUM2UINT(rb_ary_entry(flags, i));
    }
    return read_names(names, call->params);
}

static VALUE option(VALUE options, const char *name)
{
    return rb_hash_aref(options, ID2SYM(rb_intern(name)));
}

static void read_options(create_call *call, VALUE options, volatile VALUE *holder)
{
    Check_Type(options, T_HASH);
    tddp_reducer_opts *reducer = &call->opts.reducer;
    VALUE limits = option(options, "limits");
    if (!NIL_P(limits)) {
        size_t *bytes = tddp_rb_scratch_for(limits, sizeof(*bytes), holder, &reducer->limit_count);
        for (size_t i = 0; i < reducer->limit_count; i++)
            bytes[i] = NUM2SIZET(rb_ary_entry(limits, (long)i));
        reducer->limits = bytes;
    }
    VALUE delayed_by = option(options, "delayed_by");
    reducer->find_unused = RTEST(option(options, "find_unused"));
    reducer->static_graph = RTEST(option(options, "static_graph"));
    reducer->skip_unused = RTEST(option(options, "skip_unused"));
    reducer->describe = tddp_rb_detail();
    call->opts.init_sync = RTEST(option(options, "init_sync"));
    call->opts.gradients_apart = RTEST(option(options, "gradients_apart"));
    call->opts.delayed_by = NIL_P(delayed_by) ? -1 : NUM2SSIZET(delayed_by);
    call->opts.blocking_region = tddp_rb_blocking_in_backward;
    call->opts.host_here = tddp_rb_may_run;
}

/*
 * _create(group, parameters, names, flags, watched, buffers, options): flags are 1 for a sparse
 * gradient, 2 for one that is delayed until that of parameter options[:delayed_by]; further options
 * are limits (bytes of the buckets), find_unused, static_graph, skip_unused, init_sync and
 * gradients_apart. The defaults are nil or false.
 */
static VALUE ddp_create(VALUE class, VALUE group, VALUE params, VALUE names, VALUE flags,
                        VALUE watched, VALUE buffers, VALUE options)
{
    TDDP_RB_SCRATCH param_memory = 0, watched_memory = 0, buffer_memory = 0, limit_memory = 0;
    create_call call = {.group = tddp_rb_group(group), .opts = TDDP_DDP_OPTS_INIT};
    VALUE texts = read_params(&call, params, names, flags, &param_memory);
    call.opts.watched = (const tddp_tensor *const *)tddp_rb_tensors(watched, &watched_memory,
                                                                    &call.opts.watched_count);
    call.buffers = tddp_rb_tensors(buffers, &buffer_memory, &call.buffer_count);
    read_options(&call, options, &limit_memory);
    core *mine = NULL;
    VALUE self = TypedData_Make_Struct(class, core, &ddp_type, mine);
    tddp_rb_outcome outcome = tddp_rb_blocking_with(call.group, body_create, &call, -1, true);
    mine->ddp = call.ddp;
    RB_GC_GUARD(texts);
    tddp_rb_raise_outcome(outcome);
    return self;
}

typedef struct sync_call {
    tddp_ddp *ddp;
    int argument;
} sync_call;

static tddp_status body_prepare(void *data, const tddp_wait *wait)
{
    const sync_call *call = data;
    return tddp_ddp_prepare(call->ddp, call->argument, wait);
}

static tddp_status body_sync_buffers(void *data, const tddp_wait *wait)
{
    const sync_call *call = data;
    return tddp_ddp_sync_buffers(call->ddp, call->argument, wait);
}

static tddp_status body_shadow(void *data, const tddp_wait *wait)
{
    const sync_call *call = data;
    return tddp_ddp_shadow(call->ddp, wait);
}

/* A hook in Ruby runs on this thread, which releases the GVL while it waits for other ranks. */
static tddp_rb_outcome prepare(tddp_ddp *ddp, int sync)
{
    sync_call call = {ddp, sync};
    if (!tddp_ddp_prepare_waits(ddp))
        return tddp_rb_outcome_of(tddp_ddp_prepare(ddp, sync, NULL));
    tddp_status status = tddp_ddp_hook_here(ddp) ? tddp_ddp_finish_due(ddp, sync, NULL) : TDDP_OK;
    return status == TDDP_OK ? tddp_rb_blocking(body_prepare, &call, -1, true)
                             : tddp_rb_outcome_of(status);
}

static VALUE ddp_prepare(VALUE self, VALUE sync)
{
    core *mine = core_acquire(self);
    return core_release(mine, prepare(mine->ddp, RTEST(sync)));
}

/* It can be restarted after an interrupt, so it runs on this thread. */
static VALUE ddp_sync_buffers(VALUE self, VALUE root)
{
    int from = NUM2INT(root);
    core *mine = core_acquire(self);
    sync_call call = {mine->ddp, from};
    return core_release(mine, tddp_rb_blocking(body_sync_buffers, &call, -1, false));
}

/* On this thread with a hook in Ruby, as prepare(). */
static VALUE ddp_shadow(VALUE self)
{
    core *mine = core_acquire(self);
    sync_call call = {mine->ddp, 0};
    return core_release(mine, tddp_ddp_hook_here(call.ddp)
                                  ? tddp_rb_outcome_of(tddp_ddp_shadow(call.ddp, NULL))
                                  : tddp_rb_blocking(body_shadow, &call, -1, true));
}

static VALUE ddp_suspend(VALUE self)
{
    tddp_ddp_suspend(ddp_of(self));
    return Qnil;
}

/* arm(completed): `completed` is false after a forward that raised. */
static VALUE ddp_arm(VALUE self, VALUE completed)
{
    tddp_ddp_arm(ddp_of(self), RTEST(completed));
    return Qnil;
}

static VALUE ddp_round_open(VALUE self)
{
    return tddp_ddp_round_open(ddp_of(self)) ? Qtrue : Qfalse;
}

/* --- outputs, hooks, uneven inputs ------------------------------------------------------------ */

static VALUE ddp_stale(VALUE self)
{
    return tddp_ddp_stale(ddp_of(self)) ? Qtrue : Qfalse;
}

static VALUE ddp_wants_outputs(VALUE self)
{
    return tddp_ddp_wants_outputs(ddp_of(self)) ? Qtrue : Qfalse;
}

/* The same tensors; those that require a gradient are replaced by new ones whose backward runs
 * first. */
static VALUE ddp_outputs(VALUE self, VALUE outputs)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    VALUE fresh = tddp_rb_fresh_tensors(outputs);
    tddp_tensor **tensors = tddp_rb_tensors(fresh, &memory, &count);
    tddp_rb_check(tddp_ddp_outputs(ddp_of(self), tensors, count));
    for (size_t i = 0; i < count; i++) {
        VALUE before = rb_ary_entry(outputs, (long)i);
        if (tddp_rb_same_tensor(tensors[i], tddp_rb_tensor(before)))
            rb_ary_store(fresh, (long)i, before);
    }
    return fresh;
}

static VALUE ddp_set_comm_hook(VALUE self, VALUE hook)
{
    tddp_rb_check(tddp_ddp_set_hook(ddp_of(self), tddp_rb_comm_hook(hook)));
    rb_ivar_set(self, rb_intern("@comm_hook"), hook); /* keeps the hook's callable alive */
    return hook;
}

static VALUE ddp_on_devices(VALUE self)
{
    return tddp_ddp_on_devices(ddp_of(self)) ? Qtrue : Qfalse;
}

static VALUE ddp_hook_after_backward(VALUE self)
{
    const tddp_ddp *ddp = ddp_of(self);
    return tddp_ddp_hook_here(ddp) && tddp_ddp_on_devices(ddp) ? Qtrue : Qfalse;
}

/* After backward, on its thread: runs a hook in Ruby for gradients on devices. */
static VALUE ddp_finish_backward(VALUE self)
{
    core *mine = core_acquire(self);
    return core_release(mine, tddp_rb_outcome_of(tddp_ddp_finish_backward(mine->ddp)));
}

static VALUE ddp_set_divisor(VALUE self, VALUE ranks)
{
    tddp_rb_check(tddp_ddp_set_divisor(ddp_of(self), NUM2INT(ranks)));
    return ranks;
}

const tddp_reducer *tddp_rb_reducer(VALUE self)
{
    return tddp_ddp_reducer(ddp_of(self));
}

void tddp_rb_init_ddp(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "GradientSync", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "_create", ddp_create, 7);
    rb_define_method(class, "release", ddp_release, 0);
    rb_define_method(class, "stale?", ddp_stale, 0);
    rb_define_method(class, "prepare", ddp_prepare, 1);
    rb_define_method(class, "sync_buffers", ddp_sync_buffers, 1);
    rb_define_method(class, "suspend", ddp_suspend, 0);
    rb_define_method(class, "arm", ddp_arm, 1);
    rb_define_method(class, "round_open?", ddp_round_open, 0);
    rb_define_method(class, "wants_outputs?", ddp_wants_outputs, 0);
    rb_define_method(class, "outputs", ddp_outputs, 1);
    rb_define_method(class, "comm_hook=", ddp_set_comm_hook, 1);
    rb_define_method(class, "on_devices?", ddp_on_devices, 0);
    rb_define_method(class, "hook_after_backward?", ddp_hook_after_backward, 0);
    rb_define_method(class, "finish_backward", ddp_finish_backward, 0);
    rb_define_method(class, "divisor=", ddp_set_divisor, 1);
    rb_define_method(class, "shadow", ddp_shadow, 0);
}
