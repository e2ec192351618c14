/*
 * Selects the set of loops: the widest that the processor and the system support, unless TDDP_ARITH
 * names another one of them. Selected once, by the first call on any thread.
 */
#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/arith/set.h"

/* Whether processor and system support a set. */
static bool works(const tddp_arith_set *set)
{
#ifdef __x86_64__
    if (set == &tddp_arith_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
    if (set == &tddp_arith_avx2) {
        unsigned a, b, c, d; /* clang does not know "f16c" */
        return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    }
#endif
    return set == &tddp_arith_baseline;
}

/* The best first. */
static const tddp_arith_set *const sets[] = {
#ifdef __x86_64__
    &tddp_arith_avx512,
    &tddp_arith_avx2,
#endif
    &tddp_arith_baseline,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const tddp_arith_set *chosen;

const tddp_arith_set *tddp_arith_find(const char *name)
{
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if ((!name || strcmp(name, sets[i]->name) == 0) && works(sets[i])) {
            return sets[i];
        }
    }
    return NULL;
}

static void choose(void)
{
    const char *asked = getenv("TDDP_ARITH");
    if (asked && *asked) {
        chosen = tddp_arith_find(asked);
    }
    if (!chosen) {
        chosen = tddp_arith_find(NULL);
        if (asked && *asked) {
            tddp_log(TDDP_LOG_WARN, "arith",
                     "TDDP_ARITH=%s is unknown or more than this processor has: %s is used", asked,
                     chosen->name);
        }
    }
}

const tddp_arith_set *tddp_arith_chosen(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const char *tddp_arith_name(void)
{
    return tddp_arith_chosen()->name;
}
