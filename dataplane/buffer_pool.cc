// SPDX-License-Identifier: Apache-2.0
#include "dataplane/buffer_pool.h"

#include <rte_errno.h>

#include <algorithm>
#include <bit>
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

BufferPool::BufferPool(std::unique_ptr<Buffer> buffer, std::uint32_t id,
                       std::uint32_t frames_per_page)
    : buffer_(std::move(buffer)),
      buffer_data_(buffer_->data()),
      page_shift_(buffer_->page_shift()),
      page_mask_(buffer_->page_bytes() - 1),
      frames_per_page_(frames_per_page),
      frame_shift_(page_shift_ - static_cast<unsigned>(std::countr_zero(frames_per_page))),
      mbufs_(std::size_t{buffer_->pages()} * frames_per_page * kMbufStride + kMbufOffset),
      table_(id, buffer_->pages(), this) {}

Result<std::unique_ptr<BufferPool>> BufferPool::Create(std::unique_ptr<Buffer> buffer,
                                                       std::uint32_t id,
                                                       std::uint32_t frames_per_page) {
  if (kOpsIndex < 0) {
    return Status(Code::kResourceExhausted, "DPDK takes no more kinds of mempools");
  }
  std::unique_ptr<BufferPool> pool(new BufferPool(std::move(buffer), id, frames_per_page));
  const std::uint64_t frames = std::uint64_t{pool->buffer_->pages()} * frames_per_page;
  const std::string name = "rxtoken_b" + std::to_string(id);
  const Status no_memory(Code::kResourceExhausted,
                         "no memory for the records of " + std::to_string(frames) +
                             " frames: bind a smaller buffer, or use larger pages");
  if (!pool->mbufs_.ok() || !pool->table_.ok() || frames > kMaxPagesPerBuffer) return no_memory;

  // No cache: the pool itself is last in, first out, for each worker.
  pool->mempool_ =
      rte_mempool_create_empty(name.c_str(), static_cast<unsigned>(frames), sizeof(rte_mbuf), 0,
                               sizeof(rte_pktmbuf_pool_private), SOCKET_ID_ANY,
                               RTE_MEMPOOL_F_NO_SPREAD | RTE_MEMPOOL_F_NO_IOVA_CONTIG);
  if (pool->mempool_ == nullptr) {
    return Status(Code::kResourceExhausted, "DPDK refuses another mempool (" +
                                                std::string(rte_strerror(rte_errno)) +
                                                "): unbind something, or raise memory_mib");
  }
  const std::uint32_t frame_bytes = pool->frame_bytes();
  rte_pktmbuf_pool_private settings = {};
  settings.mbuf_data_room_size = static_cast<std::uint16_t>(
      std::min(frame_bytes - OverheadBytes(frame_bytes) + RTE_PKTMBUF_HEADROOM, 65535u));
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

void BufferPool::PinMbuf(std::uint32_t frame) noexcept {
  const std::uint32_t colour = ColourBytes(frame, frame_bytes());
  rte_mbuf* const mbuf = MbufAt(frame);
  mbuf->buf_addr = buffer_->data() + (std::size_t{frame} << frame_shift_) + colour;
  mbuf->buf_iova = reinterpret_cast<rte_iova_t>(mbuf->buf_addr);
  mbuf->buf_len = static_cast<std::uint16_t>(std::min(frame_bytes() - colour, 65535u));
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

int BufferPool::OpsAlloc(rte_mempool*) { return 0; }

void BufferPool::OpsFree(rte_mempool*) {}

int BufferPool::OpsPush(rte_mempool* mempool, void* const* objects, unsigned n) {
  auto* const self = static_cast<BufferPool*>(mempool->pool_config);
  if (self->frames_per_page_ == 1) {
    self->pages_->Push(objects, n);
  } else {
    for (unsigned i = 0; i < n; i++) {
      self->EndFrame(self->PageOf(static_cast<const rte_mbuf*>(objects[i])->buf_addr));
    }
  }
  return 0;
}

int BufferPool::OpsPop(rte_mempool* mempool, void** objects, unsigned n) {
  auto* const self = static_cast<BufferPool*>(mempool->pool_config);
  bool popped;
  if (self->frames_per_page_ == 1) {
    popped = self->pages_->Pop(objects, n);
  } else if (this_worker != kNotAWorker) {
    popped = self->PopFrames(self->loose_[this_worker], objects, n);
  } else {
    const std::lock_guard lock(self->outside_mutex_);
    popped = self->PopFrames(self->loose_[kMaxWorkers], objects, n);
  }
  return popped ? 0 : -ENOBUFS;
}

unsigned BufferPool::OpsCount(const rte_mempool* mempool) {
  const auto* self = static_cast<const BufferPool*>(mempool->pool_config);
  return self->pages_ == nullptr ? 0 : self->pages_->available() * self->frames_per_page_;
}

// First what is loose, then the frames of whole pages; what is left of the last page is loose.
bool BufferPool::PopFrames(Loose& loose, void** out, std::uint32_t n) noexcept {
  const std::uint32_t from_loose = std::min(loose.n, n);
  const std::uint32_t rest = n - from_loose;
  const std::uint32_t pages = (rest + frames_per_page_ - 1) / frames_per_page_;
  // The pages go where their frames will be: each to a place that is not behind its frames.
  void** const at = out + from_loose;
  if (!pages_->Pop(at, pages)) return false;
  loose.n -= from_loose;
  std::copy_n(loose.mbufs.begin() + loose.n, from_loose, out);
  for (std::uint32_t page = pages; page-- != 0;) {
    const auto first = static_cast<std::uint8_t*>(at[page]);
    for (std::uint32_t i = frames_per_page_; i-- != 0;) {
      void* const mbuf = first + std::size_t{i} * kMbufStride;
      const std::uint32_t frame = page * frames_per_page_ + i;
      if (frame < rest) {
        at[frame] = mbuf;
      } else {
        loose.mbufs[loose.n++] = mbuf;
      }
    }
  }
  return true;
}

std::uint32_t BufferPool::Reserve(std::uint32_t wanted) noexcept {
  if (frames_per_page_ == 1) return pages_->Reserve(wanted);
  const std::uint32_t loose = loose_[this_worker].n;
  if (loose >= wanted) return wanted;
  const std::uint32_t pages = (wanted - loose + frames_per_page_ - 1) / frames_per_page_;
  return std::min(wanted, loose + pages_->Reserve(pages) * frames_per_page_);
}

void BufferPool::TakeShare(std::uint32_t worker, std::uint32_t page) noexcept {
  std::atomic<std::uint32_t>& cell = table_.cells()[page];
  cell.store(table_.Taken(PageTable::OwnerBits(worker), cell.load(std::memory_order_relaxed)),
             std::memory_order_relaxed);
}

void BufferPool::DropShare(std::uint32_t page) noexcept {
  std::atomic<std::uint32_t>& cell = table_.cells()[page];
  const std::uint32_t old = cell.load(std::memory_order_relaxed);
  if (PageTable::Saturated(old)) return;
  cell.store(old - 1, std::memory_order_relaxed);
  if (PageTable::Lent(old) == 1) FreePage(page);
}

void BufferPool::FreePage(std::uint32_t page) noexcept {
  Renew(page);
  void* const mbuf = MbufOf(page);
  pages_->Push(&mbuf, 1);
}

void BufferPool::DropLoose() noexcept {
  Loose& loose = loose_[this_worker];
  while (loose.n != 0) {
    EndFrame(PageOf(static_cast<const rte_mbuf*>(loose.mbufs[--loose.n])->buf_addr));
  }
}

int BufferPool::OpsPopulate(rte_mempool* mempool, unsigned max, void*, rte_iova_t, std::size_t,
                            rte_mempool_populate_obj_cb_t* added, void* argument) {
  auto* const self = static_cast<BufferPool*>(mempool->pool_config);
  for (unsigned frame = 0; frame < max; frame++) {
    added(mempool, argument, self->MbufAt(frame), RTE_BAD_IOVA);
    self->PinMbuf(frame);
  }
  std::vector<void*> pages(max / self->frames_per_page_);
  for (std::uint32_t page = 0; page < pages.size(); page++) {
    pages[page] = self->MbufOf(page);
    self->Renew(page);
  }
  self->pages_ = std::make_unique<PagePool>(pages);
  return static_cast<int>(max);
}

}  // namespace rxtoken
