// SPDX-License-Identifier: Apache-2.0
#include "tokens/spsc_ring.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>

#include "tests/interleave/scheduler.h"

namespace rxtoken::interleave {
namespace {

constexpr int kItems = 4;

template <typename Ring>
void PushAll(Ring& ring) {
  for (int item = 0; item < kItems; item++) {
    while (!ring.TryPush(item)) Yield();
  }
}

template <typename Ring>
void PopAll(Ring& ring) {
  for (int expected = 0; expected < kItems; expected++) {
    std::optional<int> item;
    while (!(item = ring.TryPop())) Yield();
    Check(*item == expected, "items arrive in order");
  }
}

// Four items through a ring of two: it fills, empties and wraps.
void Transfer(Scenario& scenario) {
  auto& ring = scenario.Make<SpscRing<int, 2>>();
  scenario.Thread([&] { PushAll(ring); });
  scenario.Thread([&] { PopAll(ring); });
}

TEST(SpscRing, CarriesEverythingInOrder) {
  const Outcome outcome = Explore({.deviations = 4}, Transfer);

  EXPECT_EQ(outcome.failure, "");
  EXPECT_GT(outcome.schedules, 10'000u);
}

TEST(SpscRing, NeedsItsReleases) {
  EXPECT_NE(Explore({.ignore_release = true}, Transfer).failure, "");
}

TEST(SpscRing, IsForOnePopper) {
  const Outcome outcome = Explore({}, [](Scenario& scenario) {
    auto& ring = scenario.Make<SpscRing<int, 4>>();
    auto& popped = scenario.Make<std::array<bool, 2>>();
    ring.TryPush(1);
    for (bool& mine : popped) {
      scenario.Thread([&] { mine = ring.TryPop().has_value(); });
    }
    scenario.Finally([&] { Check(!popped[0] || !popped[1], "one item is popped once"); });
  });

  EXPECT_NE(outcome.failure, "");
}

}  // namespace
}  // namespace rxtoken::interleave
