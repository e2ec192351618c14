/*
 * Torch::Distributed::WeightGradients over <tddp/torch_linear.h>. Called by Ruby threads that hold
 * the GVL; waits for other ranks in run are those of backward's hooks, by nogvl.c's rules for it.
 */
#include "torch_ddp.h"

#include <tddp/torch_linear.h>

static void gradients_free(void *data)
{
    tddp_weight_gradients_free(data);
}

static const rb_data_type_t gradients_type = {
    .wrap_struct_name = "Torch::Distributed::WeightGradients",
    .function = {.dfree = gradients_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE call_block(VALUE self)
{
    return rb_yield_values(0);
}

static VALUE end_of_block(VALUE self)
{
    tddp_rb_check(tddp_weight_gradients_end(rb_check_typeddata(self, &gradients_type)));
    return Qnil;
}

/* defer { … } */
static VALUE gradients_defer(VALUE class)
{
    rb_need_block();
    VALUE self = TypedData_Wrap_Struct(class, &gradients_type, NULL);
    tddp_weight_gradients *gradients = tddp_weight_gradients_create();
    if (gradients == NULL)
        rb_memerror();
    RTYPEDDATA_DATA(self) = gradients;
    tddp_rb_check(tddp_weight_gradients_begin(gradients));
    rb_ensure(call_block, self, end_of_block, self);
    return self;
}

static VALUE gradients_run(VALUE self)
{
    tddp_rb_check(tddp_weight_gradients_run(rb_check_typeddata(self, &gradients_type)));
    return Qnil;
}

void tddp_rb_init_weight_gradients(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "WeightGradients", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "defer", gradients_defer, 0);
    rb_define_method(class, "run", gradients_run, 0);
}
