/*
 * The extension's entry point: Torch::Distributed, its constants from libtddp's tables, and
 * conversions that several files share. Init_ext is called once by `require`, with the GVL held.
 */
#include "torch_ddp.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

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

void *tddp_rb_scratch_for(VALUE list, size_t bytes_each, volatile VALUE *holder, size_t *count)
{
    Check_Type(list, T_ARRAY);
    *count = (size_t)RARRAY_LEN(list);
    return tddp_rb_scratch(holder, RARRAY_LEN(list), bytes_each);
}

void tddp_rb_scratch_end(volatile VALUE *holder)
{
    ALLOCV_END(*holder);
}

VALUE tddp_rb_bytes(VALUE object, const char *name)
{
    if (RB_SYMBOL_P(object))
        object = rb_sym2str(object);
    if (!RB_TYPE_P(object, T_STRING))
        rb_raise(rb_eTypeError, "%s: expected a String, got %" PRIsVALUE, name, rb_inspect(object));
    return rb_str_new_frozen(object);
}

VALUE tddp_rb_concatenate(VALUE strings, const char *name, tddp_slice *slices)
{
    const long count = RARRAY_LEN(strings);
    VALUE all = rb_str_new(NULL, 0);
    for (long i = 0; i < count; i++) {
        VALUE one = tddp_rb_bytes(rb_ary_entry(strings, i), name);
        slices[i] = tddp_rb_slice(one);
        rb_str_cat(all, slices[i].data, RSTRING_LEN(one));
        rb_str_cat(all, "", 1);
    }
    const char *at = RSTRING_PTR(all);
    for (long i = 0; i < count; i++) {
        slices[i].data = at;
        at += slices[i].size + 1;
    }
    return all;
}

/* Read again in each forked child. */
static pid_t process_id;

static void read_process_id(void)
{
    process_id = getpid();
}

pid_t tddp_rb_process_id(void)
{
    return process_id;
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
    if (pthread_atfork(NULL, NULL, read_process_id) != 0)
        rb_memerror();
    read_process_id();
    TDDP_RB_PRIVATE("_die_with_parent", die_with_parent, 0);
    TDDP_RB_PRIVATE("_set_num_threads", set_num_threads, 1);
    TDDP_RB_PRIVATE("_num_threads", num_threads, 0);
#define TDDP_RB_INIT(file) tddp_rb_init_##file();
    TDDP_RB_FILES(TDDP_RB_INIT)
#undef TDDP_RB_INIT
}
