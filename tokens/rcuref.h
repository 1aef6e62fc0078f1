// SPDX-License-Identifier: Apache-2.0
// rcuref.h - how many hold an object that readers find through RCU.
//
// A get adds one and a put subtracts one, whatever the count is, and both look afterwards at
// where it landed. A compare-exchange that first makes sure of a reference is lost time for
// each holder that comes at the same moment; an addition cannot fail. The word is the number
// of references minus one, so that all that needs care is negative, and the fast path of
// either function is one locked instruction and a jump on its sign flag:
//
//   0x00000000 .. 0x7FFFFFFF   1 .. 2^31 references
//   0x80000000 .. 0xBFFFFFFF   saturated: was 2^31 once, and is never freed
//   0xC0000000 .. 0xFFFFFFFE   dead: the last put was that, and no get succeeds any more
//   0xFFFFFFFF                 no reference, for as long as the last put needs to say so
//
// Who lands in one of the two zones in the middle puts the word back to the centre of it, so
// that 2^29 threads would have to be under way at once to leave it.
//
// Between its subtraction and its compare-exchange the last put holds nothing: a get may take
// the object back, and put, and free it. So a put belongs where nothing can free the object:
//
//   a worker         anywhere: a grace period lasts until its next rcu::Quiescent()
//   control          anywhere: it frees the objects itself, when it is not in a put
//   another thread   under a lock that is taken before the object is freed, since a grace
//                    period does not wait for a thread that is no registered reader
//
// The same holds for a get, which may find the object dead, but not freed.
//
// Thread-safety: all functions from any thread.   Blocks: never.   Allocates: never.
// Memory: 128 bytes, so that what is read on the path does not share the word's line.
#pragma once

#include <atomic>
#include <cstdint>

#include "tokens/abi/limits.h"

namespace rxtoken {

class alignas(kWriterAlignBytes) Rcuref {
 public:
  static constexpr std::uint32_t kMaxReferences = 1u << 31;

  // `references` is 1 .. kMaxReferences.
  explicit Rcuref(std::uint32_t references = 1) noexcept : word_(references - 1) {}
  Rcuref(const Rcuref&) = delete;
  Rcuref& operator=(const Rcuref&) = delete;

  // One reference more. False: the object is dead, and must not be used.
  [[nodiscard]] bool TryGet() noexcept {
    if (!AddOneIsNegative()) [[likely]]
      return true;
    return GetSlow();
  }

  // One reference less. True: it was the last, and the caller sees to it that the object is
  // freed after a grace period.
  [[nodiscard]] bool Put() noexcept {
    if (!SubtractOneIsNegative()) [[likely]]
      return false;
    return PutSlow();
  }

  // For statistics. A saturated object has kMaxReferences.
  std::uint32_t references() const noexcept {
    const std::uint32_t word = word_.load(std::memory_order_relaxed);
    return word < kSaturatedZone ? word + 1 : word < kDeadZone ? kMaxReferences : 0;
  }
  bool saturated() const noexcept {
    const std::uint32_t word = word_.load(std::memory_order_relaxed);
    return word >= kSaturatedZone && word < kDeadZone;
  }

 private:
  static constexpr std::uint32_t kSaturatedZone = 0x8000'0000;
  static constexpr std::uint32_t kSaturated = 0xA000'0000;
  static constexpr std::uint32_t kDeadZone = 0xC000'0000;
  static constexpr std::uint32_t kDead = 0xE000'0000;
  static constexpr std::uint32_t kNone = 0xFFFF'FFFF;

  // The word is unsigned and its sign looked at afterwards: with a signed one the compiler
  // may assume that it does not overflow, and wants the old value. Clang 14 wants it anyway,
  // which costs 2.4 ns a pair, unless it is told which flag to look at.
#if defined(__clang__) && defined(__x86_64__)
#if !__has_feature(thread_sanitizer)
#define RXTOKEN_RCUREF_FLAGS
#endif
#endif

  bool AddOneIsNegative() noexcept {
#ifdef RXTOKEN_RCUREF_FLAGS
    bool negative;
    asm volatile("lock addl $1, %0" : "+m"(word_), "=@ccs"(negative));
    return negative;
#else
    // order: relaxed: whoever finds the object has come by it in an ordered way.
    return static_cast<std::int32_t>(word_.fetch_add(1, std::memory_order_relaxed) + 1) < 0;
#endif
  }

  bool SubtractOneIsNegative() noexcept {
#ifdef RXTOKEN_RCUREF_FLAGS
    bool negative;
    asm volatile("lock subl $1, %0" : "+m"(word_), "=@ccs"(negative) : : "memory");
    return negative;
#else
    // order: release pairs with the acquire in PutSlow(): what this holder did to the object
    // comes before its end.
    return static_cast<std::int32_t>(word_.fetch_sub(1, std::memory_order_release) - 1) < 0;
#endif
  }
#undef RXTOKEN_RCUREF_FLAGS

  [[gnu::noinline, gnu::cold]] bool GetSlow() noexcept {
    const std::uint32_t word = word_.load(std::memory_order_relaxed);
    if (word < kSaturatedZone) return true;  // it was at the limit, and others have put since
    if (word < kDeadZone) {
      word_.store(kSaturated, std::memory_order_relaxed);
      return true;
    }
    word_.store(kDead, std::memory_order_relaxed);
    return false;
  }

  [[gnu::noinline, gnu::cold]] bool PutSlow() noexcept {
    std::uint32_t word = word_.load(std::memory_order_relaxed);
    if (word == kNone) {
      // order: acquire pairs with the release of every put before. If it fails, a get was
      // faster, and the object lives.
      return word_.compare_exchange_strong(word, kDead, std::memory_order_acquire,
                                           std::memory_order_relaxed);
    }
    // Another get took it back before we looked; or it is saturated; or somebody puts what
    // he never got, which must not bring the dead back.
    if (word >= kSaturatedZone) {
      word_.store(word < kDeadZone ? kSaturated : kDead, std::memory_order_relaxed);
    }
    return false;
  }

  std::atomic<std::uint32_t> word_;
};
static_assert(sizeof(Rcuref) == kWriterAlignBytes);

}  // namespace rxtoken
