/*
 * The extension's internal interface: it binds Ruby objects to libtddp's handles. Each .c file
 * binds a public header or a part of one, and contains only bindings. Only nogvl.c releases the
 * GVL, only error.c converts a status to an exception, and only tensor_bridge.cc includes Rice and
 * libtorch.
 *
 * A method's receiver and arguments are on Ruby's stack until it returns: RB_GC_GUARD() is for
 * objects that a method makes itself.
 */
#ifndef TORCH_DDP_H
#define TORCH_DDP_H

#include <ruby.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tddp.h>
#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

extern VALUE tddp_rb_distributed; /* Torch::Distributed */

/* --- error.c --------------------------------------------------------------------------------- */

/* The exception for a status, with this thread's error text. */
VALUE tddp_rb_error(tddp_status status);

/* Whether rb_errinfo() after a longjmp is an exception: throw, break and Thread#kill set something
 * else. */
bool tddp_rb_is_exception(VALUE left);

/* Raises the exception, unless the status is TDDP_OK. The caller must have nothing to free. */
void tddp_rb_check(tddp_status status);

/* --- nogvl.c --------------------------------------------------------------------------------- */

/* The outcome of a blocking call, for tddp_rb_raise_outcome() after the caller freed its memory. */
typedef struct tddp_rb_outcome {
    VALUE error; /* the exception to raise, or Qnil */
    int state;   /* the tag of a longjmp to continue (Interrupt, Thread#raise, Thread#kill), or 0 */
} tddp_rb_outcome;

/* Runs without the GVL, so it must not access Ruby objects. */
typedef tddp_status (*tddp_rb_body)(void *data, const tddp_wait *wait);

/*
 * Calls `body` without the GVL. `timeout_ms` negative: the object's default. After a signal handler
 * that raised nothing `body` may be called again with the remaining time; not with `no_restart`,
 * for calls that a cancellation may leave half done. `body` may run on another thread.
 */
tddp_rb_outcome tddp_rb_blocking(tddp_rb_body body, void *data, int64_t timeout_ms,
                                 bool no_restart);

/*
 * The same for a request that a store normally answers at once. The only Ruby thread may restart a
 * canceled one, which avoids a helper thread that would take longer than the request. It had no
 * effect, unless the store was silent for seconds: then a counter may have counted it twice.
 */
tddp_rb_outcome tddp_rb_blocking_brief(tddp_rb_body body, void *data);

/* The outcome of a call that didn't block. */
tddp_rb_outcome tddp_rb_outcome_of(tddp_status status);

/* Continues the longjmp or raises the error of an outcome, if it has one. */
void tddp_rb_raise_outcome(tddp_rb_outcome outcome);

/* A tddp_blocking_region for libtorch's backward: releases the GVL if this thread has it. Never
 * raises: after an interrupt it returns TDDP_CANCELED, and the interrupt stays pending. */
tddp_status tddp_rb_blocking_in_backward(tddp_rb_body body, void *data);

/* Makes an exception pending, which Ruby raises in this thread after backward has returned; the
 * second one takes rb_errinfo() after rb_protect(). */
void tddp_rb_raise_later(VALUE error);
void tddp_rb_defer_error(void);

/* Runs the pending interrupts' handlers. Returns the tag of the longjmp if one raises, else 0. */
int tddp_rb_run_handlers(void);

/* Whether an exception is pending in this thread. Never raises. */
bool tddp_rb_interrupt_pending(void);

/* --- arguments and methods, in init.c -------------------------------------------------------- */

/* Seconds as a Numeric to milliseconds, rounded up; nil is -1. Raises on anything else. */
int64_t tddp_rb_milliseconds(VALUE seconds);

/* Declares what owns the memory of one tddp_rb_scratch(): the end of its block frees it, or the
 * garbage collector after a longjmp. */
#define TDDP_RB_SCRATCH __attribute__((cleanup(tddp_rb_scratch_end))) volatile VALUE
void tddp_rb_scratch_end(volatile VALUE *holder);

/* Memory for `count` + 1 elements of `bytes_each`. */
void *tddp_rb_scratch(volatile VALUE *holder, long count, size_t bytes_each);

/* The same, one for each element of a list, which must be an Array; `*count` is how many. */
void *tddp_rb_scratch_for(VALUE list, size_t bytes_each, volatile VALUE *holder, size_t *count);

/* A String as bytes, a frozen one that shares the memory of the one given; or a Symbol's. Raises an
 * error that begins with the argument's name. Its slice is borrowed. */
VALUE tddp_rb_bytes(VALUE object, const char *name);
static inline tddp_slice tddp_rb_slice(VALUE string)
{
    return (tddp_slice){RSTRING_PTR(string), (size_t)RSTRING_LEN(string)};
}

/* An Array's strings, each with a NUL behind it, in one that is returned and owns them; sets their
 * slices of it. */
VALUE tddp_rb_concatenate(VALUE strings, const char *name, tddp_slice *slices);

/* getpid() without its system call, for what a fork copies. */
pid_t tddp_rb_process_id(void);

/* A method of Torch::Distributed itself, which only that calls. */
#define TDDP_RB_PRIVATE(name, function, arity) \
    rb_define_private_method(rb_singleton_class(tddp_rb_distributed), name, function, arity)

/* --- store.c, group.c, work.c ---------------------------------------------------------------- */

/* The handle of a Ruby object, borrowed; raises TypeError for other classes. */
tddp_store *tddp_rb_store(VALUE object);

/* Sets the handle of a Torch::Distributed::Store object, which then owns it (NULL: none), and
 * releases the old one. */
void tddp_rb_adopt_store(VALUE object, tddp_store *store);
tddp_group *tddp_rb_group(VALUE object);
tddp_group *tddp_rb_group_or_null(VALUE object); /* NULL for nil */

/* tddp_rb_blocking() with a reference to the group (NULL: none), which another thread may destroy
 * meanwhile. */
tddp_rb_outcome tddp_rb_blocking_with(tddp_group *group, tddp_rb_body body, void *data,
                                      int64_t timeout_ms, bool no_restart);

/* A Torch::Distributed::Store with a new reference. */
VALUE tddp_rb_wrap_store(tddp_store *store);

/*
 * Owns a new work on the memory of these operands, each a Torch::Tensor, an unshared Array of them,
 * or nil. Returns a Torch::Distributed::Work if `async`; else waits, and returns nil, or the
 * sender's rank for a recv, or raises. The tensors and their memory live until the operation
 * completes, also if the caller is interrupted.
 */
VALUE tddp_rb_take_work(tddp_work *work, VALUE output, VALUE input, bool async);

/* --- ddp.c ----------------------------------------------------------------------------------- */

/* The reducer of a GradientSync, borrowed. */
const tddp_reducer *tddp_rb_reducer(VALUE sync);

/* --- callback.c ------------------------------------------------------------------------------ */

/* Runs Ruby code within libtorch's backward. An exception becomes a status, and the cause of the
 * exception that backward raises. `what` names the code in messages. */
tddp_status tddp_rb_call_in_backward(VALUE (*body)(VALUE data), void *data, const char *what);

/* Whether this thread may run Ruby code now. */
int tddp_rb_may_run(void);

/* --- roots.c --------------------------------------------------------------------------------- */

/* What a collection does with a root's object. */
typedef enum tddp_rb_need {
    TDDP_RB_NEEDED,     /* marks it */
    TDDP_RB_NOT_NEEDED, /* leaves it to its other references */
    TDDP_RB_DONE        /* removes the root from the list, and then calls its `removed` */
} tddp_rb_need;

/* Keeps a Ruby object alive while C needs it. Part of a struct of its owner's, which adds it with
 * the GVL held, and removes it before the struct is freed. */
typedef struct tddp_rb_root {
    VALUE object;
    tddp_rb_need (*need)(const struct tddp_rb_root *root); /* called by the garbage collector */
    void (*removed)(struct tddp_rb_root *root);            /* NULL: nothing */
    struct tddp_rb_root *next;
    struct tddp_rb_root **at; /* what points here; NULL: not in the list */
} tddp_rb_root;

void tddp_rb_root_add(tddp_rb_root *root);
void tddp_rb_root_remove(tddp_rb_root *root);

/* A root for a handle that any thread may release, with the GVL or not. */
tddp_rb_root *tddp_rb_pin(VALUE object);
void tddp_rb_unpin(void *root);

/* --- comm_hook.c, grad_bucket.c --------------------------------------------------------------- */

/* The hook of a CommHook, borrowed; raises TypeError for other classes. */
tddp_comm_hook *tddp_rb_comm_hook(VALUE object);

/* Whether this code runs in a communication hook's fiber; whether an interrupt has become pending
 * since it was resumed; and suspends the hook, until the next forward resumes it. */
bool tddp_rb_in_hook(void);
bool tddp_rb_hook_interrupted(void);
void tddp_rb_suspend_hook(void);

/* The description of the running hook's bucket, for the hook's first operation only; NULL: none.
 * Borrowed until the hook returns or is suspended. */
const char *tddp_rb_hook_description(void);

/* A GradBucket of the bucket whose hook is being called; and a copy of a tensor to its buffer. */
VALUE tddp_rb_grad_bucket(const tddp_bucket *bucket);
void tddp_rb_grad_bucket_fill(VALUE grad_bucket, VALUE tensor);

/* --- tensors.c ------------------------------------------------------------------------------- */

bool tddp_rb_is_tensor(VALUE object);

/* The handles of an Array of tensors, in tddp_rb_scratch() memory; borrowed from the tensors. In
 * the second, nil is NULL. */
tddp_tensor **tddp_rb_tensors(VALUE list, volatile VALUE *holder, size_t *count);
tddp_tensor **tddp_rb_tensors_or_null(VALUE list, volatile VALUE *holder, size_t *count);

/* The tensor in a Torch::Tensor (or Parameter), borrowed from the object; raises TypeError for
 * other classes, whose text begins with `name` where it is not NULL, and an index that is not
 * negative. In the last, nil is NULL. */
tddp_tensor *tddp_rb_tensor(VALUE object);
tddp_tensor *tddp_rb_named_tensor(VALUE object, const char *name, long index);
tddp_tensor *tddp_rb_tensor_or_null(VALUE object);

/* A new empty Torch::Tensor; one that is assigned a tensor, nil for NULL; and an Array of those. */
VALUE tddp_rb_fresh_tensor(void);
VALUE tddp_rb_tensor_object(const tddp_tensor *from);
VALUE tddp_rb_tensor_objects(tddp_tensor *const *from, size_t count);

/* New objects with an Array's tensors; nil stays nil. */
VALUE tddp_rb_fresh_tensors(VALUE array);

/* --- operands.c ------------------------------------------------------------------------------ */

/* A tensor's memory. Raises an error that begins with the argument's name if it isn't a buffer. */
tddp_buffer tddp_rb_buffer(VALUE tensor, const char *name);

/* The same; returns the handle, NULL if the tensor is strided, but not contiguous. */
tddp_tensor *tddp_rb_contiguous(VALUE tensor, const char *name, tddp_buffer *buffer);

/* The memory of an Array of tensors, in tddp_rb_scratch() memory; NULL and count 0 for nil. */
tddp_buffer *tddp_rb_buffers(VALUE list, const char *name, volatile VALUE *holder, size_t *count);

/* A tensor's memory, divided into consecutive parts of `counts` elements (an Array). */
tddp_buffer *tddp_rb_pieces(VALUE tensor, const char *name, VALUE counts, volatile VALUE *holder,
                            size_t *count);

/* Has autograd know that an operation writes into a tensor, or an Array of them; nil: nothing. */
void tddp_rb_written(VALUE tensors);

/* The description that ranks compare with the next operation: dtypes and shapes of these tensors
 * (one, an Array; nil: none) if operations are described, else that of a communication hook's first
 * operation. Owned by `*text`; NULL: none. */
const char *tddp_rb_description(VALUE operand, VALUE *text);
bool tddp_rb_detail(void);

/* --- shared.c -------------------------------------------------------------------------------- */

/* The dtype of a torch-rb name. Raises if collectives don't support it. */
tddp_dtype tddp_rb_dtype(VALUE symbol);

/* --- tensor_bridge.cc ------------------------------------------------------------------------ */

/* The tensor in a Torch::Tensor (or Parameter), borrowed from the object; NULL if it has none. */
tddp_tensor *tddp_rb_wrapped_tensor(VALUE object);

/* Whether both handles refer to the same tensor. */
bool tddp_rb_same_tensor(const tddp_tensor *a, const tddp_tensor *b);

/* A tensor's memory layout. */
typedef enum tddp_rb_form {
    TDDP_RB_FORM_PLAIN,  /* contiguous, or not strided */
    TDDP_RB_FORM_APART,  /* not contiguous */
    TDDP_RB_FORM_FOLDED, /* some elements share their memory, as after expand */
} tddp_rb_form;

tddp_rb_form tddp_rb_tensor_form(const tddp_tensor *tensor);

/* The number of dimensions; `*dims` is borrowed. */
size_t tddp_rb_shape(const tddp_tensor *tensor, const int64_t **dims);

/* The number of threads that libtorch uses within an operation. */
void tddp_rb_set_num_threads(int count);
int tddp_rb_num_threads(void);

/* --- each file's classes and methods --------------------------------------------------------- */

/* The files, in the order in which Init_ext() calls tddp_rb_init_FILE() of each. */
#define TDDP_RB_FILES(X) \
    X(error)             \
    X(log)               \
    X(nogvl)             \
    X(tensors)           \
    X(roots)             \
    X(store)             \
    X(store_kinds)       \
    X(meeting)           \
    X(group)             \
    X(operands)          \
    X(collectives)       \
    X(shared)            \
    X(delegate)          \
    X(work)              \
    X(comm_hook)         \
    X(grad_bucket)       \
    X(checkpoint)        \
    X(backward)          \
    X(offload)           \
    X(function)          \
    X(ddp)               \
    X(ddp_queries)       \
    X(optim)             \
    X(norm)              \
    X(autograd)          \
    X(weight_gradients)  \
    X(fsdp)              \
    X(parallel)          \
    X(recorder)          \
    X(trace)             \
    X(heap)              \
    X(memory_stats)      \
    X(rng)               \
    X(tensor_file)

#define TDDP_RB_DECLARE(file) void tddp_rb_init_##file(void);
TDDP_RB_FILES(TDDP_RB_DECLARE)
#undef TDDP_RB_DECLARE

#ifdef __cplusplus
}
#endif

#endif
