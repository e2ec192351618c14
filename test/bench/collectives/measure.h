/*
 * What the partners of the collectives benchmark share: they are told operations through a FIFO for
 * each rank, time them, check their results, and rank 0 answers with a line of JSON. README.md has
 * the protocol.
 */
#ifndef TDDP_BENCH_MEASURE_H
#define TDDP_BENCH_MEASURE_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, word) */
#define BENCH_OPERATIONS(X)             \
    X(ALL_REDUCE, "all_reduce")         \
    X(BROADCAST, "broadcast")           \
    X(ALL_GATHER, "all_gather")         \
    X(REDUCE_SCATTER, "reduce_scatter") \
    X(ALL_TO_ALL, "all_to_all")         \
    X(REDUCE, "reduce")                 \
    X(GATHER, "gather")                 \
    X(SCATTER, "scatter")               \
    X(BARRIER, "barrier")               \
    X(PING_PONG, "ping_pong")

typedef enum bench_operation {
#define BENCH_ENUM(name, word) BENCH_##name,
    BENCH_OPERATIONS(BENCH_ENUM)
#undef BENCH_ENUM
} bench_operation;

/* X(name, word, bytes of an element) */
#define BENCH_DTYPES(X)        \
    X(UINT8, "uint8", 1)       \
    X(INT32, "int32", 4)       \
    X(INT64, "int64", 8)       \
    X(FLOAT16, "float16", 2)   \
    X(BFLOAT16, "bfloat16", 2) \
    X(FLOAT32, "float32", 4)   \
    X(FLOAT64, "float64", 8)

typedef enum bench_dtype {
#define BENCH_ENUM(name, word, size) BENCH_##name,
    BENCH_DTYPES(BENCH_ENUM)
#undef BENCH_ENUM
} bench_dtype;

/* One call. all_reduce, broadcast and reduce work in place on `input`; root is rank 0. */
typedef struct bench_call {
    bench_operation operation;
    bench_dtype dtype;
    size_t element; /* its bytes */
    size_t count;   /* elements of the larger side */
    size_t part;    /* those of one rank's part */
    bool registered;
    int variant; /* below the partner's `variants` */
    void *input;
    void *output;
} bench_call;

/* A piece of memory as the partner made it. */
typedef struct bench_memory {
    void *data;
    void *handle;
    size_t bytes;
} bench_memory;

typedef struct bench_partner {
    const char *version; /* of whatever is measured */
    int rank;
    int ranks;
    int variants; /* ways to do the same, of which the fastest counts; 0 is one */
    /* Why it cannot do this, or NULL. */
    const char *(*obstacle)(const bench_call *call);
    /* `which`: 0 for input, 1 for output. Ends the process if there is no memory. */
    void (*allocate)(bench_memory *memory, bool registered, int which);
    void (*release)(bench_memory *memory, bool registered);
    /* Ends the process if it fails. */
    void (*run)(const bench_call *call);
} bench_partner;

/* Rank and ranks as the environment has them. */
int bench_environment(const char *name);

/* Serves measurements until the driver closes the FIFO; its result is main's. */
int bench_serve(const bench_partner *partner);

/* Plain memory at a multiple of 64 bytes, for `allocate` and `release`. */
void bench_allocate_plain(bench_memory *memory, bool registered, int which);
void bench_release_plain(bench_memory *memory, bool registered);

/* Says what is wrong and ends the process. */
__attribute__((noreturn, format(printf, 1, 2))) void bench_fail(const char *format, ...);

#ifdef __cplusplus
}
#endif

#endif
