// SPDX-License-Identifier: Apache-2.0
// batch_stack.h - a lock-free stack of batch numbers.
//
//   head  63             32 31              0
//        +-----------------+-----------------+
//        | tag             | top batch + 1   |    0 below: empty
//        +-----------------+-----------------+
//
// The tag changes with every take, so that a compare-exchange cannot mistake an old top for
// a new one: while one thread looks at the top's link, others may take that batch, and the
// one below, and put the first back.
//
// Thread-safety: all functions from any thread.   Blocks: never.   Allocates: never.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "tokens/abi/limits.h"

namespace rxtoken {

class alignas(kWriterAlignBytes) BatchStack {
 public:
  // `links` has a place for each batch. Stacks among which the same batches move share it.
  explicit BatchStack(std::atomic<std::uint32_t>* links) noexcept : links_(links) {}

  // What the caller did to the batch's content is seen by who takes it.
  void Put(std::uint32_t batch) noexcept {
    std::uint64_t old = head_.load(std::memory_order_relaxed);
    do {
      links_[batch].store(static_cast<std::uint32_t>(old), std::memory_order_relaxed);
      // order: release publishes the batch's content and its link.
    } while (!head_.compare_exchange_weak(old, (old & kTag) | (batch + 1),
                                          std::memory_order_release, std::memory_order_relaxed));
  }

  std::optional<std::uint32_t> Take() noexcept {
    // order: acquire pairs with the release in Put(): the link, then the content.
    std::uint64_t old = head_.load(std::memory_order_acquire);
    for (;;) {
      const auto top = static_cast<std::uint32_t>(old);
      if (top == 0) return std::nullopt;
      const std::uint64_t below = links_[top - 1].load(std::memory_order_relaxed);
      const std::uint64_t tag = (old & kTag) + (std::uint64_t{1} << 32);
      if (head_.compare_exchange_weak(old, tag | below, std::memory_order_acquire,
                                      std::memory_order_acquire)) {
        return top - 1;
      }
    }
  }

 private:
  static constexpr std::uint64_t kTag = ~std::uint64_t{0xFFFF'FFFF};

  std::atomic<std::uint64_t> head_{0};
  std::atomic<std::uint32_t>* const links_;
};

}  // namespace rxtoken
