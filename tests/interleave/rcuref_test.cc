// SPDX-License-Identifier: Apache-2.0
#include "tokens/rcuref.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "tests/interleave/scheduler.h"

namespace rxtoken::interleave {
namespace {

// The mistake that the last put's compare-exchange is there to avoid: it takes what it saw
// for what is still so.
class Careless {
 public:
  explicit Careless(std::uint32_t references) : word_(references - 1) {}
  bool TryGet() {
    if (static_cast<std::int32_t>(word_.fetch_add(1, std::memory_order_relaxed) + 1) >= 0) {
      return true;
    }
    word_.store(kDead, std::memory_order_relaxed);
    return false;
  }
  bool Put() {
    if (static_cast<std::int32_t>(word_.fetch_sub(1, std::memory_order_acq_rel) - 1) >= 0) {
      return false;
    }
    if (word_.load(std::memory_order_relaxed) != ~0u) return false;
    word_.store(kDead, std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr std::uint32_t kDead = 0xE000'0000;
  std::atomic<std::uint32_t> word_;
};

// Each thread has a reference and lets it go. The last one sees what all did.
template <typename References>
void LetGo(Scenario& scenario) {
  struct State {
    References references{3};
    std::array<int, 3> work = {};
    std::atomic<int> deaths{0};
  };
  auto& state = scenario.Make<State>();
  for (int& mine : state.work) {
    scenario.Thread([&] {
      mine = 1;
      if (!state.references.Put()) return;
      state.deaths.fetch_add(1, std::memory_order_relaxed);
      Check(state.work[0] + state.work[1] + state.work[2] == 3, "the last sees everything");
    });
  }
  scenario.Finally([&] { Check(state.deaths == 1, "one put is the last"); });
}

// One thread lets the last reference go while another two try to get one.
template <typename References>
void Revive(Scenario& scenario) {
  struct State {
    References references{1};
    std::atomic<bool> alive{true};
    std::atomic<int> deaths{0};

    void Put() {
      if (!references.Put()) return;
      alive.store(false, std::memory_order_relaxed);
      deaths.fetch_add(1, std::memory_order_relaxed);
    }
  };
  auto& state = scenario.Make<State>();
  scenario.Thread([&] { state.Put(); });
  for (int i = 0; i < 2; i++) {
    scenario.Thread([&] {
      if (!state.references.TryGet()) return;
      Check(state.alive.load(std::memory_order_relaxed), "who holds it holds a living object");
      state.Put();
    });
  }
  scenario.Finally([&] {
    Check(state.deaths == 1, "one put is the last");
    Check(!state.references.TryGet(), "no get brings the dead back");
  });
}

TEST(Rcuref, HasOneLastPut) {
  EXPECT_EQ(Explore({.deviations = 5}, LetGo<Rcuref>).failure, "");
  EXPECT_EQ(Explore({.deviations = 5}, Revive<Rcuref>).failure, "");
}

TEST(Rcuref, NeedsTheCompareExchangeOfTheLastPut) {
  EXPECT_NE(Explore({}, Revive<Careless>).failure, "");
}

TEST(Rcuref, NeedsItsRelease) {
  EXPECT_NE(Explore({.ignore_release = true}, LetGo<Rcuref>).failure, "");
}

// Threads pass the limit together. However many puts follow, none is the last.
TEST(Rcuref, SaturatesWhoeverComesFirst) {
  const Outcome outcome = Explore({.deviations = 4}, [](Scenario& scenario) {
    auto& references = scenario.Make<Rcuref>(Rcuref::kMaxReferences);
    for (int i = 0; i < 3; i++) {
      scenario.Thread([&] {
        Check(references.TryGet(), "a get succeeds");
        Check(!references.Put(), "no put is the last");
      });
    }
    scenario.Finally([&] { Check(references.TryGet() && !references.Put(), "it lives on"); });
  });

  EXPECT_EQ(outcome.failure, "");
}

// A life as rcuref.h has it: found through a pointer, unpublished, let go, freed after a
// grace period. Two readers look for the object while the updater ends it.
struct Life {
  struct Object {
    Rcuref references;
    int payload = 1;
  };
  std::atomic<Object*> pointer{new Object};
  std::array<std::atomic<std::uint32_t>, 3> sections = {};  // odd: in one

  ~Life() { Check(pointer.load() == nullptr, "it was freed"); }

  void EnterSection(unsigned thread) { sections[thread].fetch_add(1); }
  void LeaveSection(unsigned thread) { sections[thread].fetch_add(1); }
  void Free(Object* object) {
    for (std::atomic<std::uint32_t>& section : sections) {
      const std::uint32_t was = section.load();
      while (was % 2 != 0 && section.load() == was) Yield();
    }
    delete object;
  }

  void Read(unsigned thread) {
    EnterSection(thread);
    Object* object = pointer.load(std::memory_order_acquire);
    if (object != nullptr && object->references.TryGet()) {
      Check(object->payload == 1, "the payload is there");
      if (!object->references.Put()) object = nullptr;
    } else {
      object = nullptr;
    }
    LeaveSection(thread);
    if (object != nullptr) Free(object);
  }
  void End(unsigned thread, bool in_section) {
    if (in_section) EnterSection(thread);
    Object* const object = pointer.exchange(nullptr, std::memory_order_acq_rel);
    const bool last = object->references.Put();
    if (in_section) LeaveSection(thread);
    if (last) Free(object);
  }
};

void EndWhileRead(Scenario& scenario, bool in_section) {
  auto& life = scenario.Make<Life>();
  scenario.Thread([&life] { life.Read(0); });
  scenario.Thread([&life] { life.Read(1); });
  scenario.Thread([&life, in_section] { life.End(2, in_section); });
}

TEST(Rcuref, IsFreedWhenNobodyReads) {
  const Outcome outcome =
      Explore({.deviations = 3}, [](Scenario& scenario) { EndWhileRead(scenario, true); });

  EXPECT_EQ(outcome.failure, "");
}

TEST(Rcuref, MustNotBePutOutsideASection) {
  const Outcome outcome =
      Explore({.deviations = 3}, [](Scenario& scenario) { EndWhileRead(scenario, false); });

  EXPECT_THAT(outcome.failure, testing::HasSubstr("freed"));
}

}  // namespace
}  // namespace rxtoken::interleave
