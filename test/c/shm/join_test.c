/* How ranks agree on sharing memory: all succeed, or all report the same reason. */
#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <tddp/meeting.h>

#include "backend/shm/control.h"
#include "ranks.h"

enum { GAVE_UP, LEFT }; /* events; one for each rank from LEFT on */

/* Of all ranks, in memory shared by the processes. */
typedef struct outcomes {
    char texts[SHM_MAX_RANKS][512];
    tddp_status statuses[SHM_MAX_RANKS];
} outcomes;

static void die(void)
{
    syscall(SYS_exit_group, 0);
}

static void join_with(shm_rank *it, tddp_backend_opts *opts, const char *refusal,
                      const tddp_wait *wait)
{
    outcomes *all = it->data;
    tddp_status status = tddp_shm_join(opts, refusal, wait, &it->shm);
    all->statuses[it->rank] = status;
    snprintf(all->texts[it->rank], sizeof all->texts[0], "%s", status ? tddp_error_message() : "");
}

static void run_bare(shm_mode mode, int size, shm_body body, outcomes *all)
{
    shm_run((shm_job){.mode = mode, .size = size, .body = body, .data = all, .bare = true});
}

static void expect_all(const outcomes *all, int size, tddp_status status, const char *text)
{
    for (int rank = 0; rank < size; rank++) {
        CHECK_STATUS(all->statuses[rank], status);
        CHECK_TEXT(all->texts[rank], text);
    }
}

/* --- agreement ------------------------------------------------------------------------------- */

static void refuses(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    join_with(it, &opts, it->rank == 1 || it->rank == 3 ? "it has TDDP_SHM=0" : NULL, NULL);
}

TEST(a_refusal_counts_for_all)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 4, refuses, all);
    expect_all(all, 4, TDDP_UNAVAILABLE, "rank 1 cannot share memory: it has TDDP_SHM=0");
    run_bare(SHM_THREADS, 4, refuses, all);
    expect_all(all, 4, TDDP_UNAVAILABLE, "rank 1 cannot share memory: it has TDDP_SHM=0");
}

static void overrides(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    setenv("TDDP_SHM_ALGORITHM", it->rank == 2 ? "all_reduce=staged" : "", 1);
    join_with(it, &opts, NULL, NULL);
}

TEST(overrides_must_be_equal)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 3, overrides, all);
    expect_all(all, 3, TDDP_UNAVAILABLE,
               "TDDP_SHM_ALGORITHM is \"-\" on rank 0, \"all_reduce=staged\" on rank 2: expected "
               "the same on all ranks");
}

static void wrong_settings(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    setenv("TDDP_SHM_ARENA", it->rank == 0 ? "much" : "0", 1);
    join_with(it, &opts, NULL, NULL);
}

TEST(an_invalid_setting_is_reported)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 2, wrong_settings, all);
    expect_all(all, 2, TDDP_UNAVAILABLE,
               "rank 0 cannot share memory: TDDP_SHM_ARENA=\"much\": expected bytes of shared "
               "memory for each rank, 0 to 2^42");
}

/* Some ranks share a host, one is alone; messages name them by other numbers. */
static void on_hosts(shm_rank *it)
{
    static const int hosts[5] = {0, 1, 0, 2, 1};
    static const int names[5] = {10, 11, 12, 13, 14};
    static const int sizes[5] = {2, 2, 2, 1, 2};
    static const int places[5] = {0, 0, 1, 0, 1};
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    opts.hosts = hosts;
    opts.names = names;
    opts.same_host = 0;
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    CHECK_INT(tddp_shm_size(it->shm), sizes[it->rank]);
    CHECK_INT(tddp_shm_rank(it->shm), places[it->rank]);
    CHECK_INT(tddp_shm_rank_name(it->shm, tddp_shm_rank(it->shm)), 10 + it->rank);
    it->size = sizes[it->rank];
    for (int i = 0; i < 3; i++) {
        barrier_once(it);
    }
}

TEST(each_host_has_its_own)
{
    run_bare(SHM_PROCESSES, 5, on_hosts, NULL);
    run_bare(SHM_THREADS, 5, on_hosts, NULL);
}

static void knows_its_cores(shm_rank *it)
{
    CHECK(tddp_shm_cache_bytes(it->shm) >= 65536);
    CHECK(tddp_shm_ranks_per_core(it->shm) >= 1);
    CHECK(tddp_shm_ranks_per_core(it->shm) <= it->size);
    barrier_once(it);
}

SHM_TEST(cores_are_counted, knows_its_cores)

static void pinned(shm_rank *it)
{
    cpu_set_t one;
    cpu_set_t mine;
    CHECK_INT(sched_getaffinity(0, sizeof mine, &mine), 0);
    size_t core = 0;
    while (!CPU_ISSET(core, &mine)) {
        core++;
    }
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    CHECK_INT(sched_setaffinity(0, sizeof one, &one), 0);
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    CHECK_INT(tddp_shm_ranks_per_core(it->shm), 3);
    for (int i = 0; i < 100; i++) {
        barrier_once(it);
    }
}

TEST(ranks_may_share_a_core)
{
    run_bare(SHM_PROCESSES, 3, pinned, NULL);
}

/* --- threads in processes: ranks 0 and 1 in one, 2 and 3 in another ------------------------- */

typedef struct mixed {
    shm_rank *it;
    int rank;
} mixed;

static void *mixed_rank(void *argument)
{
    mixed *self = argument;
    shm_rank it = *self->it;
    it.rank = self->rank;
    it.size = 4;
    it.store = shm_connect(it.job->port);
    tddp_backend_opts opts = shm_opts(it.rank, it.size, it.store);
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it.shm));
    for (int i = 0; i < 100; i++) {
        barrier_once(&it);
    }
    if (it.rank % 2 == 1) {
        CHECK_AWAIT(LEFT + it.rank - 1, 1);
    }
    if (it.rank != 0) {
        /* Its end must not look like the end of its process. */
        tddp_op op = shm_op(&it, TDDP_OP_BARRIER);
        tddp_shm_enter(it.shm, &op, NULL, 0);
        CHECK_STATUS(tddp_shm_sync(it.shm), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "rank 0 has left the group");
    }
    tddp_shm_destroy(it.shm);
    check_signal(LEFT + it.rank);
    tddp_store_release(it.store);
    return NULL;
}

static void two_threads(shm_rank *it)
{
    pthread_t threads[2];
    mixed selves[2];
    for (int i = 0; i < 2; i++) {
        selves[i] = (mixed){it, 2 * it->rank + i};
        CHECK_INT(pthread_create(&threads[i], NULL, mixed_rank, &selves[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
}

TEST(threads_in_processes)
{
    run_bare(SHM_PROCESSES, 2, two_threads, NULL);
}

/* --- ends ------------------------------------------------------------------------------------ */

static int count_fds(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder)) {
        count++;
    }
    closedir(folder);
    return count;
}

static void without_leaks(shm_rank *it)
{
    int before = count_fds();
    for (int i = 0; i < 5; i++) {
        char name[16];
        tddp_store *local;
        snprintf(name, sizeof name, "round%d", i);
        CHECK_OK(tddp_prefix_store_create(name, it->store, &local));
        tddp_backend_opts opts = shm_opts(it->rank, it->size, local);
        tddp_status status =
            tddp_shm_join(&opts, i % 2 && it->rank == 1 ? "for no reason" : NULL, NULL, &it->shm);
        CHECK_STATUS(status, i % 2 ? TDDP_UNAVAILABLE : TDDP_OK);
        if (status == TDDP_OK) {
            it->sequence = 0;
            barrier_once(it);
            tddp_shm_destroy(it->shm);
            it->shm = NULL;
        }
        tddp_store_release(local);
    }
    CHECK_INT(count_fds(), before);
}

TEST(no_descriptor_leaks)
{
    run_bare(SHM_PROCESSES, 3, without_leaks, NULL);
}

static void cancelled(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    tddp_cancel *cancel;
    if (it->rank == 0) {
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_wait wait = {100, cancel};
        join_with(it, &opts, NULL, &wait);
        tddp_cancel_free(cancel);
        check_signal(GAVE_UP);
    } else {
        CHECK_AWAIT(GAVE_UP, 1);
        join_with(it, &opts, NULL, NULL);
    }
}

/* A rank that gives up publishes that: the others don't wait for it. */
TEST(a_rank_that_gives_up_is_reported)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 3, cancelled, all);
    CHECK_STATUS(all->statuses[0], TDDP_TIMEOUT);
    for (int each = 1; each < 3; each++) {
        CHECK_STATUS(all->statuses[each], TDDP_PEER_LOST);
        CHECK_CONTAINS(all->texts[each], "rank 0 failed: while shared memory was set up: ");
    }
}

/* No rank waits for another. Rank 1 runs as user "nobody". */
static void as_another_user(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    if (it->rank == 1) {
        CHECK_INT(setresuid(65534, 65534, 65534), 0);
    }
    join_with(it, &opts, NULL, NULL);
}

TEST(other_users_are_refused)
{
    if (geteuid() != 0) {
        check_skip("only root can become another user");
    }
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 2, as_another_user, all);
    for (int each = 0; each < 2; each++) {
        CHECK_STATUS(all->statuses[each], TDDP_UNAVAILABLE);
        CHECK_CONTAINS(all->texts[each], "expected one user");
    }
}

static tddp_meeting *meeting_of(const shm_rank *it, const char *name)
{
    tddp_meeting *made;
    const tddp_meeting_opts opts = {.store = it->store,
                                    .name = name,
                                    .rank = it->rank,
                                    .world_size = it->size,
                                    .sender = TDDP_MEETING_ALL};
    CHECK_OK(tddp_meeting_open(&opts, &made));
    return made;
}

static void publishes_and_dies(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    if (it->rank == 1) {
        static const char word[] = "yes tddp-shm-nobody-listens-here 0 - - 0 0";
        CHECK_OK(
            tddp_meeting_give(meeting_of(it, "shm/0"), (tddp_slice){word, sizeof word - 1}, NULL));
        die();
    }
    join_with(it, &opts, NULL, NULL);
}

TEST(a_rank_that_dies_after_its_first_report)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 3, publishes_and_dies, all);
    for (int each = 0; each < 3; each += 2) {
        CHECK_STATUS(all->statuses[each], TDDP_PEER_LOST);
        CHECK_CONTAINS(all->texts[each], "rank 1, which ended while shared memory was set up");
    }
}

/* Connects without a segment to send: some words, or none, or nothing but silence. */
static void connect_as_stranger(const char *address, const char *words)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const size_t length = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    memcpy(to.sun_path + 1, address, strlen(address));
    CHECK_INT(connect(fd, (struct sockaddr *)&to, (socklen_t)length), 0);
    if (words) {
        CHECK_INT(send(fd, words, strlen(words), MSG_NOSIGNAL), strlen(words));
        CHECK_INT(close(fd), 0);
    }
}

/* Rank 1 of 3 joins up to the exchange of segments, by hand. */
static void exchange_by_hand(const shm_rank *it, bool after_strangers)
{
    tddp_shm_peer peers[3] = {{0}};
    tddp_shm shm = {.rank = 1, .size = 3, .pid = getpid(), .peers = peers};
    char addresses[3][TDDP_SHM_ADDRESS_BYTES];
    char local[TDDP_SHM_ADDRESS_BYTES];
    char word[128];
    int fd;
    tddp_shm_segment *segment;
    shm.layout = tddp_shm_layout_of(3);
    CHECK_OK(tddp_shm_listen(3, &fd, local));
    snprintf(word, sizeof word, "yes %s 0 - - 0 0", local);
    tddp_meeting *meeting = meeting_of(it, "shm/0");
    const tddp_wait wait = {20000, NULL};
    CHECK_OK(tddp_meeting_give(meeting, (tddp_slice){word, strlen(word)}, NULL));
    CHECK_OK(tddp_meeting_await(meeting, &wait));
    for (int rank = 0; rank < 3; rank++) {
        peers[rank].group_rank = rank;
        CHECK_INT(sscanf(tddp_meeting_records(meeting)[rank].data, "yes %63s", addresses[rank]), 1);
    }
    if (after_strangers) {
        connect_as_stranger(addresses[0], "");
        connect_as_stranger(addresses[0], NULL);
        connect_as_stranger(addresses[0], "hello");
    }
    CHECK_OK(tddp_shm_segment_create(&shm.layout, 0, &segment));
    tddp_shm_attach(&shm, 1, segment, 0);
    tddp_shm_exchange work = {.shm = &shm,
                              .listen_fd = fd,
                              .addresses = addresses,
                              .deadline = tddp_deadline_after_ms(20000),
                              .cancel_fd = -1};
    CHECK_OK(tddp_shm_exchange_segments(&work));
}

static void exchanges_and_dies(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    if (it->rank == 1) {
        exchange_by_hand(it, false);
        die();
    }
    join_with(it, &opts, NULL, NULL);
}

TEST(a_rank_that_dies_before_its_second_report)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 3, exchanges_and_dies, all);
    for (int each = 0; each < 3; each += 2) {
        CHECK_STATUS(all->statuses[each], TDDP_PEER_LOST);
        CHECK_CONTAINS(all->texts[each], "rank 1");
    }
}

static void with_strangers(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    if (it->rank == 1) {
        exchange_by_hand(it, true);
        CHECK_OK(tddp_meeting_give(meeting_of(it, "shm/1"), (tddp_slice){"yes", 3}, NULL));
    } else {
        join_with(it, &opts, NULL, NULL);
        CHECK_OK(((outcomes *)it->data)->statuses[it->rank]);
        CHECK_INT(tddp_shm_size(it->shm), 3);
    }
}

TEST(strangers_at_the_socket_are_ignored)
{
    outcomes *all = shm_common(sizeof *all);
    run_bare(SHM_PROCESSES, 3, with_strangers, all);
}

/* An allocation of one rank fails at any point of the join: all ranks fail, or only that one
 * notices. */
static void out_of_memory(shm_rank *it)
{
    int *round = it->data;
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    tddp_fail_allocation(it->rank == 1 ? *round : 0);
    tddp_status status = tddp_shm_join(&opts, NULL, NULL, &it->shm);
    tddp_fail_allocation(0);
    if (status == TDDP_OK) {
        tddp_op op = shm_op(it, TDDP_OP_BARRIER);
        tddp_shm_enter(it->shm, &op, NULL, 0);
        status = tddp_shm_sync(it->shm);
        CHECK(status == TDDP_OK || status == TDDP_PEER_LOST);
    }
    if (it->rank == 1) {
        round[1] = status == TDDP_OK;
    } else {
        if (!(status == TDDP_OK || status == TDDP_PEER_LOST || status == TDDP_UNAVAILABLE)) {
            check_failed(__FILE__, __LINE__, "round %d: %s", *round, tddp_error_message());
        }
    }
}

TEST(a_join_that_runs_out_of_memory)
{
    int *round = shm_common(2 * sizeof *round);
    do {
        (*round)++;
        run_bare(SHM_PROCESSES, 2, out_of_memory, (outcomes *)(void *)round);
        CHECK(*round < 100);
    } while (!round[1]);
    CHECK(*round > 5);
}

/* --- by name --------------------------------------------------------------------------------- */

static void as_group(shm_rank *it)
{
    CHECK_TEXT(tddp_group_carrier(it->group), "shm");
    float x[3] = {1, 2, (float)it->rank};
    CHECK_OK(tddp_all_reduce(it->group, shm_buffer(x, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_DOUBLE(x[1], 2 * it->size, 0);
    CHECK_DOUBLE(x[2], it->size * (it->size - 1) / 2, 0);
    CHECK_OK(tddp_barrier(it->group, NULL));
}

TEST(a_group_by_name)
{
    for (int size = 1; size <= 4; size++) {
        run_shm_groups(SHM_THREADS, size, as_group, NULL);
        run_shm_groups(SHM_PROCESSES, size, as_group, NULL);
    }
}

static void elsewhere(shm_rank *it)
{
    static const int hosts[2] = {0, 1};
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    void *context;
    opts.hosts = hosts;
    CHECK_STATUS(tddp_shm_backend()->create(&opts, NULL, &context), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), "rank 1 is on another host than rank 0");
}

TEST(several_hosts_are_refused)
{
    run_bare(SHM_THREADS, 2, elsewhere, NULL);
}
