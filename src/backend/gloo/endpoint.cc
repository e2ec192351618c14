/*
 * A rank's record of addresses: the device's socket address after its size, the first connection's
 * number, the beacon's port, the connections' ports if they have their own. All ranks have the same
 * byte order. Any thread.
 */
#include "endpoint.h"

#include <cstring>

#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>

#include "failure.h"

namespace tddp_gloo
{
namespace
{

using gloo::transport::tcp::Address;

/* The place of a peer among those of a rank, which has no connection to itself. */
size_t index_of(int owner, int peer)
{
    return static_cast<size_t>(peer < owner ? peer : peer - 1);
}

const Address &address_of(gloo::transport::Context &context, int peer)
{
    auto *address = dynamic_cast<const Address *>(&context.getPair(peer)->address());
    if (!address) {
        throw Failure(TDDP_INTERNAL, "this version of Gloo has connections without TCP addresses");
    }
    return *address;
}

template <typename Value> void append(std::string &record, const Value &value)
{
    record.append(reinterpret_cast<const char *>(&value), sizeof value);
}

} // namespace

socklen_t size_of(const sockaddr_storage &address)
{
    return address.ss_family == AF_INET    ? sizeof(sockaddr_in)
           : address.ss_family == AF_INET6 ? sizeof(sockaddr_in6)
                                           : sizeof address;
}

in_port_t *port_in(sockaddr_storage &address)
{
    return address.ss_family == AF_INET    ? &reinterpret_cast<sockaddr_in &>(address).sin_port
           : address.ss_family == AF_INET6 ? &reinterpret_cast<sockaddr_in6 &>(address).sin6_port
                                           : nullptr;
}

Endpoint Endpoint::of(gloo::transport::Context &context)
{
    Endpoint endpoint;
    const Address &first = address_of(context, context.rank == 0 ? 1 : 0);
    endpoint.device = first.getSockaddr();
    endpoint.first_number = first.getSeq();
    if (first.getSeq() == Address::kSequenceNumberUnset) {
        endpoint.ports.resize(static_cast<size_t>(context.size - 1));
    }
    for (int peer = 0; peer < context.size; peer++) {
        if (peer == context.rank) {
            continue;
        }
        const Address &address = address_of(context, peer);
        const size_t index = index_of(context.rank, peer);
        if (!endpoint.ports.empty()) {
            sockaddr_storage listens = address.getSockaddr();
            const in_port_t *port = port_in(listens);
            endpoint.ports[index] = port ? *port : 0;
        }
        const Address derived(endpoint.address_for(context.rank, peer));
        if (derived.str() != address.str() || derived.getSeq() != address.getSeq()) {
            throw Failure(TDDP_INTERNAL, "this version of Gloo gives its connections addresses in "
                                         "an unknown way");
        }
    }
    return endpoint;
}

std::string Endpoint::serialise() const
{
    const size_t bytes = size_of(device);
    std::string record(1, static_cast<char>(bytes));
    record.append(reinterpret_cast<const char *>(&device), bytes);
    append(record, first_number);
    append(record, beacon_port);
    record.append(reinterpret_cast<const char *>(ports.data()), ports.size() * sizeof ports[0]);
    return record;
}

Endpoint Endpoint::parse(tddp_slice record)
{
    Endpoint endpoint;
    const size_t bytes = record.size > 0 ? static_cast<unsigned char>(record.data[0]) : 0;
    const size_t fixed = 1 + bytes + sizeof endpoint.first_number + sizeof endpoint.beacon_port;
    if (bytes > sizeof endpoint.device || record.size < fixed) {
        throw Failure(TDDP_PROTOCOL, "a rank's addresses in the store are cut short");
    }
    const char *at = record.data + 1;
    memcpy(&endpoint.device, at, bytes);
    at += bytes;
    memcpy(&endpoint.first_number, at, sizeof endpoint.first_number);
    at += sizeof endpoint.first_number;
    memcpy(&endpoint.beacon_port, at, sizeof endpoint.beacon_port);
    endpoint.ports.resize((record.size - fixed) / sizeof endpoint.ports[0]);
    if (!endpoint.ports.empty()) {
        memcpy(endpoint.ports.data(), record.data + fixed,
               endpoint.ports.size() * sizeof endpoint.ports[0]);
    }
    return endpoint;
}

std::vector<char> Endpoint::address_for(int owner, int peer) const
{
    const size_t index = index_of(owner, peer);
    if (ports.empty()) {
        return Address(device, first_number + static_cast<int64_t>(index)).bytes();
    }
    if (index >= ports.size()) {
        throw Failure(TDDP_PROTOCOL, "a rank's addresses in the store are cut short");
    }
    sockaddr_storage address = device;
    if (in_port_t *port = port_in(address)) {
        *port = ports[index];
    }
    return Address(address, first_number).bytes();
}

sockaddr_storage Endpoint::beacon() const
{
    sockaddr_storage address = device;
    in_port_t *port = port_in(address);
    if (!port || beacon_port == 0) {
        return {};
    }
    *port = beacon_port;
    return address;
}

} // namespace tddp_gloo
