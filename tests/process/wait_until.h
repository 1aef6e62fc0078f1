// SPDX-License-Identifier: Apache-2.0
// wait_until.h - how tests wait: for a condition, with a deadline.
#pragma once

#include <poll.h>

#include <chrono>

namespace rxtoken::test {

// For everything that must happen; only a test that fails waits so long.
inline constexpr std::chrono::seconds kDeadline{60};

// True as soon as `condition` is; false if it is not before the timeout.
template <typename Condition>
bool WaitUntil(Condition condition, std::chrono::milliseconds timeout = kDeadline) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    poll(nullptr, 0, 1);  // leaves the processor to those that we wait for
  }
  return true;
}

}  // namespace rxtoken::test
