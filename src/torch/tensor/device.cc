// libtorch's devices and streams. The only file that includes libtorch's CUDA headers, and only in
// a build against a libtorch with CUDA (TDDP_WITH_CUDA). Any thread; stateless.
#include "torch/tensor/device.h"

#include <cstdlib>
#include <cstring>

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef TDDP_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <tddp/cuda.h>
#include <tddp/torch_memory.h>

#include "torch/tensor/shim.h"

namespace tddp_torch
{

static bool cuda_stand_in()
{
    static const bool set = [] {
        const char *text = std::getenv("TDDP_STAND_IN_CUDA");
        return text != nullptr && std::strcmp(text, "1") == 0;
    }();
    return set;
}

void device_of(const at::Tensor &tensor, tddp_device_type *type, int32_t *index)
{
    const c10::Device device = tensor.device();
    if (device.is_cpu()) {
        *type = cuda_stand_in() ? TDDP_CUDA : TDDP_CPU;
        *index = 0;
    } else if (device.is_cuda()) {
        *type = TDDP_CUDA;
        *index = device.index();
    } else {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "tensor on device %s: collectives support cpu and cuda",
                                device.str().c_str()));
    }
}

void *current_stream(tddp_device_type type, int32_t index)
{
#ifdef TDDP_WITH_CUDA
    if (type == TDDP_CUDA && !cuda_stand_in()) {
        return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index)).stream();
    }
#else
    (void)type;
    (void)index;
#endif
    return nullptr;
}

void *current_stream(const at::Tensor &tensor)
{
    tddp_device_type type;
    int32_t index;
    device_of(tensor, &type, &index);
    return current_stream(type, index);
}

void *native_stream(const c10::Stream &stream)
{
#ifdef TDDP_WITH_CUDA
    if (stream.device_type() == c10::kCUDA) {
        return c10::cuda::CUDAStream(stream).stream();
    }
#else
    (void)stream;
#endif
    return nullptr;
}

c10::Device device_named(tddp_device_type type, int32_t index)
{
    return type == TDDP_CPU || cuda_stand_in()
               ? c10::Device(c10::kCPU)
               : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

std::vector<c10::Stream> current_streams(const std::vector<c10::Device> &devices)
{
    std::vector<c10::Stream> streams;
    for (const c10::Device &device : devices) {
        if (!device.is_cpu()) {
            streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
        }
    }
    return streams;
}

} // namespace tddp_torch

tddp_status tddp_torch_stream(tddp_device_type type, int32_t index, void **out)
{
    return tddp_torch::guard([&] { *out = tddp_torch::current_stream(type, index); });
}

tddp_status tddp_torch_set_device(int32_t index)
{
    return tddp_torch::guard([&] {
        c10::impl::VirtualGuardImpl(c10::kCUDA)
            .setDevice(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
    });
}

/* --- memory: <tddp/torch_memory.h> ----------------------------------------------------------- */

#ifdef TDDP_WITH_CUDA

namespace allocator = c10::cuda::CUDACachingAllocator;

/* --- memory of libtddp's own: <tddp/cuda.h> --------------------------------------------------- */

static tddp_status allocate_on_stream(size_t bytes, tddp_cuda_stream stream, void **data)
{
    const tddp_status status = tddp_torch::guard([&] {
        *data = allocator::raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream));
    });
    return status ? tddp_fail(TDDP_OUT_OF_MEMORY, "%zu bytes from libtorch's allocator: %s", bytes,
                              tddp_error_message())
                  : TDDP_OK;
}

static void release_to_stream(void *data)
{
    const tddp_status status = tddp_torch::guard([&] { allocator::raw_delete(data); });
    (void)status; /* memory that is not its own */
}

/* As the library is loaded. */
static const bool allocator_is_set = [] {
    static const tddp_cuda_allocator libtorchs = {allocate_on_stream, release_to_stream};
    tddp_cuda_set_allocator(&libtorchs);
    return true;
}();

tddp_status tddp_device_memory_stats(int32_t device, tddp_memory_stats *out)
{
    return tddp_torch::guard([&] {
        const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
        const auto &bytes = stats.allocated_bytes[0]; // of all pools
        *out = {static_cast<uint64_t>(bytes.current), static_cast<uint64_t>(bytes.peak),
                static_cast<uint64_t>(stats.allocation[0].allocated)};
    });
}

tddp_status tddp_device_memory_reset_peak(int32_t device)
{
    return tddp_torch::guard(
        [&] { allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
}

tddp_status tddp_device_memory_empty_cache(void)
{
    return tddp_torch::guard([] { allocator::emptyCache(); });
}

#else

tddp_status tddp_device_memory_stats(int32_t device, tddp_memory_stats *out)
{
    (void)out;
    return tddp_fail(TDDP_UNSUPPORTED, "memory of GPU %d: this libtorch has no CUDA", (int)device);
}

tddp_status tddp_device_memory_reset_peak(int32_t device)
{
    return tddp_fail(TDDP_UNSUPPORTED, "memory of GPU %d: this libtorch has no CUDA", (int)device);
}

tddp_status tddp_device_memory_empty_cache(void)
{
    return TDDP_OK;
}

#endif
