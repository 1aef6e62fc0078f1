// SPDX-License-Identifier: Apache-2.0
// stress_test.cc - the shared parts of tokens/ under several threads at once, for the thread
// sanitizer above all.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "tests/sanitized.h"
#include "tests/unit/tokens/fakes.h"
#include "tokens/lane.h"
#include "tokens/page_pool.h"
#include "tokens/slot_table.h"
#include "tokens/spsc_ring.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kScale = kSanitized ? 1 : 10;

// A cheap sequence of numbers.
class Lcg {
 public:
  explicit Lcg(std::uint32_t seed) : state_(seed) {}
  std::uint32_t Below(std::uint32_t n) {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<std::uint32_t>((std::uint64_t{state_} * n) >> 32);
  }

 private:
  std::uint32_t state_;
};

TEST(PagePoolStress, EachObjectHasOneHolderAtATime) {
  constexpr std::uint32_t kWorkers = 3;
  constexpr std::uint32_t kObjects = 9 * PagePool::kBatch + 50;
  constexpr std::uint32_t kMost = 900;  // held by each thread
  const std::uint32_t rounds = 2'000 * kScale;
  std::vector<std::atomic<bool>> taken(kObjects);
  std::vector<void*> objects;
  for (std::atomic<bool>& flag : taken) objects.push_back(&flag);
  PagePool pool(objects);
  pool.SetTakers(~0u);
  std::atomic<std::uint64_t> wrong{0};

  const auto run = [&](std::uint32_t worker, std::uint32_t seed) {
    this_worker = worker;
    Lcg random(seed);
    std::vector<void*> held;
    const auto push = [&](std::uint32_t n) {
      for (std::uint32_t i = 0; i < n; i++) {
        auto* const flag = static_cast<std::atomic<bool>*>(held[held.size() - 1 - i]);
        wrong += !flag->exchange(false, std::memory_order_relaxed);
      }
      pool.Push(held.data() + held.size() - n, n);
      held.resize(held.size() - n);
    };
    for (std::uint32_t round = 0; round < rounds; round++) {
      const std::uint32_t n = 1 + random.Below(300);
      if (held.size() + n <= kMost && random.Below(2) == 0) {
        void* popped[300];
        if (!pool.Pop(popped, n)) continue;
        for (std::uint32_t i = 0; i < n; i++) {
          auto* const flag = static_cast<std::atomic<bool>*>(popped[i]);
          wrong += flag->exchange(true, std::memory_order_relaxed);
        }
        held.insert(held.end(), popped, popped + n);
      } else {
        push(std::min<std::uint32_t>(n, static_cast<std::uint32_t>(held.size())));
      }
    }
    push(static_cast<std::uint32_t>(held.size()));
  };
  std::vector<std::thread> threads;
  for (std::uint32_t w = 0; w < kWorkers; w++) threads.emplace_back(run, w, w + 1);
  threads.emplace_back(run, kNotAWorker, 99);
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(pool.available(), kObjects);
}

TEST(PagePoolStress, AvailableIsNeverMoreThanTheTruthWhileNobodyPops) {
  // As when a binding drains: workers push, and somebody waits until all is back.
  constexpr std::uint32_t kWorkers = 2;
  constexpr std::uint32_t kObjects = 40 * PagePool::kBatch;
  for (std::uint32_t round = 0; round < 10 * kScale; round++) {
    std::vector<std::atomic<bool>> dummies(kObjects);
    std::vector<void*> objects;
    for (std::atomic<bool>& dummy : dummies) objects.push_back(&dummy);
    PagePool pool(objects);
    pool.SetTakers(~0u);
    ASSERT_TRUE(pool.Pop(objects.data(), kObjects));
    std::atomic<std::uint32_t> pushing{0};  // counted before each push
    std::vector<std::thread> threads;
    for (std::uint32_t w = 0; w < kWorkers; w++) {
      threads.emplace_back([&, w] {
        this_worker = w;
        constexpr std::uint32_t kLot = 64;
        const std::uint32_t end = kObjects / kWorkers * (w + 1);
        for (std::uint32_t at = kObjects / kWorkers * w; at < end; at += kLot) {
          pushing += kLot;
          pool.Push(objects.data() + at, kLot);
        }
      });
    }

    std::uint32_t available = 0;
    while (available < kObjects) {
      available = pool.available();
      // An addition, because it comes after the loads in front of it.
      ASSERT_LE(available, pushing.fetch_add(0));
      std::this_thread::yield();
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(SlotTableStress, ASlotNamesOneBindingAsLongAsItIsInUse) {
  constexpr std::uint32_t kWorkers = 3;
  constexpr std::uint32_t kBindings = 40;
  constexpr std::uint32_t kPages = 3 * 1024;
  const std::uint32_t rounds = 3'000 * kScale;
  SlotTable slots;
  std::vector<std::unique_ptr<PageTable>> tables;
  for (std::uint32_t b = 1; b <= kBindings; b++) {
    tables.push_back(std::make_unique<PageTable>(b, kPages, nullptr));
  }
  std::array<std::atomic<std::uint32_t>, kSlotsPerRxSocket> names = {};
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> refused{0};

  std::vector<std::thread> threads;
  for (std::uint32_t w = 0; w < kWorkers; w++) {
    threads.emplace_back([&, w] {
      Lcg random(w + 1);
      struct Use {
        std::uint32_t slot;
        std::uint32_t binding;
      };
      std::vector<Use> uses;
      const auto release = [&](std::size_t i) {
        // Each worker writes to pages of its own.
        Uref* const urefs = slots.urefs(uses[i].slot);
        wrong += urefs[w * 1024].count.load(std::memory_order_relaxed) != uses[i].binding;
        urefs[w * 1024].count.store(0, std::memory_order_relaxed);
        wrong += names[uses[i].slot].load(std::memory_order_relaxed) != uses[i].binding;
        slots.Release(uses[i].slot, w);
        uses[i] = uses.back();
        uses.pop_back();
      };
      for (std::uint32_t round = 0; round < rounds; round++) {
        // Up to all slots, and down again.
        const bool rising = round / 200 % 2 == 0;
        if (random.Below(4) < (rising ? 3 : 1)) {
          const auto used = [&](std::uint32_t binding) {
            return std::any_of(uses.begin(), uses.end(),
                               [&](const Use& use) { return use.binding == binding; });
          };
          std::uint32_t binding = 1 + random.Below(kBindings);
          while (used(binding)) binding = binding % kBindings + 1;
          const std::optional<std::uint32_t> slot = slots.Acquire(w, *tables[binding - 1]);
          if (!slot) {
            refused++;
            continue;
          }
          // All who use it at the same time say the same.
          names[*slot].store(binding, std::memory_order_relaxed);
          Uref* const urefs = slots.urefs(*slot);
          wrong += urefs[w * 1024].count.load(std::memory_order_relaxed) != 0;
          urefs[w * 1024].count.store(binding, std::memory_order_relaxed);
          uses.push_back({*slot, binding});
        } else if (!uses.empty()) {
          release(random.Below(static_cast<std::uint32_t>(uses.size())));
        }
      }
      while (!uses.empty()) release(uses.size() - 1);
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(slots.in_use(), 0u);
  EXPECT_NE(refused.load(), 0u) << "the test is not about what it should be";
}

TEST(SlotTableStress, ForgettingABindingSparesTheSlotsThatWorkersTake) {
  // One more binding than slots: the worker always takes the slot released longest ago,
  // which may be the very one that is being forgotten.
  constexpr std::uint32_t kPages = 1024;
  const std::uint32_t rounds = 1'000 * kScale;
  SlotTable slots;
  std::vector<std::unique_ptr<PageTable>> tables;
  for (std::uint32_t b = 1; b <= kSlotsPerRxSocket; b++) {
    tables.push_back(std::make_unique<PageTable>(b, kPages, nullptr));
    slots.Release(slots.Acquire(0, *tables.back()).value(), 0);
  }
  std::atomic<std::uint32_t> next{kSlotsPerRxSocket + 1};
  std::uint64_t wrong = 0;

  std::thread worker([&] {
    for (std::uint32_t round = 0; round < rounds; round++) {
      const PageTable table(next.load(), kPages, nullptr);
      const std::uint32_t slot = slots.Acquire(0, table).value();
      slots.urefs(slot)[round % kPages].count.store(1, std::memory_order_relaxed);
      wrong += slots.in_use() != 1;
      wrong += slots.urefs(slot)[round % kPages].count.load(std::memory_order_relaxed) != 1;
      slots.Release(slot, 0);
      // order: release: done with this binding, which may be forgotten now.
      next.store(table.binding() + 1, std::memory_order_release);
    }
  });
  const std::uint32_t end = kSlotsPerRxSocket + 1 + rounds;
  Lcg random(1);
  for (std::uint32_t now = 0; now != end;) {
    now = next.load(std::memory_order_acquire);
    // Sometimes before the worker takes the slot, sometimes behind it, sometimes with it.
    for (std::uint32_t i = random.Below(4000); i != 0; i--) next.load(std::memory_order_acquire);
    // The oldest that still has a slot, if none was forgotten.
    slots.Forget(now - kSlotsPerRxSocket);
  }
  worker.join();

  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(slots.in_use(), 0u);
}

// A worker and an application, with a payload in each page that the worker writes before it
// lends and again after the page came back.
TEST(LaneStress, TheApplicationReadsWhatWasLent) {
  constexpr std::uint32_t kPages = 300;
  constexpr std::size_t kPageBytes = 256;
  const std::uint64_t messages = 30'000 * kScale;
  std::vector<std::byte> buffer(kPages * kPageBytes);
  const PageTable table(1, kPages, nullptr);
  SlotTable slots;
  const TestRings rings(kMinRingEntries);
  Lane lane(0, &slots, rings.descriptors(), rings.returns());
  std::atomic<std::uint64_t> wrong{0};

  // The payload is its number, all over the page's start.
  const auto write = [&](std::uint32_t page, std::uint64_t number, std::size_t length) {
    for (std::size_t i = 0; i < length; i++) {
      buffer[page * kPageBytes + i] = static_cast<std::byte>(number + i);
    }
  };
  std::thread application([&] {
    LaneReader reader(rings.descriptors(), rings.returns());
    Lcg random(1);
    std::vector<std::uint32_t> held;
    for (std::uint64_t number = 0; number < messages;) {
      Descriptor descriptors[8];
      const std::size_t n = reader.Poll(descriptors);
      for (std::size_t i = 0; i < n; i++) {
        if (descriptors[i].kind != DescriptorKind::kFragment) continue;
        const std::uint32_t page = descriptors[i].token & (kMaxPagesPerBuffer - 1);
        for (std::size_t k = 0; k < descriptors[i].length; k++) {
          if (buffer[page * kPageBytes + k] != static_cast<std::byte>(number + k)) wrong++;
        }
        number++;
        // Later, and in another order.
        held.insert(held.begin() + random.Below(static_cast<std::uint32_t>(held.size() + 1)),
                    descriptors[i].token);
      }
      reader.Consume(n);
      if (held.size() > 100 || n == 0)
        held.erase(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(reader.Return(held)));
      if (n == 0) std::this_thread::yield();
    }
    while (!held.empty()) {
      held.erase(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(reader.Return(held)));
      std::this_thread::yield();
    }
  });

  TestRecycler recycler;
  std::vector<std::uint32_t> free;
  for (std::uint32_t page = 0; page < kPages; page++) free.push_back(page);
  Lcg random(2);
  std::uint64_t number = 0;
  while (number < messages || lane.outstanding() != 0) {
    std::vector<LendItem> items;
    while (number + items.size() < messages && items.size() < 8 && items.size() < free.size()) {
      items.push_back(
          Item(free[free.size() - 1 - items.size()], static_cast<std::uint16_t>(random.Below(64))));
    }
    if (!items.empty()) items.resize(lane.Room(static_cast<std::uint32_t>(items.size())));
    for (const LendItem& item : items) {
      write(item.page, number++, item.length);
      free.pop_back();
    }
    if (!items.empty()) {
      ASSERT_TRUE(lane.Lend(table, items, number << 28));
      lane.Publish();
    }
    if (lane.Drain(recycler, 0) == 0 && items.empty()) std::this_thread::yield();
    free.insert(free.end(), recycler.pages(1).begin(), recycler.pages(1).end());
    recycler.Clear();
  }
  application.join();

  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(free.size(), kPages);
  EXPECT_EQ(lane.counters().lent, messages);
  EXPECT_EQ(lane.counters().returned, messages);
  EXPECT_EQ(lane.counters().refusals, (std::array<std::uint64_t, kRefusals>{}));
}

// Two workers pass all pages of a binding to each other, and a hostile application returns
// every token that it might guess, on both lanes.
TEST(LaneStress, ForgedReturnsDoNotHarmPagesThatChangeWorkers) {
  constexpr std::uint32_t kWorkers = 2;
  constexpr std::uint32_t kPages = 64;
  constexpr std::uint32_t kRingEntries = 1024;
  const std::uint32_t rounds = 20'000 * kScale;
  const PageTable table(1, kPages, nullptr);
  SlotTable slots;
  std::vector<std::unique_ptr<TestRings>> rings;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (std::uint32_t w = 0; w < kWorkers; w++) {
    rings.push_back(std::make_unique<TestRings>(kRingEntries, w));
    lanes.push_back(
        std::make_unique<Lane>(w, &slots, rings[w]->descriptors(), rings[w]->returns()));
  }
  using PageRing = SpscRing<std::uint32_t, 2 * kPages>;
  std::array<PageRing, kWorkers> inbox;  // pages that this worker receives into next
  for (std::uint32_t page = 0; page < kPages; page++) {
    ASSERT_TRUE(inbox[page % kWorkers].TryPush(page));
  }
  std::atomic<std::uint32_t> working{kWorkers};
  std::thread application([&] {
    std::vector<LaneReader> readers;
    for (const auto& ring : rings) readers.emplace_back(ring->descriptors(), ring->returns());
    std::vector<std::uint32_t> guesses;
    for (std::uint32_t page = 0; page < kPages; page++) guesses.push_back(Token(0, page));
    while (working.load(std::memory_order_relaxed) != 0) {
      std::size_t queued = 0;
      for (LaneReader& reader : readers) {
        ReadAll(reader);
        queued += reader.Return(guesses);
      }
      if (queued == 0) std::this_thread::yield();
    }
  });

  struct PassOn {
    struct Run {
      PageRing* to;
      std::atomic<std::uint64_t>* lost;
      void operator()(std::uint32_t page) const { *lost += !to->TryPush(page); }
    };
    Run run;
    Run Open(const PageTable&) { return run; }
  };
  std::atomic<std::uint64_t> lost{0};
  std::vector<std::thread> workers;
  for (std::uint32_t w = 0; w < kWorkers; w++) {
    workers.emplace_back([&, w] {
      PassOn recycler{{&inbox[1 - w], &lost}};
      for (std::uint32_t round = 0; round < rounds; round++) {
        const std::optional<std::uint32_t> page = inbox[w].TryPop();
        if (page) {
          const LendItem item = Item(*page);
          // Without room in the ring, or a slot, it is a dropped frame.
          if (lanes[w]->Room(1) == 1 && lanes[w]->Lend(table, {&item, 1}, 0)) {
            lanes[w]->Publish();
          } else {
            recycler.run(*page);
          }
        }
        if (lanes[w]->Drain(recycler, 0) == 0 && !page) std::this_thread::yield();
      }
      lanes[w]->Sweep(~0u, recycler);
      working--;
    });
  }
  for (std::thread& worker : workers) worker.join();
  application.join();

  std::vector<std::uint32_t> pages;
  for (PageRing& ring : inbox) {
    while (const std::optional<std::uint32_t> page = ring.TryPop()) pages.push_back(*page);
  }
  std::sort(pages.begin(), pages.end());
  std::vector<std::uint32_t> all(kPages);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(pages, all) << "each page, once";
  EXPECT_EQ(lost.load(), 0u);
  for (std::uint32_t page = 0; page < kPages; page++) {
    ASSERT_EQ(PageTable::Lent(table.cells()[page]), 0u) << "page " << page;
  }
  for (const auto& lane : lanes) {
    EXPECT_GT(lane->counters().lent, 0u);
    EXPECT_EQ(lane->counters().lent, lane->counters().returned);
    EXPECT_EQ(lane->Audit(), 0u);
  }
}

}  // namespace
}  // namespace rxtoken
