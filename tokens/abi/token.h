// SPDX-License-Identifier: Apache-2.0
// token.h - the 32-bit name of one received page.
//
//   bit 31        27 26                                   0
//       +-----------+--------------------------------------+
//       |   Slot    |              PageIndex               |
//       +-----------+--------------------------------------+
//
// A token is a name, not a right: holding one proves nothing. Whoever takes one
// checks it against the uref array of the rx socket that presents it.
//
// Thread-safety: immutable value type.   Hot path: yes.   Allocates: never.
#pragma once

#include <compare>
#include <cstdint>

#include "tokens/abi/limits.h"

namespace rxtoken {

enum class SlotId : std::uint8_t {};
enum class PageIndex : std::uint32_t {};

class PageToken {
 public:
  // Precondition: slot < kSlotsPerRxSocket, page < kMaxPagesPerBuffer.
  // Untrusted words go through FromWire().
  constexpr PageToken(SlotId slot, PageIndex page) noexcept
      : word_((static_cast<std::uint32_t>(slot) << kPageBits) | static_cast<std::uint32_t>(page)) {}

  // Every 32-bit pattern decodes; whether it is held is for the lane to decide.
  static constexpr PageToken FromWire(std::uint32_t word) noexcept { return PageToken(word); }

  constexpr SlotId slot() const noexcept { return static_cast<SlotId>(word_ >> kPageBits); }
  constexpr PageIndex page() const noexcept {
    return static_cast<PageIndex>(word_ & (kMaxPagesPerBuffer - 1));
  }
  constexpr std::uint32_t wire() const noexcept { return word_; }

  friend constexpr auto operator<=>(PageToken, PageToken) noexcept = default;

 private:
  explicit constexpr PageToken(std::uint32_t word) noexcept : word_(word) {}
  std::uint32_t word_;
};
static_assert(sizeof(PageToken) == 4);
static_assert(PageToken::FromWire(0xFFFF'FFFFu).slot() == SlotId{31});

}  // namespace rxtoken
