// Memory that comes and goes under a tensor, recognized by its deleter. Any thread; stateless.
#include "torch/tensor/transient.h"

namespace tddp_torch
{

static void owned_by_others(void *) {}

at::DataPtr transient_memory(void *data, TransientOwner *owner, c10::Device device)
{
    return {data, owner, owned_by_others, device};
}

bool is_transient(const at::Tensor &tensor)
{
    return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &owned_by_others;
}

TransientOwner *transient_owner(const at::Tensor &tensor)
{
    return is_transient(tensor)
               ? static_cast<TransientOwner *>(tensor.storage().data_ptr().get_context())
               : nullptr;
}

} // namespace tddp_torch
