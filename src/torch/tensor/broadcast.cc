// A coalesced broadcast of many tensors: they are copied to flat buffers of bytes, so dtypes,
// strides and sizes don't matter, broadcast, and copied back. After a wait that ended early the
// next call continues, on any thread. Since padding can hide different shapes, the ranks also
// compare a description. The copies back bypass autograd's version counters, so that graphs that
// saved one of the tensors stay valid.
#include <chrono>
#include <cstdio>
#include <string>

#include <tddp/call.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "torch/tensor/broadcast.h"

namespace tddp_torch
{

namespace
{

constexpr size_t alignment = 16; // of the largest dtype

// The deadline of a call that waits for several operations.
class Deadline
{
  public:
    explicit Deadline(const tddp_wait *wait)
    {
        if (wait) {
            wait_ = *wait;
        }
    }
    tddp_wait remaining() const
    {
        using namespace std::chrono;
        tddp_wait wait = wait_;
        if (wait_.timeout_ms >= 0) {
            const auto elapsed = duration_cast<milliseconds>(steady_clock::now() - start_).count();
            wait.timeout_ms = elapsed < wait_.timeout_ms ? wait_.timeout_ms - elapsed : 0;
        }
        return wait;
    }

  private:
    tddp_wait wait_ = TDDP_WAIT_INIT;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

size_t padded_bytes(const at::Tensor &tensor)
{
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    return (bytes + alignment - 1) & ~(alignment - 1);
}

// Views of `flat` in the shapes of the tensors [first, last).
std::vector<at::Tensor> views_of(const at::Tensor &flat, const std::vector<at::Tensor> &tensors,
                                 size_t first, size_t last)
{
    std::vector<at::Tensor> views;
    char *at = static_cast<char *>(flat.data_ptr());
    for (size_t i = first; i < last; i++) {
        views.push_back(tensor_over(at, tensors[i].sizes(), tensors[i].options()));
        at += padded_bytes(tensors[i]);
    }
    return views;
}

// The description that ranks compare: the text of the first tensors, and a hash of all. Models with
// buffers make one before every forward, so it is kept cheap.
class Description
{
  public:
    explicit Description(size_t tensors)
    {
        text_.reserve(max_bytes);
        text_ = std::to_string(tensors) + (tensors == 1 ? " tensor: " : " tensors: ");
        first_ = text_.size();
    }
    void add(const at::Tensor &tensor)
    {
        mix(static_cast<int64_t>(tensor.scalar_type()));
        mix(tensor.dim());
        for (const int64_t size : tensor.sizes()) {
            mix(size);
        }
        if (!truncated_) {
            append(tensor);
        }
    }
    // The hash stands for what is truncated.
    std::string text() const
    {
        char remaining[32] = "";
        if (truncated_) {
            (void)std::snprintf(remaining, sizeof remaining, ", ... %016llx",
                                static_cast<unsigned long long>(hash_));
        }
        return text_ + remaining;
    }

  private:
    static constexpr size_t max_bytes = 230; // with the hash less than TDDP_DESCRIPTION_BYTES

    void mix(int64_t number)
    {
        hash_ = tddp_digest(hash_, &number, sizeof number);
    }
    void append(const at::Tensor &tensor)
    {
        const size_t before = text_.size();
        text_ += before > first_ ? ", " : "";
        text_ += name_of(tensor);
        text_ += " [";
        for (int64_t i = 0; i < tensor.dim(); i++) {
            text_ += i > 0 ? ", " : "";
            text_ += std::to_string(tensor.size(i));
        }
        text_ += "]";
        if (text_.size() > max_bytes) {
            text_.resize(before);
            truncated_ = true;
        }
    }
    // Tensors are broadcast as bytes, so also with dtypes that other collectives don't support.
    static const char *name_of(const at::Tensor &tensor)
    {
        try {
            return tddp_dtype_name(dtype_of(tensor));
        } catch (const Failure &) {
            return c10::toString(tensor.scalar_type());
        }
    }

    std::string text_;
    size_t first_ = 0;
    uint64_t hash_ = TDDP_DIGEST_START;
    bool truncated_ = false;
};

} // namespace

Broadcast::Broadcast(tddp_group *group, const std::vector<at::Tensor> &tensors, int root,
                     size_t limit)
    : group_(tddp_group_retain(group)), tensors_(tensors), root_(root), limit_(limit)
{
}

Broadcast::~Broadcast()
{
    operation_.reset();
    tddp_group_release_async(group_);
}

// Sets `last_` to the end of the chunk that begins at `first_`. Returns the chunk's bytes.
size_t Broadcast::choose_chunk()
{
    size_t bytes = 0;
    last_ = first_;
    do {
        bytes += padded_bytes(tensors_[last_++]);
    } while (last_ < tensors_.size() && same_device(tensors_[last_], tensors_[first_]) &&
             bytes + padded_bytes(tensors_[last_]) <= limit_);
    return bytes;
}

void Broadcast::start_chunk(size_t bytes, tddp_cancel *cancel)
{
    const at::Tensor flat =
        at::zeros({static_cast<int64_t>(bytes)}, tensors_[first_].options().dtype(at::kByte));
    views_ = views_of(flat, tensors_, first_, last_);
    for (size_t i = first_; tddp_group_rank(group_) == root_ && i < last_; i++) {
        views_[i - first_].copy_(tensors_[i]);
    }
    Description description(last_ - first_);
    for (size_t i = first_; i < last_; i++) {
        description.add(tensors_[i]);
    }
    const std::string text = description.text();
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_BROADCAST;
    args.root = root_;
    args.description = text.c_str();
    args.cancel = cancel; // on a device it waits for ranks that still connect
    check(tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&flat), &args.output));
    tddp_work *work = nullptr;
    check(tddp_submit(group_, &args, &work));
    operation_ = std::make_unique<Operation>(work, std::vector<at::Tensor>{flat});
}

void Broadcast::end_chunk()
{
    for (size_t i = first_; tddp_group_rank(group_) != root_ && i < last_; i++) {
        tensors_[i].variable_data().copy_(views_[i - first_]);
    }
    views_.clear();
    operation_.reset();
    first_ = last_;
}

void Broadcast::run(const tddp_wait *wait)
{
    if (tddp_group_world_size(group_) == 1) {
        return;
    }
    const at::NoGradGuard no_grad;
    const Deadline deadline(wait);
    while (first_ < tensors_.size()) {
        if (!operation_) {
            const size_t bytes = choose_chunk();
            if (bytes == 0) {
                first_ = last_;
                continue;
            }
            start_chunk(bytes, wait ? wait->cancel : nullptr);
        }
        const tddp_wait remaining = deadline.remaining();
        operation_->wait(nullptr, &remaining);
        end_chunk();
    }
}

void broadcast_tensors(tddp_group *group, const std::vector<at::Tensor> &tensors, int root,
                       size_t limit, const tddp_wait *wait)
{
    Broadcast(group, tensors, root, limit).run(wait);
}

} // namespace tddp_torch
