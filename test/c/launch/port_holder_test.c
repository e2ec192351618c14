#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "launch/workers/port_holder.h"

/* A socket bound to a free port of the address, which it tells. */
static int bound(int family, int *port)
{
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || (family == AF_INET6 ? bind(fd, (struct sockaddr *)&v6, sizeof v6)
                                      : bind(fd, (struct sockaddr *)&v4, sizeof v4)) != 0) {
        return -1;
    }
    CHECK_INT(getsockname(fd, (struct sockaddr *)&name, &size), 0);
    *port = ntohs(family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                     : ((struct sockaddr_in *)&name)->sin_port);
    return fd;
}

static void check_holder(int family)
{
    char text[TDDP_LAUNCH_HOLDER_BYTES];
    char pid[32];
    int port;
    int fd = bound(family, &port);
    if (fd < 0) {
        check_skip("no such addresses here");
    }
    CHECK(!tddp_launch_port_holder(port, text, sizeof text)); /* bound, but does not listen */
    CHECK_TEXT(text, "");
    CHECK_INT(listen(fd, 1), 0);
    CHECK(tddp_launch_port_holder(port, text, sizeof text));
    (void)snprintf(pid, sizeof pid, "(pid %d)", (int)getpid());
    CHECK_CONTAINS(text, pid);
    CHECK_CONTAINS(text, "test_launch_port_holder");
    close(fd);
    CHECK(!tddp_launch_port_holder(port, text, sizeof text));
}

TEST(a_listener_is_named)
{
    check_holder(AF_INET);
}

TEST(a_listener_on_ipv6_is_named)
{
    check_holder(AF_INET6);
}

TEST(a_small_text_is_cut)
{
    char text[8];
    int number;
    int fd = bound(AF_INET, &number);
    CHECK_INT(listen(fd, 1), 0);
    CHECK(tddp_launch_port_holder(number, text, sizeof text));
    CHECK_INT(strlen(text), 7);
    close(fd);
}

/* A process without a command line to be read tells at least whose it is. */
TEST(a_holder_that_cannot_be_seen)
{
    char text[TDDP_LAUNCH_HOLDER_BYTES];
    int number;
    int fd = bound(AF_INET, &number);
    CHECK_INT(listen(fd, 1), 0);
    if (getuid() != 0) {
        check_skip("only root can become another user");
    }
    pid_t child = fork();
    if (child == 0) {
        close(fd);
        _exit(setuid(65534) == 0 && tddp_launch_port_holder(number, text, sizeof text) &&
                      strcmp(text, "a process of user 0") == 0
                  ? 0
                  : 1);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    close(fd);
}
