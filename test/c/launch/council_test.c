/* The council's rules, event by event, on a clock of the test's. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/rendezvous/council.h"

#define SECOND INT64_C(1000000000)
#define MS INT64_C(1000000)

static tddp_launch_council *council;
static tddp_launch_words words;
static size_t heard; /* words that were looked at */
static int64_t now;
static tddp_launch_event event;

/* A council for min to max nodes. */
static void open_council(int min, int max, int restarts, bool hands_over)
{
    static tddp_launch_council_opts opts;
    opts = (tddp_launch_council_opts){
        .min_nodes = min,
        .max_nodes = max,
        .max_restarts = restarts,
        .elastic = min < max,
        .hands_over = hands_over,
        .run_id = "job",
        .where = "here:29400",
        .patience_ns = 4500 * MS,
        .join_timeout_ns = 600 * SECOND,
        .last_call_ns = 30 * SECOND,
        .settle_ns = 2 * SECOND,
        .tell_every_ns = 10 * SECOND,
        .goodbye_ns = 3 * SECOND,
    };
    now = 1000 * SECOND;
    CHECK_OK(tddp_launch_council_create(&opts, now, &council));
}

static void close_council(void)
{
    tddp_launch_council_free(council);
    tddp_launch_words_free(&words);
    heard = 0;
}

static void take(void)
{
    CHECK_OK(tddp_launch_council_take(council, &event, ++now, &words));
}

static void tick(void)
{
    CHECK_OK(tddp_launch_council_tick(council, ++now, &words));
}

/* A node's description; further fields are the test's to set before come(). */
static tddp_launch_comer *describe(int slot, const char *host)
{
    event = (tddp_launch_event){.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = slot};
    tddp_launch_comer *comer = &event.comer;
    *comer = (tddp_launch_comer){
        .pid = 100 + slot, .local_size = slot, .node_rank = -1, .last_rank = -1, .round = -1};
    (void)snprintf(comer->host, sizeof comer->host, "%s", host);
    (void)snprintf(comer->id, sizeof comer->id, "id%d", slot);
    (void)snprintf(comer->role, sizeof comer->role, "trainer");
    (void)snprintf(comer->addr, sizeof comer->addr, "10.0.0.%d", slot);
    return comer;
}

static void send(tddp_launch_event_kind kind, int slot, int round, const char *text)
{
    event = (tddp_launch_event){.kind = kind, .slot = slot, .round = round, .port = 4000 + slot};
    (void)snprintf(event.addr, sizeof event.addr, "10.0.0.%d", slot);
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    take();
}

#define ready(slot, round) send(TDDP_LAUNCH_EVENT_READY, slot, round, "")
#define beat(slot) send(TDDP_LAUNCH_EVENT_BEAT, slot, 0, "")
#define failed(slot, round, text) send(TDDP_LAUNCH_EVENT_FAILED, slot, round, text)
#define done(slot, round) send(TDDP_LAUNCH_EVENT_DONE, slot, round, "")
#define leave(slot, text) send(TDDP_LAUNCH_EVENT_LEAVE, slot, 0, text)
#define bye(slot) send(TDDP_LAUNCH_EVENT_BYE, slot, 0, "")

/* A fresh node comes and is ready. */
static void come(int slot, const char *host)
{
    (void)describe(slot, host);
    take();
    ready(slot, 0);
}

/* `seconds` go by in which the nodes of `alive` (slots up to 9 as digits) beat. */
static void pass(int seconds, const char *alive)
{
    for (int half = 0; half < 2 * seconds; half++) {
        now += SECOND / 2;
        for (const char *slot = alive; *slot; slot++) {
            beat(*slot - '0');
        }
        tick();
    }
}

/* The next word, as one line. */
static const char *hear(void)
{
    static char line[1024];
    if (heard == words.count) {
        return "";
    }
    const tddp_launch_word *word = &words.words[heard++];
    tddp_bytes text = {0};
    tddp_launch_word copy;
    CHECK_OK(tddp_launch_word_encode(word, &text));
    CHECK_OK(tddp_launch_word_decode(text.data, text.size, &copy));
    CHECK_INT(copy.kind, word->kind);
    if (word->kind == TDDP_LAUNCH_WORD_ROUND) {
        int used = snprintf(line, sizeof line, "round %d restart %d:", word->round, word->restart);
        for (int rank = 0; rank < word->count; rank++) {
            CHECK_INT(copy.members[rank].slot, word->members[rank].slot);
            used +=
                snprintf(line + used, sizeof line - (size_t)used, " %d", word->members[rank].slot);
        }
    } else {
        size_t size = text.size < sizeof line ? text.size : sizeof line - 1;
        memcpy(line, text.data, size);
        line[size] = '\0';
        for (char *at = line; *at; at++) {
            *at = *at == '\n' ? ' ' : *at;
        }
    }
    tddp_launch_word_free(&copy);
    tddp_bytes_free(&text);
    return line;
}

/* --- starts ---------------------------------------------------------------------------------- */

TEST(starts_with_all_nodes)
{
    open_council(2, 2, 0, false);
    describe(1, "a")->hosting = true;
    take();
    ready(1, 0);
    CHECK_TEXT(hear(), "");
    come(2, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    CHECK_INT(words.words[0].members[1].local_size, 2);
    CHECK_TEXT(words.words[0].members[1].host, "b");
    CHECK_TEXT(words.words[0].members[1].role, "trainer");
    CHECK_TEXT(words.words[0].members[1].addr, "10.0.0.2");
    CHECK_INT(tddp_launch_council_round(council), 0);
    close_council();
}

TEST(one_to_six_nodes_of_different_sizes)
{
    for (int nodes = 1; nodes <= 6; nodes++) {
        open_council(nodes, nodes, 0, false);
        for (int slot = 1; slot <= nodes; slot++) {
            CHECK_TEXT(hear(), "");
            come(slot, "h");
        }
        CHECK_CONTAINS(hear(), "round 0 restart 0: 1");
        CHECK_INT(words.words[0].count, nodes);
        for (int i = 0; i < nodes; i++) {
            CHECK_INT(words.words[0].members[i].local_size, i + 1);
        }
        for (int slot = 1; slot <= nodes; slot++) {
            CHECK_TEXT(hear(), "");
            done(slot, 0);
        }
        CHECK_TEXT(hear(), "end done ");
        close_council();
    }
}

TEST(joined_is_not_ready)
{
    open_council(2, 2, 0, false);
    come(1, "a");
    (void)describe(2, "b");
    take();
    (void)describe(2, "b"); /* twice is without effect */
    take();
    CHECK_TEXT(hear(), "");
    pass(11, "12");
    CHECK_TEXT(hear(), "tell waiting at here:29400 for the workers of a node (b pid 102) to end");
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    ready(2, 0);
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(the_last_call)
{
    open_council(2, 4, 0, false);
    come(1, "a");
    pass(40, "1");
    CHECK_CONTAINS(hear(), "tell waiting at here:29400 for 1 of at least 2 nodes; here: a node (a");
    heard = words.count;
    come(2, "b");
    pass(20, "12");
    CHECK_CONTAINS(hear(), "tell 2 of up to 4 nodes have come to here:29400 (a node (a pid 101), "
                           "a node (b pid 102)); the workers start in");
    heard = words.count;
    come(3, "c"); /* does not make the call longer */
    pass(9, "123");
    heard = words.count;
    pass(1, "123");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2 3");
    close_council();
}

TEST(the_last_call_ends_when_all_are_there)
{
    open_council(2, 3, 0, false);
    come(1, "a");
    come(2, "b");
    CHECK_TEXT(hear(), "");
    come(3, "c");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2 3");
    close_council();
}

TEST(the_last_call_begins_anew_when_too_few_are_left)
{
    open_council(2, 3, 0, false);
    come(1, "a");
    come(2, "b");
    pass(20, "12");
    leave(2, "told to end");
    pass(20, "1");
    come(3, "c");
    heard = words.count;
    pass(29, "13");
    while (heard < words.count) {
        CHECK_CONTAINS(hear(), "tell ");
    }
    pass(2, "13");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 3");
    close_council();
}

TEST(nobody_comes)
{
    open_council(3, 3, 0, false);
    describe(1, "a")->hosting = true;
    take();
    ready(1, 0);
    describe(2, "b")->node_rank = 2;
    take();
    ready(2, 0);
    pass(599, "12");
    CHECK_TEXT(hear(), "tell waiting at here:29400 for 1 of 3 nodes: node rank 1 has not come; "
                       "here: a node (a pid 101), node 2 (b pid 102)");
    heard = words.count;
    pass(2, "12");
    CHECK_TEXT(hear(),
               "end failed not all of the 3 nodes came to here:29400 within 600 s (node rank 1 is "
               "missing; here: a node (a pid 101), node 2 (b pid 102)); check that torchrun runs "
               "on each with the same endpoint and --rdzv-id, or raise --rdzv-conf join_timeout");
    close_council();
}

TEST(an_elastic_job_starts_at_the_join_timeout_if_there_are_enough)
{
    open_council(1, 4, 0, false);
    pass(590, "");
    come(1, "a");
    pass(9, "1");
    heard = words.count;
    pass(1, "1");
    CHECK_TEXT(hear(), "round 0 restart 0: 1");
    close_council();
}

/* --- a round's course ------------------------------------------------------------------------ */

/* Nodes 1 to `nodes` on hosts a, b, c...; in round 0. */
static void start(int min, int max, int restarts, int nodes)
{
    open_council(min, max, restarts, false);
    for (int slot = 1; slot <= nodes; slot++) {
        char host[2] = {(char)('a' + slot - 1), '\0'};
        come(slot, host);
    }
    if (nodes < max) {
        char alive[10] = "123456789";
        alive[nodes] = '\0';
        pass(31, alive);
    }
    heard = words.count - 1;
    CHECK_CONTAINS(hear(), "round 0 restart 0: 1");
}

TEST(the_master_is_told_once)
{
    start(2, 2, 0, 2);
    send(TDDP_LAUNCH_EVENT_MASTER, 2, 0, ""); /* not rank 0 */
    send(TDDP_LAUNCH_EVENT_MASTER, 1, 1, ""); /* another round */
    CHECK_TEXT(hear(), "");
    send(TDDP_LAUNCH_EVENT_MASTER, 1, 0, "");
    CHECK_TEXT(hear(), "master 0 10.0.0.1 4001");
    send(TDDP_LAUNCH_EVENT_MASTER, 1, 0, "");
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(a_failure_with_and_without_restarts_left)
{
    start(2, 2, 1, 2);
    failed(2, 5, "of no round");
    CHECK_TEXT(hear(), "");
    failed(2, 0, "rank 1: exit code 3\nTraceback");
    CHECK_TEXT(hear(), "over 0 failed rank 1: exit code 3 Traceback");
    failed(1, 0, "too");
    done(1, 0);
    ready(2, 1);
    CHECK_TEXT(hear(), "");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 2");
    CHECK_INT(tddp_launch_council_restart(council), 1);
    failed(1, 0, "late");
    CHECK_TEXT(hear(), "");
    failed(1, 1, "rank 0: SIGSEGV");
    CHECK_TEXT(hear(), "end failed rank 0: SIGSEGV");
    failed(2, 1, "rank 1");
    ready(1, 2);
    ready(2, 2);
    leave(1, "told");
    pass(5, "2");
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(all_read_the_end)
{
    start(2, 2, 0, 2);
    done(1, 0);
    done(1, 0);
    CHECK(!tddp_launch_council_ended(council));
    done(2, 0);
    CHECK_TEXT(hear(), "end done ");
    CHECK(tddp_launch_council_ended(council));
    CHECK(!tddp_launch_council_over(council, now));
    bye(1);
    CHECK(!tddp_launch_council_over(council, now));
    CHECK(tddp_launch_council_over(council, now + 3 * SECOND));
    come(3, "c");
    CHECK_TEXT(hear(), "refuse 3 the job has ended already");
    bye(2);
    CHECK(tddp_launch_council_over(council, now));
    close_council();
}

TEST(a_node_that_ends_its_workers_by_itself)
{
    start(2, 2, 1, 2);
    ready(2, 1);
    CHECK_TEXT(hear(), "over 0 failed node 1 (b pid 102) has ended its workers");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 2");
    close_council();
}

/* --- loss and leaving ------------------------------------------------------------------------ */

TEST(an_elastic_job_goes_on_without_a_lost_node)
{
    start(1, 3, 0, 3);
    pass(4, "13");
    CHECK_TEXT(hear(), "");
    pass(1, "13");
    CHECK_TEXT(hear(), "anew 2 node 1 is lost: no sign of life for 5 s (b pid 102)");
    CHECK_TEXT(hear(), "over 0 changed node 1 is lost: no sign of life for 5 s (b pid 102)");
    beat(2);
    ready(1, 1);
    CHECK_TEXT(hear(), "");
    ready(3, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    /* It comes back on its host, but its rank is another's now: those keep theirs. */
    come(4, "b");
    CHECK_TEXT(hear(), "over 1 changed node 1 (b pid 104) has come");
    ready(1, 2);
    ready(3, 2);
    CHECK_TEXT(hear(), "round 2 restart 0: 1 3 4");
    close_council();
}

TEST(a_node_that_comes_back_has_its_rank_again)
{
    start(1, 3, 0, 3);
    pass(5, "12"); /* the last one: nobody else needs its rank */
    heard = words.count;
    ready(1, 1);
    ready(2, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2");
    pass(5, "2"); /* now rank 0 is free, and rank 1's holder stays */
    heard = words.count;
    come(4, "c");
    CHECK_TEXT(hear(), "");
    come(5, "a");
    CHECK_TEXT(hear(), "");
    ready(2, 2);
    CHECK_TEXT(hear(), "round 2 restart 0: 5 2 4");
    close_council();
}

TEST(below_the_minimum_it_waits)
{
    start(2, 3, 0, 2);
    leave(2, "node 1 was told to end by SIGTERM");
    CHECK_TEXT(hear(), "over 0 changed node 1 was told to end by SIGTERM");
    ready(1, 1);
    pass(11, "1");
    CHECK_TEXT(hear(), "tell waiting at here:29400 for 1 of at least 2 nodes: node rank 1 has not "
                       "come; here: node 0 (a pid 101)");
    come(3, "b");
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    leave(3, "gone");
    ready(1, 2);
    pass(600, "1");
    heard = words.count - 1;
    CHECK_CONTAINS(hear(),
                   "end failed not all of the 2 nodes came to here:29400 within 600 s (node "
                   "rank 1 is missing; here: node 0 (a pid 101))");
    close_council();
}

TEST(a_lost_node_of_a_fixed_job_costs_a_restart)
{
    start(2, 2, 1, 2);
    pass(5, "1");
    CHECK_CONTAINS(hear(), "anew 2 ");
    CHECK_TEXT(hear(), "over 0 failed node 1 is lost: no sign of life for 5 s (b pid 102)");
    ready(1, 1);
    pass(11, "1");
    CHECK_CONTAINS(hear(), "tell waiting at here:29400 for 1 of 2 nodes: node rank 1 has not come");
    come(3, "x");
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    pass(5, "3");
    CHECK_CONTAINS(hear(), "anew 1 ");
    CHECK_TEXT(hear(), "end failed node 0 is lost: no sign of life for 5 s (a pid 101)");
    close_council();
}

TEST(a_node_of_a_fixed_job_leaves)
{
    start(2, 2, 1, 2);
    leave(2, "node 1 was told to end by SIGINT");
    CHECK_TEXT(hear(), "over 0 failed node 1 was told to end by SIGINT");
    ready(1, 1);
    come(3, "x");
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    leave(1, "node 0 was told to end by SIGINT");
    CHECK_TEXT(hear(), "end stopped node 0 was told to end by SIGINT");
    close_council();
}

TEST(a_node_leaves_while_a_restart_is_under_way)
{
    start(2, 2, 1, 2);
    failed(1, 0, "rank 0");
    CHECK_TEXT(hear(), "over 0 failed rank 0");
    leave(2, "node 1 was told to end");
    CHECK_TEXT(hear(), "end stopped node 1 was told to end");
    close_council();
    start(2, 2, 1, 2); /* lost instead: another may come */
    failed(1, 0, "rank 0");
    ready(1, 1);
    pass(5, "1");
    come(3, "b");
    heard = words.count - 1;
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    close_council();
}

TEST(a_node_leaves_before_the_first_round)
{
    open_council(2, 2, 0, false);
    come(1, "a");
    leave(1, "told");
    come(2, "b");
    CHECK_TEXT(hear(), "");
    come(3, "c");
    CHECK_TEXT(hear(), "round 0 restart 0: 2 3");
    close_council();
}

TEST(the_hosting_node_leaves)
{
    for (int hands_over = 0; hands_over < 2; hands_over++) {
        open_council(1, 2, 0, hands_over);
        describe(1, "a")->hosting = true;
        take();
        ready(1, 0);
        come(2, "b");
        CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
        leave(1, "node 0 was told to end by SIGINT");
        CHECK_TEXT(hear(), hands_over ? "over 0 changed node 0 was told to end by SIGINT"
                                      : "end stopped node 0 was told to end by SIGINT");
        close_council();
    }
}

TEST(a_done_node_is_not_missed)
{
    start(1, 3, 0, 3);
    done(1, 0);
    done(2, 0);
    leave(1, "told");
    pass(5, "3");
    CHECK_CONTAINS(hear(), "anew 2 ");
    come(4, "d"); /* and a newcomer waits */
    CHECK_TEXT(hear(), "spare 4 some nodes of the job \"job\" at here:29400 are done already: this "
                       "one waits for the others' end");
    done(3, 0);
    CHECK_TEXT(hear(), "end done ");
    close_council();
}

TEST(a_failure_after_some_are_done_starts_all_anew)
{
    start(1, 3, 1, 2);
    done(1, 0);
    come(3, "c");
    CHECK_CONTAINS(hear(), "spare 3 ");
    failed(2, 0, "rank 1");
    CHECK_TEXT(hear(), "over 0 failed rank 1");
    ready(1, 1);
    ready(2, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 2 3");
    close_council();
}

TEST(a_council_that_was_held_up_blames_nobody)
{
    start(1, 2, 0, 2);
    now += 100 * SECOND;
    tick();
    pass(3, "12");
    CHECK_TEXT(hear(), "");
    pass(5, "1");
    CHECK_CONTAINS(hear(), "anew 2 ");
    close_council();
}

/* --- newcomers ------------------------------------------------------------------------------- */

TEST(a_newcomer_makes_an_elastic_job_larger)
{
    start(1, 3, 0, 1);
    come(2, "b");
    CHECK_TEXT(hear(), "over 0 changed a node (b pid 102) has come");
    come(3, "c");
    CHECK_TEXT(hear(), "");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2 3");
    close_council();
}

TEST(a_node_too_many_is_refused_once_the_others_show_life)
{
    start(2, 2, 0, 2);
    come(3, "c");
    beat(1);
    tick();
    CHECK_TEXT(hear(), "");
    beat(2);
    CHECK_TEXT(hear(), "refuse 3 the job \"job\" at here:29400 has its 2 nodes already; start more "
                       "with a larger --nnodes on all of them");
    (void)describe(3, "c"); /* pushed twice */
    take();
    pass(1, "123");
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(a_node_in_the_place_of_one_that_died_before_the_start)
{
    open_council(3, 3, 0, false);
    come(1, "a");
    come(2, "b");
    come(3, "c");
    close_council();
    open_council(2, 2, 0, false);
    come(1, "a"); /* dies at once */
    come(2, "b");
    close_council();
    open_council(3, 3, 0, false);
    describe(1, "a")->node_rank = 1;
    take();
    ready(1, 0);
    describe(2, "a")->node_rank = 1; /* started again before the loss is noticed */
    take();
    ready(2, 0);
    pass(4, "2");
    CHECK_TEXT(hear(), "");
    pass(1, "2");
    CHECK_CONTAINS(hear(), "anew 1 ");
    describe(3, "a")->node_rank = 1;
    take();
    CHECK_TEXT(hear(), "");
    beat(2);
    CHECK_TEXT(hear(),
               "refuse 3 --node-rank=1 is taken already by a pid 102; expected another rank on "
               "each node");
    close_council();
}

TEST(spares)
{
    start(1, 2, 0, 2);
    come(3, "c");
    beat(1);
    beat(2);
    CHECK_TEXT(hear(),
               "spare 3 the job \"job\" at here:29400 has its 2 nodes: this one waits for a "
               "place that comes free");
    come(4, "d");
    beat(1);
    beat(2);
    CHECK_CONTAINS(hear(), "spare 4 ");
    pass(5, "134");
    CHECK_CONTAINS(hear(), "anew 2 ");
    CHECK_CONTAINS(hear(), "over 0 changed node 1 is lost");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    leave(4, "told");
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(spares_of_a_fixed_job_are_sent_away_with_the_last_restart)
{
    start(2, 2, 1, 2);
    come(3, "c");
    beat(1);
    beat(2);
    CHECK_CONTAINS(hear(), "spare 3 ");
    come(4, "d");
    beat(1);
    beat(2);
    CHECK_CONTAINS(hear(), "spare 4 ");
    pass(5, "134");
    CHECK_CONTAINS(hear(), "anew 2 ");
    CHECK_CONTAINS(hear(), "over 0 failed node 1 is lost");
    CHECK_CONTAINS(hear(), "refuse 4 the job \"job\" at here:29400 has its 2 nodes already");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    CHECK_TEXT(hear(), "");
    close_council();
}

TEST(the_same_process_comes_anew)
{
    start(1, 2, 0, 2);
    tddp_launch_comer *comer = describe(3, "b");
    (void)snprintf(comer->id, sizeof comer->id, "id2");
    comer->last_rank = 1;
    comer->round = 0;
    comer->nodes = 2;
    take();
    CHECK_TEXT(hear(), "over 0 changed node 1 (b pid 102) has come anew");
    ready(1, 1);
    CHECK_TEXT(hear(), "");
    ready(3, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    close_council();
}

/* --- ranks ----------------------------------------------------------------------------------- */

TEST(ranks_that_were_asked_for)
{
    open_council(4, 4, 0, false);
    describe(1, "a")->hosting = true;
    take();
    ready(1, 0);
    static const int asked[] = {3, 0, -1};
    for (int i = 0; i < 3; i++) {
        describe(i + 2, "b")->node_rank = asked[i];
        take();
        ready(i + 2, 0);
    }
    CHECK_TEXT(hear(), "round 0 restart 0: 3 1 4 2");
    close_council();
}

TEST(ranks_beyond_the_count)
{
    open_council(2, 4, 0, false);
    static const int asked[] = {3, -1, 2, 1};
    for (int i = 0; i < 4; i++) {
        describe(i + 1, "h")->node_rank = asked[i];
        take();
        ready(i + 1, 0);
    }
    CHECK_TEXT(hear(), "round 0 restart 0: 2 4 3 1");
    leave(2, "told"); /* had rank 0: who asked for 3 fills the hole */
    CHECK_CONTAINS(hear(), "over 0 changed told");
    ready(1, 1);
    ready(3, 1);
    ready(4, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 4 3");
    close_council();
}

TEST(the_host_is_rank_0_unless_another_asked_for_it)
{
    open_council(2, 2, 0, false);
    come(1, "b");
    describe(2, "a")->hosting = true;
    take();
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 2 1");
    close_council();
}

/* --- a new leader ---------------------------------------------------------------------------- */

/* A node of another council's round comes, with its workers gone. */
static void come_over(int slot, int rank, int round, int restart, int nodes)
{
    char host[2] = {(char)('a' + rank), '\0'};
    tddp_launch_comer *comer = describe(slot, host);
    comer->last_rank = rank;
    comer->round = round;
    comer->restart = restart;
    comer->nodes = nodes;
    take();
    ready(slot, round + 1);
}

TEST(a_new_council_goes_on_at_once_when_all_have_come)
{
    open_council(1, 4, 2, true);
    come_over(1, 2, 6, 1, 3);
    come_over(2, 0, 7, 2, 3); /* has seen a later round */
    CHECK_TEXT(hear(), "");
    come_over(3, 1, 7, 2, 3);
    CHECK_TEXT(hear(), "");
    pass(2, "123");
    CHECK_TEXT(hear(), "round 8 restart 2: 2 3 1");
    failed(1, 8, "rank 2");
    CHECK_TEXT(hear(), "end failed rank 2");
    close_council();
    open_council(1, 4, 2, true);
    come_over(1, 2, 7, 1, 2);
    come_over(2, 0, 7, 1, 2);
    CHECK_TEXT(hear(), "round 8 restart 1: 2 1");
    close_council();
}

TEST(a_new_council_goes_on_without_those_that_do_not_come)
{
    open_council(1, 3, 0, true);
    come_over(1, 2, 0, 0, 3);
    pass(1, "1");
    come_over(2, 1, 0, 0, 3);
    pass(1, "12");
    CHECK_TEXT(hear(), "");
    pass(1, "12");
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2"); /* rank 1 stays, rank 2 is beyond the count */
    close_council();
}

TEST(a_fixed_job_moves_without_loss)
{
    open_council(2, 2, 0, true);
    come_over(1, 1, 3, 0, 2);
    pass(1, "1");
    come_over(2, 0, 3, 0, 2);
    CHECK_TEXT(hear(), "round 4 restart 0: 2 1");
    close_council();
}

TEST(a_fixed_job_moves_and_misses_a_node)
{
    open_council(2, 2, 0, true);
    come_over(1, 1, 3, 0, 2);
    pass(3, "1");
    CHECK_TEXT(hear(), "end failed 1 of the 2 nodes of round 3 is lost, with the torchrun that "
                       "hosted the rendezvous");
    close_council();
    open_council(2, 2, 1, true);
    come_over(1, 1, 3, 0, 2);
    come(2, "x");
    CHECK_TEXT(hear(), "round 4 restart 1: 2 1");
    close_council();
    open_council(2, 2, 2, true);
    come_over(1, 1, 3, 1, 2);
    pass(8, "1");
    come(2, "x");
    CHECK_TEXT(hear(), "round 4 restart 2: 2 1");
    close_council();
}

/* --- anything at all ------------------------------------------------------------------------- */

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

static void know_round(const tddp_launch_word *word, int min, int max, int *last_round)
{
    CHECK(word->round == *last_round + 1);
    *last_round = word->round;
    CHECK(word->count >= min && word->count <= max);
    bool seen[SLOTS + 1] = {false};
    for (int rank = 0; rank < word->count; rank++) {
        int slot = word->members[rank].slot;
        CHECK(slot >= 1 && slot <= SLOTS);
        CHECK(!seen[slot]);
        seen[slot] = true;
        CHECK(known[slot].joined && !known[slot].out);
        CHECK(known[slot].ready_for >= known[slot].last_round);
        known[slot].last_round = word->round + 1;
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
        tddp_launch_comer *comer = describe(slot, host);
        comer->node_rank = any(4) ? -1 : any(5);
        comer->last_rank = any(8) ? -1 : any(5);
        if (any(8) == 0) {
            (void)snprintf(comer->id, sizeof comer->id, "id%d", 1 + any(SLOTS));
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
    int last_round = -1;
    bool running = false;
    memset(known, 0, sizeof known);
    for (int slot = 0; slot <= SLOTS; slot++) {
        known[slot].ready_for = -1;
    }
    open_council(min, max, restarts, any(2));
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
        for (; heard < words.count; heard++) {
            const tddp_launch_word *word = &words.words[heard];
            CHECK(!ended || word->kind == TDDP_LAUNCH_WORD_REFUSE);
            CHECK(tddp_launch_council_restart(council) <= restarts);
            switch (word->kind) {
            case TDDP_LAUNCH_WORD_ROUND:
                CHECK(!running);
                running = true;
                know_round(word, min < max ? min : max, max, &last_round);
                break;
            case TDDP_LAUNCH_WORD_OVER:
                CHECK(running && word->round == last_round);
                CHECK(min < max || word->how == TDDP_LAUNCH_HOW_FAILED ||
                      strstr(word->text, "anew"));
                running = false;
                break;
            case TDDP_LAUNCH_WORD_END:
                ended = true;
                break;
            case TDDP_LAUNCH_WORD_REFUSE:
            case TDDP_LAUNCH_WORD_ANEW:
                CHECK(known[word->slot].joined);
                known[word->slot].out = true;
                break;
            case TDDP_LAUNCH_WORD_MASTER:
                CHECK(running && word->round == last_round);
                break;
            case TDDP_LAUNCH_WORD_SPARE:
            case TDDP_LAUNCH_WORD_TELL:
                break;
            }
        }
        CHECK(tddp_launch_council_ended(council) == ended);
    }
    close_council();
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
        tddp_launch_council_opts opts = {.min_nodes = 1, .max_nodes = 2, .elastic = true};
        tddp_launch_words list = {0};
        tddp_launch_council *made;
        opts.patience_ns = opts.join_timeout_ns = 10 * SECOND;
        opts.run_id = opts.where = "x";
        tddp_fail_allocation(nth);
        tddp_status status = tddp_launch_council_create(&opts, 1, &made);
        if (status == TDDP_OK) {
            for (int slot = 1; status == TDDP_OK && slot < 12; slot++) {
                (void)describe(slot, "a");
                status = tddp_launch_council_take(made, &event, slot, &list);
                event.kind = TDDP_LAUNCH_EVENT_READY;
                status = status == TDDP_OK ? tddp_launch_council_take(made, &event, slot, &list)
                                           : status;
            }
            tddp_launch_council_free(made);
        }
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        tddp_launch_words_free(&list);
    }
}
