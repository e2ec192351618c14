/*
 * The exception of this module: a text with a status. It is thrown where an error is detected, and
 * caught in the transport's table.
 */
#ifndef TDDP_GLOO_FAILURE_H
#define TDDP_GLOO_FAILURE_H

#include <stdexcept>
#include <string>

#include <tddp/status.h>

namespace tddp_gloo
{

class Failure : public std::runtime_error
{
  public:
    Failure(tddp_status status, const std::string &text) : std::runtime_error(text), status_(status)
    {
    }

    tddp_status status() const
    {
        return status_;
    }

    /* Throws the error that a call into libtddp has set on this thread, unless it succeeded. */
    static void check(tddp_status status)
    {
        if (status != TDDP_OK) {
            throw Failure(status, tddp_error_message());
        }
    }

  private:
    tddp_status status_;
};

} // namespace tddp_gloo

#endif
