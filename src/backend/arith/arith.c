/*
 * The arithmetic of <tddp/arith.h> by a set of kernels. Pure functions, any thread. choose.c
 * selects the set.
 */
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include "backend/arith/set.h"

enum { BLOCK_BYTES = 8192 }; /* stays in the first-level cache */

/* Other processors see stores past the cache after this. Elsewhere there are none. */
static void fence(void)
{
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* Block by block, so that a result is stored past the cache wherever it begins. */
static void reduce_streaming(const tddp_arith_set *set, const tddp_arith_job *job,
                             tddp_arith_kernel kernel, size_t count, size_t size)
{
    _Alignas(64) char block[BLOCK_BYTES];
    for (size_t start = 0; start < count; start += sizeof block / size) {
        const size_t left = count - start;
        const size_t length = left < sizeof block / size ? left : sizeof block / size;
        kernel(job, start, length, (void *const[]){block}, 1);
        for (int i = 0; i < job->result_count; i++) {
            set->stream((char *)job->results[i] + start * size, block, length * size);
        }
    }
    fence();
}

void tddp_arith_reduce_by(const tddp_arith_set *set, const tddp_arith_job *job)
{
    const tddp_arith_kernel kernel = set->kernels[job->dtype][job->op];
    size_t size = tddp_dtype_size(job->dtype);
    size_t count = job->count;
    if (job->source_count == 1 && !job->factors && job->factor == 1) {
        /* A conversion of float16 would change bits of NaN. */
        for (int i = 0; i < job->result_count; i++) {
            tddp_arith_copy_by(set, job->results[i], job->sources[0], count * size, job->streaming);
        }
        return;
    }
    if (kernel && job->op != TDDP_REDUCE_PRODUCT &&
        (job->dtype == TDDP_COMPLEX64 || job->dtype == TDDP_COMPLEX128)) {
        count *= 2;
        size /= 2;
    }
    if (kernel && job->streaming) {
        reduce_streaming(set, job, kernel, count, size);
    } else if (kernel) {
        kernel(job, 0, count, job->results, job->result_count);
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
        fence();
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
