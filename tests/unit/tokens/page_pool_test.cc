// SPDX-License-Identifier: Apache-2.0
#include "tokens/page_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;

constexpr std::uint32_t kBatch = PagePool::kBatch;
constexpr std::uint32_t kSurplus = PagePool::kSurplus;

// For the time of its life the calling thread is this worker.
class AsWorker {
 public:
  explicit AsWorker(std::uint32_t worker) : before_(std::exchange(this_worker, worker)) {}
  ~AsWorker() { this_worker = before_; }
  AsWorker(const AsWorker&) = delete;
  AsWorker& operator=(const AsWorker&) = delete;

 private:
  const std::uint32_t before_;
};

// Objects are numbers, from 1.
std::vector<void*> Objects(std::uint32_t n) {
  std::vector<void*> objects(n);
  for (std::uint32_t i = 0; i < n; i++) objects[i] = reinterpret_cast<void*>(std::uintptr_t{i} + 1);
  return objects;
}
std::vector<std::uintptr_t> Numbers(const std::vector<void*>& objects) {
  std::vector<std::uintptr_t> numbers;
  for (void* object : objects) numbers.push_back(reinterpret_cast<std::uintptr_t>(object));
  return numbers;
}

class PagePoolTest : public testing::Test {
 protected:
  static bool Push(PagePool& pool, const std::vector<std::uintptr_t>& numbers) {
    std::vector<void*> objects;
    for (const std::uintptr_t number : numbers) objects.push_back(reinterpret_cast<void*>(number));
    pool.Push(objects.data(), static_cast<std::uint32_t>(objects.size()));
    return true;
  }
  // Empty if the pool refused.
  static std::vector<std::uintptr_t> Pop(PagePool& pool, std::uint32_t n) {
    std::vector<void*> objects(n);
    if (!pool.Pop(objects.data(), n)) return {};
    return Numbers(objects);
  }
  static std::vector<std::uintptr_t> PopAll(PagePool& pool) {
    std::vector<std::uintptr_t> all;
    for (std::vector<std::uintptr_t> one; !(one = Pop(pool, 1)).empty();) all.push_back(one[0]);
    return all;
  }
  // All objects that each of `workers`, then a thread outside, can pop.
  static std::multiset<std::uintptr_t> Empty(PagePool& pool, std::uint32_t workers) {
    std::multiset<std::uintptr_t> all;
    for (std::uint32_t w = 0; w < workers; w++) {
      const AsWorker as(w);
      for (const std::uintptr_t number : PopAll(pool)) all.insert(number);
    }
    for (const std::uintptr_t number : PopAll(pool)) all.insert(number);
    return all;
  }
  static std::multiset<std::uintptr_t> UpTo(std::uint32_t n) {
    std::multiset<std::uintptr_t> all;
    for (std::uint32_t i = 1; i <= n; i++) all.insert(i);
    return all;
  }
};

TEST_F(PagePoolTest, StartsFull) {
  for (const std::uint32_t n : {1u, kBatch - 1, kBatch, kBatch + 1, 10 * kBatch + 7}) {
    PagePool pool(Objects(n));

    ASSERT_TRUE(pool.ok());
    EXPECT_EQ(pool.size(), n);
    EXPECT_EQ(pool.available(), n);
    EXPECT_EQ(Empty(pool, 1), UpTo(n));
    EXPECT_EQ(pool.available(), 0u);
  }
}

TEST_F(PagePoolTest, AWorkerPopsTheFirstObjectsFirst) {
  PagePool pool(Objects(3 * kBatch));
  const AsWorker as(0);

  EXPECT_THAT(Pop(pool, 3), ElementsAre(1, 2, 3));
  EXPECT_THAT(PopAll(pool), ElementsAreArray([] {
                std::vector<std::uintptr_t> rest;
                for (std::uint32_t i = 4; i <= 3 * kBatch; i++) rest.push_back(i);
                return rest;
              }()));
}

TEST_F(PagePoolTest, PopsWhatWasPushedLast) {
  PagePool pool(Objects(100));
  const AsWorker as(0);
  PopAll(pool);

  Push(pool, {10, 20, 30});
  Push(pool, {40});

  EXPECT_THAT(Pop(pool, 2), ElementsAre(40, 30));
  EXPECT_THAT(Pop(pool, 2), ElementsAre(20, 10));
}

TEST_F(PagePoolTest, PoppingMoreThanThereIsTakesNothing) {
  PagePool pool(Objects(2 * kBatch));
  const AsWorker as(0);
  std::vector<void*> objects(2 * kBatch + 1, nullptr);

  EXPECT_FALSE(pool.Pop(objects.data(), 2 * kBatch + 1));

  EXPECT_THAT(objects, testing::Each(nullptr));
  EXPECT_EQ(pool.available(), 2 * kBatch);
  EXPECT_TRUE(pool.Pop(objects.data(), 2 * kBatch));
  EXPECT_EQ(pool.available(), 0u);
  EXPECT_FALSE(pool.Pop(objects.data(), 1));
}

TEST_F(PagePoolTest, PopsAndPushesNothing) {
  PagePool pool(Objects(10));
  const AsWorker as(0);

  EXPECT_TRUE(pool.Pop(nullptr, 0));
  pool.Push(nullptr, 0);

  EXPECT_EQ(pool.available(), 10u);
}

TEST_F(PagePoolTest, WhatIsReservedCanBePopped) {
  PagePool pool(Objects(3 * kBatch));
  const AsWorker as(0);

  EXPECT_EQ(pool.Reserve(0), 0u);
  EXPECT_EQ(pool.Reserve(kBatch + 1), kBatch + 1);
  EXPECT_EQ(pool.available(), 3 * kBatch) << "nothing is taken";
  {
    const AsWorker other(1);  // takes all that it can get
    PopAll(pool);
  }

  EXPECT_EQ(Pop(pool, kBatch + 1).size(), kBatch + 1);
}

TEST_F(PagePoolTest, NoMoreIsReservedThanThereIs) {
  PagePool pool(Objects(kBatch + 7));
  const AsWorker as(0);

  EXPECT_EQ(pool.Reserve(10 * kBatch), kBatch + 7);
  PopAll(pool);
  EXPECT_EQ(pool.Reserve(1), 0u);
}

TEST_F(PagePoolTest, AWorkerTakesEverythingIfItIsTheOnlyOne) {
  const std::uint32_t n = 5 * kBatch + 17;
  PagePool pool(Objects(n));
  const AsWorker as(3);

  EXPECT_EQ(PopAll(pool).size(), n) << "also what lies outside";
}

TEST_F(PagePoolTest, AnUnsharedWorkerKeepsWhatItPushes) {
  PagePool pool(Objects(8 * kBatch));
  pool.SetTakers(1);
  const AsWorker as(0);
  const std::vector<std::uintptr_t> all = PopAll(pool);
  Push(pool, all);

  const AsWorker other(1);
  EXPECT_THAT(Pop(pool, 1), ElementsAre());
}

TEST_F(PagePoolTest, ASharedWorkerGivesItsSurplusInWholeBatches) {
  PagePool pool(Objects(8 * kBatch));
  pool.SetTakers(~0u);
  std::vector<std::uintptr_t> all;
  {
    const AsWorker as(0);
    all = PopAll(pool);
    Push(pool, {all.begin(), all.begin() + kSurplus});
  }
  {
    const AsWorker other(1);
    EXPECT_THAT(Pop(pool, 1), ElementsAre()) << "up to kSurplus is its own";
  }
  {
    const AsWorker as(0);
    Push(pool, {all[kSurplus]});
  }
  const AsWorker other(1);
  EXPECT_EQ(PopAll(pool).size(), kBatch);
}

TEST_F(PagePoolTest, AWorkerThatTakesNoMoreLeavesAllToTheOthers) {
  const std::uint32_t n = 8 * kBatch + 100;
  PagePool pool(Objects(n));
  pool.SetTakers(1);
  const AsWorker as(0);
  std::vector<std::uintptr_t> all = PopAll(pool);
  const std::vector<std::uintptr_t> late(all.begin(), all.begin() + kBatch + 1);
  Push(pool, {all.begin() + kBatch + 1, all.end()});

  pool.SetTakers(2);
  pool.Settle();
  {
    const AsWorker other(1);
    EXPECT_EQ(PopAll(pool).size(), n - late.size());
  }
  EXPECT_EQ(pool.available(), 0u);

  // What it had lent comes back to it later.
  Push(pool, late);
  const AsWorker other(1);
  EXPECT_EQ(PopAll(pool).size(), kBatch);
  EXPECT_EQ(pool.available(), 1u);
}

TEST_F(PagePoolTest, AWorkerReachesAllButASurplusOfAnother) {
  PagePool pool(Objects(8 * kBatch + 100));
  pool.SetTakers(~0u);
  {
    const AsWorker as(0);
    Push(pool, PopAll(pool));
  }

  const AsWorker other(1);
  const std::size_t reached = PopAll(pool).size();

  EXPECT_EQ(reached % kBatch, 0u);
  EXPECT_GE(reached, 8 * kBatch + 100 - kSurplus);
}

TEST_F(PagePoolTest, AThreadThatIsNoWorkerHasAStackOfItsOwn) {
  PagePool pool(Objects(kBatch));
  ASSERT_EQ(this_worker, kNotAWorker);
  PopAll(pool);

  Push(pool, {1, 2, 3});

  EXPECT_THAT(Pop(pool, 2), ElementsAre(3, 2));
  EXPECT_EQ(pool.available(), 1u);
}

TEST_F(PagePoolTest, AWorkerTakesWhatLiesOutsideWhenAllElseIsEmpty) {
  PagePool pool(Objects(kBatch + 2));
  std::thread([&] { Push(pool, PopAll(pool)); }).join();

  const AsWorker as(0);

  EXPECT_EQ(PopAll(pool).size(), kBatch + 2);
}

TEST_F(PagePoolTest, AThreadOutsideDoesNotReachWhatAWorkerKeeps) {
  PagePool pool(Objects(kBatch));
  {
    const AsWorker as(0);
    Push(pool, PopAll(pool));
  }

  EXPECT_THAT(Pop(pool, 1), ElementsAre());
  EXPECT_EQ(pool.available(), kBatch);
}

TEST_F(PagePoolTest, NoObjectIsLostOrDoubledWhenItChangesWorkers) {
  constexpr std::uint32_t kObjects = 11 * kBatch + 33;
  constexpr std::uint32_t kWorkers = 4;
  PagePool pool(Objects(kObjects));
  pool.SetTakers(~0u);
  // What each worker pops, the next one pushes: batches travel all the time.
  for (std::uint32_t round = 0; round < 400; round++) {
    std::vector<std::uintptr_t> popped;
    {
      const AsWorker as(round % kWorkers);
      popped = Pop(pool, 1 + round * 37 % 700);
    }
    const std::uint32_t held = static_cast<std::uint32_t>(popped.size());
    ASSERT_EQ(pool.available(), kObjects - held);
    const AsWorker as((round + 1) % kWorkers);
    Push(pool, popped);
    ASSERT_EQ(pool.available(), kObjects);
  }

  EXPECT_EQ(Empty(pool, kWorkers), UpTo(kObjects));
}

}  // namespace
}  // namespace rxtoken
