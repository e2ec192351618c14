/* Quantization to eight bits: PyTorch's formula, its precision, nonfinite elements. */
#include <float.h>

#include "driver.h"

static const shape shapes[] = {{{3, 7}}, {{130}}, {{5}}};

enum { GRADIENTS = 3, CHANNEL = 48 };

static double gradient_of(int rank, size_t k)
{
    return (rank + 0.5) * noise((uint64_t)rank, k) + 0.1 * (double)(k % 3);
}

/* By position in the bucket, without the padding. */
static void fill(test_bucket *bucket, int rank, double factor)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, factor * gradient_of(rank, bucket->gradients[i].offset + k));
        }
    }
}

/* A rank's elements [start, end) as the other ranks dequantize them; returns the step. */
static float degrade(const float *x, size_t start, size_t end, float *out)
{
    float low = 0;
    float high = 0;
    for (size_t k = start; k < end; k++) {
        low = fminf(low, x[k]);
        high = fmaxf(high, x[k]);
    }
    float scale = fmaxf((high - low) / 255.0f, FLT_MIN);
    float zero = fminf(fmaxf(-nearbyintf(low / scale), 0.0f), 255.0f);
    for (size_t k = start; k < end; k++) {
        float byte = fminf(fmaxf(nearbyintf(x[k] / scale) + zero, 0.0f), 255.0f);
        out[k] = scale * (byte - zero);
    }
    return scale;
}

/* The bucket's expected contents, and the maximum distance from the average, at element `k`. */
typedef struct outcome {
    float average[1024];
    float step[1024];
} outcome;

static void predict(const test_bucket *like, int ranks, size_t channel, double factor, outcome *out)
{
    size_t count = like->bucket.buffer.count;
    size_t width = channel ? channel : count;
    tddp_dtype dtype = like->bucket.buffer.dtype;
    test_bucket local;
    CHECK(count <= 1024);
    memset(out, 0, sizeof *out);
    for (int rank = 0; rank < ranks; rank++) {
        float x[1024];
        float seen[1024];
        make_bucket(&local, 0, 1, dtype, shapes, GRADIENTS);
        fill(&local, rank, factor);
        for (size_t k = 0; k < count; k++) {
            x[k] = (float)get(dtype, local.bucket.buffer.data, k);
        }
        for (size_t start = 0; start < count; start += width) {
            size_t end = start + width < count ? start + width : count;
            float step = degrade(x, start, end, seen);
            for (size_t k = start; k < end; k++) {
                out->step[k] += step / (float)ranks;
            }
        }
        for (size_t k = 0; k < count; k++) {
            out->average[k] += seen[k];
        }
        free_bucket(&local);
    }
    for (size_t k = 0; k < count; k++) {
        out->average[k] /= (float)ranks;
    }
}

typedef struct asked {
    size_t channel; /* 0: per tensor */
    double factor;
} asked;

static void formula_body(int rank, int world_size, tddp_store *store, void *data)
{
    const asked *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    for (size_t d = 0; d < FLOATING; d++) {
        tddp_comm_hook *hook;
        test_bucket bucket;
        outcome out;
        CHECK_OK(tddp_hook_quantize(self->channel > 0, self->channel, &hook));
        make_bucket(&bucket, 0, 1, floating[d], shapes, GRADIENTS);
        predict(&bucket, world_size, self->channel, self->factor, &out);
        for (uint64_t iteration = 0; iteration < 2; iteration++) {
            fill(&bucket, rank, self->factor);
            CHECK_INT(run_iteration(hook, group, &bucket, 1, iteration), 2);
            for (size_t k = 0; k < bucket.bucket.buffer.count; k++) {
                double got = get(floating[d], bucket.bucket.buffer.data, k);
                CHECK_DOUBLE(got, as_stored(floating[d], out.average[k]), 0.0);
            }
            check_same_everywhere(group, bucket.bucket.buffer);
        }
        free_bucket(&bucket);
        tddp_comm_hook_release(hook);
    }
    leave(group);
}

TEST(bytes_match_pytorchs_formula)
{
    asked cases[] = {{0, 1.0}, {CHANNEL, 1.0}, {1, 1.0}, {1000000, 1.0}, {64, 1000.0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            run_ranks(ranks, formula_body, &cases[i]);
        }
    }
}

static void precision_body(int rank, int world_size, tddp_store *store, void *data)
{
    const asked *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    outcome out;
    CHECK_OK(tddp_hook_quantize(self->channel > 0, self->channel, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    predict(&bucket, world_size, self->channel, self->factor, &out);
    fill(&bucket, rank, self->factor);
    (void)run_iteration(hook, group, &bucket, 1, 0);
    for (size_t i = 0; i < GRADIENTS; i++) {
        for (size_t k = 0; k < bucket.gradients[i].count; k++) {
            size_t at = bucket.gradients[i].offset + k;
            double sum = 0;
            for (int r = 0; r < world_size; r++) {
                sum += self->factor * gradient_of(r, at);
            }
            CHECK_DOUBLE(value_of(&bucket, i, k), sum / world_size, (double)out.step[at]);
            CHECK((double)out.step[at] < self->factor * (world_size + 1.5) * 2 / 255);
        }
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

/* Also for elements so small that PyTorch's observer would round all of them to zero. */
TEST(the_average_is_within_one_step)
{
    asked cases[] = {{0, 1.0}, {CHANNEL, 1.0}, {0, 1e-9}, {CHANNEL, 1e-30}, {0, 1e37}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_ranks(3, precision_body, &cases[i]);
    }
}

static void odd_body(int rank, int world_size, tddp_store *store, void *data)
{
    double odd = *(double *)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_quantize(1, 64, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    fill(&bucket, rank, 1.0);
    if (rank == 1) {
        set_value(&bucket, 1, 100, odd);
    }
    (void)run_iteration(hook, group, &bucket, 1, 0); /* also checks that padding is zero */
    size_t channel = (bucket.gradients[1].offset + 100) / 64;
    for (size_t i = 0; i < GRADIENTS; i++) {
        for (size_t k = 0; k < bucket.gradients[i].count; k++) {
            bool hit = (bucket.gradients[i].offset + k) / 64 == channel;
            CHECK_INT(isnan(value_of(&bucket, i, k)) != 0, hit);
        }
    }
    fill(&bucket, rank, 1.0);
    (void)run_iteration(hook, group, &bucket, 1, 1);
    CHECK(isfinite(value_of(&bucket, 1, 100)));
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(nonfinite_elements_are_nan_on_all_ranks)
{
    double odds[] = {(double)NAN, (double)INFINITY, (double)-INFINITY};
    for (int i = 0; i < 3; i++) {
        run_ranks(2, odd_body, &odds[i]);
    }
}

TEST(zeros_and_constants_are_exact)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_quantize(0, 0, &hook));
    double constants[] = {0.0, 1.0, -2.5, 1e-40, -3e38};
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, 1);
    for (size_t c = 0; c < 5; c++) {
        for (size_t k = 0; k < 21; k++) {
            set_value(&bucket, 0, k, constants[c]);
        }
        (void)run_iteration(hook, group, &bucket, 1, c);
        for (size_t k = 0; k < 21; k++) {
            CHECK_DOUBLE(value_of(&bucket, 0, k), constants[c],
                         1e-6 * fabs(constants[c]) + (double)FLT_MIN);
        }
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    drop(group, store);
}
