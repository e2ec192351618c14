/*
 * Torch::Distributed::CommHook over <tddp/comm_hook.h> and <tddp/hooks.h>. The thread that runs
 * backward calls a hook in Ruby when a bucket's gradients are ready (on devices: once backward has
 * returned), and waits for its result at the end of backward; waits release the GVL. Called by Ruby
 * threads that hold the GVL.
 *
 * Each call of a hook is a fiber. It is suspended until the end of backward waits for its result,
 * and also if an interrupt comes while the hook itself waits: an exception there would leave the
 * ranks out of step, since the hook may have submitted only some of its operations. The interrupt
 * ends backward, and the next forward resumes the hook.
 */
#include "torch_ddp.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <tddp/hooks.h>

/* A hook in Ruby. The CommHook object marks its VALUEs, and the hook's users keep that object: a
 * root here would leak a model whose hook refers to it. The C hook may outlive the object, and then
 * fails. */
typedef struct ruby_hook {
    atomic_int references; /* the C hook's and the object's */
    VALUE callable;        /* Qundef: the object is freed */
    VALUE pending;         /* {address of a bucket => the fiber of the callable's call} */
} ruby_hook;

typedef struct hook_object {
    tddp_comm_hook *hook;
    ruby_hook *ruby; /* NULL: a built-in hook */
} hook_object;

static void release_hook(ruby_hook *ruby)
{
    if (atomic_fetch_sub(&ruby->references, 1) == 1)
        free(ruby);
}

static void hook_mark(void *data)
{
    const hook_object *object = data;
    if (object->ruby != NULL) {
        rb_gc_mark(object->ruby->callable);
        rb_gc_mark(object->ruby->pending);
    }
}

static void hook_free(void *data)
{
    hook_object *object = data;
    if (object->ruby != NULL) {
        object->ruby->callable = Qundef;
        release_hook(object->ruby);
    }
    tddp_comm_hook_release(object->hook);
    xfree(object);
}

static const rb_data_type_t hook_type = {
    .wrap_struct_name = "Torch::Distributed::CommHook",
    .function = {.dmark = hook_mark, .dfree = hook_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY,
};

tddp_comm_hook *tddp_rb_comm_hook(VALUE object)
{
    return ((hook_object *)rb_check_typeddata(object, &hook_type))->hook;
}

/* --- hooks in Ruby ---------------------------------------------------------------------------- */

typedef struct hook_call {
    VALUE callable;
    VALUE pending;
    const tddp_bucket *bucket;
    int *again;
    bool interrupted;
} hook_call;

/* The fiber of the hook that this thread runs; 0: none. Whether an interrupt was pending when it
 * was resumed, which its caller masks. The description for the hook's first operation. */
static _Thread_local VALUE current_fiber;
static _Thread_local bool interrupt_was_pending;
static _Thread_local const char *first_description;

static VALUE key_of(const tddp_bucket *bucket)
{
    return ULL2NUM((uintptr_t)bucket->buffer.data);
}

static bool responds_to(VALUE object, const char *method)
{
    return rb_respond_to(object, rb_intern(method));
}

/* Copies `result` to the bucket if it is a tensor. Returns false if it isn't. */
static bool store_result(VALUE bucket, VALUE result)
{
    if (RB_TYPE_P(result, T_ARRAY) && RARRAY_LEN(result) == 1)
        result = rb_ary_entry(result, 0);
    if (!tddp_rb_is_tensor(result))
        return false;
    if (result != rb_ivar_get(bucket, rb_intern("@buffer")))
        tddp_rb_grad_bucket_fill(bucket, result);
    return true;
}

static void raise_invalid_result(VALUE result)
{
    rb_raise(rb_eTypeError,
             "a communication hook returned %" PRIsVALUE " (%s): expected the bucket's result as a "
             "Torch::Tensor, a Torch::Distributed::Future of it, or the Work that writes the "
             "bucket's buffer",
             rb_inspect(result), rb_obj_classname(result));
}

/* The body of a hook's fiber. The first resume passes the bucket. */
static VALUE hook_body(RB_BLOCK_CALL_FUNC_ARGLIST(bucket, callable))
{
    VALUE result = rb_funcall(callable, rb_intern("call"), 1, bucket);
    if (store_result(bucket, result))
        return Qnil;
    if (!responds_to(result, "wait"))
        raise_invalid_result(result);
    rb_fiber_yield(0, NULL); /* until the end of backward */
    rb_funcall(result, rb_intern("wait"), 0);
    if (responds_to(result, "value")) {
        VALUE value = rb_funcall(result, rb_intern("value"), 0);
        if (!store_result(bucket, value))
            raise_invalid_result(value);
    }
    return Qnil;
}

bool tddp_rb_in_hook(void)
{
    return current_fiber != 0 && rb_fiber_current() == current_fiber;
}

const char *tddp_rb_hook_description(void)
{
    const char *text = tddp_rb_in_hook() ? first_description : NULL;
    if (text != NULL)
        first_description = NULL;
    return text;
}

void tddp_rb_suspend_hook(void)
{
    const VALUE interrupted = Qtrue;
    rb_fiber_yield(1, &interrupted);
}

bool tddp_rb_hook_interrupted(void)
{
    return !interrupt_was_pending && tddp_rb_interrupt_pending();
}

/* A resume of a hook's fiber, and its outcome. */
typedef struct fiber_resume {
    VALUE fiber;
    VALUE bucket;
    VALUE yielded;
    VALUE raised;
    int state;
} fiber_resume;

static VALUE resume(VALUE data)
{
    fiber_resume *resumption = (fiber_resume *)data;
    resumption->yielded = rb_fiber_resume(resumption->fiber, 1, &resumption->bucket);
    return Qnil;
}

static VALUE resume_protected(RB_BLOCK_CALL_FUNC_ARGLIST(nothing, data))
{
    (void)nothing;
    fiber_resume *resumption = (fiber_resume *)data;
    rb_protect(resume, data, &resumption->state);
    if (resumption->state != 0) { /* else rb_errinfo() is what backward's caller has rescued */
        resumption->raised = rb_errinfo();
        rb_set_errinfo(Qnil);
    }
    return Qnil;
}

/* Masks exceptions that other threads raise in this one, which would unwind the hook at any point,
 * until the hook returns or is suspended while it waits for an operation. */
static VALUE resume_with_interrupts_masked(VALUE data)
{
    VALUE mask = rb_hash_new();
    rb_hash_aset(mask, rb_eException, ID2SYM(rb_intern("never")));
    return rb_block_call(rb_cThread, rb_intern("handle_interrupt"), 1, &mask, resume_protected,
                         data);
}

static void run_fiber(fiber_resume *resumption, const char *description)
{
    const VALUE before = current_fiber;
    const bool interrupt_was_pending_before = interrupt_was_pending;
    const char *description_before = first_description;
    int state = 0;
    interrupt_was_pending = tddp_rb_interrupt_pending();
    current_fiber = resumption->fiber;
    first_description = description;
    rb_protect(resume_with_interrupts_masked, (VALUE)resumption, &state);
    current_fiber = before;
    interrupt_was_pending = interrupt_was_pending_before;
    first_description = description_before;
    if (state != 0)
        tddp_rb_defer_error(); /* the masked interrupt */
}

/* Starts the hook's fiber for a bucket, or resumes it. */
static VALUE run_stage(VALUE data)
{
    hook_call *call = (hook_call *)data;
    VALUE key = key_of(call->bucket);
    VALUE fiber = rb_hash_lookup(call->pending, key);
    VALUE bucket = Qnil;
    if (NIL_P(fiber)) {
        fiber = rb_fiber_new(hook_body, call->callable);
        bucket = tddp_rb_grad_bucket(call->bucket);
        rb_hash_aset(call->pending, key, fiber);
    }
    fiber_resume resumption = {.fiber = fiber, .bucket = bucket, .yielded = Qnil, .raised = Qnil};
    run_fiber(&resumption, call->bucket->description);
    if (RTEST(rb_fiber_alive_p(fiber)))
        *call->again = 1;
    else
        rb_hash_delete(call->pending, key);
    if (resumption.state != 0) {
        rb_set_errinfo(resumption.raised);
        rb_jump_tag(resumption.state);
    }
    call->interrupted = resumption.yielded == Qtrue;
    return Qnil;
}

static tddp_status run_ruby(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                            tddp_work **work, int *again)
{
    (void)group;
    (void)stage; /* the fiber keeps its position */
    (void)work;  /* the fiber itself waits */
    const ruby_hook *ruby = state;
    if (ruby->callable == Qundef)
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the model of this communication hook was garbage "
                                                "collected: keep it until backward has returned");
    /* On the stack, where the garbage collector finds the VALUEs. */
    hook_call call = {ruby->callable, ruby->pending, bucket, again, false};
    tddp_status status = tddp_rb_call_in_backward(run_stage, &call, "a communication hook");
    if (status != TDDP_OK || !call.interrupted)
        return status;
    *again = 0;
    return tddp_fail(TDDP_CANCELED,
                     "a communication hook was interrupted while it waited; the next "
                     "forward resumes it");
}

static void free_ruby(void *state)
{
    release_hook(state);
}

/* The object of the hook that a call has made, with this status. */
static VALUE wrap(VALUE class, tddp_status status, tddp_comm_hook *const *hook)
{
    hook_object *object = NULL;
    tddp_rb_check(status);
    VALUE self = TypedData_Make_Struct(class, hook_object, &hook_type, object);
    object->hook = *hook;
    return self;
}

/* CommHook.ruby(callable), which is called with a GradBucket. */
static VALUE hook_ruby(VALUE class, VALUE callable)
{
    static const tddp_comm_hook_ops ops = {.size = sizeof(ops),
                                           .name = "ruby",
                                           .on_caller = 1,
                                           .run = run_ruby,
                                           .free = free_ruby,
                                           .device_types = 1u << TDDP_CPU | 1u << TDDP_CUDA};
    if (!responds_to(callable, "call"))
        rb_raise(rb_eTypeError, "hook: expected something with a method `call`, got %" PRIsVALUE,
                 rb_inspect(callable));
    VALUE pending = rb_hash_new();
    ruby_hook *ruby = calloc(1, sizeof(*ruby));
    if (ruby == NULL)
        rb_memerror();
    atomic_init(&ruby->references, 2);
    ruby->callable = callable;
    ruby->pending = pending;
    tddp_comm_hook *hook = NULL;
    tddp_status status = tddp_comm_hook_make(&ops, ruby, &hook);
    if (status != TDDP_OK)
        free(ruby);
    VALUE self = wrap(class, status, &hook);
    ((hook_object *)RTYPEDDATA_DATA(self))->ruby = ruby;
    RB_GC_GUARD(pending);
    return self;
}

/* --- built-in hooks --------------------------------------------------------------------------- */

static VALUE hook_allreduce(VALUE class)
{
    tddp_comm_hook *hook = NULL;
    return wrap(class, tddp_hook_allreduce(&hook), &hook);
}

static VALUE hook_noop(VALUE class)
{
    tddp_comm_hook *hook = NULL;
    return wrap(class, tddp_hook_noop(&hook), &hook);
}

/* CommHook.compress(:float16 or :bfloat16, inner hook or nil) */
static VALUE hook_compress(VALUE class, VALUE dtype, VALUE inner)
{
    tddp_comm_hook *hook = NULL;
    Check_Type(dtype, T_SYMBOL);
    tddp_dtype number = TDDP_FLOAT16;
    if (SYM2ID(dtype) == rb_intern("bfloat16"))
        number = TDDP_BFLOAT16;
    else if (SYM2ID(dtype) != rb_intern("float16"))
        rb_raise(rb_eArgError, "dtype: expected :float16 or :bfloat16, got %" PRIsVALUE,
                 rb_inspect(dtype));
    tddp_comm_hook *within = NIL_P(inner) ? NULL : tddp_rb_comm_hook(inner);
    VALUE self = wrap(class, tddp_hook_compress(number, within, &hook), &hook);
    rb_ivar_set(self, rb_intern("@inner"), inner);
    return self;
}

/* CommHook.quantize(per_channel, bucket_size) */
static VALUE hook_quantize(VALUE class, VALUE per_channel, VALUE bucket_size)
{
    tddp_comm_hook *hook = NULL;
    const size_t size = NUM2SIZET(bucket_size);
    return wrap(class, tddp_hook_quantize(RTEST(per_channel), size, &hook), &hook);
}

static VALUE power_option(VALUE options, const char *name)
{
    return rb_hash_fetch(options, ID2SYM(rb_intern(name)));
}

/* CommHook.power_sgd(options): a Hash with all fields of tddp_power_sgd_opts. */
static VALUE hook_power_sgd(VALUE class, VALUE options)
{
    tddp_comm_hook *hook = NULL;
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    Check_Type(options, T_HASH);
    opts.rank = NUM2INT(power_option(options, "rank"));
    opts.start_iteration = NUM2LL(power_option(options, "start_iteration"));
    opts.min_compression_rate = NUM2DBL(power_option(options, "min_compression_rate"));
    opts.error_feedback = RTEST(power_option(options, "error_feedback"));
    opts.warm_start = RTEST(power_option(options, "warm_start"));
    opts.orthogonalization_epsilon = NUM2DBL(power_option(options, "orthogonalization_epsilon"));
    opts.seed = NUM2ULL(power_option(options, "seed"));
    opts.batched = RTEST(power_option(options, "batched"));
    return wrap(class, tddp_hook_power_sgd(&opts, &hook), &hook);
}

/* CommHook.post_local_sgd(subgroup or nil, start_iteration, post_local_gradient_allreduce) */
static VALUE hook_post_local_sgd(VALUE class, VALUE subgroup, VALUE start, VALUE averages)
{
    tddp_comm_hook *hook = NULL;
    tddp_group *group = tddp_rb_group_or_null(subgroup);
    return wrap(class, tddp_hook_post_local_sgd(group, NUM2LL(start), RTEST(averages), &hook),
                &hook);
}

static VALUE hook_name(VALUE self)
{
    return rb_utf8_str_new_cstr(tddp_comm_hook_name(tddp_rb_comm_hook(self)));
}

void tddp_rb_init_comm_hook(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "CommHook", rb_cObject);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "ruby", hook_ruby, 1);
    rb_define_singleton_method(class, "allreduce", hook_allreduce, 0);
    rb_define_singleton_method(class, "noop", hook_noop, 0);
    rb_define_singleton_method(class, "compress", hook_compress, 2);
    rb_define_singleton_method(class, "quantize", hook_quantize, 2);
    rb_define_singleton_method(class, "power_sgd", hook_power_sgd, 1);
    rb_define_singleton_method(class, "post_local_sgd", hook_post_local_sgd, 3);
    rb_define_method(class, "name", hook_name, 0);
}
