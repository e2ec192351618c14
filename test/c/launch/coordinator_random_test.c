/* Hundreds of courses by chance: whatever nodes do, the coordinator keeps its promises. */
#include "coordinator_play.h"

static uint64_t seed;

static int any(int below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((seed >> 33) % (uint64_t)below);
}

/* What the test knows of a slot. */
static struct {
    int64_t missing_ns; /* when its entry went last */
    bool out;           /* refused, or it has left */
    int last_round;     /* plus one */
} known[SLOTS + 1];

static void check_round(int min, int max, int last_round)
{
    CHECK(doc()->round == last_round + 1);
    CHECK(doc()->count >= min && doc()->count <= max);
    bool seen[SLOTS + 1] = {false};
    for (int rank = 0; rank < doc()->count; rank++) {
        int slot = slot_of(doc()->members[rank].id);
        CHECK(slot >= 1 && slot <= SLOTS);
        CHECK(!seen[slot]);
        seen[slot] = true;
        CHECK(!known[slot].out);
        CHECK(nodes[slot].ready > nodes[slot].round); /* no worker of it is left */
        CHECK(there[slot]);
        known[slot].last_round = doc()->round + 1;
    }
}

static void any_event(int round)
{
    int slot = 1 + any(SLOTS);
    if (!there[slot]) {
        if (known[slot].missing_ns != 0 && !known[slot].out &&
            now - known[slot].missing_ns < 3 * SECOND) {
            there[slot] = any(3) == 0; /* the same process; it may count as lost, or not */
        } else if (any(3) == 0) {
            char host[2] = {(char)('a' + any(4)), '\0'};
            tddp_launch_entry *entry = describe(slot, host);
            entry->self.node_rank = any(4) ? -1 : any(5);
            entry->rank = any(8) ? -1 : any(5);
            entry->round = any(4) ? -1 : round;
            entry->ready = entry->round;
            known[slot].out = false;
            known[slot].last_round = entry->round + 1;
        }
        return;
    }
    switch (any(16)) {
    case 0:
        nodes[slot].failed = round + any(2);
        break;
    case 1:
        nodes[slot].done = round;
        break;
    case 2:
        if (any(4) == 0) {
            nodes[slot].leaves = known[slot].out = true;
        }
        break;
    case 3:
        nodes[slot].master_round = round;
        nodes[slot].master_port = 4000 + slot;
        break;
    case 4:
        nodes[slot].ended = any(4) == 0;
        break;
    case 5:
        answers[slot] = any(3) != 0;
        break;
    case 6:
        there[slot] = false;
        known[slot].missing_ns = now;
        break;
    default:
        nodes[slot].round = known[slot].last_round - 1;
        nodes[slot].ready = nodes[slot].round + 1;
        break;
    }
}

/* Another coordinator goes on with the document. */
static void any_takeover(void)
{
    tddp_launch_state read;
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_state_write(doc(), &text));
    CHECK_OK(tddp_launch_state_read(text.data, text.size, &read));
    tddp_bytes_free(&text);
    tddp_launch_coordinator_free(coordinator);
    CHECK_OK(tddp_launch_coordinator_create(&opts, now, &coordinator));
    CHECK_OK(tddp_launch_coordinator_adopt(coordinator, &read, now));
}

static void any_course(int min, int max, int restarts)
{
    memset(known, 0, sizeof known);
    open_coordinator(min, max, restarts, any(2));
    opts.started = 1; /* of other coordinators: a job that is dead begins anew */
    for (int step = 0; step < 200; step++) {
        int last_round = doc()->round;
        int last_over = doc()->over;
        int64_t generation = doc()->generation;
        int64_t started = doc()->started;
        tddp_launch_stage stage = doc()->stage;
        tddp_launch_how how = doc()->how;
        any_event(last_round);
        if (any(50) == 0) {
            any_takeover();
        }
        now += any(300) * MS;
        take();
        CHECK(doc()->generation >= generation);
        CHECK(doc()->restart <= restarts);
        if (doc()->started != started) { /* all of it was gone */
            CHECK(doc()->round <= 0 && stage != TDDP_LAUNCH_STAGE_ENDED);
            for (int slot = 1; slot <= SLOTS; slot++) {
                known[slot].out = false; /* in truth it has read that, and is gone */
                known[slot].last_round = nodes[slot].ready >= 0 ? nodes[slot].ready : 0;
            }
            opts.started++;
            continue;
        }
        for (int i = 0; i < doc()->note_count; i++) {
            int slot = slot_of(doc()->notes[i].id);
            known[slot].out |= doc()->notes[i].refused;
        }
        if (stage == TDDP_LAUNCH_STAGE_ENDED) {
            CHECK(doc()->stage == TDDP_LAUNCH_STAGE_ENDED && doc()->how == how);
            CHECK(doc()->round == last_round);
        }
        if (doc()->round != last_round) {
            check_round(min, max, last_round);
        }
        if (doc()->over != last_over) {
            CHECK(doc()->over <= doc()->round);
            CHECK(min < max || doc()->stage == TDDP_LAUNCH_STAGE_ENDED ||
                  doc()->how == TDDP_LAUNCH_HOW_FAILED);
        }
    }
    close_coordinator();
}

MULTI_TEST(hundreds_of_courses, 1, 60)
{
    for (int i = 0; i < 400; i++) {
        seed = (uint64_t)i;
        int min = 1 + any(3);
        any_course(min, min + any(3), any(4));
    }
}

TEST(memory_that_is_short)
{
    for (long nth = 1; nth < 60; nth++) {
        const tddp_launch_options two = {
            .min_nodes = 1, .max_nodes = 2, .backend = TDDP_LAUNCH_C10D};
        const tddp_launch_times long_times = {.reconnect_ms = 10000, .join_ms = 10000};
        const tddp_launch_coordinator_opts short_opts = {
            .options = &two, .times = &long_times, .run_id = "x", .where = "x", .job = "x"};
        tddp_launch_coordinator *made;
        tddp_launch_entry shown[SLOTS];
        for (int slot = 1; slot <= SLOTS; slot++) {
            shown[slot - 1] = *describe(slot, "a");
            shown[slot - 1].ready = 0;
            (void)snprintf(shown[slot - 1].job, sizeof shown[slot - 1].job, "x");
        }
        tddp_fail_allocation(nth);
        tddp_status status = tddp_launch_coordinator_create(&short_opts, 1, &made);
        if (status == TDDP_OK) {
            for (int count = 1; status == TDDP_OK && count < SLOTS; count++) {
                status = tddp_launch_coordinator_take(made, shown, count, count);
            }
            tddp_launch_coordinator_free(made);
        }
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
    }
}
