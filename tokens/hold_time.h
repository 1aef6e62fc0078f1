// SPDX-License-Identifier: Apache-2.0
// hold_time.h - for how long pages are held: a clock of 32 bits, and a histogram of its ticks.
//
// Thread-safety: pure functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace rxtoken {

// A tick is 65.5 us. The clock wraps after three days; a difference holds for half of that.
constexpr std::uint32_t HoldClock(std::uint64_t time_ns) noexcept {
  return static_cast<std::uint32_t>(time_ns >> 16);
}
constexpr std::uint64_t HoldClockNs(std::uint32_t ticks) noexcept {
  return std::uint64_t{ticks} << 16;
}
// From `since` to `now`; 0 if that has not come yet, as clocks of two processors may say.
constexpr std::uint32_t HoldTicks(std::uint32_t since, std::uint32_t now) noexcept {
  return static_cast<std::int32_t>(now - since) < 0 ? 0 : now - since;
}

// Powers of two: bucket i counts what was held for less than 2^i ticks, but not for less than
// half of that; the last one everything that is longer.
inline constexpr std::uint32_t kHoldBuckets = 24;
constexpr std::uint32_t HoldBucket(std::uint32_t ticks) noexcept {
  return std::min(static_cast<std::uint32_t>(std::bit_width(ticks)), kHoldBuckets - 1);
}

}  // namespace rxtoken
