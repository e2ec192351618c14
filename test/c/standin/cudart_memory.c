/*
 * The stand-in's memory, its own and the host's in one: a list of pieces, so that what is not freed
 * is not lost to who looks for leaks, as a device keeps it. A lock of its own guards the list.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "standin/cudart.h"

/* Before each event and each block of memory. */
typedef struct piece {
    _Alignas(64) struct piece *before;
    struct piece *after;
} piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static piece *pieces;
static int alive;

int standin_pieces(void)
{
    pthread_mutex_lock(&lock);
    int count = alive;
    pthread_mutex_unlock(&lock);
    return count;
}

void *standin_make_piece(size_t bytes)
{
    piece *made = aligned_alloc(_Alignof(piece), sizeof *made + (bytes + 63) / 64 * 64);
    if (!made) {
        abort();
    }
    memset(made, 0, sizeof *made + bytes);
    pthread_mutex_lock(&lock);
    alive++;
    made->after = pieces;
    if (pieces) {
        pieces->before = made;
    }
    pieces = made;
    pthread_mutex_unlock(&lock);
    return made + 1;
}

void standin_free_piece(void *data)
{
    piece *it = (piece *)data - 1;
    pthread_mutex_lock(&lock);
    alive--;
    if (it->before) {
        it->before->after = it->after;
    } else {
        pieces = it->after;
    }
    if (it->after) {
        it->after->before = it->before;
    }
    pthread_mutex_unlock(&lock);
    free(it);
}

EXPORT tddp_cuda_error cudaMalloc(void **data, size_t bytes)
{
    FAIL_IF_TOLD();
    standin_make_context();
    *data = standin_make_piece(bytes);
    return 0;
}

EXPORT tddp_cuda_error cudaFree(void *data)
{
    standin_make_context();
    if (data) {
        standin_free_piece(data);
    }
    return 0;
}

EXPORT tddp_cuda_error cudaMallocAsync(void **data, size_t bytes, tddp_cuda_stream stream)
{
    (void)stream;
    FAIL_IF_TOLD();
    standin_make_context();
    return cudaMalloc(data, bytes);
}

EXPORT tddp_cuda_error cudaFreeAsync(void *data, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    standin_make_context();
    standin_put(stream, standin_free_piece, data);
    return 0;
}

/* Pinned. */
EXPORT tddp_cuda_error cudaHostAlloc(void **data, size_t bytes, unsigned flags)
{
    (void)flags;
    FAIL_IF_TOLD();
    standin_make_context();
    return cudaMalloc(data, bytes);
}

EXPORT tddp_cuda_error cudaFreeHost(void *data)
{
    standin_make_context();
    return cudaFree(data);
}

typedef struct copy {
    void *into;
    const void *from;
    size_t bytes;
} copy;

static void copy_now(void *data)
{
    copy *it = data;
    memcpy(it->into, it->from, it->bytes);
    free(it);
}

EXPORT tddp_cuda_error cudaMemcpyAsync(void *into, const void *from, size_t bytes, int kind,
                                       tddp_cuda_stream stream)
{
    (void)kind;
    FAIL_IF_TOLD();
    standin_make_context();
    copy *it = calloc(1, sizeof *it);
    if (!it) {
        abort();
    }
    *it = (copy){into, from, bytes};
    standin_put(stream, copy_now, it);
    return 0;
}
