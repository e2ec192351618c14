/*
 * The operations of Torch::Distributed::ProcessGroup over <tddp/group.h>. One table has a row for
 * each method: its arguments, and the call. Entered by Ruby threads that hold the GVL; queueing
 * does not block, waiting is work.c's. Leaves the choice of a group, ranks, kinds of reduction by
 * name, lists that must fit and memory that is not contiguous to lib/torch. Lists are Arrays that
 * nobody else has, nil where this rank has no pieces.
 */
#include "torch_ddp.h"

/* One side of an operation: where results go, or where values come from. */
typedef struct side {
    VALUE object; /* a tensor, an Array of them, or nil */
    tddp_buffer *buffers;
    size_t count;
    tddp_buffer single; /* what `buffers` points to where there is one tensor */
    VALUE memory;
} side;

/* The arguments of one call, read. */
typedef struct operation {
    bool apart; /* the tensor that is written is not contiguous: nothing is queued */
    tddp_group *group;
    side to;
    side from;
    tddp_reduce_op kind;
    double factor;
    int rank; /* the root, or the peer */
    uint32_t tag;
    int64_t timeout_ms;
} operation;

/* Which argument the ranks compare when TORCH_DISTRIBUTED_DEBUG is DETAIL. */
typedef enum described { NOTHING, OUTPUT, INPUT } described;

/*
 * `arguments` has a letter for each argument before the last, which is `async`:
 *   o i  a tensor that is written, or read          O I  an Array of them, or nil
 *   P Q  a tensor that is written, or read, in pieces: two arguments, the second their counts
 *   r    a reduction: two arguments, its number and its factor
 *   k    the root     s  the sender, nil for any     d  the receiver
 *   g    a tag        t  a timeout in seconds, or nil
 */
typedef struct method {
    const char *name;
    const char *arguments;
    const char *output; /* what messages call them */
    const char *input;
    described described;
    tddp_status (*call)(const operation *op, tddp_work **work);
    ID id;
    int arity; /* `async` included */
} method;

/* --- calls, each of which queues an operation ------------------------------------------------ */

static tddp_status start_all_reduce(const operation *op, tddp_work **work)
{
    return tddp_all_reduce(op->group, op->to.buffers[0], op->kind, op->factor, work);
}

static tddp_status start_all_reduce_coalesced(const operation *op, tddp_work **work)
{
    return tddp_all_reduce_coalesced(op->group, op->to.buffers, op->to.count, op->kind, op->factor,
                                     work);
}

static tddp_status start_reduce(const operation *op, tddp_work **work)
{
    return tddp_reduce(op->group, op->to.buffers[0], op->kind, op->factor, op->rank, work);
}

static tddp_status start_broadcast(const operation *op, tddp_work **work)
{
    return tddp_broadcast(op->group, op->to.buffers[0], op->rank, work);
}

static tddp_status start_barrier(const operation *op, tddp_work **work)
{
    return tddp_barrier_within(op->group, op->timeout_ms, work);
}

static tddp_status start_all_gather(const operation *op, tddp_work **work)
{
    return tddp_all_gather(op->group, op->from.buffers[0], op->to.buffers[0], work);
}

static tddp_status start_all_gather_list(const operation *op, tddp_work **work)
{
    return tddp_all_gather_list(op->group, op->from.buffers[0], op->to.buffers, op->to.count, work);
}

static tddp_status start_gather(const operation *op, tddp_work **work)
{
    return tddp_gather(op->group, op->from.buffers[0], op->to.buffers, op->to.count, op->rank,
                       work);
}

static tddp_status start_scatter(const operation *op, tddp_work **work)
{
    return tddp_scatter(op->group, op->to.buffers[0], op->from.buffers, op->from.count, op->rank,
                        work);
}

static tddp_status start_reduce_scatter(const operation *op, tddp_work **work)
{
    return tddp_reduce_scatter(op->group, op->from.buffers[0], op->to.buffers[0], op->kind,
                               op->factor, work);
}

static tddp_status start_reduce_scatter_list(const operation *op, tddp_work **work)
{
    return tddp_reduce_scatter_list(op->group, op->from.buffers, op->from.count, op->to.buffers[0],
                                    op->kind, op->factor, work);
}

static tddp_status start_all_to_all(const operation *op, tddp_work **work)
{
    if (op->to.count != op->from.count)
        rb_raise(rb_eArgError, "%zu outputs, but %zu inputs", op->to.count, op->from.count);
    return tddp_all_to_all(op->group, op->from.buffers, op->to.buffers, op->to.count, work);
}

static tddp_status start_send(const operation *op, tddp_work **work)
{
    return tddp_send(op->group, op->from.buffers[0], op->rank, op->tag, work);
}

/* Its work, or its value where it is waited for, is the sender's rank. */
static tddp_status start_recv(const operation *op, tddp_work **work)
{
    return tddp_recv(op->group, op->to.buffers[0], op->rank, op->tag, work);
}

static method methods[] = {
    {"_all_reduce", "or", "tensor", NULL, OUTPUT, start_all_reduce, 0, 0},
    {"_all_reduce_coalesced", "Or", "tensors", NULL, OUTPUT, start_all_reduce_coalesced, 0, 0},
    {"_reduce", "okr", "tensor", NULL, OUTPUT, start_reduce, 0, 0},
    {"_broadcast", "ok", "tensor", NULL, OUTPUT, start_broadcast, 0, 0},
    {"_barrier", "t", NULL, NULL, NOTHING, start_barrier, 0, 0},
    {"_all_gather", "oi", "output", "input", INPUT, start_all_gather, 0, 0},
    {"_all_gather_list", "Oi", "tensor_list", "tensor", OUTPUT, start_all_gather_list, 0, 0},
    {"_gather", "Oik", "gather_list", "tensor", NOTHING, start_gather, 0, 0},
    {"_gather_pieces", "Pik", "output", "input", NOTHING, start_gather, 0, 0},
    {"_scatter", "oIk", "tensor", "scatter_list", NOTHING, start_scatter, 0, 0},
    {"_reduce_scatter", "oir", "output", "input", OUTPUT, start_reduce_scatter, 0, 0},
    {"_reduce_scatter_list", "oIr", "output", "input_list", INPUT, start_reduce_scatter_list, 0, 0},
    {"_all_to_all", "OI", "output_tensor_list", "input_tensor_list", NOTHING, start_all_to_all, 0,
     0},
    {"_all_to_all_pieces", "PQ", "output", "input", NOTHING, start_all_to_all, 0, 0},
    {"_send", "idg", NULL, "tensor", NOTHING, start_send, 0, 0},
    {"_recv", "osg", "tensor", NULL, NOTHING, start_recv, 0, 0},
};

enum { METHODS = sizeof methods / sizeof methods[0] };

/* --- arguments ------------------------------------------------------------------------------- */

static void read_input(side *side, VALUE tensor, const char *name)
{
    side->object = tensor;
    side->single = tddp_rb_buffer(tensor, name);
    side->buffers = &side->single;
    side->count = 1;
}

/* The same of a tensor that is written; false if it is not contiguous. */
static bool read_output(side *side, VALUE tensor, const char *name)
{
    side->object = tensor;
    side->buffers = &side->single;
    side->count = 1;
    return tddp_rb_contiguous(tensor, name, &side->single);
}

static void read_list(side *side, VALUE list, const char *name)
{
    side->object = list;
    side->buffers = tddp_rb_buffers(list, name, &side->memory, &side->count);
}

static void read_pieces(side *side, VALUE tensor, VALUE counts, const char *name)
{
    side->object = tensor;
    side->buffers = tddp_rb_pieces(tensor, name, counts, &side->memory);
    side->count = (size_t)RARRAY_LEN(counts);
}

/* Reads what a letter stands for; returns the next argument. */
static const VALUE *read_argument(const method *method, char letter, const VALUE *at, operation *op)
{
    VALUE first = *at++;
    switch (letter) {
    case 'o':
        op->apart = !read_output(&op->to, first, method->output);
        break;
    case 'i':
        read_input(&op->from, first, method->input);
        break;
    case 'O':
        read_list(&op->to, first, method->output);
        break;
    case 'I':
        read_list(&op->from, first, method->input);
        break;
    case 'P':
        op->apart = !read_output(&op->to, first, method->output);
        if (!op->apart)
            read_pieces(&op->to, first, *at, method->output);
        at++;
        break;
    case 'Q':
        read_pieces(&op->from, first, *at++, method->input);
        break;
    case 'r':
        op->kind = (tddp_reduce_op)NUM2INT(first);
        op->factor = NUM2DBL(*at++);
        break;
    case 's':
        op->rank = NIL_P(first) ? TDDP_ANY_SOURCE : NUM2INT(first);
        break;
    case 'g':
        op->tag = NUM2UINT(first);
        break;
    case 't':
        op->timeout_ms = tddp_rb_milliseconds(first);
        break;
    default: /* k, d */
        op->rank = NUM2INT(first);
        break;
    }
    return at;
}

static int arity_of(const method *method)
{
    int count = 1; /* async */
    for (const char *letter = method->arguments; *letter; letter++)
        count += strchr("PQr", *letter) ? 2 : 1;
    return count;
}

/* --- methods --------------------------------------------------------------------------------- */

static const method *find_method(ID id)
{
    for (size_t i = 0; i < METHODS; i++)
        if (methods[i].id == id)
            return &methods[i];
    rb_bug("torch_ddp: no operation is called %s", rb_id2name(id));
}

/* Every method of the table; which one, Ruby knows. :apart in place of a result: nothing was done,
 * since the tensor to be written is not contiguous. */
static VALUE perform(int argc, VALUE *argv, VALUE self)
{
    const method *method = find_method(rb_frame_this_func());
    operation op = {.to.object = Qnil, .from.object = Qnil};
    tddp_work *work;
    rb_check_arity(argc, method->arity, method->arity);
    const VALUE *at = argv;
    for (const char *letter = method->arguments; *letter; letter++)
        at = read_argument(method, *letter, at, &op);
    if (op.apart)
        return ID2SYM(rb_intern("apart")); /* lib/torch calls again with a copy */
    VALUE async = *at;
    op.group = tddp_rb_group(self);
    tddp_rb_describe(method->described == OUTPUT  ? op.to.object
                     : method->described == INPUT ? op.from.object
                                                  : Qnil,
                     async);
    tddp_rb_check(method->call(&op, &work));
    ALLOCV_END(op.to.memory);
    ALLOCV_END(op.from.memory);
    return tddp_rb_take_work(work, op.to.object, op.from.object, RTEST(async));
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
    tddp_group_retain(call.group); /* Another thread may destroy it meanwhile. */
    tddp_rb_outcome outcome = tddp_rb_blocking(body_monitored_barrier, &call, -1, true);
    tddp_group_release(call.group);
    tddp_rb_settle(outcome);
    return Qnil;
}

void tddp_rb_init_collectives(VALUE group)
{
    for (size_t i = 0; i < METHODS; i++) {
        methods[i].id = rb_intern(methods[i].name);
        methods[i].arity = arity_of(&methods[i]);
        rb_define_method(group, methods[i].name, perform, -1);
    }
    rb_define_method(group, "_monitored_barrier", group_monitored_barrier, 2);
}
