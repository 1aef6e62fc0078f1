// SPDX-License-Identifier: Apache-2.0
#include "tokens/saturating_count.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "tests/interleave/scheduler.h"

namespace rxtoken::interleave {
namespace {

// The mistake of looking first: another thread may add between the look and the addition.
class LooksFirst {
 public:
  static constexpr std::int32_t kMax = SaturatingCount::kMax;
  explicit LooksFirst(std::int32_t count) : count_(count) {}
  void Increment() {
    if (count_.load(std::memory_order_relaxed) != kMax) {
      count_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  std::int32_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int32_t> count_;
};

TEST(SaturatingCount, OneDecrementIsTheLastAndSeesEverything) {
  const auto let_go = [](Scenario& scenario) {
    struct State {
      SaturatingCount count{2};
      std::array<int, 3> work = {};
      std::atomic<int> last{0};
    };
    auto& state = scenario.Make<State>();
    const auto decrement = [&state] {
      if (!state.count.Decrement()) return;
      state.last.fetch_add(1, std::memory_order_relaxed);
      Check(state.work[0] + state.work[1] + state.work[2] == 3, "the last sees everything");
    };
    scenario.Thread([=, &state] {
      state.work[0] = 1;
      decrement();
    });
    scenario.Thread([=, &state] {
      state.count.Increment();
      state.work[1] = 1;
      decrement();
      state.work[2] = 1;
      decrement();
    });
    scenario.Finally([&] { Check(state.last == 1, "one decrement is the last"); });
  };

  EXPECT_EQ(Explore({.deviations = 5}, let_go).failure, "");
  EXPECT_NE(Explore({.ignore_release = true}, let_go).failure, "");
}

TEST(SaturatingCount, IsPinnedOnceWhoeverComesFirst) {
  const Outcome outcome = Explore({.deviations = 4}, [](Scenario& scenario) {
    const std::uint64_t before = SaturatingCount::saturations();
    auto& count = scenario.Make<SaturatingCount>(SaturatingCount::kMax - 1);
    for (int i = 0; i < 3; i++) {
      scenario.Thread([&] {
        count.Increment();
        Check(!count.Decrement(), "no decrement is the last");
      });
    }
    scenario.Finally([&, before] {
      const std::uint64_t pinned = SaturatingCount::saturations() - before;
      Check(pinned == (count.saturated() ? 1u : 0u), "it is counted once");
      Check(count.saturated() || count.count() == SaturatingCount::kMax - 1, "or it is exact");
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

TEST(SaturatingCount, NothingIsGainedByLookingFirst) {
  const Outcome outcome = Explore({}, [](Scenario& scenario) {
    auto& count = scenario.Make<LooksFirst>(LooksFirst::kMax - 1);
    for (int i = 0; i < 2; i++) scenario.Thread([&] { count.Increment(); });
    scenario.Finally([&] { Check(count.count() > 0, "it does not wrap"); });
  });

  EXPECT_NE(outcome.failure, "");
}

}  // namespace
}  // namespace rxtoken::interleave
