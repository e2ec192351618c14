/*
 * For tests of messages: contents that identify a message, posting and waiting, and running a test
 * in both modes.
 */
#ifndef TDDP_TEST_SHM_MESSAGES_H
#define TDDP_TEST_SHM_MESSAGES_H

#include "ranks.h"

enum { EAGER = 64 * 1024, LARGE_BYTES = 5 * 1024 * 1024 + 16 };

/* A byte that depends on the sender, the message and the position. */
static inline uint8_t byte_of(int sender, int message, size_t at)
{
    return (uint8_t)(at * 7 + (at >> 8) + (size_t)sender * 31 + (size_t)message * 5 + 1);
}

static inline void fill(void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)data)[i] = byte_of(sender, message, i);
    }
}

static inline void check_bytes(const void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        if (((const uint8_t *)data)[i] != byte_of(sender, message, i)) {
            check_failed(__FILE__, __LINE__, "message %d of rank %d: byte %zu of %zu is %d, not %d",
                         message, sender, i, bytes, ((const uint8_t *)data)[i],
                         byte_of(sender, message, i));
        }
    }
}

static inline void *alloc_bytes(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory != NULL);
    return memory;
}

static inline tddp_buffer bytes_of(void *data, size_t bytes)
{
    return shm_buffer(data, bytes, TDDP_UINT8);
}

static inline tddp_work *post_send(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_send(it->group, buffer, peer, tag, &work));
    return work;
}

static inline tddp_work *post_recv(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_recv(it->group, buffer, peer, tag, &work));
    return work;
}

static inline tddp_status wait_and_release(tddp_work *work)
{
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static inline int wait_for_source(tddp_work *work)
{
    CHECK_OK(tddp_work_wait(work, NULL));
    int source = tddp_work_source(work);
    tddp_work_release(work);
    return source;
}

/* Defines a test with ranks as threads and one with ranks as processes. */
#define IN_BOTH_MODES(name, body, size)                  \
    MULTI_TEST(name##_of_##size##_threads, 1, 60)        \
    {                                                    \
        run_shm_groups(SHM_THREADS, size, body, NULL);   \
    }                                                    \
    MULTI_TEST(name##_of_##size##_processes, 1, 60)      \
    {                                                    \
        run_shm_groups(SHM_PROCESSES, size, body, NULL); \
    }

#endif
