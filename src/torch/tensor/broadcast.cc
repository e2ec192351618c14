// Many tensors from one rank to all, in few operations: they are copied into one flat piece of
// bytes, so that dtypes, strides and sizes do not matter, sent, and copied out. A wait that ended
// early is taken up again where it was, on any thread. As padding hides what differs in shape, the
// ranks compare that beside the bytes. Copies go to tensors that share memory but neither history
// nor version with the originals: a graph that saved one of them is not disturbed.
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

// The time that is left of a wait for several operations.
class Patience
{
  public:
    explicit Patience(const tddp_wait *wait)
    {
        if (wait) {
            whole_ = *wait;
        }
    }
    tddp_wait rest() const
    {
        using namespace std::chrono;
        tddp_wait wait = whole_;
        if (whole_.timeout_ms >= 0) {
            const auto gone = duration_cast<milliseconds>(steady_clock::now() - start_).count();
            wait.timeout_ms = gone < whole_.timeout_ms ? whole_.timeout_ms - gone : 0;
        }
        return wait;
    }

  private:
    tddp_wait whole_ = TDDP_WAIT_INIT;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

size_t padded_bytes(const at::Tensor &tensor)
{
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    return (bytes + alignment - 1) & ~(alignment - 1);
}

// `flat` shared out in the shapes of the tensors from `first` to before `last`.
std::vector<at::Tensor> pieces_of(const at::Tensor &flat, const std::vector<at::Tensor> &tensors,
                                  size_t first, size_t last)
{
    std::vector<at::Tensor> pieces;
    char *at = static_cast<char *>(flat.data_ptr());
    for (size_t i = first; i < last; i++) {
        pieces.push_back(tensor_over(at, tensors[i].sizes(), tensors[i].options()));
        at += padded_bytes(tensors[i]);
    }
    return pieces;
}

// Once before every forward pass over models with buffers: no more than is needed to tell the
// ranks' tensors apart, and the text of the first ones.
class Description
{
  public:
    explicit Description(size_t tensors)
    {
        text_.reserve(most);
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
        if (!cut_) {
            show(tensor);
        }
    }
    // What was cut off is compared by its hash.
    std::string text() const
    {
        char rest[32] = "";
        if (cut_) {
            (void)std::snprintf(rest, sizeof rest, ", ... %016llx",
                                static_cast<unsigned long long>(hash_));
        }
        return text_ + rest;
    }

  private:
    static constexpr size_t most = 230; // with the rest less than TDDP_DESCRIPTION_BYTES

    void mix(int64_t number)
    {
        hash_ = tddp_digest(hash_, &number, sizeof number);
    }
    void show(const at::Tensor &tensor)
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
        if (text_.size() > most) {
            text_.resize(before);
            cut_ = true;
        }
    }
    // Some dtypes are broadcast, as bytes, that no other operation takes.
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
    bool cut_ = false;
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

// How many bytes of the tensors from `first_` on go together; `last_` is behind the last of them.
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

void Broadcast::start_chunk(size_t bytes)
{
    const at::Tensor flat =
        at::zeros({static_cast<int64_t>(bytes)}, tensors_[first_].options().dtype(at::kByte));
    pieces_ = pieces_of(flat, tensors_, first_, last_);
    for (size_t i = first_; tddp_group_rank(group_) == root_ && i < last_; i++) {
        pieces_[i - first_].copy_(tensors_[i]);
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
    check(tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&flat), &args.output));
    tddp_work *work = nullptr;
    check(tddp_submit(group_, &args, &work));
    operation_ = std::make_unique<Operation>(work, std::vector<at::Tensor>{flat});
}

void Broadcast::end_chunk()
{
    for (size_t i = first_; tddp_group_rank(group_) != root_ && i < last_; i++) {
        tensors_[i].variable_data().copy_(pieces_[i - first_]);
    }
    pieces_.clear();
    operation_.reset();
    first_ = last_;
}

void Broadcast::run(const tddp_wait *wait)
{
    if (tddp_group_world_size(group_) == 1) {
        return;
    }
    const at::NoGradGuard no_grad;
    const Patience patience(wait);
    while (first_ < tensors_.size()) {
        if (!operation_) {
            const size_t bytes = choose_chunk();
            if (bytes == 0) {
                first_ = last_;
                continue;
            }
            start_chunk(bytes);
        }
        const tddp_wait rest = patience.rest();
        operation_->wait(nullptr, &rest);
        end_chunk();
    }
}

void broadcast_tensors(tddp_group *group, const std::vector<at::Tensor> &tensors, int root,
                       size_t limit, const tddp_wait *wait)
{
    Broadcast(group, tensors, root, limit).run(wait);
}

} // namespace tddp_torch
