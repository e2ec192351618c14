/* Guards for what signals do to this thread and to those it starts. */
#ifndef TDDP_GLOO_SIGNALS_H
#define TDDP_GLOO_SIGNALS_H

#include <signal.h>
#include <time.h>

#include <cerrno>

namespace tddp_gloo
{

/* Threads that are started meanwhile inherit it: the host language's handlers never run there, and
 * a write to a closed connection does not end the process. */
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

/* For threads of the caller's: Gloo may write to a closed connection, and the signal for that,
 * which would end the process, is taken away. */
class NoBrokenPipe
{
  public:
    NoBrokenPipe()
    {
        sigemptyset(&pipe_);
        sigaddset(&pipe_, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    }
    ~NoBrokenPipe()
    {
        if (sigismember(&before_, SIGPIPE)) {
            return;
        }
        const timespec at_once = {};
        while (sigtimedwait(&pipe_, nullptr, &at_once) == -1 && errno == EINTR) {
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    NoBrokenPipe(const NoBrokenPipe &) = delete;
    NoBrokenPipe &operator=(const NoBrokenPipe &) = delete;

  private:
    sigset_t pipe_;
    sigset_t before_;
};

} // namespace tddp_gloo

#endif
