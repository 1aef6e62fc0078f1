// SPDX-License-Identifier: Apache-2.0
// spsc_ring.h - a bounded queue from one thread to another, inside the daemon.
//
// Thread-safety: one thread pushes, one pops.   Allocates: never.   Blocks: never.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "tokens/abi/limits.h"

namespace rxtoken {

template <typename T, std::uint32_t kEntries>
class SpscRing {
  static_assert((kEntries & (kEntries - 1)) == 0, "power of two");

 public:
  // False when full.
  bool TryPush(T item) noexcept {
    const std::uint32_t tail = tail_.load(std::memory_order_relaxed);
    // order: acquire pairs with the release in TryPop(): the place has been read.
    if (tail - head_.load(std::memory_order_acquire) == kEntries) return false;
    items_[tail % kEntries] = item;
    // order: release publishes the item.
    tail_.store(tail + 1, std::memory_order_release);
    return true;
  }

  std::optional<T> TryPop() noexcept {
    const std::uint32_t head = head_.load(std::memory_order_relaxed);
    // order: acquire pairs with the release in TryPush(): the item is there.
    if (tail_.load(std::memory_order_acquire) == head) return std::nullopt;
    const T item = items_[head % kEntries];
    // order: release: we read the place before the pusher may write it again.
    head_.store(head + 1, std::memory_order_release);
    return item;
  }

 private:
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> tail_{0};  // pusher
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> head_{0};  // popper
  alignas(kWriterAlignBytes) std::array<T, kEntries> items_;
};

}  // namespace rxtoken
