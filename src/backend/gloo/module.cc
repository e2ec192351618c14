/*
 * The backend table "gloo": the transport, and all operations over it (tddp/transport.h). No
 * exception leaves a slot. Slots run on the group's threads; abort on any.
 */
#include <exception>
#include <new>

#include <tddp/backend.h>
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

template <typename Body> tddp_status guarded(Body body) noexcept
{
    try {
        body();
        return TDDP_OK;
    } catch (const Failure &failure) {
        return tddp_fail(failure.status(), "%s", failure.what());
    } catch (const std::bad_alloc &) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception &cause) {
        return tddp_fail(TDDP_NETWORK, "%s", cause.what());
    } catch (...) {
        return tddp_fail(TDDP_INTERNAL, "an exception of unknown kind");
    }
}

/* --- the transport's table ------------------------------------------------------------------- */

Transport &transport_of(void *context)
{
    return *static_cast<Transport *>(context);
}

tddp_status send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                 void **transfer)
{
    return guarded([&] { *transfer = transport_of(context).send(peer, tag, data, bytes); });
}

tddp_status recv(void *context, int peer, uint64_t tag, void *data, size_t bytes, void **transfer)
{
    return guarded([&] { *transfer = transport_of(context).recv(peer, tag, data, bytes); });
}

tddp_status test(void *context, void *transfer, int *complete, int *source)
{
    *complete = 1; /* with an error, too */
    return guarded([&] {
        int from;
        *complete = transport_of(context).test(*static_cast<Transfer *>(transfer), &from);
        if (source && *complete) {
            *source = from;
        }
    });
}

void release(void *context, void *transfer)
{
    transport_of(context).release(static_cast<Transfer *>(transfer));
}

struct tddp_eventcount *transport_events(void *context)
{
    return transport_of(context).events();
}

tddp_status check_peer(void *context, int peer, uint64_t sequence)
{
    return guarded([&] { transport_of(context).check_peer(peer, sequence); });
}

void report(void *context, tddp_status status, const char *text)
{
    transport_of(context).report(status, text);
}

const tddp_transport_ops transport_ops = {
    sizeof(tddp_transport_ops),
    send,
    recv,
    test,
    release,
    transport_events,
    check_peer,
    report,
    nullptr, // Gloo has a thread
    nullptr,
};

/* --- the backend's table --------------------------------------------------------------------- */

/* A rank of a group. */
struct Member {
    explicit Member(const tddp_backend_opts &opts) : transport(opts) {}
    ~Member()
    {
        transport.close();
        tddp_coll_destroy(coll);
    }
    Member(const Member &) = delete;
    Member &operator=(const Member &) = delete;

    Transport transport;
    tddp_coll *coll = nullptr;
};

Member &member_of(void *context)
{
    return *static_cast<Member *>(context);
}

tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    NoBrokenPipe guard;
    return guarded([&] {
        auto member = std::make_unique<Member>(*opts);
        tddp_coll_opts coll_opts = {};
        coll_opts.size = sizeof coll_opts;
        coll_opts.transport = &transport_ops;
        coll_opts.context = &member->transport;
        coll_opts.rank = opts->rank;
        coll_opts.world_size = opts->world_size;
        coll_opts.names = member->transport.names();
        coll_opts.observer = member->transport.observer();
        member->transport.connect(
            *opts, wait, [&] { Failure::check(tddp_coll_create(&coll_opts, &member->coll)); });
        *context = member.release();
    });
}

void abort_member(void *context)
{
    NoBrokenPipe guard;
    (void)guarded([&] { member_of(context).transport.abort(); });
}

void destroy(void *context)
{
    NoBrokenPipe guard;
    delete &member_of(context);
}

tddp_status run(void *context, const tddp_op *op)
{
    NoBrokenPipe guard;
    Member &member = member_of(context);
    member.transport.set_sequence(op->sequence);
    return tddp_coll_run(member.coll, op);
}

tddp_status post(void *context, const tddp_op *op, void **request)
{
    NoBrokenPipe guard;
    return tddp_coll_post(member_of(context).coll, op, request);
}

tddp_status finish(void *context, void *request, int *source)
{
    NoBrokenPipe guard;
    return tddp_coll_finish(member_of(context).coll, request, source);
}

tddp_status probe(void *context, void *request, int *source)
{
    NoBrokenPipe guard;
    return tddp_coll_probe(member_of(context).coll, request, source);
}

void report_failure(void *context, tddp_status status, const char *text)
{
    NoBrokenPipe guard;
    member_of(context).transport.report(status, text);
}

tddp_status check_rank(void *context, int rank)
{
    Transport &transport = member_of(context).transport;
    return guarded([&] {
        for (int peer = 0; peer < transport.size; peer++) {
            if (peer != transport.rank && (rank < 0 || peer == rank)) {
                transport.check_peer(peer, 0);
            }
        }
    });
}

struct tddp_eventcount *events(void *context)
{
    return member_of(context).transport.events();
}

const tddp_backend_v1 backend = {
    TDDP_BACKEND_ABI,
    sizeof(tddp_backend_v1),
    "gloo",
    1u << TDDP_CPU,
    create,
    abort_member,
    destroy,
    post,
    finish,
    TDDP_BACKEND_SHARES_HOSTS,
    nullptr, // it has no memory of its own
    nullptr,
    report_failure,
    0, // and no device
    nullptr,
    nullptr,
    nullptr,
    nullptr, // groups are made without others
    nullptr, // sending needs no preparation
    events,
    check_rank,
    probe,
    tddp_coll_drop,
    TDDP_OP_COUNT,
    {run, run, run, run, run, run, run, run, run, nullptr, nullptr},
};

} // namespace

extern "C" TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? &backend : nullptr;
}
