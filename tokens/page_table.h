// SPDX-License-Identifier: Apache-2.0
// page_table.h - who owns each page of a binding, and how often it is lent.
//
//   cell  31          16 15           0
//        +--------------+--------------+
//        | worker + 1   | lent         |    upper half 0: nobody's
//        +--------------+--------------+
//
// A page in flight has one owner, the worker that received it, and the owner is the only
// writer of its cell and of its urefs. So a change is a load and a store, no locked
// instruction; the words are atomics because any thread may read them. A page changes owner
// only through the page pool, where its count is zero.
//
// A page that carries several frames has a share in its count for each frame that was not
// lent or dropped yet, so that the page stays while the driver, or the pool, may still fill
// the rest of it. While such a page is in the pool, it has all its shares and no owner.
//
// The count saturates: a page that is lent kMaxLent times at once, over all rx sockets, keeps
// that count for ever and never goes back to the pool, and its binding never drains. A leak,
// which is counted, where a count that wraps would run into the owner's bits and free a page
// that is still read.
//
// Thread-safety: a cell is written by its page's owner; read by anyone.
// Memory: 4 bytes a page, demand-zero.
#pragma once

#include <atomic>
#include <cstdint>

#include "tokens/demand_zero.h"

namespace rxtoken {

class PageTable {
 public:
  static constexpr std::uint32_t kMaxLent = 0xFFFF;

  // `binding` is not 0, and never reused while the process lives. `pool` is for whoever recycles
  // pages.
  PageTable(std::uint32_t binding, std::uint32_t pages, void* pool)
      : cells_(pages), binding_(binding), pages_(pages), pool_(pool) {}

  bool ok() const noexcept { return cells_.ok(); }
  std::uint32_t binding() const noexcept { return binding_; }
  std::uint32_t pages() const noexcept { return pages_; }
  void* pool() const noexcept { return pool_; }
  std::atomic<std::uint32_t>* cells() const noexcept { return cells_.data(); }

  // Pages whose count has saturated.
  std::uint64_t saturated() const noexcept { return saturated_.load(std::memory_order_relaxed); }

  static constexpr std::uint32_t OwnerBits(std::uint32_t worker) noexcept {
    return (worker + 1) << 16;
  }
  static constexpr std::uint32_t Lent(std::uint32_t cell) noexcept { return cell & 0xFFFF; }
  static constexpr std::uint32_t Owner(std::uint32_t cell) noexcept { return cell & ~0xFFFFu; }
  // True if the owner with these bits has lent the page. Asked by the owner, the answer and
  // the page's urefs stand; a page that is not lent may be lent by another worker just now.
  static constexpr bool LentBy(std::uint32_t owner_bits, std::uint32_t cell) noexcept {
    return cell - owner_bits - 1 < kMaxLent;
  }
  // What the cell of a page is to become when the owner with these bits has something of it one
  // time more, whoever owned it before. Counts the page if that saturates it.
  std::uint32_t Taken(std::uint32_t owner_bits, std::uint32_t cell) const noexcept {
    const std::uint32_t lent = Lent(cell);
    if (lent == kMaxLent - 1) saturated_.fetch_add(1, std::memory_order_relaxed);
    return owner_bits | (lent >= kMaxLent - 1 ? kMaxLent : lent + 1);
  }
  static constexpr bool Saturated(std::uint32_t cell) noexcept { return Lent(cell) == kMaxLent; }

 private:
  DemandZeroArray<std::atomic<std::uint32_t>> cells_;
  std::uint32_t binding_;
  std::uint32_t pages_;
  void* pool_;
  mutable std::atomic<std::uint64_t> saturated_{0};
};

}  // namespace rxtoken
