/* The coordinator's rules for nodes: newcomers, spares, ranks, and those of another coordinator's
 * round. */
#include "coordinator_play.h"

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
    close_coordinator();
}

TEST(a_newcomer_disturbs_nobody_before_it_is_ready)
{
    start(1, 3, 0, 2);
    (void)describe(3, "c"); /* a node that was held up: its workers have to end */
    event.joiner.round = 0;
    take();
    pass(20, "123");
    CHECK_TEXT(hear(), "");
    ready(3, 1);
    CHECK_TEXT(hear(), "over 0 changed a node (c pid 103) has come");
    ready(1, 1);
    CHECK_TEXT(hear(), "");
    ready(2, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2 3");
    CHECK_TEXT(hear(), "");
    close_coordinator();
}

TEST(a_node_that_leaves_before_the_start)
{
    open_coordinator_of(3, 3, 0, false, true);
    come(1, "a");
    come(2, "b");
    leave(2, "told");
    CHECK_TEXT(hear(), "end stopped told");
    close_coordinator();
    open_coordinator_of(2, 2, 1, false, true); /* a restart is left: another may come */
    come(1, "a");
    (void)describe(2, "b");
    take();
    leave(2, "told");
    CHECK_TEXT(hear(), "");
    come(3, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 3");
    close_coordinator();
    open_coordinator(2, 2, 0, false);
    come(1, "a");
    (void)describe(2, "b");
    take();
    leave(2, "told");
    CHECK_TEXT(hear(), "");
    come(3, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 3");
    close_coordinator();
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
    close_coordinator();
}

TEST(a_node_in_the_place_of_one_that_died_before_the_start)
{
    open_coordinator(3, 3, 0, false);
    come(1, "a");
    come(2, "b");
    come(3, "c");
    close_coordinator();
    open_coordinator(2, 2, 0, false);
    come(1, "a"); /* dies at once */
    come(2, "b");
    close_coordinator();
    open_coordinator(3, 3, 0, false);
    describe(1, "a")->node_rank = 1;
    take();
    ready(1, 0);
    describe(2, "a")->node_rank = 1; /* started again before the loss is noticed */
    take();
    ready(2, 0);
    pass(4, "2");
    CHECK_TEXT(hear(), "");
    pass(1, "2");
    CHECK_CONTAINS(hear(), "rejoin 1 ");
    describe(3, "a")->node_rank = 1;
    take();
    CHECK_TEXT(hear(), "");
    beat(2);
    CHECK_TEXT(hear(),
               "refuse 3 --node-rank=1 is taken already by a pid 102; expected another rank on "
               "each node");
    close_coordinator();
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
    CHECK_CONTAINS(hear(), "rejoin 2 ");
    CHECK_CONTAINS(hear(), "over 0 changed node 1 is lost");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    leave(4, "told");
    CHECK_TEXT(hear(), "");
    close_coordinator();
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
    CHECK_CONTAINS(hear(), "rejoin 2 ");
    CHECK_CONTAINS(hear(), "over 0 failed node 1 is lost");
    CHECK_CONTAINS(hear(), "refuse 4 the job \"job\" at here:29400 has its 2 nodes already");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    CHECK_TEXT(hear(), "");
    close_coordinator();
}

TEST(the_same_process_comes_anew)
{
    start(1, 2, 0, 2);
    tddp_launch_joiner *joiner = describe(3, "b");
    (void)snprintf(joiner->id, sizeof joiner->id, "id2");
    joiner->last_rank = 1;
    joiner->round = 0;
    joiner->nodes = 2;
    take();
    CHECK_TEXT(hear(), "over 0 changed node 1 (b pid 102) has joined again");
    ready(1, 1);
    CHECK_TEXT(hear(), "");
    ready(3, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    close_coordinator();
}

/* --- ranks ----------------------------------------------------------------------------------- */

TEST(ranks_that_were_asked_for)
{
    open_coordinator(4, 4, 0, false);
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
    close_coordinator();
}

TEST(ranks_beyond_the_count)
{
    open_coordinator(2, 4, 0, false);
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
    close_coordinator();
}

TEST(the_host_is_rank_0_unless_another_asked_for_it)
{
    open_coordinator(2, 2, 0, false);
    come(1, "b");
    describe(2, "a")->hosting = true;
    take();
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 2 1");
    close_coordinator();
}

/* --- a new leader ---------------------------------------------------------------------------- */

/* A node of another coordinator's round comes, with its workers gone. */
static void come_over(int slot, int rank, int round, int restart, int nodes)
{
    char host[2] = {(char)('a' + rank), '\0'};
    tddp_launch_joiner *joiner = describe(slot, host);
    joiner->last_rank = rank;
    joiner->round = round;
    joiner->restart = restart;
    joiner->nodes = nodes;
    take();
    ready(slot, round + 1);
}

TEST(a_new_coordinator_goes_on_at_once_when_all_have_come)
{
    open_coordinator(1, 4, 2, true);
    come_over(1, 2, 6, 1, 3);
    come_over(2, 0, 7, 2, 3); /* has seen a later round */
    CHECK_TEXT(hear(), "");
    come_over(3, 1, 7, 2, 3);
    CHECK_TEXT(hear(), "");
    pass(2, "123");
    CHECK_TEXT(hear(), "round 8 restart 2: 2 3 1");
    failed(1, 8, "rank 2");
    CHECK_TEXT(hear(), "end failed rank 2");
    close_coordinator();
    open_coordinator(1, 4, 2, true);
    come_over(1, 2, 7, 1, 2);
    come_over(2, 0, 7, 1, 2);
    CHECK_TEXT(hear(), "round 8 restart 1: 2 1");
    close_coordinator();
}

/* It was done, and looked for its coordinator when the others were done too. */
TEST(a_node_that_comes_again_after_the_end_hears_it)
{
    open_coordinator(1, 2, 0, true);
    come(1, "a");
    come(2, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    done(1, 0);
    done(2, 0);
    CHECK_TEXT(hear(), "end done ");
    bye(1);
    tddp_launch_joiner *joiner = describe(3, "b");
    (void)snprintf(joiner->id, sizeof joiner->id, "id2");
    joiner->round = 0;
    take();
    CHECK_TEXT(hear(), "end done ");
    ready(3, 1);
    CHECK_TEXT(hear(), "");
    CHECK(!tddp_launch_coordinator_over(coordinator, now));
    bye(3);
    CHECK(tddp_launch_coordinator_over(coordinator, now));
    close_coordinator();

    open_coordinator(2, 2, 0, true);
    come(1, "a");
    come(2, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    failed(1, 0, "rank 0");
    CHECK_TEXT(hear(), "end failed rank 0");
    come_over(3, 1, 0, 0, 2);
    CHECK_TEXT(hear(), "end failed rank 0");
    close_coordinator();
}

TEST(a_new_coordinator_goes_on_without_those_that_do_not_come)
{
    open_coordinator(1, 3, 0, true);
    come_over(1, 2, 0, 0, 3);
    pass(1, "1");
    come_over(2, 1, 0, 0, 3);
    pass(1, "12");
    CHECK_TEXT(hear(), "");
    pass(1, "12");
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2"); /* rank 1 stays, rank 2 is beyond the count */
    close_coordinator();
}

TEST(a_fixed_job_moves_without_loss)
{
    open_coordinator(2, 2, 0, true);
    come_over(1, 1, 3, 0, 2);
    pass(1, "1");
    come_over(2, 0, 3, 0, 2);
    CHECK_TEXT(hear(), "round 4 restart 0: 2 1");
    close_coordinator();
}

TEST(a_fixed_job_moves_and_misses_a_node)
{
    open_coordinator(2, 2, 0, true);
    come_over(1, 1, 3, 0, 2);
    pass(3, "1");
    CHECK_TEXT(hear(), "end failed 1 of the 2 nodes of round 3 is lost, with the torchrun that "
                       "hosted the rendezvous");
    close_coordinator();
    open_coordinator(2, 2, 1, true);
    come_over(1, 1, 3, 0, 2);
    come(2, "x");
    CHECK_TEXT(hear(), "round 4 restart 1: 2 1");
    close_coordinator();
    open_coordinator(2, 2, 2, true);
    come_over(1, 1, 3, 1, 2);
    pass(8, "1");
    come(2, "x");
    CHECK_TEXT(hear(), "round 4 restart 2: 2 1");
    close_coordinator();
}
