// SPDX-License-Identifier: Apache-2.0
// buffer_pool.h - a binding's buffer as a DPDK mempool: mbuf i receives into the i-th frame's
// place, one or several to a page.
//
// The mbufs are pinned to their places for life. Their memory is ours and lies in one piece,
// so that page and mbuf are found from each other by arithmetic, and a large buffer needs
// nothing of DPDK's own memory. The mempool's operations are a PagePool.
//
// The pool deals in pages. Of a page with several frames, those that were not asked for yet
// wait beside the worker's stack, so that no other worker ever has a frame of the page; and
// the page goes back when its last frame has. See page_table.h for how that is counted.
//
// Memory: 192 bytes for each mbuf, plus PageTable and PagePool.
#pragma once

#include <rte_mbuf.h>
#include <rte_mempool.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "dataplane/buffer.h"
#include "tokens/abi/status.h"
#include "tokens/demand_zero.h"
#include "tokens/held.h"
#include "tokens/page_pool.h"
#include "tokens/page_table.h"

namespace rxtoken {

class BufferPool {
 public:
  static constexpr std::uint32_t kColours = 16;
  static constexpr std::uint32_t kMinFrameBytes = 2048;
  static constexpr std::uint32_t kMaxFramesPerPage = kMaxPageBytes / kMinFrameBytes;

  // `id` is the binding's; `frames_per_page` a power of two that leaves each at least
  // kMinFrameBytes. Errors: kResourceExhausted
  static Result<std::unique_ptr<BufferPool>> Create(std::unique_ptr<Buffer> buffer,
                                                    std::uint32_t id,
                                                    std::uint32_t frames_per_page = 1);
  ~BufferPool();

  // The pool behind `mempool`, if it is one of these; else nullptr.
  static BufferPool* Of(const rte_mempool* mempool) noexcept;

  // Bytes of a frame's place that the frame cannot use: the mbuf's headroom, and what the
  // place's colour may shift it by.
  static constexpr std::uint32_t OverheadBytes(std::uint32_t frame_bytes) noexcept {
    return RTE_PKTMBUF_HEADROOM + ColourBytes(kColours - 1, frame_bytes);
  }
  // Frames start at 16 different lines: with all headers at the same place of 4 KiB they
  // share one set of the first-level cache (64 B frames: 12.95 -> 9.72 ns). 2 KiB have no
  // room to spare.
  static constexpr std::uint32_t ColourBytes(std::uint32_t frame,
                                             std::uint32_t frame_bytes) noexcept {
    return frame_bytes < 4096 ? 0 : frame % kColours * 64;
  }

  rte_mempool* mempool() const noexcept { return mempool_; }
  Buffer& buffer() const noexcept { return *buffer_; }
  const Held<Buffer>& memory() const noexcept { return buffer_; }  // to keep it
  const PageTable& table() const noexcept { return table_; }
  PagePool& pages() noexcept { return *pages_; }
  std::uint32_t frames_per_page() const noexcept { return frames_per_page_; }
  std::uint32_t frame_bytes() const noexcept { return 1u << frame_shift_; }
  // Of a frame, that fit into one place.
  std::uint32_t room_bytes() const noexcept { return frame_bytes() - OverheadBytes(frame_bytes()); }

  // How many of `wanted` mbufs the calling worker can have for certain, whatever others do.
  std::uint32_t Reserve(std::uint32_t wanted) noexcept;

  // A frame of the page was lent as often as it will be, perhaps never: the page goes back
  // unless something of it is lent, or may still be filled. By the worker that received it.
  void EndFrame(std::uint32_t page) noexcept {
    if (frames_per_page_ != 1) return DropShare(page);
    if (PageTable::Lent(table_.cells()[page].load(std::memory_order_relaxed)) == 0) FreePage(page);
  }
  // Keeps the page although nothing of it is lent, until DropShare(). By the same worker.
  void TakeShare(std::uint32_t worker, std::uint32_t page) noexcept;
  void DropShare(std::uint32_t page) noexcept;
  // Makes the page that recycling is about to push as new.
  void Renew(std::uint32_t page) const noexcept {
    if (frames_per_page_ != 1) [[unlikely]]
      table_.cells()[page].store(frames_per_page_, std::memory_order_relaxed);
  }
  // The frames that wait beside the calling worker's stack will not be asked for.
  void DropLoose() noexcept;

  // The binding was unbound: what the driver still fills is not lent any more. [control]
  bool draining() const noexcept { return draining_.load(std::memory_order_relaxed); }
  void set_draining() noexcept { draining_.store(true, std::memory_order_relaxed); }

  // Whether frames are written by this CPU, so that their first line is worth fetching
  // before the page is used again. [control]
  bool copied_into() const noexcept { return copied_into_.load(std::memory_order_relaxed); }
  void set_copied_into(bool copied_into) noexcept {
    copied_into_.store(copied_into, std::memory_order_relaxed);
  }

  // Where a piece of a frame lies.
  std::uint32_t PageOf(const void* data) const noexcept {
    return static_cast<std::uint32_t>(
        static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(data) - buffer_data_) >>
        page_shift_);
  }
  std::uint32_t OffsetOf(const void* data) const noexcept {
    return static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(data) - buffer_data_) &
           page_mask_;
  }
  // That of the frame which has a byte there.
  rte_mbuf* MbufOf(std::uint32_t page, std::uint32_t offset) const noexcept {
    return MbufAt(std::size_t{page} * frames_per_page_ + (offset >> frame_shift_));
  }
  // The page's first.
  rte_mbuf* MbufOf(std::uint32_t page) const noexcept {
    return MbufAt(std::size_t{page} * frames_per_page_);
  }

 private:
  // One line for the mempool's object header and the external buffer's record, then the
  // two lines of the mbuf. A stride of three lines also spreads the mbufs over all sets of
  // the first-level cache, which DPDK's own four do not.
  static constexpr std::size_t kMbufStride = 192;
  static constexpr std::size_t kMbufOffset = 64;

  BufferPool(std::unique_ptr<Buffer> buffer, std::uint32_t id, std::uint32_t frames_per_page);

  // Of a page with several frames, what the worker that popped it has not used yet.
  struct alignas(kWriterAlignBytes) Loose {
    std::uint32_t n = 0;
    std::array<void*, kMaxFramesPerPage> mbufs;
  };

  rte_mbuf* MbufAt(std::size_t frame) const noexcept {
    return reinterpret_cast<rte_mbuf*>(mbufs_.data() + frame * kMbufStride + kMbufOffset);
  }
  void PinMbuf(std::uint32_t frame) noexcept;
  void FreePage(std::uint32_t page) noexcept;
  bool PopFrames(Loose& loose, void** out, std::uint32_t n) noexcept;

  // rte_mempool_ops
  static const int kOpsIndex;  // of our operations, as DPDK numbers them; negative: it is full
  static int OpsAlloc(rte_mempool* mempool);
  static void OpsFree(rte_mempool* mempool);
  static int OpsPush(rte_mempool* mempool, void* const* objects, unsigned n);
  static int OpsPop(rte_mempool* mempool, void** objects, unsigned n);
  static unsigned OpsCount(const rte_mempool* mempool);
  static int OpsPopulate(rte_mempool* mempool, unsigned max, void* memory, rte_iova_t iova,
                         std::size_t bytes, rte_mempool_populate_obj_cb_t* added, void* argument);

  const Held<Buffer> buffer_;
  const std::uint8_t* buffer_data_;
  unsigned page_shift_;
  std::uint32_t page_mask_;
  std::uint32_t frames_per_page_;
  unsigned frame_shift_;
  std::atomic<bool> copied_into_{true};
  std::atomic<bool> draining_{false};
  DemandZeroArray<std::uint8_t> mbufs_;
  rte_mempool* mempool_ = nullptr;
  PageTable table_;
  std::unique_ptr<PagePool> pages_;
  std::mutex outside_mutex_;
  std::array<Loose, kMaxWorkers + 1> loose_;  // the last is for threads that are no workers
};

// Gives pages back to their pools (see Recycler in lane.h). A page that comes back is the
// next to be used, so its mbuf is fetched for writing now (64 B frames: 16.0 -> 13.5 ns).
class PageRecycler {
 public:
  class Run {
   public:
    explicit Run(BufferPool& pool) noexcept : pool_(pool), payload_(pool.copied_into()) {}
    ~Run() { Flush(); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    void operator()(std::uint32_t page) noexcept {
      pool_.Renew(page);
      rte_mbuf* const mbuf = pool_.MbufOf(page);
      __builtin_prefetch(mbuf, 1);
      __builtin_prefetch(reinterpret_cast<char*>(mbuf) + 64, 1);
      if (payload_) __builtin_prefetch(FirstLine(page), 1);
      mbufs_[n_++] = mbuf;
      if (n_ == kLot) Flush();
    }

   private:
    static constexpr unsigned kLot = 64;

    const std::uint8_t* FirstLine(std::uint32_t page) const noexcept {
      const Buffer& buffer = pool_.buffer();
      return buffer.data() + (std::size_t{page} << buffer.page_shift()) + RTE_PKTMBUF_HEADROOM +
             BufferPool::ColourBytes(page * pool_.frames_per_page(), pool_.frame_bytes());
    }
    void Flush() noexcept {
      if (n_ != 0) pool_.pages().Push(mbufs_, n_);
      n_ = 0;
    }

    BufferPool& pool_;
    const bool payload_;
    unsigned n_ = 0;
    void* mbufs_[kLot];
  };

  Run Open(const PageTable& table) noexcept { return Run(*static_cast<BufferPool*>(table.pool())); }
};

}  // namespace rxtoken
