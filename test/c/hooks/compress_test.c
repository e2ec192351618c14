/* float16 and bfloat16: rounding, overflow, around another hook. */
#include "driver.h"

static const shape shapes[] = {{{1, 9}}, {{33}}, {{4, 3, 7}}};

enum { GRADIENTS = 3 };

static double gradient_of(int rank, size_t i, size_t k)
{
    return 3.0 * noise((uint64_t)rank, i * 1000 + k);
}

static void fill(test_bucket *bucket, int rank, double factor)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, factor * gradient_of(rank, i, k));
        }
    }
}

/* The expected result: each element divided and rounded once, the sum once more. */
static double expected(tddp_dtype bucket, tddp_dtype sent, int ranks, size_t i, size_t k)
{
    double sum = 0;
    for (int rank = 0; rank < ranks; rank++) {
        float value = (float)as_stored(bucket, gradient_of(rank, i, k));
        sum += as_stored(sent, value / (float)ranks);
    }
    return as_stored(bucket, as_stored(sent, sum));
}

static void formula_body(int rank, int world_size, tddp_store *store, void *data)
{
    tddp_dtype sent = *(tddp_dtype *)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    for (size_t d = 0; d < FLOATING; d++) {
        tddp_comm_hook *hook;
        test_bucket bucket;
        bool same_dtype = floating[d] == sent;
        CHECK_OK(tddp_hook_compress(sent, NULL, &hook));
        CHECK_TEXT(tddp_comm_hook_name(hook),
                   sent == TDDP_FLOAT16 ? "fp16_compress" : "bf16_compress");
        make_bucket(&bucket, 0, 1, floating[d], shapes, GRADIENTS);
        for (uint64_t iteration = 0; iteration < 2; iteration++) {
            fill(&bucket, rank, 1.0);
            CHECK_INT(run_iteration(hook, group, &bucket, 1, iteration), 2);
            for (size_t i = 0; i < GRADIENTS; i++) {
                for (size_t k = 0; k < bucket.gradients[i].count; k++) {
                    double value = expected(floating[d], sent, world_size, i, k);
                    CHECK_DOUBLE(value_of(&bucket, i, k), value, same_dtype ? 0.05 : 0.0);
                }
            }
            check_same_everywhere(group, bucket.bucket.buffer);
        }
        free_bucket(&bucket);
        tddp_comm_hook_release(hook);
    }
    leave(group);
}

TEST(elements_are_divided_and_rounded_once)
{
    tddp_dtype sent[] = {TDDP_FLOAT16, TDDP_BFLOAT16};
    for (int i = 0; i < 2; i++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            run_ranks(ranks, formula_body, &sent[i]);
        }
    }
}

static void overflow_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, NULL, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, 1);
    for (size_t k = 0; k < 9; k++) {
        set_value(&bucket, 0, k, k == 8 ? 100000.0 * (rank == 0) : 60000.0);
    }
    (void)run_iteration(hook, group, &bucket, 1, 0);
    for (size_t k = 0; k < 8; k++) {
        CHECK_DOUBLE(value_of(&bucket, 0, k), 60000.0, 64.0); /* the sum would be infinite */
    }
    /* One rank's element exceeds float16, but not after the division. */
    CHECK_DOUBLE(value_of(&bucket, 0, 8), 100000.0 / world_size, 16.0);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(a_sum_beyond_the_dtype_does_not_overflow)
{
    run_ranks(4, overflow_body, NULL);
}

static void wrapper_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *inner;
    tddp_comm_hook *hook;
    test_bucket buckets[2];
    CHECK_OK(tddp_hook_allreduce(&inner));
    CHECK_OK(tddp_hook_compress(TDDP_BFLOAT16, inner, &hook));
    CHECK_TEXT(tddp_comm_hook_name(hook), "bf16_compress_wrapper");
    tddp_comm_hook_release(inner);
    make_bucket(&buckets[0], 0, 2, TDDP_FLOAT32, shapes, 2);
    make_bucket(&buckets[1], 1, 2, TDDP_FLOAT32, shapes, GRADIENTS);
    fill(&buckets[0], rank, 1.0);
    fill(&buckets[1], rank, 2.0);
    CHECK_INT(run_iteration(hook, group, buckets, 2, 0), 2);
    for (size_t b = 0; b < 2; b++) {
        for (size_t i = 0; i < buckets[b].bucket.gradient_count; i++) {
            for (size_t k = 0; k < buckets[b].gradients[i].count; k++) {
                double sum = 0;
                for (int r = 0; r < world_size; r++) {
                    sum += (double)(b + 1) * gradient_of(r, i, k);
                }
                double value = value_of(&buckets[b], i, k);
                CHECK_DOUBLE(value, sum / world_size, 0.04 * (double)(b + 1));
                CHECK(value == as_stored(TDDP_BFLOAT16, value));
            }
        }
        free_bucket(&buckets[b]);
    }
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(an_inner_hook_runs_on_the_compressed_bucket)
{
    run_ranks(3, wrapper_body, NULL);
}

/* Sends nothing, and rounds the local elements in a single stage. */
TEST(an_inner_hook_may_have_no_operations)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_comm_hook *inner;
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_noop(&inner));
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, inner, &hook));
    tddp_comm_hook_release(inner);
    make_bucket(&bucket, 0, 1, TDDP_FLOAT64, shapes, GRADIENTS);
    fill(&bucket, 0, 1.0);
    CHECK_INT(run_iteration(hook, group, &bucket, 1, 0), 1);
    for (size_t k = 0; k < 33; k++) {
        CHECK_DOUBLE(value_of(&bucket, 1, k), as_stored(TDDP_FLOAT16, gradient_of(0, 1, k)), 0.0);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    drop(group, store);
}

static tddp_status run_picky(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                             tddp_work **work, int *again)
{
    int *calls = state;
    (void)group;
    (void)work;
    CHECK_INT(bucket->buffer.dtype, TDDP_FLOAT16);
    CHECK_INT(stage, calls[0]++);
    *again = stage < 3;
    return TDDP_OK;
}

/* A hook with several stages, on the caller's thread. */
TEST(inner_stages_are_counted_on_the_same_thread)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    int calls = 0;
    tddp_comm_hook_ops ops = {sizeof ops, "picky", 1, run_picky, NULL, NULL, 0};
    tddp_comm_hook *inner;
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_comm_hook_make(&ops, &calls, &inner));
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, inner, &hook));
    CHECK_INT(tddp_comm_hook_on_caller(hook), 1);
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    CHECK_INT(run_iteration(hook, group, &bucket, 1, 0), 4);
    CHECK_INT(calls, 4);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    tddp_comm_hook_release(inner);
    drop(group, store);
}

/* After a rebuild: the same index, another size. */
TEST(a_new_layout_gets_a_new_copy)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_comm_hook *hook;
    test_bucket buckets[3];
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, NULL, &hook));
    make_bucket(&buckets[0], 0, 1, TDDP_FLOAT32, shapes, 1);
    fill(&buckets[0], 0, 1.0);
    (void)run_iteration(hook, group, buckets, 1, 0);
    free_bucket(&buckets[0]);
    for (size_t b = 0; b < 3; b++) {
        make_bucket(&buckets[b], b, 3, TDDP_FLOAT32, shapes, b + 1);
        buckets[b].bucket.layout = 2;
        fill(&buckets[b], 0, 1.0);
    }
    (void)run_iteration(hook, group, buckets, 3, 1);
    for (size_t b = 0; b < 3; b++) {
        size_t last = buckets[b].gradients[b].count - 1;
        CHECK_DOUBLE(value_of(&buckets[b], b, last),
                     as_stored(TDDP_FLOAT16, (float)gradient_of(0, b, last)), 0.0);
        free_bucket(&buckets[b]);
    }
    tddp_comm_hook_release(hook);
    drop(group, store);
}
