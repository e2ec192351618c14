/*
 * The backend table "gloo". No exception leaves its slots. Slots run on the group's threads; abort
 * on any.
 */
#include <exception>
#include <new>

#include <tddp/backend.h>

#include "collectives.h"
#include "failure.h"
#include "mesh.h"
#include "p2p.h"
#include "signals.h"

namespace
{

using tddp_gloo::Failure;
using tddp_gloo::Mesh;
using tddp_gloo::NoBrokenPipe;
using tddp_gloo::Request;

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

/* For operations: reports a failure after which the group is unusable to the peers. */
template <typename Body> tddp_status guarded_for(Mesh &mesh, Body body) noexcept
{
    tddp_status status = guarded(body);
    if (status != TDDP_OK && status != TDDP_INVALID_ARGUMENT && status != TDDP_UNSUPPORTED &&
        status != TDDP_CANCELED) {
        mesh.send_close_notice(status, tddp_error_message());
    }
    return status;
}

/* Activates the watcher while an operation runs. */
class OpScope
{
  public:
    OpScope(Mesh &mesh, const tddp_op &op) : mesh_(mesh)
    {
        mesh_.begin(op);
    }
    ~OpScope()
    {
        mesh_.end();
    }
    OpScope(const OpScope &) = delete;
    OpScope &operator=(const OpScope &) = delete;

  private:
    Mesh &mesh_;
};

template <void (*Collective)(Mesh &, const tddp_op &)>
tddp_status run(void *context, const tddp_op *op)
{
    NoBrokenPipe guard;
    Mesh &mesh = *static_cast<Mesh *>(context);
    return guarded_for(mesh, [&] {
        OpScope scope(mesh, *op);
        Collective(mesh, *op);
    });
}

tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    NoBrokenPipe guard;
    return guarded([&] {
        auto mesh = std::make_unique<Mesh>(*opts);
        mesh->connect(*opts, wait);
        *context = mesh.release();
    });
}

void abort_mesh(void *context)
{
    NoBrokenPipe guard;
    (void)guarded([&] { static_cast<Mesh *>(context)->abort(); });
}

void destroy(void *context)
{
    NoBrokenPipe guard;
    (void)guarded([&] { delete static_cast<Mesh *>(context); });
}

void report_failure(void *context, tddp_status status, const char *text)
{
    NoBrokenPipe guard;
    (void)guarded([&] { static_cast<Mesh *>(context)->send_close_notice(status, text); });
}

int resumes(void *context, const tddp_op *op)
{
    return op->bundled == 0 && tddp_gloo::resumes(*static_cast<Mesh *>(context), *op);
}

tddp_status check_peer(void *context, int rank)
{
    Mesh &mesh = *static_cast<Mesh *>(context);
    return guarded([&] { mesh.check_peers(rank); });
}

tddp_status post(void *context, const tddp_op *op, void **request)
{
    NoBrokenPipe guard;
    Mesh &mesh = *static_cast<Mesh *>(context);
    return guarded_for(mesh, [&] { *request = tddp_gloo::post(mesh, *op); });
}

tddp_status finish(void *context, void *request, int *source)
{
    NoBrokenPipe guard;
    Mesh &mesh = *static_cast<Mesh *>(context);
    return guarded_for(mesh,
                       [&] { *source = tddp_gloo::finish(mesh, static_cast<Request *>(request)); });
}

tddp_status probe(void *context, void *request, int *source)
{
    NoBrokenPipe guard;
    Mesh &mesh = *static_cast<Mesh *>(context);
    return guarded_for(mesh,
                       [&] { *source = tddp_gloo::probe(mesh, *static_cast<Request *>(request)); });
}

void drop(void *request)
{
    (void)guarded([&] { tddp_gloo::drop(static_cast<Request *>(request)); });
}

const tddp_backend_v1 backend = {
    TDDP_BACKEND_ABI,
    sizeof(tddp_backend_v1),
    "gloo",
    1u << TDDP_CPU,
    create,
    abort_mesh,
    destroy,
    post,
    finish,
    TDDP_BACKEND_SHARES_HOSTS | TDDP_BACKEND_RESUMES,
    nullptr, // it has no memory of its own
    nullptr,
    report_failure,
    0, // and no device
    nullptr,
    nullptr,
    nullptr,
    nullptr, // groups are made without others
    0,       // nothing is copied first
    nullptr,
    nullptr,
    nullptr, // requests are waited for, each by a thread
    resumes,
    nullptr,
    check_peer,
    probe,
    drop,
    TDDP_OP_COUNT,
    {run<tddp_gloo::all_reduce>, run<tddp_gloo::broadcast>, run<tddp_gloo::barrier>,
     run<tddp_gloo::move_parts>, run<tddp_gloo::reduce_scatter>, run<tddp_gloo::reduce>,
     run<tddp_gloo::move_parts>, run<tddp_gloo::move_parts>, run<tddp_gloo::move_parts>, nullptr,
     nullptr},
};

} // namespace

extern "C" TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? &backend : nullptr;
}
