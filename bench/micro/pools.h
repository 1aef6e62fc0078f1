// SPDX-License-Identifier: Apache-2.0
// pools.h - rxtoken's page pool beside DPDK's pools of pointers.
//
// A pool starts full. Push(objects, n) always has room; Pop(objects, n) takes all or nothing.
#pragma once

#include <rte_mempool.h>
#include <rte_ring.h>
#include <rte_stack.h>

#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "bench/micro/batch_ring.h"
#include "bench/micro/harness.h"
#include "tokens/page_pool.h"

namespace rxtoken::micro {

inline constexpr std::uint32_t kPoolObjects = 4096;
inline constexpr std::uint32_t kPoolBatch = 32;

inline std::vector<void*> PoolObjects() {
  static std::array<char, kPoolObjects> targets;
  std::vector<void*> objects(kPoolObjects);
  for (std::uint32_t i = 0; i < kPoolObjects; i++) objects[i] = &targets[i];
  return objects;
}

// DPDK wants names, each used once.
inline std::string NextName() {
  static int n = 0;
  return "micro" + std::to_string(n++);
}

class OurPool {
 public:
  explicit OurPool(bool shared) : pool_(PoolObjects()) {
    if (!pool_.ok()) Die("not enough memory");
    pool_.SetTakers(shared ? ~0u : 1);
  }
  void Push(void** objects, unsigned n) noexcept { pool_.Push(objects, n); }
  bool Pop(void** objects, unsigned n) noexcept { return pool_.Pop(objects, n); }

 private:
  PagePool pool_;
};

// DPDK's default: a cache for each thread in front of a ring for all of them.
class Mempool {
 public:
  Mempool()
      : pool_(rte_mempool_create(NextName().c_str(), kPoolObjects, 64, RTE_MEMPOOL_CACHE_MAX_SIZE,
                                 0, nullptr, nullptr, nullptr, nullptr, SOCKET_ID_ANY, 0)) {
    if (pool_ == nullptr) Die("DPDK makes no mempool");
  }
  ~Mempool() { rte_mempool_free(pool_); }
  void Push(void** objects, unsigned n) noexcept { rte_mempool_put_bulk(pool_, objects, n); }
  bool Pop(void** objects, unsigned n) noexcept {
    return rte_mempool_get_bulk(pool_, objects, n) == 0;
  }

 private:
  rte_mempool* pool_;
};

// `flags` say for how many threads: RING_F_SP_ENQ | RING_F_SC_DEQ, or 0.
class Ring {
 public:
  explicit Ring(unsigned flags)
      : ring_(rte_ring_create(NextName().c_str(), 2 * kPoolObjects, SOCKET_ID_ANY, flags)) {
    if (ring_ == nullptr) Die("DPDK makes no ring");
    Push(PoolObjects().data(), kPoolObjects);
  }
  ~Ring() { rte_ring_free(ring_); }
  void Push(void** objects, unsigned n) noexcept {
    rte_ring_enqueue_bulk(ring_, objects, n, nullptr);
  }
  bool Pop(void** objects, unsigned n) noexcept {
    return rte_ring_dequeue_bulk(ring_, objects, n, nullptr) == n;
  }

 private:
  rte_ring* ring_;
};

// `flags` say whether it is lock-free: RTE_STACK_F_LF, or 0.
class Stack {
 public:
  explicit Stack(std::uint32_t flags)
      : stack_(rte_stack_create(NextName().c_str(), kPoolObjects, SOCKET_ID_ANY, flags)) {
    if (stack_ == nullptr) Die("DPDK makes no stack");
    Push(PoolObjects().data(), kPoolObjects);
  }
  ~Stack() { rte_stack_free(stack_); }
  void Push(void** objects, unsigned n) noexcept { rte_stack_push(stack_, objects, n); }
  bool Pop(void** objects, unsigned n) noexcept { return rte_stack_pop(stack_, objects, n) == n; }

 private:
  rte_stack* stack_;
};

// One thread: of 256 objects that are out, the 32 oldest come back and 32 are taken.
template <typename Pool>
class PushAndPop {
 public:
  explicit PushAndPop(std::unique_ptr<Pool> pool) : pool_(std::move(pool)) {
    if (!pool_->Pop(out_.data(), out_.size())) Die("a pool is not full");
  }
  void operator()(std::uint64_t n) {
    for (; n != 0; n -= kPoolBatch) {
      void** const lot = &out_[next_];
      next_ = (next_ + kPoolBatch) % out_.size();
      pool_->Push(lot, kPoolBatch);
      if (!pool_->Pop(lot, kPoolBatch)) Die("a pool is empty");
    }
  }

 private:
  std::unique_ptr<Pool> pool_;
  std::array<void*, 256> out_;
  std::size_t next_ = 0;
};

// Two threads: one takes objects, the other puts them back.
template <typename Pool>
class PopHerePushThere {
 public:
  explicit PopHerePushThere(std::unique_ptr<Pool> pool) : pool_(std::move(pool)) {}

  void Pops(std::uint64_t n) {
    std::array<void*, kPoolBatch> lot;
    for (; n != 0; n -= kPoolBatch) {
      while (!pool_->Pop(lot.data(), kPoolBatch)) Pause();
      while (!across_.HasRoom(kPoolBatch)) Pause();
      across_.Push(lot);
    }
  }
  void Pushes(std::uint64_t n) {
    std::array<void*, kPoolBatch> lot;
    while (n != 0) {
      const std::uint32_t got = across_.Pop(lot);
      if (got == 0) {
        Pause();
        continue;
      }
      pool_->Push(lot.data(), got);
      n -= got;
    }
  }

 private:
  std::unique_ptr<Pool> pool_;
  BatchRing<void*, 1024> across_;
};

}  // namespace rxtoken::micro
