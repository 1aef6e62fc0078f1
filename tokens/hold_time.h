// SPDX-License-Identifier: Apache-2.0
// hold_time.h - for how long pages are held, in ticks of HoldClock().
//
// Thread-safety: pure functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "tokens/abi/ring.h"

namespace rxtoken {

// From `since` to `now`; 0 if that has not come yet, as clocks of two processors may say.
constexpr std::uint32_t HoldTicks(std::uint32_t since, std::uint32_t now) noexcept {
  return IsAfter(since, now) ? 0 : now - since;
}

// Powers of two: bucket i counts what was held for less than 2^i ticks, but not for less than
// half of that; the last one everything that is longer.
inline constexpr std::uint32_t kHoldBuckets = 24;
constexpr std::uint32_t HoldBucket(std::uint32_t ticks) noexcept {
  return std::min(static_cast<std::uint32_t>(std::bit_width(ticks)), kHoldBuckets - 1);
}

}  // namespace rxtoken
