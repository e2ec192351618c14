// An allocator that counts: libtorch's own for the CPU, with the size of each block in front of it.
// Any thread. Once installed it stays, because blocks are freed through it.
//
//     | header: size, and how the block is freed | the tensor's bytes |
//     ^ from the allocator before                ^ what libtorch gets, as aligned
//
// The address that libtorch gets is the block's context as well, which raw_allocate() demands, and
// which shows libtorch that it may take the block for a plain one.
#include <cstring>
#include <mutex>

#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>

#include <tddp/torch_memory.h>

#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

struct Header {
    size_t bytes;
    void *context;
    c10::DeleterFnPtr free;
};

// The blocks of the allocator before are aligned to this, and so stay what is behind the header.
constexpr size_t HEADER_BYTES = c10::gAlignment < sizeof(Header) ? sizeof(Header) : c10::gAlignment;
static_assert(HEADER_BYTES % c10::gAlignment == 0, "blocks behind the header must stay aligned");

void free_counted(void *data)
{
    if (!data) {
        return;
    }
    const Header header = *reinterpret_cast<Header *>(static_cast<char *>(data) - HEADER_BYTES);
    tddp_memory_freed(header.bytes);
    header.free(header.context);
}

class CountingAllocator final : public c10::Allocator
{
  public:
    explicit CountingAllocator(c10::Allocator *before) : before_(before) {}

    // One of the two overrides: the function is const before libtorch 2.4.
    c10::DataPtr allocate(size_t bytes) const // NOLINT(modernize-use-override)
    {
        return allocate_counted(bytes);
    }
    c10::DataPtr allocate(size_t bytes) // NOLINT(modernize-use-override)
    {
        return allocate_counted(bytes);
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return free_counted;
    }
    // New in libtorch 2.2. NOLINTNEXTLINE(modernize-use-override)
    void copy_data(void *into, const void *from, size_t bytes) const
    {
        std::memcpy(into, from, bytes);
    }

  private:
    c10::DataPtr allocate_counted(size_t bytes) const
    {
        if (bytes == 0) {
            return {nullptr, nullptr, free_counted, c10::Device(c10::kCPU)};
        }
        if (bytes > SIZE_MAX - HEADER_BYTES) { // the allocator before has the words for it
            return before_->allocate(bytes);
        }
        c10::DataPtr block = before_->allocate(bytes + HEADER_BYTES);
        char *start = static_cast<char *>(block.get());
        const c10::DeleterFnPtr free = block.get_deleter();
        new (start) Header{bytes, block.release_context(), free};
        tddp_memory_allocated(bytes);
        return {start + HEADER_BYTES, start + HEADER_BYTES, free_counted, c10::Device(c10::kCPU)};
    }

    c10::Allocator *before_;
};

void install()
{
    static std::mutex mutex;
    static CountingAllocator *counting;
    const std::lock_guard<std::mutex> lock(mutex);
    if (counting) {
        return;
    }
    auto made = std::make_unique<CountingAllocator>(c10::GetCPUAllocator());
    c10::SetCPUAllocator(made.get());
    if (c10::GetCPUAllocator() != made.get()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED, "another library has installed an allocator for "
                                                  "the CPU's tensors that can't be replaced"));
    }
    counting = made.release();
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_track_tensors(void)
{
    return tddp_torch::guard([] { tddp_torch::install(); });
}
