/* What the tests of messages have in common: bytes that tell their message, works that are begun
 * and ended, both ways of having ranks. */
#ifndef TDDP_TEST_SHM_MESSAGES_H
#define TDDP_TEST_SHM_MESSAGES_H

#include "ranks.h"

enum { EAGER = 64 * 1024, MOST = 5 * 1024 * 1024 + 16 };

/* Bytes that tell the sender, the message and the place. */
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

static inline void *room_for(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory != NULL);
    return memory;
}

static inline tddp_buffer bytes_of(void *data, size_t bytes)
{
    return shm_buffer(data, bytes, TDDP_UINT8);
}

static inline tddp_work *begin_send(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_send(it->group, buffer, peer, tag, &work));
    return work;
}

static inline tddp_work *begin_recv(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_recv(it->group, buffer, peer, tag, &work));
    return work;
}

static inline tddp_status end(tddp_work *work)
{
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static inline int end_from(tddp_work *work)
{
    CHECK_OK(tddp_work_wait(work, NULL));
    int source = tddp_work_source(work);
    tddp_work_release(work);
    return source;
}

/* Both ways of having ranks. */
#define WAYS(name, body, size)                           \
    MULTI_TEST(name##_of_##size##_threads, 1, 60)        \
    {                                                    \
        run_shm_groups(SHM_THREADS, size, body, NULL);   \
    }                                                    \
    MULTI_TEST(name##_of_##size##_processes, 1, 60)      \
    {                                                    \
        run_shm_groups(SHM_PROCESSES, size, body, NULL); \
    }

#endif
