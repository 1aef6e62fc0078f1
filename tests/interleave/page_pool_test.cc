// SPDX-License-Identifier: Apache-2.0
#include "tokens/page_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "tests/interleave/scheduler.h"
#include "tokens/batch_stack.h"
#include "tokens/worker_id.h"

namespace rxtoken::interleave {
namespace {

// The mistake that the tag is there to avoid.
class Untagged {
 public:
  explicit Untagged(std::atomic<std::uint32_t>* links) : links_(links) {}
  void Put(std::uint32_t batch) {
    std::uint32_t old = head_.load(std::memory_order_relaxed);
    do {
      links_[batch].store(old, std::memory_order_relaxed);
    } while (!head_.compare_exchange_weak(old, batch + 1, std::memory_order_release,
                                          std::memory_order_relaxed));
  }
  std::optional<std::uint32_t> Take() {
    std::uint32_t old = head_.load(std::memory_order_acquire);
    for (;;) {
      if (old == 0) return std::nullopt;
      const std::uint32_t below = links_[old - 1].load(std::memory_order_relaxed);
      if (head_.compare_exchange_weak(old, below, std::memory_order_acquire,
                                      std::memory_order_acquire)) {
        return old - 1;
      }
    }
  }

 private:
  std::atomic<std::uint32_t> head_{0};
  std::atomic<std::uint32_t>* const links_;
};

// Two threads take batches off one stack, write to what they took, and put some back. Who has
// a batch has it alone.
template <typename Stack>
void TakeAndPut(Scenario& scenario) {
  static constexpr std::uint32_t kBatches = 3;
  struct State {
    std::array<std::atomic<std::uint32_t>, kBatches> links = {};
    std::array<int, kBatches> contents = {};
    Stack stack{links.data()};

    std::optional<std::uint32_t> Take() {
      const std::optional<std::uint32_t> batch = stack.Take();
      if (batch) contents[*batch]++;
      return batch;
    }
    void Put(std::optional<std::uint32_t> batch) {
      if (!batch) return;
      contents[*batch]++;
      stack.Put(*batch);
    }
  };
  auto& state = scenario.Make<State>();
  for (std::uint32_t batch = 0; batch < kBatches; batch++) state.stack.Put(batch);
  scenario.Thread([&] {
    state.Put(state.Take());
    state.Take();
  });
  scenario.Thread([&] {
    const std::optional<std::uint32_t> first = state.Take();
    const std::optional<std::uint32_t> second = state.Take();
    state.Put(first);
    state.Put(second);
  });
  scenario.Finally([&] {
    std::uint32_t left = 0;
    std::array<bool, kBatches> there = {};
    while (left <= kBatches) {  // a corrupt stack has no end
      const std::optional<std::uint32_t> batch = state.stack.Take();
      if (!batch) break;
      Check(!there[*batch], "each batch is there once");
      there[*batch] = true;
      left++;
    }
    Check(left == kBatches - 1, "all but the one that was kept are there");
  });
}

TEST(BatchStack, GivesEachBatchToOneThread) {
  EXPECT_EQ(Explore({.deviations = 3}, TakeAndPut<BatchStack>).failure, "");
}

TEST(BatchStack, NeedsItsTag) {
  EXPECT_NE(Explore({.deviations = 3}, TakeAndPut<Untagged>).failure, "");
}

TEST(BatchStack, NeedsItsRelease) {
  EXPECT_NE(Explore({.ignore_release = true}, TakeAndPut<BatchStack>).failure, "");
}

// A pool of three batches and one object more, which starts outside.
struct Pool {
  static constexpr std::uint32_t kObjects = 3 * PagePool::kBatch + 1;

  std::array<int, kObjects> objects = {};
  std::unique_ptr<PagePool> pages = [this] {
    std::vector<void*> all;
    for (int& object : objects) all.push_back(&object);
    auto pool = std::make_unique<PagePool>(all);
    pool->SetTakers(~0u);
    return pool;
  }();

  // Pops `n` objects, writes to a few of them, and pushes them again.
  void Use(std::uint32_t n) {
    std::vector<void*> mine(n);
    if (!pages->Pop(mine.data(), n)) return;
    for (const std::uint32_t i : {0u, n - 1}) ++*static_cast<int*>(mine[i]);
    pages->Push(mine.data(), n);
  }
};

void Share(Scenario& scenario, std::initializer_list<std::vector<std::uint32_t>> uses,
           bool outside) {
  auto& pool = scenario.Make<Pool>();
  std::uint32_t worker = 0;
  for (const std::vector<std::uint32_t>& sizes : uses) {
    scenario.Thread([&pool, worker, sizes] {
      this_worker = worker;
      for (const std::uint32_t n : sizes) pool.Use(n);
    });
    worker++;
  }
  if (outside) scenario.Thread([&pool] { pool.Use(1); });
  scenario.Finally([&] { Check(pool.pages->available() == Pool::kObjects, "all come back"); });
}

TEST(PagePool, GivesEachObjectToOneThread) {
  constexpr std::uint32_t kSpills = 3 * PagePool::kBatch;  // more than a worker keeps
  const Outcome two = Explore({.deviations = 2, .random = 300}, [](Scenario& scenario) {
    Share(scenario, {{kSpills, 1}, {kSpills, 1}}, false);
  });
  EXPECT_EQ(two.failure, "");
  const Outcome three = Explore({.deviations = 1, .random = 300}, [](Scenario& scenario) {
    Share(scenario, {{kSpills, 1}, {2, kSpills}}, true);
  });
  EXPECT_EQ(three.failure, "");
}

// A binding drains: what was out comes back, and nothing is popped. The control thread, which
// frees the binding when all is there, must not believe so too early.
void Drain(Scenario& scenario) {
  struct State : Pool {
    std::array<std::vector<void*>, 2> out = {std::vector<void*>(3 * PagePool::kBatch),
                                             std::vector<void*>(1)};
    std::atomic<std::uint32_t> coming_back{0};

    State() {
      for (this_worker = 0; this_worker < 2; this_worker++) {
        std::vector<void*>& mine = out[this_worker];
        Check(pages->Pop(mine.data(), static_cast<std::uint32_t>(mine.size())), "all are out");
      }
      this_worker = kNotAWorker;
    }
  };
  auto& state = scenario.Make<State>();
  for (std::uint32_t worker = 0; worker < 2; worker++) {
    scenario.Thread([&state, worker] {
      this_worker = worker;
      const auto n = static_cast<std::uint32_t>(state.out[worker].size());
      state.coming_back.fetch_add(n, std::memory_order_relaxed);
      state.pages->Push(state.out[worker].data(), n);
    });
  }
  scenario.Thread([&state] {
    const std::uint32_t available = state.pages->available();
    Check(available <= state.coming_back.fetch_add(0, std::memory_order_relaxed),
          "available() is never too many");
  });
}

TEST(PagePool, NeverCountsTooManyWhileADrainGoesOn) {
  EXPECT_EQ(Explore({.deviations = 2, .random = 500}, Drain).failure, "");
}

}  // namespace
}  // namespace rxtoken::interleave
