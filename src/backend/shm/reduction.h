/*
 * What all_reduce, reduce and reduce_scatter have in common: combining pieces of all ranks, and the
 * way of chunks through staging. On the thread that runs the operation.
 */
#ifndef TDDP_SHM_REDUCTION_H
#define TDDP_SHM_REDUCTION_H

#include "backend/shm/choose.h"

enum {
    TDDP_SHM_SLICE_LINE = 64,
    /* Chunks in staging at a time; why so many: reduction.c. */
    TDDP_SHM_DEPTH = 4,
    TDDP_SHM_CHUNK_MOST = TDDP_SHM_STAGING_BYTES / TDDP_SHM_DEPTH,
};

/* Where an operation is: course->stage, from zero on. `at` is the chunk. */
enum {
    TDDP_SHM_BEGINS,
    TDDP_SHM_ENTERED,
    TDDP_SHM_MET,
    TDDP_SHM_COPIES, /* the next chunk is to be copied to staging */
    TDDP_SHM_AWAITS, /* it was */
    TDDP_SHM_LEAVES, /* this rank has done, others may not have */
};

typedef struct tddp_shm_reduction tddp_shm_reduction;
struct tddp_shm_reduction {
    tddp_shm *shm;
    const tddp_op *op;
    tddp_shm_course *course;
    int rank;
    int size;
    int root; /* who alone gets the result; -1: all do */
    size_t bytes;
    char *staging; /* the own half */
    size_t chunk;  /* bytes of a chunk in staging */
    size_t chunks;
    /* Of one chunk: to the own staging; from all staging and the own memory to the result. */
    void (*copy)(const tddp_shm_reduction *self, size_t chunk);
    void (*combine)(const tddp_shm_reduction *self, size_t chunk);
    /* Whether ranks whose memory is registered copy nothing before it is known whether all have
     * theirs registered. */
    bool waits_for_direct;
};

static inline bool tddp_shm_gets_result(const tddp_shm_reduction *self, int rank)
{
    return self->root < 0 || self->root == rank;
}

/* Combines `bytes` of each rank's source, by rank. */
void tddp_shm_combine(const tddp_shm_reduction *self, const void *const *sources,
                      void *const *results, int result_count, size_t bytes, bool streaming);

/* The slice of `bytes` that is a rank's to work on: from a line on. */
size_t tddp_shm_slice(const tddp_shm_reduction *self, size_t bytes, int rank, size_t *length);

/* A rank's place for a chunk; the own one, which is there before all others are seen. */
char *tddp_shm_chunk_place(const tddp_shm_reduction *self, int rank, size_t chunk);
char *tddp_shm_own_place(const tddp_shm_reduction *self, size_t chunk);

/* Whether a rank copied its first chunk only after all had entered. */
bool tddp_shm_copied_late(const tddp_shm_reduction *self, int rank);

/*
 * The stages before those of an algorithm: enters, meets, and finds out which algorithm serves.
 * `registered` is asked after all have met. `payload` goes with the call if that is what serves.
 */
TDDP_NODISCARD tddp_status tddp_shm_begin(tddp_shm_reduction *self, const void *payload,
                                          const tddp_buffer *own,
                                          bool (*registered)(const tddp_shm *shm),
                                          tddp_shm_algorithm *algorithm);

/* Waits until chunk `at` of all ranks lies in staging. */
TDDP_NODISCARD tddp_status tddp_shm_await_chunk(const tddp_shm_reduction *self, size_t at);

/* "staged", from TDDP_SHM_COPIES on. */
TDDP_NODISCARD tddp_status tddp_shm_pass_chunks(const tddp_shm_reduction *self);

/* "sliced": the same for all_reduce and reduce, where the ranks share the work, with its copy();
 * sliced.c. */
void tddp_shm_copy_slices(const tddp_shm_reduction *self, size_t chunk);
TDDP_NODISCARD tddp_status tddp_shm_pass_slices(const tddp_shm_reduction *self);

/* all_reduce and reduce, which differ in who gets the result; all_reduce.c. */
TDDP_NODISCARD tddp_status tddp_shm_reduce_to(tddp_shm *shm, const tddp_op *op, int root);

#endif
