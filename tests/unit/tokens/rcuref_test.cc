// SPDX-License-Identifier: Apache-2.0
#include "tokens/rcuref.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace rxtoken {
namespace {

TEST(Rcuref, OnlyTheLastPutIsTheLast) {
  Rcuref references;
  EXPECT_TRUE(references.TryGet());
  EXPECT_EQ(references.references(), 2u);

  EXPECT_FALSE(references.Put());
  EXPECT_TRUE(references.Put());
  EXPECT_EQ(references.references(), 0u);
}

TEST(Rcuref, StartsWithAsManyAsAskedFor) {
  Rcuref references(3);

  EXPECT_FALSE(references.Put());
  EXPECT_FALSE(references.Put());
  EXPECT_TRUE(references.Put());
}

TEST(Rcuref, NoGetBringsTheDeadBack) {
  Rcuref references;
  ASSERT_TRUE(references.Put());

  for (int i = 0; i < 1000; i++) EXPECT_FALSE(references.TryGet());
  EXPECT_EQ(references.references(), 0u);
}

TEST(Rcuref, APutTooManyDoesNotKillTwice) {
  Rcuref references;
  ASSERT_TRUE(references.Put());

  for (int i = 0; i < 1000; i++) EXPECT_FALSE(references.Put());
  EXPECT_FALSE(references.TryGet());
}

TEST(Rcuref, CountsToItsLimitAndBack) {
  Rcuref references(Rcuref::kMaxReferences - 1);
  EXPECT_TRUE(references.TryGet());
  EXPECT_FALSE(references.saturated());
  EXPECT_EQ(references.references(), Rcuref::kMaxReferences);

  EXPECT_FALSE(references.Put());
  EXPECT_EQ(references.references(), Rcuref::kMaxReferences - 1);
}

TEST(Rcuref, SaturatesAndIsNeverFreedThen) {
  Rcuref references(Rcuref::kMaxReferences);

  EXPECT_TRUE(references.TryGet());
  EXPECT_TRUE(references.saturated());
  for (int i = 0; i < 1000; i++) {
    EXPECT_FALSE(references.Put());
    EXPECT_FALSE(references.Put());
    EXPECT_TRUE(references.TryGet());
  }
  EXPECT_TRUE(references.saturated());
  EXPECT_EQ(references.references(), Rcuref::kMaxReferences);
}

TEST(Rcuref, HasItsLineForItself) {
  struct Object {
    int read_on_the_path;
    Rcuref references;
    int also_read;
  };
  EXPECT_GE(offsetof(Object, references) - offsetof(Object, read_on_the_path), kWriterAlignBytes);
  EXPECT_GE(offsetof(Object, also_read) - offsetof(Object, references), kWriterAlignBytes);
}

// Threads hold the object in turn while its first holder lets go: it dies once, when all have
// let go, and what they did to it is there by then.
TEST(Rcuref, DiesOnceUnderContention) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 20'000;
  Rcuref references;
  std::atomic<int> deaths{0};
  std::atomic<int> held{0};
  int work[kThreads] = {};
  int seen = -1;
  const auto put = [&] {
    if (!references.Put()) return;
    deaths.fetch_add(1, std::memory_order_relaxed);
    seen = 0;
    for (const int w : work) seen += w;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds && references.TryGet(); i++) {
        work[t]++;
        held.fetch_add(1, std::memory_order_relaxed);
        put();
      }
    });
  }
  while (held.load(std::memory_order_relaxed) < kThreads) std::this_thread::yield();
  put();
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(deaths.load(), 1);
  EXPECT_EQ(seen, held.load());
  EXPECT_FALSE(references.TryGet());
}

}  // namespace
}  // namespace rxtoken
