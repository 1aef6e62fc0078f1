// SPDX-License-Identifier: Apache-2.0
// token_path.cc - the hot functions by themselves, for check.py to take apart and to count.
//
// usage: token_path LOTS LOT
//
// Lends LOTS lots of LOT fragments, and takes each back before the next one; then does the
// same without tokens: it writes the descriptors and hands the pages on, and nothing that
// could be checked is kept. What is between the two is what tokens cost.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "tests/unit/tokens/fakes.h"
#include "tokens/lane.h"
#include "tokens/rcuref.h"

namespace rxtoken {

// The least that can be done with a page that is free.
struct FreePages {
  std::uint32_t* next;
  void operator()(std::uint32_t page) { *next++ = page; }
  FreePages& Open(const PageTable&) { return *this; }
};

[[gnu::noinline]] void Gone() { std::puts("the object is gone"); }

extern "C" {

[[gnu::noinline]] void rcuref_get(Rcuref& references) {
  if (!references.TryGet()) Gone();
}

[[gnu::noinline]] void rcuref_put(Rcuref& references) {
  if (references.Put()) Gone();
}

[[gnu::noinline]] bool lane_lend(Lane& lane, const PageTable& table,
                                 std::span<const LendItem> items) {
  return lane.Lend(table, items, 0);
}

[[gnu::noinline]] std::uint32_t lane_return(Lane& lane, std::span<const std::uint32_t> tokens,
                                            FreePages& pages) {
  return lane.Return(tokens, pages);
}

[[gnu::noinline]] std::uint64_t bare_lend(Descriptor* ring, std::uint32_t mask, std::uint32_t tail,
                                          std::span<const LendItem> items) {
  std::uint64_t bytes = 0;
  for (const LendItem& item : items) {
    const std::uint64_t words[2] = {
        static_cast<std::uint64_t>(DescriptorKind::kFragment) | std::uint64_t{item.flags} << 8 |
            std::uint64_t{item.ip_header_distance} << 16 | std::uint64_t{item.page} << 32,
        std::uint64_t{item.offset} | std::uint64_t{item.length} << 16};
    std::memcpy(static_cast<void*>(&ring[tail & mask]), words, sizeof(words));
    tail++;
    bytes += item.length;
  }
  return bytes;
}

[[gnu::noinline]] void bare_return(std::span<const std::uint32_t> tokens, FreePages& pages) {
  for (const std::uint32_t token : tokens) pages(token & (kMaxPagesPerBuffer - 1));
}

}  // extern "C"
}  // namespace rxtoken

int main(int argc, char** argv) {
  using namespace rxtoken;
  constexpr std::uint32_t kPages = 1024;
  if (argc != 3) return 2;
  const long lots = std::atol(argv[1]);
  const auto lot_size = static_cast<std::uint32_t>(std::atol(argv[2]));
  if (lot_size == 0 || lot_size > kPages / 2) return 2;

  Rcuref references;
  rcuref_get(references);
  rcuref_put(references);

  const PageTable table(1, kPages, nullptr);
  SlotTable slots;
  const TestRings rings;
  Lane lane(0, &slots, rings.descriptors(), rings.returns());
  std::vector<LendItem> items;
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t page = 0; page < kPages; page++) {
    items.push_back(Item(page));
    tokens.push_back(Token(0, page));
  }
  std::vector<std::uint32_t> back(lot_size);
  const auto first = [&](long lot) { return lot % (kPages / lot_size - 1) * lot_size; };

  // One page stays out, so that the slot stays in use.
  if (!lane_lend(lane, table, std::span(&items[kPages - 1], 1))) return 1;
  for (long lot = 0; lot < lots; lot++) {
    FreePages pages{back.data()};
    if (!lane_lend(lane, table, std::span(&items[first(lot)], lot_size))) return 1;
    if (lane_return(lane, std::span(&tokens[first(lot)], lot_size), pages) != lot_size) return 1;
  }
  std::uint64_t bytes = 0;
  for (long lot = 0; lot < lots; lot++) {
    FreePages pages{back.data()};
    bytes += bare_lend(rings.descriptors()->descriptors(), kMinRingEntries - 1,
                       static_cast<std::uint32_t>(lot) * lot_size,
                       std::span(&items[first(lot)], lot_size));
    bare_return(std::span(&tokens[first(lot)], lot_size), pages);
  }
  return lane.counters().bytes == bytes + items[kPages - 1].length ? 0 : 1;
}
