// Small collectives whose result is needed at once: queued, waited for on the thread that calls, in
// the host language's way where it has one. The memory of an operation that nobody waits for any
// more lives until the operation is done.
#include "torch/agree.h"

#include "torch/device.h"

namespace tddp_torch
{

namespace
{

using Held = std::vector<at::Tensor>;

void delete_held(void *held)
{
    delete static_cast<Held *>(held);
}

// An operation, and what waits for it: on a device the stream of who called.
struct Awaited {
    tddp_work *work;
    bool on_device;
    void *stream;

    tddp_status wait(const tddp_wait *wait) const
    {
        return on_device ? tddp_work_order(work, stream, wait) : tddp_work_wait(work, wait);
    }
};

tddp_status wait_for_work(void *awaited, tddp_cancel *cancel)
{
    const tddp_wait wait = {-1, cancel};
    return static_cast<const Awaited *>(awaited)->wait(&wait);
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
    Awaited awaited{work, false, nullptr};
    std::unique_ptr<Held> held;
    try {
        awaited.on_device = !lies_on_cpu(tensors.at(0));
        awaited.stream = current_stream(tensors.at(0));
        held = std::make_unique<Held>(std::move(tensors));
    } catch (...) {
        (void)!tddp_work_wait(work, nullptr);
        tddp_work_release(work);
        throw;
    }
    tddp_status status = through ? through(wait_for_work, &awaited) : awaited.wait(wait);
    const bool done = tddp_work_completed(work);
    if (done) {
        status = tddp_work_status(work);
    }
    // Made before what follows can change the text.
    std::unique_ptr<Failure> failure(status == TDDP_OK ? nullptr : new Failure(status));
    if (!done) {
        // It is under way on a device, or the wait ended first. Memory that is lost is better than
        // memory that is written after it was freed.
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
