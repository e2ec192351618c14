/* Every operation on a bench, with values, lists, and the same memory as input and output. */
#ifndef TDDP_TEST_NCCL_STAGED_OPERATIONS_H
#define TDDP_TEST_NCCL_STAGED_OPERATIONS_H

#include "nccl/staged.h"

enum { MAX_EACH = 70003 };

static int32_t input_memory[MAX_RANKS * MAX_EACH + 64];
static int32_t output_memory[MAX_RANKS * MAX_EACH + 64];

static inline int32_t sum_of(const bench *self, int tag, size_t i)
{
    int32_t all = 0;
    for (int rank = 0; rank < self->ranks; rank++) {
        all += value_of(rank, tag, i);
    }
    return all;
}

static inline void check_sums(const bench *self, const int32_t *data, size_t count, int tag,
                              size_t from)
{
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(data[i], sum_of(self, tag, from + i));
    }
}

static inline void check_one_buffer(const bench *self, size_t count)
{
    const int last = self->ranks - 1;
    CHECK_OK(tddp_all_reduce(self->group, filled(self, input_memory, count, 1), TDDP_REDUCE_SUM, 0,
                             NULL));
    check_sums(self, input_memory, count, 1, 0);
    CHECK_OK(tddp_reduce(self->group, filled(self, input_memory, count, 2), TDDP_REDUCE_SUM, 0,
                         last, NULL));
    if (self->rank == last) {
        check_sums(self, input_memory, count, 2, 0);
    } else {
        check_values(input_memory, count, self->rank, 2);
    }
    CHECK_OK(tddp_broadcast(
        self->group, filled(self, input_memory, count, self->rank == last ? 3 : -1), last, NULL));
    check_values(input_memory, count, last, 3);
    CHECK_OK(tddp_barrier(self->group, NULL));
}

static inline void check_single_buffers(const bench *self, size_t each)
{
    const size_t all = each * (size_t)self->ranks;
    const size_t own = each * (size_t)self->rank;
    tddp_buffer whole = poisoned(self, output_memory, all);
    CHECK_OK(tddp_all_gather(self->group, filled(self, input_memory, each, 4), whole, NULL));
    for (int rank = 0; rank < self->ranks; rank++) {
        check_values(output_memory + each * (size_t)rank, each, rank, 4);
    }
    whole = poisoned(self, output_memory, all);
    CHECK_OK(tddp_all_gather(self->group, filled(self, output_memory + own, each, 5), whole, NULL));
    for (int rank = 0; rank < self->ranks; rank++) {
        check_values(output_memory + each * (size_t)rank, each, rank, 5);
    }
    whole = filled(self, input_memory, all, 6);
    CHECK_OK(tddp_reduce_scatter(self->group, whole, poisoned(self, output_memory, each),
                                 TDDP_REDUCE_SUM, 0, NULL));
    check_sums(self, output_memory, each, 6, own);
    whole = filled(self, input_memory, all, 7);
    CHECK_OK(tddp_reduce_scatter(self->group, whole, buffer_on(self, input_memory + own, each),
                                 TDDP_REDUCE_SUM, 0, NULL));
    check_sums(self, input_memory + own, each, 7, own);
}

/* A part of a list: with gaps between the parts, in descending order, each a little longer. */
static inline int32_t *part_at(const bench *self, int32_t *room, int part, size_t each)
{
    return room + (size_t)(self->ranks - 1 - part) * (each + 7);
}

static inline void check_gathers(const bench *self, size_t each)
{
    tddp_buffer parts[MAX_RANKS];
    for (int in_place = 0; in_place < 2; in_place++) {
        for (int part = 0; part < self->ranks; part++) {
            parts[part] =
                poisoned(self, part_at(self, output_memory, part, each), each + (size_t)part);
        }
        int32_t *own = in_place ? parts[self->rank].data : input_memory;
        own = own ? own : input_memory;
        const size_t count = each + (size_t)self->rank;
        const size_t ranks = (size_t)self->ranks;
        CHECK_OK(
            tddp_all_gather_list(self->group, filled(self, own, count, 8), parts, ranks, NULL));
        for (int part = 0; part < self->ranks; part++) {
            check_values(parts[part].data, parts[part].count, part, 8);
        }
        const bool at_root = self->rank == 0;
        CHECK_OK(tddp_gather(self->group, filled(self, own, count, 9), at_root ? parts : NULL,
                             at_root ? ranks : 0, 0, NULL));
        for (int part = 0; at_root && part < self->ranks; part++) {
            check_values(parts[part].data, parts[part].count, part, 9);
        }
    }
}

static inline void check_scatters(const bench *self, size_t each)
{
    tddp_buffer parts[MAX_RANKS];
    const int root = self->ranks - 1;
    const size_t ranks = (size_t)self->ranks;
    for (int in_place = 0; in_place < 2; in_place++) {
        const bool at_root = self->rank == root;
        for (int part = 0; part < self->ranks; part++) {
            parts[part] =
                filled(self, part_at(self, input_memory, part, each), each + (size_t)part, part);
        }
        const size_t count = each + (size_t)self->rank;
        bool same = in_place && at_root && count > 0;
        tddp_buffer own = same ? parts[root] : poisoned(self, output_memory, count);
        CHECK_OK(tddp_scatter(self->group, own, at_root ? parts : NULL, at_root ? ranks : 0, root,
                              NULL));
        check_values(own.data, count, root, self->rank);
        for (int part = 0; part < self->ranks; part++) {
            parts[part] = filled(self, part_at(self, input_memory, part, each), each, 10 + part);
        }
        own = in_place && each > 0 ? parts[self->rank] : poisoned(self, output_memory, each);
        CHECK_OK(
            tddp_reduce_scatter_list(self->group, parts, ranks, own, TDDP_REDUCE_SUM, 0, NULL));
        check_sums(self, own.data, each, 10 + self->rank, 0);
    }
}

/* Rank r sends each + r + p elements to rank p. */
static inline void check_exchange(const bench *self, size_t each)
{
    tddp_buffer inputs[MAX_RANKS];
    tddp_buffer outputs[MAX_RANKS];
    const size_t ranks = (size_t)self->ranks;
    for (int in_place = 0; in_place < 2; in_place++) {
        for (int peer = 0; peer < self->ranks; peer++) {
            const size_t count = each + (size_t)(self->rank + peer);
            outputs[peer] = poisoned(self, part_at(self, output_memory, peer, each + 8), count);
            int32_t *data = in_place && peer == self->rank && count > 0
                                ? outputs[peer].data
                                : part_at(self, input_memory, peer, each + 8);
            inputs[peer] = filled(self, data, count, peer);
        }
        CHECK_OK(tddp_all_to_all(self->group, inputs, outputs, ranks, NULL));
        for (int peer = 0; peer < self->ranks; peer++) {
            check_values(outputs[peer].data, outputs[peer].count, peer, self->rank);
        }
    }
}

/* Several buffers: separate and descending, contiguous, one of them empty. */
static inline void check_coalesced(const bench *self, size_t each)
{
    enum { COUNT = 5 };
    tddp_buffer buffers[COUNT];
    for (int adjoin = 0; adjoin < 2; adjoin++) {
        for (int i = 0; i < COUNT; i++) {
            size_t count = i == 2 ? 0 : each / 4 + 1;
            size_t at = (size_t)(adjoin ? i - (i > 2) : COUNT - i) * (each / 4 + (adjoin ? 1 : 3));
            buffers[i] = filled(self, input_memory + at, count, 20 + i);
        }
        tddp_work *work;
        CHECK_OK(tddp_all_reduce_coalesced(self->group, buffers, COUNT, TDDP_REDUCE_SUM, 0, &work));
        CHECK_OK(tddp_work_wait(work, NULL));
        tddp_work_release(work);
        for (int i = 0; i < COUNT; i++) {
            check_sums(self, buffers[i].data, buffers[i].count, 20 + i, 0);
        }
    }
}

/* To the successor, and from the predecessor. */
static inline void check_messages(const bench *self, size_t each)
{
    const int next = (self->rank + 1) % self->ranks;
    const int before = (self->rank + self->ranks - 1) % self->ranks;
    tddp_work *works[2];
    for (uint32_t tag = 0; tag < 3 && self->ranks > 1; tag++) {
        tddp_buffer room = poisoned(self, output_memory + tag * (each / 2), each / 2);
        tddp_buffer message = filled(self, input_memory, each / 2, 30 + (int)tag);
        const tddp_op_args messages[] = {message_from(room, before, tag),
                                         message_to(message, next, tag)};
        CHECK_OK(tddp_batch_send_recv(self->group, messages, 2, works));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tddp_work_wait(works[i], NULL));
            tddp_work_release(works[i]);
        }
        check_values(output_memory + tag * (each / 2), each / 2, before, 30 + (int)tag);
    }
}

static inline void check_operations(const bench *self, size_t each)
{
    check_one_buffer(self, each);
    check_single_buffers(self, each);
    check_gathers(self, each);
    check_scatters(self, each);
    check_exchange(self, each);
    check_coalesced(self, each);
    check_messages(self, each);
}

#endif
