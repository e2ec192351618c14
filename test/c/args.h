/* Arguments of operations: sums with options, and messages. */
#ifndef TDDP_TEST_ARGS_H
#define TDDP_TEST_ARGS_H

#include <tddp/group.h>

static inline tddp_op_args sum_args(tddp_buffer buffer)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.output = buffer;
    return args;
}

static inline tddp_status described_sum(tddp_group *group, tddp_buffer buffer, const char *text)
{
    tddp_op_args args = sum_args(buffer);
    args.description = text;
    return tddp_submit(group, &args, NULL);
}

static inline tddp_status inline_sum(tddp_group *group, tddp_buffer buffer, int64_t microseconds,
                                     tddp_cancel *cancel, tddp_work **work)
{
    tddp_op_args args = sum_args(buffer);
    args.inline_us = microseconds;
    args.cancel = cancel;
    return tddp_submit(group, &args, work);
}

static inline tddp_op_args message_to(tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_SEND;
    args.input = buffer;
    args.peer = peer;
    args.tag = tag;
    return args;
}

static inline tddp_op_args message_from(tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_RECV;
    args.output = buffer;
    args.peer = peer;
    args.tag = tag;
    return args;
}

#endif
