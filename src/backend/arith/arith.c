/*
 * Combines many sources into many results, block by block. A block is combined in memory that stays
 * in the first-level cache, in the order of sources, and then written to all results. Pure
 * functions, any thread. The loops are in the sets; choose.c selects one.
 */
#include <string.h>

#include "backend/arith/set.h"

enum {
    BLOCK_BYTES = 4096,
    MAX_STREAMS = 8, /* sources that the processor prefetches well at the same time */
};

/* How the elements of a job are computed. */
typedef struct computing {
    const tddp_arith_set *set;
    const tddp_arith_job *job;
    tddp_arith_combine combine;
    tddp_arith_scale scale; /* NULL: integers, which have no factors */
    size_t parts;           /* real numbers an element consists of */
    size_t size;            /* bytes of an element as given */
    void (*widen)(float *into, const uint16_t *from,
                  size_t count); /* NULL: computed in its own dtype */
    void (*narrow)(uint16_t *into, const float *from, size_t count);
    bool in_place; /* the first result may be written before all sources are read */
} computing;

typedef struct workspace {
    _Alignas(64) unsigned char sum[BLOCK_BYTES];
    _Alignas(64) unsigned char next[BLOCK_BYTES];
    _Alignas(64) unsigned char narrow[BLOCK_BYTES / 2];
} workspace;

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

static tddp_arith_scale scale_of(const tddp_arith_set *set, tddp_dtype dtype)
{
    switch (dtype) {
    case TDDP_FLOAT16:
    case TDDP_BFLOAT16:
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        return set->scale_float32;
    case TDDP_FLOAT64:
    case TDDP_COMPLEX128:
        return set->scale_float64;
    default:
        return NULL;
    }
}

static computing prepare(const tddp_arith_set *set, const tddp_arith_job *job)
{
    const tddp_dtype dtype = job->dtype;
    computing how = {
        .set = set,
        .job = job,
        .combine = set->combine[is_half(dtype) ? TDDP_FLOAT32 : dtype][job->op],
        .scale = scale_of(set, dtype),
        .parts = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128 ? 2 : 1,
        .size = tddp_dtype_size(dtype),
        .in_place = !job->streaming,
    };
    if (is_half(dtype)) {
        how.widen = dtype == TDDP_FLOAT16 ? set->widen_float16 : set->widen_bfloat16;
        how.narrow = dtype == TDDP_FLOAT16 ? set->narrow_float16 : set->narrow_bfloat16;
    }
    /* Sources after the second are read when the sum of the first two is already written. */
    for (int i = job->factors ? 1 : 2; i < job->source_count; i++) {
        how.in_place = how.in_place && job->sources[i] != job->results[0];
    }
    return how;
}

/* A source's block as an operand: in place, or converted into `into`. */
static const void *operand(const computing *how, int source, size_t start, size_t count, void *into)
{
    const tddp_arith_job *job = how->job;
    const void *from = (const char *)job->sources[source] + start * how->size;
    if (how->widen) {
        how->widen(into, from, count);
        from = into;
    }
    if (job->factors && how->scale) {
        how->scale(into, from, count * how->parts, job->factors[source]);
        from = into;
    }
    return from;
}

/* The block's result before rounding: in `sum`, or in a source's memory. */
static const void *compute(const computing *how, size_t start, size_t count, void *sum, void *next)
{
    const tddp_arith_job *job = how->job;
    const void *result = operand(how, 0, start, count, sum);
    for (int i = 1; i < job->source_count; i++) {
        how->combine(sum, result, operand(how, i, start, count, next), count);
        result = sum;
    }
    if (job->factor != 1 && how->scale) {
        how->scale(sum, result, count * how->parts, job->factor);
        result = sum;
    }
    return result;
}

static void deliver(const computing *how, size_t start, size_t bytes, const void *from)
{
    for (int i = 0; i < how->job->result_count; i++) {
        char *into = (char *)how->job->results[i] + start * how->size;
        if (into == from) {
            continue;
        }
        if (how->job->streaming) {
            how->set->stream(into, from, bytes);
        } else {
            memcpy(into, from, bytes);
        }
    }
}

static void run_block(const computing *how, size_t start, size_t count, workspace *scratch)
{
    void *first = (char *)how->job->results[0] + start * how->size;
    if (how->narrow) {
        const void *sum = compute(how, start, count, scratch->sum, scratch->next);
        void *narrow = how->job->streaming ? (void *)scratch->narrow : first;
        how->narrow(narrow, sum, count);
        deliver(how, start, count * how->size, narrow);
    } else {
        void *sum = how->in_place ? first : scratch->sum;
        deliver(how, start, count * how->size, compute(how, start, count, sum, scratch->next));
    }
}

/* Whether one loop can write all results with stores past the cache. */
static bool streams_together(const tddp_arith_set *set, const tddp_arith_job *job)
{
    return job->result_count == 1 ||
           (job->result_count == 2 &&
            ((uintptr_t)job->results[0] - (uintptr_t)job->results[1]) % set->vector_bytes == 0);
}

/* A single source is copied; for float16 without a conversion, which would change bits of NaN. */
static bool copy_at_once(const tddp_arith_set *set, const tddp_arith_job *job)
{
    if (job->source_count > 1 || job->factors || job->factor != 1) {
        return false;
    }
    for (int i = 0; i < job->result_count; i++) {
        tddp_arith_copy_by(set, job->results[i], job->sources[0],
                           job->count * tddp_dtype_size(job->dtype), job->streaming);
    }
    return true;
}

static bool is_sum(tddp_reduce_op op)
{
    return op == TDDP_REDUCE_SUM || op == TDDP_REDUCE_AVG || op == TDDP_REDUCE_PREMUL_SUM;
}

/* Most sums need no blocks. */
static bool sum_at_once(const tddp_arith_set *set, const tddp_arith_job *job)
{
    const tddp_arith_sum sum = is_sum(job->op) ? set->sum[job->dtype] : NULL;
    if (!sum || job->factors || job->source_count < 2 || job->source_count > MAX_STREAMS ||
        (job->streaming && !streams_together(set, job))) {
        return false;
    }
    const bool complex = job->dtype == TDDP_COMPLEX64 || job->dtype == TDDP_COMPLEX128;
    sum(job, job->count * (complex ? 2 : 1), job->streaming);
    if (job->streaming) {
        set->fence();
    }
    return true;
}

void tddp_arith_reduce_by(const tddp_arith_set *set, const tddp_arith_job *job)
{
    if (job->count == 0 || copy_at_once(set, job) || sum_at_once(set, job)) {
        return;
    }
    const computing how = prepare(set, job);
    if (!how.combine) {
        return;
    }
    workspace scratch;
    const size_t max_count = BLOCK_BYTES / (how.widen ? sizeof(float) : how.size);
    for (size_t start = 0; start < job->count; start += max_count) {
        const size_t left = job->count - start;
        run_block(&how, start, left < max_count ? left : max_count, &scratch);
    }
    if (job->streaming) {
        set->fence();
    }
}

void tddp_arith_copy_by(const tddp_arith_set *set, void *into, const void *from, size_t bytes,
                        bool streaming)
{
    if (bytes == 0 || into == from) {
        return;
    }
    if (streaming) {
        set->stream(into, from, bytes);
        set->fence();
    } else {
        memcpy(into, from, bytes);
    }
}

void tddp_arith_reduce(const tddp_arith_job *job)
{
    tddp_arith_reduce_by(tddp_arith_chosen(), job);
}

void tddp_arith_copy(void *into, const void *from, size_t bytes, bool streaming)
{
    tddp_arith_copy_by(tddp_arith_chosen(), into, from, bytes, streaming);
}

void tddp_arith_widen(tddp_dtype half, float *into, const uint16_t *from, size_t count)
{
    const tddp_arith_set *set = tddp_arith_chosen();
    (half == TDDP_FLOAT16 ? set->widen_float16 : set->widen_bfloat16)(into, from, count);
}

void tddp_arith_narrow(tddp_dtype half, uint16_t *into, const float *from, size_t count)
{
    const tddp_arith_set *set = tddp_arith_chosen();
    (half == TDDP_FLOAT16 ? set->narrow_float16 : set->narrow_bfloat16)(into, from, count);
}
