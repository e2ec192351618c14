/*
 * Torch::Distributed::CommHook over <tddp/comm_hook.h> and <tddp/hooks.h>: what is done with
 * buckets of gradients in place of averaging them. Hooks in Ruby are called by the thread that runs
 * backward, when a bucket's gradients are there; what they return is waited for at the end of
 * backward, the GVL released by whatever waits. Entered by Ruby threads that hold the GVL.
 *
 * Each call of a hook is a fiber, which is left while its result is waited for, and also where it
 * waits itself when an interrupt comes: an exception there would leave the ranks out of step, since
 * nobody knows which operations the hook has begun. The interrupt ends backward, and the next
 * forward goes on with the hook.
 */
#include "torch_ddp.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <tddp/hooks.h>

/* What a hook in Ruby calls. The CommHook object marks it, and whoever uses the hook keeps that
 * object: a root here would keep a model for ever whose hook refers to it. The C hook may outlive
 * the object, and then calls nobody. */
typedef struct ruby_hook {
    atomic_int holders; /* the C hook, and the object */
    VALUE callable;     /* Qundef: the object is gone */
    VALUE pending;      /* {address of a bucket => the fiber of the callable's call} */
} ruby_hook;

typedef struct hook_object {
    tddp_comm_hook *hook;
    ruby_hook *ruby; /* NULL: a hook of the library */
} hook_object;

static void let_go(ruby_hook *ruby)
{
    if (atomic_fetch_sub(&ruby->holders, 1) == 1)
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
        let_go(object->ruby);
    }
    tddp_comm_hook_release(object->hook);
    xfree(object);
}

static const rb_data_type_t hook_type = {
    .wrap_struct_name = "Torch::Distributed::CommHook",
    .function = {.dmark = hook_mark, .dfree = hook_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY,
};

static VALUE tensor_class = Qnil;

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

/* The fiber of the hook that this thread is running; 0: none. Whether an interrupt was pending
 * before: its caller holds it back. What the hook's first operation is described by. */
static _Thread_local VALUE running;
static _Thread_local bool held_back;
static _Thread_local const char *first_description;

static VALUE key_of(const tddp_bucket *bucket)
{
    return ULL2NUM((uintptr_t)bucket->buffer.data);
}

static bool can(VALUE object, const char *method)
{
    return rb_respond_to(object, rb_intern(method));
}

/* Whether `result` is a value already, which the bucket then has. */
static bool take(VALUE bucket, VALUE result)
{
    if (RB_TYPE_P(result, T_ARRAY) && RARRAY_LEN(result) == 1)
        result = rb_ary_entry(result, 0);
    if (!RTEST(rb_obj_is_kind_of(result, tensor_class)))
        return false;
    if (result != rb_ivar_get(bucket, rb_intern("@buffer")))
        tddp_rb_grad_bucket_fill(bucket, result);
    return true;
}

static void refuse(VALUE result)
{
    rb_raise(rb_eTypeError,
             "a communication hook returned %" PRIsVALUE " (%s): expected the bucket's result as a "
             "Torch::Tensor, a Torch::Distributed::Future of it, or the Work that writes the "
             "bucket's buffer",
             rb_inspect(result), rb_obj_classname(result));
}

/* A whole call of a hook. What it is resumed with is its bucket, or nothing of interest. */
static VALUE hook_body(RB_BLOCK_CALL_FUNC_ARGLIST(bucket, callable))
{
    VALUE result = rb_funcall(callable, rb_intern("call"), 1, bucket);
    if (take(bucket, result))
        return Qnil;
    if (!can(result, "wait"))
        refuse(result);
    rb_fiber_yield(0, NULL); /* until the round is waited for */
    rb_funcall(result, rb_intern("wait"), 0);
    if (can(result, "value")) {
        VALUE value = rb_funcall(result, rb_intern("value"), 0);
        if (!take(bucket, value))
            refuse(value);
    }
    return Qnil;
}

bool tddp_rb_in_hook(void)
{
    return running != 0 && rb_fiber_current() == running;
}

const char *tddp_rb_hook_description(void)
{
    const char *text = tddp_rb_in_hook() ? first_description : NULL;
    if (text != NULL)
        first_description = NULL;
    return text;
}

void tddp_rb_leave_hook(void)
{
    const VALUE interrupted = Qtrue;
    rb_fiber_yield(1, &interrupted);
}

bool tddp_rb_hook_interrupted(void)
{
    return !held_back && tddp_rb_interrupt_pending();
}

/* What became of a hook that was resumed. */
typedef struct resumption {
    VALUE fiber;
    VALUE bucket;
    VALUE yielded;
    VALUE raised;
    int state;
} resumption;

static VALUE resume(VALUE data)
{
    resumption *it = (resumption *)data;
    it->yielded = rb_fiber_resume(it->fiber, 1, &it->bucket);
    return Qnil;
}

static VALUE resume_protected(RB_BLOCK_CALL_FUNC_ARGLIST(nothing, data))
{
    (void)nothing;
    resumption *it = (resumption *)data;
    rb_protect(resume, data, &it->state);
    if (it->state != 0) { /* else it is what the caller of backward has rescued */
        it->raised = rb_errinfo();
        rb_set_errinfo(Qnil);
    }
    return Qnil;
}

/* What other threads raise in this one would unwind the hook wherever it is: it is held back until
 * the hook waits for an operation, and leaves it there, or has returned. */
static VALUE resume_without_interrupts(VALUE data)
{
    VALUE mask = rb_hash_new();
    rb_hash_aset(mask, rb_eException, ID2SYM(rb_intern("never")));
    return rb_block_call(rb_cThread, rb_intern("handle_interrupt"), 1, &mask, resume_protected,
                         data);
}

static void run_fiber(resumption *it, const char *description)
{
    const VALUE before = running;
    const bool held_back_before = held_back;
    const char *description_before = first_description;
    int state = 0;
    held_back = tddp_rb_interrupt_pending();
    running = it->fiber;
    first_description = description;
    rb_protect(resume_without_interrupts, (VALUE)it, &state);
    running = before;
    held_back = held_back_before;
    first_description = description_before;
    if (state != 0)
        tddp_rb_defer_error(); /* what was held back */
}

/* Begins the hook's call for a bucket, or goes on with it where it was left. */
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
    resumption it = {.fiber = fiber, .bucket = bucket, .yielded = Qnil, .raised = Qnil};
    run_fiber(&it, call->bucket->description);
    if (RTEST(rb_fiber_alive_p(fiber)))
        *call->again = 1;
    else
        rb_hash_delete(call->pending, key);
    if (it.state != 0) {
        rb_set_errinfo(it.raised);
        rb_jump_tag(it.state);
    }
    call->interrupted = it.yielded == Qtrue;
    return Qnil;
}

static tddp_status run_ruby(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                            tddp_work **work, int *again)
{
    (void)group;
    (void)stage; /* It is where the hook's fiber is. */
    (void)work;  /* None: what is waited for is Ruby's. */
    const ruby_hook *ruby = state;
    if (ruby->callable == Qundef)
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the model of this communication hook is gone: "
                                                "keep it until backward is through");
    /* On the stack, where the collector sees them. */
    hook_call call = {ruby->callable, ruby->pending, bucket, again, false};
    tddp_status status = tddp_rb_inside(run_stage, &call, "a communication hook");
    if (status != TDDP_OK || !call.interrupted)
        return status;
    *again = 0;
    return tddp_fail(TDDP_CANCELED, "a communication hook was interrupted while it waited; it goes "
                                    "on with the next forward");
}

static void free_ruby(void *state)
{
    let_go(state);
}

static VALUE wrap_with(VALUE class, tddp_comm_hook *hook, ruby_hook *ruby)
{
    hook_object *object = NULL;
    VALUE self = TypedData_Make_Struct(class, hook_object, &hook_type, object);
    object->ruby = ruby;
    object->hook = hook;
    return self;
}

static VALUE wrap(VALUE class, tddp_comm_hook *hook)
{
    return wrap_with(class, hook, NULL);
}

/* CommHook.ruby(callable): it gets a GradBucket. */
static VALUE hook_ruby(VALUE class, VALUE callable)
{
    static const tddp_comm_hook_ops ops = {
        .size = sizeof(ops), .name = "ruby", .on_caller = 1, .run = run_ruby, .free = free_ruby};
    if (!can(callable, "call"))
        rb_raise(rb_eTypeError, "hook: expected something with a method `call`, got %" PRIsVALUE,
                 rb_inspect(callable));
    VALUE pending = rb_hash_new();
    ruby_hook *ruby = calloc(1, sizeof(*ruby));
    if (ruby == NULL)
        rb_memerror();
    atomic_init(&ruby->holders, 2);
    ruby->callable = callable;
    ruby->pending = pending;
    tddp_comm_hook *hook = NULL;
    tddp_status status = tddp_comm_hook_make(&ops, ruby, &hook);
    if (status != TDDP_OK)
        free(ruby);
    tddp_rb_check(status);
    VALUE self = wrap_with(class, hook, ruby);
    RB_GC_GUARD(callable);
    RB_GC_GUARD(pending);
    return self;
}

/* --- those of the library --------------------------------------------------------------------- */

static VALUE hook_allreduce(VALUE class)
{
    tddp_comm_hook *hook = NULL;
    tddp_rb_check(tddp_hook_allreduce(&hook));
    return wrap(class, hook);
}

static VALUE hook_noop(VALUE class)
{
    tddp_comm_hook *hook = NULL;
    tddp_rb_check(tddp_hook_noop(&hook));
    return wrap(class, hook);
}

/* CommHook.compress(:float16 or :bfloat16, hook within or nil) */
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
    tddp_rb_check(
        tddp_hook_compress(number, NIL_P(inner) ? NULL : tddp_rb_comm_hook(inner), &hook));
    VALUE self = wrap(class, hook);
    rb_ivar_set(self, rb_intern("@inner"), inner);
    return self;
}

/* CommHook.quantize(a scale for each so many elements rather than for a bucket, how many) */
static VALUE hook_quantize(VALUE class, VALUE per_channel, VALUE bucket_size)
{
    tddp_comm_hook *hook = NULL;
    tddp_rb_check(tddp_hook_quantize(RTEST(per_channel), NUM2SIZET(bucket_size), &hook));
    return wrap(class, hook);
}

static VALUE power_option(VALUE options, const char *name)
{
    return rb_hash_fetch(options, ID2SYM(rb_intern(name)));
}

/* CommHook.power_sgd(options): all fields of tddp_power_sgd_opts by their names. */
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
    tddp_rb_check(tddp_hook_power_sgd(&opts, &hook));
    return wrap(class, hook);
}

/* CommHook.post_local_sgd(subgroup or nil, start_iteration, averaging within it) */
static VALUE hook_post_local_sgd(VALUE class, VALUE subgroup, VALUE start, VALUE averages)
{
    tddp_comm_hook *hook = NULL;
    tddp_group *group = NIL_P(subgroup) ? NULL : tddp_rb_group(subgroup);
    tddp_rb_check(tddp_hook_post_local_sgd(group, NUM2LL(start), RTEST(averages), &hook));
    RB_GC_GUARD(subgroup);
    return wrap(class, hook);
}

static VALUE hook_name(VALUE self)
{
    return rb_utf8_str_new_cstr(tddp_comm_hook_name(tddp_rb_comm_hook(self)));
}

void tddp_rb_init_comm_hook(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "CommHook", rb_cObject);
    tensor_class = rb_path2class("Torch::Tensor");
    rb_global_variable(&tensor_class);
    rb_undef_alloc_func(class);
    rb_define_singleton_method(class, "ruby", hook_ruby, 1);
    rb_define_singleton_method(class, "allreduce", hook_allreduce, 0);
    rb_define_singleton_method(class, "noop", hook_noop, 0);
    rb_define_singleton_method(class, "compress", hook_compress, 2);
    rb_define_singleton_method(class, "quantize", hook_quantize, 2);
    rb_define_singleton_method(class, "power_sgd", hook_power_sgd, 1);
    rb_define_singleton_method(class, "post_local_sgd", hook_post_local_sgd, 3);
    rb_define_method(class, "name", hook_name, 0);
    tddp_rb_init_grad_bucket();
}
