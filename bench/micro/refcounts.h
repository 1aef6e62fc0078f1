// SPDX-License-Identifier: Apache-2.0
// refcounts.h - rcuref, and the two counts that it is compared with.
#pragma once

#include <atomic>
#include <cstdint>

#include "bench/micro/harness.h"
#include "tokens/rcuref.h"

namespace rxtoken::micro {

struct RcurefCount {
  bool Get() noexcept { return count.TryGet(); }
  bool Put() noexcept { return count.Put(); }
  Rcuref count;
};

// What a get and a put cost at least, if nobody looked at the result.
struct PlainCount {
  bool Get() noexcept {
    count.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  bool Put() noexcept {
    count.fetch_sub(1, std::memory_order_release);
    return false;
  }
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> count{1};
};

// As the kernel does without rcuref: atomic_inc_not_zero, atomic_dec_and_test.
struct IncNotZeroCount {
  bool Get() noexcept {
    std::uint32_t held = count.load(std::memory_order_relaxed);
    do {
      if (held == 0) return false;
    } while (!count.compare_exchange_weak(held, held + 1, std::memory_order_relaxed));
    return true;
  }
  bool Put() noexcept { return count.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> count{1};
};

template <typename Count>
void GetAndPut(Count& count, std::uint64_t n) {
  for (; n != 0; n--) {
    if (!count.Get() || count.Put()) Die("a count that is held reached zero");
  }
}

}  // namespace rxtoken::micro
