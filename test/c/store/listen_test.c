/*
 * Where a server listens: alone on the loopback where the job says so, else on every address.
 */
#include "store/server/server.h"
#include "store/tcp/tcp.h"
#include "store_fixture.h"

static const char *listens_on(const tddp_store_server *server, int which)
{
    static char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address local;
    if (server->listen_fds[which] < 0) {
        return "nothing";
    }
    CHECK_OK(tddp_net_local(server->listen_fds[which], &local));
    CHECK_INT(tddp_net_port(&local), tddp_store_server_port(server));
    return tddp_net_host_text(&local, text);
}

static bool has_ipv6(void)
{
    int fd;
    bool has = tddp_net_listen("::1", 0, &fd) == TDDP_OK;
    if (has) {
        tddp_close(fd);
    }
    return has;
}

static void check_host(const char *host, const char *first, const char *second, const char *reach)
{
    printf("%s\n", host ? host : "NULL");
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = host;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    CHECK_TEXT(listens_on(server, 0), first);
    CHECK_TEXT(listens_on(server, 1), second);
    CHECK_TEXT(tddp_store_server_address(server), reach);
    int fd;
    CHECK_OK(tddp_net_connect_host(tddp_store_server_address(server),
                                   tddp_store_server_port(server), tddp_deadline_after_ms(5000), -1,
                                   &fd));
    raw_send(fd, HELLO);
    CHECK_RAW(fd, "d5590000");
    tddp_net_close(fd);
    if (strcmp(second, "nothing") != 0) {
        CHECK_OK(tddp_net_connect_host(second, tddp_store_server_port(server),
                                       tddp_deadline_after_ms(5000), -1, &fd));
        raw_send(fd, HELLO);
        CHECK_RAW(fd, "d5590000");
        tddp_net_close(fd);
    }
    tddp_store_server_stop(server);
}

TEST(the_jobs_name_of_the_host_decides)
{
    bool v6 = has_ipv6();
    const char *every = v6 ? "::" : "0.0.0.0";
    check_host("127.0.0.1", "127.0.0.1", "nothing", "127.0.0.1");
    check_host("127.0.0.5", "127.0.0.5", "nothing", "127.0.0.5");
    check_host("localhost", "127.0.0.1", v6 ? "::1" : "nothing", "127.0.0.1");
    check_host("LocalHost", "127.0.0.1", v6 ? "::1" : "nothing", "127.0.0.1");
    check_host(NULL, every, "nothing", "127.0.0.1");
    check_host("0.0.0.0", every, "nothing", "127.0.0.1");
    check_host("192.0.2.1", every, "nothing", "127.0.0.1");
    check_host("node0.example", every, "nothing", "127.0.0.1");
    if (v6) {
        check_host("::1", "::1", "nothing", "::1");
        check_host("[::1]", "::1", "nothing", "::1");
        check_host("2001:db8::1", "::", "nothing", "127.0.0.1");
    }
}

TEST(localhost_is_refused_where_either_address_is_taken)
{
    static const char *const taken[] = {"127.0.0.1", "::1"};
    for (int i = 0; i < (has_ipv6() ? 2 : 1); i++) {
        int fd;
        tddp_net_address local;
        CHECK_OK(tddp_net_listen(taken[i], 0, &fd));
        CHECK_OK(tddp_net_local(fd, &local));
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        tddp_store_server *server;
        opts.host = "localhost";
        opts.port = tddp_net_port(&local);
        CHECK_STATUS(tddp_store_server_start(&opts, &server), TDDP_ADDRESS_IN_USE);
        CHECK_CONTAINS(tddp_error_message(), taken[i]);
        tddp_close(fd);
        CHECK_OK(tddp_store_server_start(&opts, &server));
        tddp_store_server_stop(server);
    }
}

static void check_store(const char *host, const char *expected)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = host;
    opts.is_server = 1;
    opts.world_size = 1;
    opts.timeout_ms = 10000;
    tddp_store *store;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    const tddp_tcp_store *tcp = (const tddp_tcp_store *)store;
    CHECK_TEXT(listens_on(tcp->server->server, 0), expected);
    CHECK_TEXT(tddp_tcp_store_host(store), host);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(store);
}

TEST(a_store_that_hosts_its_server_follows_the_rule)
{
    check_store("127.0.0.1", "127.0.0.1");
    check_store("localhost", "127.0.0.1");
    check_store("name.that.is.nowhere.invalid", has_ipv6() ? "::" : "0.0.0.0");
}
