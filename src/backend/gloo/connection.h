/*
 * Gloo's connections, which tell what happens to them: they count neither calls nor time, and a
 * thread that waits is woken by an event instead of Gloo's own waits, whose timeout closes every
 * connection. Gloo's thread enters all of this, and threads that send, receive and close.
 *
 * Invariant: the observer is called with the connection's lock held, so it never calls Gloo. After
 * closed() no transfer of the connection completes, and Gloo does not use its memory.
 *
 * What is overridden is virtual in Gloo's versions from 2022 on; what differs between them is
 * reached through the templates' parameter.
 */
#ifndef TDDP_GLOO_CONNECTION_H
#define TDDP_GLOO_CONNECTION_H

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>

namespace tddp_gloo
{

namespace tcp = gloo::transport::tcp;

static_assert(sizeof(gloo::NonOwningPtr<int>) == sizeof(std::shared_ptr<int>) &&
                  sizeof(gloo::WeakNonOwningPtr<int>) == sizeof(std::weak_ptr<int>) &&
                  sizeof(gloo::ShareableNonOwningPtr<int>) == sizeof(std::shared_ptr<int>),
              "Gloo's memory.h, or ours in its place, has other pointers");

/* Gloo's text without the source location at its start. */
inline std::string strip_location(const std::exception &cause)
{
    const char *text = cause.what();
    const char *bracket = *text == '[' ? strstr(text, "] ") : nullptr;
    return bracket ? bracket + 2 : text;
}

/* Is told what happens to connections. */
class Observer
{
  public:
    virtual ~Observer() = default;
    virtual void connected(int peer, int fd) noexcept = 0;
    /* With Gloo's reason; null: this rank has closed it. Once. */
    virtual void closed(int peer, const std::exception_ptr &reason) noexcept = 0;
    /* Transfers may have completed, on Gloo's thread. */
    virtual void moved() noexcept = 0;
};

/* Base is Gloo's class of connections. */
template <typename Base> class Watched final : public Base
{
  public:
    template <typename... More>
    Watched(Observer &observer, tcp::Context *context, tcp::Device *device, int peer,
            std::chrono::milliseconds timeout, More... more)
        : Base(context, device, peer, timeout, more...), observer_(observer)
    {
        /* Gloo's thread, which the base has told of this, sees it complete. */
        std::lock_guard<std::mutex> lock(this->m_);
    }

    /* Whether the peer's system has acknowledged everything, or nothing more can be sent. */
    bool is_sent()
    {
        std::lock_guard<std::mutex> lock(this->m_);
        int left = 0;
        return this->state_ != Base::CONNECTED ||
               (this->tx_.empty() && (ioctl(this->fd_, SIOCOUTQ, &left) != 0 || left == 0));
    }

    void handleEvents(int events)
    {
        handle(*this, events, 0);
    }

  protected:
    /* connect() returns at once. */
    void waitUntilConnected(std::unique_lock<std::mutex> &, bool) override {}

    void changeState(typename Base::state next) noexcept override
    {
        const bool was_closed = this->state_ == Base::CLOSED;
        Base::changeState(next);
        if (next == Base::CONNECTED) {
            observer_.connected(this->rank_, this->fd_);
        } else if (next == Base::CLOSED && !was_closed) {
            observer_.closed(this->rank_, this->ex_);
        }
    }

    void handleReadWrite(int events) override
    {
        moved_ = false;
        try {
            Base::handleReadWrite(events);
        } catch (const std::exception &cause) {
            fail(cause);
        }
        if (moved_) {
            observer_.moved();
        }
    }

    /* Gloo would try again and again to move what has no memory any more. */
    bool read() override
    {
        const bool whole = Base::read();
        moved_ = moved_ || whole;
        if (!whole && is_canceled(this->rx_)) {
            this->signalException("a message for a receive that this rank has canceled");
        }
        return whole;
    }

    bool write(tcp::Op &op) override
    {
        const bool whole = Base::write(op);
        moved_ = moved_ || (whole && op.getOpcode() == tcp::Op::SEND_UNBOUND_BUFFER);
        if (!whole && is_canceled(op)) {
            this->signalException("a message that this rank has canceled");
        }
        return whole;
    }

  private:
    /* Versions until 2023, which connect here. An exception would end the process: a peer that is
     * closed at this moment raises one. The lock is held until what was thrown is handled, since a
     * thread that closes the connection holds it, and waits for this one; so it is only tried. */
    template <typename Self>
    static auto handle(Self &self, int events, int) -> decltype(self.handleListening(), void())
    {
        std::unique_lock<std::mutex> lock(self.m_, std::try_to_lock);
        if (!lock || self.state_ == Base::CLOSED) {
            return;
        }
        if (self.state_ == Base::CONNECTED) {
            self.handleReadWrite(events);
            return;
        }
        try {
            self.state_ == Base::LISTENING ? self.handleListening() : self.handleConnecting();
        } catch (const std::exception &cause) {
            if (self.fd_ >= 0) { /* Gloo's end of the connection expects that it is registered */
                self.device_->registerDescriptor(self.fd_, 0, &self);
            }
            self.fail(cause);
        }
    }
    template <typename Self> static void handle(Self &self, int events, long)
    {
        self.Base::handleEvents(events);
    }

    /* Whether the transfer of a message has been released. */
    bool is_canceled(const tcp::Op &op) const
    {
        return this->state_ == Base::CONNECTED &&
               op.preamble.opcode == tcp::Op::SEND_UNBOUND_BUFFER && op.ubuf &&
               !gloo::NonOwningPtr<tcp::UnboundBuffer>(op.ubuf);
    }

    void fail(const std::exception &cause)
    {
        if (!this->ex_ && this->state_ != Base::CLOSED) {
            this->signalException(strip_location(cause));
        }
    }

    Observer &observer_;
    bool moved_ = false; /* a whole message, since Gloo's thread has come to it */
};

using Connection = Watched<tcp::Pair>;

/* Makes such connections. */
class Context final : public tcp::Context
{
  public:
    Context(std::shared_ptr<tcp::Device> device, int its_rank, int its_size, Observer &observer)
        : tcp::Context(std::move(device), its_rank, its_size), observer_(observer)
    {
    }

    std::unique_ptr<gloo::transport::Pair> &createPair(int peer) override
    {
        return create<tcp::Pair>(peer);
    }

    /* Null: creating it has failed, or it is this rank's own. */
    Connection *connection(int peer)
    {
        return static_cast<Connection *>(pairs_[static_cast<size_t>(peer)].get());
    }

  private:
    template <typename Base> std::unique_ptr<gloo::transport::Pair> &create(int peer)
    {
        using Numbered = std::is_constructible<Base, tcp::Context *, tcp::Device *, int,
                                               std::chrono::milliseconds, bool>;
        std::unique_ptr<gloo::transport::Pair> &pair = pairs_[static_cast<size_t>(peer)];
        if constexpr (Numbered::value) { /* since 2024; false: it has the next number */
            pair.reset(
                new Watched<Base>(observer_, this, device_.get(), peer, getTimeout(), false));
        } else {
            pair.reset(new Watched<Base>(observer_, this, device_.get(), peer, getTimeout()));
        }
        return pair;
    }

    Observer &observer_;
};

/* A send or a receive. */
class Transfer final : public tcp::UnboundBuffer
{
  public:
    Transfer(const std::shared_ptr<tcp::Context> &context, void *data, size_t bytes, int its_peer,
             bool is_receive)
        : tcp::UnboundBuffer(context, data, bytes), peer(its_peer), receives(is_receive)
    {
    }

    const int peer; /* or TDDP_ANY_SOURCE */
    const bool receives;

    /* At once. `*source`: of a receive that is complete. What ends with its connection is never
     * complete: Gloo does not tell all such transfers. */
    bool is_complete(int *source)
    {
        std::lock_guard<std::mutex> lock(m_);
        *source = receives ? recvRank_ : peer;
        return (receives ? recvCompletions_ : sendCompletions_) > 0;
    }
};

} // namespace tddp_gloo

#endif
