/*
 * Measures the links: every two ranks meet once, as in a tournament. The lower rank leads: it sends
 * the other a request (how much to send, in which direction), so that both do the same without
 * having agreed on numbers before. The size grows until a transfer takes long enough to be
 * measured; each figure takes a bounded time. A few ranks meet pair by pair; a crowd in all pairs
 * of a round at once, which is quicker and hard on a network, as training is. Main thread.
 */
#include <stdlib.h>
#include <string.h>

#include "check/check.h"

enum {
    PASSES = 2,
    PINGS = 30,
    LEAST_BYTES = 64 << 10,
    MOST_BYTES = 8 << 20,
    MOST_TRANSFERS = 64,
    LEAST = 3
};

static const double all_pairs = 3.0;    /* seconds, for all of them */
static const double longest_pair = 0.4; /* seconds, for one way */
static const double shortest_pair = 0.03;

enum { REQUEST_END, REQUEST_PING, REQUEST_TAKE, REQUEST_GIVE, REQUEST_FIELDS = 2 };

/* Two ranks, seen from one of them. */
typedef struct meeting {
    tddp_group *group;
    int other;
    double limit; /* seconds, for one way */
    char *data;   /* MOST_BYTES */
} meeting;

int tddp_check_rounds(int world_size)
{
    return world_size % 2 == 0 ? world_size - 1 : world_size;
}

/* The circle method: the last of an even number stays, the others turn; with an odd number the one
 * that would meet the missing last has a rest. */
int tddp_check_partner(int rank, int round, int world_size)
{
    int turning = tddp_check_rounds(world_size);
    int last = turning; /* there is no such rank if world_size is odd */
    int partner;
    if (rank == last) {
        /* whom 2 * partner = round (mod turning) */
        partner = round % 2 == 0 ? round / 2 : (round + turning) / 2;
    } else {
        partner = ((round - rank) % turning + turning) % turning;
        partner = partner == rank ? last : partner;
    }
    return partner < world_size ? partner : -1;
}

/* --- one pair -------------------------------------------------------------------------------- */

static tddp_status give(const meeting *pair, void *data, size_t size)
{
    tddp_buffer buffer = {data, size, TDDP_UINT8, TDDP_CPU, 0, NULL};
    return tddp_send(pair->group, buffer, pair->other, 0, NULL);
}

static tddp_status take(const meeting *pair, void *data, size_t size)
{
    tddp_buffer buffer = {data, size, TDDP_UINT8, TDDP_CPU, 0, NULL};
    return tddp_recv(pair->group, buffer, pair->other, 0, NULL);
}

static tddp_status request(const meeting *pair, int64_t what, size_t size)
{
    int64_t fields[REQUEST_FIELDS] = {what, (int64_t)size};
    return give(pair, fields, sizeof fields);
}

static tddp_status follow(const meeting *pair)
{
    for (;;) {
        int64_t fields[REQUEST_FIELDS];
        char token = 0;
        tddp_status status = take(pair, fields, sizeof fields);
        if (status != TDDP_OK || fields[0] == REQUEST_END) {
            return status;
        }
        if (fields[0] == REQUEST_TAKE) {
            status = take(pair, pair->data, (size_t)fields[1]);
        }
        if (status == TDDP_OK) {
            bool asked = fields[0] == REQUEST_GIVE;
            status = give(pair, asked ? pair->data : &token, asked ? (size_t)fields[1] : 1);
        }
        if (status != TDDP_OK) {
            return status;
        }
    }
}

/* The time from a request to its answer. */
static tddp_status ask(const meeting *pair, int what, size_t size, double *seconds)
{
    char token;
    double started = tddp_check_now();
    tddp_status status = request(pair, what, size);
    if (status == TDDP_OK && what == REQUEST_TAKE) {
        status = give(pair, pair->data, size);
    }
    if (status == TDDP_OK) {
        bool data = what == REQUEST_GIVE;
        status = take(pair, data ? pair->data : &token, data ? size : 1);
    }
    *seconds = tddp_check_now() - started;
    return status;
}

static tddp_status lead_ping(const meeting *pair, double *latency)
{
    double times[PINGS];
    double begin = tddp_check_now();
    double seconds;
    size_t count = 0;
    tddp_status status = ask(pair, REQUEST_PING, 0, &seconds); /* the first may connect */
    while (status == TDDP_OK && count < PINGS &&
           (count < LEAST || tddp_check_now() - begin < pair->limit)) {
        status = ask(pair, REQUEST_PING, 0, &times[count++]);
    }
    if (status == TDDP_OK) {
        *latency = tddp_check_quick(times, count) / 2;
    }
    return status;
}

static tddp_status lead_transfers(const meeting *pair, int what, double latency, double *speed)
{
    double times[MOST_TRANSFERS];
    double begin = tddp_check_now();
    size_t size = LEAST_BYTES;
    size_t count = 0;
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && count < MOST_TRANSFERS &&
           (count < LEAST || tddp_check_now() - begin < pair->limit)) {
        double seconds;
        status = ask(pair, what, size, &seconds);
        /* The smaller ones warm up and are forgotten. */
        bool grows = size < MOST_BYTES && seconds < pair->limit / 16;
        if (grows) {
            size *= 2;
        } else {
            double net = seconds - 2 * latency;
            times[count++] = net > seconds / 10 ? net : seconds / 10;
        }
    }
    if (status == TDDP_OK) {
        *speed = (double)size / tddp_check_quick(times, count);
    }
    return status;
}

static tddp_status lead(const meeting *pair, tddp_check_link *there, tddp_check_link *back)
{
    double latency = 0;
    tddp_status status = lead_ping(pair, &latency);
    if (status == TDDP_OK) {
        status = lead_transfers(pair, REQUEST_TAKE, latency, &there->bytes_per_second);
    }
    if (status == TDDP_OK) {
        status = lead_transfers(pair, REQUEST_GIVE, latency, &back->bytes_per_second);
    }
    if (status == TDDP_OK) {
        status = request(pair, REQUEST_END, 0);
    }
    there->latency = latency;
    back->latency = latency;
    return status;
}

/* Of two passes the better one counts: a machine that was busy for a moment is no slow link. */
static void keep_better(tddp_check_link *link, const tddp_check_link *now)
{
    if (now->bytes_per_second > link->bytes_per_second) {
        link->bytes_per_second = now->bytes_per_second;
    }
    if (link->latency == 0 || now->latency < link->latency) {
        link->latency = now->latency;
    }
}

/* --- all pairs ------------------------------------------------------------------------------- */

static size_t index_of(int from, int to, int world_size)
{
    return (size_t)from * (size_t)(world_size - 1) + (size_t)(to > from ? to - 1 : to);
}

static tddp_status meet(const meeting *pair, int rank, int world_size, tddp_check_link *links)
{
    tddp_check_link there = {0};
    tddp_check_link back = {0};
    tddp_status status = rank > pair->other ? follow(pair) : lead(pair, &there, &back);
    if (status == TDDP_OK && rank < pair->other) {
        keep_better(&links[index_of(rank, pair->other, world_size)], &there);
        keep_better(&links[index_of(pair->other, rank, world_size)], &back);
    }
    return status;
}

static tddp_status play(tddp_group *group, meeting *pair, tddp_check_link *links)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    bool crowd = world_size >= TDDP_CHECK_CROWD;
    tddp_status status = TDDP_OK;
    for (int round = 0; status == TDDP_OK && round < tddp_check_rounds(world_size); round++) {
        pair->other = tddp_check_partner(rank, round, world_size);
        for (int first = 0; status == TDDP_OK && first < world_size; first++) {
            int second = tddp_check_partner(first, round, world_size);
            bool mine = rank == first || rank == second;
            if (second < first || (crowd && !mine)) {
                continue;
            }
            status = mine ? meet(pair, rank, world_size, links) : TDDP_OK;
            if (status == TDDP_OK && !crowd) {
                status = tddp_barrier(group, NULL);
            }
        }
        if (status == TDDP_OK && crowd) {
            status = tddp_barrier(group, NULL);
        }
    }
    return status;
}

/* Every link was measured by one rank and is 0 on the others: the sum has them all. */
static tddp_status share(tddp_group *group, tddp_check_link *links, size_t count)
{
    double *values = calloc(2 * count + 1, sizeof *values);
    if (!values) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        values[2 * i] = links[i].bytes_per_second;
        values[2 * i + 1] = links[i].latency;
    }
    tddp_buffer buffer = {values, 2 * count, TDDP_FLOAT64, TDDP_CPU, 0, NULL};
    tddp_status status = tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL);
    for (size_t i = 0; status == TDDP_OK && i < count; i++) {
        links[i].bytes_per_second = values[2 * i];
        links[i].latency = values[2 * i + 1];
    }
    free(values);
    return status;
}

static tddp_status name_ends(tddp_group *group, tddp_check_link *links)
{
    int world_size = tddp_group_world_size(group);
    for (int from = 0; from < world_size; from++) {
        for (int to = 0; to < world_size; to++) {
            tddp_peer here;
            tddp_peer there;
            if (from == to) {
                continue;
            }
            if (tddp_group_peer(group, from, &here) || tddp_group_peer(group, to, &there)) {
                return TDDP_INTERNAL;
            }
            tddp_check_link *link = &links[index_of(from, to, world_size)];
            link->from = from;
            link->to = to;
            link->between_hosts = strcmp(here.host_id, there.host_id) != 0;
        }
    }
    return TDDP_OK;
}

tddp_status tddp_check_pairs(tddp_group *group, tddp_check_link **links, size_t *count)
{
    int world_size = tddp_group_world_size(group);
    size_t total = (size_t)world_size * (size_t)(world_size - 1);
    tddp_check_link *made = calloc(total + 1, sizeof *made);
    meeting pair = {.group = group, .data = calloc(MOST_BYTES, 1)};
    tddp_status status = made && pair.data ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    double turns = world_size >= TDDP_CHECK_CROWD ? 2.0 * tddp_check_rounds(world_size)
                                                  : (double)(total > 0 ? total : 1);
    pair.limit = all_pairs / turns / PASSES;
    pair.limit = pair.limit > longest_pair    ? longest_pair
                 : pair.limit < shortest_pair ? shortest_pair
                                              : pair.limit;
    if (status == TDDP_OK) {
        status = name_ends(group, made);
    }
    for (int pass = 0; status == TDDP_OK && world_size > 1 && pass < PASSES; pass++) {
        status = play(group, &pair, made);
    }
    if (status == TDDP_OK && world_size > 1) {
        status = share(group, made, total);
    }
    free(pair.data);
    if (status != TDDP_OK) {
        free(made);
        return status;
    }
    *links = made;
    *count = total;
    return TDDP_OK;
}
