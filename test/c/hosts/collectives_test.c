/*
 * All collectives on made-up hosts, over Gloo: hosts with different numbers of
 * ranks, alternating hosts, the group's memory and other memory, parts of any size.
 */
#include "member.h"

static const int HALVES[] = {0, 0, 1, 1};
static const int TURNS[] = {0, 1, 0, 1};
static const int UNEVEN[] = {0, 0, 0, 1};
static const int MIDDLE[] = {0, 1, 1, 2};
static const int MIXED[] = {0, 1, 2, 1, 0, 1, 0};

static void *memory_of(member *self, bool registered, size_t bytes, void **handle)
{
    bytes = bytes ? bytes : 1;
    *handle = NULL;
    void *data = registered ? shared(self, bytes, handle) : calloc(1, bytes);
    CHECK(data != NULL);
    return data;
}

static void release(member *self, void *data, void *handle)
{
    if (handle) {
        self->table->deallocate(handle);
    } else {
        free(data);
    }
}

/* Means of float16 are rounded within hosts and between them. */
static void check_sums(const void *data, tddp_dtype dtype, tddp_reduce_op op, int size,
                       size_t start, size_t count)
{
    check_combined(data, dtype, op, size, start, count, op == TDDP_REDUCE_AVG ? 2 : 1);
}

/* --- reductions ------------------------------------------------------------------------------ */

static void all_reduce(member *self, tddp_dtype dtype, tddp_reduce_op reduce, size_t count,
                       bool registered)
{
    void *handle;
    void *data = memory_of(self, registered, count * tddp_dtype_size(dtype), &handle);
    fill_numbers(data, dtype, self->rank, 0, count);
    tddp_buffer buffer = buffer_of(data, count, dtype);
    tddp_op op = {.kind = TDDP_OP_ALL_REDUCE,
                  .input = buffer,
                  .output = buffer,
                  .reduce = reduce,
                  .premul = 0.5};
    CHECK_OK(run(self, &op));
    check_sums(data, dtype, reduce, self->size, 0, count);
    release(self, data, handle);
}

static void reduce(member *self, tddp_dtype dtype, tddp_reduce_op reduce, size_t count, int root)
{
    void *handle;
    void *data = memory_of(self, false, count * tddp_dtype_size(dtype), &handle);
    fill_numbers(data, dtype, self->rank, 0, count);
    tddp_buffer buffer = buffer_of(data, count, dtype);
    tddp_op op = {.kind = TDDP_OP_REDUCE,
                  .input = buffer,
                  .output = buffer,
                  .reduce = reduce,
                  .premul = 0.5,
                  .root = root};
    CHECK_OK(run(self, &op));
    if (self->rank == root) {
        check_sums(data, dtype, reduce, self->size, 0, count);
    } else {
        check_numbers(data, dtype, self->rank, 0, count);
    }
    release(self, data, handle);
}

/* Parts for rank r of count + r * more elements; `gaps`: not contiguous. */
static void reduce_scatter(member *self, tddp_dtype dtype, tddp_reduce_op reduce, size_t count,
                           size_t more, bool gaps, bool registered)
{
    const size_t element = tddp_dtype_size(dtype);
    size_t total = 0;
    size_t starts[MAX_RANKS];
    tddp_buffer parts[MAX_RANKS];
    for (int rank = 0; rank < self->size; rank++) {
        starts[rank] = total;
        total += count + (size_t)rank * more + (gaps ? 1 : 0);
    }
    void *handle;
    void *out_handle;
    char *data = memory_of(self, registered, total * element, &handle);
    fill_numbers(data, dtype, self->rank, 0, total);
    for (int rank = 0; rank < self->size; rank++) {
        parts[rank] = buffer_of(data + starts[rank] * element, count + (size_t)rank * more, dtype);
    }
    tddp_buffer local = parts[self->rank];
    local.data = memory_of(self, false, local.count * element, &out_handle);
    void *output = local.data;
    tddp_op op = {.kind = TDDP_OP_REDUCE_SCATTER,
                  .input = buffer_of(gaps ? NULL : data, total, dtype),
                  .output = local,
                  .input_parts = parts,
                  .reduce = reduce,
                  .premul = 0.5};
    CHECK_OK(run(self, &op));
    check_sums(output, dtype, reduce, self->size, starts[self->rank], local.count);
    check_numbers(data, dtype, self->rank, 0, total);
    release(self, data, handle);
    release(self, output, out_handle);
}

/* --- moves ----------------------------------------------------------------------------------- */

static void broadcast(member *self, tddp_dtype dtype, size_t count, int root, bool registered)
{
    void *handle;
    void *data = memory_of(self, registered, count * tddp_dtype_size(dtype), &handle);
    fill_numbers(data, dtype, self->rank, 0, count);
    tddp_buffer buffer = buffer_of(data, count, dtype);
    tddp_op op = {.kind = TDDP_OP_BROADCAST, .input = buffer, .output = buffer, .root = root};
    CHECK_OK(run(self, &op));
    check_numbers(data, dtype, root, 0, count);
    release(self, data, handle);
}

static size_t part_of_rank(int rank, size_t count, size_t more)
{
    return count + (size_t)rank * more;
}

static void all_gather(member *self, tddp_dtype dtype, size_t count, size_t more, bool registered)
{
    tddp_buffer parts[MAX_RANKS];
    size_t bytes = 0;
    size_t element = tddp_dtype_size(dtype);
    for (int rank = 0; rank < self->size; rank++) {
        parts[rank] = buffer_of("", part_of_rank(rank, count, more), dtype);
        bytes += parts[rank].count * element;
    }
    void *handle;
    void *own_handle;
    char *data = memory_of(self, registered, bytes, &handle);
    char *at = data;
    for (int rank = 0; rank < self->size; rank++) {
        parts[rank].data = parts[rank].count > 0 ? at : NULL;
        at += parts[rank].count * element;
    }
    size_t local = parts[self->rank].count;
    void *input = memory_of(self, registered, local * element, &own_handle);
    fill_numbers(input, dtype, self->rank, 0, local);
    tddp_op op = {.kind = TDDP_OP_ALL_GATHER,
                  .input = buffer_of(input, local, dtype),
                  .output = buffer_of(data, bytes / element, dtype),
                  .output_parts = parts};
    CHECK_OK(run(self, &op));
    for (int rank = 0; rank < self->size; rank++) {
        check_numbers(parts[rank].data, dtype, rank, 0, parts[rank].count);
    }
    release(self, data, handle);
    release(self, input, own_handle);
}

/* The data from `from` to `to` begin at their own position. */
static size_t first_place(int from, int to)
{
    return (size_t)(from * 16 + to);
}

/* gather and scatter at the root, all_to_all everywhere: separate memory for each part. */
static void make_parts(const member *self, tddp_buffer *parts, tddp_dtype dtype,
                       size_t (*size_of)(int rank, size_t count, size_t more), size_t count,
                       size_t more)
{
    for (int rank = 0; rank < self->size; rank++) {
        size_t elements = size_of(rank, count, more);
        parts[rank] =
            buffer_of(elements ? calloc(elements, tddp_dtype_size(dtype)) : NULL, elements, dtype);
    }
}

static void free_parts(const member *self, tddp_buffer *parts)
{
    for (int rank = 0; rank < self->size; rank++) {
        free(parts[rank].data);
    }
}

static void gather(member *self, tddp_dtype dtype, size_t count, size_t more, int root)
{
    tddp_buffer parts[MAX_RANKS];
    make_parts(self, parts, dtype, part_of_rank, count, more);
    size_t local = part_of_rank(self->rank, count, more);
    void *input = calloc(local + 1, tddp_dtype_size(dtype));
    fill_numbers(input, dtype, self->rank, 0, local);
    tddp_op op = {.kind = TDDP_OP_GATHER, .input = buffer_of(input, local, dtype), .root = root};
    op.output = buffer_of(NULL, 0, dtype);
    if (self->rank == root) {
        op.output_parts = parts;
    }
    CHECK_OK(run(self, &op));
    for (int rank = 0; self->rank == root && rank < self->size; rank++) {
        check_numbers(parts[rank].data, dtype, rank, 0, parts[rank].count);
    }
    free_parts(self, parts);
    free(input);
}

static void scatter(member *self, tddp_dtype dtype, size_t count, size_t more, int root)
{
    tddp_buffer parts[MAX_RANKS];
    make_parts(self, parts, dtype, part_of_rank, count, more);
    for (int rank = 0; rank < self->size; rank++) {
        fill_numbers(parts[rank].data, dtype, root, first_place(root, rank), parts[rank].count);
    }
    size_t local = part_of_rank(self->rank, count, more);
    void *output = calloc(local + 1, tddp_dtype_size(dtype));
    tddp_op op = {.kind = TDDP_OP_SCATTER, .output = buffer_of(output, local, dtype), .root = root};
    op.input = buffer_of(NULL, 0, dtype);
    if (self->rank == root) {
        op.input_parts = parts;
    }
    CHECK_OK(run(self, &op));
    check_numbers(output, dtype, root, first_place(root, self->rank), local);
    free_parts(self, parts);
    free(output);
}

static void all_to_all(member *self, tddp_dtype dtype, size_t count, size_t more)
{
    tddp_buffer send_parts[MAX_RANKS];
    tddp_buffer recv_parts[MAX_RANKS];
    make_parts(self, send_parts, dtype, part_of_rank, count, more);
    for (int rank = 0; rank < self->size; rank++) {
        size_t local = part_of_rank(self->rank, count, more);
        fill_numbers(send_parts[rank].data, dtype, self->rank, first_place(self->rank, rank),
                     send_parts[rank].count);
        recv_parts[rank] =
            buffer_of(local ? calloc(local, tddp_dtype_size(dtype)) : NULL, local, dtype);
    }
    tddp_op op = {.kind = TDDP_OP_ALL_TO_ALL,
                  .input = buffer_of(NULL, 0, dtype),
                  .output = buffer_of(NULL, 0, dtype),
                  .input_parts = send_parts,
                  .output_parts = recv_parts};
    CHECK_OK(run(self, &op));
    for (int rank = 0; rank < self->size; rank++) {
        check_numbers(recv_parts[rank].data, dtype, rank, first_place(rank, self->rank),
                      recv_parts[rank].count);
    }
    free_parts(self, send_parts);
    free_parts(self, recv_parts);
}

/* --- all of it ------------------------------------------------------------------------------- */

static void barrier(member *self)
{
    tddp_op op = {.kind = TDDP_OP_BARRIER};
    CHECK_OK(run(self, &op));
}

/* Every dtype with every operation that it supports. */
static void reduce_all_dtypes(member *self, size_t count)
{
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (int op = 0; op <= TDDP_REDUCE_PREMUL_SUM; op++) {
            /* Products of more numbers do not fit into a byte. */
            bool fits = op != TDDP_REDUCE_PRODUCT || self->size <= 4;
            if (fits && tddp_reduce_check((tddp_reduce_op)op, (tddp_dtype)dtype) == TDDP_OK) {
                all_reduce(self, (tddp_dtype)dtype, (tddp_reduce_op)op, count, op % 2 == 0);
                reduce(self, (tddp_dtype)dtype, (tddp_reduce_op)op, count, dtype % self->size);
                reduce_scatter(self, (tddp_dtype)dtype, (tddp_reduce_op)op, count, 0, op % 3 == 0,
                               op % 2 == 0);
            }
        }
    }
}

static void reduce_sizes(member *self, const size_t *counts, size_t count_of_counts)
{
    for (size_t i = 0; i < count_of_counts; i++) {
        for (int way = 0; way < 4; way++) {
            bool registered = way & 1;
            all_reduce(self, TDDP_FLOAT32, TDDP_REDUCE_AVG, counts[i], registered);
            reduce_scatter(self, TDDP_FLOAT64, TDDP_REDUCE_SUM, counts[i] / 3, (size_t)way, way & 2,
                           registered);
        }
        reduce(self, TDDP_INT16, TDDP_REDUCE_MAX, counts[i], (int)(i % (size_t)self->size));
    }
}

static void move_sizes(member *self, const size_t *counts, size_t count_of_counts)
{
    for (size_t i = 0; i < count_of_counts; i++) {
        int root = (int)(i % (size_t)self->size);
        for (int way = 0; way < 4; way++) {
            size_t more = way & 2 ? 3 : 0;
            broadcast(self, TDDP_INT16, counts[i], (root + way) % self->size, way & 1);
            all_gather(self, TDDP_FLOAT32, counts[i], more, way & 1);
            gather(self, TDDP_INT8, counts[i], more, (root + way) % self->size);
            scatter(self, TDDP_FLOAT64, counts[i], more, (root + way) % self->size);
            all_to_all(self, TDDP_INT64, counts[i] / 4, more);
        }
        barrier(self);
    }
}

static void exercise(const char *backend, const int *hosts, int rank, int size, int port,
                     bool interrupts)
{
    static const size_t counts[] = {0, 1, 5, 130, 4099, 70001};
    const size_t count_of_counts = sizeof counts / sizeof *counts;
    member self = join(backend, hosts, rank, size, port);
    self.interrupts = interrupts;
    reduce_all_dtypes(&self, 37);
    reduce_sizes(&self, counts, count_of_counts);
    move_sizes(&self, counts, count_of_counts);
    part(&self);
}

MULTI_TEST(all_over_gloo_on_halves, 4, 60)
{
    exercise("gloo", HALVES, rank, world_size, port, false);
}

MULTI_TEST(all_over_gloo_in_turns, 4, 60)
{
    exercise("gloo", TURNS, rank, world_size, port, false);
}

MULTI_TEST(all_over_gloo_unevenly, 4, 60)
{
    exercise("gloo", UNEVEN, rank, world_size, port, false);
}

MULTI_TEST(all_over_gloo_in_the_middle, 4, 60)
{
    exercise("gloo", MIDDLE, rank, world_size, port, false);
}

MULTI_TEST(all_over_gloo_mixed, 7, 100)
{
    exercise("gloo", MIXED, rank, world_size, port, false);
}

MULTI_TEST(all_interrupted_on_halves, 4, 100)
{
    exercise("gloo", HALVES, rank, world_size, port, true);
}

MULTI_TEST(all_interrupted_mixed, 7, 200)
{
    exercise("gloo", MIXED, rank, world_size, port, true);
}

/* reduce and reduce_scatter work in chunks in scratch memory of 4 MiB for each leader and host. */
static void several_chunks(const int *hosts, int rank, int size, int port, bool interrupts)
{
    member self = join("gloo", hosts, rank, size, port);
    const size_t count = 2500001;
    self.interrupts = interrupts;
    reduce(&self, TDDP_FLOAT32, TDDP_REDUCE_SUM, count, 3);
    reduce_scatter(&self, TDDP_FLOAT32, TDDP_REDUCE_AVG, count / 2, 5, false, true);
    reduce_scatter(&self, TDDP_FLOAT32, TDDP_REDUCE_SUM, count / 2, 0, true, false);
    all_reduce(&self, TDDP_FLOAT32, TDDP_REDUCE_SUM, count, true);
    all_gather(&self, TDDP_INT16, count, 1, true);
    part(&self);
}

MULTI_TEST(buffers_of_several_chunks, 4, 60)
{
    several_chunks(HALVES, rank, world_size, port, false);
}

MULTI_TEST(buffers_of_several_chunks_interrupted, 4, 100)
{
    several_chunks(UNEVEN, rank, world_size, port, true);
}
