// A unit as tensors: see unit.h.
#include "torch/fsdp/unit.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include "torch/fsdp/hooks.h"

namespace tddp_torch
{

namespace
{

std::shared_ptr<void> owned(tddp_flat_memory *memory)
{
    return {memory,
            [](void *held) { tddp_flat_memory_release(static_cast<tddp_flat_memory *>(held)); }};
}

at::Tensor leaf(const at::Tensor &tensor, bool requires_grad)
{
    return tensor.set_requires_grad(requires_grad);
}

} // namespace

Unit::Unit(tddp_sharder *sharder, size_t number, const tddp_fsdp_unit_opts &opts,
           std::shared_ptr<HostCopies> copies)
    : shard_group(opts.shard_group), replica_group(opts.replica_group), number_(number),
      copies_(std::move(copies)), pin_memory_(opts.pin_memory != 0)
{
    const at::NoGradGuard no_grad;
    size_t count = 0;
    const tddp_flat_slice *slices = tddp_sharder_slices(sharder, number, &count);
    size_t offset = 0;
    tddp_flat_memory *memory = nullptr;
    shard_ = tddp_sharder_shard(sharder, number, &offset, &memory);
    shard_memory_ = owned(memory);
    shard_offset_ = static_cast<int64_t>(offset);
    const at::Tensor &first = tensor_of(opts.params[0].handle);
    options_ = first.options().requires_grad(false);
    piece_options_ = options_;
    if (copies_) {
        host_shard_ = copies_->host_memory(static_cast<int64_t>(shard_.count), first.scalar_type(),
                                           pin_memory_);
        shard_.data = host_shard_.zero_().data_ptr();
        shard_memory_ = std::make_shared<at::Tensor>(host_shard_);
        piece_options_ = options_.device(at::kCPU);
    }
    gather_type_ = opts.gather_dtype < 0
                       ? first.scalar_type()
                       : scalar_type_of(static_cast<tddp_dtype>(opts.gather_dtype));
    reduce_type_ = opts.reduce_dtype < 0
                       ? gather_type_
                       : scalar_type_of(static_cast<tddp_dtype>(opts.reduce_dtype));
    ranks_ = shard_group ? static_cast<size_t>(tddp_group_world_size(shard_group)) : 1;
    full_bytes_ = ranks_ * shard_.count * c10::elementSize(gather_type_);
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), full_bytes_,
                            transient_memory(nullptr, this, first.device()), nullptr, false);
    params.resize(count);
    for (size_t i = 0; i < count; i++) {
        ShardedParam &param = params[i];
        param.handle = reinterpret_cast<at::Tensor *>(opts.params[i].handle);
        param.name = opts.params[i].name;
        param.offset = static_cast<int64_t>(slices[i].offset);
        const at::Tensor full = *param.handle;
        param.sizes = full.sizes().vec();
        make_piece(full, param);
        make_full(full, param);
    }
    storage_.unsafeGetStorageImpl()->set_nbytes(0);
    for (ShardedParam &param : params) {
        *param.handle = param.piece;
    }
}

// Tensors of the host's may outlive it, at no address.
Unit::~Unit()
{
    c10::StorageImpl *storage = storage_.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(transient_memory(nullptr, nullptr, options_.device()));
    storage->set_nbytes(0);
}

void Unit::join(std::weak_ptr<ShardedModel> model, size_t number)
{
    model_ = std::move(model);
    number_ = number;
}

// The intersection of the parameter's slice with the shard, filled with its values.
void Unit::make_piece(const at::Tensor &full, ShardedParam &param) const
{
    const int64_t shard_end = shard_offset_ + static_cast<int64_t>(shard_.count);
    const int64_t first = std::max(param.offset, shard_offset_);
    const int64_t last = std::min(param.offset + full.numel(), shard_end);
    const int64_t count = std::max<int64_t>(last - first, 0);
    param.start = count > 0 ? first - param.offset : 0;
    const int64_t at = count > 0 ? first - shard_offset_ : 0;
    const auto element = static_cast<int64_t>(c10::elementSize(full.scalar_type()));
    at::Tensor piece = tensor_over(static_cast<char *>(shard_.data) + at * element, {count},
                                   piece_options_, shard_memory_);
    if (count > 0) {
        piece.copy_(full.detach().reshape({-1}).narrow(0, param.start, count));
    }
    param.piece = leaf(piece, full.requires_grad());
}

void Unit::make_full(const at::Tensor &full, ShardedParam &param) const
{
    at::Tensor made = at::empty({0}, options_.dtype(gather_type_));
    made.set_(storage_, param.offset, full.sizes(), full.strides());
    param.full = leaf(made, full.requires_grad());
}

/* --- values ---------------------------------------------------------------------------------- */

// Neither the address of the tensors nor their version changes: what autograd saved sees the new
// memory.
void Unit::place(void *data)
{
    c10::StorageImpl *storage = storage_.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(transient_memory(data, this, options_.device()));
    storage->set_nbytes(data ? full_bytes_ : 0);
}

bool Unit::placed() const
{
    return storage_.unsafeGetStorageImpl()->nbytes() > 0;
}

// Where none of its forwards runs, it is gathered by hand.
std::shared_ptr<TransientUse> Unit::current_use()
{
    if (!running.empty()) {
        return running.back();
    }
    const std::shared_ptr<ShardedModel> model = model_.lock();
    return model ? std::make_shared<Forward>(model, number_, model->position(), model->position())
                 : nullptr;
}

void Unit::expose()
{
    for (ShardedParam &param : params) {
        *param.handle = param.full;
    }
}

void Unit::hide()
{
    for (ShardedParam &param : params) {
        *param.handle = param.piece;
    }
}

bool Unit::hidden() const
{
    return params[0].handle->is_same(params[0].piece);
}

at::Tensor Unit::shard() const
{
    const int64_t count = static_cast<int64_t>(shard_.count);
    return tensor_over(shard_.data, {count}, piece_options_, shard_memory_).to(options_.device());
}

void Unit::show(const at::Tensor &flat)
{
    const at::NoGradGuard no_grad;
    const auto count = static_cast<int64_t>(ranks_ * shard_.count);
    if (flat.numel() != count || !flat.is_contiguous() || flat.dtype() != options_.dtype()) {
        throw Failure(tddp_fail(
            TDDP_INVALID_ARGUMENT, "flat has %lld elements: expected %lld of the parameters' dtype",
            static_cast<long long>(flat.numel()), static_cast<long long>(count)));
    }
    for (ShardedParam &param : params) {
        at::Tensor part = at::empty({0}, options_);
        part.set_(flat.storage(), flat.storage_offset() + param.offset, param.sizes,
                  param.full.strides());
        *param.handle = leaf(part, param.piece.requires_grad());
    }
}

void Unit::keep_shown() const
{
    const at::NoGradGuard no_grad;
    for (const ShardedParam &param : params) {
        const int64_t count = param.piece.numel();
        if (count > 0) {
            at::Tensor piece = param.piece.detach();
            piece.copy_(param.handle->detach().reshape({-1}).narrow(0, param.start, count));
        }
    }
}

void Unit::cast_shard(void *into, size_t count) const
{
    const at::NoGradGuard no_grad;
    const std::vector<int64_t> sizes{static_cast<int64_t>(count)};
    at::Tensor target = tensor_over(into, sizes, options_.dtype(gather_type_));
    target.copy_(shard());
}

void *Unit::load_shard(void *into, size_t count) const
{
    const std::vector<int64_t> sizes{static_cast<int64_t>(count)};
    return copies_->to_device(tensor_over(into, sizes, options_.dtype(gather_type_)), host_shard_);
}

std::vector<size_t> Unit::follow_requires_grad()
{
    std::vector<size_t> changed;
    trained = 0;
    for (size_t i = 0; i < params.size(); i++) {
        ShardedParam &param = params[i];
        const bool requires_grad = param.piece.requires_grad();
        trained += requires_grad;
        if (param.full.requires_grad() != requires_grad) {
            param.full.set_requires_grad(requires_grad);
        }
        if (requires_grad && !param.accumulator) {
            changed.push_back(i);
        }
    }
    return changed;
}

/* --- gradients ------------------------------------------------------------------------------- */

at::Tensor Unit::flat_slice(void *data, const ShardedParam &param) const
{
    const auto element = static_cast<int64_t>(c10::elementSize(reduce_type_));
    return tensor_over(static_cast<char *>(data) + param.offset * element, param.sizes,
                       options_.dtype(reduce_type_));
}

void Unit::take_gradient(size_t index, void *data)
{
    const at::NoGradGuard no_grad;
    ShardedParam &param = params[index];
    at::Tensor &grad = param.full.mutable_grad();
    if (grad.requires_grad()) {
        throw Failure(
            tddp_fail(TDDP_UNSUPPORTED,
                      "the gradient of \"%s\" requires a gradient: sharded parameters have "
                      "no second derivatives, call backward without create_graph",
                      param.name.c_str()));
    }
    if (grad.layout() != at::kStrided) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "the gradient of \"%s\" is sparse: expected a dense one, as of an "
                                "Embedding without sparse: true",
                                param.name.c_str()));
    }
    at::Tensor slice = flat_slice(data, param);
    if (param.holds) {
        slice.add_(grad);
    } else {
        slice.copy_(grad);
    }
    param.holds = true;
    grad.reset();
}

void Unit::close_gradient(void *data)
{
    const at::NoGradGuard no_grad;
    for (ShardedParam &param : params) {
        if (!param.holds) {
            flat_slice(data, param).zero_();
        }
        param.used = param.used || param.holds;
        param.holds = false;
    }
}

void Unit::add_reduced(void *from, size_t count)
{
    const std::vector<int64_t> sizes{static_cast<int64_t>(count)};
    const at::Tensor reduced = tensor_over(from, sizes, options_.dtype(reduce_type_));
    if (!copies_) {
        add(reduced, true);
        return;
    }
    copied_.push_back(copies_->host_memory(
        static_cast<int64_t>(count), c10::typeMetaToScalarType(options_.dtype()), pin_memory_));
    copies_->to_cpu(copied_.back(), reduced);
}

void Unit::add_copied()
{
    for (const at::Tensor &reduced : copied_) {
        add(reduced, false);
    }
    copied_.clear();
}

// The gradients of all pieces are in one allocation, which lives as long as one of them does.
void Unit::add(const at::Tensor &reduced, bool copy)
{
    const at::NoGradGuard no_grad;
    at::Tensor fresh;
    for (ShardedParam &param : params) {
        if (!param.piece.requires_grad()) {
            continue;
        }
        const int64_t at = param.piece.numel() > 0 ? param.offset + param.start - shard_offset_ : 0;
        at::Tensor &grad = param.piece.mutable_grad();
        if (grad.defined()) {
            if (param.piece.numel() > 0) {
                grad.add_(reduced.narrow(0, at, param.piece.numel()));
            }
            continue;
        }
        if (!fresh.defined()) {
            fresh = reduced.to(options_.dtype(), false, copy);
        }
        param.made = true;
        at::Tensor view = at::empty({0}, piece_options_);
        view.set_(fresh.storage(), at, {param.piece.numel()}, {1});
        grad = view;
    }
}

void Unit::end_backward()
{
    for (ShardedParam &param : params) {
        if (param.made && !param.used) {
            param.piece.mutable_grad().reset();
        }
        param.made = false;
        param.used = false;
    }
    since = NEVER;
}

void Unit::reset()
{
    hide();
    copied_.clear();
    for (ShardedParam &param : params) {
        param.holds = false;
        param.full.mutable_grad().reset();
    }
    end_backward();
    forwards = 0;
    running.clear();
    in_backward = false;
    due = false;
}

} // namespace tddp_torch
