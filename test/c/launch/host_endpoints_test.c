/* Hosts of three endpoints, of which leaders are lost, hand over and come back. */
#include "host_play.h"

static int start_three(int min)
{
    int endpoint;
    int term;
    set_up(3, min, 3, 1);
    for (int i = 0; i < 3; i++) {
        start_host(i);
    }
    let_pass(SILENCE_MS); /* until then a leader needs the votes of all */
    tddp_store_release(find_leader(&endpoint, &term));
    return endpoint;
}

static void stop_all(void)
{
    for (int i = 0; i < 3; i++) {
        if (hosts[i]) {
            stop_host(i, true);
        }
    }
}

TEST(a_leader_is_lost)
{
    player b;
    player c;
    int endpoint;
    int term;
    int later;
    int first = start_three(2);
    tddp_store_release(find_leader(&endpoint, &term));
    come(&b, "b", false, -1, -1, 0);
    come(&c, "c", false, -1, -1, 0);
    await_last_call(&b);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    stop_host(first, false); /* keeps its leases, as if it were killed */
    CHECK_TEXT(hear(&b), "gone");
    part(&b);
    part(&c);
    let_pass(SILENCE_MS);
    tddp_store_release(find_leader(&endpoint, &later));
    CHECK(endpoint != first);
    CHECK(later > term);
    come(&c, "c", false, 0, 1, 2);
    come(&b, "b", false, 0, 0, 2);
    CHECK_TEXT(hear(&b), "round 1 restart 0\n0 2 2 % b %\n1 1 2 % c %");
    start_host(first); /* back again: a voter, no leader */
    CHECK(tddp_launch_host_over(hosts[first]));
    say(&b, TDDP_LAUNCH_EVENT_DONE, 1, "");
    say(&c, TDDP_LAUNCH_EVENT_DONE, 1, "");
    CHECK_TEXT(hear(&b), "end done\n");
    for (int i = 0; i < 3; i++) {
        await_ended(i, "end done\n");
    }
    part(&b);
    part(&c);
    stop_all();
}

TEST(a_leader_hands_over)
{
    player b;
    int endpoint;
    int term;
    int later;
    int first = start_three(1);
    tddp_store_release(find_leader(&endpoint, &term));
    come(&b, "b", false, -1, -1, 0);
    await_last_call(&b);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    stop_host(first, true);
    tddp_store_release(find_leader(&endpoint, &later));
    CHECK(endpoint != first);
    CHECK(later > term);
    part(&b);
    stop_all();
}

/* Nobody answers at one endpoint, though the port is bound: the others do not wait for it. */
TEST(a_deaf_endpoint_holds_nobody_up)
{
    player b;
    int fd;
    set_up(3, 1, 1, 0);
    CHECK_OK(tddp_net_listen("127.0.0.1", endpoints[2].port, &fd));
    start_host(0);
    start_host(1);
    let_pass(SILENCE_MS); /* until then a leader needs the votes of all */
    come(&b, "b", false, -1, -1, 0);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    say(&b, TDDP_LAUNCH_EVENT_MASTER, 0, "");
    CHECK_CONTAINS(hear(&b), "master 0 ");
    say(&b, TDDP_LAUNCH_EVENT_DONE, 0, "");
    CHECK_TEXT(hear(&b), "end done\n");
    part(&b);
    stop_all();
    tddp_close(fd);
}

/* Leaders and followers stop and start at random; a node finds a leader again each time. */
MULTI_TEST(random_stops, 1, 100)
{
    unsigned seed = 7;
    (void)start_three(1);
    for (int i = 0; i < 3; i++) {
        seed = seed * 1103515245 + 12345;
        int index = (int)(seed >> 16) % 3;
        bool graceful = (seed >> 20) % 2;
        stop_host(index, graceful);
        let_pass(graceful ? 0 : SILENCE_MS);
        int endpoint;
        int term;
        tddp_store_release(find_leader(&endpoint, &term));
        int leaders = 0;
        for (int j = 0; j < 3; j++) {
            leaders += hosts[j] && !tddp_launch_host_over(hosts[j]);
        }
        CHECK(leaders <= 1);
        start_host(index);
        let_pass(((seed >> 24) % 3) * 500);
    }
    stop_all();
}
