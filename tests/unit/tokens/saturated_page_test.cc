// SPDX-License-Identifier: Apache-2.0
// What happens to a page that is lent more often than its count can say.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tests/unit/tokens/fakes.h"
#include "tokens/lane.h"
#include "tokens/page_table.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kPage = 3;

struct RxSocket {
  SlotTable slots;
  TestRings rings;
  Lane lane{0, &slots, rings.descriptors(), rings.returns()};
  LaneReader reader{rings.descriptors(), rings.returns()};
};

// One worker, and two rx sockets that it lends the same pages to.
class SaturatedPage : public testing::Test {
 protected:
  void Lend(RxSocket& socket, std::uint32_t page, std::uint32_t times) {
    const LendItem item = Item(page);
    for (std::uint32_t i = 0; i < times; i++) {
      if (socket.lane.Room(1) == 0) {
        socket.lane.Publish();
        ReadAll(socket.reader);
      }
      ASSERT_EQ(socket.lane.Room(1), 1u);
      ASSERT_TRUE(socket.lane.Lend(table_, std::span(&item, 1), 0));
    }
  }
  std::uint32_t Return(RxSocket& socket, std::uint32_t page, std::uint32_t times) {
    const std::uint32_t token = Token(0, page);
    std::uint32_t accepted = 0;
    for (std::uint32_t i = 0; i < times; i++) {
      accepted += socket.lane.Return(std::span(&token, 1), recycler_);
    }
    return accepted;
  }
  std::uint32_t lent(std::uint32_t page) const {
    return PageTable::Lent(table_.cells()[page].load());
  }

  const PageTable table_{1, 16, nullptr};
  RxSocket one_;
  RxSocket two_;
  TestRecycler recycler_;
};

TEST_F(SaturatedPage, OneLessThanTheLimitIsExact) {
  Lend(one_, kPage, PageTable::kMaxLent - 2);
  Lend(two_, kPage, 1);
  EXPECT_EQ(lent(kPage), PageTable::kMaxLent - 1);

  EXPECT_EQ(Return(one_, kPage, PageTable::kMaxLent), PageTable::kMaxLent - 2);
  EXPECT_EQ(recycler_.count(), 0u);
  EXPECT_EQ(Return(two_, kPage, 1), 1u);
  EXPECT_EQ(recycler_.count(), 1u);
  EXPECT_EQ(table_.saturated(), 0u);
}

TEST_F(SaturatedPage, IsCountedOnceAndNeverFreed) {
  Lend(one_, kPage, PageTable::kMaxLent - 1);
  Lend(two_, kPage, 10);
  EXPECT_EQ(table_.saturated(), 1u);

  EXPECT_EQ(Return(one_, kPage, PageTable::kMaxLent), PageTable::kMaxLent - 1);
  EXPECT_EQ(Return(two_, kPage, 20), 10u);
  EXPECT_EQ(recycler_.count(), 0u);
  EXPECT_EQ(lent(kPage), PageTable::kMaxLent);
}

TEST_F(SaturatedPage, IsNotFreedByASweepEither) {
  Lend(one_, kPage, PageTable::kMaxLent);
  Lend(one_, kPage + 1, 1);

  EXPECT_TRUE(one_.lane.Sweep(1000, recycler_));
  EXPECT_EQ(one_.lane.outstanding(), 0u);
  EXPECT_EQ(recycler_.pages(1), std::vector<std::uint32_t>{kPage + 1});
}

TEST_F(SaturatedPage, EachRxSocketStillReturnsWhatItHoldsAndNoMore) {
  Lend(one_, kPage, PageTable::kMaxLent + 5);
  Lend(two_, kPage, 2);

  EXPECT_EQ(Return(two_, kPage, 3), 2u);
  EXPECT_EQ(Return(one_, kPage, PageTable::kMaxLent + 6), PageTable::kMaxLent + 5);
  EXPECT_EQ(one_.slots.in_use() + two_.slots.in_use(), 0u);
}

TEST_F(SaturatedPage, HarmsNoOtherPage) {
  Lend(one_, kPage, PageTable::kMaxLent);
  Lend(one_, kPage + 1, 2);

  EXPECT_EQ(Return(one_, kPage + 1, 2), 2u);
  EXPECT_EQ(recycler_.pages(1), std::vector<std::uint32_t>{kPage + 1});
}

}  // namespace
}  // namespace rxtoken
