/* What UCX leaves alone in the process of the host language: signals, functions that allocate
 * memory, programs that are executed, and children. */
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp/backend.h>

#include "hosted_group.h"

/* What the C library adds to each action that is set. */
#ifndef SA_RESTORER
#define SA_RESTORER 0x04000000
#endif

enum { SIGNALS = 65, CODE_BYTES = 16, COUNT = 1 << 20 };

static const char *const functions[] = {"mmap",  "munmap", "mremap",  "brk",  "sbrk",
                                        "shmat", "shmdt",  "madvise", "free", "malloc"};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

typedef struct picture {
    struct sigaction actions[SIGNALS];
    char code[FUNCTIONS][CODE_BYTES];
} picture;

static picture take_picture(void)
{
    picture now;
    memset(&now, 0, sizeof now);
    for (int number = 1; number < SIGNALS; number++) {
        (void)sigaction(number, NULL, &now.actions[number]);
    }
    for (int i = 0; i < FUNCTIONS; i++) {
        memcpy(now.code[i], dlsym(RTLD_DEFAULT, functions[i]), CODE_BYTES);
    }
    return now;
}

static void skip_without_ucx(void)
{
    const tddp_backend_v1 *backend;
    if (tddp_backend_find("gloo", &backend) != TDDP_OK) {
        check_skip("the backend ucx was not built: libucx-dev");
    }
}

static void work(tddp_group *group)
{
    static float data[COUNT];
    const tddp_buffer buffer = {data, COUNT, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
}

MULTI_TEST(signals_and_memory_stay_the_processes_own, 2, 30)
{
    static picture before;
    static picture after;
    before = take_picture();
    skip_without_ucx();
    tddp_group *group = join("gloo", rank, world_size, port);
    work(group);
    after = take_picture();
    for (int number = 1; number < SIGNALS; number++) {
        CHECK(before.actions[number].sa_handler == after.actions[number].sa_handler);
        CHECK_INT(after.actions[number].sa_flags & ~SA_RESTORER,
                  before.actions[number].sa_flags & ~SA_RESTORER);
    }
    for (int i = 0; i < FUNCTIONS; i++) {
        if (memcmp(before.code[i], after.code[i], CODE_BYTES) != 0) {
            check_failed(__FILE__, __LINE__, "%s was patched", functions[i]);
        }
    }
    leave(group);
}

static bool is_of_the_internet(int fd)
{
    int domain = 0;
    socklen_t length = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
           (domain == AF_INET || domain == AF_INET6);
}

MULTI_TEST(no_connection_is_open_in_programs_that_are_executed, 3, 30)
{
    skip_without_ucx();
    tddp_group *group = join("gloo", rank, world_size, port);
    work(group);
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        const int flags = fcntl(fd, F_GETFD);
        if (flags >= 0 && is_of_the_internet(fd)) {
            CHECK_INT(flags & FD_CLOEXEC, FD_CLOEXEC);
            count++;
        }
    }
    CHECK(count >= 3); /* to the store and both others */
    leave(group);
}

/* A child can't use UCX, and doesn't disturb its parent's. */
MULTI_TEST(a_child_is_refused, 2, 30)
{
    skip_without_ucx();
    tddp_group *group = join("gloo", rank, world_size, port);
    work(group);
    const pid_t child = CHECK_FORK();
    if (child == 0) {
        const tddp_backend_v1 *backend;
        void *context;
        tddp_store *store = open_store(rank, world_size, port);
        tddp_backend_opts opts = {.size = sizeof opts,
                                  .rank = rank,
                                  .world_size = world_size,
                                  .store = store,
                                  .timeout_ms = 5000,
                                  .group = "child"};
        CHECK_OK(tddp_backend_find("gloo", &backend));
        opts.backend = backend;
        CHECK_STATUS(backend->create(&opts, NULL, &context), TDDP_UNAVAILABLE);
        CHECK_CONTAINS(tddp_error_message(), "has used UCX, which serves no forked process");
        tddp_group_release(group);
        tddp_store_release(store);
        _exit(7);
    }
    int status = 0;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(WEXITSTATUS(status), 7);
    work(group);
    leave(group);
}
