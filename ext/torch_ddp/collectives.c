/*
 * The operations of Torch::Distributed::ProcessGroup over <tddp/group.h>. One table has a row for
 * each method: its arguments, and the call. Entered by Ruby threads that hold the GVL; queueing
 * blocks only while ranks connect on a device, waiting is work.c's. Leaves the choice of a group,
 * ranks, kinds of reduction by name, lists that must fit and memory that is not contiguous to
 * lib/torch. Lists are Arrays that nobody else has, nil where this rank has no pieces.
 */
#include "torch_ddp.h"

/* How long an operation that is waited for at once waits for other ranks before the GVL is let go
 * of, and where no other Ruby thread could use it. A small operation whose peers are there takes
 * less than letting go of the GVL does. */
enum { INLINE_US = 20, INLINE_ALONE_US = 200 };

/* The arguments of one call, read. */
typedef struct operation {
    bool apart;           /* the tensor that is written is not contiguous: nothing is queued */
    tddp_tensor *written; /* what `output` is, if it is one tensor */
    tddp_op_args args;
    VALUE output, input;                        /* a tensor, an Array of them, or nil */
    volatile VALUE output_memory, input_memory; /* of their lists */
} operation;

/* Which argument the ranks compare when TORCH_DISTRIBUTED_DEBUG is DETAIL. */
typedef enum described { NOTHING, OUTPUT, INPUT } described;

/*
 * `arguments` has a letter for each argument before the last, which is `async`:
 *   o i  a tensor that is written, or read          O I  an Array of them, or nil
 *   P Q  a tensor that is written, or read, in pieces: two arguments, the second their counts
 *   r    a reduction, as ReduceOp.resolve takes it
 *   k    the root     s  the sender, nil for any     d  the receiver
 *   g    a tag        t  a timeout in seconds, or nil
 */
typedef struct method {
    const char *name;
    tddp_op_kind kind;
    const char *arguments;
    const char *output; /* what messages call them */
    const char *input;
    described described;
    ID id;
    int arity; /* `async` included */
} method;

static method methods[] = {
    {"_all_reduce", TDDP_OP_ALL_REDUCE, "or", "tensor", NULL, OUTPUT, 0, 0},
    {"_all_reduce_coalesced", TDDP_OP_ALL_REDUCE, "Or", "tensors", NULL, OUTPUT, 0, 0},
    {"_reduce", TDDP_OP_REDUCE, "okr", "tensor", NULL, OUTPUT, 0, 0},
    {"_broadcast", TDDP_OP_BROADCAST, "ok", "tensor", NULL, OUTPUT, 0, 0},
    {"_barrier", TDDP_OP_BARRIER, "t", NULL, NULL, NOTHING, 0, 0},
    {"_all_gather", TDDP_OP_ALL_GATHER, "oi", "output", "input", INPUT, 0, 0},
    {"_all_gather_list", TDDP_OP_ALL_GATHER, "Oi", "tensor_list", "tensor", OUTPUT, 0, 0},
    {"_gather", TDDP_OP_GATHER, "Oik", "gather_list", "tensor", NOTHING, 0, 0},
    {"_gather_pieces", TDDP_OP_GATHER, "Pik", "output", "input", NOTHING, 0, 0},
    {"_scatter", TDDP_OP_SCATTER, "oIk", "tensor", "scatter_list", NOTHING, 0, 0},
    {"_reduce_scatter", TDDP_OP_REDUCE_SCATTER, "oir", "output", "input", OUTPUT, 0, 0},
    {"_reduce_scatter_list", TDDP_OP_REDUCE_SCATTER, "oIr", "output", "input_list", INPUT, 0, 0},
    {"_all_to_all", TDDP_OP_ALL_TO_ALL, "OI", "output_tensor_list", "input_tensor_list", NOTHING, 0,
     0},
    {"_all_to_all_pieces", TDDP_OP_ALL_TO_ALL, "PQ", "output", "input", NOTHING, 0, 0},
    {"_send", TDDP_OP_SEND, "idg", NULL, "tensor", NOTHING, 0, 0},
    /* Its work, or its value where it is waited for, is the sender's rank. */
    {"_recv", TDDP_OP_RECV, "osg", "tensor", NULL, NOTHING, 0, 0},
};

enum { METHODS = sizeof methods / sizeof methods[0] };

/* --- arguments ------------------------------------------------------------------------------- */

/* Whether the tensor that is written is contiguous. */
static bool read_output(operation *op, VALUE object, const char *name)
{
    op->output = object;
    op->written = tddp_rb_contiguous(object, name, &op->args.output);
    op->apart = op->written == NULL;
    return !op->apart;
}

/* Most are numbers already. */
static void read_reduction(tddp_op_args *args, VALUE reduction)
{
    if (FIXNUM_P(reduction) && FIX2LONG(reduction) >= 0 &&
        FIX2LONG(reduction) < TDDP_REDUCE_PREMUL_SUM) {
        args->reduce = (tddp_reduce_op)FIX2LONG(reduction);
        args->premul = 0;
        return;
    }
    VALUE reduce_op = rb_const_get(tddp_rb_distributed, rb_intern("ReduceOp"));
    VALUE resolved = rb_funcall(reduce_op, rb_intern("resolve"), 1, reduction);
    args->reduce = (tddp_reduce_op)NUM2INT(rb_ary_entry(resolved, 0));
    args->premul = NUM2DBL(rb_ary_entry(resolved, 1));
}

/* Reads what a letter stands for; returns the next argument. */
static const VALUE *read_argument(const method *method, char letter, const VALUE *at, operation *op)
{
    tddp_op_args *args = &op->args;
    VALUE first = *at++;
    switch (letter) {
    case 'o':
        read_output(op, first, method->output);
        break;
    case 'i':
        op->input = first;
        args->input = tddp_rb_buffer(first, method->input);
        break;
    case 'O':
        op->output = first;
        args->outputs =
            tddp_rb_buffers(first, method->output, &op->output_memory, &args->output_count);
        break;
    case 'I':
        op->input = first;
        args->inputs = tddp_rb_buffers(first, method->input, &op->input_memory, &args->input_count);
        break;
    case 'P':
        if (read_output(op, first, method->output))
            args->outputs =
                tddp_rb_pieces(first, method->output, *at, &op->output_memory, &args->output_count);
        at++;
        break;
    case 'Q':
        op->input = first;
        args->inputs =
            tddp_rb_pieces(first, method->input, *at++, &op->input_memory, &args->input_count);
        break;
    case 'r':
        read_reduction(args, first);
        break;
    case 'k':
        args->root = NUM2INT(first);
        break;
    case 's':
        args->peer = NIL_P(first) ? TDDP_ANY_SOURCE : NUM2INT(first);
        break;
    case 'd':
        args->peer = NUM2INT(first);
        break;
    case 'g':
        args->tag = NUM2UINT(first);
        break;
    default: /* t */
        args->timeout_ms = tddp_rb_milliseconds(first);
        break;
    }
    return at;
}

static int arity_of(const method *method)
{
    int count = 1; /* async */
    for (const char *letter = method->arguments; *letter; letter++)
        count += strchr("PQ", *letter) ? 2 : 1;
    return count;
}

/* Whether the operation writes into this rank's output: of a broadcast the root's is only read. */
static bool writes(const tddp_op_args *args, const tddp_group *group)
{
    return args->kind != TDDP_OP_BROADCAST || args->root != tddp_group_rank(group);
}

/* --- methods --------------------------------------------------------------------------------- */

static const method *find_method(ID id)
{
    for (size_t i = 0; i < METHODS; i++)
        if (methods[i].id == id)
            return &methods[i];
    rb_bug("torch_ddp: no operation is called %s", rb_id2name(id));
}

/* What may be queued: one operation, or messages. */
typedef struct submission {
    tddp_group *group;
    tddp_op_args *args;
    size_t messages; /* 0: one operation */
    tddp_work **works;
    tddp_status status; /* with its text on this thread */
} submission;

static tddp_status body_submit(void *data, const tddp_wait *wait)
{
    submission *call = data;
    call->args->cancel = wait->cancel;
    call->status = call->messages > 0
                       ? tddp_batch_send_recv(call->group, call->args, call->messages, call->works)
                       : tddp_submit(call->group, call->args, call->works);
    /* A timeout is the operation's, not that of a slice of the wait. */
    return call->status == TDDP_CANCELED ? TDDP_CANCELED : TDDP_OK;
}

/* Submits with the GVL, unless that may wait for other ranks. An interrupt then raises here if
 * nothing has begun; else it is pending, and the works go on. */
static void submit(submission call)
{
    const tddp_wait at_once = {0, NULL};
    if (!tddp_submit_blocks(call.group, call.args)) {
        (void)body_submit(&call, &at_once);
    } else {
        tddp_rb_raise_outcome(tddp_rb_blocking_with(call.group, body_submit, &call, -1, false));
    }
    tddp_rb_check(call.status);
}

/* Every method of the table; which one, Ruby knows. :apart in place of a result: nothing was done,
 * since the tensor to be written is not contiguous. */
static VALUE perform(int argc, VALUE *argv, VALUE self)
{
    const method *method = find_method(rb_frame_this_func());
    operation op = {.args = TDDP_OP_ARGS_INIT, .output = Qnil, .input = Qnil};
    VALUE text = Qnil;
    tddp_work *work;
    rb_check_arity(argc, method->arity, method->arity);
    op.args.kind = method->kind;
    const VALUE *at = argv;
    for (const char *letter = method->arguments; *letter; letter++)
        at = read_argument(method, *letter, at, &op);
    if (op.apart)
        return ID2SYM(rb_intern("apart")); /* lib/torch calls again with a copy */
    bool async = RTEST(*at);
    op.args.inline_us = async ? 0 : rb_thread_alone() ? INLINE_ALONE_US : INLINE_US;
    op.args.description = tddp_rb_description(method->described == OUTPUT  ? op.output
                                              : method->described == INPUT ? op.input
                                                                           : Qnil,
                                              &text);
    tddp_group *group = tddp_rb_group(self);
    const bool written = writes(&op.args, group); /* another thread may destroy it meanwhile */
    submit((submission){group, &op.args, 0, &work, TDDP_OK});
    RB_GC_GUARD(text);
    tddp_rb_scratch_end(&op.output_memory);
    tddp_rb_scratch_end(&op.input_memory);
    if (written && op.written != NULL)
        tddp_rb_check(tddp_tensor_written(op.written));
    else if (written)
        tddp_rb_written(op.output);
    return tddp_rb_take_work(work, op.output, op.input, async);
}

/* --- messages that begin together ------------------------------------------------------------- */

/* [whether it is sent, its tensor, which is contiguous, the other's rank or nil, its tag] */
static tddp_op_args read_message(VALUE message)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    const bool sends = RTEST(rb_ary_entry(message, 0));
    const VALUE peer = rb_ary_entry(message, 2);
    const tddp_buffer buffer = tddp_rb_buffer(rb_ary_entry(message, 1), "tensor");
    args.kind = sends ? TDDP_OP_SEND : TDDP_OP_RECV;
    *(sends ? &args.input : &args.output) = buffer;
    args.peer = NIL_P(peer) ? TDDP_ANY_SOURCE : NUM2INT(peer);
    args.tag = NUM2UINT(rb_ary_entry(message, 3));
    return args;
}

/* An Array of messages; returns their works. */
static VALUE group_batch(VALUE self, VALUE messages)
{
    const long count = RARRAY_LEN(messages);
    TDDP_RB_SCRATCH args_memory = 0, works_memory = 0;
    tddp_op_args *args = tddp_rb_scratch(&args_memory, count, sizeof(*args));
    tddp_work **works = tddp_rb_scratch(&works_memory, count, sizeof(*works));
    VALUE result = rb_ary_new_capa(count);
    if (count == 0)
        return result;
    for (long i = 0; i < count; i++)
        args[i] = read_message(rb_ary_entry(messages, i));
    submit((submission){tddp_rb_group(self), args, (size_t)count, works, TDDP_OK});
    for (long i = 0; i < count; i++) {
        const VALUE tensor = rb_ary_entry(rb_ary_entry(messages, i), 1);
        const bool sends = args[i].kind == TDDP_OP_SEND;
        tddp_rb_written(sends ? Qnil : tensor);
        rb_ary_push(result, tddp_rb_take_work(works[i], sends ? Qnil : tensor,
                                              sends ? tensor : Qnil, true));
    }
    return result;
}

/* --- the monitored barrier, which is no work ------------------------------------------------- */

typedef struct monitored_call {
    tddp_group *group;
    int64_t timeout_ms;
    int wait_all_ranks;
} monitored_call;

static tddp_status body_monitored_barrier(void *data, const tddp_wait *wait)
{
    const monitored_call *call = data;
    return tddp_monitored_barrier(call->group, call->timeout_ms, call->wait_all_ranks, wait);
}

static VALUE group_monitored_barrier(VALUE self, VALUE timeout, VALUE wait_all_ranks)
{
    monitored_call call = {tddp_rb_group(self), tddp_rb_milliseconds(timeout),
                           RTEST(wait_all_ranks)};
    tddp_rb_raise_outcome(
        tddp_rb_blocking_with(call.group, body_monitored_barrier, &call, -1, true));
    return Qnil;
}

void tddp_rb_init_collectives(void)
{
    VALUE group = rb_define_class_under(tddp_rb_distributed, "ProcessGroup", rb_cObject);
    for (size_t i = 0; i < METHODS; i++) {
        methods[i].id = rb_intern(methods[i].name);
        methods[i].arity = arity_of(&methods[i]);
        rb_define_method(group, methods[i].name, perform, -1);
    }
    rb_define_method(group, "_batch", group_batch, 1);
    rb_define_method(group, "_monitored_barrier", group_monitored_barrier, 2);
}
