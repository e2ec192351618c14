/*
 * What making a world of many ranks costs: bench_worlds [--netns PREFIX ADDRESS] HOSTS RANKS_EACH
 * [HOSTS RANKS_EACH...]
 *
 * The ranks are processes of this machine and take each RANKS_EACH of them for those of a host: the
 * linker redirects the group's query of its ranks' hosts to this file. With --netns those of host N
 * run in the network namespace PREFIX-N, and the store in that of host 0, at ADDRESS; else all are
 * in one, whose ports suffice for some 150 ranks. Prints for each world how
 * long it takes until the last rank has the default group, counted from the moment at which all
 * have been told to begin; what a rank and the store send each other meanwhile (bytes, and segments
 * of TCP with data, of which a request and an answer are mostly one each); the rank's sockets and
 * the memory that it alone uses; and a small all_reduce, as the slowest rank sees its median. With
 * at least four worlds, one of them of MODEL_HOSTS hosts, a model of what grows with the world,
 * fitted to them, says what larger ones need.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp.h>

#include "fit.h"
#include "group/peers.h"
#include "timing.h"

enum {
    MOST_RANKS = 1024,
    MOST_WORLDS = 32,
    MODEL_HOSTS = 32,
    LIMIT_MS = 300000,
    WARM_UP = 3,
    REPETITIONS = 15
};

/* What a rank found; in memory that all share. */
typedef struct figures {
    double ready_us; /* the moment at which it had the group */
    double store_bytes;
    double store_segments;
    double sockets;
    double memory_kb;
    double all_reduce_us;
} figures;

int *__wrap_tddp_peers_hosts(const tddp_peers *peers);

static int ranks_each;
static const char *netns_prefix; /* NULL: none */
static const char *store_host = "127.0.0.1";

int *__wrap_tddp_peers_hosts(const tddp_peers *peers)
{
    int *hosts = calloc((size_t)peers->count, sizeof *hosts);
    for (int rank = 0; hosts && rank < peers->count; rank++) {
        hosts[rank] = rank / ranks_each;
    }
    return hosts;
}

static void check(tddp_status status, int rank)
{
    if (status) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

_Noreturn static void fail(const char *what)
{
    fprintf(stderr, "bench_worlds: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void enter_host(int host)
{
    char path[256];
    if (netns_prefix) {
        (void)snprintf(path, sizeof path, "/run/netns/%s-%d", netns_prefix, host);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET)) {
            fail(path);
        }
        close(fd);
    }
}

/* --- what a rank finds ----------------------------------------------------------------------- */

static void count_sockets(int store_port, figures *into)
{
    DIR *entries = opendir("/proc/self/fd");
    const struct dirent *each;
    while (entries && (each = readdir(entries))) {
        const int fd = atoi(each->d_name);
        struct stat info;
        struct sockaddr_in peer = {0};
        struct tcp_info tcp = {0};
        socklen_t peer_bytes = sizeof peer;
        socklen_t tcp_bytes = sizeof tcp;
        if (fstat(fd, &info) || !S_ISSOCK(info.st_mode)) {
            continue;
        }
        into->sockets++;
        if (getpeername(fd, (struct sockaddr *)&peer, &peer_bytes) == 0 &&
            peer.sin_family == AF_INET && ntohs(peer.sin_port) == store_port &&
            getsockopt(fd, IPPROTO_TCP, TCP_INFO, &tcp, &tcp_bytes) == 0) {
            into->store_bytes += (double)tcp.tcpi_bytes_acked + (double)tcp.tcpi_bytes_received;
            into->store_segments += tcp.tcpi_data_segs_out + tcp.tcpi_data_segs_in;
        }
    }
    if (entries) {
        closedir(entries);
    }
}

static double private_kb(void)
{
    char line[256];
    double total = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file)) {
        double kb;
        if (sscanf(line, "Pss_Anon: %lf", &kb) == 1 || sscanf(line, "Pss_Shmem: %lf", &kb) == 1) {
            total += kb;
        }
    }
    if (file) {
        fclose(file);
    }
    return total;
}

static double small_all_reduce(tddp_group *group, int rank)
{
    double times[REPETITIONS];
    float data[256] = {1};
    tddp_buffer buffer = {data, 256, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    for (int i = 0; i < WARM_UP + REPETITIONS; i++) {
        const double start = now_us();
        check(tddp_all_reduce(group, buffer, TDDP_REDUCE_MAX, 0, NULL), rank);
        if (i >= WARM_UP) {
            times[i - WARM_UP] = now_us() - start;
        }
    }
    qsort(times, REPETITIONS, sizeof *times, ascending);
    return times[REPETITIONS / 2];
}

/* Begins once the pipe is closed. */
static void run_rank(int rank, int world_size, int port, int begin_fd, figures *into)
{
    char byte;
    tddp_tcp_store_opts store = TDDP_TCP_STORE_OPTS_INIT;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    enter_host(rank / ranks_each);
    const double before_kb = private_kb();
    store.host = store_host;
    store.port = port;
    store.timeout_ms = LIMIT_MS;
    while (read(begin_fd, &byte, 1) < 0 && errno == EINTR) {
    }
    check(tddp_tcp_store_open(&store, NULL, &opts.store), rank);
    opts.backend = "gloo";
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = LIMIT_MS;
    check(tddp_group_create(&opts, NULL, &group), rank);
    into->ready_us = now_us();
    count_sockets(port, into);
    check(tddp_barrier(group, NULL), rank);
    into->memory_kb = private_kb() - before_kb;
    into->all_reduce_us = small_all_reduce(group, rank);
    check(tddp_barrier(group, NULL), rank);
    tddp_group_release(group);
    tddp_store_release(opts.store);
}

/* --- worlds ---------------------------------------------------------------------------------- */

static int open_files_of(double sockets)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit)) {
        fail("getrlimit");
    }
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < (rlim_t)sockets;
}

static double largest(const figures *all, int count, size_t at)
{
    double most = 0;
    for (int rank = 0; rank < count; rank++) {
        const double value = *(const double *)(const void *)((const char *)&all[rank] + at);
        most = value > most ? value : most;
    }
    return most;
}

/* The store's server, in a process of its own, until the pipe is closed. */
static pid_t start_store(int world_size, int *port, int *end_fd)
{
    int ports[2];
    int ends[2];
    if (pipe(ports) || pipe(ends)) {
        fail("pipe");
    }
    pid_t pid = fork();
    if (pid < 0) {
        fail("fork");
    }
    if (pid == 0) {
        char byte;
        tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
        tddp_store *store;
        close(ends[1]);
        enter_host(0);
        opts.host = store_host;
        opts.is_server = 1;
        opts.wait_for_workers = 0;
        opts.timeout_ms = LIMIT_MS;
        check(tddp_tcp_store_open(&opts, NULL, &store), world_size);
        const int chosen = tddp_tcp_store_port(store);
        if (write(ports[1], &chosen, sizeof chosen) != sizeof chosen) {
            fail("write");
        }
        while (read(ends[0], &byte, 1) < 0 && errno == EINTR) {
        }
        tddp_store_release(store);
        _exit(0);
    }
    close(ends[0]);
    close(ports[1]);
    if (read(ports[0], port, sizeof *port) != sizeof *port) {
        fail("the store");
    }
    close(ports[0]);
    *end_fd = ends[1];
    return pid;
}

/* What was measured of the worlds so far, by which a model is fitted. */
static struct {
    size_t count;
    double most_hosts;
    double terms[MOST_WORLDS][FIT_MOST]; /* 1, ranks, hosts, hosts * hosts */
    double store_bytes[MOST_WORLDS];
    double memory_kb[MOST_WORLDS];
    double sockets[MOST_WORLDS];
} worlds;

static void keep_world(double hosts, double ranks, double store_bytes, double memory_kb,
                       double sockets)
{
    const size_t at = worlds.count;
    if (hosts > 1 && at < MOST_WORLDS) {
        const double terms[FIT_MOST] = {1, ranks, hosts, hosts * hosts};
        memcpy(worlds.terms[at], terms, sizeof terms);
        worlds.store_bytes[at] = store_bytes;
        worlds.memory_kb[at] = memory_kb;
        worlds.sockets[at] = sockets;
        worlds.most_hosts = fmax(worlds.most_hosts, hosts);
        worlds.count++;
    }
}

/* A record in the store has an address, and with Gloo before 2023 a port for each other host: of
 * all hosts together their number's square. */
static void print_model(void)
{
    static const int larger[][2] = {{512, 8}, {2048, 8}};
    double store[FIT_MOST] = {0};
    double memory[FIT_MOST] = {0};
    double sockets[FIT_MOST] = {0};
    if (worlds.most_hosts < MODEL_HOSTS ||
        !fit(worlds.terms, worlds.store_bytes, worlds.count, 4, store) ||
        !fit(worlds.terms, worlds.memory_kb, worlds.count, 3, memory) ||
        !fit(worlds.terms, worlds.sockets, worlds.count, 3, sockets)) {
        return;
    }
    printf("\nmodel of R ranks on H hosts, by least squares over these worlds:\n"
           "  store    %.0f + %.1f R + %.1f H + %.2f H^2 bytes\n"
           "  sockets  %.1f + %.2f R + %.2f H\n"
           "  memory   %.0f + %.2f R + %.2f H KiB\n",
           store[0], store[1], store[2], store[3], sockets[0], sockets[1], sockets[2], memory[0],
           memory[1], memory[2]);
    for (size_t i = 0; i < sizeof larger / sizeof *larger; i++) {
        const double h = larger[i][0];
        const double r = h * larger[i][1];
        printf("%4d x %-3d %5.0f ranks  store %8.0f KiB  sockets %5.0f  memory %6.1f MiB, by the "
               "model\n",
               larger[i][0], larger[i][1], r,
               (store[0] + store[1] * r + store[2] * h + store[3] * h * h) / 1024,
               sockets[0] + sockets[1] * r + sockets[2] * h,
               (memory[0] + memory[1] * r + memory[2] * h) / 1024);
    }
}

static int run_world(int hosts, int each)
{
    const int count = hosts * each;
    int port;
    int end_fd;
    int begin[2];
    int failures = 0;
    figures *all = mmap(NULL, sizeof *all * (size_t)count, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) {
        fail("mmap");
    }
    ranks_each = each;
    pid_t store = start_store(count, &port, &end_fd);
    if (pipe(begin)) {
        fail("pipe");
    }
    for (int rank = 0; rank < count; rank++) {
        pid_t pid = fork();
        if (pid < 0) {
            fail("fork");
        }
        if (pid == 0) {
            close(begin[1]);
            close(end_fd);
            run_rank(rank, count, port, begin[0], &all[rank]);
            exit(0);
        }
    }
    const double start = now_us();
    close(begin[1]);
    close(begin[0]);
    for (int rank = 0; rank < count; rank++) {
        int status;
        failures += wait(&status) < 0 || status != 0;
    }
    close(end_fd);
    (void)waitpid(store, NULL, 0);
#define MOST(field) largest(all, count, offsetof(figures, field))
    printf("%4d x %-3d %5d ranks  ready %7.2f s  store %8.1f KiB %5.0f segments  sockets %5.0f  "
           "memory %6.1f MiB  all_reduce of 1 KiB %9.0f us%s\n",
           hosts, each, count, (MOST(ready_us) - start) / 1e6, MOST(store_bytes) / 1024,
           MOST(store_segments), MOST(sockets), MOST(memory_kb) / 1024, MOST(all_reduce_us),
           failures > 0 ? "  (not all ranks)" : "");
    fflush(stdout);
    keep_world(hosts, count, MOST(store_bytes), MOST(memory_kb), MOST(sockets));
    munmap(all, sizeof *all * (size_t)count);
    return failures;
}

int main(int argc, char **argv)
{
    int failures = 0;
    int first = 1;
    if (argc > 3 && strcmp(argv[1], "--netns") == 0) {
        netns_prefix = argv[2];
        store_host = argv[3];
        first = 4;
    }
    if (argc < first + 2 || (argc - first) % 2 == 1) {
        fprintf(stderr, "usage: bench_worlds [--netns PREFIX ADDRESS] HOSTS RANKS_EACH "
                        "[HOSTS RANKS_EACH...]\n");
        return 2;
    }
    setenv("TDDP_SHM", "1", 0);
    for (int i = first; i + 1 < argc; i += 2) {
        const int hosts = atoi(argv[i]);
        const int each = atoi(argv[i + 1]);
        if (hosts < 1 || each < 1 || hosts * each > MOST_RANKS) {
            fprintf(stderr, "bench_worlds: %s x %s: expected 1 to %d ranks\n", argv[i], argv[i + 1],
                    MOST_RANKS);
            return 2;
        }
        if (open_files_of(2.0 * hosts * each)) {
            fprintf(stderr, "bench_worlds: too few open files for %d ranks: raise ulimit -Hn\n",
                    hosts * each);
            return 1;
        }
        failures += run_world(hosts, each);
    }
    print_model();
    return failures > 0;
}
