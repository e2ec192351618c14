// The internal interface of the libtorch shim: exceptions inside, statuses outside, tensors and
// dtypes. Public part: <tddp/torch.h>.
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

// Keeps a failure's status, by its text: see tddp_failure_status().
void remember_failure(tddp_status status, const char *text) noexcept;

// A status as an exception. If it ends backward, autograd shows its text.
struct Failure : std::runtime_error {
    explicit Failure(tddp_status failed) : std::runtime_error(tddp_error_message()), status(failed)
    {
        remember_failure(status, what());
    }
    tddp_status status;
};

inline void check(tddp_status status)
{
    if (status != TDDP_OK) {
        throw Failure(status);
    }
}

// Runs `body` and converts an exception to a status and its text.
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

// The collectives' dtype of a tensor; throws TDDP_UNSUPPORTED. Its device: device.h.
tddp_dtype dtype_of(const at::Tensor &tensor);
at::ScalarType scalar_type_of(tddp_dtype dtype);
// Also for tensors on devices that collectives don't support.
bool is_on_cpu(const at::Tensor &tensor);
bool same_device(const at::Tensor &one, const at::Tensor &other);
// A tensor over memory on the options' device; it owns `kept`. The device is given explicitly,
// because libtorch can't determine it for an empty tensor at the end of an allocation.
at::Tensor tensor_over(void *data, at::IntArrayRef sizes, const at::TensorOptions &options,
                       std::shared_ptr<void> kept = nullptr);

} // namespace tddp_torch

#endif
