/*
 * Numeric addresses and ports as text and back. Pure functions without I/O, which can neither
 * block nor fail for reasons outside their arguments. resolve.c resolves names.
 */
#include <arpa/inet.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "net/net.h"

static void make_v4(struct in_addr host, int port, tddp_net_address *out)
{
    *out = (tddp_net_address){.length = sizeof out->of.v4};
    out->of.v4.sin_family = AF_INET;
    out->of.v4.sin_addr = host;
    out->of.v4.sin_port = htons((uint16_t)port);
}

/* "eth0" or "2" after the percent sign of a link-local address. */
static bool parse_scope(const char *text, uint32_t *out)
{
    int64_t number;
    if (tddp_parse_int(text, 1, UINT32_MAX, &number)) {
        *out = (uint32_t)number;
        return true;
    }
    *out = if_nametoindex(text);
    return *out != 0;
}

static bool parse_v6(const char *host, size_t length, int port, tddp_net_address *out)
{
    char text[INET6_ADDRSTRLEN + 1 + IF_NAMESIZE];
    if (length >= sizeof text) {
        return false;
    }
    memcpy(text, host, length);
    text[length] = '\0';
    struct in6_addr bytes;
    uint32_t scope = 0;
    char *percent = strchr(text, '%');
    if (percent) {
        *percent = '\0';
        if (!parse_scope(percent + 1, &scope)) {
            return false;
        }
    }
    if (inet_pton(AF_INET6, text, &bytes) != 1) {
        return false;
    }
    *out = (tddp_net_address){.length = sizeof out->of.v6};
    out->of.v6.sin6_family = AF_INET6;
    out->of.v6.sin6_addr = bytes;
    out->of.v6.sin6_port = htons((uint16_t)port);
    out->of.v6.sin6_scope_id = scope;
    return true;
}

bool tddp_net_parse(const char *host, int port, tddp_net_address *out)
{
    struct in_addr v4;
    if (inet_pton(AF_INET, host, &v4) == 1) {
        make_v4(v4, port, out);
        return true;
    }
    size_t length = strlen(host);
    if (length > 2 && host[0] == '[' && host[length - 1] == ']') {
        return parse_v6(host + 1, length - 2, port, out);
    }
    return parse_v6(host, length, port, out);
}

const char *tddp_net_host_text(const tddp_net_address *address, char text[TDDP_NET_TEXT_BYTES])
{
    char host[INET6_ADDRSTRLEN] = "";
    if (address->of.any.sa_family == AF_INET) {
        (void)inet_ntop(AF_INET, &address->of.v4.sin_addr, host, sizeof host);
        snprintf(text, TDDP_NET_TEXT_BYTES, "%s", host);
        return text;
    }
    if (address->of.any.sa_family != AF_INET6) {
        snprintf(text, TDDP_NET_TEXT_BYTES, "(no address)");
        return text;
    }
    (void)inet_ntop(AF_INET6, &address->of.v6.sin6_addr, host, sizeof host);
    char scope[IF_NAMESIZE];
    uint32_t index = address->of.v6.sin6_scope_id;
    if (index && if_indextoname(index, scope)) {
        snprintf(text, TDDP_NET_TEXT_BYTES, "%s%%%s", host, scope);
    } else if (index) {
        snprintf(text, TDDP_NET_TEXT_BYTES, "%s%%%u", host, index);
    } else {
        snprintf(text, TDDP_NET_TEXT_BYTES, "%s", host);
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
