// SPDX-License-Identifier: Apache-2.0
#include "tokens/saturating_count.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace rxtoken {
namespace {

TEST(SaturatingCount, OnlyTheLastDecrementIsTheLast) {
  SaturatingCount count;
  count.Increment();
  EXPECT_EQ(count.count(), 2);

  EXPECT_FALSE(count.Decrement());
  EXPECT_TRUE(count.Decrement());
  EXPECT_EQ(count.count(), 0);
  EXPECT_FALSE(count.saturated());
}

TEST(SaturatingCount, ReachesItsLimitUnharmed) {
  SaturatingCount count(SaturatingCount::kMax - 1);
  count.Increment();
  EXPECT_EQ(count.count(), SaturatingCount::kMax);

  EXPECT_FALSE(count.Decrement());
  EXPECT_EQ(count.count(), SaturatingCount::kMax - 1);
}

// What `misuse` does to a count pins it there, is counted once, and no number of decrements
// frees anything afterwards.
template <typename F>
void ExpectPinned(std::int32_t start, F misuse) {
  const std::uint64_t before = SaturatingCount::saturations();
  SaturatingCount count(start);
  misuse(count);
  EXPECT_TRUE(count.saturated());
  for (int i = 0; i < 1000; i++) {
    EXPECT_FALSE(count.Decrement());
    EXPECT_FALSE(count.Decrement());
    count.Increment();
  }
  EXPECT_TRUE(count.saturated());
  EXPECT_EQ(SaturatingCount::saturations(), before + 1);
}

TEST(SaturatingCount, OneTooManyPinsIt) {
  ExpectPinned(SaturatingCount::kMax, [](SaturatingCount& count) { count.Increment(); });
}

TEST(SaturatingCount, OneMoreOfNonePinsIt) {
  ExpectPinned(0, [](SaturatingCount& count) { count.Increment(); });
}

TEST(SaturatingCount, OneLessOfNonePinsIt) {
  ExpectPinned(0, [](SaturatingCount& count) { EXPECT_FALSE(count.Decrement()); });
}

TEST(SaturatingCount, IsCountedOnceWhenThreadsPassTheLimitTogether) {
  const std::uint64_t before = SaturatingCount::saturations();
  SaturatingCount count(SaturatingCount::kMax);
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++) {
    threads.emplace_back([&] {
      while (!go.load(std::memory_order_relaxed)) std::this_thread::yield();
      for (int i = 0; i < 1000; i++) count.Increment();
    });
  }
  go.store(true, std::memory_order_relaxed);
  for (std::thread& thread : threads) thread.join();

  EXPECT_TRUE(count.saturated());
  EXPECT_EQ(SaturatingCount::saturations(), before + 1);
}

TEST(SaturatingCount, TheLastOfSeveralThreadsSeesTheirWork) {
  constexpr int kThreads = 4;
  SaturatingCount count(kThreads);
  int work[kThreads] = {};
  std::atomic<int> last{0};
  int seen = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&, t] {
      work[t] = 1;
      if (!count.Decrement()) return;
      last.fetch_add(1, std::memory_order_relaxed);
      for (const int w : work) seen += w;
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(last.load(), 1);
  EXPECT_EQ(seen, kThreads);
}

}  // namespace
}  // namespace rxtoken
