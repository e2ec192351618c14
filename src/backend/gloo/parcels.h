/* Memory for the messages that travel whole, kept for the next ones. */
#ifndef TDDP_GLOO_PARCELS_H
#define TDDP_GLOO_PARCELS_H

#include <memory>
#include <mutex>
#include <vector>

#include <gloo/transport/unbound_buffer.h>

namespace tddp_gloo
{

/* Header and payload of one message. */
struct Parcel {
    std::unique_ptr<char[]> memory;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

/* Those that are idle. Any thread. What is never touched of a parcel costs no memory. */
class Parcels
{
  public:
    /* An empty one if there is none. */
    Parcel take()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.empty()) {
            return {};
        }
        Parcel parcel = std::move(idle_.back());
        idle_.pop_back();
        return parcel;
    }

    /* Nothing may be under way with it. */
    void give_back(Parcel parcel)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.size() < KEPT) {
            idle_.push_back(std::move(parcel));
        }
    }

    void clear()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        idle_.clear();
    }

  private:
    static constexpr size_t KEPT = 64;

    std::mutex mutex_;
    std::vector<Parcel> idle_;
};

} // namespace tddp_gloo

#endif
