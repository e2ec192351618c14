/*
 * Which of its addresses a node tells the others. Everything is found out by asking the kernel for
 * a route, not by the host's name: that often leads to 127.0.1.1 on the host itself. Any thread;
 * nothing is kept between calls.
 */
#include <stdio.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

/* ANY_PORT: a route is looked for, nothing is sent there. */
enum { LOOKUP_MS = 10 * 1000, ANY_PORT = 1 };

bool tddp_launch_address_is_loopback(const char *address)
{
    tddp_net_address parsed;
    return tddp_net_parse(address, 0, &parsed) && tddp_net_is_loopback(&parsed);
}

tddp_status tddp_launch_address_of(const char *host, bool towards, tddp_cancel *cancel,
                                   char out[TDDP_LAUNCH_ADDR_BYTES])
{
    tddp_net_address found[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    int64_t deadline_ns = tddp_deadline_after_ms(LOOKUP_MS);
    int cancel_fd = tddp_cancel_fd(cancel);
    tddp_status status =
        towards ? tddp_net_address_towards(host, ANY_PORT, deadline_ns, cancel_fd, found)
                : tddp_net_resolve(host, ANY_PORT, deadline_ns, cancel_fd, found,
                                   TDDP_NET_MAX_ADDRESSES, &count);
    if (status == TDDP_OK) {
        _Static_assert((int)TDDP_LAUNCH_ADDR_BYTES >= (int)TDDP_NET_TEXT_BYTES, "any address fits");
        (void)tddp_net_host_text(&found[0], out);
    }
    return status;
}

void tddp_launch_address_choose(const char *own, const tddp_launch_member *others, int count,
                                tddp_cancel *cancel, char out[TDDP_LAUNCH_ADDR_BYTES])
{
    (void)snprintf(out, TDDP_LAUNCH_ADDR_BYTES, "%s", own);
    for (int i = 0; i < count && tddp_launch_address_is_loopback(out); i++) {
        if (!tddp_launch_address_is_loopback(others[i].addr)) {
            (void)!tddp_launch_address_of(others[i].addr, true, cancel, out);
        }
    }
}

tddp_status tddp_launch_address_check(const char *address, int port, const char *master,
                                      const char *own, int64_t limit_ms, tddp_cancel *cancel)
{
    int fd = -1;
    tddp_status status = tddp_net_connect_host(address, port, tddp_deadline_after_ms(limit_ms),
                                               tddp_cancel_fd(cancel), &fd);
    tddp_close(fd);
    if (status == TDDP_OK || status == TDDP_CANCELED) {
        return status;
    }
    char reason[TDDP_LAUNCH_WHY_BYTES];
    (void)snprintf(reason, sizeof reason, "%s", tddp_error_message());
    return tddp_fail(
        status,
        "no way from %s to the workers' store of node rank 0 (%s), which it says is at %s port "
        "%d: %s; a loopback address means another host here, else that may be the wrong interface: "
        "start torchrun with --local-addr=ADDRESS on %s, an address of it that all nodes reach, "
        "and let no firewall close its ports",
        own, master, address, port, reason, master);
}
