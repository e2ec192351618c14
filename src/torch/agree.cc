// Small collectives whose result is needed at once: queued, waited for on the thread that calls, in
// the host language's way where it has one. The memory of an operation that nobody waits for any
// more lives until the operation is done.
#include "torch/agree.h"

namespace tddp_torch
{

namespace
{

using Held = std::vector<at::Tensor>;

void delete_held(void *held)
{
    delete static_cast<Held *>(held);
}

tddp_status wait_for_work(void *work, tddp_cancel *cancel)
{
    const tddp_wait wait = {-1, cancel};
    return tddp_work_wait(static_cast<tddp_work *>(work), &wait);
}

tddp_buffer buffer_of(const at::Tensor &tensor)
{
    tddp_buffer buffer{};
    check(tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&tensor), &buffer));
    return buffer;
}

} // namespace

void complete(tddp_work *work, std::vector<at::Tensor> tensors, tddp_wait_through through,
              const tddp_wait *wait)
{
    std::unique_ptr<Held> held;
    try {
        held = std::make_unique<Held>(std::move(tensors));
    } catch (...) {
        (void)!tddp_work_wait(work, nullptr);
        tddp_work_release(work);
        throw;
    }
    tddp_status status = through ? through(wait_for_work, work) : tddp_work_wait(work, wait);
    const bool done = tddp_work_completed(work);
    if (done) {
        status = tddp_work_status(work);
    }
    // Made before what follows can change the text.
    std::unique_ptr<Failure> failure(status == TDDP_OK ? nullptr : new Failure(status));
    if (!done) {
        // Memory that is lost is better than memory that is written after it was freed.
        (void)!tddp_work_on_done(work, delete_held, held.get());
        (void)held.release();
    }
    tddp_work_release(work);
    if (failure) {
        throw Failure(*failure);
    }
}

void combine_over_ranks(tddp_group *group, const at::Tensor &tensor, tddp_reduce_op op,
                        tddp_wait_through through, const tddp_wait *wait)
{
    tddp_work *work = nullptr;
    check(tddp_all_reduce(group, buffer_of(tensor), op, 1.0, &work));
    complete(work, {tensor}, through, wait);
}

void gather_over_ranks(tddp_group *group, const at::Tensor &tensor, const at::Tensor &gathered,
                       tddp_wait_through through, const tddp_wait *wait)
{
    tddp_work *work = nullptr;
    check(tddp_all_gather(group, buffer_of(tensor), buffer_of(gathered), &work));
    complete(work, {tensor, gathered}, through, wait);
}

} // namespace tddp_torch
