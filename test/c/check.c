/*
 * Runs the registered tests: each in a process group of its own, its ranks as children of that,
 * with a time limit. The parent only waits, so that a test that crashes or hangs cannot hurt the
 * next one. A test that leaves a process behind has failed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "runner.h"

enum {
    EXIT_FAILED = 1,
    EXIT_SKIPPED = 77,
    MAX_PROCESSES = 16,
    LEFTOVERS_SECONDS = 2, /* until what a test has killed, but not waited for, is gone */
};

static check_case *cases;
static const check_service *service;

void check_register(check_case *test)
{
    check_case **end = &cases;
    while (*end) {
        end = &(*end)->next;
    }
    *end = test;
}

void check_failed(const char *file, int line, const char *format, ...)
{
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
    fflush(NULL);
    _exit(EXIT_FAILED);
}

void check_skip(const char *reason)
{
    printf("skipped: %s\n", reason);
    fflush(NULL);
    _exit(EXIT_SKIPPED);
}

void check_int(const char *file, int line, const char *text, int64_t got, int64_t expected)
{
    if (got != expected) {
        check_failed(file, line, "%s is %lld, expected %lld", text, (long long)got,
                     (long long)expected);
    }
}

void check_double(const char *file, int line, const char *text, double got, double expected,
                  double tolerance)
{
    if (!(fabs(got - expected) <= tolerance)) {
        check_failed(file, line, "%s is %.17g, expected %.17g +- %g", text, got, expected,
                     tolerance);
    }
}

void check_text(const char *file, int line, const char *text, const char *got, const char *expected)
{
    if (!got || strcmp(got, expected) != 0) {
        check_failed(file, line, "%s is \"%s\", expected \"%s\"", text, got ? got : "(null)",
                     expected);
    }
}

void check_contains(const char *file, int line, const char *text, const char *got, const char *part)
{
    if (!got || !strstr(got, part)) {
        check_failed(file, line, "%s is \"%s\", expected it to contain \"%s\"", text,
                     got ? got : "(null)", part);
    }
}

void check_status(const char *file, int line, const char *text, tddp_status got,
                  tddp_status expected)
{
    if (got != expected) {
        check_failed(file, line, "%s is %s (%s), expected %s", text, tddp_status_name(got),
                     got == TDDP_OK ? "" : tddp_error_message(), tddp_status_name(expected));
    }
}

/* Bound and not listening: as both ask for SO_REUSEADDR, who is given the number can listen there,
 * and the system gives it to nobody else. */
static int hold_port(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) ||
        bind(fd, (struct sockaddr *)&address, sizeof address) ||
        getsockname(fd, (struct sockaddr *)&address, &length)) {
        check_failed(__FILE__, __LINE__, "no free port: %s", strerror(errno));
    }
    *port = ntohs(address.sin_port);
    return fd;
}

int check_free_port(void)
{
    int port;
    (void)hold_port(&port); /* until this process ends */
    return port;
}

void check_serve(const check_service *wanted)
{
    service = wanted;
}

static int exit_code_of(int status)
{
    if (WIFEXITED(status)) {
        return WEXITSTATUS(status);
    }
    fprintf(stderr, "ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return EXIT_FAILED;
}

static void run_rank(const check_case *test, int rank, int held, int port)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(held);
    test->body(rank, test->processes, port);
    fflush(NULL);
    /* exit, not _exit: the leak checker looks at exit. */
    exit(0);
}

static void kill_others(const pid_t *ranks, int count)
{
    for (int other = 0; other < count; other++) {
        if (ranks[other] > 0) {
            kill(ranks[other], SIGKILL);
        }
    }
}

/* The worst of their outcomes; the first failure ends the others. */
static int await_ranks(pid_t *ranks, int count)
{
    int worst = 0;
    for (int left = count; left > 0;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0) {
            break;
        }
        for (int rank = 0; rank < count; rank++) {
            if (ranks[rank] == pid) {
                left--;
                ranks[rank] = 0;
                check_rank_ended(rank);
                int code = exit_code_of(status);
                if (code && !worst) {
                    worst = code;
                    fprintf(stderr, "rank %d ended with %d\n", rank, code);
                    kill_others(ranks, count);
                }
            }
        }
    }
    return worst;
}

static int run_ranks(const check_case *test)
{
    pid_t ranks[MAX_PROCESSES];
    int port;
    int held = hold_port(&port);
    /* Before the ranks start: they connect at once. */
    if (service && listen(held, SOMAXCONN)) {
        check_failed(__FILE__, __LINE__, "listen: %s", strerror(errno));
    }
    for (int rank = 0; rank < test->processes; rank++) {
        fflush(NULL);
        ranks[rank] = fork();
        if (ranks[rank] < 0) {
            check_failed(__FILE__, __LINE__, "fork: %s", strerror(errno));
        }
        if (ranks[rank] == 0) {
            run_rank(test, rank, held, port);
        }
        check_rank_started(rank, ranks[rank]);
    }
    /* Not before: it has threads. */
    void *started = service ? service->start(held) : NULL;
    int worst = await_ranks(ranks, test->processes);
    if (service) {
        service->stop(started);
    }
    return worst;
}

static void show(FILE *output)
{
    char piece[4096];
    size_t size;
    rewind(output);
    while ((size = fread(piece, 1, sizeof piece, output)) > 0) {
        fwrite(piece, 1, size, stdout);
    }
}

/* True: processes that the test started are left and do not end. Those of its group are killed. */
static bool leaves_processes(pid_t leader)
{
    const double patience = LEFTOVERS_SECONDS * check_timeout_multiplier();
    double limit = check_now() + patience;
    bool found = false;
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) >= 0) {
        if (check_now() > limit) {
            if (found) {
                break;
            }
            found = true;
            kill(-leader, SIGKILL);
            limit += patience;
        }
        if (pid == 0) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    }
    return found;
}

static int run_case(const check_case *test)
{
    FILE *output = tmpfile();
    double start = check_now();
    double limit = test->seconds * check_timeout_multiplier();
    check_events_begin(limit * 0.9);
    fflush(NULL);
    pid_t leader = output ? fork() : -1;
    if (leader < 0) {
        printf("FAIL %s: cannot start: %s\n", test->name, strerror(errno));
        return EXIT_FAILED;
    }
    if (leader == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fileno(output), STDOUT_FILENO);
        dup2(fileno(output), STDERR_FILENO);
        _exit(run_ranks(test));
    }
    int status = 0;
    int timed_out = 0;
    while (waitpid(leader, &status, WNOHANG) == 0) {
        if (check_now() - start > limit) {
            timed_out = 1;
            kill(-leader, SIGKILL);
            kill(leader, SIGKILL);
            waitpid(leader, &status, 0);
            break;
        }
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    int code = timed_out ? EXIT_FAILED : exit_code_of(status);
    const double end = check_now();
    const bool leaves = leaves_processes(leader);
    code = leaves ? EXIT_FAILED : code;
    printf("%s %s (%.2f s)%s%s\n",
           code == 0              ? "ok"
           : code == EXIT_SKIPPED ? "skip"
                                  : "FAIL",
           test->name, end - start, timed_out ? ": out of time" : "",
           leaves ? ": left a process behind" : "");
    if (code) {
        show(output);
    }
    fclose(output);
    return code;
}

int main(int argc, char **argv)
{
    int run = 0;
    int failed = 0;
    int skipped = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* What a test leaves behind becomes a child of this process. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (check_case *test = cases; test; test = test->next) {
        if (argc > 1 && !strstr(test->name, argv[1])) {
            continue;
        }
        run++;
        if (argc > 2) {
            check_events_begin(1e9);
            test->body(0, test->processes, check_free_port());
            continue;
        }
        int code = run_case(test);
        failed += code != 0 && code != EXIT_SKIPPED;
        skipped += code == EXIT_SKIPPED;
    }
    printf("%d tests, %d failed, %d skipped\n", run, failed, skipped);
    if (failed || run == 0) {
        return EXIT_FAILED;
    }
    return skipped == run ? EXIT_SKIPPED : 0;
}
