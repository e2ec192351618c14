/*
 * How a fault travels inside this module: as one exception that knows its status. It is thrown
 * where the fault is found and caught at the slot, never beyond.
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

    /* Throws what a call into libtddp has left on this thread, unless it went well. */
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
