/* A host of c10d, with nodes played by hand. */
#include "host_play.h"

TEST(a_job_of_two_nodes)
{
    player a;
    player b;
    set_up(2, 2, 0);
    start_host();
    CHECK(!tddp_launch_host_over(host));
    come(&a, "a", true, -1, -1, 0);
    come(&b, "b", false, -1, -1, 0);
    CHECK_CONTAINS(peek(b.store, "open"),
                   " --nnodes=2 --max-restarts=0 --rdzv-conf=heartbeat_timeout=60");
    for (int i = 0; i < 2; i++) {
        CHECK_TEXT(hear(i ? &b : &a), "round 0 restart 0\n0 1 2 % a %\n1 2 2 % b %");
    }
    say(&a, TDDP_LAUNCH_EVENT_MASTER, 0, "");
    CHECK_TEXT(hear(&b), "master 0 127.0.0.1 4321");
    say(&a, TDDP_LAUNCH_EVENT_DONE, 0, "");
    say(&b, TDDP_LAUNCH_EVENT_DONE, 0, "");
    CHECK_TEXT(hear(&b), "end done\n");
    CHECK_TEXT(hear(&a), "master 0 127.0.0.1 4321");
    CHECK_TEXT(hear(&a), "end done\n");
    await_ended("end done\n");
    CHECK(!tddp_launch_host_over(host));
    say(&a, TDDP_LAUNCH_EVENT_BYE, 0, "");
    await_taken(&a);
    CHECK(!tddp_launch_host_over(host));
    say(&b, TDDP_LAUNCH_EVENT_BYE, 0, "");
    await_over();
    part(&a);
    part(&b);
    stop_host();
}

TEST(a_node_that_says_no_goodbye_is_waited_for_until_the_close_timeout)
{
    player a;
    set_up(1, 1, 0);
    start_host();
    come(&a, "a", true, -1, -1, 0);
    CHECK_CONTAINS(hear(&a), "round 0");
    say(&a, TDDP_LAUNCH_EVENT_FAILED, 0, "rank 0: exit code 3");
    CHECK_TEXT(hear(&a), "end failed\nrank 0: exit code 3");
    await_ended("end failed\nrank 0: exit code 3");
    let_pass(times.close_ms - SILENCE_MS); /* more than this test lasts */
    await_taken(&a);
    CHECK(!tddp_launch_host_over(host));
    let_pass(SILENCE_MS);
    await_over();
    part(&a);
    stop_host();
}

TEST(a_silent_node_is_lost_and_garbage_is_passed_over)
{
    player a;
    player b;
    tddp_wait wait = {60000, NULL};
    set_up(1, 2, 0);
    times.silence_ms = 3000;
    times.margin_ms = 300;
    start_host();
    come(&a, "a", true, -1, -1, 0);
    come(&b, "b", false, -1, -1, 0);
    CHECK_CONTAINS(peek(a.store, "open"),
                   " --nnodes=1:2 --max-restarts=0 --rdzv-conf=heartbeat_timeout=60");
    CHECK_CONTAINS(hear(&a), "round 0 restart 0\n0 1");
    CHECK_OK(tddp_store_queue_push(a.store, slice("events"), slice("what is this?"), &wait));
    CHECK_OK(tddp_store_queue_push(a.store, slice("events"), slice(""), &wait));
    outlast_others(&a, 200);
    CHECK_CONTAINS(hear(&a), "rejoin 2\nnode 1 is lost: no sign of life for 3 s (b pid 2)");
    CHECK_CONTAINS(hear(&a), "over 0 changed\nnode 1 is lost");
    say(&a, TDDP_LAUNCH_EVENT_READY, 1, "");
    CHECK_TEXT(hear(&a), "round 1 restart 0\n0 1 2 % a %");
    part(&a);
    part(&b);
    stop_host();
}

TEST(a_port_in_use)
{
    tddp_launch_host *second;
    set_up(1, 1, 0);
    start_host();
    tddp_launch_host_opts opts = {.options = &options, .times = times, .run_id = "job"};
    CHECK_STATUS(tddp_launch_host_start(&opts, &second), TDDP_ADDRESS_IN_USE);
    stop_host();
    tddp_launch_host_stop(NULL);
}

TEST(one_that_is_started_again_has_a_larger_term)
{
    long long terms[2];
    set_up(1, 2, 0);
    for (int i = 0; i < 2; i++) {
        start_host();
        tddp_store_release(find_leader(&terms[i]));
        CHECK(terms[i] == tddp_launch_host_term(host));
        stop_host();
    }
    CHECK(terms[0] < terms[1]);
}
