// SPDX-License-Identifier: Apache-2.0
// slot_table.h - the 32 slots of one rx socket: which binding each names.
//
// Workers share it, but touch it only when a slot's outstanding count leaves or reaches
// zero on their lane, so its locked instructions are off the path. A slot's word says which
// binding it names and which workers have fragments outstanding under it; a slot without
// such a worker may be given to another binding, the one released longest ago first.
//
//   word  63    62    61    48 47            16 15        0
//        +-----+-----+--------+----------------+-----------+
//        |busy |read |        | binding        | workers   |
//        +-----+-----+--------+----------------+-----------+
//
// Two workers that lend the first page of one binding at the same moment may each take a
// slot for it. That is harmless: each lane announces its own.
//
// Memory: 8 bytes a page of the binding, where lent from, until the slot is given to another
// binding, forgotten, or unused between two calls of Trim. Outstanding counts that reach zero
// all the time, as they do under light traffic, cost no system call.
//
// Thread-safety: Acquire, Rejoin and Release by any worker; Trim and ForEachHeld by the control
//                thread, and Forget too, once no lane knows the binding any more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "tokens/abi/limits.h"
#include "tokens/demand_zero.h"
#include "tokens/hold_time.h"
#include "tokens/page_table.h"

namespace rxtoken {

// What a rx socket holds of one page. Written by the page's owner, read by anyone.
struct Uref {
  std::atomic<std::uint32_t> count;    // fragments
  std::atomic<std::uint32_t> lent_at;  // HoldClock() when the last of them arrived
};

using UrefArray = DemandZeroArray<Uref>;

class SlotTable {
 public:
  // Marks `slot` as in use by `worker` if it still names `binding`.
  bool Rejoin(std::uint32_t slot, std::uint32_t worker, std::uint32_t binding) noexcept {
    std::uint64_t word = slots_[slot].word.load(std::memory_order_relaxed);
    while (Binding(word) == binding && (word & kBusy) == 0) {
      // order: acquire pairs with the release in Take(): the uref array is there.
      if (slots_[slot].word.compare_exchange_weak(
              word, word | Bit(worker), std::memory_order_acquire, std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  // A slot that names `table`'s binding and is in use by `worker`: one that named it
  // before, else a fresh one, else the one released longest ago. Not one of `except`, a bit for
  // each, which the worker uses. Empty: all 32 have outstanding tokens, or the memory for its
  // urefs cannot be had.
  std::optional<std::uint32_t> Acquire(std::uint32_t worker, const PageTable& table,
                                       std::uint32_t except = 0) noexcept {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      if ((except & 1u << slot) == 0 && Rejoin(slot, worker, table.binding())) return slot;
    }
    for (UrefArray urefs;;) {
      std::optional<std::uint32_t> oldest;
      std::uint64_t oldest_release = 0;
      for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
        const std::uint64_t word = slots_[slot].word.load(std::memory_order_relaxed);
        if ((word & kTaken) != 0) continue;
        const std::uint64_t released = slots_[slot].released.load(std::memory_order_relaxed);
        if (!oldest || released < oldest_release) {
          oldest = slot;
          oldest_release = released;
        }
      }
      if (!oldest) return std::nullopt;
      if (!urefs.ok()) urefs = UrefArray(table.pages());
      if (!urefs.ok()) return std::nullopt;
      if (Take(*oldest, worker, table.binding(), urefs)) return oldest;
    }
  }

  // `worker` has nothing outstanding under `slot` any more.
  void Release(std::uint32_t slot, std::uint32_t worker) noexcept {
    slots_[slot].released.store(1 + releases_.fetch_add(1, std::memory_order_relaxed),
                                std::memory_order_relaxed);
    // order: release pairs with the acquire in Take() and Rejoin(): our last write to the
    // uref array comes before anything another worker does with it.
    slots_[slot].word.fetch_and(~Bit(worker), std::memory_order_release);
  }

  // Drops every slot that names `binding`, and the memory of its urefs.
  void Forget(std::uint32_t binding) noexcept {
    for (Slot& slot : slots_) Empty(slot, std::uint64_t{binding} << 16);
  }

  // Does so with every slot that was unused at the last call, and has been since.
  void Trim() noexcept {
    for (Slot& slot : slots_) {
      const std::uint64_t word = slot.word.load(std::memory_order_relaxed);
      const std::uint64_t released = slot.released.load(std::memory_order_relaxed);
      if (word != 0 && (word & kTaken) == 0 && released == slot.released_at_trim) {
        Empty(slot, word);
      }
      slot.released_at_trim = released;
    }
  }

  // Calls f(slot, binding, page, count, lent_at) for every page that is held, while workers go on
  // lending and taking back. A slot keeps its binding while it is looked at.
  template <typename F>
  void ForEachHeld(F f) {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      Slot& s = slots_[slot];
      std::uint64_t word = s.word.load(std::memory_order_relaxed);
      // order: acquire pairs with the release in Take(): the uref array is there.
      while ((word & kWorkers) != 0 &&
             !s.word.compare_exchange_weak(word, word | kRead, std::memory_order_acquire,
                                           std::memory_order_relaxed)) {
      }
      if ((word & kWorkers) == 0) continue;
      for (std::uint32_t page = 0; page < s.urefs.size(); page++) {
        const std::uint32_t count = s.urefs[page].count.load(std::memory_order_relaxed);
        if (count == 0) continue;
        f(slot, Binding(word), page, count, s.urefs[page].lent_at.load(std::memory_order_relaxed));
      }
      // order: release pairs with the acquire in Take(): our reads come before the array goes.
      word = s.word.fetch_and(~kRead, std::memory_order_release);
      // Who wanted the slot meanwhile waits for the next release of any.
      if ((word & kWorkers) == 0) releases_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Valid while `worker` has the slot in use.
  Uref* urefs(std::uint32_t slot) const noexcept { return slots_[slot].urefs.data(); }

  std::uint64_t releases() const noexcept { return releases_.load(std::memory_order_relaxed); }

  std::uint32_t in_use() const noexcept {
    std::uint32_t n = 0;
    for (const Slot& slot : slots_) {
      n += (slot.word.load(std::memory_order_relaxed) & kWorkers) != 0;
    }
    return n;
  }

 private:
  static constexpr std::uint64_t kBusy = std::uint64_t{1} << 63;
  static constexpr std::uint64_t kRead = std::uint64_t{1} << 62;
  static constexpr std::uint64_t kWorkers = 0xFFFF;
  static constexpr std::uint64_t kTaken = kBusy | kRead | kWorkers;
  static_assert(kMaxWorkers <= 16);

  struct Slot {
    std::atomic<std::uint64_t> word{0};
    std::atomic<std::uint64_t> released{0};  // when, as a count of releases; 0: never used
    std::uint64_t released_at_trim = 0;      // [ctl]
    UrefArray urefs;                         // written only while busy
  };

  static constexpr std::uint64_t Bit(std::uint32_t worker) noexcept {
    return std::uint64_t{1} << worker;
  }
  static constexpr std::uint32_t Binding(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 16);
  }

  // Makes a slot with this word, which is unused, as new. Does nothing if it has another one.
  static void Empty(Slot& slot, std::uint64_t word) noexcept {
    // order: acquire pairs with the release of the last user. If it fails, the slot names
    // another binding, or a worker takes it just now.
    if (!slot.word.compare_exchange_strong(word, kBusy, std::memory_order_acquire,
                                           std::memory_order_relaxed)) {
      return;
    }
    slot.urefs = UrefArray();
    slot.released.store(0, std::memory_order_relaxed);
    slot.word.store(0, std::memory_order_release);
  }

  // Gives an unused slot, and the new `urefs` for the old ones, to `binding`. False: another
  // worker was faster.
  bool Take(std::uint32_t slot, std::uint32_t worker, std::uint32_t binding,
            UrefArray& urefs) noexcept {
    Slot& s = slots_[slot];
    std::uint64_t word = s.word.load(std::memory_order_relaxed);
    if ((word & kTaken) != 0) return false;
    // order: acquire pairs with the release of the last user: nobody uses the old urefs.
    if (!s.word.compare_exchange_strong(word, kBusy, std::memory_order_acquire,
                                        std::memory_order_relaxed)) {
      return false;
    }
    std::swap(s.urefs, urefs);
    // order: release pairs with the acquire in Rejoin(): publishes the array.
    s.word.store(std::uint64_t{binding} << 16 | Bit(worker), std::memory_order_release);
    return true;
  }

  std::array<Slot, kSlotsPerRxSocket> slots_;
  std::atomic<std::uint64_t> releases_{0};
};

}  // namespace rxtoken
