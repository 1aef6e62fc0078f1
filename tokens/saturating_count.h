// SPDX-License-Identifier: Apache-2.0
// saturating_count.h - a shared count of holders that somebody else can push without bound.
//
// It adds and subtracts whatever the count is, and looks at the old value afterwards; a
// compare-exchange that keeps it in bounds costs half as much again. What must not happen
// (one too many, one more of none, one less of none) sets it to the middle of the negative
// numbers, where it stays for all that 2^29 threads can do to it at once. What it counts for
// is then never freed: a leak, where a count that wraps would free something in use.
//
// For counts that several threads change. Where one thread writes a count and others only
// read it, a plain step that stops at the limit does the same without a locked instruction:
// so does the count of a page (page_table.h). A count that also decides whether an object
// which readers find by RCU is alive is a Rcuref.
//
// Thread-safety: all functions from any thread.   Blocks: never.   Allocates: never.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace rxtoken {

class SaturatingCount {
 public:
  static constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();

  // `count` is 0 .. kMax.
  explicit SaturatingCount(std::int32_t count = 1) noexcept : count_(count) {}
  SaturatingCount(const SaturatingCount&) = delete;
  SaturatingCount& operator=(const SaturatingCount&) = delete;

  // One more. The caller holds one, so that the count is not zero.
  void Increment() noexcept {
    // order: relaxed: who holds one has come by it in an ordered way.
    const std::int32_t old = count_.fetch_add(1, std::memory_order_relaxed);
    if (old <= 0 || old == kMax) [[unlikely]]
      Saturate();
  }

  // One less. True: it was the last, and the caller may free what was counted.
  [[nodiscard]] bool Decrement() noexcept {
    // order: release pairs with the acquire below: what each holder did comes before the end.
    const std::int32_t old = count_.fetch_sub(1, std::memory_order_release);
    if (old == 1) {
      (void)count_.load(std::memory_order_acquire);
      return true;
    }
    if (old <= 0) [[unlikely]]
      Saturate();
    return false;
  }

  bool saturated() const noexcept { return count() < 0; }
  // Negative: saturated.
  std::int32_t count() const noexcept { return count_.load(std::memory_order_relaxed); }

  // How many counts of this process ever were saturated.
  static std::uint64_t saturations() noexcept {
    return saturations_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr std::int32_t kSaturated = std::numeric_limits<std::int32_t>::min() / 2;

  // Threads that pass the limit together all come here. Only the first to exchange finds
  // something that is not near kSaturated.
  [[gnu::noinline, gnu::cold]] void Saturate() noexcept {
    const std::int32_t old = count_.exchange(kSaturated, std::memory_order_relaxed);
    if (old >= kSaturated / 2 || old < kSaturated + kSaturated / 2) {
      saturations_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  inline static std::atomic<std::uint64_t> saturations_{0};
  std::atomic<std::int32_t> count_;
};

}  // namespace rxtoken
