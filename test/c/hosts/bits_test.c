/*
 * Sums over made-up hosts: the same bits on all ranks and in every run, means that do not overflow.
 */
#include "member.h"

static const int HALVES[] = {0, 0, 1, 1};
static const int UNEVEN[] = {0, 0, 0, 1};
static const int MIXED[] = {0, 1, 2, 1, 0, 1, 0};

/* Sums whose last bits depend on the order: equal on all ranks, and in both runs. */
static uint64_t bits_of_sum(member *self, size_t count, tddp_reduce_op reduce)
{
    float *data = malloc(count * sizeof *data);
    CHECK(data != NULL);
    for (size_t i = 0; i < count; i++) {
        data[i] = 1.0f / (float)(i * 7 + (size_t)self->rank * 13 + 3);
    }
    tddp_buffer buffer = buffer_of(data, count, TDDP_FLOAT32);
    tddp_op op = {.kind = TDDP_OP_ALL_REDUCE, .input = buffer, .output = buffer, .reduce = reduce};
    CHECK_OK(run(self, &op));
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count * sizeof *data; i++) {
        hash = (hash ^ ((unsigned char *)data)[i]) * 1099511628211u;
    }
    free(data);
    return hash;
}

static void check_bits(const int *hosts, int rank, int size, int port)
{
    member self = join("gloo", hosts, rank, size, port);
    for (size_t count = 3; count < 400000; count *= 7) {
        uint64_t first = bits_of_sum(&self, count, TDDP_REDUCE_AVG);
        CHECK(bits_of_sum(&self, count, TDDP_REDUCE_AVG) == first);
        uint64_t all[MAX_RANKS] = {0};
        tddp_buffer parts[MAX_RANKS];
        for (int each = 0; each < size; each++) {
            parts[each] = buffer_of(&all[each], 1, TDDP_INT64);
        }
        tddp_op op = {.kind = TDDP_OP_ALL_GATHER,
                      .input = buffer_of(&first, 1, TDDP_INT64),
                      .output = buffer_of(all, (size_t)size, TDDP_INT64),
                      .output_parts = parts};
        CHECK_OK(run(&self, &op));
        for (int each = 0; each < size; each++) {
            CHECK(all[each] == first);
        }
    }
    part(&self);
}

MULTI_TEST(the_same_bits_on_halves, 4, 30)
{
    check_bits(HALVES, rank, world_size, port);
}

MULTI_TEST(the_same_bits_unevenly, 4, 30)
{
    check_bits(UNEVEN, rank, world_size, port);
}

MULTI_TEST(the_same_bits_on_three_hosts, 7, 30)
{
    check_bits(MIXED, rank, world_size, port);
}

/* Each rank has 30000; four times that overflows float16. */
MULTI_TEST(means_of_float16_do_not_overflow, 4, 20)
{
    member self = join("gloo", UNEVEN, rank, world_size, port);
    uint16_t data[5];
    for (size_t i = 0; i < 5; i++) {
        data[i] = 0x7753; /* 30000 */
    }
    tddp_buffer buffer = buffer_of(data, 5, TDDP_FLOAT16);
    tddp_op op = {
        .kind = TDDP_OP_ALL_REDUCE, .input = buffer, .output = buffer, .reduce = TDDP_REDUCE_AVG};
    CHECK_OK(run(&self, &op));
    for (size_t i = 0; i < 5; i++) {
        CHECK_DOUBLE(get(data, TDDP_FLOAT16, i), 30000, 16);
    }
    part(&self);
}
