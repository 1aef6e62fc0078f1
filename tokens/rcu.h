// SPDX-License-Identifier: Apache-2.0
// rcu.h - read-copy-update between workers, which read, and the control thread.
//
// The only file that includes <urcu/...>. A worker registers, says Quiescent() between two
// poll rounds, and keeps no RCU pointer across it. The control thread exchanges a pointer,
// waits for readers, and frees the old object.
//
// liburcu 0.13 is invisible to the thread sanitizer, which then reports races in correct
// programs. The tag below tells it what a grace period orders, and compiles to nothing
// otherwise. One tag for all readers orders slightly more than RCU promises: the sanitizer
// can miss a race, but does not invent one.
#pragma once

#include <urcu/urcu-qsbr.h>

#include <atomic>

#ifdef RXTOKEN_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace rxtoken::rcu {

#ifdef RXTOKEN_TSAN
inline char grace_tag;  // its address only
inline void TagRelease() noexcept { __tsan_release(&grace_tag); }
inline void TagAcquire() noexcept { __tsan_acquire(&grace_tag); }
#else
inline void TagRelease() noexcept {}
inline void TagAcquire() noexcept {}
#endif

// Once in a reading thread, before its first read.
inline void RegisterReader() noexcept { urcu_qsbr_register_thread(); }
// The thread reads no more.
inline void UnregisterReader() noexcept {
  TagRelease();
  urcu_qsbr_unregister_thread();
}

// The calling reader holds no RCU pointer right now.
inline void Quiescent() noexcept {
  TagRelease();
  urcu_qsbr_quiescent_state();
}

// Blocks until every registered reader has been quiescent once since the call. Never from a
// reader, nor with a lock that one may take.
inline void WaitForReaders() noexcept {
  urcu_qsbr_synchronize_rcu();
  TagAcquire();
}

// A pointer that readers follow. std::atomic rather than the library's macros: the same
// instructions on x86, and the thread sanitizer understands them.
template <typename T>
class Pointer {
 public:
  // order: acquire pairs with the release in Exchange(): the object is complete.
  T* Read() const noexcept { return pointer_.load(std::memory_order_acquire); }
  T* Exchange(T* next) noexcept { return pointer_.exchange(next, std::memory_order_acq_rel); }

 private:
  std::atomic<T*> pointer_{nullptr};
};

}  // namespace rxtoken::rcu
