/*
 * Forks of a process that has memory in its arena. Other ranks map the arena's file, so a child
 * that inherited the mapping would write into its parent's tensors, and see later steps. Instead it
 * gets copies, as of the fork, at the same addresses. A lazy private mapping of the file would not
 * do: pages that it has not written yet follow the parent's.
 *
 * The parent makes the copies before it forks, as memory of its own, and unmaps them afterwards;
 * the child moves them to where the originals are mapped. Nothing is copied for vfork(),
 * posix_spawn() and system(), which run no handlers, nor while copies are disabled, for a child
 * that becomes another program. fork() cannot fail because of this: without a copy, the child's
 * pages cannot be accessed, rather than be wrong.
 *
 * Any thread. The lock is held during a fork, so no memory comes or goes meanwhile.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <tddp/group.h>

#include "backend/shm/control.h"

static struct {
    pthread_mutex_t mutex;
    tddp_shm_given *first;
} given = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* How often copies were enabled more than disabled. */
static atomic_int wanted = 1;

void tddp_fork_copies_enable(void)
{
    atomic_fetch_add(&wanted, 1);
}

void tddp_fork_copies_disable(void)
{
    atomic_fetch_sub(&wanted, 1);
}

static size_t given_bytes(void)
{
    size_t bytes = 0;
    for (const tddp_shm_given *each = given.first; each; each = each->next) {
        bytes += each->bytes;
    }
    return bytes;
}

static void *copy_of(const tddp_shm_given *memory)
{
    void *copy =
        mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(copy, memory->bytes, MADV_HUGEPAGE);
    memcpy(copy, memory->data, memory->bytes);
    return copy;
}

static void before_fork(void)
{
    pthread_mutex_lock(&given.mutex);
    if (atomic_load(&wanted) <= 0) {
        return;
    }
    const size_t bytes = given_bytes();
    bool enough = bytes == 0 || tddp_shm_check_memory(1, bytes) == TDDP_OK;
    for (tddp_shm_given *each = given.first; each && enough; each = each->next) {
        each->copy = copy_of(each);
        enough = each->copy != NULL;
    }
    if (!enough) {
        tddp_log(TDDP_LOG_WARN, "shm",
                 "process %d forks without memory for a copy of %zu bytes of gradients and "
                 "parameters: the child ends if it uses them",
                 (int)tddp_process_id(), bytes);
    }
}

static void after_fork_in_parent(void)
{
    for (tddp_shm_given *each = given.first; each; each = each->next) {
        if (each->copy) {
            (void)munmap(each->copy, each->bytes);
            each->copy = NULL;
        }
    }
    pthread_mutex_unlock(&given.mutex);
}

/* Taking access away needs no memory and no address space. */
static void take_private(const tddp_shm_given *memory)
{
    bool moved = memory->copy && mremap(memory->copy, memory->bytes, memory->bytes,
                                        MREMAP_MAYMOVE | MREMAP_FIXED, memory->data) != MAP_FAILED;
    if (!moved && mprotect(memory->data, memory->bytes, PROT_NONE)) {
        abort(); /* rather than write to the parent's */
    }
}

/* From here on it is memory as any other: a child of the child inherits it. */
static void after_fork_in_child(void)
{
    while (given.first) {
        tddp_shm_given *each = given.first;
        given.first = each->next;
        take_private(each);
        *each = (tddp_shm_given){0};
    }
    pthread_mutex_unlock(&given.mutex);
}

/* --- what callers have ----------------------------------------------------------------------- */

static bool handlers_registered;

static void register_handlers(void)
{
    handlers_registered =
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

tddp_status tddp_shm_give(tddp_shm_given *memory, void *data, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, register_handlers);
    if (!handlers_registered) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to prepare shared memory for forks");
    }
    *memory = (tddp_shm_given){.data = data, .bytes = bytes};
    pthread_mutex_lock(&given.mutex);
    memory->next = given.first;
    memory->link = &given.first;
    if (memory->next) {
        memory->next->link = &memory->next;
    }
    given.first = memory;
    pthread_mutex_unlock(&given.mutex);
    return TDDP_OK;
}

void tddp_shm_take_back(tddp_shm_given *memory)
{
    pthread_mutex_lock(&given.mutex);
    if (memory->link) {
        *memory->link = memory->next;
        if (memory->next) {
            memory->next->link = memory->link;
        }
        memory->link = NULL;
    }
    pthread_mutex_unlock(&given.mutex);
}
