/* Divides buffers into parts for ranks, and parts into chunks. */
#ifndef TDDP_GLOO_PARTITION_H
#define TDDP_GLOO_PARTITION_H

#include <algorithm>
#include <cstring>

#include "mesh.h"

namespace tddp_gloo
{

/* Small enough to combine one chunk while the next arrives, large enough not to be dominated by
 * per-message cost. Two ranks over loopback, all_reduce of 1 to 8 MiB: chunks of 128 KiB and 256
 * KiB cost a fifth more, 1 MiB and 2 MiB cost the same. */
constexpr size_t CHUNK_BYTES = 512 * 1024;

/* The purpose of a transfer. Between two ranks transfers of one phase are ordered. */
enum Phase : unsigned { TO_OWNER = 0, FROM_OWNER = 1, DIRECT = 2 };

inline size_t bytes_of(const tddp_buffer &buffer)
{
    return tddp_buffer_bytes(&buffer);
}

inline void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to && from && to != from) {
        memcpy(to, from, bytes);
    }
}

template <typename Visit> void each_peer(const Mesh &mesh, Visit visit)
{
    for (int peer = 0; peer < mesh.size; peer++) {
        if (peer != mesh.rank) {
            visit(peer);
        }
    }
}

template <typename Visit> void each_chunk(size_t bytes, Visit visit)
{
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        visit(at, std::min(CHUNK_BYTES, bytes - at));
    }
}

/* Equal parts of `count` elements; all start on a cache line if the buffer does. */
class Partition
{
  public:
    Partition(size_t count, int owners, size_t element) : count_(count), element_(element)
    {
        size_t even = (count + static_cast<size_t>(owners) - 1) / static_cast<size_t>(owners);
        size_t line = 64 / element;
        each_ = (even + line - 1) / line * line;
    }
    size_t offset(int owner) const
    {
        return std::min(count_, each_ * static_cast<size_t>(owner)) * element_;
    }
    size_t bytes(int owner) const
    {
        return offset(owner + 1) - offset(owner);
    }

  private:
    size_t count_;
    size_t element_;
    size_t each_;
};

} // namespace tddp_gloo

#endif
