/*
 * Where a server listens, which depends only on the name that the job uses for this host. For a
 * loopback address or `localhost` all of the job is on this host, and the server listens on
 * loopback alone. Otherwise it listens on every address, as PyTorch does: a name may resolve to
 * 127.0.1.1 here and to another address elsewhere, and an address may be that of a proxy.
 */
#include <strings.h>

#include "store/server/server.h"

/* The system's choice for one family may be taken in the other. */
enum { PORT_TRIES = 16 };

/* The name may resolve to either for a client, which tries one after the other: what answers at one
 * must not be an unrelated process. */
static tddp_status listen_on_both(int port, int fds[TDDP_SERVER_LISTENERS])
{
    int v4 = -1;
    int v6 = -1;
    tddp_net_address chosen;
    tddp_status status = tddp_net_listen("127.0.0.1", port, &v4);
    if (status == TDDP_NETWORK) { /* a system without IPv4 */
        fds[1] = -1;
        return tddp_net_listen("::1", port, &fds[0]);
    }
    if (status == TDDP_OK) {
        status = tddp_net_local(v4, &chosen);
    }
    if (status == TDDP_OK) {
        status = tddp_net_listen("::1", tddp_net_port(&chosen), &v6);
    }
    if (status && status != TDDP_NETWORK) { /* that: a system without IPv6 */
        tddp_close(v4);
        return status;
    }
    fds[0] = v4;
    fds[1] = v6;
    return TDDP_OK;
}

static tddp_status listen_on_localhost(int port, int fds[TDDP_SERVER_LISTENERS])
{
    tddp_status status = TDDP_ADDRESS_IN_USE;
    for (int i = 0; i < (port ? 1 : PORT_TRIES) && status == TDDP_ADDRESS_IN_USE; i++) {
        status = listen_on_both(port, fds);
    }
    return status;
}

tddp_status tddp_server_listen(const char *host, int port, int fds[TDDP_SERVER_LISTENERS])
{
    tddp_net_address address;
    if (host && strcasecmp(host, "localhost") == 0) {
        return listen_on_localhost(port, fds);
    }
    bool loopback = host && tddp_net_parse(host, port, &address) && tddp_net_is_loopback(&address);
    tddp_status status = tddp_net_listen(loopback ? host : NULL, port, &fds[0]);
    if (status == TDDP_OK) {
        fds[1] = -1;
    }
    return status;
}
