// Gradients of weights that are computed later: see <tddp/torch_linear.h>.
#include <tddp/torch_linear.h>

#include "torch/autograd/deferred.h"
#include "torch/tensor/shim.h"

struct tddp_weight_gradients {
    std::shared_ptr<tddp_torch::Deferred> deferred = std::make_shared<tddp_torch::Deferred>();
};

tddp_weight_gradients *tddp_weight_gradients_create(void)
{
    tddp_weight_gradients *made = nullptr;
    return tddp_torch::guard([&] { made = new tddp_weight_gradients; }) ? nullptr : made;
}

void tddp_weight_gradients_free(tddp_weight_gradients *gradients)
{
    delete gradients;
}

tddp_status tddp_weight_gradients_begin(tddp_weight_gradients *gradients)
{
    return tddp_torch::guard([&] { tddp_torch::Deferred::begin(gradients->deferred); });
}

tddp_status tddp_weight_gradients_end(tddp_weight_gradients *gradients)
{
    using namespace tddp_torch;
    return guard([&] {
        if (Deferred::current() != gradients->deferred.get()) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "the end of a part whose weights' gradients are computed "
                                    "later: another one began after it on this thread"));
        }
        Deferred::end();
    });
}

tddp_status tddp_weight_gradients_run(tddp_weight_gradients *gradients)
{
    return tddp_torch::guard([&] { gradients->deferred->run(); });
}
