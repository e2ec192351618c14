/*
 * Copies of tensors on several devices of one process, over <tddp/torch_parallel.h>. Called by Ruby
 * threads that hold the GVL, which a call keeps: on the CPU it copies memory, for GPUs it only
 * queues copies.
 */
#include "torch_ddp.h"

#include <tddp/torch_parallel.h>

static const char **names_of(VALUE list, volatile VALUE *holder, size_t *count)
{
    const char **names = tddp_rb_scratch_for(list, sizeof(*names), holder, count);
    for (size_t i = 0; i < *count; i++) {
        VALUE name = rb_ary_entry(list, (long)i);
        names[i] = StringValueCStr(name);
    }
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
    TDDP_RB_SCRATCH from_memory = 0, name_memory = 0, into_memory = 0;
    size_t count, device_count, output_count;
    tddp_tensor **from = tddp_rb_tensors(tensors, &from_memory, &count);
    const char **names = names_of(devices, &name_memory, &device_count);
    tddp_tensor **into = tddp_rb_tensors(outputs, &into_memory, &output_count);
    if (output_count != count * device_count)
        rb_raise(rb_eArgError, "%zu outputs for %zu tensors on %zu devices", output_count, count,
                 device_count);
    tddp_rb_check(
        tddp_replicate((const tddp_tensor *const *)from, count, names, device_count, &opts, into));
    return self;
}

/* _fresh_tensors(count) → Array; faster than a call of torch-rb for each. */
static VALUE fresh_tensors(VALUE self, VALUE count)
{
    VALUE torch = rb_path2class("Torch");
    VALUE all = rb_funcall(torch, rb_intern("empty"), 2, count, INT2FIX(0));
    return rb_funcall(all, rb_intern("unbind"), 0);
}

void tddp_rb_init_parallel(void)
{
    TDDP_RB_PRIVATE("_replicate", replicate, 6);
    TDDP_RB_PRIVATE("_fresh_tensors", fresh_tensors, 1);
}
