/*
 * The failure detector over a store that stops for a while at any moment: what a rank has to tell
 * the others reaches them later, and nothing is lost. At random, each round printed with its seed
 * when it fails: TDDP_TEST_SEED begins with another one, TDDP_TEST_ROUNDS runs more.
 */
#include <poll.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "backend/on_demand.h"
#include "group/failure_detector/detector_state.h"
#include "processes.h"
#include "recorded.h"
#include "store/tcp/tcp.h"
#include "store_process.h"

enum { ROUNDS = 3, SUBGROUPS = 3, MOST_PAUSE_MS = 900 };

/* What happens in a round while the store may be stopped; equal on all ranks. */
typedef enum action {
    NOTHING,
    LEAVE,   /* all ranks shut a subgroup down */
    FAIL,    /* in a subgroup one rank's operation times out: the others receive that */
    CONNECT, /* one rank needs connections: all of them connect */
    ACTIONS,
} action;

typedef struct world {
    int rank;
    int size;
    uint64_t random;
    tddp_store *control; /* never stopped */
    tddp_store *store;
    pid_t host; /* of that one */
    uint64_t meetings;
} world;

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static int pick(world *w, int count)
{
    w->random = w->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((w->random >> 33) % (uint64_t)count);
}

static void together(world *w)
{
    char name[32];
    snprintf(name, sizeof name, "meeting %llu", (unsigned long long)w->meetings++);
    meet(w->control, name, w->size);
}

static atomic_int connected;
static tddp_eventcount connecting;

static tddp_status note_connected(void *context, const tddp_wait *wait, tddp_cancel *given_up)
{
    (void)context, (void)wait, (void)given_up;
    atomic_fetch_add(&connected, 1);
    return TDDP_OK;
}

static void fail_on(world *w, tddp_group *group, int failing)
{
    char text[256];
    char who[128];
    if (w->rank == failing) {
        limit_to(group, 50);
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_TIMEOUT);
        return;
    }
    CHECK_UNTIL(has_failed(group));
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    snprintf(text, sizeof text, "%s failed first, in barrier 2: not done after 50 ms",
             name_of(group, failing, who));
    CHECK_CONTAINS(tddp_error_message(), text);
}

static void act(world *w, action what, tddp_group *all, tddp_group **part)
{
    int one = pick(w, w->size);
    switch (what) {
    case LEAVE:
        tddp_group_release(*part);
        *part = NULL;
        break;
    case FAIL:
        fail_on(w, *part, one);
        break;
    case CONNECT:
        if (w->rank == one) {
            CHECK_STATUS(tddp_on_demand_check(all->on_demand, INT64_MAX), TDDP_CANCELED);
        }
        CHECK_UNTIL(atomic_load(&connected) == 1);
        break;
    default:
        break;
    }
}

static tddp_group *open_part(world *w, const char *name, tddp_group *parent)
{
    tddp_group *group = open_group("fake", name, w->store, w->rank, w->size, 20000, parent);
    CHECK_OK(tddp_barrier(group, NULL));
    return group;
}

/* Rank 0 lets the store go on by a process of its own: it may have something to wait for itself. */
static pid_t stop_store(const world *w, int pause_ms)
{
    CHECK_INT(kill(w->host, SIGSTOP), 0);
    CHECK_AWAIT_STOPPED(w->host);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)poll(NULL, 0, pause_ms);
        (void)kill(w->host, SIGCONT);
        _exit(0);
    }
    return pid;
}

static void run_round(world *w, uint64_t seed)
{
    char name[64];
    tddp_group *parts[SUBGROUPS];
    w->random = seed;
    atomic_store(&connected, 0);
    snprintf(name, sizeof name, "all %llu", (unsigned long long)seed);
    tddp_group *all = open_part(w, name, NULL);
    CHECK_OK(tddp_on_demand_add(all->on_demand, note_connected, NULL, &connecting));
    for (int i = 0; i < SUBGROUPS; i++) {
        snprintf(name, sizeof name, "part %d of %llu", i, (unsigned long long)seed);
        parts[i] = open_part(w, name, all);
    }
    bool connects = false;
    for (int i = 0; i < SUBGROUPS; i++) {
        action what = (action)pick(w, ACTIONS);
        int pause_ms = pick(w, 4) ? pick(w, MOST_PAUSE_MS) : 0;
        what = what == CONNECT && connects ? FAIL : what;
        connects = connects || what == CONNECT;
        together(w);
        pid_t waker = w->rank == 0 && pause_ms ? stop_store(w, pause_ms) : 0;
        together(w);
        act(w, what, all, &parts[i]);
        if (waker > 0) {
            CHECK_INT(waitpid(waker, NULL, 0), waker);
        }
    }
    /* Whatever happened before, the last failure is heard. */
    together(w);
    fail_on(w, all, pick(w, w->size));
    together(w);
    for (int i = 0; i < SUBGROUPS; i++) {
        tddp_group_release(parts[i]);
    }
    tddp_group_release(all);
    together(w);
}

/* A store in a process of its own, whose port rank 0 passes on by the other one. */
static void open_stores(world *w, int port)
{
    int store_port;
    tddp_tcp_grace_ms = 50; /* a pause is long beyond this and the detector's patience */
    w->control = open_store(w->rank, w->size, port);
    if (w->rank == 0) {
        w->host = start_store_process(&store_port);
        char text[16];
        snprintf(text, sizeof text, "%d", store_port);
        CHECK_OK(tddp_store_set(w->control, (tddp_slice){"port", 4},
                                (tddp_slice){text, strlen(text)}, NULL));
    } else {
        tddp_blob blob;
        CHECK_OK(tddp_store_get(w->control, (tddp_slice){"port", 4}, NULL, &blob));
        store_port = atoi(blob.data);
        tddp_blob_free(&blob);
    }
    w->store = open_store(w->rank, w->size, store_port);
}

static void close_stores(world *w)
{
    tddp_store_release(w->store);
    tddp_store_release(w->control);
    if (w->rank == 0) {
        end_store_process(w->host);
    }
}

MULTI_TEST(nothing_is_lost_by_a_store_that_pauses, 3, 600)
{
    world w = {.rank = rank, .size = world_size};
    open_stores(&w, port);
    uint64_t first = setting("TDDP_TEST_SEED", 1);
    uint64_t rounds = setting("TDDP_TEST_ROUNDS", ROUNDS);
    for (uint64_t seed = first; seed < first + rounds; seed++) {
        if (rank == 0) {
            printf("TDDP_TEST_SEED=%llu\n", (unsigned long long)seed);
            fflush(stdout);
        }
        run_round(&w, seed);
    }
    close_stores(&w);
}

/* --- without a connection -------------------------------------------------------------------- */

static void count_silence(tddp_log_level level, const char *room, const char *text, void *count)
{
    (void)level, (void)room;
    if (strstr(text, "the failure detector's store is silent: ")) {
        atomic_fetch_add((atomic_int *)count, 1);
    }
}

static bool is_connected(tddp_detector *detector)
{
    pthread_mutex_lock(&detector->mutex);
    bool answers = detector->store_state == TDDP_DETECTOR_STORE_ANSWERS;
    pthread_mutex_unlock(&detector->mutex);
    return answers;
}

/* Has the watcher connect again. */
static void break_connection(tddp_detector *detector)
{
    CHECK(is_connected(detector));
    const tddp_store *connection = tddp_store_base(detector->store);
    CHECK_INT(shutdown(((const tddp_tcp_store *)connection)->fd, SHUT_RDWR), 0);
}

/* It is stopped until attempts to connect to it have failed for longer than a store is tried that
 * refuses them. */
MULTI_TEST(a_store_that_pauses_while_it_is_connected_to_is_asked_again, 2, 60)
{
    static atomic_int silences;
    world w = {.rank = rank, .size = world_size};
    tddp_detector_connect_ms = 1;
    open_stores(&w, port);
    tddp_log_set_level(TDDP_LOG_DEBUG);
    tddp_log_set_sink(count_silence, &silences);
    tddp_group *group = open_part(&w, "all", NULL);
    CHECK_UNTIL(is_connected(group->detector));
    together(&w);
    if (rank == 0) {
        CHECK_INT(kill(w.host, SIGSTOP), 0);
        CHECK_AWAIT_STOPPED(w.host);
    }
    together(&w);
    break_connection(group->detector);
    CHECK_UNTIL(atomic_load(&silences) >= 2);
    together(&w);
    if (rank == 0) {
        CHECK_INT(kill(w.host, SIGCONT), 0);
    }
    fail_on(&w, group, 1);
    together(&w);
    tddp_group_release(group);
    tddp_log_set_sink(NULL, NULL);
    close_stores(&w);
}

/* --- the numbers of notices ------------------------------------------------------------------ */

typedef struct publisher {
    tddp_store *store;
    int number;
    pthread_t thread;
} publisher;

enum { PUBLISHERS = 6, KEYS = 8 };

/* As the first that no rank has taken. A call that had no time, since other threads use the
 * connection, is made again, as the watcher does. */
static void publish(tddp_store *store, const char *notice)
{
    bool published = false;
    for (int number = 1; !published;) {
        char *there = NULL;
        tddp_status status = tddp_notice_offer(store, number, notice, &there);
        CHECK(status == TDDP_OK || status == TDDP_TIMEOUT);
        published = there && strcmp(there, notice) == 0;
        number += status == TDDP_OK;
        free(there);
    }
}

/* Each publishes every notice, in an order of its own. */
static void *publish_all(void *data)
{
    const publisher *self = data;
    for (int i = 0; i < KEYS; i++) {
        char key[16];
        snprintf(key, sizeof key, "Fgroup %d", (i * 3 + self->number) % KEYS);
        publish(self->store, key);
    }
    return NULL;
}

static void publish_together(tddp_store *store)
{
    publisher publishers[PUBLISHERS];
    char *notice;
    int seen[KEYS] = {0};
    const tddp_wait now_ms = {0, NULL};
    for (int i = 0; i < PUBLISHERS; i++) {
        publishers[i] = (publisher){.store = store, .number = i};
        CHECK_INT(pthread_create(&publishers[i].thread, NULL, publish_all, &publishers[i]), 0);
    }
    for (int i = 0; i < PUBLISHERS; i++) {
        CHECK_INT(pthread_join(publishers[i].thread, NULL), 0);
    }
    for (int64_t number = 1; number <= KEYS; number++) {
        CHECK_OK(tddp_notice_wait(store, number, &now_ms, &notice));
        seen[atoi(notice + strlen("Fgroup "))]++;
        free(notice);
    }
    for (int i = 0; i < KEYS; i++) {
        CHECK_INT(seen[i], 1);
    }
    CHECK_STATUS(tddp_notice_wait(store, KEYS + 1, &now_ms, &notice), TDDP_TIMEOUT);
}

MULTI_TEST(notices_of_many_ranks_are_there_once_and_without_holes, 1, 30)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(20000, &store));
    publish_together(store);
    tddp_store_release(store);
    store = open_store(rank, world_size, port);
    publish_together(store);
    tddp_store_release(store);
}

/* A rank may die at any point of this: what it has stored is a notice, and the others go on. */
MULTI_TEST(a_notice_takes_one_step, 1, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    const tddp_wait now_ms = {0, NULL};
    char *notice;
    tddp_blob answer;
    publish(store, "Cfirst");
    /* The one step of a rank that dies behind it. */
    CHECK_OK(tddp_store_compare_set(store, (tddp_slice){"failure_detector/notice/2", 25},
                                    (tddp_slice){"", 0}, (tddp_slice){"Fsecond", 7}, NULL,
                                    &answer));
    tddp_blob_free(&answer);
    publish(store, "Fthird");
    publish(store, "Fsecond");
    static const char *const expected[] = {"Cfirst", "Fsecond", "Fthird"};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_notice_wait(store, i + 1, &now_ms, &notice));
        CHECK_TEXT(notice, expected[i]);
        free(notice);
    }
    CHECK_STATUS(tddp_notice_wait(store, 4, &now_ms, &notice), TDDP_TIMEOUT);
    tddp_store_release(store);
}
