/*
 * Fully sharded models, over <tddp/torch_fsdp.h>. Called by Ruby threads that hold the GVL, one at
 * a time for a model; libtorch's backward calls tddp_rb_blocking_in_backward(). The parameters'
 * Ruby objects are kept, since the model changes the tensors that they hold.
 */
#include <tddp/torch_fsdp.h>

#include "torch_ddp.h"

typedef struct model {
    tddp_rb_root root; /* first: a graph that may come to a model in backward keeps it and its
                          parameters' objects, which Ruby does not see */
    tddp_fsdp *fsdp;
    VALUE params; /* an Array */
} model;

static tddp_rb_need model_need(const tddp_rb_root *root)
{
    return tddp_fsdp_in_graph(((const model *)root)->fsdp) ? TDDP_RB_NEEDED : TDDP_RB_NOT_NEEDED;
}

static void model_mark(void *data)
{
    rb_gc_mark(((model *)data)->params);
}

static void model_free(void *data)
{
    model *mine = data;
    tddp_rb_root_remove(&mine->root);
    tddp_fsdp_free(mine->fsdp);
    xfree(mine);
}

static const rb_data_type_t model_type = {
    .wrap_struct_name = "Torch::Distributed::ShardedModel",
    .function = {.dmark = model_mark, .dfree = model_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY,
};

static model *model_of(VALUE self)
{
    return rb_check_typeddata(self, &model_type);
}

static tddp_fsdp *fsdp_of(VALUE self)
{
    return model_of(self)->fsdp;
}

static VALUE model_allocate(VALUE class)
{
    model *mine = NULL;
    VALUE self = TypedData_Make_Struct(class, model, &model_type, mine);
    mine->params = rb_ary_new();
    tddp_rb_check(tddp_fsdp_create(tddp_rb_blocking_in_backward, &mine->fsdp));
    mine->root = (tddp_rb_root){.object = self, .need = model_need};
    tddp_rb_root_add(&mine->root);
    return self;
}

/* --- calls that wait ------------------------------------------------------------------------- */

typedef struct unit_call {
    tddp_fsdp *fsdp;
    size_t unit;
    const tddp_fsdp_unit_opts *opts;
} unit_call;

static tddp_status body_add(void *data, const tddp_wait *wait)
{
    const unit_call *call = data;
    return tddp_fsdp_add(call->fsdp, call->opts, wait);
}

static tddp_status body_before_forward(void *data, const tddp_wait *wait)
{
    const unit_call *call = data;
    return tddp_fsdp_before_forward(call->fsdp, call->unit, wait);
}

static tddp_status body_unshard(void *data, const tddp_wait *wait)
{
    const unit_call *call = data;
    return tddp_fsdp_unshard(call->fsdp, call->unit, wait);
}

/* Without leaving the GVL if nothing is left to wait for. An interrupted call continues. */
static void run(VALUE self, tddp_rb_body body, VALUE unit)
{
    static const tddp_wait at_once = {0, NULL};
    unit_call call = {.fsdp = fsdp_of(self), .unit = NUM2SIZET(unit)};
    tddp_status status = body(&call, &at_once);
    if (status == TDDP_TIMEOUT)
        tddp_rb_raise_outcome(tddp_rb_blocking(body, &call, -1, false));
    else
        tddp_rb_check(status);
}

static int dtype_or_none(VALUE symbol)
{
    return NIL_P(symbol) ? -1 : (int)tddp_rb_dtype(symbol);
}

/*
 * _add(name, shard_group, replica_group, params, names, gather_dtype, reduce_dtype, reshard,
 * offload): dtypes are numbers of tddp_dtype, or nil; offload is whether memory is pinned, or nil.
 */
static VALUE model_add(VALUE self, VALUE name, VALUE shard_group, VALUE replica_group, VALUE params,
                       VALUE names, VALUE gather_dtype, VALUE reduce_dtype, VALUE reshard,
                       VALUE offload)
{
    TDDP_RB_SCRATCH memory = 0;
    model *mine = model_of(self);
    tddp_fsdp_unit_opts opts = TDDP_FSDP_UNIT_OPTS_INIT;
    opts.name = StringValueCStr(name);
    opts.shard_group = tddp_rb_group_or_null(shard_group);
    opts.replica_group = tddp_rb_group_or_null(replica_group);
    opts.gather_dtype = dtype_or_none(gather_dtype);
    opts.reduce_dtype = dtype_or_none(reduce_dtype);
    opts.reshard_after_forward = RTEST(reshard);
    opts.offload = !NIL_P(offload);
    opts.pin_memory = RTEST(offload);
    Check_Type(names, T_ARRAY);
    tddp_fsdp_param *list = tddp_rb_scratch_for(params, sizeof(*list), &memory, &opts.param_count);
    for (long i = 0; i < RARRAY_LEN(params); i++) {
        VALUE text = rb_ary_entry(names, i);
        list[i].handle = tddp_rb_tensor(rb_ary_entry(params, i));
        list[i].name = StringValueCStr(text);
    }
    opts.params = list;
    rb_ary_concat(mine->params, params);
    unit_call call = {.fsdp = mine->fsdp, .opts = &opts};
    tddp_rb_raise_outcome(tddp_rb_blocking(body_add, &call, -1, true));
    return Qnil;
}

static VALUE model_before_forward(VALUE self, VALUE unit)
{
    run(self, body_before_forward, unit);
    return Qnil;
}

static VALUE model_unshard(VALUE self, VALUE unit)
{
    run(self, body_unshard, unit);
    tddp_fsdp_expose(fsdp_of(self), NUM2SIZET(unit));
    return Qnil;
}

/* --- calls that don't ------------------------------------------------------------------------ */

static VALUE model_begin_forward(VALUE self)
{
    tddp_rb_check(tddp_fsdp_begin_forward(fsdp_of(self)));
    return Qnil;
}

static VALUE model_end_forward(VALUE self)
{
    tddp_rb_check(tddp_fsdp_end_forward(fsdp_of(self)));
    return Qnil;
}

static VALUE model_enter(VALUE self, VALUE unit)
{
    tddp_rb_check(tddp_fsdp_enter(fsdp_of(self), NUM2SIZET(unit)));
    return Qnil;
}

static VALUE model_leave(VALUE self, VALUE unit, VALUE outputs)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    tddp_tensor **list = tddp_rb_tensors(outputs, &memory, &count);
    tddp_rb_check(tddp_fsdp_leave(fsdp_of(self), NUM2SIZET(unit), list, count));
    return Qnil;
}

static VALUE model_merge(VALUE self, VALUE other)
{
    tddp_rb_check(tddp_fsdp_merge(fsdp_of(self), fsdp_of(other)));
    rb_ary_concat(model_of(self)->params, model_of(other)->params);
    return self;
}

static VALUE model_recompute(VALUE self, VALUE unit)
{
    tddp_rb_check(tddp_fsdp_recompute(fsdp_of(self), NUM2SIZET(unit)));
    return Qnil;
}

static VALUE model_set_reshard(VALUE self, VALUE unit, VALUE after_forward)
{
    tddp_fsdp_set_reshard(fsdp_of(self), NUM2SIZET(unit), RTEST(after_forward));
    return Qnil;
}

static VALUE model_set_sync(VALUE self, VALUE unit, VALUE sync)
{
    tddp_fsdp_set_sync(fsdp_of(self), NUM2SIZET(unit), RTEST(sync));
    return Qnil;
}

static VALUE model_abandon(VALUE self)
{
    tddp_fsdp_abandon(fsdp_of(self));
    return Qnil;
}

static VALUE model_unfinished(VALUE self)
{
    return tddp_fsdp_unfinished(fsdp_of(self)) ? Qtrue : Qfalse;
}

static VALUE model_hidden(VALUE self, VALUE unit)
{
    return tddp_fsdp_hidden(fsdp_of(self), NUM2SIZET(unit)) ? Qtrue : Qfalse;
}

static VALUE model_reshard(VALUE self, VALUE unit)
{
    tddp_fsdp_reshard(fsdp_of(self), NUM2SIZET(unit));
    return Qnil;
}

static VALUE model_shard(VALUE self, VALUE unit)
{
    VALUE tensor = tddp_rb_fresh_tensor();
    tddp_rb_check(tddp_fsdp_shard(fsdp_of(self), NUM2SIZET(unit), tddp_rb_tensor(tensor)));
    return tensor;
}

static VALUE model_show(VALUE self, VALUE unit, VALUE flat)
{
    tddp_rb_check(tddp_fsdp_show(fsdp_of(self), NUM2SIZET(unit), tddp_rb_tensor(flat)));
    return Qnil;
}

static VALUE model_hide(VALUE self, VALUE unit, VALUE write)
{
    tddp_rb_check(tddp_fsdp_hide(fsdp_of(self), NUM2SIZET(unit), RTEST(write)));
    return Qnil;
}

/* piece(unit, param): [offset in the flat buffer, first element, number of elements, shape] */
static VALUE model_piece(VALUE self, VALUE unit, VALUE param)
{
    const tddp_fsdp_piece piece =
        tddp_fsdp_piece_of(fsdp_of(self), NUM2SIZET(unit), NUM2SIZET(param));
    VALUE shape = rb_ary_new_capa((long)piece.ndim);
    for (size_t i = 0; i < piece.ndim; i++)
        rb_ary_push(shape, LL2NUM(piece.dims[i]));
    return rb_ary_new_from_args(4, LL2NUM(piece.offset), LL2NUM(piece.start), LL2NUM(piece.count),
                                shape);
}

/* memory: bytes of [shards, what is unsharded, the most that ever was unsharded] */
static VALUE model_memory(VALUE self)
{
    const tddp_sharder_bytes bytes = tddp_sharder_memory(tddp_fsdp_sharder(fsdp_of(self)));
    return rb_ary_new_from_args(3, SIZET2NUM(bytes.shards), SIZET2NUM(bytes.unsharded),
                                SIZET2NUM(bytes.peak_unsharded));
}

/* copied: bytes that units which are offloaded have copied, [to the device, to the CPU] */
static VALUE model_copied(VALUE self)
{
    const tddp_fsdp_copied copied = tddp_fsdp_copied_bytes(fsdp_of(self));
    return rb_ary_new_from_args(2, SIZET2NUM(copied.to_device), SIZET2NUM(copied.to_cpu));
}

void tddp_rb_init_fsdp(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "ShardedModel", rb_cObject);
    rb_define_alloc_func(class, model_allocate);
    rb_define_private_method(class, "_add", model_add, 9);
    rb_define_method(class, "before_forward", model_before_forward, 1);
    rb_define_method(class, "begin_forward", model_begin_forward, 0);
    rb_define_method(class, "end_forward", model_end_forward, 0);
    rb_define_method(class, "enter", model_enter, 1);
    rb_define_method(class, "leave", model_leave, 2);
    rb_define_method(class, "recompute", model_recompute, 1);
    rb_define_method(class, "merge", model_merge, 1);
    rb_define_method(class, "set_reshard", model_set_reshard, 2);
    rb_define_method(class, "set_sync", model_set_sync, 2);
    rb_define_method(class, "abandon", model_abandon, 0);
    rb_define_method(class, "unfinished?", model_unfinished, 0);
    rb_define_method(class, "hidden?", model_hidden, 1);
    rb_define_method(class, "unshard", model_unshard, 1);
    rb_define_method(class, "reshard", model_reshard, 1);
    rb_define_method(class, "shard", model_shard, 1);
    rb_define_method(class, "show", model_show, 2);
    rb_define_method(class, "hide", model_hide, 2);
    rb_define_method(class, "piece", model_piece, 2);
    rb_define_method(class, "memory", model_memory, 0);
    rb_define_method(class, "copied", model_copied, 0);
}
