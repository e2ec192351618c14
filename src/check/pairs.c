/*
 * Measures the links: every two ranks meet once, as in a tournament. How much they send, and how
 * often, follows from what all_reduce has taken, which all ranks know: so each figure takes a
 * bounded time. A few ranks meet pair by pair; a crowd in all pairs of a round at once, which is
 * quicker and hard on a network, as training is. Main thread.
 */
#include <stdlib.h>

#include "check/check.h"

/* Small data would measure what a network lets through at once, and not its rate. */
enum { PASSES = 2, LEAST_BYTES = 256 << 10, MOST_BYTES = 8 << 20, LEAST = 4, MOST = 64, CROWD = 9 };

static const double all_pairs = 3.0;      /* seconds, for all of them */
static const double shortest_pair = 0.03; /* for one way */

/* Two ranks, seen from one of them. */
typedef struct pair {
    tddp_group *group;
    int other;
    bool leads; /* sends first, and keeps the figures */
    size_t size;
    size_t count;
    char *data; /* `size` bytes */
} pair;

int tddp_check_partner(int rank, int round, int world_size)
{
    int partner = (round - rank + world_size) % world_size;
    return partner == rank ? -1 : partner;
}

static void transfer(const pair *self, bool sends, size_t size)
{
    tddp_buffer buffer = {self->data, size, TDDP_UINT8, TDDP_CPU, 0, NULL};
    tddp_check_must(self->group, sends ? tddp_send(self->group, buffer, self->other, 0, NULL)
                                       : tddp_recv(self->group, buffer, self->other, 0, NULL));
}

/* The seconds from sending `there` bytes to receiving `back` bytes. */
static double exchange(const pair *self, size_t there, size_t back)
{
    double times[MOST];
    for (size_t i = 0; i < self->count; i++) {
        double started = tddp_check_now();
        transfer(self, self->leads, there);
        transfer(self, !self->leads, back);
        times[i] = tddp_check_now() - started;
    }
    return tddp_check_lower_quartile(times, self->count);
}

/* Of two passes the better one counts: a machine that was busy for a moment is no slow link. */
static void measure_pair(const pair *self, tddp_check_link *const links[2])
{
    double round_trip = exchange(self, 1, 1);
    double latency = round_trip / 2;
    for (int back = 0; back < 2; back++) {
        tddp_check_link *link = links[back];
        double seconds = exchange(self, back ? 1 : self->size, back ? self->size : 1);
        double net = tddp_check_clamp(seconds - round_trip, seconds / 10, seconds);
        double speed = (double)self->size / net;
        if (self->leads) {
            link->latency = link->latency > 0 && link->latency < latency ? link->latency : latency;
            link->bytes_per_second = tddp_check_clamp(speed, link->bytes_per_second, speed);
        }
    }
}

static void measure_all(pair *self, tddp_check_link *links)
{
    int rank = tddp_group_rank(self->group);
    int size = tddp_group_world_size(self->group);
    int turns = size >= CROWD ? 1 : size;
    for (int round = 0; round < size; round++) {
        int other = self->other = tddp_check_partner(rank, round, size);
        int leader = other < rank ? other : rank; /* -1: this rank has no partner */
        self->leads = leader == rank;
        for (int turn = 0; turn < turns; turn++) {
            if (leader >= 0 && turn == leader % turns) {
                measure_pair(self, (tddp_check_link *const[]){&links[rank * size + other],
                                                              &links[other * size + rank]});
            }
            tddp_check_must(self->group, tddp_barrier(self->group, NULL));
        }
    }
}

tddp_check_link *tddp_check_pairs(tddp_group *group, double seconds_per_byte)
{
    int size = tddp_group_world_size(group);
    size_t total = (size_t)size * (size_t)size;
    tddp_check_link *links = tddp_check_allocate(total, sizeof *links);
    double turns = size >= CROWD ? 2.0 * size : (double)total;
    double limit = tddp_check_clamp(all_pairs / turns / PASSES, shortest_pair, all_pairs);
    double size_in_limit = limit / seconds_per_byte;
    pair self = {.group = group};
    self.size = (size_t)tddp_check_clamp(size_in_limit / 16, LEAST_BYTES, MOST_BYTES);
    self.count = (size_t)tddp_check_clamp(size_in_limit / (double)self.size, LEAST, MOST);
    self.data = tddp_check_allocate(self.size, 1);
    for (int pass = 0; size > 1 && pass < PASSES; pass++) {
        measure_all(&self, links);
    }
    /* Every link was measured by one rank and is 0 on the others: the sum has them all. */
    tddp_buffer buffer = {links, 2 * total, TDDP_FLOAT64, TDDP_CPU, 0, NULL};
    tddp_check_must(group, tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    free(self.data);
    return links;
}
