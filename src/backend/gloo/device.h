/* Selects this rank's network address, and creates Gloo's device on it. */
#ifndef TDDP_GLOO_DEVICE_H
#define TDDP_GLOO_DEVICE_H

#include <memory>

#include <gloo/transport/tcp/device.h>

#include <tddp/backend.h>

namespace tddp_gloo
{

/*
 * Selects the address by GLOO_SOCKET_IFNAME (a list with commas: the first interface that
 * exists); else takes the one that libtddp passes; else that of the first interface that is up
 * and not loopback. The address is always numeric, so that the host's name is never resolved.
 * Starts Gloo's thread with all signals blocked.
 */
std::shared_ptr<gloo::transport::tcp::Device> make_device(const tddp_backend_opts &opts);

} // namespace tddp_gloo

#endif
