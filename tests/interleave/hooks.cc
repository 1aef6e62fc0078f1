// SPDX-License-Identifier: Apache-2.0
// hooks.cc - what instrumented code calls at each access, and a few functions that matter to
// a scenario beside: memory, mutexes, copies. Where no scenario runs, they do what is asked.
//
// The names and signatures are those that g++ and clang emit calls to for -fsanitize=thread.
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/interleave/engine.h"

// Declared by no header, since only compilers use them.
#pragma GCC diagnostic ignored "-Wmissing-declarations"
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wbuiltin-declaration-mismatch"

namespace rxtoken::interleave {
namespace {

std::uintptr_t Address(const volatile void* p) { return reinterpret_cast<std::uintptr_t>(p); }

void Plain(const void* p, std::size_t bytes, bool write) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr || s->IsPrivate(Address(p))) return;
  const Scheduler::Inside inside;
  s->memory().Plain(s->current(), Address(p), bytes, write);
}

template <typename T>
T Load(const volatile T* p, int order) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return __atomic_load_n(p, __ATOMIC_SEQ_CST);
  const Scheduler::Inside inside;
  s->Step("load", Address(p));
  return static_cast<T>(s->memory().Load(s->current(), Address(p), sizeof(T), order));
}

template <typename T>
void Store(volatile T* p, T value, int order) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
  const Scheduler::Inside inside;
  s->Step("store", Address(p));
  s->memory().Store(s->current(), Address(p), sizeof(T), value, order);
}

template <typename T, typename F>
T Modify(volatile T* p, int order, F f) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) {
    const T old = *p;  // setup and finally: there is one thread
    *p = f(old);
    return old;
  }
  const Scheduler::Inside inside;
  s->Step("modify", Address(p));
  return static_cast<T>(
      s->memory().Modify(s->current(), Address(p), sizeof(T), order,
                         [&](std::uint64_t old) { return std::uint64_t{f(static_cast<T>(old))}; }));
}

template <typename T>
bool CompareExchange(volatile T* p, T* expected, T desired, int success, int failure, bool weak) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) {
    return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
  }
  const Scheduler::Inside inside;
  s->Step("compare-exchange", Address(p));
  const bool equal = *p == *expected && !(weak && s->Choose(2) == 1);
  if (equal) {
    s->memory().Modify(s->current(), Address(p), sizeof(T), success,
                       [&](std::uint64_t) { return std::uint64_t{desired}; });
  } else {
    *expected = static_cast<T>(s->memory().Newest(s->current(), Address(p), sizeof(T), failure));
  }
  return equal;
}

void Fence(int order) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return;
  const Scheduler::Inside inside;
  s->Step("fence", 0);
  s->memory().Fence(s->current(), order);
}

}  // namespace
}  // namespace rxtoken::interleave

namespace interleave = rxtoken::interleave;
using interleave::Scheduler;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define RXTOKEN_PLAIN(bytes)                                                         \
  void __tsan_read##bytes(void* p) { interleave::Plain(p, bytes, false); }           \
  void __tsan_write##bytes(void* p) { interleave::Plain(p, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* p) { interleave::Plain(p, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* p) { interleave::Plain(p, bytes, true); }
RXTOKEN_PLAIN(1)
RXTOKEN_PLAIN(2)
RXTOKEN_PLAIN(4)
RXTOKEN_PLAIN(8)
RXTOKEN_PLAIN(16)
void __tsan_read_range(void* p, std::size_t bytes) { interleave::Plain(p, bytes, false); }
void __tsan_write_range(void* p, std::size_t bytes) { interleave::Plain(p, bytes, true); }
void __tsan_vptr_read(void** p) { interleave::Plain(p, sizeof *p, false); }
void __tsan_vptr_update(void** p, void*) { interleave::Plain(p, sizeof *p, true); }

#define RXTOKEN_MODIFY(bits, name, expression)                                         \
  std::uint##bits##_t __tsan_atomic##bits##_##name(volatile std::uint##bits##_t* p,    \
                                                   std::uint##bits##_t v, int order) { \
    return interleave::Modify(p, order, [v](std::uint##bits##_t old) {                 \
      return static_cast<std::uint##bits##_t>(expression);                             \
    });                                                                                \
  }
#define RXTOKEN_ATOMIC(bits)                                                                       \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* p,            \
                                                 int order) {                                      \
    return interleave::Load(p, order);                                                             \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* p, std::uint##bits##_t v,         \
                                   int order) {                                                    \
    interleave::Store(p, v, order);                                                                \
  }                                                                                                \
  RXTOKEN_MODIFY(bits, exchange, (void(old), v))                                                   \
  RXTOKEN_MODIFY(bits, fetch_add, old + v)                                                         \
  RXTOKEN_MODIFY(bits, fetch_sub, old - v)                                                         \
  RXTOKEN_MODIFY(bits, fetch_and, old& v)                                                          \
  RXTOKEN_MODIFY(bits, fetch_or, old | v)                                                          \
  RXTOKEN_MODIFY(bits, fetch_xor, old ^ v)                                                         \
  int __tsan_atomic##bits##_compare_exchange_strong(                                               \
      volatile std::uint##bits##_t* p, std::uint##bits##_t* expected, std::uint##bits##_t desired, \
      int success, int failure) {                                                                  \
    return interleave::CompareExchange(p, expected, desired, success, failure, false);             \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(                                                 \
      volatile std::uint##bits##_t* p, std::uint##bits##_t* expected, std::uint##bits##_t desired, \
      int success, int failure) {                                                                  \
    return interleave::CompareExchange(p, expected, desired, success, failure, true);              \
  }
RXTOKEN_ATOMIC(8)
RXTOKEN_ATOMIC(16)
RXTOKEN_ATOMIC(32)
RXTOKEN_ATOMIC(64)
void __tsan_atomic_thread_fence(int order) { interleave::Fence(order); }
void __tsan_atomic_signal_fence(int) {}

// ---- linked with --wrap -----------------------------------------------------------------------

void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  interleave::Plain(from, bytes, false);
  interleave::Plain(to, bytes, true);
  return __real_memcpy(to, from, bytes);
}

int __real_munmap(void* memory, std::size_t bytes);
int __wrap_munmap(void* memory, std::size_t bytes) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return __real_munmap(memory, bytes);
  const Scheduler::Inside inside;
  s->FreeLater(memory, bytes, [](void* m, std::size_t n) { __real_munmap(m, n); });
  return 0;
}

int __real_pthread_mutex_trylock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return __real_pthread_mutex_trylock(mutex);
  const Scheduler::Inside inside;
  s->Step("try lock", interleave::Address(mutex));
  const int result = __real_pthread_mutex_trylock(mutex);
  if (result == 0) s->memory().Enter(s->current(), interleave::Address(mutex));
  return result;
}

int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (Scheduler::Active() == nullptr) return __real_pthread_mutex_lock(mutex);
  while (__wrap_pthread_mutex_trylock(mutex) == EBUSY) interleave::Yield();
  return 0;
}

int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr) return __real_pthread_mutex_unlock(mutex);
  const Scheduler::Inside inside;
  s->memory().Leave(s->current(), interleave::Address(mutex));
  return __real_pthread_mutex_unlock(mutex);
}

}  // extern "C"

void operator delete(void* memory) noexcept {
  Scheduler* const s = Scheduler::Active();
  if (s == nullptr || memory == nullptr) return std::free(memory);
  const Scheduler::Inside inside;
  s->FreeLater(memory, malloc_usable_size(memory), [](void* m, std::size_t) { std::free(m); });
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  operator delete(memory);
}
