// Small collectives whose result is needed at once: queued, waited for on the thread that calls, in
// the host language's way where it has one. The memory of an operation that nobody waits for any
// more lives until the operation is done.
#include "torch/tensor/agree.h"

#include "torch/tensor/device.h"

namespace tddp_torch
{

namespace
{

using Held = std::vector<at::Tensor>;

void delete_held(void *held)
{
    delete static_cast<Held *>(held);
}

tddp_buffer buffer_of(const at::Tensor &tensor)
{
    tddp_buffer buffer{};
    check(tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&tensor), &buffer));
    return buffer;
}

} // namespace

Operation::Operation(tddp_work *work, std::vector<at::Tensor> tensors)
    : work_(work), tensors_(std::move(tensors))
{
    try {
        on_device_ = !lies_on_cpu(tensors_.at(0));
        stream_ = current_stream(tensors_.at(0));
    } catch (...) {
        (void)!tddp_work_wait(work, nullptr);
        tddp_work_release(work);
        throw;
    }
}

Operation::~Operation()
{
    if (!tddp_work_completed(work_)) {
        // Memory that is lost is better than memory that is written after it was freed.
        auto *held = new (std::nothrow) Held;
        if (held) {
            held->swap(tensors_);
            (void)!tddp_work_on_done(work_, delete_held, held);
        } else {
            (void)!tddp_work_wait(work_, nullptr);
        }
    }
    tddp_work_release(work_);
}

void Operation::wait(tddp_blocking_region region, const tddp_wait *wait) const
{
    const auto body = [](void *data, const tddp_wait *here) {
        const auto &operation = *static_cast<const Operation *>(data);
        return operation.on_device_ ? tddp_work_order(operation.work_, operation.stream_, here)
                                    : tddp_work_wait(operation.work_, here);
    };
    auto *self = const_cast<Operation *>(this);
    const tddp_status status = region ? region(body, self) : body(self, wait);
    // It may have ended between the two looks: then its own outcome counts.
    check(tddp_work_completed(work_) ? tddp_work_status(work_) : status);
}

void complete(tddp_work *work, std::vector<at::Tensor> tensors, tddp_blocking_region region,
              const tddp_wait *wait)
{
    Operation(work, std::move(tensors)).wait(region, wait);
}

void combine_over_ranks(tddp_group *group, const at::Tensor &tensor, tddp_reduce_op op,
                        tddp_blocking_region region, const tddp_wait *wait)
{
    tddp_work *work = nullptr;
    check(tddp_all_reduce(group, buffer_of(tensor), op, 1.0, &work));
    complete(work, {tensor}, region, wait);
}

void gather_over_ranks(tddp_group *group, const at::Tensor &tensor, const at::Tensor &gathered,
                       tddp_blocking_region region, const tddp_wait *wait)
{
    tddp_work *work = nullptr;
    check(tddp_all_gather(group, buffer_of(tensor), buffer_of(gathered), &work));
    complete(work, {tensor, gathered}, region, wait);
}

} // namespace tddp_torch
