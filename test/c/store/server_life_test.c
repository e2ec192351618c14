/*
 * The server's beginning and end: options, ports, descriptors that run out, forks.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "store_fixture.h"

TEST(running_out_of_descriptors_does_not_spin)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    int fd = raw_connect(port_used);
    raw_send(fd, HELLO);
    CHECK_RAW(fd, "d5590000");
    /* Room for our end of one more connection and nothing else. */
    int highest = dup(fd);
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit low = {.rlim_cur = (rlim_t)highest + 1, .rlim_max = limit.rlim_max};
    close(highest);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &low), 0);
    int late = raw_connect(port_used);
    CHECK_LOG("cannot accept clients on port");
    struct rusage before;
    struct rusage after;
    getrusage(RUSAGE_SELF, &before);
    usleep(300000);
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_nvcsw - before.ru_nvcsw < 50);
    CHECK_OK(tddp_store_set(good, text("k"), text("v"), NULL));
    CHECK_VALUE(good, "k", "v");
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    raw_send(late, HELLO);
    CHECK_RAW(late, "d5590000");
    CHECK_INT(*log_count(), 1);
    tddp_net_close(late);
    tddp_net_close(fd);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(a_server_checks_its_options)
{
    tddp_store_server *server;
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    CHECK_STATUS(tddp_store_server_start(NULL, &server), TDDP_INVALID_ARGUMENT);
    opts.size = 3;
    CHECK_STATUS(tddp_store_server_start(&opts, &server), TDDP_INVALID_ARGUMENT);
    tddp_store_server_opts_init(&opts, sizeof opts);
    CHECK_INT(opts.listen_fd, -1);
    CHECK_STATUS(tddp_store_server_start(&opts, NULL), TDDP_INVALID_ARGUMENT);
    opts.port = -1;
    CHECK_STATUS(tddp_store_server_start(&opts, &server), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "port -1: expected 0 to 65535");
    opts.port = 0;
    opts.listen_fd = open("/dev/null", O_RDONLY);
    CHECK_STATUS(tddp_store_server_start(&opts, &server), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "is not a listening socket");
    close(opts.listen_fd);
    tddp_store_server_stop(NULL);
}

TEST(a_port_in_use_is_named)
{
    tddp_store_server *server = loopback_server();
    tddp_store_server *second;
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = tddp_store_server_port(server);
    CHECK_STATUS(tddp_store_server_start(&opts, &second), TDDP_ADDRESS_IN_USE);
    char expected[64];
    snprintf(expected, sizeof expected, "127.0.0.1:%d: Address already in use", opts.port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_server_stop(server);
    CHECK_OK(tddp_store_server_start(&opts, &second));
    tddp_store_server_stop(second);
}

TEST(a_listening_socket_can_be_taken_over)
{
    int fd;
    CHECK_OK(tddp_net_listen("127.0.0.1", port, &fd));
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.listen_fd = fd;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    CHECK_INT(tddp_store_server_port(server), port);
    tddp_store *store = client_of(port);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(store);
    tddp_store_server_stop(server);
    CHECK(fcntl(fd, F_GETFD) < 0);
}

static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

TEST(a_forked_child_only_closes_its_copies)
{
    int before = open_descriptors();
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *store = client_of(port_used);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        tddp_store_release(store);
        tddp_store_server_stop(server);
        CHECK_INT(open_descriptors(), before);
        exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(store);
    tddp_store_server_stop(server);
    CHECK_INT(open_descriptors(), before);
}

TEST(clients_learn_of_the_end_also_while_a_forked_child_holds_descriptors)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    tddp_store_server_stop(server);
    CHECK_HUNG_UP(fd);
    tddp_net_close(fd);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}
