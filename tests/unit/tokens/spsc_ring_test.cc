// SPDX-License-Identifier: Apache-2.0
#include "tokens/spsc_ring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <thread>

namespace rxtoken {
namespace {

TEST(SpscRing, StartsEmpty) {
  static SpscRing<int, 4> ring;  // static: the compiler cannot tell that nothing is read

  EXPECT_EQ(ring.TryPop(), std::nullopt);
}

TEST(SpscRing, KeepsTheOrder) {
  SpscRing<int, 4> ring;
  EXPECT_TRUE(ring.TryPush(1));
  EXPECT_TRUE(ring.TryPush(2));

  EXPECT_EQ(ring.TryPop(), 1);
  EXPECT_EQ(ring.TryPop(), 2);
  EXPECT_EQ(ring.TryPop(), std::nullopt);
}

TEST(SpscRing, RefusesWhenFullAndTakesAgainAfterAPop) {
  SpscRing<int, 4> ring;
  for (int i = 0; i < 4; i++) EXPECT_TRUE(ring.TryPush(i));

  EXPECT_FALSE(ring.TryPush(4));
  EXPECT_EQ(ring.TryPop(), 0);
  EXPECT_TRUE(ring.TryPush(5));
  EXPECT_EQ(ring.TryPop(), 1);
}

TEST(SpscRing, CarriesEverythingFromOneThreadToAnother) {
  constexpr std::uint64_t kItems = 100'000;
  struct Item {
    std::uint64_t number;
    std::uint64_t twice;
  };
  SpscRing<Item, 64> ring;
  std::thread pusher([&] {
    for (std::uint64_t i = 0; i < kItems;) {
      if (ring.TryPush({i, 2 * i})) {
        i++;
      } else {
        std::this_thread::yield();
      }
    }
  });

  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < kItems;) {
    const std::optional<Item> item = ring.TryPop();
    if (!item) {
      std::this_thread::yield();
      continue;
    }
    wrong += item->number != i || item->twice != 2 * i;
    i++;
  }
  pusher.join();

  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace rxtoken
