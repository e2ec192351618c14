/*
 * The core of DistributedDataParallel over tddp_ddp of <tddp/torch.h>. Entered by Ruby threads that
 * hold the GVL; libtorch's backward enters nogvl.c's tddp_rb_through() from it. No object of Ruby's
 * is kept in C and the hooks know nothing of Ruby. Leaves it to lib/torch to collect the
 * parameters, to decide when to synchronize, and to keep the module.
 */
#include "torch_ddp.h"

static void ddp_free(void *ddp)
{
    tddp_ddp_free(ddp);
}

static const rb_data_type_t ddp_type = {
    .wrap_struct_name = "Torch::Distributed::GradientSync",
    .function = {.dfree = ddp_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static tddp_ddp *ddp_of(VALUE self)
{
    return rb_check_typeddata(self, &ddp_type);
}

typedef struct create_call {
    tddp_group *group;
    tddp_tensor **params;
    const char **names;
    size_t param_count;
    tddp_tensor **buffers;
    size_t buffer_count;
    tddp_ddp_opts opts;
    tddp_ddp *ddp;
} create_call;

static tddp_status body_create(void *data, const tddp_wait *wait)
{
    create_call *call = data;
    return tddp_ddp_create(call->group, call->params, call->names, call->param_count, call->buffers,
                           call->buffer_count, &call->opts, wait, &call->ddp);
}

static void tensors_of(VALUE array, tddp_tensor **tensors)
{
    for (long i = 0; i < RARRAY_LEN(array); i++)
        tensors[i] = tddp_rb_tensor(rb_ary_entry(array, i));
}

/* Copies of the names, end to end in one string that is returned. */
static VALUE names_of(VALUE array, const char **names)
{
    VALUE all = rb_str_new(NULL, 0);
    for (long i = 0; i < RARRAY_LEN(array); i++) {
        VALUE name = rb_ary_entry(array, i);
        const char *text = StringValueCStr(name);
        rb_str_cat(all, text, RSTRING_LEN(name) + 1);
    }
    const char *at = RSTRING_PTR(all);
    for (long i = 0; i < RARRAY_LEN(array); i++) {
        names[i] = at;
        at += RSTRING_LEN(rb_ary_entry(array, i)) + 1;
    }
    return all;
}

/* _create(group, parameters, names, buffers, first_bucket_bytes, bucket_cap_bytes, init_sync) */
static VALUE ddp_create(VALUE class, VALUE group, VALUE params, VALUE names, VALUE buffers,
                        VALUE first_bytes, VALUE cap_bytes, VALUE init_sync)
{
    VALUE params_memory, names_memory, buffers_memory;
    Check_Type(params, T_ARRAY);
    Check_Type(names, T_ARRAY);
    Check_Type(buffers, T_ARRAY);
    create_call call = {.group = tddp_rb_group(group), .opts = TDDP_DDP_OPTS_INIT};
    call.param_count = (size_t)RARRAY_LEN(params);
    call.buffer_count = (size_t)RARRAY_LEN(buffers);
    if (RARRAY_LEN(names) != RARRAY_LEN(params))
        rb_raise(rb_eArgError, "%ld parameters, but %ld names", RARRAY_LEN(params),
                 RARRAY_LEN(names));
    call.params = tddp_rb_scratch(&params_memory, RARRAY_LEN(params), sizeof(tddp_tensor *));
    call.names = tddp_rb_scratch(&names_memory, RARRAY_LEN(names), sizeof(const char *));
    call.buffers = tddp_rb_scratch(&buffers_memory, RARRAY_LEN(buffers), sizeof(tddp_tensor *));
    tensors_of(params, call.params);
    tensors_of(buffers, call.buffers);
    VALUE texts = names_of(names, call.names);
    const size_t limits[] = {NUM2SIZET(first_bytes), NUM2SIZET(cap_bytes)};
    call.opts.reducer.limits = limits;
    call.opts.reducer.limit_count = 2;
    call.opts.reducer.describe = tddp_rb_detail();
    call.opts.init_sync = RTEST(init_sync);
    call.opts.through = tddp_rb_through;
    VALUE self = TypedData_Wrap_Struct(class, &ddp_type, NULL);
    tddp_group_retain(call.group); /* Another thread may destroy it meanwhile. */
    tddp_rb_outcome outcome = tddp_rb_blocking(body_create, &call, -1, true);
    tddp_group_release(call.group);
    RTYPEDDATA_DATA(self) = call.ddp;
    RB_GC_GUARD(texts);
    RB_GC_GUARD(group);
    RB_GC_GUARD(params);
    RB_GC_GUARD(buffers);
    ALLOCV_END(params_memory);
    ALLOCV_END(names_memory);
    ALLOCV_END(buffers_memory);
    tddp_rb_settle(outcome);
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

static VALUE ddp_prepare(VALUE self, VALUE sync)
{
    sync_call call = {ddp_of(self), RTEST(sync)};
    if (tddp_ddp_prepare_waits(call.ddp))
        tddp_rb_settle(tddp_rb_blocking(body_prepare, &call, -1, true));
    else
        tddp_rb_check(tddp_ddp_prepare(call.ddp, call.argument, NULL));
    RB_GC_GUARD(self);
    return Qnil;
}

static VALUE ddp_sync_buffers(VALUE self, VALUE root)
{
    sync_call call = {ddp_of(self), NUM2INT(root)};
    tddp_rb_settle(tddp_rb_blocking(body_sync_buffers, &call, -1, true));
    RB_GC_GUARD(self);
    return Qnil;
}

/* Bytes of each bucket as it is now. */
static VALUE ddp_bucket_sizes(VALUE self)
{
    const tddp_reducer *reducer = tddp_ddp_reducer(ddp_of(self));
    size_t count = tddp_reducer_bucket_count(reducer);
    VALUE sizes = rb_ary_new_capa((long)count);
    for (size_t i = 0; i < count; i++)
        rb_ary_push(sizes, SIZET2NUM(tddp_reducer_bucket_bytes(reducer, i)));
    return sizes;
}

static VALUE ddp_bucket_of(VALUE self, VALUE index)
{
    size_t bucket = tddp_reducer_bucket_of(tddp_ddp_reducer(ddp_of(self)), NUM2SIZET(index));
    return bucket == (size_t)-1 ? Qnil : SIZET2NUM(bucket);
}

void tddp_rb_init_ddp(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "GradientSync", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "_create", ddp_create, 7);
    rb_define_method(class, "prepare", ddp_prepare, 1);
    rb_define_method(class, "sync_buffers", ddp_sync_buffers, 1);
    rb_define_method(class, "bucket_sizes", ddp_bucket_sizes, 0);
    rb_define_method(class, "bucket_of", ddp_bucket_of, 1);
}
