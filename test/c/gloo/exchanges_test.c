/* The collectives over Gloo that only move data, beyond what random programs do (test/c/sequences):
 * eight ranks, large messages, ranks that come late. */
#include <string.h>
#include <time.h>

#include "world.h"

enum { MOST = 8, GUARD = 64, UNTOUCHED = 0x5a };

/* Byte k of what one rank has for another; different for each of the three. */
static unsigned char byte_of(int from, int to, size_t k)
{
    return (unsigned char)(k * 7 + k / 256 * 31 + (size_t)from * 101 + (size_t)to * 57 + 13);
}

/* How many elements one rank has for another. */
typedef size_t (*size_rule)(int from, int to, size_t count);

static size_t even(int from, int to, size_t count)
{
    (void)from;
    (void)to;
    return count;
}

/* Some nothing, some less, some all. */
static size_t by_sender(int from, int to, size_t count)
{
    (void)to;
    return from % 3 == 1 ? 0 : from % 3 == 2 ? count / 2 + 1 : count;
}

static size_t by_receiver(int from, int to, size_t count)
{
    return by_sender(to, from, count);
}

static size_t by_both(int from, int to, size_t count)
{
    int which = (from + 2 * to) % 4;
    return which == 3 ? 0 : which == 2 ? count + (size_t)from : which == 1 ? count / 3 : count;
}

/* A piece of memory between bytes that stay as they are. */
static char *guarded(size_t bytes)
{
    char *memory = malloc(bytes + (size_t)2 * GUARD);
    CHECK(memory != NULL);
    memset(memory, UNTOUCHED, bytes + (size_t)2 * GUARD);
    return memory + GUARD;
}

static void release(char *data, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++) {
        CHECK_INT(data[-(ptrdiff_t)i - 1], UNTOUCHED);
        CHECK_INT(data[bytes + i], UNTOUCHED);
    }
    free(data - GUARD);
}

static size_t bytes_of(tddp_buffer buffer)
{
    return buffer.count * tddp_dtype_size(buffer.dtype);
}

static tddp_buffer make(size_t count, tddp_dtype dtype)
{
    return buffer_of(guarded(count * tddp_dtype_size(dtype)), count, dtype);
}

static void drop(tddp_buffer buffer)
{
    release(buffer.data, bytes_of(buffer));
}

static void fill(tddp_buffer buffer, int from, int to)
{
    for (size_t k = 0; k < bytes_of(buffer); k++) {
        ((unsigned char *)buffer.data)[k] = byte_of(from, to, k);
    }
}

static void check(tddp_buffer buffer, int from, int to)
{
    for (size_t k = 0; k < bytes_of(buffer); k++) {
        if (((unsigned char *)buffer.data)[k] != byte_of(from, to, k)) {
            check_failed(__FILE__, __LINE__, "byte %zu of %zu that came from %d to %d is wrong", k,
                         bytes_of(buffer), from, to);
        }
    }
}

static void broadcast(tddp_group *group, size_t count, tddp_dtype dtype)
{
    int rank = tddp_group_rank(group);
    for (int root = 0; root < tddp_group_world_size(group); root++) {
        tddp_buffer buffer = make(count, dtype);
        fill(buffer, rank, 0);
        CHECK_OK(tddp_broadcast(group, buffer, root, NULL));
        check(buffer, root, 0);
        drop(buffer);
    }
}

/* Flat memory, also in place: the input is this rank's part of the output. */
static void all_gather(tddp_group *group, size_t count, tddp_dtype dtype)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    size_t size = tddp_dtype_size(dtype);
    for (int in_place = 0; in_place < 2; in_place++) {
        tddp_buffer all = make(count * (size_t)world_size, dtype);
        tddp_buffer mine = make(count, dtype);
        tddp_buffer input = mine;
        if (in_place) {
            input.data = (char *)all.data + (size_t)rank * count * size;
        }
        fill(input, rank, 0);
        CHECK_OK(tddp_all_gather(group, input, all, NULL));
        for (int r = 0; r < world_size; r++) {
            check(buffer_of((char *)all.data + (size_t)r * count * size, count, dtype), r, 0);
        }
        drop(all);
        drop(mine);
    }
}

static void all_gather_list(tddp_group *group, size_t count, tddp_dtype dtype, size_rule size)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    tddp_buffer outputs[MOST];
    tddp_buffer input = make(size(rank, 0, count), dtype);
    fill(input, rank, 0);
    for (int r = 0; r < world_size; r++) {
        outputs[r] = make(size(r, 0, count), dtype);
    }
    CHECK_OK(tddp_all_gather_list(group, input, outputs, (size_t)world_size, NULL));
    for (int r = 0; r < world_size; r++) {
        check(outputs[r], r, 0);
        drop(outputs[r]);
    }
    check(input, rank, 0);
    drop(input);
}

static void gather(tddp_group *group, size_t count, tddp_dtype dtype, size_rule size, int root)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    tddp_buffer outputs[MOST];
    tddp_buffer input = make(size(rank, root, count), dtype);
    fill(input, rank, root);
    if (rank != root) {
        CHECK_OK(tddp_gather(group, input, NULL, 0, root, NULL));
        drop(input);
        return;
    }
    for (int r = 0; r < world_size; r++) {
        /* The own part may be the input itself. */
        outputs[r] = r == root && count % 2 ? input : make(size(r, root, count), dtype);
    }
    CHECK_OK(tddp_gather(group, input, outputs, (size_t)world_size, root, NULL));
    for (int r = 0; r < world_size; r++) {
        check(outputs[r], r, root);
        if (outputs[r].data != input.data) {
            drop(outputs[r]);
        }
    }
    drop(input);
}

static void scatter(tddp_group *group, size_t count, tddp_dtype dtype, size_rule size, int root)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    tddp_buffer inputs[MOST];
    tddp_buffer output = make(size(root, rank, count), dtype);
    if (rank != root) {
        CHECK_OK(tddp_scatter(group, output, NULL, 0, root, NULL));
    } else {
        for (int r = 0; r < world_size; r++) {
            inputs[r] = r == root && count % 2 ? output : make(size(root, r, count), dtype);
            fill(inputs[r], root, r);
        }
        CHECK_OK(tddp_scatter(group, output, inputs, (size_t)world_size, root, NULL));
        for (int r = 0; r < world_size; r++) {
            check(inputs[r], root, r);
            if (inputs[r].data != output.data) {
                drop(inputs[r]);
            }
        }
    }
    check(output, root, rank);
    drop(output);
}

static void all_to_all(tddp_group *group, size_t count, tddp_dtype dtype, size_rule size)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    tddp_buffer inputs[MOST];
    tddp_buffer outputs[MOST];
    for (int r = 0; r < world_size; r++) {
        inputs[r] = make(size(rank, r, count), dtype);
        outputs[r] = make(size(r, rank, count), dtype);
        fill(inputs[r], rank, r);
    }
    CHECK_OK(tddp_all_to_all(group, inputs, outputs, (size_t)world_size, NULL));
    for (int r = 0; r < world_size; r++) {
        check(inputs[r], rank, r);
        check(outputs[r], r, rank);
        drop(inputs[r]);
        drop(outputs[r]);
    }
}

/* The parts lie end to end, of different sizes: one tensor with splits. */
static void all_to_all_together(tddp_group *group, size_t count, tddp_dtype dtype)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    size_t element = tddp_dtype_size(dtype);
    size_t most = (count + MOST) * (size_t)world_size;
    tddp_buffer input = make(most, dtype);
    tddp_buffer output = make(most, dtype);
    tddp_buffer inputs[MOST];
    tddp_buffer outputs[MOST];
    char *in = input.data;
    char *out = output.data;
    for (int r = 0; r < world_size; r++) {
        inputs[r] = buffer_of(in, by_both(rank, r, count), dtype);
        outputs[r] = buffer_of(out, by_both(r, rank, count), dtype);
        in += inputs[r].count * element;
        out += outputs[r].count * element;
        fill(inputs[r], rank, r);
    }
    CHECK_OK(tddp_all_to_all(group, inputs, outputs, (size_t)world_size, NULL));
    for (int r = 0; r < world_size; r++) {
        check(outputs[r], r, rank);
    }
    drop(input);
    drop(output);
}

static void all_kinds(tddp_group *group, size_t count, tddp_dtype dtype)
{
    broadcast(group, count, dtype);
    all_gather(group, count, dtype);
    all_gather_list(group, count, dtype, even);
    all_gather_list(group, count, dtype, by_sender);
    all_to_all(group, count, dtype, even);
    all_to_all(group, count, dtype, by_both);
    all_to_all_together(group, count, dtype);
    for (int root = 0; root < tddp_group_world_size(group); root++) {
        gather(group, count, dtype, even, root);
        gather(group, count, dtype, by_sender, root);
        scatter(group, count, dtype, even, root);
        scatter(group, count, dtype, by_receiver, root);
    }
}

MULTI_TEST(eight_ranks, 8, 110)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 60000);
    const size_t counts[] = {0, 1, 1001, 16385, 100003};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        all_kinds(group, counts[i], TDDP_FLOAT32);
    }
    leave(group, store);
}

/* More pieces than two for each of those who pass them on. */
MULTI_TEST(a_large_broadcast, 4, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 60000);
    broadcast(group, 5000011, TDDP_UINT8);
    leave(group, store);
}

/* Ranks that are late, each in turn, while the others go on as far as they can. */
MULTI_TEST(ranks_that_come_late, 3, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    for (int i = 0; i < 30; i++) {
        if (i % 3 == rank) {
            nanosleep(&(struct timespec){0, 3000000}, NULL);
        }
        size_t count = i % 2 ? 100 : 50000;
        scatter(group, count, TDDP_FLOAT32, by_receiver, i % 3);
        gather(group, count, TDDP_FLOAT32, by_sender, (i + 1) % 3);
        broadcast(group, count, TDDP_FLOAT32);
    }
    leave(group, store);
}
