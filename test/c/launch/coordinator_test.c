/* The coordinator's rules for rounds: when they start, how they end, what a failure or a loss
 * costs. */
#include "coordinator_play.h"

/* --- starts ---------------------------------------------------------------------------------- */

TEST(starts_with_all_nodes)
{
    open_coordinator(2, 2, 0, false);
    describe(1, "a")->self.hosting = true;
    ready(1, 0);
    CHECK_TEXT(hear(), "");
    come(2, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    CHECK_INT(doc()->members[1].local_size, 2);
    CHECK_TEXT(doc()->members[1].host, "b");
    CHECK_TEXT(doc()->members[1].role, "trainer");
    CHECK_TEXT(doc()->members[1].addr, "10.0.0.2");
    CHECK_INT(doc()->generation, 18);
    close_coordinator();
}

TEST(one_to_six_nodes_of_different_sizes)
{
    for (int count = 1; count <= 6; count++) {
        open_coordinator(count, count, 0, false);
        for (int slot = 1; slot <= count; slot++) {
            CHECK_TEXT(hear(), "");
            come(slot, "h");
        }
        CHECK_CONTAINS(hear(), "round 0 restart 0: 1");
        CHECK_INT(doc()->count, count);
        for (int i = 0; i < count; i++) {
            CHECK_INT(doc()->members[i].local_size, i + 1);
        }
        for (int slot = 1; slot <= count; slot++) {
            CHECK_TEXT(hear(), "");
            done(slot, 0);
        }
        CHECK_TEXT(hear(), "end done ");
        close_coordinator();
    }
}

TEST(joined_is_not_ready)
{
    open_coordinator(2, 2, 0, false);
    come(1, "a");
    (void)describe(2, "b");
    take();
    take();
    CHECK_TEXT(hear(), "");
    pass(11);
    CHECK_TEXT(hear(), "status waiting at here:29400 for the workers of a node (b pid 102) to end");
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    ready(2, 0);
    CHECK_TEXT(hear(), "");
    close_coordinator();
}

TEST(the_last_call)
{
    open_coordinator(2, 4, 0, false);
    come(1, "a");
    pass(40);
    CHECK_CONTAINS(hear(),
                   "status waiting at here:29400 for 1 of at least 2 nodes; here: a node (a");
    skip();
    come(2, "b");
    pass(20);
    CHECK_CONTAINS(hear(), "status 2 of up to 4 nodes have come to here:29400 (a node (a pid 101), "
                           "a node (b pid 102)); the workers start in");
    skip();
    come(3, "c"); /* does not make the call longer */
    pass(9);
    skip();
    pass(1);
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2 3");
    close_coordinator();
}

TEST(the_last_call_ends_when_all_are_there)
{
    open_coordinator(2, 3, 0, false);
    come(1, "a");
    come(2, "b");
    CHECK_TEXT(hear(), "");
    come(3, "c");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2 3");
    close_coordinator();
}

TEST(the_last_call_begins_anew_when_too_few_are_left)
{
    open_coordinator(2, 3, 0, false);
    come(1, "a");
    come(2, "b");
    pass(20);
    leave(2, "told to end");
    pass(20);
    come(3, "c");
    skip();
    pass(29);
    while (heard < line_count) {
        CHECK_CONTAINS(hear(), "status ");
    }
    pass(2);
    CHECK_TEXT(hear(), "round 0 restart 0: 1 3");
    close_coordinator();
}

TEST(nobody_comes)
{
    open_coordinator(3, 3, 0, false);
    describe(1, "a")->self.hosting = true;
    ready(1, 0);
    describe(2, "b")->self.node_rank = 2;
    ready(2, 0);
    pass(599);
    CHECK_TEXT(hear(), "status waiting at here:29400 for 1 of 3 nodes: node rank 1 has not come; "
                       "here: a node (a pid 101), node 2 (b pid 102)");
    skip();
    pass(2);
    CHECK_TEXT(hear(),
               "end failed only 2 of the 3 nodes came to here:29400 within 600 s: node rank 1 has "
               "not come; here: a node (a pid 101), node 2 (b pid 102); check that torchrun runs "
               "on each with the same endpoint and --rdzv-id, or raise --rdzv-conf join_timeout");
    close_coordinator();
}

TEST(an_elastic_job_starts_at_the_join_timeout_if_there_are_enough)
{
    open_coordinator(1, 4, 0, false);
    pass(590);
    come(1, "a");
    pass(9);
    skip();
    pass(1);
    CHECK_TEXT(hear(), "round 0 restart 0: 1");
    close_coordinator();
}

/* --- a round's course ------------------------------------------------------------------------ */

TEST(the_master_is_told_once)
{
    start(2, 2, 0, 2);
    master(2, 0); /* not rank 0 */
    master(1, 1); /* another round */
    CHECK_TEXT(hear(), "");
    master(1, 0);
    CHECK_TEXT(hear(), "master 0 10.0.0.1 4001");
    take();
    CHECK_TEXT(hear(), "");
    close_coordinator();
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
    CHECK_INT(doc()->restart, 1);
    CHECK_INT(doc()->generation, 19);
    failed(1, 0, "late");
    CHECK_TEXT(hear(), "");
    failed(1, 1, "rank 0: SIGSEGV");
    CHECK_TEXT(hear(), "end failed rank 0: SIGSEGV");
    failed(2, 1, "rank 1");
    ready(1, 2);
    ready(2, 2);
    leave(1, "told");
    pass(5);
    CHECK_TEXT(hear(), "");
    close_coordinator();
}

TEST(all_read_the_end)
{
    start(2, 2, 0, 2);
    done(1, 0);
    done(1, 0);
    CHECK(doc()->stage == TDDP_LAUNCH_STAGE_RUNNING);
    done(2, 0);
    CHECK_TEXT(hear(), "end done ");
    CHECK(doc()->stage == TDDP_LAUNCH_STAGE_ENDED);
    CHECK(!tddp_launch_coordinator_over(coordinator, now));
    bye(1);
    CHECK(!tddp_launch_coordinator_over(coordinator, now));
    CHECK(tddp_launch_coordinator_over(coordinator, now + 3 * SECOND));
    come(3, "c");
    CHECK_TEXT(hear(), "spare 3 the job \"job\" at here:29400 has ended: this node waits for it to "
                       "begin again");
    bye(2);
    CHECK(tddp_launch_coordinator_over(coordinator, now));
    close_coordinator();
}

TEST(a_node_that_ends_its_workers_by_itself)
{
    start(2, 2, 1, 2);
    ready(2, 1);
    CHECK_TEXT(hear(), "over 0 failed node 1 (b pid 102) has ended its workers");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 2");
    close_coordinator();
}

/* --- loss and leaving ------------------------------------------------------------------------ */

TEST(an_elastic_job_goes_on_without_a_lost_node)
{
    start(1, 3, 0, 3);
    there[2] = false; /* for a moment: its connection is made anew */
    take();
    now += 190 * MS;
    take();
    there[2] = true;
    take();
    pass(1);
    CHECK_TEXT(hear(), "");
    vanish(2);
    CHECK_TEXT(hear(), "over 0 changed node 1 is lost: its torchrun is gone, or has been silent "
                       "for 30 s (b pid 102)");
    ready(1, 1);
    CHECK_TEXT(hear(), "");
    ready(3, 1);
    CHECK_TEXT(hear(), "");
    pass(31);
    skip_status();
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    /* It comes back on its host, but its rank is another's now: those keep theirs. */
    come(4, "b");
    CHECK_TEXT(hear(), "over 1 changed a node (b pid 104) has come");
    ready(1, 2);
    ready(3, 2);
    CHECK_TEXT(hear(), "round 2 restart 0: 1 3 4");
    close_coordinator();
}

TEST(a_node_that_comes_back_has_its_rank_again)
{
    start(1, 3, 0, 3);
    vanish(3); /* the last one: nobody else needs its rank */
    ready(1, 1);
    ready(2, 1);
    pass(31);
    skip_over();
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2");
    vanish(1); /* now rank 0 is free, and rank 1's holder stays */
    skip();
    come(4, "c");
    CHECK_TEXT(hear(), "");
    come(5, "a");
    CHECK_TEXT(hear(), "");
    ready(2, 2);
    CHECK_TEXT(hear(), "round 2 restart 0: 5 2 4");
    close_coordinator();
}

TEST(below_the_minimum_it_waits)
{
    start(2, 3, 0, 2);
    leave(2, "node 1 was told to end by SIGTERM");
    CHECK_TEXT(hear(), "over 0 changed node 1 was told to end by SIGTERM");
    ready(1, 1);
    pass(11);
    CHECK_TEXT(hear(),
               "status waiting at here:29400 for 1 of at least 2 nodes: node rank 1 has not "
               "come; here: node 0 (a pid 101)");
    come(3, "b");
    pass(31);
    skip_status();
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    leave(3, "gone");
    ready(1, 2);
    pass(600);
    heard = line_count - 1;
    CHECK_CONTAINS(hear(), "end failed only 1 of the 2 nodes came to here:29400 within 600 s: node "
                           "rank 1 has not come; here: node 0 (a pid 101);");
    close_coordinator();
}

TEST(a_lost_node_of_a_fixed_job_costs_a_restart)
{
    start(2, 2, 1, 2);
    vanish(2);
    CHECK_TEXT(hear(), "over 0 failed node 1 is lost: its torchrun is gone, or has been silent "
                       "for 30 s (b pid 102)");
    ready(1, 1);
    pass(11);
    CHECK_CONTAINS(hear(),
                   "status waiting at here:29400 for 1 of 2 nodes: node rank 1 has not come");
    come(3, "x");
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    times.silence_ms = 0;
    vanish(1);
    CHECK_CONTAINS(hear(), "end failed node 0 is lost: its torchrun is gone");
    close_coordinator();
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
    close_coordinator();
}

TEST(a_node_leaves_while_a_restart_is_under_way)
{
    start(2, 2, 1, 2);
    failed(1, 0, "rank 0");
    CHECK_TEXT(hear(), "over 0 failed rank 0");
    leave(2, "node 1 was told to end");
    CHECK_TEXT(hear(), "end stopped node 1 was told to end");
    close_coordinator();
    start(2, 2, 1, 2); /* lost instead: another may come */
    failed(1, 0, "rank 0");
    ready(1, 1);
    vanish(2);
    come(3, "b");
    heard = line_count - 1;
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    close_coordinator();
}

TEST(a_node_leaves_before_the_first_round)
{
    open_coordinator(2, 2, 0, false);
    come(1, "a");
    leave(1, "told");
    come(2, "b");
    CHECK_TEXT(hear(), "");
    come(3, "c");
    CHECK_TEXT(hear(), "round 0 restart 0: 2 3");
    close_coordinator();
}

TEST(the_hosting_node_leaves)
{
    for (int hands_over = 0; hands_over < 2; hands_over++) {
        open_coordinator(1, 2, 0, hands_over);
        describe(1, "a")->self.hosting = true;
        ready(1, 0);
        come(2, "b");
        CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
        leave(1, "node 0 was told to end by SIGINT");
        CHECK_TEXT(hear(), hands_over ? "over 0 changed node 0 was told to end by SIGINT"
                                      : "end stopped node 0 was told to end by SIGINT, and with it "
                                        "the coordinator; a job with --rdzv-backend=etcd "
                                        "survives that");
        close_coordinator();
    }
}

TEST(a_done_node_is_not_missed)
{
    start(1, 3, 0, 3);
    done(1, 0);
    done(2, 0);
    leave(1, "told");
    vanish(2);
    come(4, "d"); /* and a newcomer waits */
    CHECK_TEXT(hear(), "spare 4 some nodes of the job \"job\" at here:29400 are done already: this "
                       "one waits for the others' end");
    done(3, 0);
    CHECK_TEXT(hear(), "end done ");
    close_coordinator();
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
    close_coordinator();
}

/* Nodes may have given up a connection that was not answered. */
TEST(a_coordinator_that_was_held_up_is_patient)
{
    start(2, 2, 0, 2);
    now += 100 * SECOND;
    tddp_launch_coordinator_forgive(coordinator, now);
    there[2] = false;
    take();
    CHECK_INT(tddp_launch_coordinator_due(coordinator), now + 2 * SECOND);
    now += 1900 * MS;
    take();
    there[2] = true;
    take();
    pass(3);
    CHECK_TEXT(hear(), "");
    vanish(2);
    CHECK_CONTAINS(hear(), "end failed node 1 is lost");
    close_coordinator();
}

/* Six nodes that arrive one after the other cost one restart. */
TEST(the_last_call_is_for_every_round)
{
    start(1, 8, 0, 1);
    for (int slot = 2; slot <= 7; slot++) {
        char host[2] = {(char)('a' + slot), '\0'};
        come(slot, host);
        ready(1, 1);
        pass(5);
    }
    CHECK_CONTAINS(hear(), "over 0 changed a node (c pid 102) has come");
    skip_status();
    pass(5);
    skip_status();
    CHECK_TEXT(hear(), "round 1 restart 0: 1 2 3 4 5 6 7");
    close_coordinator();
}

/* By when it wants to be called without any change. */
TEST(its_deadlines)
{
    open_coordinator(1, 3, 0, false);
    take();
    CHECK_INT(tddp_launch_coordinator_due(coordinator), 1010 * SECOND);
    skip();
    come(1, "a");
    CHECK_INT(tddp_launch_coordinator_due(coordinator), 1010 * SECOND);
    pass(25);
    CHECK(tddp_launch_coordinator_due(coordinator) < now + 6 * SECOND);
    pass(6);
    CHECK_CONTAINS(lines[line_count - 1], "round 0");
    CHECK_INT(tddp_launch_coordinator_due(coordinator), INT64_MAX);
    come(2, "b");
    there[2] = false;
    take();
    CHECK_INT(tddp_launch_coordinator_due(coordinator), now + 200 * MS);
    close_coordinator();
}
