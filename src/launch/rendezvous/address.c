/*
 * Which of its addresses a node tells the others. Everything is found out by asking the kernel for
 * a route, not by the host's name: that often leads to 127.0.1.1 on the host itself. Any thread;
 * nothing is kept between calls. Who listens and who connects is member.c's.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/address.h"
#include "net/net.h"

/* ANY_PORT: a route is looked for, nothing is sent there. */
enum { LOOKUP_MS = 10 * 1000, ANY_PORT = 1 };

bool tddp_launch_address_is_loopback(const char *address)
{
    tddp_net_address parsed;
    return tddp_net_parse(address, 0, &parsed) && tddp_net_is_loopback(&parsed);
}

static void write_text(const tddp_net_address *address, char out[TDDP_LAUNCH_ADDRESS_BYTES])
{
    char text[TDDP_NET_TEXT_BYTES];
    (void)snprintf(out, TDDP_LAUNCH_ADDRESS_BYTES, "%s", tddp_net_host_text(address, text));
}

tddp_status tddp_launch_address_of(const char *host, tddp_cancel *cancel,
                                   char out[TDDP_LAUNCH_ADDRESS_BYTES])
{
    tddp_net_address found[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    tddp_status status =
        tddp_net_resolve(host, ANY_PORT, tddp_deadline_after_ms(LOOKUP_MS), tddp_cancel_fd(cancel),
                         found, TDDP_NET_MAX_ADDRESSES, &count);
    if (status == TDDP_OK) {
        write_text(&found[0], out);
    }
    return status;
}

tddp_status tddp_launch_address_towards(const char *host, tddp_cancel *cancel,
                                        char out[TDDP_LAUNCH_ADDRESS_BYTES])
{
    tddp_net_address address;
    tddp_status status = tddp_net_address_towards(host, ANY_PORT, tddp_deadline_after_ms(LOOKUP_MS),
                                                  tddp_cancel_fd(cancel), &address);
    if (status == TDDP_OK) {
        write_text(&address, out);
    }
    return status;
}

void tddp_launch_address_choose(const char *own, const char *const *others, size_t count,
                                tddp_cancel *cancel, char out[TDDP_LAUNCH_ADDRESS_BYTES])
{
    char towards[TDDP_LAUNCH_ADDRESS_BYTES];
    const char *chosen = own;
    for (size_t i = 0; i < count && tddp_launch_address_is_loopback(chosen); i++) {
        if (!tddp_launch_address_is_loopback(others[i]) &&
            tddp_launch_address_towards(others[i], cancel, towards) == TDDP_OK) {
            chosen = towards;
        }
    }
    (void)snprintf(out, TDDP_LAUNCH_ADDRESS_BYTES, "%s", chosen);
}

tddp_status tddp_launch_address_check(const char *address, int port, const char *master_host,
                                      const char *own, int64_t limit_ms, tddp_cancel *cancel)
{
    int fd;
    tddp_status status = tddp_net_connect_host(address, port, tddp_deadline_after_ms(limit_ms),
                                               tddp_cancel_fd(cancel), &fd);
    if (status == TDDP_OK) {
        tddp_close(fd);
        return TDDP_OK;
    }
    if (status == TDDP_CANCELED) {
        return status;
    }
    char *reason = tddp_copy_string(tddp_error_message());
    if (!reason) {
        return TDDP_OUT_OF_MEMORY;
    }
    bool loopback =
        tddp_launch_address_is_loopback(address) && !tddp_launch_address_is_loopback(own);
    status = tddp_fail(
        status,
        "no way from %s to the workers' store of node rank 0 (%s), which it says is at %s port "
        "%d: %s; %s --local-addr=ADDRESS on %s, an address of it that all nodes reach, and let "
        "no firewall close its ports",
        own, master_host, address, port, reason,
        loopback ? "a loopback address means another host here: start torchrun with"
                 : "that may be the wrong interface: start torchrun with",
        master_host);
    free(reason);
    return status;
}
