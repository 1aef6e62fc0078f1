// SPDX-License-Identifier: Apache-2.0
#include "tokens/rcu.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace rxtoken {
namespace {

TEST(Rcu, PointerIsNullUntilItIsSet) {
  const rcu::Pointer<int> pointer;

  EXPECT_EQ(pointer.Read(), nullptr);
}

TEST(Rcu, ExchangeAnswersTheOldObject) {
  int first = 1;
  int second = 2;
  rcu::Pointer<int> pointer;

  EXPECT_EQ(pointer.Exchange(&first), nullptr);
  EXPECT_EQ(pointer.Exchange(&second), &first);
  EXPECT_EQ(pointer.Read(), &second);
}

TEST(Rcu, WaitingWithoutReadersReturnsAtOnce) { rcu::WaitForReaders(); }

// The sanitizers see what happens if a grace period ends too early.
TEST(Rcu, AnObjectStaysWholeUntilItsReadersAreQuiescent) {
  struct Pair {
    int value;
    int negative;
  };
  rcu::Pointer<Pair> pointer;
  pointer.Exchange(new Pair{0, 0});
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; i++) {
    readers.emplace_back([&] {
      rcu::RegisterReader();
      while (!stop.load(std::memory_order_relaxed)) {
        for (int round = 0; round < 100; round++) {
          const Pair* pair = pointer.Read();
          if (pair->value + pair->negative != 0) wrong++;
        }
        rcu::Quiescent();
      }
      rcu::UnregisterReader();
    });
  }

  for (int i = 1; i <= 200; i++) {
    std::unique_ptr<Pair> old(pointer.Exchange(new Pair{i, -i}));
    rcu::WaitForReaders();
    old->value = 1'000'000;
  }
  stop.store(true, std::memory_order_relaxed);
  for (std::thread& reader : readers) reader.join();
  delete pointer.Exchange(nullptr);

  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace rxtoken
