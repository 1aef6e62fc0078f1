// SPDX-License-Identifier: Apache-2.0
// batch_ring.h - a ring from one thread to the other, in batches: what the lanes of rxtokend
// are made of, for the designs that have none, and the limit for those that have.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "tokens/abi/limits.h"

namespace rxtoken::micro {

template <typename T, std::uint32_t kEntries>
class BatchRing {
 public:
  // For the thread that pushes.
  bool HasRoom(std::uint32_t n) noexcept {
    if (tail_ + n - head_seen_ <= kEntries) return true;
    // order: acquire pairs with the release in Pop(): what we will overwrite has been read.
    head_seen_ = head_.load(std::memory_order_acquire);
    return tail_ + n - head_seen_ <= kEntries;
  }

  // Precondition: there is room.
  void Push(std::span<const T> items) noexcept {
    std::uint32_t tail = tail_;
    for (const T& item : items) items_[tail++ % kEntries] = item;
    tail_ = tail;
    // order: release publishes the items.
    published_.store(tail, std::memory_order_release);
  }

  // As many as there are and fit into `out`.
  std::uint32_t Pop(std::span<T> out) noexcept {
    std::uint32_t head = head_.load(std::memory_order_relaxed);
    if (tail_seen_ - head < out.size()) {
      // order: acquire pairs with the release in Push(): the items are there.
      tail_seen_ = published_.load(std::memory_order_acquire);
    }
    const auto n = std::min(tail_seen_ - head, static_cast<std::uint32_t>(out.size()));
    for (std::uint32_t i = 0; i < n; i++) out[i] = items_[head++ % kEntries];
    // order: release: they were read before their place is free.
    if (n != 0) head_.store(head, std::memory_order_release);
    return n;
  }

 private:
  // who pushes
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> published_{0};
  alignas(kWriterAlignBytes) std::uint32_t tail_ = 0;
  std::uint32_t head_seen_ = 0;
  // who pops
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> head_{0};
  alignas(kWriterAlignBytes) std::uint32_t tail_seen_ = 0;

  alignas(kWriterAlignBytes) std::array<T, kEntries> items_;
};

}  // namespace rxtoken::micro
