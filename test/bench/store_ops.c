/*
 * Operations per second of our store server and of PyTorch 1.13's, in one run and by the same
 * client: bench_store_ops [PYTHON [ROUNDS [SECONDS]]]
 *
 * Each server is alone in its process; they take turns cell by cell, and the medians of the rounds
 * are printed. The client speaks the bytes of PyTorch 1.13, which both servers know, with one write
 * a message: set sends values, which nobody answers, and asks for one answer at the end; get waits
 * for the key and then asks for it, as PyTorch's client does; add asks and waits for the answer.
 * "One by one" has one message under way on each connection, as a rank has: with few of them the
 * way to and fro is what counts. "In batches" has many in one write, so that the server is what is
 * measured. The server's processor time per operation is beside it. PYTHON "-" leaves the other
 * server out.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp/store.h>
#include <tddp/version.h>

#include "store_bytes.h"

enum {
    OURS,
    THEIRS,
    SERVERS,
    OPERATIONS = 3,
    BATCH = 64,
    VALUE_BYTES = 64,
    MOST_ROUNDS = 99,
    MOST_CONNECTIONS = 64
};

static const char *const operation_names[OPERATIONS] = {"set", "get", "add"};

typedef struct server {
    pid_t pid;
    int port;
    int keep; /* its end when closed */
    char name[128];
} server;

/* One row of the table. */
typedef struct cell {
    int operation;
    int processes;
    int connections; /* of each */
    int batch;
    double rate[SERVERS][MOST_ROUNDS];
    double cpu_us[SERVERS][MOST_ROUNDS];
} cell;

/* What the clients of one measurement share. */
typedef struct shared {
    atomic_int ready;
    atomic_int go;
    atomic_long operations;
} shared;

/* --- the client ------------------------------------------------------------------------------ */

static void put_set(message *m, const char *key)
{
    char value[VALUE_BYTES + 1] = "";
    memset(value, 'v', VALUE_BYTES);
    put(m, "\x00", 1);
    put_string(m, key);
    put_string(m, value);
}

static void put_wait(message *m, const char *key)
{
    put(m, "\x05", 1);
    put_number(m, 1);
    put_string(m, key);
    m->answer += 1;
}

static void put_get(message *m, const char *key)
{
    put(m, "\x02", 1);
    put_string(m, key);
    m->answer += 8 + VALUE_BYTES;
}

static void put_add(message *m, const char *key)
{
    put(m, "\x03", 1);
    put_string(m, key);
    put_number(m, 1);
    m->answer += 8;
}

static void send_all(int fd, const message *m)
{
    for (size_t sent = 0; sent < m->size;) {
        ssize_t part = send(fd, m->bytes + sent, m->size - sent, MSG_NOSIGNAL);
        if (part <= 0) {
            fail("send");
        }
        sent += (size_t)part;
    }
}

static void receive_all(int fd, const message *m)
{
    char answer[BATCH * (8 + 1 + VALUE_BYTES)];
    for (size_t received = 0; received < m->answer;) {
        ssize_t part = recv(fd, answer + received, m->answer - received, 0);
        if (part <= 0) {
            fail("recv");
        }
        received += (size_t)part;
    }
}

/* The same message on each connection, then the answers. */
static void exchange(const int *fds, int count, const message *m)
{
    for (int i = 0; i < count; i++) {
        send_all(fds[i], m);
    }
    for (int i = 0; i < count; i++) {
        receive_all(fds[i], m);
    }
}

/* The messages of one step, one after the other; returns how many. */
static int make_step(int operation, int batch, const char *name, message step[2])
{
    char value_key[64];
    char count_key[64];
    snprintf(value_key, sizeof value_key, "/%s/value", name);
    snprintf(count_key, sizeof count_key, "/%s/count", name);
    memset(step, 0, 2 * sizeof *step);
    for (int i = 0; i < batch; i++) {
        switch (operation) {
        case 0:
            put_set(&step[0], value_key);
            break;
        case 1:
            put_wait(&step[0], value_key);
            put_get(batch > 1 ? &step[0] : &step[1], value_key);
            break;
        default:
            put_add(&step[0], count_key);
        }
    }
    return step[1].size ? 2 : 1;
}

static void be_a_client(int port, const cell *c, double seconds, shared *all)
{
    char name[32];
    message first = {0};
    message last = {0};
    message step[2];
    snprintf(name, sizeof name, "bench/%d", (int)getpid());
    int messages = make_step(c->operation, c->batch, name, step);
    int fds[MOST_CONNECTIONS];
    for (int i = 0; i < c->connections; i++) {
        fds[i] = dial(port, 0);
    }
    char value_key[64];
    snprintf(value_key, sizeof value_key, "/%s/value", name);
    put_set(&first, value_key);
    put_wait(&first, value_key);
    put_wait(&last, value_key);
    exchange(fds, c->connections, &first);
    atomic_fetch_add(&all->ready, 1);
    while (!atomic_load(&all->go)) {
        usleep(100);
    }
    long steps = 0;
    double end = now_s() + seconds;
    while ((steps % 16 || now_s() < end)) {
        for (int i = 0; i < messages; i++) {
            exchange(fds, c->connections, &step[i]);
        }
        steps++;
    }
    exchange(fds, c->connections, &last); /* all sets are done when this is answered */
    atomic_fetch_add(&all->operations, steps * c->batch * c->connections);
    _exit(0);
}

/* Processor time of a process, all threads. */
static double cpu_s(pid_t pid)
{
    char path[64];
    unsigned long user = 0;
    unsigned long system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                        &system) != 2) {
        fail(path);
    }
    fclose(file);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static void measure(const server *s, cell *c, int which, int round, double seconds)
{
    shared *all =
        mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) {
        fail("mmap");
    }
    fflush(NULL);
    for (int i = 0; i < c->processes; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            fail("fork");
        }
        if (pid == 0) {
            be_a_client(s->port, c, seconds, all);
        }
    }
    for (int i = 0; i < 10000 && atomic_load(&all->ready) < c->processes; i++) {
        usleep(1000);
    }
    double cpu = cpu_s(s->pid);
    double start = now_s();
    atomic_store(&all->go, 1);
    for (int i = 0; i < c->processes; i++) {
        int status;
        /* The servers are children too, and stay. */
        if (waitpid(0, &status, 0) < 0 || status) {
            fail("a client failed");
        }
    }
    double elapsed = now_s() - start;
    double operations = (double)atomic_load(&all->operations);
    c->rate[which][round] = operations / elapsed;
    c->cpu_us[which][round] = (cpu_s(s->pid) - cpu) * 1e6 / operations;
    munmap(all, sizeof *all);
}

/* --- the servers ----------------------------------------------------------------------------- */

static void serve_ours(int keep, int tell)
{
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    tddp_store_server *started;
    char byte;
    opts.host = "127.0.0.1";
    if (tddp_store_server_start(&opts, &started)) {
        fprintf(stderr, "%s\n", tddp_error_message());
        _exit(1);
    }
    dprintf(tell, "%d libtddp %s\n", tddp_store_server_port(started), TDDP_VERSION);
    while (read(keep, &byte, 1) < 0) {
    }
    tddp_store_server_stop(started);
    _exit(0);
}

static void serve_theirs(const char *python, int keep, int tell)
{
    static const char program[] =
        "import sys, platform, torch\n"
        "from torch.distributed import TCPStore\n"
        "if hasattr(TCPStore, 'append'): sys.exit('PyTorch ' + torch.__version__ + "
        "' speaks another dialect: expected 1.13')\n"
        "s = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, 'PyTorch', torch.__version__, 'of Python', platform.python_version(), "
        "flush=True)\n"
        "sys.stdin.read()\n";
    dup2(keep, STDIN_FILENO);
    dup2(tell, STDOUT_FILENO);
    execlp(python, python, "-c", program, (char *)NULL);
    fail(python);
}

/* False if it does not start; it has said why. */
static bool start_server(const char *python, server *out)
{
    server made = {0};
    int keep[2];
    int tell[2];
    if (pipe2(keep, O_CLOEXEC) || pipe2(tell, O_CLOEXEC)) {
        fail("pipe");
    }
    made.pid = fork();
    if (made.pid < 0) {
        fail("fork");
    }
    if (made.pid == 0) {
        setpgid(0, 0); /* apart from the clients, who are waited for */
        close(keep[1]);
        close(tell[0]);
        if (python) {
            serve_theirs(python, keep[0], tell[1]);
        }
        serve_ours(keep[0], tell[1]);
    }
    close(keep[0]);
    close(tell[1]);
    FILE *news = fdopen(tell[0], "r");
    bool started = news && fscanf(news, "%d %127[^\n]", &made.port, made.name) == 2;
    if (news) {
        fclose(news);
    }
    made.keep = keep[1];
    *out = made;
    return started;
}

/* --- the table ------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, ascending);
    return values[count / 2];
}

static void print_row(cell *c, int rounds, int servers)
{
    double ours = median(c->rate[OURS], rounds);
    printf("%-4s %7d  %-10s %11.0f %9.2f", operation_names[c->operation],
           c->processes * c->connections, c->batch > 1 ? "in batches" : "one by one", ours,
           median(c->cpu_us[OURS], rounds));
    if (servers == SERVERS) {
        double theirs = median(c->rate[THEIRS], rounds);
        printf(" %11.0f %9.2f %7.2f", theirs, median(c->cpu_us[THEIRS], rounds), ours / theirs);
    }
    printf("\n");
}

static void run(const server *servers, int count, int rounds, double seconds)
{
    static const int shapes[][3] = {
        {1, 1, 1}, {4, 1, 1}, {4, MOST_CONNECTIONS, 1}, {1, 1, BATCH}, {4, 1, BATCH}};
    enum { CELLS = OPERATIONS * sizeof shapes / sizeof *shapes };
    static cell cells[CELLS];
    for (int i = 0; i < CELLS; i++) {
        const int *shape = shapes[i / OPERATIONS];
        cells[i].operation = i % OPERATIONS;
        cells[i].processes = shape[0];
        cells[i].connections = shape[1];
        cells[i].batch = shape[2];
    }
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < CELLS; i++) {
            for (int which = 0; which < count; which++) {
                measure(&servers[which], &cells[i], which, round, seconds);
            }
        }
    }
    printf("op   clients  messages     ours op/s    cpu us");
    printf(count == SERVERS ? "  theirs op/s    cpu us   ratio\n" : "\n");
    for (int i = 0; i < CELLS; i++) {
        print_row(&cells[i], rounds, count);
    }
}

int main(int argc, char **argv)
{
    const char *python = argc > 1 ? argv[1] : "python3";
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    double seconds = argc > 3 ? atof(argv[3]) : 0.3;
    if (rounds < 1 || rounds > MOST_ROUNDS || seconds <= 0) {
        fprintf(stderr, "usage: %s [PYTHON [ROUNDS, at most %d [SECONDS]]]\n", argv[0],
                MOST_ROUNDS);
        return 2;
    }
    server servers[SERVERS];
    int count = strcmp(python, "-") == 0 ? 1 : SERVERS;
    if (!start_server(NULL, &servers[OURS])) {
        return 1;
    }
    printf("ours: %s\n", servers[OURS].name);
    if (count == SERVERS && start_server(python, &servers[THEIRS])) {
        printf("theirs: %s\n", servers[THEIRS].name);
    } else {
        printf("theirs: not measured, as %s has no PyTorch 1.13\n", python);
        count = 1;
    }
    printf("values of %d bytes, batches of %d, %d rounds of %g s\n", VALUE_BYTES, BATCH, rounds,
           seconds);
    run(servers, count, rounds, seconds);
    for (int i = 0; i < count; i++) {
        close(servers[i].keep);
        waitpid(servers[i].pid, NULL, 0);
    }
    return 0;
}
