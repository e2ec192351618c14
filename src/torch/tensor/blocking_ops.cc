// Blocking collectives: the calling thread submits an operation and waits for it, in the host
// language's blocking region if there is one. If the wait ends early, the operation keeps its
// tensors until it completes.
#include "torch/tensor/blocking_ops.h"

#include "torch/tensor/device.h"

namespace tddp_torch
{

namespace
{

using Tensors = std::vector<at::Tensor>;

void delete_tensors(void *kept)
{
    delete static_cast<Tensors *>(kept);
}

} // namespace

tddp_buffer buffer_of(const at::Tensor &tensor)
{
    tddp_buffer buffer{};
    check(tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&tensor), &buffer));
    return buffer;
}

Operation::Operation(tddp_work *work, std::vector<at::Tensor> tensors)
    : work_(work), tensors_(std::move(tensors))
{
    try {
        on_device_ = !is_on_cpu(tensors_.at(0));
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
        // A leak is better than a write to freed memory.
        auto *kept = new (std::nothrow) Tensors;
        if (kept) {
            kept->swap(tensors_);
            (void)!tddp_work_on_done(work_, delete_tensors, kept);
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
    // The work may have completed after the wait failed: then its own status counts.
    check(tddp_work_completed(work_) ? tddp_work_status(work_) : status);
}

tddp_work *submit(tddp_group *group, const tddp_op_args &args, tddp_blocking_region region)
{
    struct Submission {
        tddp_group *group;
        tddp_op_args args;
        tddp_work *work;
    } call{group, args, nullptr};
    const auto body = [](void *data, const tddp_wait *wait) {
        auto &of = *static_cast<Submission *>(data);
        of.args.cancel = wait ? wait->cancel : nullptr;
        return tddp_submit(of.group, &of.args, &of.work);
    };
    const bool blocks = region && tddp_submit_blocks(group, &args);
    check(blocks ? region(body, &call) : body(&call, nullptr));
    return call.work;
}

void wait_for(tddp_work *work, std::vector<at::Tensor> tensors, tddp_blocking_region region,
              const tddp_wait *wait)
{
    Operation(work, std::move(tensors)).wait(region, wait);
}

void all_reduce_blocking(tddp_group *group, const at::Tensor &tensor, tddp_reduce_op op,
                         tddp_blocking_region region, const tddp_wait *wait)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.output = buffer_of(tensor);
    args.reduce = op;
    wait_for(submit(group, args, region), {tensor}, region, wait);
}

void all_gather_blocking(tddp_group *group, const at::Tensor &tensor, const at::Tensor &gathered,
                         tddp_blocking_region region, const tddp_wait *wait)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_ALL_GATHER;
    args.input = buffer_of(tensor);
    args.output = buffer_of(gathered);
    wait_for(submit(group, args, region), {tensor, gathered}, region, wait);
}

} // namespace tddp_torch
