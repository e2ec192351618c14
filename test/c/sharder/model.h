/* Helpers of the sharder's tests: units of float vectors, whose owner records where they are placed
 * and adds up what is reduced. */
#ifndef TDDP_TEST_SHARDER_MODEL_H
#define TDDP_TEST_SHARDER_MODEL_H

#include <stdio.h>
#include <string.h>

#include "hosted_group.h"
#include "sharder/sharder.h"

enum { UNITS = 5, PARAMS = 3, MAX_SHARD = 256 };

typedef struct model {
    tddp_group *group;
    tddp_sharder *sharder;
    float *placed[UNITS]; /* NULL: nowhere */
    size_t shard_count[UNITS];
    float sums[UNITS][MAX_SHARD]; /* of the reduced gradients */
    int reduced[UNITS];
} model;

static inline void place(void *user, size_t unit, void *data)
{
    model *mine = user;
    CHECK((mine->placed[unit] == NULL) == (data != NULL)); /* in turns */
    mine->placed[unit] = data;
}

static inline tddp_status cast_shard(void *user, size_t unit, void *into, size_t count)
{
    model *mine = user;
    size_t offset;
    const tddp_buffer shard = tddp_sharder_shard(mine->sharder, unit, &offset, NULL);
    CHECK_INT(count, shard.count);
    for (size_t i = 0; i < count; i++) {
        ((double *)into)[i] = ((float *)shard.data)[i];
    }
    return TDDP_OK;
}

static inline tddp_status reduced(void *user, size_t unit, void *from, size_t count)
{
    model *mine = user;
    CHECK_INT(count, mine->shard_count[unit]);
    for (size_t i = 0; i < count; i++) {
        mine->sums[unit][i] += ((float *)from)[i];
    }
    mine->reduced[unit]++;
    return TDDP_OK;
}

static inline void open_model(model *mine)
{
    tddp_sharder_ops ops = {sizeof ops, mine, place, cast_shard, reduced, NULL, NULL, NULL};
    CHECK_OK(tddp_sharder_create(&ops, &mine->sharder));
}

/* A unit of vectors of 1 + unit, 40 and 3 elements. */
static inline void unit_params(size_t unit, int64_t dims[PARAMS], tddp_param params[PARAMS])
{
    static const char *const names[PARAMS] = {"a", "b", "c"};
    const int64_t sizes[PARAMS] = {1 + (int64_t)unit, 40, 3};
    for (size_t i = 0; i < PARAMS; i++) {
        dims[i] = sizes[i];
        params[i] =
            (tddp_param){names[i], (size_t)sizes[i], TDDP_FLOAT32, TDDP_CPU, 0, &dims[i], 1, 0};
    }
}

/* Element `at` of the unit's flat buffer has this value. */
static inline float value_of(size_t unit, size_t at)
{
    return 1000.0f * (float)unit + (float)at;
}

static inline void add_unit(model *mine, size_t unit, tddp_group *shards, tddp_group *replicas,
                            int reshard, tddp_dtype gather_dtype)
{
    int64_t dims[PARAMS];
    tddp_param params[PARAMS];
    char name[16];
    unit_params(unit, dims, params);
    (void)snprintf(name, sizeof name, "unit %zu", unit);
    tddp_unit_opts opts = TDDP_UNIT_OPTS_INIT;
    opts.name = name;
    opts.shard_group = shards;
    opts.replica_group = replicas;
    opts.params = params;
    opts.param_count = PARAMS;
    opts.gather_dtype = gather_dtype;
    opts.reshard_after_forward = reshard;
    CHECK_OK(tddp_sharder_add(mine->sharder, &opts, NULL));
    size_t offset;
    const tddp_buffer shard = tddp_sharder_shard(mine->sharder, unit, &offset, NULL);
    mine->shard_count[unit] = shard.count;
    CHECK(shard.count <= MAX_SHARD);
    for (size_t i = 0; i < shard.count; i++) {
        ((float *)shard.data)[i] = value_of(unit, offset + i);
    }
}

/* All units over one group; the last one is the model itself, which is not resharded. */
static inline void begin(model *mine, int rank, int world_size, int port)
{
    *mine = (model){.group = join("shm", rank, world_size, port)};
    open_model(mine);
    for (size_t u = 0; u < UNITS; u++) {
        add_unit(mine, u, mine->group, NULL, u + 1 < UNITS, TDDP_FLOAT32);
    }
}

static inline void end(model *mine)
{
    tddp_sharder_free(mine->sharder);
    leave(mine->group);
}

static inline void check_values(const model *mine, size_t unit)
{
    size_t count;
    const tddp_flat_slice *slices = tddp_sharder_slices(mine->sharder, unit, &count);
    CHECK_INT(count, PARAMS);
    CHECK(mine->placed[unit] != NULL);
    for (size_t p = 0; p < count; p++) {
        for (size_t i = 0; i < slices[p].count; i++) {
            const size_t at = slices[p].offset + i;
            CHECK_DOUBLE(mine->placed[unit][at], value_of(unit, at), 0);
        }
    }
}

/* Forward of the model: itself, and within it its parts. */
static inline void run_forward(model *mine, int backward)
{
    const size_t root = UNITS - 1;
    tddp_sharder_begin_forward(mine->sharder);
    CHECK_OK(tddp_sharder_before_forward(mine->sharder, root, NULL));
    for (size_t u = 0; u < root; u++) {
        CHECK_OK(tddp_sharder_before_forward(mine->sharder, u, NULL));
        check_values(mine, u);
        check_values(mine, root);
        tddp_sharder_after_forward(mine->sharder, u, backward);
        CHECK(mine->placed[u] == NULL);
    }
    tddp_sharder_after_forward(mine->sharder, root, backward);
    tddp_sharder_end_forward(mine->sharder);
    CHECK_INT(tddp_sharder_unsharded(mine->sharder, root), backward);
}

/* A gradient of `scale` times the element's number. */
static inline void write_gradient(model *mine, size_t unit, float scale)
{
    void *data = NULL;
    int fresh = 0;
    CHECK_OK(tddp_sharder_gradient(mine->sharder, unit, &data, &fresh));
    const size_t count = mine->shard_count[unit] * (size_t)tddp_group_world_size(mine->group);
    for (size_t i = 0; i < count; i++) {
        ((float *)data)[i] = (fresh ? 0 : ((float *)data)[i]) + scale * (float)i;
    }
}

static inline void run_backward(model *mine, float scale)
{
    tddp_sharder_begin_backward(mine->sharder);
    for (size_t k = 0; k < UNITS; k++) {
        const size_t u = UNITS - 1 - k;
        CHECK_OK(tddp_sharder_before_backward(mine->sharder, u, NULL));
        check_values(mine, u);
        write_gradient(mine, u, scale);
        tddp_sharder_after_backward(mine->sharder, u);
        CHECK(mine->placed[u] == NULL);
        CHECK_OK(tddp_sharder_reduce(mine->sharder, u, NULL));
    }
    CHECK_OK(tddp_sharder_finish(mine->sharder, NULL));
}

/* All gradients so far sum up to `scale` times the element's number. */
static inline void check_sums(const model *mine, size_t unit, double scale)
{
    size_t offset;
    (void)tddp_sharder_shard(mine->sharder, unit, &offset, NULL);
    for (size_t i = 0; i < mine->shard_count[unit]; i++) {
        CHECK_DOUBLE(mine->sums[unit][i], scale * (double)(offset + i), 1e-3);
    }
}

#endif
