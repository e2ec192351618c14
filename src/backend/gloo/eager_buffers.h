/* A pool of eager buffers, for messages sent with their header. */
#ifndef TDDP_GLOO_EAGER_BUFFERS_H
#define TDDP_GLOO_EAGER_BUFFERS_H

#include <memory>
#include <mutex>
#include <vector>

#include <gloo/transport/unbound_buffer.h>

namespace tddp_gloo
{

/* A header and payload of one message. */
struct EagerBuffer {
    std::unique_ptr<char[]> memory;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

/* The idle buffers. Any thread. Pages of a buffer that were never touched use no memory. */
class EagerBuffers
{
  public:
    /* Returns an empty one if none is idle. */
    EagerBuffer take()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.empty()) {
            return {};
        }
        EagerBuffer buffer = std::move(idle_.back());
        idle_.pop_back();
        return buffer;
    }

    /* No transfer may use the buffer. */
    void give_back(EagerBuffer buffer)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.size() < MAX_IDLE) {
            idle_.push_back(std::move(buffer));
        }
    }

    void clear()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        idle_.clear();
    }

  private:
    static constexpr size_t MAX_IDLE = 64;

    std::mutex mutex_;
    std::vector<EagerBuffer> idle_;
};

} // namespace tddp_gloo

#endif
