// SPDX-License-Identifier: Apache-2.0
// token_path.cc - the hot functions by themselves, for check.py to take apart and to count.
//
// usage: token_path LOTS
//
// LOTS times, as a worker does it: takes kLot pages from the pool, lends them in bursts, reads
// the tokens that come back and gives the pages to the pool. Then the same without tokens:
// descriptors are written, pages handed there and back, and nothing is kept that could be
// checked. What is between the two is what tokens cost.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "tests/unit/tokens/fakes.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/lane.h"
#include "tokens/page_pool.h"
#include "tokens/rcuref.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kPages = 1024;
constexpr std::uint32_t kEntries = 1024;
constexpr std::uint32_t kBurst = 32;
constexpr std::uint32_t kLot = 128;

void* Object(std::uint32_t page) { return reinterpret_cast<void*>(std::uintptr_t{page} + 1); }
std::uint32_t PageOf(const void* object) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(object)) - 1;
}

// Gives pages back to the pool in lots, as dataplane/buffer_pool.h does.
class PoolRecycler {
 public:
  class Run {
   public:
    explicit Run(PagePool& pool) : pool_(pool) {}
    ~Run() { Flush(); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    void operator()(std::uint32_t page) {
      objects_[n_++] = Object(page);
      if (n_ == objects_.size()) Flush();
    }

   private:
    void Flush() {
      if (n_ != 0) pool_.Push(objects_.data(), n_);
      n_ = 0;
    }
    PagePool& pool_;
    std::uint32_t n_ = 0;
    std::array<void*, 64> objects_;
  };

  explicit PoolRecycler(PagePool& pool) : pool_(pool) {}
  Run Open(const PageTable&) { return Run(pool_); }

 private:
  PagePool& pool_;
};

[[gnu::noinline]] void Gone() { std::puts("the object is gone"); }

}  // namespace

extern "C" {

[[gnu::noinline]] void rcuref_get(Rcuref& references) {
  if (!references.TryGet()) Gone();
}

[[gnu::noinline]] void rcuref_put(Rcuref& references) {
  if (references.Put()) Gone();
}

[[gnu::noinline]] bool pool_pop(PagePool& pool, void** objects, std::uint32_t n) {
  return pool.Pop(objects, n);
}

[[gnu::noinline]] bool lane_lend(Lane& lane, const PageTable& table,
                                 std::span<const LendItem> items, std::uint64_t time_ns) {
  const bool lent = lane.Lend(table, items, time_ns);
  lane.Publish();
  return lent;
}

[[gnu::noinline]] std::uint32_t lane_drain(Lane& lane, PoolRecycler& recycler) {
  return lane.Drain(recycler, 0);
}

[[gnu::noinline]] std::uint64_t bare_lend(DescriptorRing* ring, std::uint32_t tail,
                                          std::span<const LendItem> items, std::uint64_t time_ns) {
  Descriptor* const descriptors = ring->descriptors();
  const std::uint32_t mask = ring->entries - 1;
  std::uint64_t bytes = 0;
  for (const LendItem& item : items) {
    const std::uint64_t words[2] = {
        static_cast<std::uint64_t>(DescriptorKind::kFragment) | std::uint64_t{item.flags} << 8 |
            std::uint64_t{item.ip_header_distance} << 16 | std::uint64_t{item.page} << 32,
        std::uint64_t{item.offset} | std::uint64_t{item.length} << 16 | time_ns << 32};
    std::memcpy(static_cast<void*>(&descriptors[tail & mask]), words, sizeof(words));
    tail++;
    bytes += item.length;
  }
  ring->tail.store(tail, std::memory_order_release);
  return bytes;
}

[[gnu::noinline]] void bare_drain(ReturnRing* ring, std::uint32_t head, PagePool& pool) {
  std::array<std::uint32_t, kLot> tokens;
  for (std::uint32_t i = 0; i < kLot; i++) {
    tokens[i] = ring->tokens()[(head + i) & (kEntries - 1)].load(std::memory_order_relaxed);
  }
  PoolRecycler::Run give(pool);
  for (const std::uint32_t token : tokens) give(token & (kMaxPagesPerBuffer - 1));
}

}  // extern "C"

namespace {

// One round of everything: kLot pages to the application and back. Whether all went well.
class Loop {
 public:
  Loop() = default;
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  bool Tokens() {
    if (!Take()) return false;
    for (std::uint32_t i = 0; i < kLot; i += kBurst) {
      if (lane_.Room(kBurst) != kBurst ||
          !lane_lend(lane_, table_, std::span(&items_[i], kBurst), ++time_ns_)) {
        return false;
      }
    }
    if (reader_.Poll(read_) != kLot) return false;
    reader_.Consume(kLot);
    for (std::uint32_t i = 0; i < kLot; i++) tokens_[i] = read_[i].token;
    return reader_.Return(tokens_) == kLot && lane_drain(lane_, recycler_) == kLot;
  }
  bool Bare() {
    if (!Take()) return false;
    for (std::uint32_t i = 0; i < kLot; i += kBurst) {
      bytes_ += bare_lend(bare_.descriptors(), tail_ + i, std::span(&items_[i], kBurst), time_ns_);
    }
    for (std::uint32_t i = 0; i < kLot; i++) {
      const std::uint32_t at = (tail_ + i) & (kEntries - 1);
      const std::uint32_t token = bare_.descriptors()->descriptors()[at].token;
      bare_.returns()->tokens()[at].store(token, std::memory_order_relaxed);
    }
    bare_drain(bare_.returns(), tail_, pool_);
    tail_ += kLot;
    return true;
  }

  // One page stays out, so that the slot stays in use, as it does under traffic.
  bool Begin() {
    const LendItem item = Item(kPages - 1);
    void* object = Object(0);
    if (!pool_pop(pool_, &object, 1) || PageOf(object) != 0) return false;
    if (!lane_lend(lane_, table_, std::span(&item, 1), time_ns_)) return false;
    return ReadAll(reader_).size() == 2;
  }
  // The bare loop did as many.
  bool Same() { return lane_.counters().bytes == bytes_ + 100 && pool_.available() == kPages - 1; }

 private:
  static std::vector<void*> Objects() {
    std::vector<void*> objects;
    for (std::uint32_t page = 0; page < kPages; page++) objects.push_back(Object(page));
    return objects;
  }

  bool Take() {
    if (!pool_pop(pool_, objects_.data(), kLot)) return false;
    for (std::uint32_t i = 0; i < kLot; i++) items_[i] = Item(PageOf(objects_[i]));
    return true;
  }

  const TestRings rings_{kEntries};
  const TestRings bare_{kEntries};
  const PageTable table_{1, kPages, nullptr};
  PagePool pool_{Objects()};
  PoolRecycler recycler_{pool_};
  SlotTable slots_;
  Lane lane_{0, &slots_, rings_.descriptors(), rings_.returns()};
  LaneReader reader_{rings_.descriptors(), rings_.returns()};
  std::array<void*, kLot> objects_;
  std::array<LendItem, kLot> items_;
  std::array<Descriptor, kLot> read_;
  std::array<std::uint32_t, kLot> tokens_;
  std::uint64_t time_ns_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint32_t tail_ = 0;
};

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) {
  using namespace rxtoken;
  if (argc != 2) return 2;
  const long lots = std::atol(argv[1]);

  Rcuref references;
  rcuref_get(references);
  rcuref_put(references);

  this_worker = 0;
  Loop loop;
  if (!loop.Begin()) return 1;
  for (long lot = 0; lot < lots; lot++) {
    if (!loop.Tokens()) return 1;
  }
  for (long lot = 0; lot < lots; lot++) {
    if (!loop.Bare()) return 1;
  }
  return loop.Same() ? 0 : 1;
}
