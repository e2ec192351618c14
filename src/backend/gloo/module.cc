/*
 * The transport's table. No exception leaves a function, and no signal that Gloo raises on a
 * caller's thread.
 */
#include <exception>
#include <new>

#include <tddp/transport.h>

#include "failure.h"
#include "signals.h"
#include "transport.h"

namespace
{

using tddp_gloo::Failure;
using tddp_gloo::NoBrokenPipe;
using tddp_gloo::Transfer;
using tddp_gloo::Transport;

/* `status`: what an exception of Gloo's means. */
template <typename Body> tddp_status guarded(Body body, tddp_status status) noexcept
{
    try {
        body();
        return TDDP_OK;
    } catch (const Failure &failure) {
        return tddp_fail(failure.status(), "%s", failure.what());
    } catch (const std::bad_alloc &) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception &cause) {
        return tddp_fail(status, "%s", tddp_gloo::strip_location(cause).c_str());
    } catch (...) {
        return tddp_fail(TDDP_INTERNAL, "an exception of unknown kind");
    }
}

Transport &transport_of(void *context)
{
    return *static_cast<Transport *>(context);
}

tddp_status open(const tddp_backend_opts *opts, void **context, tddp_slice *address)
{
    return guarded(
        [&] {
            auto *transport = new Transport(*opts);
            *context = transport;
            *address = {transport->address().data(), transport->address().size()};
        },
        TDDP_NETWORK);
}

tddp_status connect(void *context, const tddp_slice *addresses, const tddp_wait *wait, int *peer)
{
    NoBrokenPipe guard(transport_of(context).ended());
    return guarded([&] { transport_of(context).connect(addresses, *wait, peer); }, TDDP_PEER_LOST);
}

tddp_status send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                 void **transfer)
{
    NoBrokenPipe guard(transport_of(context).ended());
    return guarded([&] { *transfer = transport_of(context).send(peer, tag, data, bytes); },
                   TDDP_PEER_LOST);
}

tddp_status recv(void *context, int peer, uint64_t tag, void *data, size_t bytes, void **transfer)
{
    NoBrokenPipe guard(transport_of(context).ended());
    return guarded([&] { *transfer = transport_of(context).recv(peer, tag, data, bytes); },
                   TDDP_PEER_LOST);
}

tddp_status test(void *context, void *transfer, int *complete, int *source)
{
    *complete = 1; /* with an error, too */
    return guarded(
        [&] {
            int from;
            *complete = transport_of(context).test(*static_cast<Transfer *>(transfer), &from);
            if (source && *complete) {
                *source = from;
            }
        },
        TDDP_PEER_LOST);
}

/* A connection on which a message without memory comes later ends then (connection.h). */
void release(void *, void *transfer)
{
    delete static_cast<Transfer *>(transfer);
}

void close(void *context, int64_t ms)
{
    NoBrokenPipe guard(transport_of(context).ended());
    (void)guarded([&] { transport_of(context).close(std::chrono::milliseconds(ms)); },
                  TDDP_NETWORK);
}

void destroy(void *context)
{
    delete &transport_of(context);
}

} // namespace

/* Gloo has a thread: neither progress nor arm. Nothing to do for failed(): connections end. */
extern "C" const tddp_transport_ops tddp_gloo_transport = {
    sizeof(tddp_transport_ops),
    "gloo",
    TDDP_BACKEND_SHARES_HOSTS,
    open,
    connect,
    send,
    recv,
    test,
    release,
    nullptr,
    nullptr,
    close,
    destroy,
    nullptr,
};

extern "C" TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? tddp_transport_backend(&tddp_gloo_transport) : nullptr;
}
