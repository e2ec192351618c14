/*
 * The common part of all_reduce, reduce and reduce_scatter: combining all ranks' data, and the
 * pipelines through staging. Runs on the operation's thread.
 */
#ifndef TDDP_SHM_REDUCTION_H
#define TDDP_SHM_REDUCTION_H

#include "backend/shm/algorithms.h"

enum {
    TDDP_SHM_SLICE_LINE = 64,
    /* Chunks in a staging half; reduction.c explains the number. */
    TDDP_SHM_STAGING_CHUNKS = 4,
    TDDP_SHM_MAX_CHUNK_BYTES = TDDP_SHM_STAGING_BYTES / TDDP_SHM_STAGING_CHUNKS,
};

/* cursor->stage of an operation, starting at zero. cursor->index is the chunk. */
enum {
    TDDP_SHM_STAGE_START,
    TDDP_SHM_STAGE_ENTERED,
    TDDP_SHM_STAGE_SYNCED,
    TDDP_SHM_STAGE_COPY,     /* to copy the next chunk to staging */
    TDDP_SHM_STAGE_WAIT,     /* it is copied */
    TDDP_SHM_STAGE_FINISHED, /* this rank has finished, others may not have */
};

typedef struct tddp_shm_reduction tddp_shm_reduction;
struct tddp_shm_reduction {
    tddp_shm *shm;
    const tddp_op *op;
    tddp_shm_cursor *cursor;
    int rank;
    int size;
    int root; /* the only rank that receives the result; -1: all do */
    size_t bytes;
    char *staging; /* this rank's half */
    size_t chunk;  /* bytes of a chunk in staging */
    size_t chunks;
    /* Of one chunk: copies it to this rank's staging; combines the other ranks' staging and this
     * rank's memory into the result. */
    void (*copy)(const tddp_shm_reduction *self, size_t chunk);
    void (*combine)(const tddp_shm_reduction *self, size_t chunk);
    /* The direct algorithm is used if all ranks' memory is registered. Ranks with registered
     * memory then copy nothing before the sync has shown that some other's isn't. */
    bool may_be_direct;
};

static inline bool tddp_shm_receives_result(const tddp_shm_reduction *self, int rank)
{
    return self->root < 0 || self->root == rank;
}

/* Combines `bytes` of each rank's source, in the order of ranks. */
void tddp_shm_combine(const tddp_shm_reduction *self, const void *const *sources,
                      void *const *results, int result_count, size_t bytes, bool streaming);

/* The slice of `bytes` that a rank works on: its offset, aligned to a cache line, and its
 * length. */
size_t tddp_shm_slice(const tddp_shm_reduction *self, size_t bytes, int rank, size_t *length);

/* The place of a chunk in a rank's staging; in this rank's own, which is known before the sync. */
char *tddp_shm_staged_chunk(const tddp_shm_reduction *self, int rank, size_t chunk);
char *tddp_shm_local_staged_chunk(const tddp_shm_reduction *self, size_t chunk);

/* Whether a rank copies its first chunk only after the sync. */
bool tddp_shm_copies_after_sync(const tddp_shm_reduction *self, int rank);

/* The stages that precede an algorithm's own: enters, syncs and selects the algorithm.
 * `registered` is called after the sync. `payload` travels with the call if the algorithm is
 * inline. */
TDDP_NODISCARD tddp_status tddp_shm_start_reduction(tddp_shm_reduction *self, const void *payload,
                                                    const tddp_buffer *local,
                                                    bool (*registered)(const tddp_shm *shm),
                                                    tddp_shm_algorithm *algorithm);

/* Waits until chunk `at` of all ranks is in staging. */
TDDP_NODISCARD tddp_status tddp_shm_wait_chunk(const tddp_shm_reduction *self, size_t at);

/* The pipeline "staged", from TDDP_SHM_STAGE_COPY on. */
TDDP_NODISCARD tddp_status tddp_shm_run_staged(const tddp_shm_reduction *self);

/* The pipeline "sliced" of all_reduce and reduce, in which the ranks divide the work; and its
 * copy(); sliced_reduction.c. */
void tddp_shm_copy_slices(const tddp_shm_reduction *self, size_t chunk);
TDDP_NODISCARD tddp_status tddp_shm_run_sliced(const tddp_shm_reduction *self);

/* all_reduce and reduce, which differ in who receives the result; all_reduce.c. */
TDDP_NODISCARD tddp_status tddp_shm_reduce_to(tddp_shm *shm, const tddp_op *op, int root);

#endif
