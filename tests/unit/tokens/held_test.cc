// SPDX-License-Identifier: Apache-2.0
#include "tokens/held.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace rxtoken {
namespace {

struct Object : Holdable {
  explicit Object(int* freed_) : freed(freed_) {}
  ~Object() override { ++*freed; }
  int* const freed;
  int content = 0;
};

class HeldTest : public testing::Test {
 protected:
  Held<Object> Make() { return Held(std::make_unique<Object>(&freed_)); }
  int freed_ = 0;
};

TEST_F(HeldTest, HoldsNothingAtFirst) {
  const Held<Object> nothing;
  const Held<Object> copy(nothing);

  EXPECT_FALSE(nothing);
  EXPECT_EQ(copy.get(), nullptr);
}

TEST_F(HeldTest, FreesTheObjectWithItsLastHolder) {
  Held<Object> first = Make();
  first->content = 3;
  {
    const Held<Object> second(first);
    first = Held<Object>();
    EXPECT_FALSE(first);
    EXPECT_EQ(freed_, 0);
    EXPECT_EQ(second->content, 3);
  }
  EXPECT_EQ(freed_, 1);
}

TEST_F(HeldTest, IsHeldByItsBaseAsWell) {
  Held<Object> object = Make();
  Held<const Holdable> base(object);

  object = {};
  EXPECT_EQ(freed_, 0);
  base = {};

  EXPECT_EQ(freed_, 1);
}

TEST_F(HeldTest, MovesWithoutLettingGo) {
  Held<Object> first = Make();
  Held<Object> second(std::move(first));
  EXPECT_FALSE(first);  // NOLINT: a moved-from Held is empty

  second = Make();  // lets the first object go
  EXPECT_EQ(freed_, 1);
  Held<Object>& same = second;
  second = same;

  EXPECT_EQ(freed_, 1);
  EXPECT_TRUE(second);
}

TEST_F(HeldTest, IsFreedOnceWhicheverThreadLetsGoLast) {
  constexpr int kRounds = 500;
  for (int round = 0; round < kRounds; round++) {
    Held<Object> object = Make();
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++) {
      threads.emplace_back([copy = object] { EXPECT_EQ(copy->content, 0); });
    }
    object = {};
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(freed_, round + 1);
  }
}

}  // namespace
}  // namespace rxtoken
