// What all folders of the shim share: failures as C++ exceptions inside, as statuses outside.
// Public part of this room: <tddp/torch.h>.
#ifndef TDDP_TORCH_SHIM_H
#define TDDP_TORCH_SHIM_H

#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <tddp/torch.h>

namespace tddp_torch
{

// A status on its way through C++ code. Its text is also what autograd shows if it ends backward.
struct Failure : std::runtime_error {
    explicit Failure(tddp_status failed) : std::runtime_error(tddp_error_message()), status(failed)
    {
    }
    tddp_status status;
};

inline void check(tddp_status status)
{
    if (status != TDDP_OK) {
        throw Failure(status);
    }
}

// Runs `body` and turns whatever it throws into a status and its text.
template <typename Body> tddp_status guard(const Body &body) noexcept
{
    try {
        body();
        return TDDP_OK;
    } catch (const Failure &failure) {
        return tddp_fail(failure.status, "%s", failure.what());
    } catch (const c10::Error &error) {
        return tddp_fail(TDDP_INTERNAL, "libtorch: %s", error.what_without_backtrace());
    } catch (const std::bad_alloc &) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory in the libtorch shim");
    } catch (const std::exception &error) {
        return tddp_fail(TDDP_INTERNAL, "libtorch: %s", error.what());
    } catch (...) {
        return tddp_fail(TDDP_INTERNAL, "libtorch: an exception of unknown type");
    }
}

inline const at::Tensor &tensor_of(const tddp_tensor *tensor)
{
    return *reinterpret_cast<const at::Tensor *>(tensor);
}

// The collectives' name of a tensor's dtype; throws TDDP_UNSUPPORTED. Where it lies: device.h.
tddp_dtype dtype_of(const at::Tensor &tensor);
at::ScalarType scalar_type_of(tddp_dtype dtype);
// Of any tensor, also one that lies where collectives know nothing.
bool lies_on_cpu(const at::Tensor &tensor);
bool same_device(const at::Tensor &one, const at::Tensor &other);
// A tensor over memory on the options' device; `kept` lives as long as it. libtorch is not asked
// where the memory is, which it cannot tell of a piece without bytes at the end of another.
at::Tensor tensor_over(void *data, at::IntArrayRef sizes, const at::TensorOptions &options,
                       std::shared_ptr<void> kept = nullptr);

} // namespace tddp_torch

#endif
