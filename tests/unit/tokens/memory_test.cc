// SPDX-License-Identifier: Apache-2.0
// memory_test.cc - what a rx socket's counts cost is what it uses of a binding, and only for as
// long as it uses it.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tests/unit/tokens/fakes.h"
#include "tokens/lane.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"

namespace rxtoken {
namespace {

constexpr std::size_t kMib = 1 << 20;
constexpr std::uint32_t kPageBytes = 4096;
constexpr std::uint32_t kPages = (std::uint64_t{80} << 30) / kPageBytes;
constexpr std::uint32_t kTouched = (1u << 30) / kPageBytes;
constexpr std::size_t kUrefBytes = std::size_t{kPages} * sizeof(Uref);

class MemoryTest : public testing::Test {
 protected:
  // Lends each of the first `pages` pages once.
  void Lend(std::uint32_t pages) {
    for (std::uint32_t page = 0; page < pages;) {
      std::vector<LendItem> items;
      for (std::uint32_t n = lane_.Room(1000); items.size() < n && page < pages; page++) {
        items.push_back(Item(page));
      }
      ASSERT_TRUE(lane_.Lend(table_, items, 0));
      lane_.Publish();
      ReadAll(reader_);
    }
  }
  void ReturnAll(std::uint32_t pages) {
    for (std::uint32_t page = 0; page < pages; page++) {
      const std::uint32_t token = Token(0, page);
      ASSERT_EQ(lane_.Return(std::span(&token, 1), recycler_), 1u);
    }
  }
  std::size_t UrefBytes() const { return ResidentBytes(slots_.urefs(0), kUrefBytes); }

  const PageTable table_{1, kPages, nullptr};
  SlotTable slots_;
  const TestRings rings_{4096};
  Lane lane_{0, &slots_, rings_.descriptors(), rings_.returns()};
  LaneReader reader_{rings_.descriptors(), rings_.returns()};
  TestRecycler recycler_;
};

TEST_F(MemoryTest, OneGibibyteOfAnEightyGibibyteBindingCostsTwoMebibytes) {
  Lend(kTouched);

  EXPECT_EQ(kUrefBytes, 160 * kMib);
  EXPECT_GE(UrefBytes(), 2 * kMib);
  EXPECT_LE(UrefBytes(), 4 * kMib) << "as much as a huge page, if the host prefers those";
}

TEST_F(MemoryTest, TokensThatAreMadeUpCostNothing) {
  Lend(1);
  const std::size_t before = UrefBytes();

  for (std::uint32_t page = 1; page < kPages; page += 1024) {
    const std::uint32_t token = Token(0, page);
    ASSERT_EQ(lane_.Return(std::span(&token, 1), recycler_), 0u);
  }

  EXPECT_EQ(UrefBytes(), before);
}

TEST_F(MemoryTest, AReleasedSlotGivesItsMemoryBack) {
  Lend(kTouched);
  slots_.Trim();
  ReturnAll(kTouched);
  ASSERT_EQ(slots_.in_use(), 0u);
  const void* const urefs = slots_.urefs(0);

  slots_.Trim();
  ASSERT_NE(ResidentBytes(urefs, kUrefBytes), 0u);
  slots_.Trim();

  EXPECT_EQ(ResidentBytes(urefs, kUrefBytes), 0u);
  Lend(10);
  EXPECT_EQ(lane_.Audit(), 10u);
  EXPECT_LT(UrefBytes(), ResidentBytes(table_.cells(), kUrefBytes / 2));
}

}  // namespace
}  // namespace rxtoken
