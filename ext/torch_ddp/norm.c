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

/* Without the GVL if other ranks take part. */
static tddp_rb_outcome run_over(tddp_group *group, tddp_rb_body body, void *call)
{
    return group ? tddp_rb_blocking_with(group, body, call, -1, true)
                 : tddp_rb_outcome_of(body(call, NULL));
}

/* The list is unshared, so other threads can't change it. */
static VALUE norm_of(norm_call call, VALUE list, VALUE group)
{
    TDDP_RB_SCRATCH memory = 0;
    call.tensors = tensors_of(list, &memory, &call.count);
    call.group = tddp_rb_group_or_null(group);
    tddp_rb_raise_outcome(run_over(call.group, body_norm, &call));
    return DBL2NUM(call.norm);
}

/* _total_norm(tensors, norm_type, group or nil) → Float */
static VALUE total_norm(VALUE self, VALUE tensors, VALUE order, VALUE group)
{
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
    return norm_of(call, params, group);
}

/* _scale_gradients(parameters, max_norm, norm) */
static VALUE scale_gradients(VALUE self, VALUE params, VALUE max_norm, VALUE norm)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    const tddp_tensor *const *tensors = tensors_of(params, &memory, &count);
    tddp_rb_check(tddp_scale_gradients(tensors, count, NUM2DBL(max_norm), NUM2DBL(norm)));
    return self;
}

/* _clip_grad_value(parameters, clip_value) */
static VALUE clip_grad_value(VALUE self, VALUE params, VALUE clip_value)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    const tddp_tensor *const *tensors = tensors_of(params, &memory, &count);
    tddp_rb_check(tddp_clip_grad_value(tensors, count, NUM2DBL(clip_value)));
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
    TDDP_RB_SCRATCH memory = 0;
    unscale_call call = {.factor = NUM2DBL(factor), .group = tddp_rb_group_or_null(group)};
    call.params = tensors_of(params, &memory, &call.count);
    tddp_rb_raise_outcome(run_over(call.group, body_unscale, &call));
    if (call.found == TDDP_GRADIENTS_NONE)
        return Qnil;
    return call.found == TDDP_GRADIENTS_FINITE ? Qtrue : Qfalse;
}

void tddp_rb_init_norm(void)
{
    TDDP_RB_PRIVATE("_total_norm", total_norm, 3);
    TDDP_RB_PRIVATE("_clip_grad_norm", clip_grad_norm, 5);
    TDDP_RB_PRIVATE("_scale_gradients", scale_gradients, 3);
    TDDP_RB_PRIVATE("_clip_grad_value", clip_grad_value, 2);
    TDDP_RB_PRIVATE("_unscale_gradients", unscale_gradients, 3);
}
