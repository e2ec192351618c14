/*
 * What a rank publishes in the store so that all others can connect to it: one record, of constant
 * size, or with two bytes for each of the others where Gloo listens on a port for each.
 */
#ifndef TDDP_GLOO_ENDPOINT_H
#define TDDP_GLOO_ENDPOINT_H

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include <gloo/transport/context.h>

#include <tddp/store.h>

namespace tddp_gloo
{

struct Endpoint {
    /* Where the rank's device listens. Gloo gives connections consecutive numbers, in the order in
     * which a context's pairs are created, or (before 2023) each a port of its own and no number.
     */
    sockaddr_storage device = {};
    int64_t first_number = 0;
    std::vector<in_port_t> ports; /* in network byte order; empty: that of the device */
    /* In network byte order, at the device's address; 0: there is no beacon. */
    in_port_t beacon_port = 0;

    /* Throws if this version of Gloo does it in yet another way. */
    static Endpoint of(gloo::transport::Context &context);
    /* Throws TDDP_PROTOCOL. */
    static Endpoint parse(tddp_slice record);
    std::string serialise() const;

    /* The address, in Gloo's form, at which the rank `owner` expects `peer`. */
    std::vector<char> address_for(int owner, int peer) const;
    /* Family AF_UNSPEC: none. */
    sockaddr_storage beacon() const;
};

/* The bytes of an address in use. */
socklen_t size_of(const sockaddr_storage &address);

/* Where the port is within an address, in network byte order; null for other families than IP's. */
in_port_t *port_in(sockaddr_storage &address);

} // namespace tddp_gloo

#endif
