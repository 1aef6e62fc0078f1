// SPDX-License-Identifier: Apache-2.0
#include "tokens/slot_table.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace rxtoken {
namespace {

constexpr std::uint32_t kWorker = 0;
constexpr std::uint32_t kOther = 1;

class SlotTableTest : public testing::Test {
 protected:
  // Bindings are numbered from 1.
  const PageTable& Table(std::uint32_t binding) {
    while (tables_.size() < binding) {
      tables_.push_back(std::make_unique<PageTable>(static_cast<std::uint32_t>(tables_.size() + 1),
                                                    kPages, nullptr));
    }
    return *tables_[binding - 1];
  }
  std::optional<std::uint32_t> Acquire(std::uint32_t binding, std::uint32_t worker = kWorker) {
    return slots_.Acquire(worker, Table(binding));
  }
  // Takes all slots, for bindings 1 to 32; slot of binding b in [b - 1].
  std::vector<std::uint32_t> AcquireAll() {
    std::vector<std::uint32_t> slots;
    for (std::uint32_t binding = 1; binding <= kSlotsPerRxSocket; binding++) {
      slots.push_back(Acquire(binding).value());
    }
    return slots;
  }

  static constexpr std::uint32_t kPages = 64;
  SlotTable slots_;
  std::vector<std::unique_ptr<PageTable>> tables_;
};

TEST_F(SlotTableTest, StartsWithNothingInUse) { EXPECT_EQ(slots_.in_use(), 0u); }

TEST_F(SlotTableTest, GivesEachBindingASlotOfItsOwn) {
  const std::vector<std::uint32_t> slots = AcquireAll();

  EXPECT_EQ(std::set<std::uint32_t>(slots.begin(), slots.end()).size(), kSlotsPerRxSocket);
  EXPECT_EQ(slots_.in_use(), kSlotsPerRxSocket);
}

TEST_F(SlotTableTest, GivesUrefsThatAreZero) {
  const std::uint32_t slot = Acquire(1).value();

  for (std::uint32_t page = 0; page < kPages; page++) EXPECT_EQ(slots_.urefs(slot)[page].count, 0u);
}

TEST_F(SlotTableTest, RefusesTheThirtyThirdBinding) {
  AcquireAll();

  EXPECT_EQ(Acquire(33), std::nullopt);
  EXPECT_EQ(slots_.in_use(), kSlotsPerRxSocket);
}

TEST_F(SlotTableTest, SharesASlotAmongTheWorkersOfABinding) {
  const std::uint32_t slot = Acquire(1, kWorker).value();

  EXPECT_EQ(Acquire(1, kOther), slot);
  EXPECT_EQ(slots_.in_use(), 1u);
}

TEST_F(SlotTableTest, KeepsASlotUntilItsLastWorkerReleasesIt) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  ASSERT_EQ(Acquire(7, kOther), slots[6]);

  slots_.Release(slots[6], kWorker);
  EXPECT_EQ(Acquire(33), std::nullopt);
  slots_.Release(slots[6], kOther);

  EXPECT_EQ(Acquire(33), slots[6]);
}

TEST_F(SlotTableTest, PrefersASlotThatWasNeverUsed) {
  const std::uint32_t first = Acquire(1).value();
  slots_.Release(first, kWorker);

  EXPECT_NE(Acquire(2), first);
  EXPECT_EQ(Acquire(1), first) << "it still names binding 1";
}

TEST_F(SlotTableTest, ReusesTheSlotReleasedLongestAgo) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  for (const std::uint32_t i : {5u, 3u, 9u}) slots_.Release(slots[i], kWorker);

  EXPECT_EQ(Acquire(33), slots[5]);
  EXPECT_EQ(Acquire(34), slots[3]);
  EXPECT_EQ(Acquire(35), slots[9]);
  EXPECT_EQ(Acquire(36), std::nullopt);
}

TEST_F(SlotTableTest, RejoinsASlotThatStillNamesTheBinding) {
  const std::uint32_t slot = Acquire(1).value();
  slots_.urefs(slot)[3].count = 1;
  slots_.urefs(slot)[3].count = 0;
  Uref* const urefs = slots_.urefs(slot);
  slots_.Release(slot, kWorker);

  EXPECT_TRUE(slots_.Rejoin(slot, kWorker, 1));

  EXPECT_EQ(slots_.in_use(), 1u);
  EXPECT_EQ(slots_.urefs(slot), urefs);
}

TEST_F(SlotTableTest, FindsNoSlotThatItIsToldToLeaveOut) {
  const std::uint32_t first = Acquire(1).value();
  const auto second = slots_.Acquire(kWorker, Table(1), 1u << first);
  EXPECT_NE(second, first);
  EXPECT_EQ(slots_.in_use(), 2u);
}

TEST_F(SlotTableTest, DoesNotRejoinASlotThatNamesAnotherBinding) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  slots_.Release(slots[0], kWorker);
  ASSERT_EQ(Acquire(33), slots[0]);

  EXPECT_FALSE(slots_.Rejoin(slots[0], kWorker, 1));
  EXPECT_FALSE(slots_.Rejoin(slots[1], kWorker, 1));
}

TEST_F(SlotTableTest, GivesAReusedSlotFreshUrefs) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  slots_.urefs(slots[0])[5].count = 77;  // must not happen; must not be inherited either
  slots_.Release(slots[0], kWorker);

  ASSERT_EQ(Acquire(33), slots[0]);

  EXPECT_EQ(slots_.urefs(slots[0])[5].count, 0u);
}

TEST_F(SlotTableTest, ForgetsABindingAndTheMemoryOfItsUrefs) {
  const std::uint32_t slot = Acquire(1).value();
  void* const urefs = slots_.urefs(slot);
  unsigned char there = 0;
  ASSERT_EQ(mincore(urefs, 1, &there), 0);
  slots_.Release(slot, kWorker);

  slots_.Forget(1);

  EXPECT_EQ(mincore(urefs, 1, &there), -1);
  EXPECT_EQ(errno, ENOMEM) << "still mapped";
  EXPECT_EQ(slots_.urefs(slot), nullptr);
  EXPECT_FALSE(slots_.Rejoin(slot, kWorker, 1));
}

TEST_F(SlotTableTest, ForgetsOneBindingOnly) {
  const std::uint32_t first = Acquire(1).value();
  const std::uint32_t second = Acquire(2).value();
  slots_.Release(first, kWorker);

  slots_.Forget(1);

  EXPECT_EQ(slots_.in_use(), 1u);
  EXPECT_NE(slots_.urefs(second), nullptr);
  EXPECT_TRUE(slots_.Rejoin(second, kOther, 2));
}

TEST_F(SlotTableTest, AForgottenSlotIsTheNextToBeUsed) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  slots_.Release(slots[4], kWorker);
  slots_.Release(slots[20], kWorker);

  slots_.Forget(21);

  EXPECT_EQ(Acquire(33), slots[20]);
  EXPECT_EQ(Acquire(34), slots[4]);
}

TEST_F(SlotTableTest, TrimsASlotThatIsNotUsedFromOneCallToTheNext) {
  const std::uint32_t slot = Acquire(1).value();
  slots_.Release(slot, kWorker);

  slots_.Trim();
  EXPECT_NE(slots_.urefs(slot), nullptr) << "it was used since the last call";
  slots_.Trim();

  EXPECT_EQ(slots_.urefs(slot), nullptr);
  EXPECT_FALSE(slots_.Rejoin(slot, kWorker, 1));
  const std::uint32_t again = Acquire(1).value();
  EXPECT_EQ(slots_.urefs(again)[0].count, 0u);
}

TEST_F(SlotTableTest, TrimsNoSlotThatIsUsedNowOrWasInBetween) {
  const std::uint32_t used = Acquire(1).value();
  const std::uint32_t was_used = Acquire(2).value();
  slots_.Release(was_used, kWorker);

  for (int i = 0; i < 5; i++) {
    slots_.Trim();
    ASSERT_NE(slots_.urefs(used), nullptr);
    ASSERT_TRUE(slots_.Rejoin(was_used, kWorker, 2));
    slots_.Release(was_used, kWorker);
  }
}

TEST_F(SlotTableTest, ShowsWhatIsHeldOfSlotsThatAreInUse) {
  const std::uint32_t first = Acquire(1).value();
  const std::uint32_t second = Acquire(2, kOther).value();
  const std::uint32_t unused = Acquire(3).value();
  const auto hold = [&](std::uint32_t slot, std::uint32_t page, std::uint32_t count) {
    slots_.urefs(slot)[page].count = count;
    slots_.urefs(slot)[page].lent_at = 100 * slot + page;
  };
  hold(first, 3, 1);
  hold(first, kPages - 1, 2);
  hold(second, 0, 7);
  hold(unused, 1, 1);
  slots_.Release(unused, kWorker);
  using Held = std::array<std::uint32_t, 5>;
  std::vector<Held> held;

  slots_.ForEachHeld([&](auto... each) { held.push_back(Held{each...}); });

  EXPECT_EQ(held, (std::vector<Held>{{first, 1, 3, 1, 100 * first + 3},
                                     {first, 1, kPages - 1, 2, 100 * first + kPages - 1},
                                     {second, 2, 0, 7, 100 * second}}));
}

TEST_F(SlotTableTest, ASlotKeepsItsBindingWhileItIsLookedAt) {
  const std::vector<std::uint32_t> slots = AcquireAll();
  slots_.urefs(slots[6])[3].count = 1;
  const std::uint64_t releases = slots_.releases();

  slots_.ForEachHeld([&](std::uint32_t slot, auto...) {
    EXPECT_EQ(slot, slots[6]);
    slots_.Release(slot, kWorker);
    EXPECT_EQ(Acquire(33), std::nullopt);
    EXPECT_TRUE(slots_.Rejoin(slot, kOther, 7));
    slots_.Release(slot, kOther);
  });

  EXPECT_EQ(slots_.releases(), releases + 3) << "who waits for a slot looks again";
  EXPECT_EQ(Acquire(33), slots[6]);
}

TEST_F(SlotTableTest, RefusesABindingWhoseUrefsFindNoMemory) {
  const PageTable& table = Table(1);
  rlimit old = {};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &old), 0);
  rlimit tight = old;
  tight.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);

  const std::optional<std::uint32_t> slot = slots_.Acquire(kWorker, table);

  setrlimit(RLIMIT_AS, &old);
  EXPECT_EQ(slot, std::nullopt);
  EXPECT_EQ(slots_.in_use(), 0u);
  EXPECT_NE(Acquire(1), std::nullopt);
}

}  // namespace
}  // namespace rxtoken
