/*
 * Sums of one floating-point dtype, the most frequent operation of collectives: all sources are
 * added in registers and written to all results, without blocks in memory. loops.h includes this
 * file once for each dtype, for which KIT(name) provides:
 *
 *     type    an element                   real    what it is computed in: float or double
 *     get     from an element to a real    put     and back, rounded
 *     vector  many reals in registers      lanes   how many
 *     load, store, stream (past the cache, to addresses that are multiples of its size), add, times
 *
 * An element is read from all sources before it is written to any result, which may be the memory
 * of a source.
 */

INLINE void KIT(sum_element)(const void *const *sources, int source_count, void *const *results,
                             int result_count, size_t i, bool scaled, KIT(real) factor)
{
    KIT(real) sum = KIT(get)(((const KIT(type) *)sources[0])[i]);
    for (int k = 1; k < source_count; k++) {
        sum += KIT(get)(((const KIT(type) *)sources[k])[i]);
    }
    if (scaled) {
        sum *= factor;
    }
    for (int k = 0; k < result_count; k++) {
        ((KIT(type) *)results[k])[i] = KIT(put)(sum);
    }
    KEEP_SCALAR;
}

INLINE KIT(vector) KIT(sum_vector)(const void *const *sources, int source_count, size_t i,
                                   bool scaled, KIT(real) factor)
{
    KIT(vector) sum = KIT(load)((const KIT(type) *)sources[0] + i);
    for (int k = 1; k < source_count; k++) {
        sum = KIT(add)(sum, KIT(load)((const KIT(type) *)sources[k] + i));
    }
    return scaled ? KIT(times)(sum, factor) : sum;
}

INLINE void KIT(write_vector)(void *const *results, int result_count, size_t i, KIT(vector) sum,
                              bool streaming)
{
    for (int k = 0; k < result_count; k++) {
        if (streaming) {
            KIT(stream)((KIT(type) *)results[k] + i, sum);
        } else {
            KIT(store)((KIT(type) *)results[k] + i, sum);
        }
    }
}

INLINE void KIT(sum_all)(const void *const *sources, int source_count, void *const *results,
                         int result_count, size_t count, double exact_factor, bool streaming)
{
    const KIT(real) factor = (KIT(real))exact_factor;
    const bool scaled = exact_factor != 1;
    const size_t lanes = KIT(lanes);
    size_t i = 0;
    for (; streaming && i < count && (uintptr_t)((KIT(type) *)results[0] + i) % VECTOR_BYTES; i++) {
        KIT(sum_element)(sources, source_count, results, result_count, i, scaled, factor);
    }
    /* Stores past the cache are fastest by two cache lines. */
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        const KIT(vector) one = KIT(sum_vector)(sources, source_count, i, scaled, factor);
        const KIT(vector) two = KIT(sum_vector)(sources, source_count, i + lanes, scaled, factor);
        KIT(write_vector)(results, result_count, i, one, streaming);
        KIT(write_vector)(results, result_count, i + lanes, two, streaming);
    }
    if (i + lanes <= count) {
        const KIT(vector) last = KIT(sum_vector)(sources, source_count, i, scaled, factor);
        KIT(write_vector)(results, result_count, i, last, streaming);
        i += lanes;
    }
    for (; i < count; i++) {
        KIT(sum_element)(sources, source_count, results, result_count, i, scaled, factor);
    }
}

/* Separate loops for few sources, and for one and two results. */
INLINE void KIT(sum_into)(const tddp_arith_job *job, void *const *results, int result_count,
                          size_t count, bool streaming)
{
    const void *from[4];
    for (int k = 0; k < 4; k++) {
        from[k] = job->sources[k < job->source_count ? k : 0];
    }
    /* Past the cache, memory is the bottleneck. */
    switch (streaming && job->source_count > 2 ? 0 : job->source_count) {
    case 2:
        KIT(sum_all)(from, 2, results, result_count, count, job->factor, streaming);
        break;
    case 3:
        KIT(sum_all)(from, 3, results, result_count, count, job->factor, streaming);
        break;
    case 4:
        KIT(sum_all)(from, 4, results, result_count, count, job->factor, streaming);
        break;
    default:
        KIT(sum_all)
        (job->sources, job->source_count, results, result_count, count, job->factor, streaming);
    }
}

static void KIT(sum_job)(const tddp_arith_job *job, size_t count, bool streaming)
{
    void *into[2] = {job->results[0], job->results[job->result_count > 1]};
    switch (job->result_count) {
    case 1:
        if (streaming) {
            KIT(sum_into)(job, into, 1, count, true);
        } else {
            KIT(sum_into)(job, into, 1, count, false);
        }
        break;
    case 2:
        if (streaming) {
            KIT(sum_into)(job, into, 2, count, true);
        } else {
            KIT(sum_into)(job, into, 2, count, false);
        }
        break;
    default:
        KIT(sum_all)
        (job->sources, job->source_count, job->results, job->result_count, count, job->factor,
         false);
    }
}
