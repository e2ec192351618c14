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
    describe(3, "c")->round = 0; /* a node that was held up: its workers have to end */
    take();
    pass(20);
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
    open_coordinator_of(3, 3, 0, TDDP_LAUNCH_STATIC);
    come(1, "a");
    come(2, "b");
    leave(2, "told");
    CHECK_TEXT(hear(), "end stopped told");
    close_coordinator();
    open_coordinator_of(2, 2, 1, TDDP_LAUNCH_STATIC); /* a restart is left: another may come */
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

TEST(a_node_too_many_is_refused_once_the_others_answer)
{
    start(2, 2, 0, 2);
    answers[1] = answers[2] = false;
    come(3, "c");
    CHECK_INT(doc()->probe, 1);
    answers[1] = true;
    take();
    CHECK_TEXT(hear(), "");
    answers[2] = true;
    take();
    CHECK_TEXT(hear(), "refuse 3 the job \"job\" at here:29400 has its 2 nodes already; start more "
                       "with a larger --nnodes on all of them");
    pass(1);
    CHECK_TEXT(hear(), "");
    there[3] = false;
    take();
    CHECK_INT(doc()->note_count, 0);
    close_coordinator();
}

TEST(a_node_with_other_settings_is_refused)
{
    open_coordinator(2, 2, 0, false);
    come(1, "a");
    (void)snprintf(describe(2, "b")->job, sizeof nodes[2].job, "--nnodes=3");
    ready(2, 0);
    CHECK_TEXT(hear(), "refuse 2 the job at here:29400 was started with --nnodes, this node with "
                       "--nnodes=3; expected the same on all nodes");
    come(3, "c");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 3");
    close_coordinator();
}

TEST(the_host_has_a_place_although_too_many_come_at_once)
{
    open_coordinator(2, 2, 0, false);
    for (int slot = 1; slot <= 3; slot++) {
        describe(slot, "a")->ready = 0;
    }
    nodes[3].self.hosting = true;
    take();
    CHECK_TEXT(hear(), "round 0 restart 0: 3 1");
    CHECK_CONTAINS(hear(), "refuse 2 the job \"job\" at here:29400 has its 2 nodes already");
    close_coordinator();
}

TEST(a_node_in_the_place_of_one_that_died_before_the_start)
{
    open_coordinator(3, 3, 0, false);
    describe(1, "a")->self.node_rank = 1;
    ready(1, 0);
    answers[1] = false;
    describe(2, "a")->self.node_rank = 1; /* started again before the loss is noticed */
    ready(2, 0);
    pass(4);
    CHECK_TEXT(hear(), "");
    vanish(1);
    CHECK_TEXT(hear(), "");
    describe(3, "a")->self.node_rank = 1;
    take();
    CHECK_TEXT(hear(),
               "refuse 3 --node-rank=1 is taken already by a pid 102; expected another rank on "
               "each node");
    close_coordinator();
}

/* Who has the rank has answered: what others do is of no account. */
TEST(a_rank_that_is_taken_is_refused_although_another_node_is_silent)
{
    open_coordinator(2, 2, 0, false);
    describe(1, "a")->self.node_rank = 0;
    ready(1, 0);
    describe(2, "b")->self.node_rank = 1;
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    answers[2] = false;
    describe(3, "c")->self.node_rank = 0;
    ready(3, 0);
    CHECK_TEXT(hear(),
               "refuse 3 --node-rank=0 is taken already by a pid 101; expected another rank on "
               "each node");
    close_coordinator();
}

TEST(spares)
{
    start(1, 2, 0, 2);
    come(3, "c");
    CHECK_TEXT(hear(),
               "spare 3 the job \"job\" at here:29400 has its 2 nodes: this one waits for a "
               "place that comes free");
    come(4, "d");
    CHECK_CONTAINS(hear(), "spare 4 ");
    vanish(2);
    CHECK_CONTAINS(hear(), "over 0 changed node 1 is lost");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 0: 1 3");
    CHECK_INT(doc()->note_count, 1);
    leave(4, "told");
    CHECK_TEXT(hear(), "");
    CHECK_INT(doc()->note_count, 0);
    close_coordinator();
}

TEST(spares_of_a_fixed_job_are_sent_away_with_the_last_restart)
{
    start(2, 2, 1, 2);
    come(3, "c");
    CHECK_CONTAINS(hear(), "spare 3 ");
    come(4, "d");
    CHECK_CONTAINS(hear(), "spare 4 ");
    vanish(2);
    CHECK_CONTAINS(hear(), "over 0 failed node 1 is lost");
    CHECK_CONTAINS(hear(), "refuse 4 the job \"job\" at here:29400 has its 2 nodes already");
    ready(1, 1);
    CHECK_TEXT(hear(), "round 1 restart 1: 1 3");
    CHECK_TEXT(hear(), "");
    close_coordinator();
}

/* --- ranks ----------------------------------------------------------------------------------- */

TEST(ranks_that_were_asked_for)
{
    open_coordinator(4, 4, 0, false);
    describe(1, "a")->self.hosting = true;
    ready(1, 0);
    static const int asked[] = {3, 0, -1};
    for (int i = 0; i < 3; i++) {
        describe(i + 2, "b")->self.node_rank = asked[i];
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
        describe(i + 1, "h")->self.node_rank = asked[i];
        ready(i + 1, 0);
    }
    CHECK_TEXT(hear(), "round 0 restart 0: 2 4 3 1");
    leave(2, "told"); /* had rank 0: who asked for 3 fills the hole */
    CHECK_CONTAINS(hear(), "over 0 changed told");
    ready(1, 1);
    ready(3, 1);
    ready(4, 1);
    pass(31);
    skip_status();
    CHECK_TEXT(hear(), "round 1 restart 0: 1 4 3");
    close_coordinator();
}

TEST(the_host_is_rank_0_unless_another_asked_for_it)
{
    open_coordinator(2, 2, 0, false);
    come(1, "b");
    describe(2, "a")->self.hosting = true;
    ready(2, 0);
    CHECK_TEXT(hear(), "round 0 restart 0: 2 1");
    close_coordinator();
}

/* --- a new leader ---------------------------------------------------------------------------- */

/* The text of a document of an elastic or fixed job that runs round 7 with nodes 1 to 3 (fixed: 2)
 * on hosts a, b, c. */
static char *document_of(int min, int max, int count)
{
    tddp_bytes text = {0};
    start(min, max, 2, count);
    tddp_launch_state changed = *doc();
    changed.round = 7;
    changed.restart = 1;
    changed.started = 5;
    changed.generation = 40;
    CHECK_OK(tddp_launch_state_write(&changed, &text));
    char *copy = strndup(text.data, text.size);
    CHECK(copy != NULL);
    tddp_bytes_free(&text);
    close_coordinator();
    return copy;
}

static void take_over(int min, int max, int count, int restarts)
{
    char *text = document_of(min, max, count);
    tddp_launch_state read;
    CHECK_OK(tddp_launch_state_read(text, strlen(text), &read));
    open_coordinator(min, max, restarts, true);
    CHECK_OK(tddp_launch_coordinator_adopt(coordinator, &read, now));
    remember();
    free(text);
}

/* A node of that round is there, its workers at work. */
static void be_there(int slot)
{
    char host[2] = {(char)('a' + slot - 1), '\0'};
    tddp_launch_entry *entry = describe(slot, host);
    entry->round = entry->ready = 7;
    entry->rank = slot - 1;
    take();
}

TEST(a_new_leader_goes_on_with_the_round)
{
    take_over(1, 4, 3, 2);
    be_there(1);
    be_there(2);
    be_there(3);
    pass(5);
    CHECK_TEXT(hear(), "");
    CHECK_INT(doc()->started, 5);
    done(1, 7);
    done(2, 7);
    done(3, 7);
    CHECK_TEXT(hear(), "end done ");
    close_coordinator();
}

TEST(a_new_leader_misses_a_node)
{
    take_over(1, 4, 3, 2);
    be_there(2);
    be_there(3);
    pass(1);
    CHECK_TEXT(hear(), "");
    pass(2);
    CHECK_CONTAINS(hear(), "over 7 changed node 0 is lost");
    ready(2, 8);
    ready(3, 8);
    pass(31);
    skip_status();
    CHECK_TEXT(hear(), "round 8 restart 1: 3 2"); /* rank 1 stays */
    CHECK_INT(doc()->generation, 41);
    close_coordinator();

    take_over(2, 2, 2, 2);
    be_there(2);
    pass(3);
    CHECK_CONTAINS(hear(), "over 7 failed node 0 is lost");
    ready(2, 8);
    come(4, "a");
    CHECK_TEXT(hear(), "round 8 restart 2: 4 2");
    close_coordinator();

    take_over(2, 2, 2, 1);
    be_there(2);
    pass(3);
    CHECK_CONTAINS(hear(), "end failed node 0 is lost");
    close_coordinator();
}

/* All were killed, and somebody has started the same job again, with other settings. */
TEST(a_document_without_its_nodes_is_that_of_a_dead_job)
{
    take_over(1, 4, 3, 2);
    opts.job = "--nnodes=1:4";
    tddp_launch_state read;
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_state_write(doc(), &text));
    CHECK_OK(tddp_launch_state_read(text.data, text.size, &read));
    tddp_launch_coordinator_free(coordinator);
    CHECK_OK(tddp_launch_coordinator_create(&opts, now, &coordinator));
    CHECK_OK(tddp_launch_coordinator_adopt(coordinator, &read, now));
    tddp_bytes_free(&text);
    for (int slot = 4; slot <= 7; slot++) {
        come(slot, "d");
    }
    CHECK_TEXT(hear(), "");
    pass(2);
    CHECK_TEXT(hear(), "round 0 restart 0: 4 5 6 7");
    CHECK_INT(doc()->started, 17);
    CHECK(doc()->generation > 40);
    close_coordinator();
}

/* It was done, and looked for its leader when the others were done too. */
TEST(a_node_that_comes_again_after_the_end_reads_it)
{
    open_coordinator(1, 2, 0, true);
    come(1, "a");
    come(2, "b");
    CHECK_TEXT(hear(), "round 0 restart 0: 1 2");
    done(1, 0);
    done(2, 0);
    CHECK_TEXT(hear(), "end done ");
    bye(1);
    there[2] = false;
    take();
    CHECK(!tddp_launch_coordinator_over(coordinator, now)); /* it may come to read it */
    there[2] = true;
    take();
    CHECK(!tddp_launch_coordinator_over(coordinator, now));
    bye(2);
    CHECK(tddp_launch_coordinator_over(coordinator, now));
    CHECK_TEXT(hear(), "");
    close_coordinator();
}
