/*
 * Activation offload over <tddp/torch_offload.h>. Called by Ruby threads that hold the GVL; what
 * the block does on other threads is not concerned.
 */
#include <tddp/torch_offload.h>

#include "torch_ddp.h"

static VALUE yield(VALUE data)
{
    (void)data;
    return rb_yield(Qnil);
}

static VALUE end(VALUE data)
{
    (void)data;
    tddp_save_on_cpu_end();
    return Qnil;
}

/* _save_on_cpu(pin_memory) { }: the block's value. */
static VALUE save_on_cpu(VALUE self, VALUE pin_memory)
{
    tddp_rb_check(tddp_save_on_cpu_begin(RTEST(pin_memory)));
    return rb_ensure(yield, Qnil, end, Qnil);
}

/* _saved_on_cpu: [tensors, bytes] */
static VALUE saved_on_cpu(VALUE self)
{
    const tddp_saved_on_cpu now = tddp_saved_on_cpu_now();
    return rb_ary_new_from_args(2, SIZET2NUM(now.tensors), SIZET2NUM(now.bytes));
}

void tddp_rb_init_offload(void)
{
    VALUE torch = rb_path2class("Torch");
    VALUE module = rb_define_module_under(rb_define_module_under(torch, "Utils"), "Checkpoint");
    rb_define_singleton_method(module, "_save_on_cpu", save_on_cpu, 1);
    rb_define_singleton_method(module, "_saved_on_cpu", saved_on_cpu, 0);
}
