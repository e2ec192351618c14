/*
 * What the server says of clients that it refuses or drops. Anybody who reaches its port can bring
 * about such a line: the first few are written at once, of more a line a second that counts them.
 * Server thread only.
 */
#include <stdio.h>

#include "store/server/server.h"

/* Lines that may be written at once after a pause. */
enum { BURST = 20 };

static const int64_t each_ns = TDDP_NS_PER_S;

/* Takes the right to write a line, of which there is one a second, and BURST after a pause. */
static bool may_write(tddp_server_lines *lines)
{
    int64_t now = tddp_now_ns();
    int64_t earliest = now - BURST * each_ns;
    lines->since_ns = lines->since_ns < earliest ? earliest : lines->since_ns;
    if (now - lines->since_ns < each_ns) {
        return false;
    }
    lines->since_ns += each_ns;
    return true;
}

void tddp_server_say(tddp_store_server *server, const char *what, const tddp_net_address *address,
                     const char *why)
{
    char text[TDDP_NET_TEXT_BYTES];
    tddp_server_lines *lines = &server->lines;
    (void)snprintf(lines->last, sizeof lines->last, "%s client %s: %s", what,
                   tddp_net_text(address, text), why);
    if (lines->left_out == 0 && may_write(lines)) {
        tddp_log(TDDP_LOG_WARN, "store", "%s", lines->last);
    } else {
        lines->left_out++;
    }
}

int64_t tddp_server_lines_due(const tddp_store_server *server)
{
    const tddp_server_lines *lines = &server->lines;
    return lines->left_out ? lines->since_ns + each_ns : 0;
}

void tddp_server_say_rest(tddp_store_server *server, bool end)
{
    tddp_server_lines *lines = &server->lines;
    if (lines->left_out && (end || may_write(lines))) {
        tddp_log(TDDP_LOG_WARN, "store", "refused or dropped %llu more clients, the last: %s",
                 (unsigned long long)lines->left_out, lines->last);
        lines->left_out = 0;
    }
}
