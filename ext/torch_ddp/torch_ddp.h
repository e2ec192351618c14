/*
 * The extension's own seams: Ruby objects on one side, the handles of libtddp on the other. Each
 * .c file binds one public header or a part of one and holds only bindings; nogvl.c alone lets go
 * of the GVL, error.c alone turns a status into an exception, tensor_bridge.cc alone sees Rice and
 * libtorch.
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

/* The exception for a status, with the text that libtddp left for this thread. */
VALUE tddp_rb_error(tddp_status status);

/* Whether what rb_errinfo() gives after a jump is an exception: throw, break and Thread#kill leave
 * something else there. */
bool tddp_rb_is_exception(VALUE left);

/* Raises it, unless the status is TDDP_OK. Only where nothing is held that must be freed. */
void tddp_rb_check(tddp_status status);

/* --- nogvl.c --------------------------------------------------------------------------------- */

/* What came of a blocking call. Whoever made it frees what it holds, then passes this on. */
typedef struct tddp_rb_outcome {
    VALUE error; /* the exception to raise, or Qnil */
    int state;   /* a jump to go on with (Interrupt, Thread#raise, Thread#kill), or 0 */
} tddp_rb_outcome;

/* Runs without the GVL and touches no Ruby object. */
typedef tddp_status (*tddp_rb_body)(void *data, const tddp_wait *wait);

/*
 * Lets other Ruby threads run while `body` blocks. `timeout_ms` negative: the object's default.
 * After a signal handler that raised nothing `body` may be called again, with the time that is
 * left; with `once` it is not, since what it asked for may have been done in part. `body` may run
 * on another thread.
 */
tddp_rb_outcome tddp_rb_blocking(tddp_rb_body body, void *data, int64_t timeout_ms, bool once);

/*
 * The same for a request to a store that is answered at once, unless the store is in trouble: when
 * it is canceled it has done nothing, or the store is of no further use. So Ruby's only thread need
 * not wait aside for it, which would take longer than the request.
 */
tddp_rb_outcome tddp_rb_brief(tddp_rb_body body, void *data);

/* Goes on with a jump, raises an error, or returns. */
void tddp_rb_settle(tddp_rb_outcome outcome);

/* A tddp_blocking_region for libtorch's backward: lets go of the GVL if this thread has it and
 * never raises: an interrupt gives TDDP_CANCELED and stays pending. */
tddp_status tddp_rb_blocking_in_backward(tddp_rb_body body, void *data);

/* Makes an exception pending, for Ruby to raise in this thread once backward has returned; the
 * second takes the one that rb_protect has left. */
void tddp_rb_raise_later(VALUE error);
void tddp_rb_defer_error(void);

/* Whether something is to be raised in this thread, as soon as it may. Raises nothing. */
bool tddp_rb_interrupt_pending(void);

/* --- arguments, in init.c -------------------------------------------------------------------- */

/* Seconds as a Numeric to milliseconds, rounded up; nil is -1. Raises on anything else. */
int64_t tddp_rb_milliseconds(VALUE seconds);

/* Memory for `count` (and one) things of `bytes_each` that the collector frees if a jump passes by;
 * ended with ALLOCV_END(*holder). */
void *tddp_rb_scratch(volatile VALUE *holder, long count, size_t bytes_each);

/* --- store.c, group.c, work.c ---------------------------------------------------------------- */

/* The handles behind Ruby objects, borrowed; TypeError for anything else. */
tddp_store *tddp_rb_store(VALUE object);

/* Gives a Torch::Distributed::Store object its handle, whose reference it takes over (NULL: none);
 * lets go of the one it had. */
void tddp_rb_adopt_store(VALUE object, tddp_store *store);
tddp_group *tddp_rb_group(VALUE object);

/* A Torch::Distributed::Store with a reference of its own. */
VALUE tddp_rb_wrap_store(tddp_store *store);

/*
 * Takes over a fresh work on the memory of these operands, each a Torch::Tensor, an Array of them
 * that nobody else has, or nil. Returns a Torch::Distributed::Work if `async`; else waits and
 * returns nil, or the sender's rank for a recv, or raises. The tensors and their memory live until
 * the operation is done, whatever becomes of the caller.
 */
VALUE tddp_rb_take_work(tddp_work *work, VALUE output, VALUE input, bool async);

/* --- ddp.c ----------------------------------------------------------------------------------- */

/* That of a GradientSync, borrowed. */
const tddp_reducer *tddp_rb_reducer(VALUE sync);

/* --- inside.c -------------------------------------------------------------------------------- */

/* Runs Ruby code in the midst of libtorch's backward: what it raises becomes a status, and the
 * cause of what backward raises. `what` is its name for messages. */
tddp_status tddp_rb_inside(VALUE (*body)(VALUE data), void *data, const char *what);

/* Whether this thread may run Ruby code now. */
int tddp_rb_may_run(void);

/* Keeps an object from the collector until it is released, by any thread. */
typedef struct tddp_rb_root tddp_rb_root;
tddp_rb_root *tddp_rb_root_new(VALUE value);
VALUE tddp_rb_root_value(const tddp_rb_root *root);
void tddp_rb_root_release(tddp_rb_root *root);

/* --- comm_hook.c, grad_bucket.c --------------------------------------------------------------- */

/* The hook behind a CommHook, borrowed; TypeError for anything else. */
tddp_comm_hook *tddp_rb_comm_hook(VALUE object);

/* Whether a hook is running that can be left where it waits; whether it is to be, as an interrupt
 * has come since it was resumed; and leaves it there, until the next forward goes on with it. */
bool tddp_rb_in_hook(void);
bool tddp_rb_hook_interrupted(void);
void tddp_rb_leave_hook(void);

/* What the ranks compare of the bucket whose hook is running, for the first operation that asks;
 * NULL: nothing. Borrowed until the hook is left. */
const char *tddp_rb_hook_description(void);

/* A GradBucket of the bucket whose hook is being called, and to make a tensor's elements its. */
VALUE tddp_rb_grad_bucket(const tddp_bucket *bucket);
void tddp_rb_grad_bucket_fill(VALUE grad_bucket, VALUE tensor);

/* --- operands.c ------------------------------------------------------------------------------ */

/* A tensor's memory. What cannot be taken raises an error that begins with the argument's name. */
tddp_buffer tddp_rb_buffer(VALUE tensor, const char *name);

/* The same; false if the tensor is strided, but not contiguous. */
bool tddp_rb_contiguous(VALUE tensor, const char *name, tddp_buffer *buffer);

/* The handles of an Array of tensors, in tddp_rb_scratch() memory; borrowed as the tensors are. */
tddp_tensor **tddp_rb_tensors(VALUE list, volatile VALUE *holder, size_t *count);

/* That of an Array of tensors, in tddp_rb_scratch() memory; NULL and no count for nil. */
tddp_buffer *tddp_rb_buffers(VALUE list, const char *name, volatile VALUE *holder, size_t *count);

/* That of one tensor in pieces of so many elements each (an Array), one after the other. */
tddp_buffer *tddp_rb_pieces(VALUE tensor, const char *name, VALUE counts, volatile VALUE *holder,
                            size_t *count);

/* What the ranks compare with an operation that begins now: dtype and shape of these tensors (one,
 * an Array; nil: nothing) if operations are described at all, else what goes with the first one of
 * a communication hook. Lives as long as `*text`; NULL: nothing. */
const char *tddp_rb_description(VALUE operand, VALUE *text);
bool tddp_rb_detail(void);

/* --- tensor_bridge.cc ------------------------------------------------------------------------ */

/* The tensor in a Torch::Tensor (or Parameter), borrowed for as long as the object lives; TypeError
 * for anything else, naming it. */
tddp_tensor *tddp_rb_tensor(VALUE object);

/* An empty Torch::Tensor of its own, to be assigned; those of an Array, assigned already. */
VALUE tddp_rb_fresh_tensor(void);
VALUE tddp_rb_fresh_tensors(VALUE array);

/* Whether both handles are of one tensor. */
bool tddp_rb_same_tensor(const tddp_tensor *a, const tddp_tensor *b);

/* How a tensor lies in memory. */
typedef enum tddp_rb_form {
    TDDP_RB_FORM_PLAIN,  /* in one piece, or not strided at all */
    TDDP_RB_FORM_APART,  /* with gaps, or in another order than that of its elements */
    TDDP_RB_FORM_FOLDED, /* some of its elements share their memory, as after expand */
} tddp_rb_form;

tddp_rb_form tddp_rb_tensor_form(const tddp_tensor *tensor);

/* How many dimensions it has; `*dims` is borrowed. */
size_t tddp_rb_shape(const tddp_tensor *tensor, const int64_t **dims);

/* How many threads libtorch uses inside an operation. */
void tddp_rb_set_num_threads(int count);
int tddp_rb_num_threads(void);

/* --- each file's classes and methods --------------------------------------------------------- */

void tddp_rb_init_error(void);
void tddp_rb_init_nogvl(void);
void tddp_rb_init_store(void);
void tddp_rb_init_store_kinds(VALUE store);
void tddp_rb_init_group(void);
void tddp_rb_init_collectives(VALUE group);
void tddp_rb_init_operands(void);
void tddp_rb_init_shared(VALUE group);
void tddp_rb_init_work(void);
void tddp_rb_init_ddp(void);
void tddp_rb_init_optim(void);
void tddp_rb_init_norm(void);
void tddp_rb_init_parallel(void);
void tddp_rb_init_ddp_facts(VALUE sync);
void tddp_rb_init_inside(void);
void tddp_rb_init_comm_hook(void);
void tddp_rb_init_grad_bucket(void);
void tddp_rb_init_checkpoint(void);
void tddp_rb_init_recorder(void);
void tddp_rb_init_trace(void);
void tddp_rb_init_heap(void);
void tddp_rb_init_tensor(void);
void tddp_rb_init_rng(void);
void tddp_rb_init_tensor_file(void);

#ifdef __cplusplus
}
#endif

#endif
