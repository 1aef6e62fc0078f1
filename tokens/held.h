// SPDX-License-Identifier: Apache-2.0
// held.h - a pointer that keeps its object alive, whichever thread lets go last.
//
// For memory that threads which are no workers read while the control thread may end what it
// belongs to: a binding's buffer and a rx socket's rings, which Receive streams read. An
// object is found through a Held only, and only who holds it can pass it on; so no get meets
// the last put, and a put needs no RCU section (see rcuref.h). It is the last put that frees,
// on its own thread: workers, which must not wait for the kernel, hold nothing this way.
//
// Thread-safety: a Held as a plain pointer; different ones of one object from any thread.
// Allocates: never.   Blocks: where the object is freed.
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "tokens/rcuref.h"

namespace rxtoken {

// What can be held.
class Holdable {
 public:
  virtual ~Holdable() = default;
  Holdable(const Holdable&) = delete;
  Holdable& operator=(const Holdable&) = delete;

 protected:
  Holdable() = default;

 private:
  template <typename T>
  friend class Held;
  mutable Rcuref references_;  // whoever reads the object may hold it
};

template <typename T>
class Held {
 public:
  Held() = default;
  explicit Held(std::unique_ptr<T> object) noexcept : object_(object.release()) {}
  Held(const Held& other) noexcept : object_(other.object_) { Get(); }
  template <std::derived_from<T> U>
  Held(const Held<U>& other) noexcept : object_(other.get()) {  // NOLINT: as pointers convert
    Get();
  }
  Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Held& operator=(Held other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Held() {
    if (object_ != nullptr && References().Put()) delete object_;
  }

  T* get() const noexcept { return object_; }
  T* operator->() const noexcept { return object_; }
  T& operator*() const noexcept { return *object_; }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  Rcuref& References() const noexcept { return static_cast<const Holdable*>(object_)->references_; }
  // Cannot fail: somebody holds it while we do this.
  void Get() const noexcept {
    if (object_ != nullptr) static_cast<void>(References().TryGet());
  }

  T* object_ = nullptr;
};

}  // namespace rxtoken
