/*
 * Torch::NN::SyncBatchNorm's operation, and norms of gradients, over <tddp/torch_nn.h>. Called by
 * Ruby threads that hold the GVL; waits for other ranks release it.
 */
#include "torch_ddp.h"

#include <tddp/torch_nn.h>

static const tddp_tensor *tensor_or_null(VALUE object)
{
    return NIL_P(object) ? NULL : tddp_rb_tensor(object);
}

typedef struct wait_call {
    tddp_rb_body body;
    void *data;
    tddp_status status;
} wait_call;

/* The tag of a longjmp to continue after libtddp has returned to this thread's forward, or 0. */
static _Thread_local int pending_tag;

static tddp_status body_wait(void *data, const tddp_wait *wait)
{
    wait_call *call = data;
    call->status = call->body(call->data, wait);
    return call->status;
}

/* A tddp_blocking_region for forward: unlike for backward's, this file raises the interrupt. */
static tddp_status wait_in_forward(tddp_rb_body body, void *data)
{
    wait_call call = {body, data, TDDP_CANCELED};
    tddp_rb_outcome outcome = tddp_rb_blocking_brief(body_wait, &call);
    pending_tag = outcome.state;
    if (pending_tag != 0)
        return tddp_fail(TDDP_CANCELED, "interrupted");
    return NIL_P(outcome.error) ? TDDP_OK : call.status;
}

/* _sync_batch_norm(output, input, group, [weight, bias, running_mean, running_var], momentum, eps);
 * the output is a new Torch::Tensor that is assigned the result. */
static VALUE sync_batch_norm(VALUE self, VALUE output, VALUE input, VALUE group, VALUE tensors,
                             VALUE momentum, VALUE eps)
{
    Check_Type(tensors, T_ARRAY);
    tddp_sync_batch_norm_opts opts = TDDP_SYNC_BATCH_NORM_OPTS_INIT;
    opts.weight = tensor_or_null(rb_ary_entry(tensors, 0));
    opts.bias = tensor_or_null(rb_ary_entry(tensors, 1));
    opts.running_mean = tensor_or_null(rb_ary_entry(tensors, 2));
    opts.running_var = tensor_or_null(rb_ary_entry(tensors, 3));
    opts.momentum = NUM2DBL(momentum);
    opts.eps = NUM2DBL(eps);
    opts.blocking_region = wait_in_forward;
    opts.backward_blocking_region = tddp_rb_blocking_in_backward;
    tddp_group *shared = tddp_rb_group(group);
    const tddp_tensor *batch = tddp_rb_tensor(input);
    tddp_tensor *result = tddp_rb_tensor(output);
    pending_tag = 0;
    tddp_group_retain(shared); /* another thread may destroy the group meanwhile */
    tddp_status status = tddp_sync_batch_norm(shared, batch, &opts, result);
    tddp_group_release(shared);
    if (pending_tag != 0)
        tddp_rb_raise_outcome((tddp_rb_outcome){Qnil, pending_tag});
    tddp_rb_check(status);
    RB_GC_GUARD(group);
    RB_GC_GUARD(tensors);
    RB_GC_GUARD(input);
    (void)self;
    return output;
}

/* --- the norm of gradients ------------------------------------------------------------------- */

typedef struct norm_call {
    const tddp_tensor *const *tensors;
    size_t count;
    tddp_group *group;
    double max_norm;
    double order;
    int error_if_nonfinite;
    int of_gradients;
    double norm;
} norm_call;

static tddp_status body_norm(void *data, const tddp_wait *wait)
{
    norm_call *call = data;
    if (!call->of_gradients)
        return tddp_total_norm(call->tensors, call->count, call->order, call->group, wait,
                               &call->norm);
    return tddp_clip_grad_norm(call->tensors, call->count, call->max_norm, call->order,
                               call->error_if_nonfinite, call->group, wait, &call->norm);
}

static const tddp_tensor *const *tensors_of(VALUE list, volatile VALUE *memory, size_t *count)
{
    return (const tddp_tensor *const *)tddp_rb_tensors(list, memory, count);
}

/* The list is unshared, so other threads can't change it. */
static VALUE norm_of(norm_call call, VALUE list, VALUE group)
{
    VALUE memory;
    call.tensors = tensors_of(list, &memory, &call.count);
    tddp_rb_outcome outcome;
    if (NIL_P(group)) {
        outcome = tddp_rb_outcome_of(body_norm(&call, NULL));
    } else {
        call.group = tddp_rb_group(group);
        tddp_group_retain(call.group); /* another thread may destroy the group meanwhile */
        outcome = tddp_rb_blocking(body_norm, &call, -1, true);
        tddp_group_release(call.group);
    }
    ALLOCV_END(memory);
    RB_GC_GUARD(list);
    tddp_rb_raise_outcome(outcome);
    return DBL2NUM(call.norm);
}

/* _total_norm(tensors, norm_type, group or nil) → Float */
static VALUE total_norm(VALUE self, VALUE tensors, VALUE order, VALUE group)
{
    (void)self;
    return norm_of((norm_call){.order = NUM2DBL(order)}, tensors, group);
}

/* _clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, group or nil) → Float */
static VALUE clip_grad_norm(VALUE self, VALUE params, VALUE max_norm, VALUE order, VALUE error,
                            VALUE group)
{
    norm_call call = {.max_norm = NUM2DBL(max_norm),
                      .order = NUM2DBL(order),
                      .error_if_nonfinite = RTEST(error),
                      .of_gradients = 1};
    (void)self;
    return norm_of(call, params, group);
}

/* _scale_gradients(parameters, max_norm, norm) */
static VALUE scale_gradients(VALUE self, VALUE params, VALUE max_norm, VALUE norm)
{
    VALUE memory;
    size_t count;
    double wanted = NUM2DBL(max_norm), known = NUM2DBL(norm);
    const tddp_tensor *const *tensors = tensors_of(params, &memory, &count);
    tddp_status status = tddp_scale_gradients(tensors, count, wanted, known);
    ALLOCV_END(memory);
    tddp_rb_check(status);
    return self;
}

/* _clip_grad_value(parameters, clip_value) */
static VALUE clip_grad_value(VALUE self, VALUE params, VALUE clip_value)
{
    VALUE memory;
    size_t count;
    double limit = NUM2DBL(clip_value);
    const tddp_tensor *const *tensors = tensors_of(params, &memory, &count);
    tddp_status status = tddp_clip_grad_value(tensors, count, limit);
    ALLOCV_END(memory);
    tddp_rb_check(status);
    return self;
}

void tddp_rb_init_norm(void)
{
    VALUE private_methods = rb_singleton_class(tddp_rb_distributed);
    rb_define_private_method(private_methods, "_sync_batch_norm", sync_batch_norm, 6);
    rb_define_private_method(private_methods, "_total_norm", total_norm, 3);
    rb_define_private_method(private_methods, "_clip_grad_norm", clip_grad_norm, 5);
    rb_define_private_method(private_methods, "_scale_gradients", scale_gradients, 3);
    rb_define_private_method(private_methods, "_clip_grad_value", clip_grad_value, 2);
}
