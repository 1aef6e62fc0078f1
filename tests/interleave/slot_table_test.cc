// SPDX-License-Identifier: Apache-2.0
#include "tokens/slot_table.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tests/interleave/scheduler.h"
#include "tokens/page_table.h"

namespace rxtoken::interleave {
namespace {

constexpr std::uint32_t kPages = 2;

// Two bindings whose workers need a slot, and only one slot that is not taken for good.
struct OneFreeSlot {
  SlotTable slots;
  std::array<PageTable, 2> bindings = {PageTable(1, kPages, nullptr),
                                       PageTable(2, kPages, nullptr)};
  int content = 0;  // of whoever has the slot, if it has it alone
  std::atomic<bool> done{false};

  OneFreeSlot() {
    for (std::uint32_t other = 1; other < kSlotsPerRxSocket; other++) {
      Check(slots.Acquire(15, PageTable(100 + other, kPages, nullptr)).has_value(), "a slot");
    }
  }

  std::uint32_t Acquire(std::uint32_t worker, std::uint32_t binding) {
    for (;;) {
      const auto slot = slots.Acquire(worker, bindings[binding]);
      if (slot) return *slot;
      Yield();
    }
  }

  // Lends a page and takes it back.
  void Use(std::uint32_t slot, std::uint32_t page) {
    Uref* const urefs = slots.urefs(slot);
    for (const std::uint32_t uref : {0u, 1u}) {
      Check(urefs[page].count.load(std::memory_order_relaxed) == uref, "urefs are what we left");
      urefs[page].count.store(uref ^ 1, std::memory_order_relaxed);
    }
  }
};

void TakeTurns(Scenario& scenario, bool release_early) {
  auto& state = scenario.Make<OneFreeSlot>();
  for (std::uint32_t worker = 0; worker < 2; worker++) {
    scenario.Thread([&state, worker, release_early] {
      const std::uint32_t slot = state.Acquire(worker, worker);
      state.content++;
      if (release_early) state.slots.Release(slot, worker);
      state.Use(slot, 0);
      if (!release_early) state.slots.Release(slot, worker);
      if (worker == 0 && state.slots.Rejoin(slot, worker, 1)) {
        state.Use(slot, 0);
        state.slots.Release(slot, worker);
      }
    });
  }
  scenario.Finally(
      [&] { Check(state.slots.in_use() == kSlotsPerRxSocket - 1, "the slot is free again"); });
}

TEST(SlotTable, GivesASlotToOneBindingAtATime) {
  const Outcome outcome = Explore({.deviations = 2, .random = 500},
                                  [](Scenario& scenario) { TakeTurns(scenario, false); });

  EXPECT_EQ(outcome.failure, "");
}

TEST(SlotTable, NeedsItsReleases) {
  const Outcome outcome = Explore({.deviations = 2, .random = 500, .ignore_release = true},
                                  [](Scenario& scenario) { TakeTurns(scenario, false); });

  EXPECT_NE(outcome.failure, "");
}

TEST(SlotTable, MustNotBeReleasedBeforeTheLastReturn) {
  const Outcome outcome = Explore({.deviations = 2, .random = 500},
                                  [](Scenario& scenario) { TakeTurns(scenario, true); });

  EXPECT_NE(outcome.failure, "");
}

// Workers of one binding may share its slot, each with pages of its own, while a slot that
// nobody uses is forgotten.
TEST(SlotTable, IsSharedByWorkersOfABindingUntilItIsForgotten) {
  const Outcome outcome = Explore({.deviations = 1, .random = 3000}, [](Scenario& scenario) {
    auto& state = scenario.Make<OneFreeSlot>();
    scenario.Thread([&] {
      const std::uint32_t slot = state.Acquire(0, 0);
      state.Use(slot, 0);
      state.slots.Release(slot, 0);
      state.done.store(true, std::memory_order_release);
    });
    scenario.Thread([&] {
      const std::uint32_t slot = state.Acquire(1, 0);
      state.Use(slot, 1);
      state.slots.Release(slot, 1);
      while (!state.done.load(std::memory_order_acquire)) Yield();
      state.slots.Forget(1);
    });
    scenario.Thread([&] {
      const std::uint32_t slot = state.Acquire(2, 1);
      state.Use(slot, 0);
      state.slots.Release(slot, 2);
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

// Whoever looks at what is held reads urefs that are there, and of the binding it is told.
TEST(SlotTable, CanBeLookedAtWhileSlotsChangeHands) {
  const Outcome outcome = Explore({.deviations = 1, .random = 500}, [](Scenario& scenario) {
    auto& state = scenario.Make<OneFreeSlot>();
    for (std::uint32_t worker = 0; worker < 2; worker++) {
      scenario.Thread([&state, worker] {
        const std::uint32_t slot = state.Acquire(worker, worker);
        state.Use(slot, worker);
        state.slots.Release(slot, worker);
      });
    }
    scenario.Thread([&] {
      state.slots.ForEachHeld([&](std::uint32_t, std::uint32_t binding, std::uint32_t page,
                                  std::uint32_t count, std::uint32_t) {
        Check(binding == page + 1 && count == 1, "what is held, of the binding whose slot it is");
      });
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

// A worker uses its slot again and again, and now and then finds it trimmed.
TEST(SlotTable, IsTrimmedOnlyWhileNobodyUsesIt) {
  const Outcome outcome = Explore({.deviations = 1, .random = 1000}, [](Scenario& scenario) {
    auto& state = scenario.Make<OneFreeSlot>();
    scenario.Thread([&] {
      for (int i = 0; i < 2; i++) {
        const std::uint32_t slot = state.Acquire(0, 0);
        state.Use(slot, 0);
        state.slots.Release(slot, 0);
        if (state.slots.Rejoin(slot, 0, 1)) {
          state.Use(slot, 1);
          state.slots.Release(slot, 0);
        }
      }
    });
    scenario.Thread([&] {
      for (int i = 0; i < 3; i++) state.slots.Trim();
    });
    scenario.Finally([&] {
      state.slots.Trim();
      state.slots.Trim();
      std::uint32_t with_memory = 0;
      for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
        with_memory += state.slots.urefs(slot) != nullptr;
      }
      Check(with_memory == kSlotsPerRxSocket - 1, "what is not used is trimmed");
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

}  // namespace
}  // namespace rxtoken::interleave
