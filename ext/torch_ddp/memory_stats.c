/*
 * The bytes of tensors over <tddp/memory_stats.h> and <tddp/torch_memory.h>, and which GPU is the
 * current one. A negative device is the CPU. Called by Ruby threads that hold the GVL; never
 * blocks.
 */
#include "torch_ddp.h"

#include <tddp/torch.h>
#include <tddp/torch_memory.h>

static VALUE track_tensors(VALUE self)
{
    tddp_rb_check(tddp_track_tensors());
    return Qnil;
}

static VALUE memory_stats(VALUE self, VALUE index)
{
    const int device = NUM2INT(index);
    tddp_memory_stats stats = tddp_memory_stats_get();
    if (device >= 0)
        tddp_rb_check(tddp_device_memory_stats(device, &stats));
    return rb_ary_new_from_args(3, ULL2NUM(stats.current_bytes), ULL2NUM(stats.peak_bytes),
                                ULL2NUM(stats.allocations));
}

static VALUE reset_peak(VALUE self, VALUE index)
{
    const int device = NUM2INT(index);
    if (device < 0)
        tddp_memory_reset_peak();
    else
        tddp_rb_check(tddp_device_memory_reset_peak(device));
    return Qnil;
}

static VALUE empty_cache(VALUE self)
{
    tddp_rb_check(tddp_device_memory_empty_cache());
    return Qnil;
}

static VALUE set_device(VALUE self, VALUE index)
{
    tddp_rb_check(tddp_torch_set_device(NUM2INT(index)));
    return Qnil;
}

void tddp_rb_init_memory_stats(void)
{
    TDDP_RB_PRIVATE("_track_tensors", track_tensors, 0);
    TDDP_RB_PRIVATE("_memory_stats", memory_stats, 1);
    TDDP_RB_PRIVATE("_reset_peak_memory", reset_peak, 1);
    TDDP_RB_PRIVATE("_empty_cache", empty_cache, 0);
    TDDP_RB_PRIVATE("_set_device", set_device, 1);
}
