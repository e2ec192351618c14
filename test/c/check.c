/*
 * Runs the registered tests: each in a process group of its own, its ranks as children of that,
 * with a time limit. The parent only waits, so that a test that crashes or hangs cannot hurt the
 * next one.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { EXIT_FAILED = 1, EXIT_SKIPPED = 77, MAX_PROCESSES = 16 };
enum { FIRST_PORT = 12000, PORTS = 20000 };

static check_case *cases;

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

static int listens(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int bound = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return bound;
}

/* Beneath those that the system gives to connections: one of these would take the port between here
 * and the test that listens on it. */
int check_free_port(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int start =
        (int)(((unsigned long)now.tv_nsec / 1000 + (unsigned long)getpid() * 131u) % PORTS);
    for (int i = 0; i < PORTS; i++) {
        int port = FIRST_PORT + (start + i) % PORTS;
        if (listens(port)) {
            return port;
        }
    }
    check_failed(__FILE__, __LINE__, "no free port from %d to %d: %s", FIRST_PORT,
                 FIRST_PORT + PORTS - 1, strerror(errno));
    return 0;
}

static int exit_code_of(int status)
{
    if (WIFEXITED(status)) {
        return WEXITSTATUS(status);
    }
    fprintf(stderr, "ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return EXIT_FAILED;
}

/* The worst of the children's outcomes; the first failure ends the others. */
static int run_ranks(const check_case *test)
{
    pid_t ranks[MAX_PROCESSES];
    int port = check_free_port();
    for (int rank = 0; rank < test->processes; rank++) {
        fflush(NULL);
        ranks[rank] = fork();
        if (ranks[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            test->body(rank, test->processes, port);
            fflush(NULL);
            /* exit, not _exit: the leak checker looks at exit. */
            exit(0);
        }
    }
    int worst = 0;
    for (int left = test->processes; left > 0;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0) {
            break;
        }
        for (int rank = 0; rank < test->processes; rank++) {
            if (ranks[rank] == pid) {
                left--;
                ranks[rank] = 0;
                int code = exit_code_of(status);
                if (code && !worst) {
                    worst = code;
                    fprintf(stderr, "rank %d ended with %d\n", rank, code);
                    for (int other = 0; other < test->processes; other++) {
                        if (ranks[other] > 0) {
                            kill(ranks[other], SIGKILL);
                        }
                    }
                }
            }
        }
    }
    return worst;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Sanitizers and slow machines take their time. */
static double time_factor(void)
{
    const char *text = getenv("CHECK_TIME_FACTOR");
    return text ? atof(text) : 1;
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

static int run_case(const check_case *test)
{
    FILE *output = tmpfile();
    double start = now_seconds();
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
        if (now_seconds() - start > test->seconds * time_factor()) {
            timed_out = 1;
            kill(-leader, SIGKILL);
            kill(leader, SIGKILL);
            waitpid(leader, &status, 0);
            break;
        }
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    int code = timed_out ? EXIT_FAILED : exit_code_of(status);
    printf("%s %s (%.2f s)%s\n",
           code == 0              ? "ok"
           : code == EXIT_SKIPPED ? "skip"
                                  : "FAIL",
           test->name, now_seconds() - start, timed_out ? ": out of time" : "");
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
    for (check_case *test = cases; test; test = test->next) {
        if (argc > 1 && !strstr(test->name, argv[1])) {
            continue;
        }
        run++;
        if (argc > 2) {
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
