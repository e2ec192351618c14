// The state of libtorch's random number generator as bytes. Any thread, under the generator's lock.
// An invalid state leaves the generator unchanged.
#include <cstring>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <tddp/torch_rng.h>

#include "torch/tensor/shim.h"

static at::Tensor state_tensor(at::Generator &generator)
{
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
}

tddp_status tddp_rng_state(void *out, size_t room, size_t *size)
{
    using namespace tddp_torch;
    return guard([&] {
        at::Generator generator = at::detail::getDefaultCPUGenerator();
        const at::Tensor state = state_tensor(generator).contiguous();
        const auto bytes = static_cast<size_t>(state.nbytes());
        if (room > 0 && room < bytes) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "room for %zu bytes, but the generator's state has %zu", room,
                                    bytes));
        }
        if (room > 0) {
            std::memcpy(out, state.data_ptr(), bytes);
        }
        *size = bytes;
    });
}

tddp_status tddp_set_rng_state(const void *state, size_t size)
{
    using namespace tddp_torch;
    size_t expected = 0;
    const tddp_status status = tddp_rng_state(nullptr, 0, &expected);
    if (status != TDDP_OK) {
        return status;
    }
    if (size != expected) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "a state of %zu bytes, but this libtorch's generator has one of %zu: it "
                         "was saved by another version",
                         size, expected);
    }
    return guard([&] {
        at::Tensor bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
        std::memcpy(bytes.data_ptr(), state, size);
        at::Generator generator = at::detail::getDefaultCPUGenerator();
        try {
            const std::lock_guard<std::mutex> lock(generator.mutex());
            generator.set_state(bytes);
        } catch (const c10::Error &error) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "%zu bytes that are not a generator's state: %s", size,
                                    error.what_without_backtrace()));
        }
    });
}
