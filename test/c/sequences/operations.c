/* An operation on one rank: its operands, the call, the wait, what has come of it. */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "sequences/sequence.h"

/* How a rank waits; each for itself. */
typedef enum waiting {
    IN_THE_CALL,
    AT_ONCE,
    INLINE,
    LATER,
    LATER_TOO,
    INLINE_BRIEFLY,
    CANCELED_FIRST,
    SHORT_FIRST,
    BY_CALLBACK,
    WAYS
} waiting;

/* --- operands -------------------------------------------------------------------------------- */

static void lay_in(seq_call *call, const size_t *counts, int count, bool whole)
{
    seq_lay(call, call->in, counts, count, whole);
    call->ins = count;
}

static void lay_out(seq_call *call, const size_t *counts, int count, bool whole)
{
    seq_lay(call, call->out, counts, count, whole);
    call->outs = count;
}

/* What a rank gives may lie where it gets as much: the same memory given and got. */
static bool in_place(seq_call *call)
{
    return seq_once_in(&call->own, 4);
}

static void lay_gather(seq_call *call, bool whole, bool gets)
{
    const seq_op *op = call->op;
    const size_t own = op->counts[0][call->rank];
    if (gets) {
        lay_out(call, op->counts[0], call->size, whole);
    }
    if (gets && in_place(call)) {
        call->in[0] = call->out[call->rank];
        call->ins = 1;
    } else {
        lay_in(call, &own, 1, true);
    }
    seq_give(call, call->in[0], call->rank, 0);
}

static void lay_spread(seq_call *call, bool whole, bool gives)
{
    const seq_op *op = call->op;
    const size_t own = op->counts[0][call->rank];
    if (gives) {
        lay_in(call, op->counts[0], call->size, whole);
    }
    for (int part = 0; part < call->ins; part++) {
        seq_give(call, call->in[part], call->rank, part);
    }
    if (gives && in_place(call)) {
        call->out[0] = call->in[call->rank];
        call->outs = 1;
    } else {
        lay_out(call, &own, 1, true);
    }
}

static void lay_all_to_all(seq_call *call)
{
    size_t wanted[SEQ_RANKS];
    for (int peer = 0; peer < call->size; peer++) {
        wanted[peer] = call->op->counts[peer][call->rank];
    }
    lay_in(call, call->op->counts[call->rank], call->size, false);
    lay_out(call, wanted, call->size, false);
    if (in_place(call)) {
        call->in[call->rank] = call->out[call->rank];
    }
    for (int peer = 0; peer < call->size; peer++) {
        seq_give(call, call->in[peer], call->rank, peer);
    }
}

static void lay_messages(seq_call *call)
{
    for (int i = 0; i < call->op->messages; i++) {
        const seq_message *message = &call->op->message[i];
        if (message->from == call->rank) {
            seq_lay(call, &call->in[i], &message->count, 1, true);
            seq_give(call, call->in[i], call->rank, i);
        } else if (message->to == call->rank) {
            seq_lay(call, &call->out[i], &message->count, 1, true);
        }
    }
    call->ins = call->outs = call->op->messages;
}

static void lay(seq_call *call)
{
    const seq_op *op = call->op;
    const bool at_root = call->rank == op->root;
    switch (op->kind) {
    case SEQ_ALL_REDUCE:
    case SEQ_REDUCE:
    case SEQ_BROADCAST:
        lay_out(call, op->counts[0], 1, true);
        seq_give(call, call->out[0], call->rank, 0);
        break;
    case SEQ_COALESCED:
        lay_out(call, op->counts[0], op->parts, false);
        for (int part = 0; part < op->parts; part++) {
            seq_give(call, call->out[part], call->rank, part);
        }
        break;
    case SEQ_ALL_GATHER:
    case SEQ_ALL_GATHER_LIST:
        lay_gather(call, op->kind == SEQ_ALL_GATHER, true);
        break;
    case SEQ_GATHER:
        lay_gather(call, false, at_root);
        break;
    case SEQ_SCATTER:
        lay_spread(call, false, at_root);
        break;
    case SEQ_REDUCE_SCATTER:
    case SEQ_REDUCE_SCATTER_LIST:
        lay_spread(call, op->kind == SEQ_REDUCE_SCATTER, true);
        break;
    case SEQ_ALL_TO_ALL:
        lay_all_to_all(call);
        break;
    case SEQ_MESSAGES:
        lay_messages(call);
        break;
    default:
        break;
    }
}

/* --- what comes of it ------------------------------------------------------------------------ */

static void expect(seq_call *call)
{
    const seq_op *op = call->op;
    for (int part = 0; part < call->outs; part++) {
        switch (op->kind) {
        case SEQ_ALL_REDUCE:
        case SEQ_COALESCED:
            seq_expect_reduced(call, call->out[part], part);
            break;
        case SEQ_REDUCE:
            if (call->rank == op->root) {
                seq_expect_reduced(call, call->out[0], 0);
            }
            break;
        case SEQ_BROADCAST:
            seq_expect_copy(call, call->out[0], op->root, 0);
            break;
        case SEQ_ALL_GATHER:
        case SEQ_ALL_GATHER_LIST:
        case SEQ_GATHER:
            seq_expect_copy(call, call->out[part], part, 0);
            break;
        case SEQ_SCATTER:
            seq_expect_copy(call, call->out[0], op->root, call->rank);
            break;
        case SEQ_REDUCE_SCATTER:
        case SEQ_REDUCE_SCATTER_LIST:
            seq_expect_reduced(call, call->out[0], call->rank);
            break;
        case SEQ_ALL_TO_ALL:
            seq_expect_copy(call, call->out[part], part, call->rank);
            break;
        case SEQ_MESSAGES:
            if (op->message[part].to == call->rank) {
                seq_expect_copy(call, call->out[part], op->message[part].from, part);
            }
            break;
        default:
            break;
        }
    }
}

/* --- the call -------------------------------------------------------------------------------- */

static const tddp_op_kind kinds[SEQ_KINDS] = {
    [SEQ_ALL_REDUCE] = TDDP_OP_ALL_REDUCE,
    [SEQ_COALESCED] = TDDP_OP_ALL_REDUCE,
    [SEQ_REDUCE] = TDDP_OP_REDUCE,
    [SEQ_BROADCAST] = TDDP_OP_BROADCAST,
    [SEQ_BARRIER] = TDDP_OP_BARRIER,
    [SEQ_ALL_GATHER] = TDDP_OP_ALL_GATHER,
    [SEQ_ALL_GATHER_LIST] = TDDP_OP_ALL_GATHER,
    [SEQ_GATHER] = TDDP_OP_GATHER,
    [SEQ_SCATTER] = TDDP_OP_SCATTER,
    [SEQ_REDUCE_SCATTER] = TDDP_OP_REDUCE_SCATTER,
    [SEQ_REDUCE_SCATTER_LIST] = TDDP_OP_REDUCE_SCATTER,
    [SEQ_ALL_TO_ALL] = TDDP_OP_ALL_TO_ALL,
};

/* How many buffers are in the operation's list; 0: it has none on this rank. */
static size_t count_inputs(const seq_call *call)
{
    bool given = call->op->kind == SEQ_REDUCE_SCATTER_LIST || call->op->kind == SEQ_ALL_TO_ALL ||
                 (call->op->kind == SEQ_SCATTER && call->rank == call->op->root);
    return given ? (size_t)call->size : 0;
}

static size_t count_outputs(const seq_call *call)
{
    if (call->op->kind == SEQ_COALESCED) {
        return (size_t)call->op->parts;
    }
    bool got = call->op->kind == SEQ_ALL_GATHER_LIST || call->op->kind == SEQ_ALL_TO_ALL ||
               (call->op->kind == SEQ_GATHER && call->rank == call->op->root);
    return got ? (size_t)call->size : 0;
}

static tddp_op_args args_of(const seq_call *call)
{
    const seq_op *op = call->op;
    const size_t inputs = count_inputs(call);
    const size_t outputs = count_outputs(call);
    tddp_op_args args = {.size = sizeof args,
                         .kind = kinds[op->kind],
                         .input = call->in[0],
                         .output = call->out[0],
                         .inputs = inputs ? call->in : NULL,
                         .input_count = inputs,
                         .outputs = outputs ? call->out : NULL,
                         .output_count = outputs,
                         .reduce = op->reduce,
                         .premul = seq_factor(call->program, op, call->rank),
                         .root = op->root};
    if (op->kind == SEQ_ALL_GATHER) {
        args.output.count *= (size_t)call->size;
    } else if (op->kind == SEQ_REDUCE_SCATTER) {
        args.input.count *= (size_t)call->size;
    }
    return args;
}

/* Sends and receives in an order of this rank's; those that match in order stay in it. A carrier
 * that has one stream for both directions needs them in one batch, the others have them in one at
 * times. */
static void start_messages(seq_call *call)
{
    const seq_op *op = call->op;
    tddp_op_args args[SEQ_PARTS];
    size_t count = 0;
    bool started[SEQ_PARTS] = {0};
    for (int n = 0; n < op->messages; n++) {
        int i = (int)seq_below(&call->own, (uint32_t)op->messages);
        while (started[i]) {
            i = (i + 1) % op->messages;
        }
        for (int before = 0; before < i; before++) {
            const seq_message *a = &op->message[before];
            const seq_message *b = &op->message[i];
            if (!started[before] && a->from == b->from && a->to == b->to && a->tag == b->tag) {
                i = before;
            }
        }
        started[i] = true;
        const seq_message *it = &op->message[i];
        if (it->from == call->rank) {
            call->sources[count] = -1;
            args[count++] = message_to(call->in[i], it->to, it->tag);
        } else if (it->to == call->rank) {
            call->sources[count] = it->from;
            args[count++] =
                message_from(call->out[i], it->from_any ? TDDP_ANY_SOURCE : it->from, it->tag);
        }
    }
    const bool together = !call->program->carrier->any_source || seq_once_in(&call->own, 2);
    if (count > 0 && together) {
        CHECK_OK(tddp_batch_send_recv(call->group, args, count, call->works));
    }
    for (size_t i = 0; i < count && !together; i++) {
        CHECK_OK(tddp_submit(call->group, &args[i], &call->works[i]));
    }
    call->work_count = (int)count;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* What is not supported leaves the group as it was, and nothing changed. */
static void check_outcome(const seq_call *call, tddp_status status)
{
    char text[SEQ_TEXT];
    tddp_status expected = call->op->unsupported ? TDDP_UNSUPPORTED : TDDP_OK;
    if (status != expected) {
        seq_describe_op(call->program, call->op, text, sizeof text);
        check_failed(__FILE__, __LINE__, "%s: rank %d got %s (%s), expected %s", text, call->rank,
                     tddp_status_name(status), status ? tddp_error_message() : "",
                     tddp_status_name(expected));
    }
}

static void signal_done(void *data)
{
    sem_post(data);
}

static void wait_by_callback(seq_call *call, tddp_work *work)
{
    sem_t done;
    CHECK_INT(sem_init(&done, 0, 0), 0);
    CHECK_OK(tddp_work_on_done(work, signal_done, &done));
    while (sem_wait(&done)) {
    }
    check_outcome(call, tddp_work_status(work));
    CHECK_INT(sem_destroy(&done), 0);
}

/* A wait that ends by itself says nothing of the operation, which goes on. */
static void wait_in_vain(seq_call *call, tddp_work *work, waiting way)
{
    tddp_cancel *cancel = NULL;
    tddp_wait wait = {.timeout_ms = 1};
    if (way == CANCELED_FIRST) {
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_cancel_trigger(cancel);
        wait = (tddp_wait){.timeout_ms = 60000, .cancel = cancel};
    }
    tddp_status status = tddp_work_wait(work, &wait);
    tddp_status own = way == CANCELED_FIRST ? TDDP_CANCELED : TDDP_TIMEOUT;
    if (status != own) {
        check_outcome(call, status);
    }
    tddp_cancel_free(cancel);
}

static void finish_work(seq_call *call, tddp_work *work, waiting way)
{
    if (way == CANCELED_FIRST || way == SHORT_FIRST) {
        wait_in_vain(call, work, way);
    }
    if (way == BY_CALLBACK) {
        wait_by_callback(call, work);
    }
    check_outcome(call, tddp_work_wait(work, NULL));
    CHECK(tddp_work_completed(work));
}

void seq_end(seq_call *call)
{
    for (int left = call->work_count; left > 0; left--) {
        int i = (int)seq_below(&call->own, (uint32_t)left);
        finish_work(call, call->works[i], (waiting)seq_below(&call->own, WAYS));
        if (call->sources[i] >= 0) {
            CHECK_INT(tddp_work_source(call->works[i]), call->sources[i]);
        }
        tddp_work_release(call->works[i]);
        call->works[i] = call->works[left - 1];
        call->sources[i] = call->sources[left - 1];
    }
    if (call->op->unsupported) {
        seq_settle(call);
    } else {
        expect(call);
    }
    seq_check_rooms(call);
    seq_free_rooms(call);
}

bool seq_begin(seq_call *call, bool may_last)
{
    char text[64];
    lay(call);
    seq_set_rooms(call);
    waiting way = (waiting)seq_below(&call->own, WAYS);
    if (call->op->kind == SEQ_MESSAGES) {
        start_messages(call);
        return may_last && seq_once_in(&call->own, 2);
    }
    tddp_op_args args = args_of(call);
    if (call->op->described) {
        (void)snprintf(text, sizeof text, "operation %d", call->op->number);
        args.description = text;
    }
    if (way == INLINE || way == INLINE_BRIEFLY) {
        args.inline_us = way == INLINE ? -1 : 20;
    }
    tddp_work *work = NULL;
    tddp_status status = tddp_submit(call->group, &args, way == IN_THE_CALL ? NULL : &work);
    if (!work) { /* it was executed within the call */
        check_outcome(call, status);
    }
    if (work) {
        call->sources[0] = -1;
        call->works[call->work_count++] = work;
    }
    if (way == INLINE && work) {
        check_outcome(call, tddp_work_wait(work, NULL));
    }
    return work && may_last && (way == LATER || way == LATER_TOO);
}
