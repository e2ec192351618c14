/* Works in event loops: a descriptor to poll, and a pointer of the caller's. */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "pair.h"
#include "processes.h"
#include "resumer.h"

enum { SOON_MS = 20000, MANY = 200 };

static int fd_of(tddp_work *work)
{
    int fd = -1;
    CHECK_OK(tddp_work_fd(work, &fd));
    CHECK(fd >= 0);
    return fd;
}

/* Whether it is readable now, or before the time is over. */
static int readable(int fd, int ms)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, ms);
}

static int open_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    while (readdir(folder)) {
        count++;
    }
    closedir(folder);
    return count;
}

TEST(a_work_is_polled_with_another_descriptor)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    int ends[2];
    CHECK_INT(pipe(ends), 0);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    struct pollfd entries[2] = {{.fd = fd_of(work), .events = POLLIN},
                                {.fd = ends[0], .events = POLLIN}};
    CHECK_INT(poll(entries, 2, 0), 0);
    CHECK_INT(write(ends[1], "x", 1), 1);
    CHECK_INT(poll(entries, 2, SOON_MS), 1);
    CHECK_INT(entries[0].revents, 0);
    entries[1].fd = -1;
    atomic_store(&resumer.held, 0);
    CHECK_INT(poll(entries, 2, SOON_MS), 1);
    CHECK_INT(entries[0].revents, POLLIN);
    CHECK_INT(tddp_work_completed(work), 1);
    CHECK_OK(tddp_work_status(work));
    CHECK_INT(ran_here(0), 0);
    /* It stays readable, and the same. */
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_INT(fd_of(work), entries[0].fd);
    CHECK_INT(readable(entries[0].fd, 0), 1);
    CHECK(fcntl(entries[0].fd, F_GETFD) & FD_CLOEXEC);
    tddp_work_release(work);
    CHECK_UNTIL(fcntl(entries[0].fd, F_GETFD) == -1); /* the group's thread may have it last */
    close(ends[0]);
    close(ends[1]);
    drop(group, store);
}

TEST(works_that_are_done_are_readable_at_once)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_work *work = begin(group);
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_INT(readable(fd_of(work), 0), 1);
    tddp_work_release(work);
    atomic_store(&resumer.fails, TDDP_PEER_LOST);
    atomic_store(&resumer.held, 1);
    work = begin(group);
    int fd = fd_of(work);
    CHECK_INT(readable(fd, 0), 0);
    atomic_store(&resumer.held, 0);
    CHECK_INT(readable(fd, SOON_MS), 1);
    CHECK_STATUS(tddp_work_status(work), TDDP_PEER_LOST);
    tddp_work_release(work);
    drop(group, store);
}

static void count_call(void *count)
{
    ++*(int *)count;
}

TEST(no_work_is_an_operation_that_is_done)
{
    int count = 0;
    int32_t device = -1;
    CHECK_OK(tddp_work_wait(NULL, NULL));
    CHECK_OK(tddp_work_order(NULL, NULL, NULL));
    CHECK_INT(tddp_work_completed(NULL), 1);
    CHECK_OK(tddp_work_status(NULL));
    CHECK_INT(tddp_work_source(NULL), TDDP_ANY_SOURCE);
    CHECK_INT(tddp_work_device(NULL, &device), TDDP_CPU);
    CHECK_INT(device, 0);
    CHECK_OK(tddp_work_on_done(NULL, count_call, &count));
    CHECK_INT(count, 1);
    tddp_work_release(NULL);
}

TEST(waits_leave_the_descriptor_open)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait wait = {-1, cancel};
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_CANCELED);
    int fd = fd_of(work);
    CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_CANCELED);
    CHECK_INT(readable(fd, 0), 0);
    atomic_store(&resumer.held, 0);
    CHECK_INT(readable(fd, SOON_MS), 1);
    tddp_work_release(work);
    tddp_cancel_free(cancel);
    drop(group, store);
}

TEST(many_works_are_polled)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_work *works[MANY];
    CHECK_OK(tddp_barrier(group, NULL));
    const int before = open_descriptors();
    const int poller = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < MANY; i++) {
        works[i] = begin(group);
        struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = works[i]};
        CHECK_INT(epoll_ctl(poller, EPOLL_CTL_ADD, fd_of(works[i]), &event), 0);
        tddp_work_set_user(works[i], &works[i]);
    }
    for (int left = MANY; left > 0;) {
        struct epoll_event ready[MANY];
        int count = epoll_wait(poller, ready, MANY, SOON_MS);
        CHECK(count > 0);
        left -= count;
        for (int i = 0; i < count; i++) {
            tddp_work *work = ready[i].data.ptr;
            tddp_work **place = tddp_work_user(work);
            CHECK(*place == work);
            *place = NULL;
            CHECK_OK(tddp_work_status(work));
            tddp_work_release(work);
        }
    }
    close(poller);
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_UNTIL(open_descriptors() == before);
    drop(group, store);
}

TEST(messages_are_polled)
{
    pair self = make_pair(20000);
    int32_t got = 0;
    int32_t given = 5;
    tddp_work *received;
    tddp_work *sent;
    CHECK_OK(tddp_recv(self.groups[1], buffer_of(&got, 1, TDDP_INT32), 0, 0, &received));
    CHECK_INT(readable(fd_of(received), 0), 0);
    CHECK_OK(tddp_send(self.groups[0], buffer_of(&given, 1, TDDP_INT32), 1, 0, &sent));
    CHECK_INT(readable(fd_of(received), SOON_MS), 1);
    CHECK_INT(readable(fd_of(sent), SOON_MS), 1);
    CHECK_OK(tddp_work_status(received));
    CHECK_INT(got, 5);
    tddp_work_release(received);
    tddp_work_release(sent);
    drop_pair(&self);
}

/* No rank waits but in poll(). */
MULTI_TEST(ranks_that_only_poll_make_progress, 2, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("shm", "polled", store, rank, world_size, 60000, NULL);
    for (int i = 0; i < 300; i++) {
        float x[3] = {(float)rank, 1, 2};
        tddp_work *work;
        CHECK_OK(tddp_all_reduce(group, buffer_of(x, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
        CHECK_INT(readable(fd_of(work), SOON_MS), 1);
        CHECK_OK(tddp_work_status(work));
        CHECK_DOUBLE(x[0] + x[1] + x[2], 7, 0);
        tddp_work_release(work);
    }
    leave(group, store, world_size);
}

TEST(a_forked_child_has_no_descriptor_of_a_work)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    int fd = fd_of(work);
    await_runs(1); /* see CHECK_FORK */
    pid_t child = fork();
    if (child == 0) {
        int none = -1;
        CHECK_STATUS(tddp_work_fd(work, &none), TDDP_FORKED);
        CHECK_INT(none, -1);
        tddp_work_release(work); /* closes the child's copy alone */
        tddp_group_release(group);
        _exit(0);
    }
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(readable(fd, 0), 0);
    atomic_store(&resumer.held, 0);
    CHECK_INT(readable(fd, SOON_MS), 1);
    tddp_work_release(work);
    drop(group, store);
}

TEST(without_descriptors_the_operation_goes_on)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    int fd = -1;
    struct rlimit limit;
    tddp_work *work = begin(group);
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_STATUS(tddp_work_fd(work, &fd), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "eventfd");
    CHECK_INT(fd, -1);
    CHECK_OK(tddp_work_wait(work, NULL));
    limit.rlim_cur = limit.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_INT(readable(fd_of(work), 0), 1);
    tddp_work_release(work);
    drop(group, store);
}

static void look_at_user(void *data)
{
    tddp_work *work = data;
    *(int *)tddp_work_user(work) += 1;
}

TEST(a_pointer_goes_with_a_work)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    int count = 4;
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    CHECK(tddp_work_user(work) == NULL);
    tddp_work_set_user(work, &count);
    CHECK_OK(tddp_work_on_done(work, look_at_user, work));
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_INT(count, 5);
    CHECK_STATUS(tddp_work_fd(NULL, &count), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_work_fd(work, NULL), TDDP_INVALID_ARGUMENT);
    tddp_work_release(work);
    drop(group, store);
}
