// SPDX-License-Identifier: Apache-2.0
#include "dataplane/buffer_pool.h"

#include <rte_errno.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace rxtoken {
namespace {

constexpr char kOpsName[] = "rxtoken_pages";

}  // namespace

// Before main(), as DPDK's own mempools do: workers read it without asking.
const int BufferPool::kOpsIndex = [] {
  rte_mempool_ops ops = {};
  std::snprintf(ops.name, sizeof ops.name, "%s", kOpsName);
  ops.alloc = OpsAlloc;
  ops.free = OpsFree;
  ops.enqueue = OpsPush;
  ops.dequeue = OpsPop;
  ops.get_count = OpsCount;
  ops.populate = OpsPopulate;
  return rte_mempool_register_ops(&ops);
}();

BufferPool* BufferPool::Of(const rte_mempool* mempool) noexcept {
  return mempool->ops_index == kOpsIndex ? static_cast<BufferPool*>(mempool->pool_config) : nullptr;
}

BufferPool::BufferPool(std::unique_ptr<Buffer> buffer, std::uint32_t id)
    : buffer_(std::move(buffer)),
      buffer_data_(buffer_->data()),
      page_shift_(buffer_->page_shift()),
      page_mask_(buffer_->page_bytes() - 1),
      mbufs_(std::size_t{buffer_->pages()} * kMbufStride + kMbufOffset),
      table_(id, buffer_->pages(), this) {}

Result<std::unique_ptr<BufferPool>> BufferPool::Create(std::unique_ptr<Buffer> buffer,
                                                       std::uint32_t id) {
  if (kOpsIndex < 0) {
    return Status(Code::kResourceExhausted, "DPDK takes no more kinds of mempools");
  }
  std::unique_ptr<BufferPool> pool(new BufferPool(std::move(buffer), id));
  const std::uint32_t pages = pool->buffer_->pages();
  const std::string name = "rxtoken_b" + std::to_string(id);
  const Status no_memory(Code::kResourceExhausted,
                         "no memory for the records of " + std::to_string(pages) +
                             " pages: bind a smaller buffer, or use larger pages");
  if (!pool->mbufs_.ok() || !pool->table_.ok()) return no_memory;

  // No cache: the pool itself is last in, first out, for each worker.
  pool->mempool_ = rte_mempool_create_empty(name.c_str(), pages, sizeof(rte_mbuf), 0,
                                            sizeof(rte_pktmbuf_pool_private), SOCKET_ID_ANY,
                                            RTE_MEMPOOL_F_NO_SPREAD | RTE_MEMPOOL_F_NO_IOVA_CONTIG);
  if (pool->mempool_ == nullptr) {
    return Status(Code::kResourceExhausted, "DPDK refuses another mempool (" +
                                                std::string(rte_strerror(rte_errno)) +
                                                "): unbind something, or raise memory_mib");
  }
  const std::uint32_t page_bytes = pool->buffer_->page_bytes();
  rte_pktmbuf_pool_private settings = {};
  settings.mbuf_data_room_size = static_cast<std::uint16_t>(
      std::min(page_bytes - OverheadBytes(page_bytes) + RTE_PKTMBUF_HEADROOM, 65535u));
  settings.flags = RTE_PKTMBUF_POOL_F_PINNED_EXT_BUF;
  rte_mempool_set_ops_byname(pool->mempool_, kOpsName, pool.get());
  rte_pktmbuf_pool_init(pool->mempool_, &settings);
  const int added =
      rte_mempool_populate_iova(pool->mempool_, reinterpret_cast<char*>(pool->mbufs_.data()),
                                RTE_BAD_IOVA, pool->mbufs_.size(), nullptr, nullptr);
  if (added < 0 || pool->pages_ == nullptr || !pool->pages_->ok()) return no_memory;
  return pool;
}

BufferPool::~BufferPool() { rte_mempool_free(mempool_); }

void BufferPool::PinMbuf(std::uint32_t page) noexcept {
  const std::uint32_t page_bytes = buffer_->page_bytes();
  const std::uint32_t colour = ColourBytes(page, page_bytes);
  rte_mbuf* const mbuf = MbufOf(page);
  mbuf->buf_addr = buffer_->data() + (std::size_t{page} << page_shift_) + colour;
  mbuf->buf_iova = reinterpret_cast<rte_iova_t>(mbuf->buf_addr);
  mbuf->buf_len = static_cast<std::uint16_t>(std::min(page_bytes - colour, 65535u));
  mbuf->data_off = RTE_PKTMBUF_HEADROOM;
  mbuf->pool = mempool_;
  mbuf->nb_segs = 1;
  mbuf->port = RTE_MBUF_PORT_INVALID;
  mbuf->ol_flags = RTE_MBUF_F_EXTERNAL;
  rte_mbuf_refcnt_set(mbuf, 1);
  // The record of the external buffer lies behind the mbuf, in front of the next one.
  auto* const shared = reinterpret_cast<rte_mbuf_ext_shared_info*>(mbuf + 1);
  shared->free_cb = [](void*, void*) {};
  rte_mbuf_ext_refcnt_set(shared, 1);
  mbuf->shinfo = shared;
}

int BufferPool::OpsAlloc(rte_mempool* mempool) {
  mempool->pool_data = nullptr;  // there is a PagePool once there are objects
  return 0;
}

void BufferPool::OpsFree(rte_mempool*) {}

int BufferPool::OpsPush(rte_mempool* mempool, void* const* objects, unsigned n) {
  static_cast<PagePool*>(mempool->pool_data)->Push(objects, n);
  return 0;
}

int BufferPool::OpsPop(rte_mempool* mempool, void** objects, unsigned n) {
  return static_cast<PagePool*>(mempool->pool_data)->Pop(objects, n) ? 0 : -ENOBUFS;
}

unsigned BufferPool::OpsCount(const rte_mempool* mempool) {
  const auto* pool = static_cast<const PagePool*>(mempool->pool_data);
  return pool == nullptr ? 0 : pool->available();
}

int BufferPool::OpsPopulate(rte_mempool* mempool, unsigned max, void*, rte_iova_t, std::size_t,
                            rte_mempool_populate_obj_cb_t* added, void* argument) {
  auto* const self = static_cast<BufferPool*>(mempool->pool_config);
  std::vector<void*> objects(max);
  for (unsigned page = 0; page < max; page++) {
    objects[page] = self->MbufOf(page);
    added(mempool, argument, objects[page], RTE_BAD_IOVA);
    self->PinMbuf(page);
  }
  self->pages_ = std::make_unique<PagePool>(objects);
  mempool->pool_data = self->pages_.get();
  return static_cast<int>(max);
}

}  // namespace rxtoken
