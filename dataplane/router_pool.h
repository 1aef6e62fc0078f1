// SPDX-License-Identifier: Apache-2.0
// router_pool.h - the mempool that a driver gets for a receive queue: it owns nothing and takes
// every mbuf from the pool that is bound to the queue now.
//
// So a queue changes its buffer between two bursts, with the port running. An mbuf carries its
// home pool and goes back there; the router sees each mbuf once, on its way out.
//
// Hot path: the dequeue; one indirect call more than the pool behind it.
// Thread-safety: as for RouterPool::Attach.
#pragma once

#include <atomic>
#include <memory>
#include <string>

struct rte_mempool;

namespace rxtoken {

class RouterPool {
 public:
  // `name` is unique among DPDK's pools and at most 25 characters. Null: no memory left, or the
  // name is taken. The router begins with `target` and its data room.
  static std::unique_ptr<RouterPool> Create(const std::string& name, rte_mempool* target,
                                            int numa_node);
  // Precondition: no driver uses it any more.
  ~RouterPool();
  RouterPool(const RouterPool&) = delete;
  RouterPool& operator=(const RouterPool&) = delete;

  // What the driver gets.
  rte_mempool* pool() const noexcept { return pool_; }

  // From now on mbufs come from `target`, which is never null, and the router states its data
  // room. Drivers (memif) read that once in each burst and then trust it for every mbuf of the
  // burst; therefore this is called by the thread that polls the queue, between two bursts, or
  // while nobody polls it.
  void Attach(rte_mempool* target) noexcept;

  // order: relaxed; only the polling thread acts on it, others may look.
  rte_mempool* target() const noexcept { return target_.load(std::memory_order_relaxed); }

 private:
  RouterPool() = default;

  rte_mempool* pool_ = nullptr;
  std::atomic<rte_mempool*> target_{nullptr};
};

}  // namespace rxtoken
