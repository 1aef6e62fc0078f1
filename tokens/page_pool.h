// SPDX-License-Identifier: Apache-2.0
// page_pool.h - the free pages of one binding: a stack for each worker, and a depot.
//
//     worker 0: [ stack ]  --- full batches --->  depot  <--- full batches --- [ stack ] :1
//                          <-- when it is dry --         --- when it is dry -->
//
// After the kernel's objpool: a worker pushes to its own stack only (no function takes a
// worker's number, so none can push to another's), pops from its own first and from what
// others have in surplus next. Unlike objpool the local part is a plain last-in-first-out
// array without atomic read-modify-write, and pages cross between workers in whole batches
// only, through a lock-free stack of batches (Bonwick's magazines and depot). A stack has
// room for every object, so a push cannot fail.
//
// A thread that is no worker (the control thread, when a driver starts or stops a queue)
// has a stack of its own behind a mutex. A worker never waits for that mutex: it tries it
// when all else is empty.
//
// Thread-safety: all functions from any thread.   Blocks: workers never, but in Settle().
// Allocates: on construction only.   Hot path: Push, Pop.
// Memory: 8 bytes an object and a stack, demand-zero.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tokens/abi/limits.h"
#include "tokens/batch_stack.h"
#include "tokens/demand_zero.h"
#include "tokens/worker_id.h"

namespace rxtoken {

class PagePool {
 public:
  static constexpr std::uint32_t kBatch = 256;           // what crosses between workers
  static constexpr std::uint32_t kSurplus = 2 * kBatch;  // what a worker keeps when sharing

  // Starts full, with objects[0] the first to be popped.
  explicit PagePool(std::span<void* const> objects)
      : size_(static_cast<std::uint32_t>(objects.size())),
        batches_(size_ / kBatch + 1),
        links_(std::make_unique<std::atomic<std::uint32_t>[]>(batches_)),
        batch_objects_(std::size_t{batches_} * kBatch),
        full_(links_.get()),
        empty_(links_.get()) {
    for (Stack& stack : stacks_) stack.objects = DemandZeroArray<void*>(size_);
    for (std::uint32_t b = 0; b < batches_; b++) empty_.Put(b);
    if (!ok()) return;
    // The first of `objects` end on top: the stack is filled from the bottom up, what does
    // not make a whole batch outside, the rest in the depot.
    const std::vector<void*> reversed(objects.rbegin(), objects.rend());
    const std::uint32_t odd = size_ % kBatch;
    Stack& outside = stacks_[kMaxWorkers];
    std::memcpy(outside.objects.data(), reversed.data(), odd * sizeof(void*));
    outside.count.store(odd, std::memory_order_relaxed);
    for (std::uint32_t at = odd; at < size_; at += kBatch) Spill(&reversed[at]);
  }

  // False if the memory could not be had; then nothing else may be called.
  bool ok() const noexcept {
    return std::all_of(stacks_.begin(), stacks_.end(),
                       [](const Stack& s) { return s.objects.ok(); });
  }

  std::uint32_t size() const noexcept { return size_; }

  // Which workers take pages; bit w is worker w. Of several, each gives what it has beyond
  // kSurplus to the depot; a single one keeps all, so that what it frees last it uses next.
  // Others only bring back what they took before, and keep less than a batch of it.
  void SetTakers(std::uint32_t workers) noexcept {
    for (std::uint32_t w = 0; w < kMaxWorkers; w++) {
      const bool takes = (workers >> w & 1) != 0;
      stacks_[w].keep.store(!takes                         ? 0
                            : std::has_single_bit(workers) ? size_
                                                           : kSurplus,
                            std::memory_order_relaxed);
    }
  }

  // After SetTakers(), by each worker: lets others have what it is not to keep any more, and
  // has not to push anything for that.
  void Settle() noexcept {
    Stack& stack = stacks_[this_worker];
    const std::uint32_t keep = stack.keep.load(std::memory_order_relaxed);
    PushTo(stack, nullptr, 0, keep);
    if (keep != 0) return;
    const std::uint32_t rest = stack.count.load(std::memory_order_relaxed);
    stack.count.store(0, std::memory_order_relaxed);
    const std::lock_guard lock(outside_mutex_);
    PushTo(stacks_[kMaxWorkers], stack.objects.data(), rest, kSurplus);
  }

  void Push(void* const* objects, std::uint32_t n) noexcept {
    if (this_worker == kNotAWorker) {
      const std::lock_guard lock(outside_mutex_);
      PushTo(stacks_[kMaxWorkers], objects, n, kSurplus);
    } else {
      Stack& stack = stacks_[this_worker];
      PushTo(stack, objects, n, stack.keep.load(std::memory_order_relaxed));
    }
  }

  // The `n` objects pushed last, newest first; false, with nothing taken, if there are not
  // so many within the caller's reach.
  bool Pop(void** out, std::uint32_t n) noexcept {
    if (this_worker == kNotAWorker) {
      const std::lock_guard lock(outside_mutex_);
      return PopFrom(stacks_[kMaxWorkers], out, n);
    }
    return PopFrom(stacks_[this_worker], out, n);
  }

  // How many of `wanted` objects the calling worker can pop for certain, whatever others do.
  std::uint32_t Reserve(std::uint32_t wanted) noexcept {
    Stack& stack = stacks_[this_worker];
    std::uint32_t count = stack.count.load(std::memory_order_relaxed);
    while (count < wanted) {
      const std::uint32_t refilled = Refill(stack, count);
      if (refilled == count) break;
      count = refilled;
    }
    return std::min(count, wanted);
  }

  // Objects that are in the pool; exact when nobody pushes or pops, and never too many while
  // nobody pops.
  std::uint32_t available() const noexcept {
    // order: acquire pairs with the release in Spill(): a batch that is in the depot is not
    // seen on its stack any more.
    std::uint32_t n = full_count_.load(std::memory_order_acquire) * kBatch;
    for (const Stack& stack : stacks_) n += stack.count.load(std::memory_order_relaxed);
    return n;
  }

 private:
  struct alignas(kWriterAlignBytes) Stack {
    std::atomic<std::uint32_t> count{0};  // written by the stack's worker only
    std::atomic<std::uint32_t> keep{~0u};
    DemandZeroArray<void*> objects;
  };

  void PushTo(Stack& stack, void* const* objects, std::uint32_t n, std::uint32_t keep) noexcept {
    std::uint32_t count = stack.count.load(std::memory_order_relaxed);
    std::copy_n(objects, n, stack.objects.data() + count);  // null if n is 0
    count += n;
    while (count > keep && count >= kBatch) [[unlikely]] {
        // The count goes down before the depot's goes up: available() may see too few for a
        // moment, never too many.
        count -= kBatch;
        stack.count.store(count, std::memory_order_relaxed);
        Spill(stack.objects.data() + count);
      }
    stack.count.store(count, std::memory_order_relaxed);
  }

  bool PopFrom(Stack& stack, void** out, std::uint32_t n) noexcept {
    std::uint32_t count = stack.count.load(std::memory_order_relaxed);
    while (count < n) [[unlikely]] {
        const std::uint32_t refilled = Refill(stack, count);
        if (refilled == count) return false;
        count = refilled;
      }
    count -= n;
    stack.count.store(count, std::memory_order_relaxed);
    void* const* top = stack.objects.data() + count;
    for (std::uint32_t i = 0; i < n; i++) out[i] = top[n - 1 - i];
    return true;
  }

  // Adds one batch, from the depot or from what lies outside; the new count.
  std::uint32_t Refill(Stack& stack, std::uint32_t count) noexcept {
    if (const std::optional<std::uint32_t> batch = full_.Take()) {
      full_count_.fetch_sub(1, std::memory_order_relaxed);
      std::memcpy(stack.objects.data() + count, &batch_objects_[std::size_t{*batch} * kBatch],
                  kBatch * sizeof(void*));
      empty_.Put(*batch);
      count += kBatch;
    } else if (Stack& outside = stacks_[kMaxWorkers];
               &stack != &outside && outside.count.load(std::memory_order_relaxed) != 0 &&
               outside_mutex_.try_lock()) {
      const std::uint32_t there = outside.count.load(std::memory_order_relaxed);
      const std::uint32_t n = std::min(there, kBatch);
      std::memcpy(stack.objects.data() + count, outside.objects.data() + there - n,
                  n * sizeof(void*));
      outside.count.store(there - n, std::memory_order_relaxed);
      outside_mutex_.unlock();
      count += n;
    }
    stack.count.store(count, std::memory_order_relaxed);
    return count;
  }

  // Moves kBatch objects to the depot. There is always an empty batch: the full ones hold
  // distinct objects, and there is one batch more than full ones can be.
  void Spill(void* const* objects) noexcept {
    const std::uint32_t batch = *empty_.Take();
    std::memcpy(&batch_objects_[std::size_t{batch} * kBatch], objects, kBatch * sizeof(void*));
    // First the count, so that who takes the batch does not count it out before it is in.
    // order: release pairs with the acquire in available().
    full_count_.fetch_add(1, std::memory_order_release);
    full_.Put(batch);
  }

  std::uint32_t size_;
  std::uint32_t batches_;
  std::mutex outside_mutex_;
  std::array<Stack, kMaxWorkers + 1> stacks_;  // the last is for threads that are no workers

  // depot
  std::unique_ptr<std::atomic<std::uint32_t>[]> links_;
  std::vector<void*> batch_objects_;
  BatchStack full_;
  BatchStack empty_;
  std::atomic<std::uint32_t> full_count_{0};
};

}  // namespace rxtoken
