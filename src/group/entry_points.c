/*
 * The public functions that start operations: tddp_submit() for all kinds and options, and one for
 * each kind with the arguments that most callers need. Any thread.
 */
#include <stdlib.h>

#include "base/options.h"
#include "group/checks.h"

/* `listed`: the arguments have buffers in a list, where their kind may have one instead. */
static tddp_status start(tddp_group *group, const tddp_op_args *args, bool listed, tddp_work **work)
{
    tddp_op op;
    tddp_status status = tddp_group_check_call(group, args->kind);
    status = status ? status : tddp_group_hold(group, tddp_op_name(args->kind));
    if (status) {
        return status;
    }
    status = tddp_group_read_args(group, args, listed, &op);
    if (status == TDDP_OK) {
        status = tddp_op_is_p2p(args->kind) ? tddp_group_send_or_recv(group, &op, args, work)
                 : args->kind == TDDP_OP_ALL_REDUCE && listed
                     ? tddp_group_all_reduce_list(group, &op, args, work)
                     : tddp_group_submit(group, &op, args, work);
    }
    tddp_group_let_go(group);
    return status;
}

/* --- any operation --------------------------------------------------------------------------- */

void tddp_op_args_init(tddp_op_args *args, size_t size)
{
    const tddp_op_args defaults = TDDP_OP_ARGS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, args, size);
}

int tddp_submit_blocks(const tddp_group *group, const tddp_op_args *args)
{
    if (!group->launches || (unsigned)args->kind >= TDDP_OP_COUNT) {
        return 0; /* the way of small operations; or an error */
    }
    const tddp_op op = {.kind = args->kind,
                        .input = args->input,
                        .output = args->output,
                        .input_parts = args->input_count > 0 ? args->inputs : NULL,
                        .output_parts = args->output_count > 0 ? args->outputs : NULL};
    return tddp_group_is_launched(group, &op);
}

tddp_status tddp_submit(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_op_args all = TDDP_OP_ARGS_INIT;
    tddp_status status = tddp_opts_read("TDDP_OP_ARGS_INIT", args,
                                        TDDP_OPTS_UNTIL(tddp_op_args, cancel), &all, sizeof all);
    if (status) {
        return status;
    }
    if ((unsigned)all.kind >= TDDP_OP_COUNT) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "operation of kind %d: expected 0 to %d",
                         (int)all.kind, (int)TDDP_OP_COUNT - 1);
    }
    const bool takes_inputs = tddp_op_row_of(all.kind)->input == TDDP_SIDE_PARTS;
    return start(group, &all, takes_inputs ? all.inputs != NULL : all.outputs != NULL, work);
}

tddp_status tddp_batch_send_recv(tddp_group *group, const tddp_op_args *messages, size_t count,
                                 tddp_work **works)
{
    tddp_op_args *all = tddp_alloc_array(count + 1, sizeof *all);
    tddp_status status = all ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && (!messages || !works || count == 0)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "%s: expected one or more",
                           !messages ? "messages is NULL"
                           : !works  ? "works is NULL"
                                     : "a batch of 0 messages");
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        all[i] = (tddp_op_args)TDDP_OP_ARGS_INIT;
        /* They lie one after the other as large as the caller's header says. */
        const void *at = (const char *)messages + i * messages->size;
        status = tddp_opts_read("TDDP_OP_ARGS_INIT", at, TDDP_OPTS_UNTIL(tddp_op_args, cancel),
                                &all[i], sizeof all[i]);
        if (status == TDDP_OK && all[i].kind != TDDP_OP_SEND && all[i].kind != TDDP_OP_RECV) {
            status = tddp_fail(TDDP_INVALID_ARGUMENT,
                               "message %zu of a batch is of kind %d: expected a send or a recv", i,
                               (int)all[i].kind);
        }
        status = status ? status : tddp_group_check_call(group, all[i].kind);
    }
    status = status ? status : tddp_group_hold(group, "a batch of messages");
    if (status == TDDP_OK) {
        status = tddp_group_batch(group, all, count, works);
        tddp_group_let_go(group);
    }
    free(all);
    return status;
}

/* --- each kind ------------------------------------------------------------------------------- */

/* Sets the options to none. What the kind does not use stays unset: clearing it would be a
 * noticeable part of a small operation's time. */
static void init_args(tddp_op_args *args, tddp_op_kind kind)
{
    args->kind = kind;
    args->timeout_ms = 0;
    args->description = NULL;
    args->inline_us = 0;
    args->cancel = NULL;
}

tddp_status tddp_all_reduce(tddp_group *group, tddp_buffer buffer, tddp_reduce_op op, double premul,
                            tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_ALL_REDUCE);
    args.output = buffer;
    args.reduce = op;
    args.premul = premul;
    return start(group, &args, false, work);
}

tddp_status tddp_all_reduce_coalesced(tddp_group *group, const tddp_buffer *buffers, size_t count,
                                      tddp_reduce_op op, double premul, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_ALL_REDUCE);
    args.outputs = buffers;
    args.output_count = count;
    args.reduce = op;
    args.premul = premul;
    return start(group, &args, true, work);
}

tddp_status tddp_reduce(tddp_group *group, tddp_buffer buffer, tddp_reduce_op op, double premul,
                        int root, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_REDUCE);
    args.output = buffer;
    args.reduce = op;
    args.premul = premul;
    args.root = root;
    return start(group, &args, false, work);
}

tddp_status tddp_broadcast(tddp_group *group, tddp_buffer buffer, int root, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_BROADCAST);
    args.output = buffer;
    args.root = root;
    return start(group, &args, false, work);
}

tddp_status tddp_barrier(tddp_group *group, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_BARRIER);
    return start(group, &args, false, work);
}

tddp_status tddp_all_gather(tddp_group *group, tddp_buffer input, tddp_buffer output,
                            tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_ALL_GATHER);
    args.input = input;
    args.output = output;
    return start(group, &args, false, work);
}

tddp_status tddp_all_gather_list(tddp_group *group, tddp_buffer input, const tddp_buffer *outputs,
                                 size_t count, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_ALL_GATHER);
    args.input = input;
    args.outputs = outputs;
    args.output_count = count;
    return start(group, &args, true, work);
}

tddp_status tddp_gather(tddp_group *group, tddp_buffer input, const tddp_buffer *outputs,
                        size_t count, int root, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_GATHER);
    args.input = input;
    args.outputs = outputs;
    args.output_count = count;
    args.root = root;
    return start(group, &args, true, work);
}

tddp_status tddp_scatter(tddp_group *group, tddp_buffer output, const tddp_buffer *inputs,
                         size_t count, int root, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_SCATTER);
    args.output = output;
    args.inputs = inputs;
    args.input_count = count;
    args.root = root;
    return start(group, &args, true, work);
}

tddp_status tddp_reduce_scatter(tddp_group *group, tddp_buffer input, tddp_buffer output,
                                tddp_reduce_op op, double premul, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_REDUCE_SCATTER);
    args.input = input;
    args.output = output;
    args.reduce = op;
    args.premul = premul;
    return start(group, &args, false, work);
}

tddp_status tddp_reduce_scatter_list(tddp_group *group, const tddp_buffer *inputs, size_t count,
                                     tddp_buffer output, tddp_reduce_op op, double premul,
                                     tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_REDUCE_SCATTER);
    args.inputs = inputs;
    args.input_count = count;
    args.output = output;
    args.reduce = op;
    args.premul = premul;
    return start(group, &args, true, work);
}

tddp_status tddp_all_to_all(tddp_group *group, const tddp_buffer *inputs,
                            const tddp_buffer *outputs, size_t count, tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_ALL_TO_ALL);
    args.inputs = inputs;
    args.input_count = count;
    args.outputs = outputs;
    args.output_count = count;
    return start(group, &args, true, work);
}

tddp_status tddp_send(tddp_group *group, tddp_buffer buffer, int peer, uint32_t tag,
                      tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_SEND);
    args.input = buffer;
    args.peer = peer;
    args.tag = tag;
    return start(group, &args, false, work);
}

tddp_status tddp_recv(tddp_group *group, tddp_buffer buffer, int peer, uint32_t tag,
                      tddp_work **work)
{
    tddp_op_args args;
    init_args(&args, TDDP_OP_RECV);
    args.output = buffer;
    args.peer = peer;
    args.tag = tag;
    return start(group, &args, false, work);
}
