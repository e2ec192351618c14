/*
 * What reductions in shared memory take, beside the floor: bench_shm_reduce RANKS BYTES...
 *
 * Prints for each size the medians over interleaved repetitions, in microseconds, as rank 0 sees
 * them, and how many times the floor they are (two ranks alone have one). Each rank writes its
 * vector before each repetition, as those who call an all_reduce have. Of small ones a repetition
 * is many, one after the other, for which the clock is too slow. TDDP_SHM_ALGORITHM chooses the
 * algorithms. Ranks are processes of this machine.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp.h>

#include "backend/shm/shm.h"
#include "floor.h"
#include "timing.h"

enum { SMALL = 4096, AT_ONCE = 64 };
enum { WARM_UP = 5, LEAST = 20, MOST = 1000, BYTES_EACH = 128 << 20, MOST_RANKS = 16 };

enum { FLOOR, FLOOR_PAST, REGISTERED, ANY, REDUCE_ANY, SCATTER_REGISTERED, SCATTER_ANY, MEASURES };

static const char *const names[MEASURES] = {
    "floor",
    "floor past",
    "all_reduce registered",
    "all_reduce any",
    "reduce any",
    "reduce_scatter registered",
    "reduce_scatter any",
};

typedef struct shared {
    alignas(128) _Atomic uint32_t arrived;
    alignas(128) _Atomic uint32_t round;
} shared;

typedef struct bench {
    floor_rank floor;
    shared *common;
    tddp_shm *shm;
    uint64_t sequence;
    int rank;
    int ranks;
    float *registered;
    float *any;
    float *part;
} bench;

static void check(tddp_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

static void align(bench *self)
{
    uint32_t round = atomic_load(&self->common->round);
    if (atomic_fetch_add(&self->common->arrived, 1) + 1 == (uint32_t)self->ranks) {
        atomic_store(&self->common->arrived, 0);
        atomic_store(&self->common->round, round + 1);
        return;
    }
    while (atomic_load(&self->common->round) == round) {
        if (self->ranks > 2) {
            sched_yield();
        }
    }
}

static void run_op(bench *self, int measure, size_t count)
{
    bool registered = measure == REGISTERED || measure == SCATTER_REGISTERED;
    tddp_buffer whole = {
        registered ? self->registered : self->any, count, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    tddp_buffer parts[MOST_RANKS];
    tddp_op op = {.kind = TDDP_OP_ALL_REDUCE,
                  .sequence = ++self->sequence,
                  .input = whole,
                  .output = whole,
                  .reduce = TDDP_REDUCE_SUM,
                  .premul = 1,
                  .timeout_ms = 60000,
                  .awaited = 1};
    if (measure == SCATTER_ANY || measure == SCATTER_REGISTERED) {
        size_t each = count / (size_t)self->ranks;
        for (int rank = 0; rank < self->ranks; rank++) {
            parts[rank] = whole;
            parts[rank].data = (float *)whole.data + each * (size_t)rank;
            parts[rank].count = each;
        }
        op.kind = TDDP_OP_REDUCE_SCATTER;
        op.input.count = each * (size_t)self->ranks;
        op.input_parts = parts;
        op.output = parts[0];
        op.output.data = self->part;
        check(tddp_shm_reduce_scatter(self->shm, &op));
    } else if (measure == REDUCE_ANY) {
        op.kind = TDDP_OP_REDUCE;
        check(tddp_shm_reduce(self->shm, &op));
    } else {
        check(tddp_shm_all_reduce(self->shm, &op));
    }
}

static void check_result(const bench *self, int measure, const float *vector, size_t count)
{
    bool scatters = measure == SCATTER_ANY || measure == SCATTER_REGISTERED;
    float expected = (float)(self->ranks * (self->ranks + 1) / 2);
    const float *result = scatters ? self->part : vector;
    size_t results = scatters ? count / (size_t)self->ranks : count;
    for (size_t i = 0; i < results && (measure != REDUCE_ANY || self->rank == 0); i++) {
        if (result[i] != expected) {
            fprintf(stderr, "%s, rank %d: element %zu is %g, expected %g\n", names[measure],
                    self->rank, i, (double)result[i], (double)expected);
            exit(1);
        }
    }
}

/* One repetition of one of them, in microseconds. */
static double once(bench *self, int measure, size_t bytes)
{
    size_t count = bytes / sizeof(float);
    bool is_floor = measure == FLOOR || measure == FLOOR_PAST;
    float *vector = is_floor ? self->floor.vectors[self->rank]
                    : measure == REGISTERED || measure == SCATTER_REGISTERED ? self->registered
                                                                             : self->any;
    for (size_t i = 0; i < count; i++) {
        vector[i] = (float)(self->rank + 1);
    }
    align(self);
    int times = bytes > SMALL ? 1 : AT_ONCE;
    double start = now_us();
    for (int i = 0; i < times; i++) {
        if (is_floor) {
            floor_all_reduce(&self->floor, bytes, measure == FLOOR_PAST);
        } else {
            run_op(self, measure, count);
        }
    }
    double end = now_us();
    if (times == 1) {
        check_result(self, measure, vector, count);
    }
    align(self);
    return (end - start) / times;
}

static void measure_all(bench *self, size_t bytes)
{
    static double times[MEASURES][MOST];
    size_t repetitions = BYTES_EACH / (bytes ? bytes : 1);
    repetitions = repetitions < LEAST ? LEAST : repetitions > MOST ? MOST : repetitions;
    for (size_t i = 0; i < WARM_UP + repetitions; i++) {
        for (int measure = 0; measure < MEASURES; measure++) {
            if (self->ranks != 2 && measure <= FLOOR_PAST) {
                continue;
            }
            double time = once(self, measure, bytes);
            if (i >= WARM_UP) {
                times[measure][i - WARM_UP] = time;
            }
        }
    }
    if (self->rank > 0) {
        return;
    }
    for (int measure = 0; measure < MEASURES; measure++) {
        qsort(times[measure], repetitions, sizeof **times, ascending);
    }
    double least = times[FLOOR][repetitions / 2];
    least = times[FLOOR_PAST][repetitions / 2] < least ? times[FLOOR_PAST][repetitions / 2] : least;
    for (int measure = 0; measure < MEASURES; measure++) {
        double median = times[measure][repetitions / 2];
        if (self->ranks == 2 || measure > FLOOR_PAST) {
            printf("%-26s %9zu  median %10.2f  p10 %10.2f", names[measure], bytes, median,
                   times[measure][repetitions / 10]);
            printf(self->ranks == 2 ? "  %6.2f of the floor\n" : "\n", median / least);
        }
    }
    fflush(stdout);
}

static void *get_memory(bench *self, size_t bytes)
{
    void *handle;
    void *data;
    check(tddp_shm_allocate(self->shm, bytes, &handle, &data));
    return data;
}

static void run(bench *self, const char *path, size_t most, char **sizes)
{
    int hosts[MOST_RANKS] = {0};
    tddp_backend_opts opts = {.size = sizeof opts,
                              .rank = self->rank,
                              .world_size = self->ranks,
                              .timeout_ms = 60000,
                              .device_index = -1,
                              .same_host = 1,
                              .group = "bench",
                              .hosts = hosts};
    check(tddp_file_store_open(path, self->ranks, 60000, &opts.store));
    check(tddp_shm_join(&opts, NULL, NULL, &self->shm));
    self->registered = get_memory(self, most);
    self->any = malloc(most);
    self->part = malloc(most);
    if (!self->any || !self->part) {
        check(TDDP_OUT_OF_MEMORY);
    }
    for (; *sizes; sizes++) {
        measure_all(self, strtoul(*sizes, NULL, 10));
    }
    align(self);
    tddp_shm_destroy(self->shm);
    tddp_store_release(opts.store);
}

int main(int argc, char **argv)
{
    int ranks = argc > 2 ? atoi(argv[1]) : 0;
    if (ranks < 1 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: %s RANKS BYTES..., RANKS at most %d\n", argv[0], MOST_RANKS);
        return 2;
    }
    char path[] = "/tmp/bench_shm_reduce.XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) {
        perror("mkstemp");
        return 1;
    }
    close(fd);
    size_t most = 4096;
    for (int i = 2; i < argc; i++) {
        size_t bytes = strtoul(argv[i], NULL, 10);
        most = bytes > most ? bytes : most;
    }
    bench self = {.ranks = ranks, .common = floor_map(sizeof(shared))};
    self.floor.area = floor_map(sizeof(floor_area));
    self.floor.vectors[0] = floor_map(most);
    self.floor.vectors[1] = floor_map(most);
    for (int rank = 0; rank < ranks; rank++) {
        if (fork() == 0) {
            self.rank = rank;
            self.floor.rank = rank;
            run(&self, path, most, argv + 2);
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
