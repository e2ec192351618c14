// The kernels of fused optimizer steps and gradient norms: float32 and float64 natively, float16
// and bfloat16 in float32. Pure functions of their memory, any thread. Each loop is compiled twice,
// for the baseline and for AVX2; both give the same bits, since neither fuses multiplication and
// addition, so that ranks on different machines compute the same. fused_optim.cc and grad_norm.cc
// decide which tensors these kernels process.
#include <cmath>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "torch/optim/fused_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define TDDP_WIDE __attribute__((target("avx2")))
#else
#define TDDP_WIDE
#endif
#define TDDP_INLINE inline __attribute__((always_inline))

namespace tddp_torch
{

namespace
{

bool wide()
{
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
#else
    return false;
#endif
}

// The type of intermediate results.
template <typename T> struct Computed {
    using type = float;
};
template <> struct Computed<double> {
    using type = double;
};

template <typename T, bool momentum> struct Sgd {
    static TDDP_INLINE void run(const FusedTask &task, int64_t begin, int64_t end)
    {
        if (!momentum || task.first) {
            task.nesterov ? loop<true, true>(task, begin, end)
                          : loop<true, false>(task, begin, end);
        } else {
            task.nesterov ? loop<false, true>(task, begin, end)
                          : loop<false, false>(task, begin, end);
        }
    }
    template <bool first, bool nesterov>
    static TDDP_INLINE void loop(const FusedTask &task, int64_t begin, int64_t end)
    {
        using A = typename Computed<T>::type;
        T *__restrict param = static_cast<T *>(task.param);
        const T *__restrict grad = static_cast<const T *>(task.grad);
        T *__restrict buffer = static_cast<T *>(task.state[0]);
        const A lr = static_cast<A>(task.lr), decay = static_cast<A>(task.decay);
        const A share = static_cast<A>(task.momentum), undamped = static_cast<A>(task.undamped);
        const bool decays = task.decay != 0;
        for (int64_t i = begin; i < end; i++) {
            const A old = static_cast<A>(param[i]);
            A change = static_cast<A>(grad[i]);
            change = decays ? change + decay * old : change;
            if (momentum) {
                A kept = change;
                if (!first) {
                    kept = static_cast<A>(buffer[i]) * share + undamped * change;
                }
                buffer[i] = static_cast<T>(kept);
                change = nesterov ? change + share * kept : kept;
            }
            param[i] = static_cast<T>(old - lr * change);
        }
    }
};

template <typename T, bool amsgrad> struct Adam {
    static TDDP_INLINE void run(const FusedTask &task, int64_t begin, int64_t end)
    {
        using A = typename Computed<T>::type;
        T *__restrict param = static_cast<T *>(task.param);
        const T *__restrict grad = static_cast<const T *>(task.grad);
        T *__restrict average = static_cast<T *>(task.state[0]);
        T *__restrict square = static_cast<T *>(task.state[1]);
        T *__restrict largest = static_cast<T *>(task.state[2]);
        const A lr = static_cast<A>(task.lr), decay = static_cast<A>(task.decay);
        const A beta1 = static_cast<A>(task.beta1), fresh1 = static_cast<A>(1 - task.beta1);
        const A beta2 = static_cast<A>(task.beta2), fresh2 = static_cast<A>(1 - task.beta2);
        const A root = static_cast<A>(task.root), eps = static_cast<A>(task.eps);
        const A shrink = static_cast<A>(task.shrink);
        const bool decays = task.decay != 0;
        for (int64_t i = begin; i < end; i++) {
            const A old = static_cast<A>(param[i]) * shrink;
            A change = static_cast<A>(grad[i]);
            change = decays ? change + decay * old : change;
            const A first = static_cast<A>(average[i]) * beta1 + fresh1 * change;
            const A second = static_cast<A>(square[i]) * beta2 + fresh2 * change * change;
            average[i] = static_cast<T>(first);
            square[i] = static_cast<T>(second);
            A top = second;
            if (amsgrad) {
                const A before = static_cast<A>(largest[i]);
                top = before >= second ? before : second;
                largest[i] = static_cast<T>(top);
            }
            param[i] = static_cast<T>(old - lr * (first / (std::sqrt(top) / root + eps)));
        }
    }
};

// Independent accumulators, so that the loop doesn't wait for the latency of one sum.
template <typename T, NormKind kind> struct Norm {
    static TDDP_INLINE double merge(double sum, double value, double order)
    {
        switch (kind) {
        case NormKind::largest:
            return value > sum || value != value ? value : sum;
        case NormKind::absolutes:
            return sum + value;
        case NormKind::squares:
            return sum + value * value;
        default:
            return sum + std::pow(value, order);
        }
    }
    static TDDP_INLINE double run(const void *data, int64_t count, double order)
    {
        using A = typename Computed<T>::type;
        constexpr int64_t lanes = 8;
        const T *values = static_cast<const T *>(data);
        double sums[lanes] = {};
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) {
            for (int64_t lane = 0; lane < lanes; lane++) {
                const double value = std::fabs(static_cast<A>(values[i + lane]));
                sums[lane] = merge(sums[lane], value, order);
            }
        }
        for (; i < count; i++) {
            sums[0] = merge(sums[0], std::fabs(static_cast<A>(values[i])), order);
        }
        for (int64_t lane = 1; lane < lanes; lane++) {
            sums[0] = kind == NormKind::largest ? merge(sums[0], sums[lane], order)
                                                : sums[0] + sums[lane];
        }
        return sums[0];
    }
};

template <typename T> struct Scale {
    static TDDP_INLINE void run(void *data, int64_t count, double factor)
    {
        using A = typename Computed<T>::type;
        T *values = static_cast<T *>(data);
        const A by = static_cast<A>(factor);
        for (int64_t i = 0; i < count; i++) {
            values[i] = static_cast<T>(static_cast<A>(values[i]) * by);
        }
    }
};

template <typename T> struct Unscale {
    static TDDP_INLINE bool run(void *data, int64_t count, double factor)
    {
        using A = typename Computed<T>::type;
        constexpr int64_t lanes = 16;
        T *values = static_cast<T *>(data);
        const A by = static_cast<A>(factor);
        A zeros[lanes] = {}; // 0 * x is NaN for an infinite x, and stays so
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) {
            for (int64_t lane = 0; lane < lanes; lane++) {
                const A value = static_cast<A>(values[i + lane]);
                zeros[lane] += value * 0;
                values[i + lane] = static_cast<T>(value * by);
            }
        }
        for (; i < count; i++) {
            const A value = static_cast<A>(values[i]);
            zeros[0] += value * 0;
            values[i] = static_cast<T>(value * by);
        }
        A sum = 0;
        for (const A zero : zeros) {
            sum += zero;
        }
        return sum == 0;
    }
};

// A loop compiled for the baseline and for AVX2.
template <typename Loop, typename Result, typename... Arguments> struct Compiled {
    static Result anywhere(Arguments... arguments)
    {
        return Loop::run(arguments...);
    }
    static TDDP_WIDE Result widely(Arguments... arguments)
    {
        return Loop::run(arguments...);
    }
    static auto choose()
    {
        return wide() ? widely : anywhere;
    }
};

template <typename Loop> using Step = Compiled<Loop, void, const FusedTask &, int64_t, int64_t>;
template <typename Loop> using Sum = Compiled<Loop, double, const void *, int64_t, double>;
template <typename Loop> using Change = Compiled<Loop, void, void *, int64_t, double>;
template <typename Loop> using Check = Compiled<Loop, bool, void *, int64_t, double>;

template <typename T> FusedLoop sgd_of(bool momentum)
{
    return momentum ? Step<Sgd<T, true>>::choose() : Step<Sgd<T, false>>::choose();
}

template <typename T> FusedLoop adam_of(bool amsgrad)
{
    return amsgrad ? Step<Adam<T, true>>::choose() : Step<Adam<T, false>>::choose();
}

template <typename T> NormLoop norm_of(NormKind kind)
{
    switch (kind) {
    case NormKind::largest:
        return Sum<Norm<T, NormKind::largest>>::choose();
    case NormKind::absolutes:
        return Sum<Norm<T, NormKind::absolutes>>::choose();
    case NormKind::squares:
        return Sum<Norm<T, NormKind::squares>>::choose();
    default:
        return Sum<Norm<T, NormKind::powers>>::choose();
    }
}

template <typename T> ScaleLoop scale_of()
{
    return Change<Scale<T>>::choose();
}

template <typename T> UnscaleLoop unscale_of()
{
    return Check<Unscale<T>>::choose();
}

} // namespace

#define TDDP_BY_TYPE(function, ...)                  \
    switch (type) {                                  \
    case c10::ScalarType::Float:                     \
        return function<float>(__VA_ARGS__);         \
    case c10::ScalarType::Double:                    \
        return function<double>(__VA_ARGS__);        \
    case c10::ScalarType::Half:                      \
        return function<c10::Half>(__VA_ARGS__);     \
    case c10::ScalarType::BFloat16:                  \
        return function<c10::BFloat16>(__VA_ARGS__); \
    default:                                         \
        return nullptr;                              \
    }

FusedLoop sgd_loop(c10::ScalarType type, bool momentum){TDDP_BY_TYPE(sgd_of, momentum)}

FusedLoop adam_loop(c10::ScalarType type, bool amsgrad){TDDP_BY_TYPE(adam_of, amsgrad)}

NormLoop norm_loop(c10::ScalarType type, NormKind kind){TDDP_BY_TYPE(norm_of, kind)}

ScaleLoop scale_loop(c10::ScalarType type){TDDP_BY_TYPE(scale_of)}

UnscaleLoop unscale_loop(c10::ScalarType type)
{
    TDDP_BY_TYPE(unscale_of)
}

} // namespace tddp_torch
