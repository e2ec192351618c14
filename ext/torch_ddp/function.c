/*
 * Torch::Distributed::Function over <tddp/torch_function.h>: functions whose backward is Ruby code.
 * Called by Ruby threads that hold the GVL; for backward by libtorch on such a thread. The graph
 * keeps the function's context until it is freed. lib/torch has the classes.
 */
#include "torch_ddp.h"

#include <tddp/torch_function.h>

/* --- backward -------------------------------------------------------------------------------- */

typedef struct backward_call {
    VALUE context;
    const tddp_function_backward *call;
} backward_call;

static VALUE run_backward(VALUE data)
{
    const backward_call *run = (const backward_call *)data;
    const tddp_function_backward *call = run->call;
    VALUE saved = tddp_rb_tensor_objects(call->saved, call->saved_count);
    VALUE grads = tddp_rb_tensor_objects(call->grads, call->grad_count);
    VALUE results = rb_funcall(run->context, rb_intern("_backward"), 2, saved, grads);
    Check_Type(results, T_ARRAY);
    for (size_t i = 0; i < call->result_count; i++) {
        VALUE result = rb_ary_entry(results, (long)i);
        if (!NIL_P(result))
            tddp_rb_check(tddp_tensor_assign(call->result[i], tddp_rb_tensor(result)));
    }
    RB_GC_GUARD(results);
    return Qnil;
}

static VALUE backward_name(VALUE context)
{
    return rb_sprintf("%" PRIsVALUE ".backward", rb_funcall(context, rb_intern("function"), 0));
}

static tddp_status backward(void *state, const tddp_function_backward *call)
{
    if (!tddp_rb_may_run()) /* before an object is touched */
        return tddp_fail(TDDP_UNSUPPORTED,
                         "the backward of a Function is Ruby code, but libtorch called it on a "
                         "thread of its own, as for tensors on a GPU and within checkpointed "
                         "segments nested more than 60 deep: compose it of tensor operations, "
                         "which have a gradient, instead");
    volatile VALUE context = ((const tddp_rb_root *)state)->object;
    backward_call run = {context, call};
    int failed = 0;
    volatile VALUE name = rb_protect(backward_name, context, &failed);
    if (failed != 0)
        rb_set_errinfo(Qnil);
    tddp_status status = tddp_rb_call_in_backward(
        run_backward, &run, failed == 0 ? RSTRING_PTR(name) : "the backward of a Function");
    RB_GC_GUARD(name);
    RB_GC_GUARD(context);
    return status;
}

/* --- after forward --------------------------------------------------------------------------- */

/* true and false as bytes. */
static unsigned char *flags_of(VALUE list, volatile VALUE *holder)
{
    size_t count;
    unsigned char *flags = tddp_rb_scratch_for(list, sizeof(*flags), holder, &count);
    for (size_t i = 0; i < count; i++)
        flags[i] = RTEST(rb_ary_entry(list, (long)i));
    return flags;
}

/* _apply(name, inputs, outputs, non_differentiable, saved, materialize_grads) of a context, whose
 * _backward is called in backward → the outputs with a history. Arrays have nil for what is not a
 * tensor. */
static VALUE context_apply(VALUE self, VALUE name, VALUE inputs, VALUE outputs,
                           VALUE non_differentiable, VALUE saved, VALUE materialize_grads)
{
    static const tddp_function_ops ops = {sizeof(ops), backward, tddp_rb_unpin};
    TDDP_RB_SCRATCH input_memory = 0, output_memory = 0, flag_memory = 0, saved_memory = 0;
    tddp_function_forward forward = {.size = sizeof(forward)};
    VALUE fresh = tddp_rb_fresh_tensors(outputs);
    forward.name = StringValueCStr(name);
    forward.inputs = tddp_rb_tensors_or_null(inputs, &input_memory, &forward.input_count);
    forward.outputs = tddp_rb_tensors_or_null(fresh, &output_memory, &forward.output_count);
    forward.non_differentiable = flags_of(non_differentiable, &flag_memory);
    forward.saved = tddp_rb_tensors_or_null(saved, &saved_memory, &forward.saved_count);
    forward.materialize_grads = RTEST(materialize_grads);
    tddp_rb_root *root = tddp_rb_pin(self);
    tddp_status status = tddp_function_apply(&forward, &ops, root);
    if (status != TDDP_OK)
        tddp_rb_unpin(root);
    tddp_rb_check(status);
    return fresh;
}

void tddp_rb_init_function(void)
{
    VALUE function = rb_define_class_under(tddp_rb_distributed, "Function", rb_cObject);
    VALUE context = rb_define_class_under(function, "Context", rb_cObject);
    rb_define_private_method(context, "_apply", context_apply, 6);
}
