// SPDX-License-Identifier: Apache-2.0
// page_sources.h - where the pages come from that a benchmark lends, and where they go.
//
// Take() fills a batch, false if there are not so many; Open() answers what is called with
// each page that comes back, for the time of one batch.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "bench/micro/harness.h"
#include "tokens/page_pool.h"

namespace rxtoken::micro {

// Every page of a buffer in turn, in order or with a stride that no cache foresees: the
// golden ratio of their number. Pages need not come back.
class EndlessPages {
 public:
  static constexpr bool kNeedsPagesBack = false;

  // `pages` is a power of two.
  EndlessPages(std::uint32_t pages, bool random)
      : shift_(32u - static_cast<unsigned>(std::bit_width(pages) - 1)),
        factor_(random ? 0x9E37'79B1u : 1u << shift_) {}

  bool Take(std::span<std::uint32_t> pages) noexcept {
    const unsigned shift = shift_;
    const std::uint32_t factor = factor_;
    std::uint32_t next = next_;
    for (std::uint32_t& page : pages) page = next++ * factor >> shift;
    next_ = next;
    return true;
  }
  auto Open() noexcept {
    return [](std::uint32_t) {};
  }

 private:
  const unsigned shift_;
  const std::uint32_t factor_;
  std::uint32_t next_ = 0;
};

// rxtokend's page pool. Pages come back in lots of 32, as its PageRecycler makes them.
class PoolOfPages {
 public:
  static constexpr bool kNeedsPagesBack = true;

  explicit PoolOfPages(std::uint32_t pages) : pool_(Objects(pages)) {
    if (!pool_.ok()) Die("not enough memory");
    pool_.SetTakers(1);
  }

  bool Take(std::span<std::uint32_t> pages) noexcept {
    std::array<void*, kMost> objects;
    if (!pool_.Pop(objects.data(), static_cast<std::uint32_t>(pages.size()))) return false;
    for (std::size_t i = 0; i < pages.size(); i++) {
      pages[i] = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(objects[i]));
    }
    return true;
  }

  class Run {
   public:
    explicit Run(PagePool& pool) noexcept : pool_(pool) {}
    ~Run() { pool_.Push(lot_.data(), n_); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    void operator()(std::uint32_t page) noexcept {
      lot_[n_++] = reinterpret_cast<void*>(std::uintptr_t{page});
      if (n_ == lot_.size()) {
        pool_.Push(lot_.data(), n_);
        n_ = 0;
      }
    }

   private:
    PagePool& pool_;
    std::uint32_t n_ = 0;
    std::array<void*, 32> lot_;
  };
  Run Open() noexcept { return Run(pool_); }

 private:
  static constexpr std::size_t kMost = 128;

  // The pool does not look at them: an object is its page's number.
  static std::vector<void*> Objects(std::uint32_t pages) {
    std::vector<void*> objects(pages);
    for (std::uint32_t i = 0; i < pages; i++) {
      objects[i] = reinterpret_cast<void*>(std::uintptr_t{i});
    }
    return objects;
  }

  PagePool pool_;
};

}  // namespace rxtoken::micro
