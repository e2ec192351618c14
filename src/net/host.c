/*
 * Describes this host: an identity that two processes can compare, the addresses of its interfaces,
 * and the one it would use towards a peer. Only asks the kernel; nothing is cached, since a process
 * may be moved to another network namespace.
 */
#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "net/net.h"

tddp_status tddp_net_host_id(char text[TDDP_NET_HOST_ID_BYTES])
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    static const uint64_t key[2] = {0, 0}; /* the same in all processes */
    char boot_id[37] = "";
    struct stat namespace;
    if (!tddp_scan_file(path, "%36s", boot_id) || strlen(boot_id) != sizeof boot_id - 1) {
        return tddp_fail(TDDP_SYSTEM, "%s: expected the kernel's boot id, got \"%s\"", path,
                         boot_id);
    }
    if (stat("/proc/self/ns/net", &namespace)) {
        return tddp_fail_errno("/proc/self/ns/net");
    }
    char name[sizeof boot_id + 32];
    snprintf(name, sizeof name, "%s/%llu", boot_id, (unsigned long long)namespace.st_ino);
    snprintf(text, TDDP_NET_HOST_ID_BYTES, "%016" PRIx64, tddp_siphash(key, name, strlen(name)));
    return TDDP_OK;
}

/* Higher is better; 0 cannot be used. */
static int rank_of(const struct sockaddr *address)
{
    if (!address) {
        return 0;
    }
    if (address->sa_family == AF_INET) {
        return 3;
    }
    if (address->sa_family != AF_INET6) {
        return 0;
    }
    struct sockaddr_in6 v6;
    memcpy(&v6, address, sizeof v6);
    return IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr) ? 1 : 2;
}

static tddp_status fail_interface(const struct ifaddrs *all, const char *name)
{
    char names[512] = "";
    size_t used = 0;
    for (const struct ifaddrs *each = all; each; each = each->ifa_next) {
        bool seen = rank_of(each->ifa_addr) == 0;
        for (const struct ifaddrs *before = all; before != each && !seen;
             before = before->ifa_next) {
            seen = rank_of(before->ifa_addr) && strcmp(before->ifa_name, each->ifa_name) == 0;
        }
        if (!seen && used + strlen(each->ifa_name) + 3 < sizeof names) {
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                                     each->ifa_name);
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "no network interface \"%s\" with an address; there are: %s", name, names);
}

const char *tddp_net_loopback(void)
{
    static const char v4[] = "127.0.0.1";
    static const char v6[] = "::1";
    int fd;
    if (tddp_net_listen(v4, 0, &fd) == TDDP_OK) {
        tddp_close(fd);
        return v4;
    }
    if (tddp_net_listen(v6, 0, &fd) == TDDP_OK) {
        tddp_close(fd);
        return v6;
    }
    return v4; /* what needs it reports why it can't be used */
}

tddp_status tddp_net_interface_address(const char *name, tddp_net_address *out)
{
    struct ifaddrs *all;
    if (getifaddrs(&all)) {
        return tddp_fail_errno("getifaddrs");
    }
    const struct sockaddr *best = NULL;
    for (const struct ifaddrs *each = all; each; each = each->ifa_next) {
        if (strcmp(each->ifa_name, name) == 0 && rank_of(each->ifa_addr) > rank_of(best)) {
            best = each->ifa_addr;
        }
    }
    tddp_status status = TDDP_OK;
    if (best) {
        tddp_net_address address = {0};
        address.length = best->sa_family == AF_INET ? sizeof address.of.v4 : sizeof address.of.v6;
        memcpy(&address.of, best, address.length);
        *out = address;
    } else {
        status = fail_interface(all, name);
    }
    freeifaddrs(all);
    return status;
}

static tddp_status address_towards(const tddp_net_address *peer, tddp_net_address *out)
{
    char text[TDDP_NET_TEXT_BYTES];
    int fd = socket(peer->of.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    /* Connecting a datagram socket only chooses the route. */
    if (fd < 0 || connect(fd, &peer->of.any, peer->length)) {
        tddp_status status = tddp_fail(TDDP_NETWORK, "no way from here to %s: %s",
                                       tddp_net_text(peer, text), strerror(errno));
        tddp_close(fd);
        return status;
    }
    tddp_net_address address;
    tddp_status status = tddp_net_local(fd, &address);
    tddp_close(fd);
    if (status) {
        return status;
    }
    if (address.of.any.sa_family == AF_INET) {
        address.of.v4.sin_port = 0;
    } else {
        address.of.v6.sin6_port = 0;
    }
    *out = address;
    return TDDP_OK;
}

tddp_status tddp_net_address_towards(const char *host, int port, int64_t deadline_ns, int cancel_fd,
                                     tddp_net_address *out)
{
    tddp_net_address peers[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    tddp_status status =
        tddp_net_resolve(host, port, deadline_ns, cancel_fd, peers, TDDP_NET_MAX_ADDRESSES, &count);
    if (status) {
        return status;
    }
    for (size_t i = 0; i < count; i++) {
        status = address_towards(&peers[i], out);
        if (status == TDDP_OK) {
            break;
        }
    }
    return status;
}
