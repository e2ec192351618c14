/*
 * DeepSpeed's all_reduce in shared memory as a partner of the collectives benchmark, compiled from
 * a checkout of theirs: csrc/cpu/comm/shm.cpp, sums only.
 *
 * What that file needs of PyTorch are a tensor's address and type: the stand-ins below do, and
 * empty headers take the place of PyTorch's.
 */
#include <cassert>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "measure.h"

namespace c10
{
enum class ScalarType { BFloat16, Half, Float };
}

namespace at
{
using Half = _Float16;

struct BFloat16 {
    uint16_t bits;
    BFloat16 &operator=(float value)
    {
        uint32_t whole;
        std::memcpy(&whole, &value, sizeof whole);
        bits = static_cast<uint16_t>((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
        return *this;
    }
    operator float() const
    {
        uint32_t whole = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &whole, sizeof value);
        return value;
    }
};
} // namespace at

namespace torch
{
struct Tensor {
    void *data;
    c10::ScalarType type;
    void *data_ptr() const
    {
        return data;
    }
    c10::ScalarType scalar_type() const
    {
        return type;
    }
};
} // namespace torch

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wshadow"
#include "shm.cpp"
#pragma GCC diagnostic pop

static const char *obstacle(const bench_call *call)
{
    bool known = call->dtype == BENCH_FLOAT32 || call->dtype == BENCH_BFLOAT16 ||
                 call->dtype == BENCH_FLOAT16;
    return call->operation == BENCH_ALL_REDUCE && known
               ? nullptr
               : "all_reduce of float32, float16 and bfloat16 only";
}

static char segment[128];

static void run(const bench_call *call)
{
    if (segment[0]) { /* all ranks have met since they began, and have each other's */
        shm_unlink(segment);
        segment[0] = '\0';
    }
    c10::ScalarType type = call->dtype == BENCH_FLOAT32    ? c10::ScalarType::Float
                           : call->dtype == BENCH_BFLOAT16 ? c10::ScalarType::BFloat16
                                                           : c10::ScalarType::Half;
    torch::Tensor tensor{call->input, type};
    all_reduce_outer_loop(tensor, call->count, static_cast<int>(call->count * call->element));
}

int main()
{
    int rank = bench_environment("RANK");
    int ranks = bench_environment("WORLD_SIZE");
    const char *unique = getenv("BENCH_NAME"); /* the driver removes what bears it */
    if (!unique || !__builtin_cpu_supports("avx512bw")) {
        bench_fail("expected BENCH_NAME from the driver, and a processor with AVX-512");
    }
    alarm(static_cast<unsigned>(bench_environment("BENCH_LIMIT")));
    char address[] = "bench";
    char name[64];
    snprintf(name, sizeof name, "%s", unique);
    shm_initialize(ranks, rank, address, name);
    snprintf(segment, sizeof segment, "%s_%d_%s_%s_%d", SHM_BUFFER_NAME, static_cast<int>(getuid()),
             address, name, rank);
    alarm(0);
    bench_partner partner = {};
    partner.version = "csrc/cpu/comm/shm.cpp";
    partner.rank = rank;
    partner.ranks = ranks;
    partner.obstacle = obstacle;
    partner.allocate = bench_allocate_plain;
    partner.release = bench_release_plain;
    partner.run = run;
    return bench_serve(&partner);
}
