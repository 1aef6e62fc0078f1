// SPDX-License-Identifier: Apache-2.0
// lane_reader.h - the application's end of one lane.
//
// Thread-safety: the receiving half (Poll, Consume, Arm, Disarm, closed) belongs to one
//                thread at a time, the returning half (Return) to one thread at a time;
//                the two may run together.
// Hot path: yes.   Allocates: never.   Blocks: never.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "tokens/abi/ring.h"

namespace rxtoken {

class LaneReader {
 public:
  // Both rings must outlive the reader; `descriptors->entries` was checked on attach.
  LaneReader(const DescriptorRing* descriptors, ReturnRing* returns) noexcept
      : descriptors_(descriptors), returns_(returns), mask_(descriptors->entries - 1) {}

  // Oldest descriptors not consumed yet, copied to the front of `out`; 0 when there are
  // none. They are seen again until Consume().
  std::size_t Poll(std::span<Descriptor> out) noexcept {
    if (tail_seen_ - head_ < out.size()) {
      // order: acquire pairs with the worker's release of tail: the descriptors, and the
      // payload they name, were written before it.
      tail_seen_ = descriptors_->tail.load(std::memory_order_acquire);
    }
    const std::size_t n = std::min<std::size_t>(tail_seen_ - head_, out.size());
    const Descriptor* ring = descriptors_->descriptors();
    // The lines come from the worker's cache: have many of them on their way at once.
    for (std::size_t i = 0; i < n; i += 64 / sizeof(Descriptor)) {
      __builtin_prefetch(&ring[(head_ + i) & mask_]);
    }
    for (std::size_t i = 0; i < n; i++) out[i] = ring[(head_ + i) & mask_];
    return n;
  }

  // Gives the place of the oldest `n` descriptors back to the worker.
  // Precondition: n is at most what the last Poll() returned.
  void Consume(std::size_t n) noexcept {
    head_ += static_cast<std::uint32_t>(n);
    // order: release: our reads of the descriptors come before their place is free.
    returns_->descriptor_head.store(head_, std::memory_order_release);
  }

  // Queues tokens for return, in order; how many found room. Call again for the rest: the
  // worker drains the ring without being asked.
  std::size_t Return(std::span<const std::uint32_t> tokens) noexcept {
    const std::uint32_t entries = mask_ + 1;
    if (tokens.size() > entries - (return_tail_ - return_head_seen_)) {
      // order: acquire pairs with the worker's release: it has read what we overwrite now.
      return_head_seen_ = descriptors_->return_head.load(std::memory_order_acquire);
    }
    const std::size_t room = entries - (return_tail_ - return_head_seen_);
    const std::size_t n = std::min(tokens.size(), room);
    std::atomic<std::uint32_t>* ring = returns_->tokens();
    for (std::size_t i = 0; i < n; i++) {
      ring[(return_tail_ + i) & mask_].store(tokens[i], std::memory_order_relaxed);
    }
    return_tail_ += static_cast<std::uint32_t>(n);
    // order: release: the tokens, and our reads of the payload, come before the tail.
    returns_->tail.store(return_tail_, std::memory_order_release);
    return n;
  }

  // Asks the worker for a doorbell at its next publication. True if something is there
  // already, or the rx socket has ended; then, and after waking, call Disarm().
  bool Arm() noexcept {
    if (++sleeps_ == 0) sleeps_ = 1;
    // order: both seq_cst, so that the load does not come before the store: what the worker
    // published before it could see our wish, we see. What it publishes later it looks at
    // again, until it sees the wish. Not a fence, which the thread sanitizer does not know.
    returns_->waiting.store(sleeps_, std::memory_order_seq_cst);
    return descriptors_->tail.load(std::memory_order_seq_cst) != head_ || closed();
  }
  void Disarm() noexcept { returns_->waiting.store(0, std::memory_order_relaxed); }

  // True once the daemon ended the rx socket. What was published before is still readable,
  // but the pages were taken back: payload may change under the reader.
  bool closed() const noexcept { return descriptors_->closed.load(std::memory_order_acquire) != 0; }

 private:
  const DescriptorRing* descriptors_;
  ReturnRing* returns_;
  std::uint32_t mask_;
  // receiving half
  std::uint32_t head_ = 0;
  std::uint32_t tail_seen_ = 0;
  std::uint32_t sleeps_ = 0;
  // returning half
  alignas(64) std::uint32_t return_tail_ = 0;
  std::uint32_t return_head_seen_ = 0;
};

}  // namespace rxtoken
