/* Thousands of courses by chance: whatever nodes do, the coordinator keeps its promises. */
#include "coordinator_play.h"

static uint64_t seed;

static int any(int below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((seed >> 33) % (uint64_t)below);
}

enum { SLOTS = 12 };

/* What the test knows of a slot. */
static struct {
    bool joined;
    bool silent;
    bool out; /* refused, given up, left */
    int ready_for;
    int last_round;  /* plus one */
    int64_t said_ns; /* its last event */
} known[SLOTS + 1];

static void know_round(const tddp_launch_message *message, int min, int max, int *last_round)
{
    CHECK(message->round == *last_round + 1);
    *last_round = message->round;
    CHECK(message->count >= min && message->count <= max);
    bool seen[SLOTS + 1] = {false};
    for (int rank = 0; rank < message->count; rank++) {
        int slot = message->members[rank].slot;
        CHECK(slot >= 1 && slot <= SLOTS);
        CHECK(!seen[slot]);
        seen[slot] = true;
        CHECK(known[slot].joined && !known[slot].out);
        CHECK(known[slot].ready_for >= known[slot].last_round);
        known[slot].last_round = message->round + 1;
        CHECK(now - known[slot].said_ns <= 6 * SECOND);
    }
}

static void any_event(int round)
{
    int slot = 1 + any(SLOTS);
    if (known[slot].silent && any(20)) {
        return;
    }
    switch (any(16)) {
    case 0:
    case 1:
    case 2: {
        char host[2] = {(char)('a' + any(4)), '\0'};
        tddp_launch_joiner *joiner = describe(slot, host);
        joiner->node_rank = any(4) ? -1 : any(5);
        joiner->last_rank = any(8) ? -1 : any(5);
        joiner->round = any(4) ? -1 : round;
        if (any(8) == 0) {
            (void)snprintf(joiner->id, sizeof joiner->id, "id%d", 1 + any(SLOTS));
        }
        known[slot].joined = true;
        take();
        break;
    }
    case 3:
        failed(slot, round + any(2), "failed");
        break;
    case 4:
        done(slot, round);
        break;
    case 5:
        if (any(4) == 0) {
            known[slot].out = known[slot].joined;
            leave(slot, "left");
        }
        break;
    case 6:
        send(TDDP_LAUNCH_EVENT_MASTER, slot, round, "");
        break;
    case 7:
        bye(slot);
        break;
    case 8:
        known[slot].silent = any(3) == 0;
        break;
    default:
        known[slot].ready_for = round + 1;
        ready(slot, round + 1);
        break;
    }
    known[slot].said_ns = now;
}

static void any_course(int min, int max, int restarts)
{
    bool ended = false;
    tddp_launch_how ended_how = TDDP_LAUNCH_HOW_DONE;
    int last_round = -1;
    bool running = false;
    memset(known, 0, sizeof known);
    for (int slot = 0; slot <= SLOTS; slot++) {
        known[slot].ready_for = -1;
    }
    open_coordinator(min, max, restarts, any(2));
    for (int step = 0; step < 200; step++) {
        any_event(last_round);
        now += any(300) * MS;
        for (int slot = 1; slot <= SLOTS; slot++) {
            if (!known[slot].silent && any(2)) {
                beat(slot);
                known[slot].said_ns = now;
            }
        }
        tick();
        for (; heard < messages.count; heard++) {
            const tddp_launch_message *message = &messages.messages[heard];
            CHECK(!ended || message->kind == TDDP_LAUNCH_MESSAGE_REFUSE ||
                  (message->kind == TDDP_LAUNCH_MESSAGE_END && message->how == ended_how));
            CHECK(tddp_launch_coordinator_restart(coordinator) <= restarts);
            switch (message->kind) {
            case TDDP_LAUNCH_MESSAGE_ROUND:
                CHECK(!running);
                running = true;
                know_round(message, min < max ? min : max, max, &last_round);
                break;
            case TDDP_LAUNCH_MESSAGE_OVER:
                CHECK(running && message->round == last_round);
                CHECK(min < max || message->how == TDDP_LAUNCH_HOW_FAILED ||
                      strstr(message->text, "joined again"));
                running = false;
                break;
            case TDDP_LAUNCH_MESSAGE_END:
                ended = true;
                ended_how = message->how;
                break;
            case TDDP_LAUNCH_MESSAGE_REFUSE:
            case TDDP_LAUNCH_MESSAGE_REJOIN:
                CHECK(known[message->slot].joined);
                known[message->slot].out = true;
                break;
            case TDDP_LAUNCH_MESSAGE_MASTER:
                CHECK(running && message->round == last_round);
                break;
            case TDDP_LAUNCH_MESSAGE_SPARE:
            case TDDP_LAUNCH_MESSAGE_STATUS:
                break;
            }
        }
        CHECK(tddp_launch_coordinator_ended(coordinator) == ended);
    }
    close_coordinator();
}

MULTI_TEST(thousands_of_courses, 1, 60)
{
    for (int i = 0; i < 3000; i++) {
        seed = (uint64_t)i;
        int min = 1 + any(3);
        any_course(min, min + any(3), any(4));
    }
}

TEST(memory_that_is_short)
{
    for (long nth = 1; nth < 40; nth++) {
        tddp_launch_coordinator_opts opts = {.min_nodes = 1, .max_nodes = 2, .elastic = true};
        tddp_launch_messages list = {0};
        tddp_launch_coordinator *made;
        opts.node_timeout_ns = opts.join_timeout_ns = 10 * SECOND;
        opts.run_id = opts.where = "x";
        tddp_fail_allocation(nth);
        tddp_status status = tddp_launch_coordinator_create(&opts, 1, &made);
        if (status == TDDP_OK) {
            for (int slot = 1; status == TDDP_OK && slot < 12; slot++) {
                (void)describe(slot, "a");
                status = tddp_launch_coordinator_take(made, &event, slot, &list);
                event.kind = TDDP_LAUNCH_EVENT_READY;
                status = status == TDDP_OK ? tddp_launch_coordinator_take(made, &event, slot, &list)
                                           : status;
            }
            tddp_launch_coordinator_free(made);
        }
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        tddp_launch_messages_free(&list);
    }
}
