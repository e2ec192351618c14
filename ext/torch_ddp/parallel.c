/*
 * Copies of tensors on several devices of one process, over <tddp/torch_parallel.h>. Called by Ruby
 * threads that hold the GVL, which a call keeps: on the CPU it copies memory, for GPUs it only
 * queues copies.
 */
#include "torch_ddp.h"

#include <tddp/torch_parallel.h>

static const char **names_of(VALUE list, volatile VALUE *holder, size_t *count)
{
    Check_Type(list, T_ARRAY);
    long length = RARRAY_LEN(list);
    const char **names = tddp_rb_scratch(holder, length, sizeof(*names));
    for (long i = 0; i < length; i++) {
        VALUE name = rb_ary_entry(list, i);
        names[i] = StringValueCStr(name);
    }
    *count = (size_t)length;
    return names;
}

/* _replicate(tensors, devices, outputs, apart, detached, home or nil); outputs are new
 * Torch::Tensors, those of the first device, then those of the second... The Arrays are unshared.
 */
static VALUE replicate(VALUE self, VALUE tensors, VALUE devices, VALUE outputs, VALUE apart,
                       VALUE detached, VALUE home)
{
    tddp_replicate_opts opts = TDDP_REPLICATE_OPTS_INIT;
    opts.apart = RTEST(apart);
    opts.detached = RTEST(detached);
    opts.home = NIL_P(home) ? NULL : StringValueCStr(home);
    VALUE from_memory, name_memory, into_memory;
    size_t count, device_count, output_count;
    tddp_tensor **from = tddp_rb_tensors(tensors, &from_memory, &count);
    const char **names = names_of(devices, &name_memory, &device_count);
    tddp_tensor **into = tddp_rb_tensors(outputs, &into_memory, &output_count);
    if (output_count != count * device_count)
        rb_raise(rb_eArgError, "%zu outputs for %zu tensors on %zu devices", output_count, count,
                 device_count);
    tddp_status status =
        tddp_replicate((const tddp_tensor *const *)from, count, names, device_count, &opts, into);
    ALLOCV_END(into_memory);
    ALLOCV_END(name_memory);
    ALLOCV_END(from_memory);
    RB_GC_GUARD(tensors);
    RB_GC_GUARD(devices);
    RB_GC_GUARD(outputs);
    RB_GC_GUARD(home);
    tddp_rb_check(status);
    return self;
}

/* _fresh_tensors(count) → Array; faster than a call of torch-rb for each. */
static VALUE fresh_tensors(VALUE self, VALUE count)
{
    (void)self;
    VALUE torch = rb_path2class("Torch");
    VALUE all = rb_funcall(torch, rb_intern("empty"), 2, count, INT2FIX(0));
    return rb_funcall(all, rb_intern("unbind"), 0);
}

void tddp_rb_init_parallel(void)
{
    VALUE private_methods = rb_singleton_class(tddp_rb_distributed);
    rb_define_private_method(private_methods, "_replicate", replicate, 6);
    rb_define_private_method(private_methods, "_fresh_tensors", fresh_tensors, 1);
}
