/*
 * Torch::Utils::Checkpoint over <tddp/torch_checkpoint.h>: segments of a model that Ruby runs again
 * in backward. Called by Ruby threads that hold the GVL; for the second run by libtorch's backward
 * on such a thread. The graph keeps the segment's proc until its backward has run. lib/torch
 * handles nested arguments and results.
 */
#include "torch_ddp.h"

#include <tddp/torch_checkpoint.h>

static void segment_free(void *checkpoint)
{
    tddp_checkpoint_free(checkpoint);
}

static const rb_data_type_t segment_type = {
    .wrap_struct_name = "Torch::Utils::Checkpoint::Segment",
    .function = {.dfree = segment_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

typedef struct again_call {
    VALUE function;
    tddp_tensor *const *inputs;
    size_t input_count;
    tddp_tensor *const *outputs;
    size_t output_count;
} again_call;

static VALUE run_again(VALUE data)
{
    const again_call *call = (const again_call *)data;
    VALUE inputs = tddp_rb_tensor_objects(call->inputs, call->input_count);
    VALUE outputs = rb_funcall(call->function, rb_intern("call"), 1, inputs);
    Check_Type(outputs, T_ARRAY);
    if (RARRAY_LEN(outputs) != (long)call->output_count)
        rb_raise(
            rb_eRuntimeError,
            "the segment returned %ld tensors in backward, but %zu in forward: it must compute "
            "the same each time",
            RARRAY_LEN(outputs), call->output_count);
    for (size_t i = 0; i < call->output_count; i++) {
        const tddp_tensor *output = tddp_rb_tensor(rb_ary_entry(outputs, (long)i));
        tddp_rb_check(tddp_tensor_assign(call->outputs[i], output));
    }
    RB_GC_GUARD(outputs);
    return Qnil;
}

static tddp_status again(void *state, tddp_tensor *const *inputs, size_t input_count,
                         tddp_tensor *const *outputs, size_t output_count)
{
    again_call call = {((const tddp_rb_root *)state)->object, inputs, input_count, outputs,
                       output_count};
    return tddp_rb_call_in_backward(run_again, &call, "a checkpointed segment");
}

/* _begin(inputs, preserve_rng, proc): the proc is called with other tensors in place of the inputs
 * and returns an Array of the outputs. */
static VALUE segment_begin(VALUE class, VALUE inputs, VALUE preserve_rng, VALUE function)
{
    static const tddp_checkpoint_ops ops = {sizeof(ops), again, tddp_rb_unpin};
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    VALUE self = TypedData_Wrap_Struct(class, &segment_type, NULL);
    tddp_tensor **tensors = tddp_rb_tensors(inputs, &memory, &count);
    tddp_rb_root *root = tddp_rb_pin(function);
    tddp_checkpoint *checkpoint = NULL;
    tddp_status status =
        tddp_checkpoint_begin(tensors, count, RTEST(preserve_rng), &ops, root, &checkpoint);
    RTYPEDDATA_DATA(self) = checkpoint;
    if (status != TDDP_OK)
        tddp_rb_unpin(root);
    tddp_rb_check(status);
    return self;
}

/* Replaces the first run's outputs by tensors whose backward runs the segment again. */
static VALUE segment_outputs(VALUE self, VALUE outputs)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    tddp_checkpoint *checkpoint = rb_check_typeddata(self, &segment_type);
    VALUE fresh = tddp_rb_fresh_tensors(outputs);
    tddp_tensor **tensors = tddp_rb_tensors(fresh, &memory, &count);
    tddp_rb_check(tddp_checkpoint_outputs(checkpoint, tensors, count));
    return fresh;
}

void tddp_rb_init_checkpoint(void)
{
    VALUE torch = rb_path2class("Torch");
    VALUE module = rb_define_module_under(rb_define_module_under(torch, "Utils"), "Checkpoint");
    VALUE class = rb_define_class_under(module, "Segment", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "_begin", segment_begin, 3);
    rb_define_method(class, "outputs", segment_outputs, 1);
}
