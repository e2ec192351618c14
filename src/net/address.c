/*
 * Numeric addresses and ports as text and back. Pure functions without I/O, which can neither
 * block nor fail for reasons outside their arguments. resolve.c resolves names.
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "net/net.h"

/* With a scope where it has one, as of a link-local address: "fe80::1%eth0", "fe80::1%2". */
static bool parse_v6(const char *host, int port, tddp_net_address *out)
{
    const struct addrinfo hints = {
        .ai_flags = AI_NUMERICHOST, .ai_family = AF_INET6, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    if (getaddrinfo(host, NULL, &hints, &found) != 0) {
        return false;
    }
    *out = (tddp_net_address){.length = sizeof out->of.v6};
    memcpy(&out->of.v6, found->ai_addr, sizeof out->of.v6);
    out->of.v6.sin6_port = htons((uint16_t)port);
    freeaddrinfo(found);
    return true;
}

bool tddp_net_parse(const char *host, int port, tddp_net_address *out)
{
    char inner[TDDP_NET_TEXT_BYTES];
    struct in_addr v4;
    if (inet_pton(AF_INET, host, &v4) == 1) {
        *out = (tddp_net_address){.length = sizeof out->of.v4};
        out->of.v4.sin_family = AF_INET;
        out->of.v4.sin_addr = v4;
        out->of.v4.sin_port = htons((uint16_t)port);
        return true;
    }
    size_t length = strlen(host);
    if (length < 3 || length >= sizeof inner || host[0] != '[' || host[length - 1] != ']') {
        return strchr(host, ':') && parse_v6(host, port, out);
    }
    (void)snprintf(inner, sizeof inner, "%.*s", (int)length - 2, host + 1);
    return parse_v6(inner, port, out);
}

const char *tddp_net_host_text(const tddp_net_address *address, char text[TDDP_NET_TEXT_BYTES])
{
    if (getnameinfo(&address->of.any, address->length, text, TDDP_NET_TEXT_BYTES, NULL, 0,
                    NI_NUMERICHOST) != 0) {
        (void)snprintf(text, TDDP_NET_TEXT_BYTES, "(no address)");
    }
    return text;
}

const char *tddp_net_text(const tddp_net_address *address, char text[TDDP_NET_TEXT_BYTES])
{
    char host[TDDP_NET_TEXT_BYTES];
    (void)tddp_net_host_text(address, host);
    const char *format = address->of.any.sa_family == AF_INET6 ? "[%.85s]:%d" : "%.85s:%d";
    snprintf(text, TDDP_NET_TEXT_BYTES, format, host, tddp_net_port(address));
    return text;
}

int tddp_net_port(const tddp_net_address *address)
{
    switch (address->of.any.sa_family) {
    case AF_INET:
        return ntohs(address->of.v4.sin_port);
    case AF_INET6:
        return ntohs(address->of.v6.sin6_port);
    default:
        return 0;
    }
}

bool tddp_net_is_loopback(const tddp_net_address *address)
{
    if (address->of.any.sa_family == AF_INET) {
        return ntohl(address->of.v4.sin_addr.s_addr) >> 24 == 127;
    }
    if (address->of.any.sa_family != AF_INET6) {
        return false;
    }
    const struct in6_addr *host = &address->of.v6.sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(host) || (IN6_IS_ADDR_V4MAPPED(host) && host->s6_addr[12] == 127);
}

tddp_status tddp_net_check_port(int64_t port, int min)
{
    if (port < min || port > 65535) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "port %lld: expected %d to 65535", (long long)port,
                         min);
    }
    return TDDP_OK;
}

tddp_status tddp_net_split_endpoint(const char *text, int default_port, char **host, int *port)
{
    tddp_net_address bare;
    const char *colon = strrchr(text, ':');
    if (tddp_net_parse(text, 0, &bare)) {
        colon = NULL; /* the colons, if any, are inside an IPv6 address */
    }
    int64_t number = default_port;
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    if (colon && !tddp_parse_int(colon + 1, 0, 65535, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "\"%s\": expected a port from 0 to 65535 after the "
                         "last colon, got \"%s\"",
                         text, colon + 1);
    }
    if (number < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "\"%s\": the port is missing, expected HOST:PORT",
                         text);
    }
    if (length > 1 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    } else if (colon && memchr(text, ':', length)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "\"%s\": expected HOST:PORT, with an IPv6 address in brackets", text);
    }
    if (length == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "\"%s\": the host is missing, expected HOST:PORT",
                         text);
    }
    char *copy = tddp_alloc(length + 1);
    if (!copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(copy, text, length);
    *host = copy;
    *port = (int)number;
    return TDDP_OK;
}
