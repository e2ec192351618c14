/*
 * Verifies that the parameters are the same on every rank. The ranks exchange a summary first; only
 * if summaries differ, they exchange all details, so that the error can name the parameter. All
 * ranks get the same data and produce the same text. Runs on the thread that creates the reducer;
 * stateless.
 *
 * The details, in 64-bit numbers: for each parameter its kind (dtype, sparse or not, device), the
 * number of dimensions, each dimension, the bytes of its name, then the name, padded to 8 bytes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>

#include "reducer/reducer.h"

/* What the first exchange carries. */
typedef struct summary {
    int64_t count;
    int64_t hash; /* of kinds and shapes; names may differ */
    int64_t detail_bytes;
    tddp_reducer_opts_summary opts;
} summary;

enum {
    SPARSE = 1 << 16,
    DEVICE_SHIFT = 20,
    COMPANION_SHIFT = 24,
    SHAPE_TEXT = 220,
    NAME_TEXT = 200,
};

/* The first parameter on the same device. Ranks may use different devices, but must agree on which
 * parameters share one, because the assignment to buckets depends on it. */
static size_t first_on_same_device(const tddp_param *params, size_t index)
{
    size_t first = 0;
    while (params[first].device_type != params[index].device_type ||
           params[first].device_index != params[index].device_index) {
        first++;
    }
    return first;
}

/* The dtype, whether the gradient is sparse, and where it is. */
static int64_t kind_of(const tddp_param *params, size_t index)
{
    const tddp_param *param = &params[index];
    return (int64_t)param->dtype | (param->sparse ? SPARSE : 0) |
           (int64_t)param->device_type << DEVICE_SHIFT |
           (int64_t)first_on_same_device(params, index) << COMPANION_SHIFT;
}

static tddp_dtype dtype_in(int64_t kind)
{
    return (tddp_dtype)(kind & (SPARSE - 1));
}

static tddp_device_type device_in(int64_t kind)
{
    return (tddp_device_type)(kind >> DEVICE_SHIFT & 15);
}

static int64_t hash_of(const tddp_param *params, size_t count)
{
    uint64_t hash = TDDP_DIGEST_START;
    for (size_t i = 0; i < count; i++) {
        const tddp_param *param = &params[i];
        const int64_t head[] = {kind_of(params, i), (int64_t)param->ndim};
        hash = tddp_digest(hash, head, sizeof head);
        hash = tddp_digest(hash, param->dims, param->ndim * sizeof *param->dims);
    }
    return (int64_t)hash;
}

static tddp_status append_number(tddp_bytes *bytes, int64_t number)
{
    return tddp_bytes_append(bytes, &number, sizeof number);
}

static tddp_status serialize_param(const tddp_param *params, size_t index, tddp_bytes *bytes)
{
    static const char zeros[8];
    const tddp_param *param = &params[index];
    size_t name_bytes = strlen(param->name);
    tddp_status status = append_number(bytes, kind_of(params, index));
    if (status == TDDP_OK) {
        status = append_number(bytes, (int64_t)param->ndim);
    }
    if (status == TDDP_OK) {
        status = tddp_bytes_append(bytes, param->dims, param->ndim * sizeof *param->dims);
    }
    if (status == TDDP_OK) {
        status = append_number(bytes, (int64_t)name_bytes);
    }
    if (status == TDDP_OK) {
        status = tddp_bytes_append(bytes, param->name, name_bytes);
    }
    if (status == TDDP_OK) {
        status = tddp_bytes_append(bytes, zeros, (8 - name_bytes % 8) % 8);
    }
    return status;
}

/* A parameter in a rank's details. */
typedef struct wire_param {
    int64_t kind;
    int64_t ndim;
    const int64_t *dims;
    const char *name;
    int name_bytes;
} wire_param;

/* Reads the next parameter. The data come from a rank that runs this code: lengths are trusted. */
static wire_param parse_param(const int64_t **at)
{
    wire_param param = {(*at)[0], (*at)[1], *at + 2, NULL, 0};
    int64_t name_bytes = param.dims[param.ndim];
    param.name = (const char *)(param.dims + param.ndim + 1);
    param.name_bytes = (int)(name_bytes > NAME_TEXT ? NAME_TEXT : name_bytes);
    *at = param.dims + param.ndim + 1 + (name_bytes + 7) / 8;
    return param;
}

static bool same(const wire_param *a, const wire_param *b)
{
    return a->kind == b->kind && a->ndim == b->ndim &&
           memcmp(a->dims, b->dims, (size_t)a->ndim * sizeof *a->dims) == 0;
}

/* "float32 [128, 784]", "sparse float32 [1000, 64]"; if the two differ in their devices,
 * "float32 [128, 784] on cuda, with parameter number 0" */
static void shape_text(const wire_param *param, const wire_param *other, char *text)
{
    size_t used =
        (size_t)snprintf(text, SHAPE_TEXT, "%s%s [", param->kind & SPARSE ? "sparse " : "",
                         tddp_dtype_name(dtype_in(param->kind)));
    for (int64_t d = 0; d < param->ndim && used + 90 < SHAPE_TEXT; d++) {
        used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "%s%" PRId64, d ? ", " : "",
                                 param->dims[d]);
    }
    used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "]");
    if (param->kind >> DEVICE_SHIFT != other->kind >> DEVICE_SHIFT) {
        (void)snprintf(text + used, SHAPE_TEXT - used, " on %s, with parameter number %" PRId64,
                       tddp_device_type_name(device_in(param->kind)),
                       param->kind >> COMPANION_SHIFT);
    }
}

static tddp_status fail_param(size_t index, const wire_param *mine, int rank,
                              const wire_param *other)
{
    char shape[SHAPE_TEXT];
    char other_shape[SHAPE_TEXT];
    char other_name[NAME_TEXT + 32] = "";
    shape_text(mine, other, shape);
    shape_text(other, mine, other_shape);
    if (mine->name_bytes != other->name_bytes ||
        memcmp(mine->name, other->name, (size_t)mine->name_bytes) != 0) {
        (void)snprintf(other_name, sizeof other_name, " (\"%.*s\" there)", other->name_bytes,
                       other->name);
    }
    return tddp_fail(TDDP_MISMATCH,
                     "parameter \"%.*s\" (number %zu) is %s on rank 0, but %s on rank %d%s: every "
                     "rank must build the same model",
                     mine->name_bytes, mine->name, index, shape, other_shape, rank, other_name);
}

/* Compares rank 0 with `rank`, whose summary differs. */
static tddp_status compare_params(const summary *summaries, const char *details, size_t stride,
                                  int rank)
{
    const int64_t *mine = (const int64_t *)details;
    const int64_t *other = (const int64_t *)(details + (size_t)rank * stride);
    int64_t counts[2] = {summaries[0].count, summaries[rank].count};
    int64_t common = counts[0] < counts[1] ? counts[0] : counts[1];
    for (int64_t i = 0; i < common; i++) {
        wire_param a = parse_param(&mine);
        wire_param b = parse_param(&other);
        if (!same(&a, &b)) {
            return fail_param((size_t)i, &a, rank, &b);
        }
    }
    if (counts[0] == counts[1]) {
        return tddp_fail(TDDP_INTERNAL,
                         "the parameters of rank 0 and rank %d have equal details, but their "
                         "summaries differ",
                         rank);
    }
    wire_param extra = parse_param(counts[0] > counts[1] ? &mine : &other);
    return tddp_fail(TDDP_MISMATCH,
                     "rank 0 has %" PRId64 " parameters, rank %d has %" PRId64
                     ": \"%.*s\" (number %" PRId64 ") is the first that only rank %d has; every "
                     "rank must build the same model",
                     counts[0], rank, counts[1], extra.name_bytes, extra.name, common,
                     counts[0] > counts[1] ? 0 : rank);
}

static tddp_buffer bytes_of(void *data, size_t bytes)
{
    return (tddp_buffer){data, bytes / 8, TDDP_INT64, TDDP_CPU, 0, NULL};
}

/* The second exchange: all ranks' details, padded to the longest. */
static tddp_status exchange_details(tddp_group *group, const summary *summaries, int differing,
                                    const tddp_bytes *detail, const tddp_reducer_deadline *deadline)
{
    size_t world_size = (size_t)tddp_group_world_size(group);
    size_t stride = 0;
    for (size_t rank = 0; rank < world_size; rank++) {
        size_t bytes = (size_t)summaries[rank].detail_bytes;
        stride = bytes > stride ? bytes : stride;
    }
    char *memory = tddp_alloc_array(world_size + 1, stride);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    char *details = memory + stride;
    if (detail->size) {
        memcpy(memory, detail->data, detail->size);
    }
    bool kept = true;
    tddp_status status =
        tddp_reducer_all_gather(group, bytes_of(memory, stride),
                                bytes_of(details, world_size * stride), deadline, memory, &kept);
    if (status == TDDP_OK) {
        status = compare_params(summaries, details, stride, differing);
    }
    if (kept) {
        free(memory);
    }
    return status;
}

/* The first exchange. The first of `summaries[world_size + 1]` is this rank's. */
static tddp_status exchange(tddp_group *group, summary *summaries, const tddp_bytes *detail,
                            const tddp_reducer_deadline *deadline, bool *kept)
{
    int world_size = tddp_group_world_size(group);
    size_t bytes = sizeof *summaries;
    tddp_status status = tddp_reducer_all_gather(
        group, bytes_of(summaries, bytes), bytes_of(summaries + 1, (size_t)world_size * bytes),
        deadline, summaries, kept);
    if (status != TDDP_OK) {
        return status;
    }
    const summary *all = summaries + 1;
    for (int rank = 1; rank < world_size; rank++) {
        if (all[rank].count != all[0].count || all[rank].hash != all[0].hash) {
            return exchange_details(group, all, rank, detail, deadline);
        }
    }
    tddp_status same = TDDP_OK;
    for (int rank = 1; rank < world_size && same == TDDP_OK; rank++) {
        same = tddp_reducer_compare_opts(&all[0].opts, rank, &all[rank].opts);
    }
    return same;
}

tddp_status tddp_reducer_verify_params(tddp_group *group, const tddp_param *params, size_t count,
                                       const tddp_reducer_opts *opts, const tddp_wait *wait)
{
    size_t world_size = (size_t)tddp_group_world_size(group);
    if (world_size == 1) {
        return TDDP_OK;
    }
    tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    tddp_bytes detail = {0};
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = serialize_param(params, i, &detail);
    }
    summary *summaries =
        status == TDDP_OK ? tddp_alloc_array(world_size + 1, sizeof *summaries) : NULL;
    if (!summaries) {
        tddp_bytes_free(&detail);
        return TDDP_OUT_OF_MEMORY;
    }
    summaries[0] = (summary){(int64_t)count, hash_of(params, count), (int64_t)detail.size,
                             tddp_reducer_summarize_opts(opts)};
    bool kept = true;
    status = exchange(group, summaries, &detail, &deadline, &kept);
    if (kept) {
        free(summaries);
    }
    tddp_bytes_free(&detail);
    return status;
}
