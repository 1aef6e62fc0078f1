// SPDX-License-Identifier: Apache-2.0
// fakes.h - what the tests of tokens/ put around a lane: rings and a page recycler.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <span>
#include <vector>

#include "tokens/abi/lane_reader.h"
#include "tokens/abi/ring.h"
#include "tokens/demand_zero.h"
#include "tokens/lane.h"
#include "tokens/page_table.h"

namespace rxtoken {

// The two rings of one lane, in ordinary memory.
class TestRings {
 public:
  explicit TestRings(std::uint32_t entries = kMinRingEntries, std::uint32_t worker = 0)
      : descriptor_memory_(DescriptorRingBytes(entries)),
        return_memory_(ReturnRingBytes(entries)),
        descriptors_(new (descriptor_memory_.data()) DescriptorRing{}),
        returns_(new (return_memory_.data()) ReturnRing{}) {
    descriptors_->magic = kAbiMagic;
    descriptors_->abi_major = kAbiMajor;
    descriptors_->abi_minor = kAbiMinor;
    descriptors_->entries = entries;
    descriptors_->worker = worker;
  }

  DescriptorRing* descriptors() const { return descriptors_; }
  ReturnRing* returns() const { return returns_; }

 private:
  DemandZeroArray<std::byte> descriptor_memory_;
  DemandZeroArray<std::byte> return_memory_;
  DescriptorRing* const descriptors_;
  ReturnRing* const returns_;
};

// How much of this memory is there; nothing if it is not mapped.
inline std::size_t ResidentBytes(const void* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there((bytes + page - 1) / page);
  if (mincore(const_cast<void*>(data), bytes, there.data()) != 0) return 0;
  std::size_t n = 0;
  for (const unsigned char c : there) n += c & 1;
  return n * page;
}

// Remembers the pages that came back, by binding, in order.
class TestRecycler {
 public:
  struct Run {
    std::vector<std::uint32_t>* pages;
    void operator()(std::uint32_t page) const { pages->push_back(page); }
  };
  Run Open(const PageTable& table) { return {&pages_[table.binding()]}; }

  const std::vector<std::uint32_t>& pages(std::uint32_t binding) { return pages_[binding]; }
  std::size_t count() const {
    std::size_t n = 0;
    for (const auto& [binding, pages] : pages_) n += pages.size();
    return n;
  }
  void Clear() { pages_.clear(); }

 private:
  std::map<std::uint32_t, std::vector<std::uint32_t>> pages_;
};

// All that is published and was not consumed, consumed.
inline std::vector<Descriptor> ReadAll(LaneReader& reader) {
  std::vector<Descriptor> all;
  Descriptor some[16];
  while (const std::size_t n = reader.Poll(some)) {
    all.insert(all.end(), some, some + n);
    reader.Consume(n);
  }
  return all;
}

constexpr std::uint32_t Token(std::uint32_t slot, std::uint32_t page) {
  return PageToken(static_cast<SlotId>(slot), static_cast<PageIndex>(page)).wire();
}

constexpr LendItem Item(std::uint32_t page, std::uint16_t length = 100, std::uint16_t offset = 0,
                        std::uint8_t flags = 0, std::uint8_t ip_header_distance = 0) {
  return {.flags = flags,
          .ip_header_distance = ip_header_distance,
          .page = page,
          .offset = offset,
          .length = length};
}

inline std::uint64_t Refused(Lane& lane, Refusal reason) {
  return lane.counters().refusals[static_cast<std::size_t>(reason)];
}

}  // namespace rxtoken
