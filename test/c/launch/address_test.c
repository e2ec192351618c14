#include "base/base.h"
#include "check.h"
#include "launch/rendezvous/member.h"
#include "net/net.h"

static void choose(const char *own, const char *first, const char *second, const char *expected)
{
    tddp_launch_member others[2] = {0};
    char out[TDDP_LAUNCH_ADDR_BYTES];
    (void)snprintf(others[0].addr, sizeof others[0].addr, "%s", first);
    (void)snprintf(others[1].addr, sizeof others[1].addr, "%s", second);
    tddp_launch_address_choose(own, others, 2, NULL, out);
    CHECK_TEXT(out, expected);
}

TEST(what_is_loopback)
{
    CHECK(tddp_launch_address_is_loopback("127.0.0.1"));
    CHECK(tddp_launch_address_is_loopback("127.3.2.1"));
    CHECK(tddp_launch_address_is_loopback("::1"));
    CHECK(!tddp_launch_address_is_loopback("10.0.0.1"));
    CHECK(!tddp_launch_address_is_loopback("fe80::1"));
    CHECK(!tddp_launch_address_is_loopback("localhost"));
    CHECK(!tddp_launch_address_is_loopback(""));
}

TEST(a_loopback_address_does_where_all_have_one)
{
    choose("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1");
    choose("127.0.1.1", "127.0.0.1", "::1", "127.0.1.1");
    choose("::1", "::1", "::1", "::1");
    choose("10.1.2.3", "127.0.0.1", "10.1.2.4", "10.1.2.3");
}

TEST(with_others_elsewhere_it_is_the_address_on_the_way_there)
{
    char way[TDDP_LAUNCH_ADDR_BYTES];
    if (tddp_launch_address_of("192.0.2.1", true, NULL, way) != TDDP_OK) {
        check_skip("there is no way out of this machine");
    }
    choose("127.0.1.1", "127.0.0.1", "192.0.2.1", way);
    choose("127.0.1.1", "192.0.2.1", "127.0.0.1", way);
}

TEST(names_become_addresses)
{
    char out[TDDP_LAUNCH_ADDR_BYTES];
    CHECK_OK(tddp_launch_address_of("127.0.0.2", false, NULL, out));
    CHECK_TEXT(out, "127.0.0.2");
    CHECK_OK(tddp_launch_address_of("localhost", false, NULL, out));
    CHECK(tddp_launch_address_is_loopback(out));
    CHECK_OK(tddp_launch_address_of("127.0.0.1", true, NULL, out));
    CHECK_TEXT(out, "127.0.0.1");
    CHECK(tddp_launch_address_of("no.such.host.invalid", false, NULL, out) != TDDP_OK);
}

TEST(who_listens_is_reached)
{
    int fd;
    tddp_net_address address;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &fd));
    CHECK_OK(tddp_net_local(fd, &address));
    int number = tddp_net_port(&address);
    CHECK_OK(tddp_launch_address_check("127.0.0.1", number, "first", "127.0.0.1", 2000, NULL));
    tddp_close(fd);
    CHECK_STATUS(tddp_launch_address_check("127.0.0.1", number, "first", "10.1.2.3", 2000, NULL),
                 TDDP_NETWORK);
    const char *text = tddp_error_message();
    CHECK_CONTAINS(text, "no way from 10.1.2.3 to the workers' store of node rank 0 (first)");
    CHECK_CONTAINS(text, "127.0.0.1 port");
    CHECK_CONTAINS(text, "a loopback address means another host here");
    CHECK_CONTAINS(text, "--local-addr=ADDRESS on first");
    CHECK_STATUS(tddp_launch_address_check("127.0.0.1", number, "first", "127.0.0.1", 2000, NULL),
                 TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "that may be the wrong interface");
}
