/*
 * The loops of one format of elements. kernels.h includes this file once for each, with
 * FORMAT(name) for the names, and either ELEMENT, the type of an element that is computed as it
 * lies in memory; or HALF, for which it has defined the functions:
 *
 *     load, store    two vectors: a step of the loop
 *     first, get     a vector that begins with one element, and that element
 */
#ifdef HALF
typedef uint16_t FORMAT(element);
typedef float FORMAT(real);
typedef float32_vector FORMAT(vector);
typedef float32_two FORMAT(two);
#else
typedef ELEMENT FORMAT(element);
typedef ELEMENT FORMAT(real);
typedef ELEMENT FORMAT(vector) VECTOR;
typedef struct FORMAT(two) {
    FORMAT(vector) a;
    FORMAT(vector) b;
} FORMAT(two);

enum { FORMAT(lanes) = VECTOR_BYTES / sizeof(ELEMENT) };

INLINE FORMAT(two) FORMAT(load)(const ELEMENT *from)
{
    FORMAT(two) two;
    memcpy(&two.a, from, sizeof two.a);
    memcpy(&two.b, from + FORMAT(lanes), sizeof two.b);
    return two;
}

INLINE void FORMAT(store)(ELEMENT *into, FORMAT(two) two)
{
    memcpy(into, &two.a, sizeof two.a);
    memcpy(into + FORMAT(lanes), &two.b, sizeof two.b);
}

INLINE FORMAT(vector) FORMAT(first)(ELEMENT element)
{
    return (FORMAT(vector)){element};
}

INLINE ELEMENT FORMAT(get)(FORMAT(vector) vector)
{
    return vector[0];
}
#endif

typedef FORMAT(vector) (*FORMAT(combine))(FORMAT(vector), FORMAT(vector));

/* Integers have no factors. */
#define HAS_FACTORS ((FORMAT(real))0.5 != 0)

/* Two vectors of a source from element `at` on, or only the first element. */
INLINE FORMAT(two) FORMAT(read)(const tddp_arith_job *job, int source, size_t at, bool whole)
{
    const FORMAT(element) *from = (const FORMAT(element) *)job->sources[source] + at;
    FORMAT(two) read = whole ? FORMAT(load)(from) : (FORMAT(two)){.a = FORMAT(first)(*from)};
    if (HAS_FACTORS && job->factors) {
        read.a *= (FORMAT(real))job->factors[source];
        read.b *= (FORMAT(real))job->factors[source];
    }
    return read;
}

INLINE void FORMAT(step)(const tddp_arith_job *job, size_t at, void *const *results,
                         int result_count, size_t i, FORMAT(combine) combine, bool whole)
{
    FORMAT(two) result = FORMAT(read)(job, 0, at, whole);
    for (int source = 1; source < job->source_count; source++) {
        const FORMAT(two) next = FORMAT(read)(job, source, at, whole);
        result.a = combine(result.a, next.a);
        result.b = combine(result.b, next.b);
    }
    if (HAS_FACTORS && job->factor != 1) {
        result.a *= (FORMAT(real))job->factor;
        result.b *= (FORMAT(real))job->factor;
    }
    for (int k = 0; k < result_count; k++) {
        FORMAT(element) *into = (FORMAT(element) *)results[k] + i;
        if (whole) {
            FORMAT(store)(into, result);
        } else {
            *into = FORMAT(get)(result.a);
        }
    }
}

INLINE void FORMAT(steps)(const tddp_arith_job *job, size_t start, size_t count,
                          void *const *results, int result_count, FORMAT(combine) combine)
{
    const size_t lanes = 2 * VECTOR_BYTES / sizeof(FORMAT(real));
    size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        FORMAT(step)(job, start + i, results, result_count, i, combine, true);
    }
    for (; i < count; i++) {
        FORMAT(step)(job, start + i, results, result_count, i, combine, false);
    }
}

/* The frequent numbers of sources and results, with `is_sum` more of them, have loops of their own,
 * in which all addresses stay in registers. */
INLINE void FORMAT(run)(const tddp_arith_job *job, size_t start, size_t count, void *const *results,
                        int result_count, bool is_sum, FORMAT(combine) combine)
{
    tddp_arith_job own = *job; /* which no store can change */
    const int max_sources = is_sum ? 4 : 2;
    const int max_results = is_sum ? 2 : 1;
    if (own.factors || own.source_count < 2 || own.source_count > max_sources ||
        result_count > max_results) {
        FORMAT(steps)(&own, start, count, results, result_count, combine);
        return;
    }
    const void *sources[4];
    for (int k = 0; k < max_sources; k++) {
        sources[k] = own.sources[k < own.source_count ? k : 0];
    }
    void *const into[2] = {results[0], results[result_count - 1]};
    own.sources = sources;
    own.factors = NULL;
    if (own.source_count == 2 && result_count == 1) {
        own.source_count = 2;
        FORMAT(steps)(&own, start, count, into, 1, combine);
    } else if (is_sum && own.source_count == 2) {
        own.source_count = 2;
        FORMAT(steps)(&own, start, count, into, 2, combine);
    } else if (is_sum && own.source_count == 3) {
        own.source_count = 3;
        FORMAT(steps)(&own, start, count, into, result_count, combine);
    } else if (is_sum) {
        own.source_count = 4;
        FORMAT(steps)(&own, start, count, into, result_count, combine);
    }
}

#undef FORMAT
#undef ELEMENT
#undef HALF
#undef HAS_FACTORS
