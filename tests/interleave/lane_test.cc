// SPDX-License-Identifier: Apache-2.0
#include "tokens/lane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <span>

#include "tests/interleave/scheduler.h"
#include "tests/unit/tokens/fakes.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"

namespace rxtoken::interleave {
namespace {

constexpr std::uint32_t kPages = 2;

// Counts how often each page came back.
struct Counter {
  struct Run {
    std::array<std::uint32_t, kPages>& back;
    void operator()(std::uint32_t page) const { back[page]++; }
  };
  Run Open(const PageTable&) { return {back}; }

  std::array<std::uint32_t, kPages> back = {};
};

// One rx socket of one binding, and a lane of it for each of two workers. Pages are plain
// memory: their worker writes to a page before it lends it, the application reads what it was
// lent.
struct RxSocket {
  struct WorkerSide {
    WorkerSide(std::uint32_t worker, SlotTable* slots, std::uint32_t entries)
        : rings(entries, worker), lane(worker, slots, rings.descriptors(), rings.returns()) {}
    TestRings rings;
    Lane lane;
    LaneReader reader{rings.descriptors(), rings.returns()};
    Counter recycler;
  };

  PageTable table{1, kPages, nullptr};
  SlotTable slots;
  WorkerSide first;
  WorkerSide second;
  std::array<int, kPages> pages = {};
  std::atomic<int> doorbell{0};  // the kernel orders what is done with it

  // Both lanes know their slot already: its first use has its own scenarios.
  explicit RxSocket(std::uint32_t entries) : first(0, &slots, entries), second(1, &slots, entries) {
    for (WorkerSide* worker : {&first, &second}) {
      Lend(*worker, 0, -1);
      const auto token = Receive(*worker, -1);
      Check(token && worker->lane.Return(std::span(&*token, 1), worker->recycler) == 1, "warm");
      worker->recycler = Counter();
    }
  }

  // As a worker. Waits for room in the ring.
  void Lend(WorkerSide& worker, std::uint32_t page, int payload) {
    while (worker.lane.Room(1) == 0) Yield();
    pages[page] = payload;
    const LendItem item = Item(page);
    Check(worker.lane.Lend(table, std::span(&item, 1), 0), "there is a slot");
    worker.lane.Publish();
  }
  void Ring(WorkerSide& worker, bool record_late = false) {
    if (!worker.lane.WantsDoorbell()) return;
    if (!record_late) worker.lane.Rung();
    doorbell.fetch_add(1);
    if (record_late) worker.lane.Rung();
  }

  // As the application. Reads what is there, a fragment at most, and answers its token.
  std::optional<std::uint32_t> Receive(WorkerSide& worker, int expected) {
    std::array<Descriptor, 1> descriptor;
    while (worker.reader.Poll(descriptor) == 1) {
      const Descriptor d = descriptor[0];
      if (d.kind == DescriptorKind::kFragment) {
        const auto page = static_cast<std::uint32_t>(PageToken::FromWire(d.token).page());
        Check(pages[page] == expected, "messages arrive in order, with their payload");
      }
      worker.reader.Consume(1);
      if (d.kind == DescriptorKind::kFragment) return d.token;
    }
    return std::nullopt;
  }
  void Return(WorkerSide& worker, std::uint32_t token) {
    while (worker.reader.Return(std::span(&token, 1)) == 0) Yield();
  }
};

// A worker lends two pages in turn, each again when it is back, so that the rings wrap.
void RoundAndRound(Scenario& scenario) {
  constexpr int kMessages = 5;
  auto& state = scenario.Make<RxSocket>(4u);
  scenario.Thread([&] {
    auto& me = state.first;
    for (int i = 0; i < kMessages; i++) {
      const auto page = static_cast<std::uint32_t>(i) % kPages;
      while (me.recycler.back[page] < static_cast<std::uint32_t>(i) / kPages) {
        if (me.lane.Drain(me.recycler, 0) == 0) Yield();
      }
      state.Lend(me, page, i);
    }
    while (me.lane.outstanding() != 0) {
      if (me.lane.Drain(me.recycler, 0) == 0) Yield();
    }
  });
  scenario.Thread([&] {
    for (int i = 0; i < kMessages;) {
      if (const auto token = state.Receive(state.first, i)) {
        state.Return(state.first, *token);
        i++;
      } else {
        Yield();
      }
    }
  });
  scenario.Finally([&] {
    const LaneCounters& c = state.first.lane.counters();
    Check(c.lent == kMessages + 1 && c.returned == c.lent, "all is lent and returned");
    Check(std::ranges::count(c.refusals, 0u) == std::ssize(c.refusals), "nothing is refused");
  });
}

TEST(Lane, CarriesEverythingThereAndBack) {
  const Outcome outcome = Explore({.deviations = 2}, RoundAndRound);

  EXPECT_EQ(outcome.failure, "");
}

TEST(Lane, NeedsItsReleases) {
  EXPECT_NE(Explore({.ignore_release = true}, RoundAndRound).failure, "");
}

// The application sleeps when there is nothing to read. The worker must go on asking whether
// it wants a doorbell until it has read everything, and say that it rings before it does.
enum class Worker { kCorrect, kAsksOnce, kRecordsLate };

void Sleep(Scenario& scenario, Worker worker) {
  constexpr int kMessages = 2;
  auto& state = scenario.Make<RxSocket>(8u);
  scenario.Thread([&state, worker] {
    auto& me = state.first;
    const bool late = worker == Worker::kRecordsLate;
    for (std::uint32_t i = 0; i < kMessages; i++) {
      state.Lend(me, i, static_cast<int>(i));
      state.Ring(me, late);
    }
    while (me.lane.outstanding() != 0) {
      if (worker != Worker::kAsksOnce) state.Ring(me, late);
      if (me.lane.Drain(me.recycler, 0) == 0) Yield();
    }
  });
  scenario.Thread([&state] {
    auto& me = state.first;
    for (int i = 0; i < kMessages;) {
      if (const auto token = state.Receive(me, i)) {
        state.Return(me, *token);
        i++;
        continue;
      }
      if (!me.reader.Arm()) {
        while (state.doorbell.exchange(0) == 0) Yield();
      }
      me.reader.Disarm();
    }
  });
}

TEST(Lane, WakesWhoeverSleeps) {
  const Outcome outcome =
      Explore({.deviations = 3}, [](Scenario& scenario) { Sleep(scenario, Worker::kCorrect); });

  EXPECT_EQ(outcome.failure, "");
}

TEST(Lane, LosesAWakeUpIfItsWorkerAsksOnlyOnce) {
  const Outcome outcome =
      Explore({.deviations = 3}, [](Scenario& scenario) { Sleep(scenario, Worker::kAsksOnce); });

  EXPECT_NE(outcome.failure, "");
}

TEST(Lane, LosesAWakeUpIfItsWorkerRecordsItLate) {
  const Outcome outcome =
      Explore({.deviations = 3}, [](Scenario& scenario) { Sleep(scenario, Worker::kRecordsLate); });

  EXPECT_NE(outcome.failure, "");
}

// The rx socket is closed while the application returns what it holds, some of it twice.
TEST(Lane, SweepsWhatAnApplicationStillHolds) {
  const Outcome outcome = Explore({.deviations = 3}, [](Scenario& scenario) {
    auto& state = scenario.Make<RxSocket>(8u);
    scenario.Thread([&] {
      auto& me = state.first;
      for (std::uint32_t page = 0; page < kPages; page++) state.Lend(me, page, 0);
      me.lane.Drain(me.recycler, 0);
      me.lane.Close(CloseReason::kClosed);
      while (!me.lane.Sweep(1, me.recycler)) {
      }
      me.lane.Drain(me.recycler, 0);
    });
    scenario.Thread([&] {
      auto& me = state.first;
      while (!me.reader.closed()) {
        if (const auto token = state.Receive(me, 0)) {
          const std::uint32_t twice[] = {*token, *token};
          me.reader.Return(twice);
        } else {
          Yield();
        }
      }
    });
    scenario.Finally([&] {
      const LaneCounters& c = state.first.lane.counters();
      Check(c.lent == kPages + 1 && c.returned == c.lent, "all is lent and returned");
      Check(state.first.recycler.back == std::array{1u, 1u}, "each page comes back once");
      Check(state.slots.in_use() == 0, "the slot is free");
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

// Page 0 goes from one worker to the other through the page pool, and the other lends it to
// the same rx socket. Meanwhile its first worker gets a token for it that is no longer worth
// anything: it holds page 1 for the application, so that the slot is in use.
TEST(Lane, RefusesATokenOfAPageThatMovedOn) {
  const Outcome outcome = Explore({.deviations = 3}, [](Scenario& scenario) {
    struct State : RxSocket {
      State() : RxSocket(8) {}
      std::atomic<bool> free{false};  // page 0 is in the pool
      std::uint32_t token = 0;
    };
    auto& state = scenario.Make<State>();
    scenario.Thread([&] {
      auto& me = state.first;
      for (std::uint32_t page = 0; page < kPages; page++) state.Lend(me, page, 0);
      const std::uint32_t token = Token(0, 0);
      Check(me.lane.Return(std::span(&token, 1), me.recycler) == 1, "it is accepted once");
      state.free.store(true, std::memory_order_release);
      Check(me.lane.Return(std::span(&token, 1), me.recycler) == 0, "and not again");
      Check(me.lane.Sweep(10, me.recycler), "what is left is swept");
    });
    scenario.Thread([&] {
      auto& me = state.second;
      while (!state.free.load(std::memory_order_acquire)) Yield();
      state.Lend(me, 0, 1);
      const std::uint32_t token = Token(0, 0);
      Check(me.lane.Return(std::span(&token, 1), me.recycler) == 1, "its owner accepts it");
    });
    scenario.Finally([&] {
      Check(state.first.recycler.back == std::array{1u, 1u}, "the first got both back");
      Check(state.second.recycler.back == std::array{1u, 0u}, "the second got one back");
    });
  });

  EXPECT_EQ(outcome.failure, "");
}

}  // namespace
}  // namespace rxtoken::interleave
