/*
 * The extension's entry point: Torch::Distributed, its constants from libtddp's tables, and
 * conversions that several files share. Init_ext is called once by `require`, with the GVL held.
 */
#include "torch_ddp.h"

#include <math.h>
#include <signal.h>
#include <sys/prctl.h>

VALUE tddp_rb_distributed;

int64_t tddp_rb_milliseconds(VALUE seconds)
{
    if (NIL_P(seconds))
        return -1;
    if (!rb_obj_is_kind_of(seconds, rb_cNumeric))
        rb_raise(rb_eTypeError, "timeout: expected a number of seconds, got %" PRIsVALUE,
                 rb_inspect(seconds));
    double value = NUM2DBL(seconds);
    if (isnan(value) || value < 0)
        rb_raise(rb_eArgError, "timeout: expected seconds, 0 or more, got %" PRIsVALUE,
                 rb_inspect(seconds));
    /* About three hundred years, also for longer timeouts and infinity. */
    return value > 1e10 ? (int64_t)1e13 : (int64_t)ceil(value * 1000);
}

void *tddp_rb_scratch(volatile VALUE *holder, long count, size_t bytes_each)
{
    return rb_alloc_tmp_buffer_with_count(holder, ((size_t)count + 1) * bytes_each,
                                          (size_t)count + 1);
}

/* Makes the kernel kill this process when the thread that forked it ends, so that no worker is left
 * behind. */
static VALUE die_with_parent(VALUE self)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return self;
}

static VALUE set_num_threads(VALUE self, VALUE count)
{
    int number = NUM2INT(count);
    if (number < 1)
        rb_raise(rb_eArgError, "threads: expected 1 or more, got %d", number);
    tddp_rb_set_num_threads(number);
    return self;
}

static VALUE num_threads(VALUE self)
{
    (void)self;
    return INT2NUM(tddp_rb_num_threads());
}

static void define_reduce_ops(void)
{
    VALUE ops = rb_define_module_under(tddp_rb_distributed, "ReduceOp");
#define TDDP_RB_OP(name, code, text) rb_define_const(ops, #name, INT2FIX(code));
    TDDP_REDUCE_OP_MAP(TDDP_RB_OP)
#undef TDDP_RB_OP
}

__attribute__((visibility("default"))) void Init_ext(void);

void Init_ext(void)
{
    VALUE torch = rb_const_get(rb_cObject, rb_intern("Torch"));
    tddp_rb_distributed = rb_define_module_under(torch, "Distributed");
    rb_global_variable(&tddp_rb_distributed);
    rb_define_const(tddp_rb_distributed, "LIBTORCH_VERSION",
                    rb_obj_freeze(rb_str_new_cstr(tddp_torch_version())));
    define_reduce_ops();
    rb_define_private_method(rb_singleton_class(tddp_rb_distributed), "_die_with_parent",
                             die_with_parent, 0);
    rb_define_private_method(rb_singleton_class(tddp_rb_distributed), "_set_num_threads",
                             set_num_threads, 1);
    rb_define_private_method(rb_singleton_class(tddp_rb_distributed), "_num_threads", num_threads,
                             0);
    tddp_rb_init_error();
    tddp_rb_init_log();
    tddp_rb_init_nogvl();
    tddp_rb_init_tensor();
    tddp_rb_init_store();
    tddp_rb_init_meeting();
    tddp_rb_init_group();
    tddp_rb_init_delegate();
    tddp_rb_init_work();
    tddp_rb_init_callback();
    tddp_rb_init_comm_hook();
    tddp_rb_init_checkpoint();
    tddp_rb_init_backward();
    tddp_rb_init_offload();
    tddp_rb_init_function();
    tddp_rb_init_ddp();
    tddp_rb_init_optim();
    tddp_rb_init_norm();
    tddp_rb_init_autograd();
    tddp_rb_init_weight_gradients();
    tddp_rb_init_fsdp();
    tddp_rb_init_parallel();
    tddp_rb_init_recorder();
    tddp_rb_init_trace();
    tddp_rb_init_heap();
    tddp_rb_init_memory_stats();
    tddp_rb_init_rng();
    tddp_rb_init_tensor_file();
}
