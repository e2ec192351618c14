/*
 * Norms and unscaling of gradients, over <tddp/torch_nn.h>. Called by Ruby threads that hold the
 * GVL; waits for other ranks release it.
 */
#include "torch_ddp.h"

#include <tddp/torch_nn.h>

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

/* Calls `body(call)`; with a group, which is assigned to the call's `member`, without the GVL. */
static tddp_rb_outcome run_over(VALUE group, tddp_rb_body body, void *call, tddp_group **member)
{
    if (NIL_P(group))
        return tddp_rb_outcome_of(body(call, NULL));
    *member = tddp_rb_group(group);
    tddp_group_retain(*member); /* another thread may destroy the group meanwhile */
    tddp_rb_outcome outcome = tddp_rb_blocking(body, call, -1, true);
    tddp_group_release(*member);
    return outcome;
}

/* The list is unshared, so other threads can't change it. */
static VALUE norm_of(norm_call call, VALUE list, VALUE group)
{
    VALUE memory;
    call.tensors = tensors_of(list, &memory, &call.count);
    tddp_rb_outcome outcome = run_over(group, body_norm, &call, &call.group);
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

/* --- the scale of a loss --------------------------------------------------------------------- */

typedef struct unscale_call {
    const tddp_tensor *const *params;
    size_t count;
    double factor;
    tddp_group *group;
    tddp_gradients found;
} unscale_call;

static tddp_status body_unscale(void *data, const tddp_wait *wait)
{
    unscale_call *call = data;
    return tddp_unscale_gradients(call->params, call->count, call->factor, call->group, wait,
                                  &call->found);
}

/* _unscale_gradients(parameters, factor, group or nil) → whether all gradients were finite; nil:
 * there are none. The list is unshared. */
static VALUE unscale_gradients(VALUE self, VALUE params, VALUE factor, VALUE group)
{
    VALUE memory;
    unscale_call call = {.factor = NUM2DBL(factor)};
    call.params = tensors_of(params, &memory, &call.count);
    tddp_rb_outcome outcome = run_over(group, body_unscale, &call, &call.group);
    ALLOCV_END(memory);
    RB_GC_GUARD(params);
    tddp_rb_raise_outcome(outcome);
    (void)self;
    if (call.found == TDDP_GRADIENTS_NONE)
        return Qnil;
    return call.found == TDDP_GRADIENTS_FINITE ? Qtrue : Qfalse;
}

void tddp_rb_init_norm(void)
{
    VALUE private_methods = rb_singleton_class(tddp_rb_distributed);
    rb_define_private_method(private_methods, "_total_norm", total_norm, 3);
    rb_define_private_method(private_methods, "_clip_grad_norm", clip_grad_norm, 5);
    rb_define_private_method(private_methods, "_scale_gradients", scale_gradients, 3);
    rb_define_private_method(private_methods, "_clip_grad_value", clip_grad_value, 2);
    rb_define_private_method(private_methods, "_unscale_gradients", unscale_gradients, 3);
}
