/*
 * Elections on a clock and stores of the test's: nodes die, start again, are cut off and stop for a
 * while, requests and answers get lost or come late, all by chance; never do two lead at a time.
 *
 * Within one node's request others take their steps, so that requests of all are mixed as they
 * would be between machines.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "base/base.h"
#include "launch/rendezvous/election.h"

#define MS INT64_C(1000000)
#define LEASE (5000 * MS)

enum { MOST = 7, KEYS = 3 };

static struct node {
    tddp_launch_election election;
    char values[KEYS][TDDP_LAUNCH_LEASE_BYTES]; /* its store */
    bool up;
    bool busy;         /* in a step */
    bool cut;          /* from all others */
    int64_t stopped;   /* until then it does nothing (its store neither) */
    int64_t due;       /* its next step */
    int64_t led_since; /* 0: it does not lead */
} nodes[MOST];

static int count;
static int64_t now;
static uint64_t seed;
static int lossy;     /* of 1000 exchanges */
static int depth;     /* of steps within steps */
static int elections; /* that were won */
static int lives[MOST];

static int any(int below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((seed >> 33) % (uint64_t)below);
}

static int64_t clock_of_test(void *context)
{
    (void)context;
    return now;
}

static void check_leaders(void)
{
    int leaders = 0;
    for (int i = 0; i < count; i++) {
        struct node *node = &nodes[i];
        bool leads = node->up && tddp_launch_election_leads(&node->election);
        leaders += leads;
        elections += leads && node->led_since == 0;
        node->led_since = !leads ? 0 : node->led_since ? node->led_since : now;
    }
    if (leaders > 1) {
        check_failed(__FILE__, __LINE__, "%d lead at %lld ms", leaders, (long long)(now / MS));
    }
}

static void step(struct node *node);

/* Lets time go by, in which others take their steps. */
static void others_step(int64_t by)
{
    now += by;
    check_leaders();
    for (int i = 0; depth < 3 && i < count; i++) {
        if (any(3) == 0) {
            step(&nodes[i]);
        }
    }
}

static bool reaches(const struct node *from, const struct node *to)
{
    return to->up && now >= to->stopped && (from == to || (!from->cut && !to->cut));
}

static char *find_value(struct node *node, const char *key)
{
    static const char *const keys[KEYS] = {"lease", "term", "ended"};
    for (int i = 0; i < KEYS; i++) {
        if (strcmp(keys[i], key) == 0) {
            return node->values[i];
        }
    }
    check_failed(__FILE__, __LINE__, "key %s", key);
}

static tddp_status exchange(void *context, int voter, const char *key, const char *expected,
                            const char *desired, char present[TDDP_LAUNCH_LEASE_BYTES])
{
    struct node *from = context;
    struct node *to = &nodes[voter];
    int life = lives[from - nodes];
    if (lossy) {
        others_step(any(20) ? any(3) * MS : any(400) * MS);
    }
    if (!from->up || life != lives[from - nodes] || !reaches(from, to) || any(1000) < lossy) {
        now += lossy ? 300 * MS : 0;
        return TDDP_TIMEOUT;
    }
    char *value = find_value(to, key);
    if (desired && strcmp(value, expected) == 0) {
        (void)snprintf(value, TDDP_LAUNCH_LEASE_BYTES, "%s", desired);
    }
    char answer[TDDP_LAUNCH_LEASE_BYTES];
    memcpy(answer, value, sizeof answer);
    if (lossy) {
        others_step(any(20) ? any(3) * MS : any(400) * MS);
    }
    if (any(1000) < lossy) {
        now += 300 * MS;
        return TDDP_TIMEOUT; /* the answer is lost */
    }
    memcpy(present, answer, sizeof answer);
    return TDDP_OK;
}

static void start(int index)
{
    struct node *node = &nodes[index];
    tddp_launch_election_opts opts = {.self = index,
                                      .count = count,
                                      .lease_ns = LEASE,
                                      .seed = (uint64_t)any(1000000),
                                      .context = node,
                                      .exchange = exchange,
                                      .now = clock_of_test};
    bool busy = node->busy;
    memset(node, 0, sizeof *node);
    node->busy = busy; /* its old life's step is still on the test's stack */
    node->up = true;
    node->due = now + any(100) * MS;
    lives[index]++;
    tddp_launch_election_init(&node->election, &opts);
}

static void step(struct node *node)
{
    if (!node->up || node->busy || now < node->due || now < node->stopped) {
        return;
    }
    node->busy = true;
    depth++;
    tddp_launch_election_step(&node->election);
    depth--;
    node->busy = false;
    node->due = now + tddp_launch_election_pause_ns(&node->election);
    check_leaders();
}

static void begin(int endpoints)
{
    count = endpoints;
    now = 1000000 * MS;
    lossy = elections = depth = 0;
    memset(nodes, 0, sizeof nodes);
    for (int i = 0; i < count; i++) {
        start(i);
    }
}

static void pass(int64_t by)
{
    for (int64_t end = now + by; now < end; now += 10 * MS) {
        for (int i = 0; i < count; i++) {
            step(&nodes[i]);
        }
        check_leaders();
    }
}

static int leader(void)
{
    for (int i = 0; i < count; i++) {
        if (nodes[i].up && tddp_launch_election_leads(&nodes[i].election)) {
            return i;
        }
    }
    return -1;
}

/* Milliseconds until somebody else than `not` leads. */
static int64_t until_led(int not )
{
    int64_t start_ns = now;
    while (leader() < 0 || leader() == not ) {
        pass(10 * MS);
        CHECK(now - start_ns < 60000 * MS);
    }
    return (now - start_ns) / MS;
}

TEST(the_first_leads_at_once)
{
    for (int endpoints = 1; endpoints <= MOST; endpoints++) {
        begin(endpoints);
        CHECK(until_led(-1) < 500);
        CHECK_INT(leader(), 0);
        CHECK_INT(nodes[0].election.term, 1);
        pass(60000 * MS);
        CHECK_INT(leader(), 0);
        CHECK_INT(elections, 1);
        CHECK_INT(nodes[0].election.term, 1);
    }
}

TEST(a_late_endpoint_is_waited_for_no_longer_than_a_lease)
{
    begin(3);
    nodes[0].up = false;
    CHECK(until_led(-1) < 6000);
    CHECK_INT(leader(), 1);
    start(0);
    pass(20000 * MS);
    CHECK_INT(leader(), 1);
    CHECK_INT(elections, 1);
    begin(3);
    nodes[2].up = false;
    pass(1000 * MS);
    CHECK_INT(leader(), -1);
    start(2);
    CHECK(until_led(-1) < 500);
    CHECK_INT(leader(), 0);
}

TEST(another_takes_over)
{
    begin(3);
    pass(10000 * MS);
    CHECK_INT(leader(), 0);
    nodes[0].up = false;
    CHECK(until_led(0) < 6000);
    CHECK_INT(leader(), 1);
    CHECK_INT(nodes[1].election.term, 2);
    nodes[1].up = false;
    pass(30000 * MS);
    CHECK_INT(leader(), -1); /* one of three is no majority */
    start(0);
    CHECK(until_led(-1) < 6000);
}

TEST(a_leader_that_is_cut_off_knows_it_first)
{
    begin(3);
    pass(10000 * MS);
    nodes[0].cut = true;
    CHECK(until_led(0) < 6000);
    CHECK(!tddp_launch_election_leads(&nodes[0].election));
    nodes[0].cut = false;
    pass(20000 * MS);
    CHECK_INT(leader(), 1);
    CHECK_INT(elections, 2);
}

TEST(a_leader_that_stops_for_a_while)
{
    begin(3);
    pass(10000 * MS);
    nodes[0].stopped = now + 20000 * MS;
    CHECK(until_led(0) < 6000);
    pass(30000 * MS);
    CHECK_INT(leader(), 1);
    CHECK_INT(elections, 2);
}

TEST(what_is_no_lease_is_taken_away)
{
    static const char *const texts[] = {"what?", "-1 -1 -1", "1 99999999999999999999 1",
                                        "0 0 99999999999999999999999"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        begin(1);
        (void)snprintf(nodes[0].values[0], sizeof nodes[0].values[0], "%s", texts[i]);
        (void)snprintf(nodes[0].values[1], sizeof nodes[0].values[1], "99999999999");
        CHECK(until_led(-1) < 12000);
        pass(20000 * MS);
        CHECK_INT(leader(), 0);
        CHECK_INT(elections, 1);
    }
}

TEST(a_hand_over_is_quick)
{
    begin(3);
    pass(10000 * MS);
    tddp_launch_election_resign(&nodes[0].election);
    nodes[0].up = false;
    CHECK(until_led(0) < 700);
    CHECK_INT(leader(), 1);
    CHECK_INT(nodes[1].election.term, 2);
}

TEST(two_endpoints_survive_the_loss_of_none)
{
    begin(2);
    pass(10000 * MS);
    CHECK_INT(leader(), 0);
    nodes[1].up = false;
    pass(30000 * MS);
    CHECK_INT(leader(), -1);
    start(1);
    CHECK(until_led(-1) < 6000);
}

TEST(nobody_stands_after_the_end)
{
    begin(3);
    pass(10000 * MS);
    CHECK(tddp_launch_election_end(&nodes[0].election, "end done\n"));
    CHECK_TEXT(nodes[2].values[2], "end done\n");
    nodes[0].up = false;
    pass(30000 * MS);
    CHECK_INT(leader(), -1);
    begin(3);
    pass(10000 * MS);
    nodes[2].up = false;
    CHECK(!tddp_launch_election_end(&nodes[0].election, "end done\n"));
    start(2);
    CHECK(tddp_launch_election_end(&nodes[0].election, "end done\n"));
    CHECK_TEXT(nodes[2].values[2], "end done\n");
}

static void mischief(void)
{
    struct node *node = &nodes[any(count)];
    switch (any(5)) {
    case 0:
        node->up = false;
        lives[node - nodes]++;
        break;
    case 1:
        if (!node->busy) {
            start((int)(node - nodes));
        }
        break;
    case 2:
        node->cut = true;
        break;
    case 3:
        node->stopped = now + any(12000) * MS;
        break;
    default:
        if (!node->busy && node->up) {
            node->busy = true;
            tddp_launch_election_resign(&node->election);
            node->busy = false;
        }
        break;
    }
}

MULTI_TEST(never_two_leaders, 1, 90)
{
    int won = 0;
    for (int course = 0; course < 300; course++) {
        begin(2 + course % 4);
        seed = (uint64_t)course;
        for (int i = 0; i < 40; i++) {
            lossy = any(4) ? 1 + any(200) : 0;
            mischief();
            pass((200 + any(8000)) * MS);
            for (int j = 0; j < count; j++) {
                nodes[j].cut = nodes[j].cut && any(3);
                if (!nodes[j].up && any(3) == 0) {
                    start(j);
                }
            }
        }
        won += elections;
        lossy = 0; /* peace: once old leases have run out somebody leads, and stays */
        for (int j = 0; j < count; j++) {
            nodes[j].cut = false;
            nodes[j].stopped = 0;
            if (!nodes[j].up) {
                start(j);
            }
        }
        pass(12000 * MS);
        (void)until_led(-1);
        pass(1000 * MS);
        int peaceful = leader();
        pass(20000 * MS);
        CHECK_INT(leader(), peaceful);
    }
    CHECK(won > 1000); /* the courses were lively */
}
