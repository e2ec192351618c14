/*
 * A barrier of bytes in a shared file: each rank counts its own meetings in one byte of a line of
 * its own, and waits until every other's byte has come as far. Programs of any language can take
 * part.
 *
 * Entered by the one thread of each rank. No rank is more than one meeting ahead. Who waits long
 * gives its core away; the alarm of a measurement ends who waits for ever.
 */
#include "meeting.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "measure.h"

enum { SPINS = 2000 };

static unsigned char *map;
static int own;
static int all;
static unsigned char meetings;

static _Atomic unsigned char *count_of(int rank)
{
    return (_Atomic unsigned char *)(map + rank * MEETING_LINE);
}

void meeting_open(const char *folder, int rank, int ranks)
{
    char path[4096];
    size_t bytes = MEETING_HEAD + (size_t)MEETING_RANKS * MEETING_MOST * sizeof(double);
    if (ranks > MEETING_RANKS) {
        bench_fail("%d ranks: expected at most %d", ranks, MEETING_RANKS);
    }
    snprintf(path, sizeof path, "%s/meeting", folder);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        bench_fail("%s cannot be opened", path);
    }
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        bench_fail("%s cannot be mapped", path);
    }
    own = rank;
    all = ranks;
}

void meeting_come(void)
{
    unsigned char now = ++meetings;
    atomic_store_explicit(count_of(own), now, memory_order_release);
    for (int rank = 0; rank < all; rank++) {
        for (int spins = 0;; spins++) {
            /* One who came and has gone on may be at the next one already. */
            unsigned char theirs = atomic_load_explicit(count_of(rank), memory_order_acquire);
            if (theirs == now || theirs == (unsigned char)(now + 1)) {
                break;
            }
            if (spins > SPINS) {
                sched_yield();
            }
        }
    }
}

/* Never 0. One byte, so that nobody sees half of it. */
static unsigned char sign_of(size_t i)
{
    return (unsigned char)(i % 255 + 1);
}

static _Atomic unsigned char *end(void)
{
    return (_Atomic unsigned char *)(map + 2);
}

void meeting_begin(void)
{
    meeting_come();
    if (own == 0) {
        atomic_store_explicit(end(), 0, memory_order_relaxed);
    }
    meeting_come();
}

bool meeting_ends(size_t i, bool over)
{
    unsigned char last = atomic_load_explicit(end(), memory_order_relaxed);
    if (own == 0 && over && last == 0) {
        /* All see it when they have met for the next call, at the latest, and look after that. */
        atomic_store_explicit(end(), sign_of(i + 1), memory_order_relaxed);
    }
    return last == sign_of(i);
}

int meeting_count(int say)
{
    int sum = 0;
    map[own * MEETING_LINE + 1] = (unsigned char)say;
    meeting_come();
    for (int rank = 0; rank < all; rank++) {
        sum += map[rank * MEETING_LINE + 1];
    }
    meeting_come();
    return sum;
}

double *meeting_times(int rank)
{
    return (double *)(void *)(map + MEETING_HEAD) + (size_t)rank * MEETING_MOST;
}

double *meeting_worst(size_t count)
{
    static double worst[MEETING_MOST];
    meeting_come();
    memcpy(worst, meeting_times(0), count * sizeof *worst);
    for (int rank = 1; rank < all; rank++) {
        const double *theirs = meeting_times(rank);
        for (size_t i = 0; i < count; i++) {
            worst[i] = theirs[i] > worst[i] ? theirs[i] : worst[i];
        }
    }
    meeting_come();
    return worst;
}
