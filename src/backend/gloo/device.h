/* Which network address Gloo uses, and the Gloo device on it. */
#ifndef TDDP_GLOO_DEVICE_H
#define TDDP_GLOO_DEVICE_H

#include <memory>

#include <gloo/transport/device.h>

#include <tddp/backend.h>

namespace tddp_gloo
{

/*
 * GLOO_SOCKET_IFNAME (a list with commas: the first that exists) decides; else the address that
 * libtddp names; else that of the first interface that is up and not loopback. Always numeric, so
 * that nothing looks the host's name up. Starts Gloo's thread, with all signals blocked.
 */
std::shared_ptr<gloo::transport::Device> make_device(const tddp_backend_opts &opts);

} // namespace tddp_gloo

#endif
