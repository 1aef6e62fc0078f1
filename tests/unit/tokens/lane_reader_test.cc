// SPDX-License-Identifier: Apache-2.0
#include "tokens/abi/lane_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "tests/unit/tokens/fakes.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint32_t kEntries = kMinRingEntries;

// The worker's side is written by hand, so that each word of the ABI is set on purpose.
class LaneReaderTest : public testing::Test {
 protected:
  void Publish(std::uint32_t token) {
    Descriptor& descriptor = rings_.descriptors()->descriptors()[tail_++ & (kEntries - 1)];
    descriptor = Descriptor{};
    descriptor.kind = DescriptorKind::kFragment;
    descriptor.token = token;
    rings_.descriptors()->tail.store(tail_, std::memory_order_release);
  }
  void PublishRange(std::uint32_t first, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; i++) Publish(first + i);
  }
  std::vector<std::uint32_t> Poll(std::size_t most) {
    std::vector<Descriptor> descriptors(most);
    descriptors.resize(reader_.Poll(descriptors));
    std::vector<std::uint32_t> tokens;
    for (const Descriptor& descriptor : descriptors) tokens.push_back(descriptor.token);
    return tokens;
  }
  std::uint32_t descriptor_head() const { return rings_.returns()->descriptor_head.load(); }
  std::uint32_t return_tail() const { return rings_.returns()->tail.load(); }
  std::uint32_t returned(std::uint32_t index) const {
    return rings_.returns()->tokens()[index & (kEntries - 1)].load();
  }
  void TakeReturned(std::uint32_t up_to) {
    rings_.descriptors()->return_head.store(up_to, std::memory_order_release);
  }

  std::uint32_t tail_ = 0;
  TestRings rings_{kEntries};
  LaneReader reader_{rings_.descriptors(), rings_.returns()};
};

TEST_F(LaneReaderTest, FindsNothingInAFreshRing) {
  EXPECT_THAT(Poll(8), IsEmpty());
  EXPECT_FALSE(reader_.closed());
}

TEST_F(LaneReaderTest, PollsTheOldestFirst) {
  PublishRange(10, 3);

  EXPECT_THAT(Poll(8), ElementsAre(10, 11, 12));
}

TEST_F(LaneReaderTest, PollsNoMoreThanThereIsRoomFor) {
  PublishRange(10, 3);

  EXPECT_THAT(Poll(2), ElementsAre(10, 11));
  EXPECT_THAT(Poll(0), IsEmpty());
}

TEST_F(LaneReaderTest, PollsTheSameAgainUntilItIsConsumed) {
  PublishRange(10, 3);
  Poll(8);
  EXPECT_THAT(Poll(8), ElementsAre(10, 11, 12));

  reader_.Consume(2);

  EXPECT_THAT(Poll(8), ElementsAre(12));
  reader_.Consume(1);
  EXPECT_THAT(Poll(8), IsEmpty());
}

TEST_F(LaneReaderTest, SeesWhatIsPublishedBehindWhatItPolledBefore) {
  PublishRange(10, 2);
  Poll(2);
  PublishRange(12, 2);

  EXPECT_THAT(Poll(8), ElementsAre(10, 11, 12, 13));
}

TEST_F(LaneReaderTest, TellsTheWorkerOnlyWhatIsConsumed) {
  PublishRange(10, 3);
  Poll(8);
  EXPECT_EQ(descriptor_head(), 0u);

  reader_.Consume(2);

  EXPECT_EQ(descriptor_head(), 2u);
}

TEST_F(LaneReaderTest, GoesRoundTheRing) {
  for (std::uint32_t i = 0; i < 10 * kEntries; i += 48) {
    PublishRange(i, 48);

    const std::vector<std::uint32_t> tokens = Poll(kEntries);
    ASSERT_EQ(tokens.size(), 48u);
    for (std::uint32_t k = 0; k < 48; k++) ASSERT_EQ(tokens[k], i + k);
    reader_.Consume(48);
  }
}

TEST_F(LaneReaderTest, ReadsAFullRing) {
  PublishRange(0, kEntries);

  EXPECT_EQ(Poll(2 * kEntries).size(), kEntries);
}

TEST_F(LaneReaderTest, GoesOnWhenTheIndicesWrap) {
  // As after four billion descriptors: both sides stand just below the wrap.
  tail_ = 0u - 3;
  rings_.descriptors()->tail.store(tail_);
  Poll(1);
  reader_.Consume(tail_);
  ASSERT_THAT(Poll(8), IsEmpty());

  PublishRange(10, 6);

  EXPECT_THAT(Poll(2), ElementsAre(10, 11));
  EXPECT_THAT(Poll(8), ElementsAre(10, 11, 12, 13, 14, 15));
  reader_.Consume(6);
  EXPECT_EQ(descriptor_head(), 3u);
  EXPECT_THAT(Poll(8), IsEmpty());
}

TEST_F(LaneReaderTest, QueuesTokensInOrder) {
  const std::uint32_t tokens[] = {7, 8, 9};

  EXPECT_EQ(reader_.Return(tokens), 3u);

  EXPECT_EQ(return_tail(), 3u);
  EXPECT_EQ(returned(0), 7u);
  EXPECT_EQ(returned(1), 8u);
  EXPECT_EQ(returned(2), 9u);
}

TEST_F(LaneReaderTest, QueuesOnlyWhatFindsRoomInTheReturnRing) {
  std::vector<std::uint32_t> tokens(kEntries + 5);
  for (std::uint32_t i = 0; i < tokens.size(); i++) tokens[i] = 100 + i;

  EXPECT_EQ(reader_.Return(tokens), kEntries);
  EXPECT_EQ(reader_.Return(tokens), 0u);
  EXPECT_EQ(return_tail(), kEntries);
  EXPECT_EQ(returned(0), 100u) << "the oldest must not be overwritten";

  TakeReturned(2);
  EXPECT_EQ(reader_.Return(std::span(tokens).subspan(kEntries)), 2u);
  EXPECT_EQ(returned(kEntries), 100 + kEntries);
  EXPECT_EQ(returned(kEntries + 1), 100 + kEntries + 1);
  EXPECT_EQ(returned(2), 102u);
}

TEST_F(LaneReaderTest, ReturnsRoundTheRing) {
  std::uint32_t next = 0;
  for (int round = 0; round < 20; round++) {
    std::vector<std::uint32_t> tokens(40);
    for (std::uint32_t& token : tokens) token = next++;
    ASSERT_EQ(reader_.Return(tokens), 40u);
    for (std::uint32_t i = next - 40; i < next; i++) ASSERT_EQ(returned(i), i);
    TakeReturned(next);
  }
}

TEST_F(LaneReaderTest, ReturningNothingChangesNothing) {
  EXPECT_EQ(reader_.Return({}), 0u);

  EXPECT_EQ(return_tail(), 0u);
}

TEST_F(LaneReaderTest, ArmsWithANewValueEachTime) {
  EXPECT_FALSE(reader_.Arm());
  const std::uint32_t first = rings_.returns()->waiting.load();
  reader_.Disarm();
  EXPECT_EQ(rings_.returns()->waiting.load(), 0u);
  EXPECT_FALSE(reader_.Arm());

  EXPECT_NE(first, 0u);
  EXPECT_NE(rings_.returns()->waiting.load(), 0u);
  EXPECT_NE(rings_.returns()->waiting.load(), first);
}

TEST_F(LaneReaderTest, ArmSaysThatThereIsSomethingAlready) {
  Publish(1);

  EXPECT_TRUE(reader_.Arm());
}

TEST_F(LaneReaderTest, ArmSaysThatThereIsSomethingPolledButNotConsumed) {
  Publish(1);
  Poll(8);
  EXPECT_TRUE(reader_.Arm());
  reader_.Consume(1);

  EXPECT_FALSE(reader_.Arm());
}

TEST_F(LaneReaderTest, ArmDoesNotSleepOnAClosedRing) {
  rings_.descriptors()->closed.store(static_cast<std::uint32_t>(CloseReason::kClosed));

  EXPECT_TRUE(reader_.Arm());
  EXPECT_TRUE(reader_.closed());
}

TEST_F(LaneReaderTest, ReadsOnAfterTheEnd) {
  PublishRange(10, 2);
  rings_.descriptors()->closed.store(static_cast<std::uint32_t>(CloseReason::kDaemonStopped));

  EXPECT_THAT(Poll(8), ElementsAre(10, 11));
}

}  // namespace
}  // namespace rxtoken
