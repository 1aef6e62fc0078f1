// SPDX-License-Identifier: Apache-2.0
// tsc_clock.h - CLOCK_MONOTONIC in nanoseconds, for the price of reading the cycle counter.
//
// Follows the system clock by comparing with it every 100 ms; never goes back.
//
// Thread-safety: one thread.   Hot path: Now.
#pragma once

#include <rte_cycles.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace rxtoken {

class TscClock {
 public:
  TscClock() { Synchronise(rte_rdtsc()); }

  std::uint64_t Now() noexcept {
    const std::uint64_t tsc = rte_rdtsc();
    if (tsc - tsc_ > synchronise_after_) [[unlikely]]
      Synchronise(tsc);
    const std::uint64_t now =
        ns_ + static_cast<std::uint64_t>(static_cast<double>(tsc - tsc_) * ns_per_tick_);
    return last_ = std::max(last_, now);
  }

 private:
  [[gnu::noinline]] void Synchronise(std::uint64_t tsc) noexcept {
    tsc_ = tsc;
    ns_ = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                         std::chrono::steady_clock::now().time_since_epoch())
                                         .count());
  }

  const double ns_per_tick_ = 1e9 / static_cast<double>(rte_get_tsc_hz());
  const std::uint64_t synchronise_after_ = rte_get_tsc_hz() / 10;
  std::uint64_t tsc_ = 0;
  std::uint64_t ns_ = 0;
  std::uint64_t last_ = 0;
};

}  // namespace rxtoken
