/*
 * How long all_reduce takes: bench_all_reduce BACKEND RANKS BYTES...
 *
 * Prints for each size the median and the fastest tenth over repetitions, in microseconds, as rank
 * 0 sees them. Ranks are processes of this machine.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp.h>

#include "timing.h"

enum { WARM_UP = 5, LEAST = 20, MOST = 300, BYTES_EACH = 64 << 20 };

static void check(tddp_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

static void measure(tddp_group *group, size_t bytes)
{
    double times[MOST];
    size_t repetitions = BYTES_EACH / (bytes ? bytes : 1);
    repetitions = repetitions < LEAST ? LEAST : repetitions > MOST ? MOST : repetitions;
    float *data = calloc(bytes / sizeof *data + 1, sizeof *data);
    if (!data) {
        check(TDDP_OUT_OF_MEMORY);
    }
    tddp_buffer buffer = {data, bytes / sizeof *data, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    for (size_t i = 0; i < WARM_UP + repetitions; i++) {
        double start = now_us();
        check(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        if (i >= WARM_UP) {
            times[i - WARM_UP] = now_us() - start;
        }
    }
    qsort(times, repetitions, sizeof *times, ascending);
    if (tddp_group_rank(group) == 0) {
        printf("%-5s %9zu  median %8.1f  p10 %8.1f\n", tddp_group_backend(group), bytes,
               times[repetitions / 2], times[repetitions / 10]);
        fflush(stdout);
    }
    free(data);
}

static void run(const char *backend, int rank, int world_size, const char *path, char **sizes)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    check(tddp_file_store_open(path, world_size, 60000, &opts.store));
    opts.backend = backend;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 60000;
    tddp_group *group;
    check(tddp_group_create(&opts, NULL, &group));
    for (; *sizes; sizes++) {
        measure(group, strtoul(*sizes, NULL, 10));
    }
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    tddp_store_release(opts.store);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: %s BACKEND RANKS BYTES...\n", argv[0]);
        return 2;
    }
    int ranks = atoi(argv[2]);
    char path[] = "/tmp/bench_all_reduce.XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) {
        perror("mkstemp");
        return 1;
    }
    close(fd);
    for (int rank = 0; rank < ranks; rank++) {
        if (fork() == 0) {
            run(argv[1], rank, ranks, path, argv + 3);
            _exit(0);
        }
    }
    int failed = 0;
    int status;
    while (wait(&status) > 0) {
        failed |= status;
    }
    unlink(path);
    return failed ? 1 : 0;
}
