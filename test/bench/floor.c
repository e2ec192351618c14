/*
 * How long the least takes that any all_reduce of two ranks must do: bench_floor BYTES...
 *
 * Prints for each size the median and the fastest tenth over repetitions, in microseconds, of plain
 * stores and of stores past the cache. The floor is the lesser of the two medians.
 *
 * "settled": over the same memory again and again, so that each half has come to rest in the cache
 * of the core that adds it, and nothing moves between the cores. "fresh": each rank has just
 * written its vector, as those who call an all_reduce have, so that what belongs to the other half
 * must come over.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "floor.h"
#include "timing.h"

enum { WARM_UP = 5, LEAST = 20, MOST = 2000, BYTES_EACH = 256 << 20 };

static void check(const floor_rank *self, size_t count, float expected)
{
    for (size_t i = 0; i < count; i++) {
        if (self->vectors[self->rank][i] != expected) {
            fprintf(stderr, "rank %d: element %zu is %g, expected %g\n", self->rank, i,
                    (double)self->vectors[self->rank][i], (double)expected);
            exit(1);
        }
    }
}

static void fill(floor_rank *self, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        self->vectors[self->rank][i] = (float)(self->rank + 1);
    }
}

static void measure(floor_rank *self, size_t bytes, bool streaming, bool fresh)
{
    static double times[MOST];
    size_t count = bytes / sizeof(float);
    size_t repetitions = BYTES_EACH / (bytes ? bytes : 1);
    repetitions = repetitions < LEAST ? LEAST : repetitions > MOST ? MOST : repetitions;
    fill(self, count);
    floor_all_reduce(self, bytes, streaming);
    check(self, count, 3);
    for (size_t i = 0; i < WARM_UP + repetitions; i++) {
        if (fresh) {
            fill(self, count);
        }
        floor_exchange(self);
        double start = now_us();
        floor_all_reduce(self, bytes, streaming);
        if (i >= WARM_UP) {
            times[i - WARM_UP] = now_us() - start;
        }
    }
    floor_exchange(self);
    qsort(times, repetitions, sizeof *times, ascending);
    if (self->rank == 0) {
        printf("floor %-7s %-5s %9zu  median %10.2f  p10 %10.2f\n", fresh ? "fresh" : "settled",
               streaming ? "past" : "plain", bytes, times[repetitions / 2],
               times[repetitions / 10]);
        fflush(stdout);
    }
}

static void run(floor_rank *self, char **sizes)
{
    for (; *sizes; sizes++) {
        size_t bytes = strtoul(*sizes, NULL, 10);
        for (int fresh = 0; fresh < 2; fresh++) {
            measure(self, bytes, false, fresh);
            if (bytes > FLOOR_EAGER_BYTES) {
                measure(self, bytes, true, fresh);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s BYTES...\n", argv[0]);
        return 2;
    }
    size_t most = 4096;
    for (int i = 1; i < argc; i++) {
        size_t bytes = strtoul(argv[i], NULL, 10);
        most = bytes > most ? bytes : most;
    }
    floor_rank self = {.area = floor_map(sizeof(floor_area))};
    self.vectors[0] = floor_map(most);
    self.vectors[1] = floor_map(most);
    if (!self.area || !self.vectors[0] || !self.vectors[1]) {
        perror("mmap");
        return 1;
    }
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    self.rank = child == 0;
    run(&self, argv + 1);
    if (child == 0) {
        return 0;
    }
    int status = 0;
    return waitpid(child, &status, 0) < 0 || status != 0;
}
