/*
 * For distributions whose Gloo lacks this header, which its others include (Debian 12); an
 * installed one comes first. What Gloo's buffers and connections have of each other: three classes
 * of one standard pointer each, which Gloo's own code creates, copies and locks.
 *
 * Invariant: sizes, layout and template names are Gloo's; connection.h checks the sizes.
 */
#pragma once

#include <memory>
#include <thread>

namespace gloo
{

template <typename T> class WeakNonOwningPtr;
template <typename T> class ShareableNonOwningPtr;

/* In use: the object's end waits. */
template <typename T> class NonOwningPtr final
{
  public:
    NonOwningPtr() = default;
    explicit NonOwningPtr(const WeakNonOwningPtr<T> &from) : ptr_(from.ptr_.lock()) {}

    T *operator->() const noexcept
    {
        return ptr_.get();
    }
    explicit operator bool() const noexcept
    {
        return ptr_ != nullptr;
    }

  private:
    std::shared_ptr<T> ptr_;
};

/* To be used later, unless the object has ended by then. */
template <typename T> class WeakNonOwningPtr final
{
  public:
    WeakNonOwningPtr() = default;
    explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T> &from) : ptr_(from.ptr_) {}

    /* Whether it was ever set. */
    explicit operator bool() const noexcept
    {
        const std::weak_ptr<T> unset;
        return ptr_.owner_before(unset) || unset.owner_before(ptr_);
    }

  protected:
    std::weak_ptr<T> ptr_;

    friend class NonOwningPtr<T>;
};

/* A member of the object: its end waits for those that use the object. */
template <typename T> class ShareableNonOwningPtr final
{
  public:
    explicit ShareableNonOwningPtr(T *object) : ptr_(object, [](void *) {}) {}
    ShareableNonOwningPtr(const ShareableNonOwningPtr &) = delete;
    ShareableNonOwningPtr &operator=(const ShareableNonOwningPtr &) = delete;
    ~ShareableNonOwningPtr()
    {
        const std::weak_ptr<T> used(ptr_);
        ptr_.reset();
        while (!used.expired()) {
            std::this_thread::yield();
        }
    }

  protected:
    std::shared_ptr<T> ptr_;

    friend class WeakNonOwningPtr<T>;
};

} // namespace gloo
