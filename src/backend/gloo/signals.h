/* Scopes that control signals on this thread and on threads it starts. */
#ifndef TDDP_GLOO_SIGNALS_H
#define TDDP_GLOO_SIGNALS_H

#include <signal.h>
#include <time.h>

#include <atomic>
#include <cerrno>

namespace tddp_gloo
{

/* Threads started in this scope inherit the mask: the host language's handlers never run there,
 * and a write to a closed connection does not end the process. */
class SignalsBlocked
{
  public:
    SignalsBlocked()
    {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked()
    {
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    SignalsBlocked(const SignalsBlocked &) = delete;
    SignalsBlocked &operator=(const SignalsBlocked &) = delete;

  private:
    sigset_t before_;
};

/* For callers' threads: Gloo may write to a closed connection. Blocks SIGPIPE, which would end
 * the process, and removes a pending one at the end, if a connection has ended meanwhile. */
class NoBrokenPipe
{
  public:
    explicit NoBrokenPipe(const std::atomic<unsigned> &ended) : ended_(ended), seen_(ended)
    {
        sigemptyset(&pipe_);
        sigaddset(&pipe_, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    }
    ~NoBrokenPipe()
    {
        const timespec at_once = {};
        const bool consumes = ended_ != seen_ && !sigismember(&before_, SIGPIPE);
        while (consumes && sigtimedwait(&pipe_, nullptr, &at_once) == -1 && errno == EINTR) {
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    NoBrokenPipe(const NoBrokenPipe &) = delete;
    NoBrokenPipe &operator=(const NoBrokenPipe &) = delete;

  private:
    const std::atomic<unsigned> &ended_;
    const unsigned seen_;
    sigset_t pipe_;
    sigset_t before_;
};

} // namespace tddp_gloo

#endif
