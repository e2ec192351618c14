/*
 * The module's face: the backend table, and the line no exception crosses. Slots run on the group's
 * threads; abort on any.
 */
#include <exception>
#include <new>

#include <tddp/backend.h>

#include "collectives.h"
#include "failure.h"
#include "mesh.h"

namespace
{

using tddp_gloo::Failure;
using tddp_gloo::Mesh;

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

/* The watch looks at waits only while an operation runs. */
class Running
{
  public:
    Running(Mesh &mesh, const tddp_op &op) : mesh_(mesh)
    {
        mesh_.begin(op.timeout_ms);
    }
    ~Running()
    {
        mesh_.end();
    }
    Running(const Running &) = delete;
    Running &operator=(const Running &) = delete;

  private:
    Mesh &mesh_;
};

template <void (*Collective)(Mesh &, const tddp_op &)>
tddp_status run(void *context, const tddp_op *op)
{
    return guarded([&] {
        Mesh &mesh = *static_cast<Mesh *>(context);
        Running running(mesh, *op);
        Collective(mesh, *op);
    });
}

tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    return guarded([&] {
        auto mesh = std::make_unique<Mesh>(*opts);
        mesh->connect(*opts, wait);
        *context = mesh.release();
    });
}

void abort_mesh(void *context)
{
    (void)guarded([&] { static_cast<Mesh *>(context)->abort(); });
}

void destroy(void *context)
{
    (void)guarded([&] { delete static_cast<Mesh *>(context); });
}

const tddp_backend_v1 backend = {
    TDDP_BACKEND_ABI,
    sizeof(tddp_backend_v1),
    "gloo",
    1u << TDDP_CPU,
    create,
    abort_mesh,
    destroy,
    nullptr,
    nullptr,
    TDDP_OP_COUNT,
    {run<tddp_gloo::all_reduce>, run<tddp_gloo::broadcast>, run<tddp_gloo::barrier>,
     run<tddp_gloo::all_gather>, run<tddp_gloo::reduce_scatter>, run<tddp_gloo::reduce>,
     run<tddp_gloo::gather>, run<tddp_gloo::scatter>, run<tddp_gloo::all_to_all>, nullptr, nullptr},
};

} // namespace

extern "C" TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? &backend : nullptr;
}
