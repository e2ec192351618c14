/*
 * Verifies that the parameters, and what is done with them, are the same on every rank. The ranks
 * exchange a hash first; only if hashes differ, they exchange all details, so that the error can
 * name the parameter. All ranks get the same data and produce the same text. Runs on the thread
 * that makes the buffers; stateless.
 *
 * The details, in 64-bit numbers: the text of the options, the number of parameters, and for each
 * its kind (dtype, sparse or not, device), the number of dimensions, each dimension, and its name.
 * Texts are their number of bytes, and these, padded to 8.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>

#include "flat/flat.h"

/* What the first exchange carries. */
typedef struct summary {
    int64_t hash;
    int64_t detail_bytes;
} summary;

/* A rank's details, and the hash of what must be equal. */
typedef struct detail {
    tddp_bytes bytes;
    uint64_t hash;
    tddp_status status; /* the first failure */
} detail;

enum {
    SPARSE = 1 << 16,
    DEVICE_SHIFT = 20,
    COMPANION_SHIFT = 24,
    SHAPE_TEXT = 220,
    NAME_TEXT = 200,
};

/* --- writing --------------------------------------------------------------------------------- */

static void append(detail *to, const void *data, size_t bytes, bool compared)
{
    if (to->status == TDDP_OK) {
        to->status = tddp_bytes_append(&to->bytes, data, bytes);
    }
    if (compared) {
        to->hash = tddp_digest(to->hash, data, bytes);
    }
}

static void append_number(detail *to, int64_t number, bool compared)
{
    append(to, &number, sizeof number, compared);
}

static void append_text(detail *to, const char *text, bool compared)
{
    static const char zeros[8];
    const size_t bytes = strlen(text);
    append_number(to, (int64_t)bytes, compared);
    append(to, text, bytes, compared);
    append(to, zeros, (8 - bytes % 8) % 8, compared);
}

/* The first parameter on the same device. Ranks may use different devices, but must agree on which
 * parameters share one, because the assignment to buffers depends on it. */
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

static detail describe(const char *unit, const tddp_param *params, size_t count,
                       const char *options)
{
    detail of = {.hash = TDDP_DIGEST_START};
    append_text(&of, options, true);
    append_number(&of, (int64_t)count, true);
    for (size_t i = 0; i < count; i++) {
        append_number(&of, kind_of(params, i), true);
        append_number(&of, (int64_t)params[i].ndim, true);
        append(&of, params[i].dims, params[i].ndim * sizeof *params[i].dims, true);
        append_text(&of, params[i].name, unit != NULL);
    }
    return of;
}

/* --- reading --------------------------------------------------------------------------------- */

/* The data come from a rank that runs this code: lengths are trusted. */
typedef struct wire_text {
    int64_t bytes;
    const char *data;
} wire_text;

static wire_text parse_text(const int64_t **at)
{
    const wire_text text = {(*at)[0], (const char *)(*at + 1)};
    *at += 1 + (text.bytes + 7) / 8;
    return text;
}

static bool same_text(const wire_text *a, const wire_text *b)
{
    return a->bytes == b->bytes && memcmp(a->data, b->data, (size_t)a->bytes) == 0;
}

/* For "%.*s" */
static int shown(const wire_text *text)
{
    return (int)(text->bytes > NAME_TEXT ? NAME_TEXT : text->bytes);
}

/* A parameter in a rank's details. */
typedef struct wire_param {
    int64_t kind;
    int64_t ndim;
    const int64_t *dims;
    wire_text name;
} wire_param;

static wire_param parse_param(const int64_t **at)
{
    wire_param param = {.kind = (*at)[0], .ndim = (*at)[1], .dims = *at + 2};
    *at = param.dims + param.ndim;
    param.name = parse_text(at);
    return param;
}

/* --- comparing ------------------------------------------------------------------------------- */

static bool same_shape(const wire_param *a, const wire_param *b)
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
                         tddp_dtype_name((tddp_dtype)(param->kind & (SPARSE - 1))));
    for (int64_t d = 0; d < param->ndim && used + 90 < SHAPE_TEXT; d++) {
        used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "%s%" PRId64, d ? ", " : "",
                                 param->dims[d]);
    }
    used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "]");
    if (param->kind >> DEVICE_SHIFT != other->kind >> DEVICE_SHIFT) {
        (void)snprintf(text + used, SHAPE_TEXT - used, " on %s, with parameter number %" PRId64,
                       tddp_device_type_name((tddp_device_type)(param->kind >> DEVICE_SHIFT & 15)),
                       param->kind >> COMPANION_SHIFT);
    }
}

/* " of unit \"layer\"", or nothing */
static void unit_text(const char *unit, char *text)
{
    text[0] = 0;
    if (unit) {
        (void)snprintf(text, NAME_TEXT, " of unit \"%.150s\"", unit);
    }
}

static tddp_status fail_param(const char *unit, int64_t index, const wire_param *mine, int rank,
                              const wire_param *other)
{
    char of[NAME_TEXT];
    char shape[SHAPE_TEXT];
    char other_shape[SHAPE_TEXT];
    char other_name[NAME_TEXT + 32] = "";
    unit_text(unit, of);
    shape_text(mine, other, shape);
    shape_text(other, mine, other_shape);
    if (!same_text(&mine->name, &other->name)) {
        (void)snprintf(other_name, sizeof other_name, " (\"%.*s\" there)", shown(&other->name),
                       other->name.data);
    }
    return tddp_fail(TDDP_MISMATCH,
                     "parameter \"%.*s\"%s (number %" PRId64 ") is %s on rank 0, but %s on rank "
                     "%d%s: every rank must build the same model",
                     shown(&mine->name), mine->name.data, of, index, shape, other_shape, rank,
                     other_name);
}

static tddp_status fail_counts(const char *unit, const int64_t counts[2], int rank,
                               const wire_param *extra)
{
    char of[NAME_TEXT];
    unit_text(unit, of);
    return tddp_fail(TDDP_MISMATCH,
                     "rank 0 has %" PRId64 " parameters%s, rank %d has %" PRId64
                     ": \"%.*s\" (number %" PRId64 ") is the first that only rank %d has; every "
                     "rank must build the same model",
                     counts[0], of, rank, counts[1], shown(&extra->name), extra->name.data,
                     counts[0] < counts[1] ? counts[0] : counts[1],
                     counts[0] > counts[1] ? 0 : rank);
}

/* Compares rank 0 with `rank`, whose hash differs. */
static tddp_status compare(const char *unit, const int64_t *mine, const int64_t *other, int rank)
{
    const wire_text options[2] = {parse_text(&mine), parse_text(&other)};
    if (!same_text(&options[0], &options[1])) {
        return tddp_fail(TDDP_MISMATCH,
                         "rank 0 has %.*s; rank %d has %.*s: every rank must give the same options",
                         (int)options[0].bytes, options[0].data, rank, (int)options[1].bytes,
                         options[1].data);
    }
    const int64_t counts[2] = {*mine++, *other++};
    for (int64_t i = 0; i < counts[0] && i < counts[1]; i++) {
        const wire_param a = parse_param(&mine);
        const wire_param b = parse_param(&other);
        if (!same_shape(&a, &b) || (unit && !same_text(&a.name, &b.name))) {
            return fail_param(unit, i, &a, rank, &b);
        }
    }
    if (counts[0] == counts[1]) {
        return tddp_fail(TDDP_INTERNAL,
                         "the parameters of rank 0 and rank %d are equal, but their hashes differ",
                         rank);
    }
    const wire_param extra = parse_param(counts[0] > counts[1] ? &mine : &other);
    return fail_counts(unit, counts, rank, &extra);
}

/* --- exchanging ------------------------------------------------------------------------------ */

/* What the exchanges are made with. */
typedef struct exchange {
    tddp_group *group;
    const char *unit;
    const tddp_param *params;
    size_t count;
    const tddp_wait *wait;
} exchange;

/* Gathers `mine`, of `stride` bytes with what it is padded to, of each rank, by rank. An operation
 * that outlives the wait frees the memory; else the caller does: `*numbers` is not NULL. */
static tddp_status gather(const exchange *self, const void *mine, size_t bytes, size_t stride,
                          tddp_flat_numbers **numbers, const char **all)
{
    const size_t count = stride / 8;
    const size_t world_size = (size_t)tddp_group_world_size(self->group);
    tddp_work *work = NULL;
    tddp_status status = tddp_flat_numbers_make(self->group, self->params, self->count, TDDP_INT64,
                                                count * (world_size + 1), numbers);
    if (status) {
        return status;
    }
    tddp_buffer input = (*numbers)->buffer;
    tddp_buffer output = input;
    input.count = count;
    output.count = count * world_size;
    output.data = (char *)input.data + stride;
    memcpy(input.data, mine, bytes);
    *all = output.data;
    status = tddp_all_gather(self->group, input, output, &work);
    if (status == TDDP_OK) {
        status = tddp_work_wait(work, self->wait);
    }
    if (work && !tddp_work_completed(work)) {
        if (tddp_work_on_done(work, tddp_flat_numbers_free, *numbers) != TDDP_OK) {
            /* A leak is better than a write to freed memory. */
            tddp_log(TDDP_LOG_WARN, "flat", "the memory of a pending operation is leaked");
        }
        *numbers = NULL;
    }
    tddp_work_release(work);
    return status;
}

/* The second exchange: all ranks' details, padded to the longest. */
static tddp_status exchange_details(const exchange *self, const summary *summaries, int differing,
                                    const tddp_bytes *mine)
{
    const size_t world_size = (size_t)tddp_group_world_size(self->group);
    tddp_flat_numbers *numbers = NULL;
    const char *all;
    size_t stride = 0;
    for (size_t rank = 0; rank < world_size; rank++) {
        const size_t bytes = (size_t)summaries[rank].detail_bytes;
        stride = bytes > stride ? bytes : stride;
    }
    tddp_status status = gather(self, mine->data, mine->size, stride, &numbers, &all);
    if (status == TDDP_OK) {
        status = compare(self->unit, (const int64_t *)all,
                         (const int64_t *)(all + (size_t)differing * stride), differing);
    }
    tddp_flat_numbers_free(numbers);
    return status;
}

static tddp_status exchange_hashes(const exchange *self, const detail *mine)
{
    const summary own = {(int64_t)mine->hash, (int64_t)mine->bytes.size};
    const int world_size = tddp_group_world_size(self->group);
    tddp_flat_numbers *numbers = NULL;
    const char *all;
    tddp_status status = gather(self, &own, sizeof own, sizeof own, &numbers, &all);
    if (status == TDDP_OK) {
        const summary *summaries = (const summary *)all;
        int rank = 1;
        while (rank < world_size && summaries[rank].hash == summaries[0].hash) {
            rank++;
        }
        if (rank < world_size) {
            status = exchange_details(self, summaries, rank, &mine->bytes);
        }
    }
    tddp_flat_numbers_free(numbers);
    return status;
}

tddp_status tddp_flat_verify(tddp_group *group, const char *unit, const tddp_param *params,
                             size_t count, const char *options, const tddp_wait *wait)
{
    if (tddp_group_world_size(group) == 1) {
        return TDDP_OK;
    }
    const exchange all = {group, unit, params, count, wait};
    detail mine = describe(unit, params, count, options);
    const tddp_status status = mine.status == TDDP_OK ? exchange_hashes(&all, &mine) : mine.status;
    tddp_bytes_free(&mine.bytes);
    return status;
}
