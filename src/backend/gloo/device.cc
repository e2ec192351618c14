/*
 * Selects the address at which other ranks reach this one, and creates Gloo's device on it. Runs on
 * the thread that creates the group. Without a numeric address Gloo would resolve the host's name,
 * which fails on many machines.
 */
#include "device.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include <tddp/log.h>

#include "failure.h"
#include "signals.h"

namespace tddp_gloo
{
namespace
{

struct Interface {
    std::string name;
    std::string address;
    bool v4;
    bool usable; /* up, and not loopback */
};

std::vector<Interface> interfaces()
{
    ifaddrs *list = nullptr;
    if (getifaddrs(&list) != 0) {
        throw Failure(TDDP_SYSTEM, std::string("getifaddrs: ") + strerror(errno));
    }
    std::vector<Interface> found;
    for (ifaddrs *each = list; each; each = each->ifa_next) {
        int family = each->ifa_addr ? each->ifa_addr->sa_family : AF_UNSPEC;
        if (family != AF_INET && family != AF_INET6) {
            continue;
        }
        char text[NI_MAXHOST];
        socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
        if (getnameinfo(each->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST)) {
            continue;
        }
        bool usable = (each->ifa_flags & IFF_UP) && !(each->ifa_flags & IFF_LOOPBACK);
        found.push_back({each->ifa_name, text, family == AF_INET, usable});
    }
    freeifaddrs(list);
    return found;
}

/* IPv4 before IPv6, since every version of Gloo supports it. Empty: there is none. */
template <typename Accept> std::string pick(const std::vector<Interface> &all, Accept accept)
{
    for (bool v4 : {true, false}) {
        for (const Interface &each : all) {
            if (each.v4 == v4 && accept(each)) {
                return each.address;
            }
        }
    }
    return {};
}

std::string address_by_name(const std::string &wanted, const std::vector<Interface> &all)
{
    std::istringstream names(wanted);
    for (std::string name; std::getline(names, name, ',');) {
        std::string address = pick(all, [&](const Interface &each) { return each.name == name; });
        if (!address.empty()) {
            return address;
        }
    }
    std::string there;
    for (const Interface &each : all) {
        there += (there.empty() ? "" : ", ") + each.name + " (" + each.address + ")";
    }
    throw Failure(TDDP_INVALID_ARGUMENT, "GLOO_SOCKET_IFNAME=\"" + wanted +
                                             "\": no such network interface with an address; "
                                             "there are: " +
                                             there);
}

std::string choose_address(const tddp_backend_opts &opts)
{
    const char *wanted = getenv("GLOO_SOCKET_IFNAME");
    if (wanted && *wanted) {
        return address_by_name(wanted, interfaces());
    }
    bool has_address = opts.size >= offsetof(tddp_backend_opts, address) + sizeof opts.address;
    if (has_address && opts.address) {
        return opts.address;
    }
    std::string address;
    if (!opts.same_host) {
        address = pick(interfaces(), [](const Interface &each) { return each.usable; });
    }
    if (address.empty()) {
        address = pick(interfaces(), [](const Interface &each) {
            return each.address == "127.0.0.1" || each.address == "::1";
        });
    }
    return address.empty() ? "127.0.0.1" : address;
}

/*
 * Gloo's thread inherits the signal mask and the scheduling policy of the thread that starts it.
 * It spins while another thread holds a connection's lock, so it must not preempt that thread:
 * SCHED_BATCH threads never do (sched(7)). This makes a training step of two ranks on two cores
 * a seventh faster.
 */
class StartsGlooThread
{
  public:
    StartsGlooThread()
    {
        ordinary_ = sched_getscheduler(0) == SCHED_OTHER;
        if (ordinary_) {
            set_policy(SCHED_BATCH);
        }
    }
    ~StartsGlooThread()
    {
        if (ordinary_) {
            set_policy(SCHED_OTHER);
        }
    }
    StartsGlooThread(const StartsGlooThread &) = delete;
    StartsGlooThread &operator=(const StartsGlooThread &) = delete;

  private:
    /* A failure costs only time. */
    static void set_policy(int policy)
    {
        sched_param none = {};
        (void)sched_setscheduler(0, policy, &none);
    }

    SignalsBlocked blocked_;
    bool ordinary_;
};

} // namespace

std::shared_ptr<gloo::transport::tcp::Device> make_device(const tddp_backend_opts &opts)
{
    gloo::transport::tcp::attr attr;
    attr.hostname = choose_address(opts);
    tddp_log(TDDP_LOG_INFO, "gloo", "rank %d of \"%s\" uses address %s", opts.rank, opts.group,
             attr.hostname.c_str());
    StartsGlooThread starts;
    return std::dynamic_pointer_cast<gloo::transport::tcp::Device>(
        gloo::transport::tcp::CreateDevice(attr));
}

} // namespace tddp_gloo
