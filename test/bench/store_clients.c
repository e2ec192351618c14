/*
 * A store under a crowd: bench_store_clients [CLIENTS [PROCESSES]]
 *
 * So many clients (10000) join at once, as the ranks of a job do: the hello, a place in the count
 * at `init/`, and a wait for a key that is not there. When all wait, the key is set. Prints joins
 * per second, how long it takes until the last has been woken, and what a client costs the server's
 * process in memory (the kernel's part of a connection is not in it). The clients are shared out
 * among processes, each with one thread and epoll, which speak the bytes of PyTorch 2.x; the server
 * is alone in its process.
 */
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp/store.h>
#include <tddp/version.h>

#include "store_bytes.h"

enum {
    CLIENTS = 10000,
    PROCESSES = 4,
    AT_ONCE = 512, /* connections under way, of one process */
    SPARE_FDS = 32,
    LIMIT_S = 120,
    EVENTS = 256,
};

static const char key[] = "/go";

static void check(tddp_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

static long resident_kb(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*d %ld", &pages) != 1) {
        fail("/proc/self/statm");
    }
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* How many of `wanted` clients fit; says so if that is not all. */
static int raise_limit(int wanted, const char *who)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit)) {
        fail("getrlimit");
    }
    rlim_t needed = (rlim_t)wanted + SPARE_FDS;
    if (limit.rlim_cur < needed) {
        limit.rlim_cur = needed < limit.rlim_max ? needed : limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit)) {
            fail("setrlimit");
        }
    }
    if (limit.rlim_cur >= needed) {
        return wanted;
    }
    int fit = (int)(limit.rlim_cur - SPARE_FDS);
    fprintf(stderr, "%s may open %llu descriptors (ulimit -Hn): %d clients, not %d\n", who,
            (unsigned long long)limit.rlim_cur, fit, wanted);
    return fit;
}

/* --- the clients ----------------------------------------------------------------------------- */

typedef struct client {
    int fd;
    size_t received;
} client;

/* A process of clients and what it tells: a byte when all have joined, then when the last woke. */
typedef struct crowd {
    int port;
    int count;
    int epoll_fd;
    int started;
    int joined;
    int woken;
    client *clients;
    message request;
} crowd;

/* VALIDATE, PING, ADD init/ 1, WAIT /go: answered by 4, 8 and, in the end, 1 bytes. */
static void make_request(message *m)
{
    uint32_t numbers[2] = {htole32(0x3C85F7CE), htole32((uint32_t)getpid())};
    put(m, "\x00", 1);
    put(m, &numbers[0], 4);
    put(m, "\x0d", 1);
    put(m, &numbers[1], 4);
    put(m, "\x04", 1);
    put_string(m, "init/");
    put_number(m, 1);
    put(m, "\x06", 1);
    put_number(m, 1);
    put_string(m, key);
}

enum { JOINED_BYTES = 12, WOKEN_BYTES = 13 };

static void start_client(crowd *c)
{
    client *fresh = &c->clients[c->started++];
    fresh->fd = dial(c->port, SOCK_NONBLOCK);
    struct epoll_event event = {.events = EPOLLOUT, .data = {.ptr = fresh}};
    if (epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fresh->fd, &event)) {
        fail("epoll_ctl");
    }
}

static void say_all(crowd *c, client *who)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = who}};
    if (send(who->fd, c->request.bytes, c->request.size, MSG_NOSIGNAL) !=
            (ssize_t)c->request.size ||
        epoll_ctl(c->epoll_fd, EPOLL_CTL_MOD, who->fd, &event)) {
        fail("a client cannot send");
    }
}

static void hear(crowd *c, client *who)
{
    char bytes[32];
    ssize_t got = recv(who->fd, bytes, sizeof bytes, 0);
    if (got <= 0) {
        fail("a client was dropped");
    }
    size_t before = who->received;
    who->received += (size_t)got;
    c->joined += before < JOINED_BYTES && who->received >= JOINED_BYTES;
    c->woken += before < WOKEN_BYTES && who->received >= WOKEN_BYTES;
}

static void serve_events(crowd *c)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(c->epoll_fd, events, EVENTS, LIMIT_S * 1000);
    if (count <= 0) {
        fail("clients wait in vain");
    }
    for (int i = 0; i < count; i++) {
        if (events[i].events & EPOLLOUT) {
            say_all(c, events[i].data.ptr);
        } else {
            hear(c, events[i].data.ptr);
        }
    }
}

static void be_a_crowd(crowd *c, int orders, int news)
{
    double times[2];
    int count = raise_limit(c->count, "a process of clients");
    c->count = count;
    c->clients = calloc((size_t)c->count, sizeof *c->clients);
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (!c->clients || c->epoll_fd < 0 || read(orders, &c->port, sizeof c->port) <= 0) {
        fail("a process of clients");
    }
    make_request(&c->request);
    while (c->joined < c->count) {
        while (c->started < c->count && c->started - c->joined < AT_ONCE) {
            start_client(c);
        }
        serve_events(c);
    }
    times[0] = now_s();
    if (write(news, times, sizeof *times) < 0) {
        fail("pipe");
    }
    while (c->woken < c->count) {
        serve_events(c);
    }
    times[1] = now_s();
    if (write(news, times + 1, sizeof *times) < 0) {
        fail("pipe");
    }
    (void)!read(orders, &c->port, sizeof c->port); /* until the parent is through */
    exit(0);
}

/* --- the server ------------------------------------------------------------------------------ */

typedef struct process {
    int orders;
    int news;
} process;

static process start_crowd(int count)
{
    int orders[2];
    int news[2];
    if (pipe(orders) || pipe(news)) {
        fail("pipe");
    }
    pid_t pid = fork();
    if (pid < 0) {
        fail("fork");
    }
    if (pid == 0) {
        crowd c = {.count = count};
        close(orders[1]);
        close(news[0]);
        be_a_crowd(&c, orders[0], news[1]);
    }
    close(orders[0]);
    close(news[1]);
    return (process){orders[1], news[0]};
}

/* The latest of what the processes tell. */
static double last_news(const process *processes, int count)
{
    double last = 0;
    for (int i = 0; i < count; i++) {
        double told;
        if (read(processes[i].news, &told, sizeof told) != sizeof told) {
            fail("a process of clients ended");
        }
        last = told > last ? told : last;
    }
    return last;
}

int main(int argc, char **argv)
{
    int clients = argc > 1 ? atoi(argv[1]) : CLIENTS;
    int count = argc > 2 ? atoi(argv[2]) : PROCESSES;
    if (clients < 1 || count < 1 || count > 64) {
        fprintf(stderr, "usage: %s [CLIENTS [PROCESSES, at most 64]]\n", argv[0]);
        return 2;
    }
    process processes[64];
    clients = raise_limit(clients, "the server");
    for (int i = 0; i < count; i++) {
        processes[i] = start_crowd(clients / count + (i < clients % count));
    }
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.max_clients = (size_t)clients + 8;
    tddp_store_server *server;
    check(tddp_store_server_start(&opts, &server));
    tddp_tcp_store_opts store_opts = TDDP_TCP_STORE_OPTS_INIT;
    store_opts.host = "127.0.0.1";
    store_opts.port = tddp_store_server_port(server);
    tddp_store *store;
    check(tddp_tcp_store_open(&store_opts, NULL, &store));
    check(tddp_store_set(store, (tddp_slice){"warm", 4}, (tddp_slice){"up", 2}, NULL));
    usleep(100000);

    long before = resident_kb();
    double start = now_s();
    for (int i = 0; i < count; i++) {
        if (write(processes[i].orders, &store_opts.port, sizeof store_opts.port) < 0) {
            fail("pipe");
        }
    }
    double joined = last_news(processes, count) - start;
    usleep(300000); /* the last waits are read by then */
    long after = resident_kb();
    start = now_s();
    check(tddp_store_set(store, (tddp_slice){key + 1, sizeof key - 2}, (tddp_slice){"1", 1}, NULL));
    double woken = last_news(processes, count) - start;

    printf("libtddp %s: %d clients of %d processes\n", TDDP_VERSION, clients, count);
    printf("joined in %.3f s: %.0f joins/s\n", joined, clients / joined);
    printf("woken by one set: the last after %.1f ms\n", woken * 1e3);
    printf("server's memory: %ld KiB more, %.0f bytes a client\n", after - before,
           (double)(after - before) * 1024 / clients);
    for (int i = 0; i < count; i++) {
        close(processes[i].orders);
    }
    while (wait(NULL) > 0) {
    }
    tddp_store_release(store);
    tddp_store_server_stop(server);
    return 0;
}
