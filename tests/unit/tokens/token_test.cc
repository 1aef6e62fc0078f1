// SPDX-License-Identifier: Apache-2.0
#include "tokens/abi/token.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace rxtoken {
namespace {

TEST(PageToken, KeepsSlotAndPageApart) {
  for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
    for (const std::uint32_t page : {0u, 1u, 4095u, kMaxPagesPerBuffer - 1}) {
      const PageToken token(static_cast<SlotId>(slot), static_cast<PageIndex>(page));

      EXPECT_EQ(token.slot(), static_cast<SlotId>(slot));
      EXPECT_EQ(token.page(), static_cast<PageIndex>(page));
    }
  }
}

TEST(PageToken, HasTheSlotInItsHighestFiveBits) {
  EXPECT_EQ(PageToken(SlotId{1}, PageIndex{0}).wire(), 1u << 27);
  EXPECT_EQ(PageToken(SlotId{31}, PageIndex{7}).wire(), 0xF800'0007u);
}

TEST(PageToken, DecodesEveryPattern) {
  for (std::uint64_t word = 0; word <= 0xFFFF'FFFFu; word += 65521) {
    const PageToken token = PageToken::FromWire(static_cast<std::uint32_t>(word));

    EXPECT_EQ(token.wire(), word);
    EXPECT_EQ(PageToken(token.slot(), token.page()), token);
  }
}

}  // namespace
}  // namespace rxtoken
