// SPDX-License-Identifier: Apache-2.0
// limits.h - the sizes that an application and the daemon must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rxtoken {

inline constexpr unsigned kSlotBits = 5;
inline constexpr unsigned kPageBits = 27;
static_assert(kSlotBits + kPageBits == 32);

inline constexpr std::uint32_t kSlotsPerRxSocket = 1u << kSlotBits;
inline constexpr std::uint32_t kMaxPagesPerBuffer = 1u << kPageBits;

inline constexpr std::uint32_t kMinPageBytes = 2048;
inline constexpr std::uint32_t kDefaultPageBytes = 4096;
inline constexpr std::uint32_t kMaxPageBytes = 65536;

// A page's owner is kept in 16 bits and a rx socket has one lane per worker.
inline constexpr std::uint32_t kMaxWorkers = 16;

inline constexpr std::uint32_t kMinRingEntries = 64;
inline constexpr std::uint32_t kDefaultRingEntries = 4096;
inline constexpr std::uint32_t kMaxRingEntries = 65536;

// Two lines: x86 prefetches cache lines in pairs, so words with different writers
// stay 128 bytes apart.
inline constexpr std::size_t kWriterAlignBytes = 128;

}  // namespace rxtoken
