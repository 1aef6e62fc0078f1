// SPDX-License-Identifier: Apache-2.0
#include "tokens/lane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tests/unit/tokens/fakes.h"
#include "tokens/abi/lane_reader.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr std::uint32_t kPages = 64;
constexpr std::uint32_t kEntries = kMinRingEntries;
constexpr std::uint64_t kTime = 0x0000'0005'1234'5678;

// One rx socket: a lane and its application's end for each of some workers.
struct RxSocket {
  explicit RxSocket(std::uint32_t workers, std::uint32_t entries = kEntries) {
    for (std::uint32_t w = 0; w < workers; w++) {
      rings.push_back(std::make_unique<TestRings>(entries, w));
      lanes.push_back(
          std::make_unique<Lane>(w, &slots, rings[w]->descriptors(), rings[w]->returns()));
      readers.emplace_back(rings[w]->descriptors(), rings[w]->returns());
    }
  }

  SlotTable slots;
  std::vector<std::unique_ptr<TestRings>> rings;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<LaneReader> readers;
};

// What a refusal must leave alone.
struct State {
  std::uint64_t outstanding;
  std::uint64_t lent;
  std::uint64_t returned;
  std::uint32_t slots_in_use;
  std::size_t pages_back;
  std::vector<std::uint32_t> cells;
  std::vector<std::uint32_t> urefs;

  friend bool operator==(const State&, const State&) = default;
};

class LaneTest : public testing::Test {
 protected:
  Lane& lane(std::uint32_t worker = 0) { return *socket_.lanes[worker]; }
  LaneReader& reader(std::uint32_t worker = 0) { return socket_.readers[worker]; }
  ReturnRing& returns() { return *socket_.rings[0]->returns(); }

  // Lends, publishes, and has the application read; what it read.
  std::vector<Descriptor> Lend(const PageTable& table, std::initializer_list<LendItem> items,
                               std::uint64_t time = kTime, std::uint32_t worker = 0) {
    EXPECT_TRUE(lane(worker).Lend(table, std::span(items), time));
    lane(worker).Publish();
    return ReadAll(reader(worker));
  }
  std::uint32_t Return(std::initializer_list<std::uint32_t> tokens, std::uint32_t worker = 0) {
    return lane(worker).Return(std::span(tokens), recycler_);
  }
  std::uint32_t Drain(std::uint32_t worker = 0) { return lane(worker).Drain(recycler_, 0); }

  State Snapshot() {
    State state = {.outstanding = lane(0).outstanding() + lane(1).outstanding(),
                   .lent = lane(0).counters().lent + lane(1).counters().lent,
                   .returned = lane(0).counters().returned + lane(1).counters().returned,
                   .slots_in_use = socket_.slots.in_use(),
                   .pages_back = recycler_.count(),
                   .cells = {},
                   .urefs = {}};
    for (std::uint32_t page = 0; page < kPages; page++) {
      state.cells.push_back(table_.cells()[page]);
      for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
        if (socket_.slots.urefs(slot) != nullptr) {
          state.urefs.push_back(socket_.slots.urefs(slot)[page].count);
        }
      }
    }
    return state;
  }
  // `token` is refused for `reason`, by every way, and nothing else changes.
  void ExpectRefused(std::uint32_t token, Refusal reason, std::uint32_t worker = 0) {
    const State before = Snapshot();
    const std::array<std::uint64_t, kRefusals> counters = lane(worker).counters().refusals;

    EXPECT_EQ(lane(worker).Check(token), reason);
    EXPECT_EQ(Return({token}, worker), 0u);
    EXPECT_EQ(reader(worker).Return({&token, 1}), 1u);
    EXPECT_EQ(Drain(worker), 1u);

    EXPECT_EQ(Snapshot(), before);
    std::array<std::uint64_t, kRefusals> expected = counters;
    expected[static_cast<std::size_t>(reason)] += 2;
    EXPECT_EQ(lane(worker).counters().refusals, expected);
  }

  RxSocket socket_{2};
  PageTable table_{7, kPages, nullptr};
  PageTable other_table_{8, kPages, nullptr};
  TestRecycler recycler_;
};

// ---- lending and reading ---------------------------------------------------------------------

TEST_F(LaneTest, AFragmentIsLentReadAndReturned) {
  const std::vector<Descriptor> read = Lend(table_, {Item(5, 1400, 42, kWholeFrame | kCopied, 28)});

  ASSERT_EQ(read.size(), 3u);
  const Descriptor& fragment = read[2];
  EXPECT_EQ(fragment.kind, DescriptorKind::kFragment);
  EXPECT_EQ(fragment.flags, kWholeFrame | kCopied);
  EXPECT_EQ(fragment.ip_header_distance, 28);
  EXPECT_EQ(fragment.token, Token(read[0].slot, 5));
  EXPECT_EQ(fragment.offset, 42);
  EXPECT_EQ(fragment.length, 1400);
  EXPECT_EQ(fragment.time_low, 0x1234'5678u);
  EXPECT_EQ(lane().outstanding(), 1u);
  EXPECT_EQ(lane().Audit(), 1u);

  EXPECT_EQ(reader().Return({&fragment.token, 1}), 1u);
  EXPECT_EQ(Drain(), 1u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(5));
  EXPECT_EQ(lane().outstanding(), 0u);
  EXPECT_EQ(lane().Audit(), 0u);
  EXPECT_EQ(lane().counters().lent, 1u);
  EXPECT_EQ(lane().counters().returned, 1u);
  EXPECT_EQ(lane().counters().bytes, 1400u);
  EXPECT_EQ(PageTable::Lent(table_.cells()[5]), 0u);
}

TEST_F(LaneTest, NothingIsSeenBeforeItIsPublished) {
  const LendItem item = Item(1);
  ASSERT_TRUE(lane().Lend(table_, {&item, 1}, kTime));

  EXPECT_THAT(ReadAll(reader()), IsEmpty());
  EXPECT_EQ(lane().unpublished(), 3u);

  lane().Publish();
  EXPECT_EQ(ReadAll(reader()).size(), 3u);
  EXPECT_EQ(lane().unpublished(), 0u);
}

TEST_F(LaneTest, ItemsKeepTheirOrder) {
  const std::vector<Descriptor> read =
      Lend(table_, {Item(9, 1, 0, kMoreFragments), Item(3, 2, 0, kMoreFragments), Item(6, 0)});

  ASSERT_EQ(read.size(), 5u);
  EXPECT_EQ(read[2].token, Token(0, 9));
  EXPECT_EQ(read[3].token, Token(0, 3));
  EXPECT_EQ(read[4].token, Token(0, 6));
  EXPECT_EQ(read[4].length, 0) << "an empty datagram holds its page too";
  EXPECT_EQ(lane().outstanding(), 3u);
}

TEST_F(LaneTest, AnnouncesTheSlotInFrontOfTheFirstFragmentOnly) {
  const std::vector<Descriptor> first = Lend(table_, {Item(1)});
  const std::vector<Descriptor> second = Lend(table_, {Item(2)});

  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[0].kind, DescriptorKind::kSlotMapped);
  EXPECT_EQ(first[0].binding, table_.binding());
  EXPECT_EQ(first[2].token >> kPageBits, first[0].slot);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].kind, DescriptorKind::kFragment);
}

TEST_F(LaneTest, EachLaneAnnouncesTheSlotForItself) {
  Lend(table_, {Item(1)}, kTime, 0);
  const std::vector<Descriptor> read = Lend(table_, {Item(2)}, kTime, 1);

  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kSlotMapped);
  EXPECT_EQ(read[0].binding, table_.binding());
  EXPECT_EQ(socket_.slots.in_use(), 1u);
}

TEST_F(LaneTest, DoesNotAnnounceTheSlotAgainAfterEverythingCameBack) {
  Lend(table_, {Item(1)});
  Return({Token(0, 1)});
  ASSERT_EQ(socket_.slots.in_use(), 0u);

  const std::vector<Descriptor> read = Lend(table_, {Item(1)});

  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].token, Token(0, 1));
  EXPECT_EQ(socket_.slots.in_use(), 1u);
}

TEST_F(LaneTest, AlternatesBetweenBindingsWithoutAnnouncingThemAgain) {
  Lend(table_, {Item(1)});
  const std::vector<Descriptor> other = Lend(other_table_, {Item(1)});
  ASSERT_EQ(other.size(), 2u);
  EXPECT_EQ(other[0].binding, other_table_.binding());

  EXPECT_EQ(Lend(table_, {Item(2)})[0].token, Token(0, 2));
  EXPECT_EQ(Lend(other_table_, {Item(2)})[0].token, Token(other[0].slot, 2));
}

TEST_F(LaneTest, AnnouncesTheUpperHalfOfTheTimeWhenItChanges) {
  const std::vector<Descriptor> first = Lend(table_, {Item(1)}, 0x5'0000'0000);
  const std::vector<Descriptor> same = Lend(table_, {Item(2)}, 0x5'FFFF'FFFF);
  const std::vector<Descriptor> next = Lend(table_, {Item(3)}, 0x6'0000'0000);

  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[1].kind, DescriptorKind::kTime);
  EXPECT_EQ(first[1].time_high, 5u);
  EXPECT_EQ(first[2].time_low, 0u);
  ASSERT_EQ(same.size(), 1u);
  EXPECT_EQ(same[0].time_low, 0xFFFF'FFFFu);
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next[0].kind, DescriptorKind::kTime);
  EXPECT_EQ(next[0].time_high, 6u);
}

TEST_F(LaneTest, StartsWithTheUpperHalfOfTheTimeAtZero) {
  EXPECT_EQ(Lend(table_, {Item(1)}, 0xFFFF'FFFF).size(), 2u) << "a slot and a fragment";
}

TEST_F(LaneTest, CountsBytesAndFragments) {
  Lend(table_, {Item(1, 10), Item(2, 0), Item(3, 65535)});

  EXPECT_EQ(lane().counters().bytes, 65545u);
  EXPECT_EQ(lane().counters().lent, 3u);
  EXPECT_EQ(lane().counters().returned, 0u);
}

// ---- room in the ring ------------------------------------------------------------------------

TEST_F(LaneTest, HasRoomForAllButTheAnnouncements) {
  EXPECT_EQ(lane().Room(1), 1u);
  EXPECT_EQ(lane().Room(kEntries - 2), kEntries - 2);
  EXPECT_EQ(lane().Room(kEntries), kEntries - 2);
}

TEST_F(LaneTest, HasNoRoomUntilTheApplicationConsumes) {
  std::vector<LendItem> items(kEntries - 2, Item(1));
  ASSERT_TRUE(lane().Lend(table_, items, kTime));
  lane().Publish();
  EXPECT_EQ(lane().Room(1), 0u);

  Descriptor descriptors[3];
  ASSERT_EQ(reader().Poll(descriptors), 3u);
  EXPECT_EQ(lane().Room(1), 0u) << "polled is not consumed";
  reader().Consume(3);

  EXPECT_EQ(lane().Room(1), 1u);
  EXPECT_EQ(lane().Room(9), 1u);
}

class LyingHeadTest : public LaneTest {
 protected:
  // A full ring, of which the application says that it has read up to `head`.
  void SetUp() override {
    std::vector<LendItem> items(kEntries - 2, Item(1));
    ASSERT_TRUE(lane().Lend(table_, items, kTime));
    lane().Publish();
    ASSERT_EQ(lane().Room(1), 0u);
  }
  void Say(std::uint32_t head) { returns().descriptor_head.store(head); }
};

TEST_F(LyingHeadTest, AHeadInFrontOfTheTailIsIgnored) {
  for (const std::uint32_t head : {kEntries + 1, 2 * kEntries, 0x8000'0000u}) {
    Say(head);
    EXPECT_EQ(lane().Room(1), 0u) << head;
  }
}

TEST_F(LyingHeadTest, AHeadThatGoesBackIsIgnored) {
  Say(10);
  ASSERT_EQ(lane().Room(100), 8u);

  for (const std::uint32_t head : {9u, 0u, 0u - 1, 0u - kEntries, 0x8000'000Au}) {
    Say(head);
    EXPECT_EQ(lane().Room(100), 8u) << head;
  }
  Say(11);
  EXPECT_EQ(lane().Room(100), 9u) << "the truth is believed again";
}

TEST_F(LyingHeadTest, AHeadThatIsAheadOfTheApplicationHarmsNobodyElse) {
  Say(kEntries);  // it has read nothing
  ASSERT_EQ(lane().Room(kEntries), kEntries - 2);

  std::vector<LendItem> items(kEntries - 2, Item(2));
  ASSERT_TRUE(lane().Lend(table_, items, kTime));

  EXPECT_EQ(lane().outstanding(), 2 * (kEntries - 2));
  EXPECT_EQ(lane().Audit(), 2 * (kEntries - 2));
}

// ---- the doorbell ----------------------------------------------------------------------------

TEST_F(LaneTest, WantsADoorbellOnlyIfTheApplicationSleepsWhileSomethingIsPublished) {
  EXPECT_FALSE(lane().WantsDoorbell());
  EXPECT_FALSE(reader().Arm());
  EXPECT_FALSE(lane().WantsDoorbell()) << "nothing is published";

  const LendItem item = Item(1);
  ASSERT_TRUE(lane().Lend(table_, {&item, 1}, kTime));
  EXPECT_FALSE(lane().WantsDoorbell()) << "nothing is published";
  lane().Publish();

  EXPECT_TRUE(lane().WantsDoorbell());
  reader().Disarm();
  EXPECT_FALSE(lane().WantsDoorbell());
}

TEST_F(LaneTest, WantsOneDoorbellForEachSleep) {
  reader().Arm();
  const LendItem item = Item(1);
  ASSERT_TRUE(lane().Lend(table_, {&item, 1}, kTime));
  lane().Publish();
  ASSERT_TRUE(lane().WantsDoorbell());

  lane().Rung();
  EXPECT_FALSE(lane().WantsDoorbell());
  EXPECT_EQ(lane().counters().doorbells, 1u);
  reader().Disarm();
  EXPECT_TRUE(reader().Arm());

  EXPECT_TRUE(lane().WantsDoorbell());
}

TEST_F(LaneTest, WantsNoDoorbellOnceEverythingIsRead) {
  Lend(table_, {Item(1)});

  EXPECT_FALSE(reader().Arm());

  EXPECT_FALSE(lane().WantsDoorbell());
}

// ---- returning -------------------------------------------------------------------------------

TEST_F(LaneTest, APageLentTwiceComesBackWithItsSecondReturn) {
  Lend(table_, {Item(5, 10, 0), Item(5, 10, 100)});

  EXPECT_EQ(Return({Token(0, 5)}), 1u);
  EXPECT_THAT(recycler_.pages(7), IsEmpty());
  EXPECT_EQ(lane().outstanding(), 1u);
  EXPECT_EQ(Return({Token(0, 5)}), 1u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(5));
}

TEST_F(LaneTest, APageThatTwoRxSocketsHoldComesBackWithTheLastReturn) {
  RxSocket second(1);
  const LendItem item = Item(5);
  Lend(table_, {item});
  ASSERT_TRUE(second.lanes[0]->Lend(table_, {&item, 1}, kTime));
  EXPECT_EQ(PageTable::Lent(table_.cells()[5]), 2u);

  const std::uint32_t token = Token(0, 5);
  EXPECT_EQ(Return({token}), 1u);
  EXPECT_EQ(recycler_.count(), 0u);
  ExpectRefused(token, Refusal::kSlotNotInUse);  // no way to take the other's
  EXPECT_EQ(second.lanes[0]->Return({&token, 1}, recycler_), 1u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(5));
}

TEST_F(LaneTest, PagesComeBackInTheOrderOfTheReturns) {
  Lend(table_, {Item(1), Item(2), Item(3)});

  EXPECT_EQ(Return({Token(0, 2), Token(0, 3), Token(0, 1)}), 3u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(2, 3, 1));
}

TEST_F(LaneTest, ABatchMayMixBindings) {
  Lend(table_, {Item(1), Item(2)});
  Lend(other_table_, {Item(1), Item(2)});

  EXPECT_EQ(Return({Token(0, 1), Token(1, 2), Token(0, 2), Token(1, 1)}), 4u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(1, 2));
  EXPECT_THAT(recycler_.pages(8), ElementsAre(2, 1));
  EXPECT_EQ(socket_.slots.in_use(), 0u);
}

TEST_F(LaneTest, ABatchIsAcceptedAroundWhatIsRefused) {
  Lend(table_, {Item(1), Item(2)});

  EXPECT_EQ(Return({Token(0, 1), Token(0, 1), Token(31, 1), Token(0, kPages), Token(0, 2)}), 2u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(1, 2));
  EXPECT_EQ(Refused(lane(), Refusal::kNotHeld), 1u);
  EXPECT_EQ(Refused(lane(), Refusal::kSlotNotInUse), 1u);
  EXPECT_EQ(Refused(lane(), Refusal::kOutOfRange), 1u);
}

TEST_F(LaneTest, CheckAcceptsWhatIsHeldAndDoesNothing) {
  Lend(table_, {Item(1)});
  const State before = Snapshot();

  EXPECT_EQ(lane().Check(Token(0, 1)), Refusal::kCount);

  EXPECT_EQ(Snapshot(), before);
}

TEST_F(LaneTest, ReservesATokenAsOftenAsItIsHeld) {
  Lend(table_, {Item(1), Item(1), Item(2)});

  EXPECT_EQ(lane().Reserve(Token(0, 1)), Refusal::kCount);
  EXPECT_EQ(lane().Reserve(Token(0, 1)), Refusal::kCount);
  EXPECT_EQ(lane().Reserve(Token(0, 1)), Refusal::kNotHeld);
  EXPECT_EQ(Return({Token(0, 1)}), 0u) << "nor can it be returned otherwise";
}

TEST_F(LaneTest, ACancelledReservationChangesNothing) {
  Lend(table_, {Item(1), Item(1), Item(2)});
  const State before = Snapshot();
  const std::array reserved = {Token(0, 1), Token(0, 2), Token(0, 1)};
  for (const std::uint32_t token : reserved) ASSERT_EQ(lane().Reserve(token), Refusal::kCount);

  lane().Cancel(reserved);

  EXPECT_EQ(Snapshot(), before);
  EXPECT_EQ(Return({Token(0, 1), Token(0, 1), Token(0, 2)}), 3u);
}

TEST_F(LaneTest, ACommittedReservationIsAReturn) {
  Lend(table_, {Item(1), Item(1), Item(2)});
  const std::array reserved = {Token(0, 1), Token(0, 2), Token(0, 1)};
  for (const std::uint32_t token : reserved) ASSERT_EQ(lane().Reserve(token), Refusal::kCount);
  Lend(table_, {Item(2)});  // meanwhile

  lane().Commit(reserved, recycler_);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(1));
  EXPECT_EQ(lane().outstanding(), 1u);
  EXPECT_EQ(lane().Audit(), 1u);
}

TEST_F(LaneTest, RefusesATokenOfASlotThatIsNotInUse) {
  ExpectRefused(Token(0, 0), Refusal::kSlotNotInUse);
  Lend(table_, {Item(1)});
  ExpectRefused(Token(1, 1), Refusal::kSlotNotInUse);
  ExpectRefused(Token(31, kMaxPagesPerBuffer - 1), Refusal::kSlotNotInUse);
}

TEST_F(LaneTest, RefusesASecondReturnOfTheOnlyFragment) {
  Lend(table_, {Item(1)});
  ASSERT_EQ(Return({Token(0, 1)}), 1u);

  ExpectRefused(Token(0, 1), Refusal::kSlotNotInUse);
}

TEST_F(LaneTest, RefusesAPageThatTheBufferDoesNotHave) {
  Lend(table_, {Item(kPages - 1)});

  ExpectRefused(Token(0, kPages), Refusal::kOutOfRange);
  ExpectRefused(Token(0, kMaxPagesPerBuffer - 1), Refusal::kOutOfRange);
}

TEST_F(LaneTest, RefusesATokenOfAnotherWorker) {
  Lend(table_, {Item(1)}, kTime, 0);
  Lend(table_, {Item(2)}, kTime, 1);

  ExpectRefused(Token(0, 2), Refusal::kWrongOwner, 0);
  ExpectRefused(Token(0, 1), Refusal::kWrongOwner, 1);

  EXPECT_EQ(Return({Token(0, 1)}, 0), 1u);
  EXPECT_EQ(Return({Token(0, 2)}, 1), 1u);
}

TEST_F(LaneTest, RefusesAPageThatWasNeverLent) {
  Lend(table_, {Item(1)});

  ExpectRefused(Token(0, 2), Refusal::kWrongOwner);
}

TEST_F(LaneTest, RefusesASecondReturnWhileOtherFragmentsAreOut) {
  Lend(table_, {Item(1), Item(2)});
  ASSERT_EQ(Return({Token(0, 1)}), 1u);

  ExpectRefused(Token(0, 1), Refusal::kNotHeld);
}

TEST_F(LaneTest, RefusesAPageThatOnlyAnotherRxSocketHolds) {
  RxSocket second(1);
  const LendItem item = Item(2);
  Lend(table_, {Item(1)});
  ASSERT_TRUE(second.lanes[0]->Lend(table_, {&item, 1}, kTime));

  ExpectRefused(Token(0, 2), Refusal::kNotHeld);
  EXPECT_EQ(second.lanes[0]->Audit(), 1u);
}

TEST_F(LaneTest, RefusesAPageThatAnotherWorkerIsAboutToLend) {
  // Worker 0 had page 2 before, and worker 1 has it now. What a forged return on worker 0
  // can see while worker 1 lends: the cell as it was, the uref as it will be.
  Lend(table_, {Item(2), Item(3)}, kTime, 0);
  ASSERT_EQ(Return({Token(0, 2)}), 1u);
  socket_.slots.urefs(0)[2].count.store(1);

  ExpectRefused(Token(0, 2), Refusal::kNotHeld);
  EXPECT_EQ(lane().Audit(), 1u);
  EXPECT_TRUE(lane().Sweep(1000, recycler_));

  EXPECT_EQ(socket_.slots.urefs(0)[2].count.load(), 1u);
  EXPECT_EQ(table_.cells()[2].load(), PageTable::OwnerBits(0));
  EXPECT_THAT(recycler_.pages(7), ElementsAre(2, 3)) << "2 once, by its return";
}

TEST_F(LaneTest, DrainsNoMoreThanItsLimitAtATime) {
  RxSocket socket(1, 512);
  std::vector<std::uint32_t> tokens(400, Token(3, 1));
  ASSERT_EQ(socket.readers[0].Return(tokens), 400u);

  EXPECT_EQ(socket.lanes[0]->Drain(recycler_, 0), Lane::kDrainTokens);
  EXPECT_EQ(socket.lanes[0]->Drain(recycler_, 0), 400 - Lane::kDrainTokens);
  EXPECT_EQ(socket.lanes[0]->Drain(recycler_, 0), 0u);
  EXPECT_EQ(Refused(*socket.lanes[0], Refusal::kSlotNotInUse), 400u);
}

TEST_F(LaneTest, DrainingMakesRoomForMoreReturns) {
  const std::vector<std::uint32_t> tokens(kEntries, Token(3, 1));
  ASSERT_EQ(reader().Return(tokens), kEntries);
  ASSERT_EQ(reader().Return(tokens), 0u);

  EXPECT_EQ(Drain(), kEntries);

  EXPECT_EQ(reader().Return(tokens), kEntries);
}

TEST_F(LaneTest, SamplesForHowLongThePagesOfALotWereHeld) {
  constexpr std::uint64_t kTick = HoldClockNs(1);
  Lend(table_, {Item(1), Item(2)}, 10 * kTick);
  Lend(table_, {Item(3)}, 12 * kTick);
  const auto drain = [&](std::initializer_list<std::uint32_t> tokens, std::uint64_t now) {
    EXPECT_EQ(reader().Return(std::span(tokens)), tokens.size());
    EXPECT_EQ(lane().Drain(recycler_, now), tokens.size());
  };

  drain({Token(0, 1), Token(0, 2)}, 15 * kTick);
  drain({Token(0, 3)}, 13 * kTick - 1);
  drain({Token(0, 3)}, 13 * kTick);  // is refused

  std::array<std::uint64_t, kHoldBuckets> expected = {};
  expected[3] = 1;  // 5 ticks
  expected[0] = 1;
  EXPECT_EQ(lane().counters().hold_times, expected);
  EXPECT_EQ(HoldBucket(1), 1u);
  EXPECT_EQ(HoldBucket(0xFFFF'FFFF), kHoldBuckets - 1);
}

TEST_F(LaneTest, RefusesATailThatIsFurtherAheadThanTheRingIsLong) {
  Lend(table_, {Item(1)});
  std::uint64_t refused = 0;
  for (const std::uint32_t tail : {kEntries + 1, 0x8000'0000u, 0u - 1}) {
    const State before = Snapshot();
    returns().tail.store(tail);

    EXPECT_EQ(Drain(), 0u) << tail;
    EXPECT_EQ(Drain(), 0u) << "it is refused once";

    EXPECT_EQ(Refused(lane(), Refusal::kBadRing), ++refused);
    EXPECT_EQ(Snapshot(), before);
  }
}

TEST_F(LaneTest, ATailThatGoesBackIsRefused) {
  std::vector<std::uint32_t> tokens(10, Token(3, 1));
  reader().Return(tokens);
  ASSERT_EQ(Drain(), 10u);

  returns().tail.store(9);

  EXPECT_EQ(Drain(), 0u);
  EXPECT_EQ(Refused(lane(), Refusal::kBadRing), 1u);
}

TEST_F(LaneTest, ATailWithNothingBehindItReturnsOnlyWhatIsHeld) {
  Lend(table_, {Item(0), Item(1)});
  returns().tail.store(kEntries);  // the ring holds zeros: token (0, 0), 64 times

  EXPECT_EQ(Drain(), kEntries);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(0));
  EXPECT_EQ(Refused(lane(), Refusal::kNotHeld), kEntries - 1);
  EXPECT_EQ(lane().outstanding(), 1u);
}

TEST_F(LaneTest, TakesReturnsAfterALieFromWhereItPointed) {
  Lend(table_, {Item(1), Item(2), Item(3)});
  returns().tail.store(0u - 2);
  ASSERT_EQ(Drain(), 0u);

  // Across the end of the 32-bit index.
  for (std::uint32_t i = 0; i < 3; i++) {
    returns().tokens()[(0u - 2 + i) & (kEntries - 1)].store(Token(0, 1 + i));
  }
  returns().tail.store(1);

  EXPECT_EQ(Drain(), 3u);
  EXPECT_THAT(recycler_.pages(7), ElementsAre(1, 2, 3));
  EXPECT_EQ(socket_.rings[0]->descriptors()->return_head.load(), 1u);
}

// ---- slots -----------------------------------------------------------------------------------

class LaneSlotTest : public LaneTest {
 protected:
  // Bindings 1, 2, 3 and so on, apart from table_.
  const PageTable& Table(std::uint32_t n) {
    while (tables_.size() < n) {
      tables_.push_back(std::make_unique<PageTable>(
          static_cast<std::uint32_t>(100 + tables_.size()), kPages, nullptr));
    }
    return *tables_[n - 1];
  }
  // The slot under which a page of binding `n` is lent; empty: there is none.
  std::optional<std::uint32_t> LendFrom(std::uint32_t n, std::uint32_t worker = 0) {
    const LendItem item = Item(1);
    if (!lane(worker).Lend(Table(n), {&item, 1}, 0)) return std::nullopt;
    lane(worker).Publish();
    last_read_ = ReadAll(reader(worker));
    return last_read_.back().token >> kPageBits;
  }
  bool announced() const { return last_read_.front().kind == DescriptorKind::kSlotMapped; }

  std::vector<Descriptor> last_read_;
  std::vector<std::unique_ptr<PageTable>> tables_;
};

TEST_F(LaneSlotTest, ThirtyTwoBindingsCanBeOutstandingAndNoMore) {
  std::vector<std::uint32_t> slots;
  for (std::uint32_t n = 1; n <= kSlotsPerRxSocket; n++) slots.push_back(LendFrom(n).value());
  std::sort(slots.begin(), slots.end());
  EXPECT_EQ(std::unique(slots.begin(), slots.end()) - slots.begin(), kSlotsPerRxSocket);
  const std::uint64_t lent = lane().counters().lent;

  EXPECT_EQ(LendFrom(33), std::nullopt);

  EXPECT_EQ(lane().counters().lent, lent);
  EXPECT_EQ(lane().unpublished(), 0u);
  EXPECT_EQ(PageTable::Lent(Table(33).cells()[1]), 0u);
}

TEST_F(LaneSlotTest, ASlotThatNamesAnotherBindingNowIsAnnouncedAgain) {
  std::vector<std::uint32_t> slots;
  for (std::uint32_t n = 1; n <= kSlotsPerRxSocket; n++) slots.push_back(LendFrom(n).value());
  ASSERT_EQ(Return({Token(slots[4], 1)}), 1u);
  ASSERT_EQ(Return({Token(slots[2], 1)}), 1u);

  EXPECT_EQ(LendFrom(33), slots[4]) << "released longest ago";
  EXPECT_TRUE(announced());
  EXPECT_EQ(last_read_[0].binding, Table(33).binding());
  EXPECT_EQ(LendFrom(5), slots[2]) << "binding 5 lost its slot";
  EXPECT_TRUE(announced());
  EXPECT_EQ(LendFrom(3), std::nullopt);
}

TEST_F(LaneSlotTest, AnnouncesASlotThatAnotherWorkerGaveAway) {
  const std::uint32_t slot = LendFrom(1, 0).value();
  ASSERT_EQ(Return({Token(slot, 1)}), 1u);
  // Worker 1 uses all the slots, this one for binding 32, and keeps all but this one.
  for (std::uint32_t n = 2; n <= 33; n++) ASSERT_NE(LendFrom(n, 1), std::nullopt);
  ASSERT_EQ(socket_.slots.in_use(), kSlotsPerRxSocket);
  ASSERT_EQ(LendFrom(1, 0), std::nullopt);
  ASSERT_EQ(Return({Token(slot, 1)}, 1), 1u);

  EXPECT_EQ(LendFrom(1, 0), slot);
  EXPECT_TRUE(announced());
}

TEST_F(LaneSlotTest, UsesTheUrefsOfToday) {
  // A slot names binding 1, then 33, then 1 again, while worker 0 looks away.
  const std::uint32_t slot = LendFrom(1, 0).value();
  ASSERT_EQ(Return({Token(slot, 1)}), 1u);
  for (std::uint32_t n = 2; n <= 33; n++) ASSERT_NE(LendFrom(n, 1), std::nullopt);
  ASSERT_EQ(Return({Token(slot, 1)}, 1), 1u);
  // Takes the place of the first urefs, or the third might happen to lie there.
  const UrefArray in_the_way(kPages);
  ASSERT_EQ(LendFrom(1, 1), slot);
  ASSERT_EQ(Return({Token(slot, 1)}, 1), 1u);

  ASSERT_EQ(LendFrom(1, 0), slot);

  EXPECT_EQ(socket_.slots.urefs(slot)[1].count.load(), 1u);
  EXPECT_EQ(Return({Token(slot, 1)}), 1u);
}

TEST_F(LaneSlotTest, WorkersOfOneRxSocketDoNotSeeEachOthersOutstanding) {
  const std::uint32_t slot = LendFrom(1, 0).value();
  const LendItem item = Item(2);
  ASSERT_TRUE(lane(1).Lend(Table(1), {&item, 1}, 0));
  ASSERT_EQ(Return({Token(slot, 1)}, 0), 1u);

  EXPECT_EQ(lane(0).outstanding(), 0u);
  EXPECT_EQ(lane(1).outstanding(), 1u);
  EXPECT_EQ(socket_.slots.in_use(), 1u);
  ExpectRefused(Token(slot, 2), Refusal::kSlotNotInUse, 0);
  EXPECT_EQ(Return({Token(slot, 2)}, 1), 1u);
  EXPECT_EQ(socket_.slots.in_use(), 0u);
}

// ---- sweeping, closing, forgetting -----------------------------------------------------------

TEST_F(LaneTest, SweepTakesEverythingBack) {
  Lend(table_, {Item(3), Item(5), Item(5), Item(kPages - 1)});
  Lend(other_table_, {Item(0)});

  EXPECT_TRUE(lane().Sweep(1000, recycler_));

  EXPECT_THAT(recycler_.pages(7), UnorderedElementsAre(3, 5, kPages - 1));
  EXPECT_THAT(recycler_.pages(8), ElementsAre(0));
  EXPECT_EQ(lane().outstanding(), 0u);
  EXPECT_EQ(lane().counters().returned, 5u);
  EXPECT_EQ(socket_.slots.in_use(), 0u);
  for (std::uint32_t page = 0; page < kPages; page++) {
    EXPECT_EQ(PageTable::Lent(table_.cells()[page]), 0u);
    EXPECT_EQ(socket_.slots.urefs(0)[page].count, 0u);
  }
}

TEST_F(LaneTest, SweepLooksAtNoMorePagesThanItMay) {
  Lend(table_, {Item(0), Item(20), Item(kPages - 1)});
  Lend(other_table_, {Item(10), Item(kPages - 1)});

  // The second binding starts with a new call, or goes on within one.
  std::uint32_t calls = 1;
  while (!lane().Sweep(7, recycler_)) {
    ASSERT_LT(calls++, 2 * kPages);
    EXPECT_EQ(lane().outstanding(), lane().Audit());
  }

  EXPECT_EQ(calls, (2 * kPages + 6) / 7);
  EXPECT_THAT(recycler_.pages(7), ElementsAre(0, 20, kPages - 1));
  EXPECT_THAT(recycler_.pages(8), ElementsAre(10, kPages - 1));
}

TEST_F(LaneTest, SweepWithoutBudgetOnlySaysWhetherItIsDone) {
  EXPECT_TRUE(lane().Sweep(0, recycler_));
  Lend(table_, {Item(0)});

  EXPECT_FALSE(lane().Sweep(0, recycler_));
  EXPECT_EQ(lane().outstanding(), 1u);
  EXPECT_TRUE(lane().Sweep(1, recycler_));
}

TEST_F(LaneTest, SweepSparesOtherRxSocketsAndWorkers) {
  RxSocket second(1);
  const LendItem item = Item(5);
  Lend(table_, {Item(5)}, kTime, 0);
  Lend(table_, {Item(6)}, kTime, 1);
  ASSERT_TRUE(second.lanes[0]->Lend(table_, {&item, 1}, kTime));

  EXPECT_TRUE(lane(0).Sweep(1000, recycler_));

  EXPECT_EQ(recycler_.count(), 0u) << "the other rx socket has page 5";
  EXPECT_EQ(lane(1).Audit(), 1u);
  EXPECT_EQ(second.lanes[0]->Audit(), 1u);
  EXPECT_EQ(PageTable::Lent(table_.cells()[5]), 1u);
  const std::uint32_t token = Token(0, 5);
  EXPECT_EQ(second.lanes[0]->Return({&token, 1}, recycler_), 1u);
  EXPECT_THAT(recycler_.pages(7), ElementsAre(5));
}

TEST_F(LaneTest, CloseTellsTheApplicationWhy) {
  ASSERT_FALSE(reader().closed());

  lane().Close(CloseReason::kDaemonStopped);

  EXPECT_TRUE(reader().closed());
  EXPECT_EQ(socket_.rings[0]->descriptors()->closed.load(),
            static_cast<std::uint32_t>(CloseReason::kDaemonStopped));
}

TEST_F(LaneTest, AForgottenBindingIsAnnouncedLikeANewOne) {
  Lend(table_, {Item(1)});
  Return({Token(0, 1)});

  lane().Forget(table_);
  socket_.slots.Forget(table_.binding());

  ExpectRefused(Token(0, 1), Refusal::kSlotNotInUse);
  // A new binding may lie at the same place in memory.
  std::destroy_at(&table_);
  std::construct_at(&table_, 9u, kPages, nullptr);
  const std::vector<Descriptor> read = Lend(table_, {Item(1)});
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kSlotMapped);
  EXPECT_EQ(read[0].binding, 9u);
}

TEST_F(LaneTest, ForgettingABindingLeavesOthersAlone) {
  Lend(table_, {Item(1)});
  Lend(other_table_, {Item(1)});
  Return({Token(0, 1)});

  lane().Forget(table_);
  socket_.slots.Forget(table_.binding());

  EXPECT_EQ(Lend(other_table_, {Item(2)}).size(), 1u);
  EXPECT_EQ(Return({Token(1, 1), Token(1, 2)}), 2u);
}

// ---- the end of a binding --------------------------------------------------------------------

TEST_F(LaneTest, AnApplicationThatKnowsABindingIsToldOfItsEnd) {
  Lend(table_, {Item(1)});

  EXPECT_TRUE(lane().Unbound(table_));
  EXPECT_FALSE(lane().Unbound(other_table_));
  lane().Publish();

  const std::vector<Descriptor> read = ReadAll(reader());
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kUnbound);
  EXPECT_EQ(read[0].binding, table_.binding());
  EXPECT_EQ(Return({Token(0, 1)}), 1u) << "what is held stays returnable";
}

TEST_F(LaneTest, WhoHoldsPagesOfABindingIsToldThatFewAreFree) {
  EXPECT_FALSE(lane().LowWater(table_));
  Lend(table_, {Item(1)});

  EXPECT_TRUE(lane().LowWater(table_));
  EXPECT_FALSE(lane().LowWater(other_table_));
  lane().Publish();
  const std::vector<Descriptor> read = ReadAll(reader());
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kLowWater);
  EXPECT_EQ(read[0].binding, table_.binding());
  EXPECT_EQ(Return({Token(0, 1)}), 1u);
  EXPECT_FALSE(lane().LowWater(table_)) << "it holds nothing of it any more";
}

TEST_F(LaneTest, WhatIsToldAgainWithoutRoomIsOneEvent) {
  Lend(table_, {Item(1)});
  const LendItem item = Item(2);
  while (lane().Room(1) != 0) lane().Lend(table_, {&item, 1}, kTime);
  for (int i = 0; i < 1000; i++) EXPECT_TRUE(lane().LowWater(table_));
  lane().Publish();
  ReadAll(reader());
  EXPECT_TRUE(lane().WriteEvents());
  lane().Publish();
  const std::vector<Descriptor> read = ReadAll(reader());
  EXPECT_LE(read.size(), 1u) << "besides those that the last places took";
}

TEST_F(LaneTest, RevokingTakesOneBindingsFragmentsBack) {
  Lend(table_, {Item(1), Item(2), Item(2)});
  Lend(other_table_, {Item(1)});

  EXPECT_TRUE(lane().Revoke(table_, 1000, recycler_));
  lane().Publish();

  EXPECT_THAT(recycler_.pages(7), ElementsAre(1, 2));
  EXPECT_THAT(recycler_.pages(8), IsEmpty());
  EXPECT_EQ(lane().counters().revoked, 3u);
  EXPECT_EQ(lane().counters().returned, 3u);
  EXPECT_EQ(lane().outstanding(), 1u);
  const std::vector<Descriptor> read = ReadAll(reader());
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kRevoked);
  EXPECT_EQ(read[0].slot, 0u);
  EXPECT_EQ(read[0].binding, table_.binding());
  ExpectRefused(Token(0, 1), Refusal::kStale);
  EXPECT_EQ(Return({Token(1, 1)}), 1u);
}

TEST_F(LaneTest, RevokingInStepsTellsOnceAlthoughTheApplicationReturnsTheRest) {
  Lend(table_, {Item(1), Item(60)});

  EXPECT_FALSE(lane().Revoke(table_, 10, recycler_));
  EXPECT_EQ(Return({Token(0, 60)}), 1u);
  EXPECT_TRUE(lane().Revoke(table_, 10, recycler_));
  lane().Publish();

  EXPECT_EQ(lane().counters().revoked, 1u);
  EXPECT_EQ(lane().outstanding(), 0u);
  EXPECT_EQ(ReadAll(reader()).size(), 1u);
  // The next sweep starts where that one was left, and finds everything.
  Lend(other_table_, {Item(0), Item(5)});
  EXPECT_TRUE(lane().Sweep(1000, recycler_));
  EXPECT_EQ(lane().outstanding(), 0u);
}

TEST_F(LaneTest, ARevokedSlotIsKeptUntilTheApplicationKnows) {
  Lend(table_, {Item(1)});
  EXPECT_TRUE(lane().Revoke(table_, 1000, recycler_));
  lane().Forget(table_);
  socket_.slots.Forget(table_.binding());
  EXPECT_EQ(socket_.slots.in_use(), 1u);
  const LendItem item = Item(1);
  ASSERT_TRUE(lane().Lend(other_table_, {&item, 1}, kTime));
  lane().Publish();

  // Returned before the event is read: it must not be taken for the new binding's page 1.
  EXPECT_EQ(Return({Token(0, 1)}), 0u);
  const std::vector<Descriptor> read = ReadAll(reader());
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[1].kind, DescriptorKind::kSlotMapped);
  EXPECT_EQ(read[1].slot, 1u);
  EXPECT_EQ(Return({Token(1, 1)}), 1u);

  // The event is read now, but what was returned before is not.
  const std::uint32_t late = Token(0, 2);
  EXPECT_EQ(reader().Return({&late, 1}), 1u);
  const std::uint64_t releases = lane().slot_releases();
  EXPECT_EQ(socket_.slots.in_use(), 1u);
  EXPECT_EQ(Drain(), 1u);
  EXPECT_EQ(lane().slot_releases(), releases + 1);
  EXPECT_EQ(socket_.slots.in_use(), 0u);
}

// ---- leases ----------------------------------------------------------------------------------

// Of bindings 7 and 8, one worker.
class LeaseTest : public LaneTest {
 protected:
  static constexpr std::uint64_t At(std::uint32_t ticks) { return HoldClockNs(ticks); }
  // Pages that the control thread found, some of which it may be wrong about.
  std::uint64_t Expire(std::vector<std::uint32_t> pages, std::uint32_t until,
                       std::uint32_t slot = 0, std::uint32_t binding = 7) {
    const std::uint64_t expired = lane().Expire(slot, binding, pages, until, recycler_);
    lane().Publish();
    return expired;
  }
  std::vector<Descriptor> Read() { return ReadAll(reader()); }
};

TEST_F(LeaseTest, TakesBackWhatIsOldAndSaysSo) {
  Lend(table_, {Item(1), Item(2), Item(2)}, At(100));
  Lend(table_, {Item(3)}, At(101));

  EXPECT_EQ(Expire({1, 2, 3, 4, kPages}, 100), 3u);

  EXPECT_THAT(recycler_.pages(7), ElementsAre(1, 2));
  EXPECT_EQ(lane().counters().revoked, 3u);
  EXPECT_EQ(lane().counters().returned, 3u);
  EXPECT_EQ(lane().outstanding(), 1u);
  EXPECT_EQ(lane().Audit(), 1u);
  const std::vector<Descriptor> read = Read();
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kExpired);
  EXPECT_EQ(read[0].slot, 0u);
  EXPECT_EQ(read[0].binding, 7u);
  EXPECT_EQ(read[0].expired_at, 100u);
  ExpectRefused(Token(0, 1), Refusal::kStale);
  EXPECT_EQ(Return({Token(0, 3)}), 1u) << "it is not old";
}

TEST_F(LeaseTest, APageIsAsOldAsWhatWasLentOfItLast) {
  Lend(table_, {Item(1)}, At(100));
  Lend(table_, {Item(1)}, At(200));

  EXPECT_EQ(Expire({1}, 199), 0u);
  EXPECT_TRUE(Read().empty());
  EXPECT_EQ(Expire({1}, 200), 2u);
}

TEST_F(LeaseTest, NothingExpiresThatIsNotLentAsTheControlThreadBelieved) {
  Lend(table_, {Item(1)}, At(100));
  Lend(table_, {Item(2)}, At(100), 1);
  EXPECT_EQ(Expire({1}, 100, 0, 8), 0u) << "another binding";
  EXPECT_EQ(Expire({1}, 100, 1), 0u) << "another slot";
  EXPECT_EQ(Expire({2}, 100), 0u) << "another worker";
  EXPECT_EQ(Expire({1}, 99), 0u);
  EXPECT_EQ(Return({Token(0, 1)}), 1u);
  EXPECT_EQ(Expire({1}, 100), 0u) << "it came back";
  EXPECT_FALSE(lane().lease_lost());
}

TEST_F(LeaseTest, NothingIsLentUntilTheApplicationKnows) {
  Lend(table_, {Item(1)}, At(100));
  Expire({1}, 100);

  EXPECT_EQ(lane().Allowance(5), 0u);
  EXPECT_EQ(lane().WhyNotMore(), DropReason::kLeaseLost);
  Read();
  EXPECT_EQ(lane().Allowance(5), 5u);
}

// A token that is void must not return what is lent later, although it names the same page.
TEST_F(LeaseTest, WhatIsLentNextHasAnotherSlotUntilLateReturnsAreRead) {
  Lend(table_, {Item(1), Item(2)}, At(100));
  Lend(table_, {Item(3)}, At(300));
  EXPECT_EQ(Expire({1, 2}, 200), 2u);
  const std::uint32_t late = Token(0, 1);
  ASSERT_EQ(reader().Return({&late, 1}), 1u);
  Read();

  const std::vector<Descriptor> read = Lend(table_, {Item(1)}, At(301));
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kSlotMapped);
  EXPECT_EQ(read[0].slot, 1u);
  EXPECT_EQ(read[1].token, Token(1, 1));
  EXPECT_EQ(Drain(), 1u);
  EXPECT_EQ(Refused(lane(), Refusal::kStale), 1u);
  EXPECT_EQ(lane().outstanding(), 2u);

  // The slot is kept as long as something younger is outstanding under it.
  EXPECT_EQ(socket_.slots.in_use(), 2u);
  lane().slot_releases();
  EXPECT_EQ(socket_.slots.in_use(), 2u);
  EXPECT_EQ(Return({Token(0, 3)}), 1u);
  lane().slot_releases();
  EXPECT_EQ(socket_.slots.in_use(), 1u);
  EXPECT_EQ(Return({Token(1, 1)}), 1u);
  EXPECT_TRUE(lane().Settled());

  // And is announced when it is used again.
  const std::vector<Descriptor> again = Lend(other_table_, {Item(1)}, At(302));
  ASSERT_FALSE(again.empty());
  EXPECT_EQ(again[0].kind, DescriptorKind::kSlotMapped);
}

TEST_F(LeaseTest, WhatExpiresLaterIsToldAgain) {
  Lend(table_, {Item(1)}, At(100));
  Lend(table_, {Item(2)}, At(200));
  Lend(table_, {Item(3)}, At(300));
  Expire({1}, 150);
  EXPECT_EQ(Read().size(), 1u);
  EXPECT_EQ(lane().Allowance(1), 1u);

  Expire({2}, 250);
  EXPECT_EQ(lane().Allowance(1), 0u);
  Expire({2, 3}, 300);

  const std::vector<Descriptor> read = Read();
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].expired_at, 250u);
  EXPECT_EQ(read[1].expired_at, 300u);
  EXPECT_EQ(lane().outstanding(), 0u);
  EXPECT_TRUE(lane().Settled());
  EXPECT_EQ(socket_.slots.in_use(), 0u);
}

TEST_F(LeaseTest, OneExpiryInSeveralCallsIsOneEvent) {
  Lend(table_, {Item(1), Item(2), Item(3)}, At(100));
  EXPECT_EQ(Expire({1}, 100), 1u);
  EXPECT_EQ(Expire({2, 3}, 100), 2u);
  EXPECT_EQ(Read().size(), 1u);
}

// The application has stopped: its ring is full, and what it holds expires bit by bit.
TEST_F(LeaseTest, WithoutRoomTheLastEventOfASlotIsEnough) {
  for (std::uint32_t i = 0; i + 1 < kEntries; i++) {
    const LendItem item = Item(i % 8);
    ASSERT_TRUE(lane().Lend(table_, {&item, 1}, At(i)));
  }
  lane().Publish();
  for (std::uint32_t i = 0; i < 8; i++) {
    EXPECT_NE(Expire({0, 1, 2, 3, 4, 5, 6, 7}, kEntries - 9 + i), 0u);
  }
  EXPECT_EQ(lane().outstanding(), 0u);
  EXPECT_TRUE(lane().events_waiting());

  EXPECT_EQ(Read().size(), kEntries);
  EXPECT_TRUE(lane().WriteEvents());
  lane().Publish();
  const std::vector<Descriptor> read = Read();
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].kind, DescriptorKind::kExpired);
  EXPECT_EQ(read[0].expired_at, kEntries - 2);
  EXPECT_EQ(lane().Allowance(1), 1u);
}

TEST_F(LeaseTest, TheBindingsEndIsToldOfASlotThatExpired) {
  Lend(table_, {Item(1)}, At(100));
  Lend(table_, {Item(2)}, At(200));
  Expire({1}, 100);
  EXPECT_TRUE(lane().Unbound(table_));
  EXPECT_TRUE(lane().Revoke(table_, 1000, recycler_));
  lane().Publish();

  const std::vector<Descriptor> read = Read();
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[2].kind, DescriptorKind::kRevoked);
  EXPECT_EQ(lane().counters().revoked, 2u);
  EXPECT_EQ(lane().Allowance(1), 1u);
  EXPECT_TRUE(lane().Settled());
  EXPECT_EQ(socket_.slots.in_use(), 0u);
}

TEST_F(LeaseTest, ThirtyTwoKeptSlotsLeaveNone) {
  for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
    Lend(table_, {Item(slot)}, At(100));
    Lend(table_, {Item(kPages - 1 - slot)}, At(200));
    EXPECT_EQ(Expire({slot}, 100, slot), 1u);
    Read();
  }
  const LendItem item = Item(0);
  EXPECT_FALSE(lane().Lend(table_, {&item, 1}, At(300)));
  EXPECT_EQ(Return({Token(17, kPages - 1 - 17)}), 1u);
  EXPECT_TRUE(lane().Lend(table_, {&item, 1}, At(300)));
}

// Until then it must be visited: a doorbell may have been put off, and another worker may wait
// for the slot.
TEST_F(LaneTest, IsSettledWhenNothingIsOutstandingAndEverythingWasRead) {
  EXPECT_TRUE(lane().Settled());
  Lend(table_, {Item(1)});
  EXPECT_FALSE(lane().Settled());
  EXPECT_EQ(Return({Token(0, 1)}), 1u);
  EXPECT_TRUE(lane().Settled());

  EXPECT_TRUE(lane().Unbound(table_));
  lane().Publish();
  EXPECT_FALSE(lane().Settled());
  EXPECT_EQ(ReadAll(reader()).size(), 1u);
  EXPECT_TRUE(lane().Settled());

  Lend(other_table_, {Item(1)});
  EXPECT_TRUE(lane().Revoke(other_table_, 1000, recycler_));
  lane().Publish();
  EXPECT_FALSE(lane().Settled());
  EXPECT_EQ(socket_.slots.in_use(), 1u);
  EXPECT_EQ(ReadAll(reader()).size(), 1u);
  EXPECT_TRUE(lane().Settled());
  EXPECT_EQ(socket_.slots.in_use(), 0u);

  Lend(table_, {Item(1)});
  Lend(other_table_, {Item(1)});
  EXPECT_TRUE(lane().Revoke(other_table_, 1000, recycler_));
  EXPECT_EQ(socket_.slots.in_use(), 2u);
  lane().Publish();
  ReadAll(reader());
  EXPECT_FALSE(lane().Settled()) << "a fragment is outstanding";
  EXPECT_EQ(socket_.slots.in_use(), 1u) << "but the slot that was revoked is free";
}

TEST_F(LaneTest, EventsWaitForRoomAndComeBeforeAnythingNew) {
  std::vector<LendItem> items(kEntries - 1, Item(1));  // and the slot's announcement
  ASSERT_TRUE(lane().Lend(table_, items, 0));
  lane().Publish();
  EXPECT_TRUE(lane().Unbound(table_));
  EXPECT_TRUE(lane().events_waiting());
  EXPECT_EQ(lane().Room(1), 0u);

  EXPECT_EQ(ReadAll(reader()).size(), kEntries);
  EXPECT_EQ(lane().Room(1), 1u);
  const std::vector<Descriptor> read = Lend(other_table_, {Item(1)});

  EXPECT_FALSE(lane().events_waiting());
  ASSERT_EQ(read.size(), 4u);  // with the time of arrival
  EXPECT_EQ(read[0].kind, DescriptorKind::kUnbound);
  EXPECT_EQ(read[1].kind, DescriptorKind::kSlotMapped);
}

TEST(LaneAllowance, IsWhatMayStillBeHeld) {
  TestRings rings;
  SlotTable slots;
  TestRecycler recycler;
  const PageTable table(7, kPages, nullptr);
  Lane lane(0, &slots, rings.descriptors(), rings.returns(), 3);

  EXPECT_EQ(lane.Allowance(2), 2u);
  EXPECT_EQ(lane.Allowance(32), 3u);
  const std::vector<LendItem> items = {Item(1), Item(2), Item(3)};
  ASSERT_TRUE(lane.Lend(table, items, 0));
  EXPECT_EQ(lane.Allowance(1), 0u);
  const std::uint32_t token = Token(0, 2);
  EXPECT_EQ(lane.Return({&token, 1}, recycler), 1u);
  EXPECT_EQ(lane.Allowance(32), 1u);
}

TEST(LaneAllowance, ItsEndIsToldAgainOnlyAfterHalfCameBack) {
  TestRings rings;
  SlotTable slots;
  TestRecycler recycler;
  const PageTable table(7, kPages, nullptr);
  Lane lane(0, &slots, rings.descriptors(), rings.returns(), 4);
  LaneReader reader(rings.descriptors(), rings.returns());
  const auto told = [&] {
    lane.Publish();
    const std::vector<Descriptor> read = ReadAll(reader);
    return std::count_if(read.begin(), read.end(), [](const Descriptor& descriptor) {
      return descriptor.kind == DescriptorKind::kHeldLimit;
    });
  };
  const std::vector<LendItem> items = {Item(1), Item(2), Item(3), Item(4)};
  ASSERT_TRUE(lane.Lend(table, items, 0));
  EXPECT_EQ(told(), 0);

  for (int i = 0; i < 10; i++) EXPECT_EQ(lane.Allowance(1), 0u);
  EXPECT_EQ(told(), 1);
  std::uint32_t token = Token(0, 1);
  ASSERT_EQ(lane.Return({&token, 1}, recycler), 1u);
  EXPECT_EQ(lane.Allowance(2), 1u);
  EXPECT_EQ(told(), 0) << "three are still held";
  token = Token(0, 2);
  ASSERT_EQ(lane.Return({&token, 1}, recycler), 1u);
  EXPECT_EQ(lane.Allowance(3), 2u);
  EXPECT_EQ(told(), 1);
}

TEST(LaneAllowance, LeavesOutWhatIsNotCounted) {
  TestRings rings;
  SlotTable slots;
  const PageTable table(7, kPages, nullptr);
  const PageTable copies(8, kPages, nullptr);
  Lane lane(0, &slots, rings.descriptors(), rings.returns(), 3);
  lane.set_uncounted(&copies);
  const std::vector<LendItem> items = {Item(1), Item(2)};

  ASSERT_TRUE(lane.Lend(copies, items, 0));
  ASSERT_TRUE(lane.Lend(table, items, 0));

  EXPECT_EQ(lane.Allowance(5), 1u);
}

}  // namespace
}  // namespace rxtoken
