// Callbacks at the end of backward, also if a node of the graph runs a nested backward.
#ifndef TDDP_TORCH_END_OF_BACKWARD_H
#define TDDP_TORCH_END_OF_BACKWARD_H

#include <functional>
#include <vector>

namespace tddp_torch
{

// Runs `callback` at the end of this thread's outermost backward. Only within a backward.
void at_end_of_backward(std::function<void()> callback);

// While one exists, this thread runs a backward within a node of another one, and callbacks are
// collected for the end of the outer backward. An exception discards them.
class NestedBackward
{
  public:
    NestedBackward();
    ~NestedBackward();
    NestedBackward(const NestedBackward &) = delete;
    NestedBackward &operator=(const NestedBackward &) = delete;
    static bool running();
    // After the inner backward: passes the callbacks to the outer one.
    void close();

  private:
    friend void at_end_of_backward(std::function<void()> callback);

    NestedBackward *outer_;
    std::vector<std::function<void()>> callbacks_;
};

} // namespace tddp_torch

#endif
