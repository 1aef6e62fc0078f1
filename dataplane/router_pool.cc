// SPDX-License-Identifier: Apache-2.0
#include "dataplane/router_pool.h"

#include <rte_mbuf.h>
#include <rte_mempool.h>

#include <cstdio>

namespace rxtoken {
namespace {

constexpr char kOpsName[] = "rxtoken_router";

rte_mempool* TargetOf(const rte_mempool* pool) {
  // order: relaxed; the thread that stores it is the one that dequeues (RouterPool::Attach).
  return static_cast<const std::atomic<rte_mempool*>*>(pool->pool_data)
      ->load(std::memory_order_relaxed);
}

int Dequeue(rte_mempool* pool, void** objects, unsigned count) {
  return rte_mempool_ops_dequeue_bulk(TargetOf(pool), objects, count);
}

// Drivers free an mbuf to its home pool; one that gives to its queue's pool ends up here.
int Enqueue(rte_mempool*, void* const* objects, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    rte_mempool_put(static_cast<rte_mbuf*>(objects[i])->pool, objects[i]);
  }
  return 0;
}

unsigned GetCount(const rte_mempool* pool) { return rte_mempool_avail_count(TargetOf(pool)); }

rte_mempool_ops MakeOps() {
  rte_mempool_ops ops = {};
  std::snprintf(ops.name, sizeof ops.name, "%s", kOpsName);
  ops.alloc = [](rte_mempool*) { return 0; };  // called when a pool is populated: never
  ops.enqueue = Enqueue;
  ops.dequeue = Dequeue;
  ops.get_count = GetCount;
  return ops;
}

// True if DPDK knows the operations. Once in a process.
bool RegisterOps() {
  static const bool registered = [] {
    const rte_mempool_ops ops = MakeOps();
    return rte_mempool_register_ops(&ops) >= 0;
  }();
  return registered;
}

}  // namespace

std::unique_ptr<RouterPool> RouterPool::Create(const std::string& name, rte_mempool* target,
                                               int numa_node) {
  if (!RegisterOps()) return nullptr;
  // DPDK wants room for one object at least; it is never populated.
  rte_mempool* pool = rte_mempool_create_empty(name.c_str(), 1, sizeof(rte_mbuf), 0,
                                               sizeof(rte_pktmbuf_pool_private), numa_node, 0);
  if (pool == nullptr) return nullptr;
  std::unique_ptr<RouterPool> router(new RouterPool);
  router->pool_ = pool;
  if (rte_mempool_set_ops_byname(pool, kOpsName, nullptr) != 0) return nullptr;
  rte_pktmbuf_pool_private mbufs = {};
  mbufs.mbuf_data_room_size = rte_pktmbuf_data_room_size(target);
  mbufs.flags = RTE_PKTMBUF_POOL_F_PINNED_EXT_BUF;
  rte_pktmbuf_pool_init(pool, &mbufs);
  pool->pool_data = &router->target_;
  router->Attach(target);
  return router;
}

RouterPool::~RouterPool() { rte_mempool_free(pool_); }

void RouterPool::Attach(rte_mempool* target) noexcept {
  // order: relaxed; the caller is the thread that dequeues.
  target_.store(target, std::memory_order_relaxed);
  static_cast<rte_pktmbuf_pool_private*>(rte_mempool_get_priv(pool_))->mbuf_data_room_size =
      rte_pktmbuf_data_room_size(target);
}

}  // namespace rxtoken
