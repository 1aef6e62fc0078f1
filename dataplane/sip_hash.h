// SPDX-License-Identifier: Apache-2.0
// sip_hash.h - SipHash (Aumasson, Bernstein 2012) of 64-bit words, for tables that strangers fill.
//
// Hot path: yes.   Thread-safety: value type.   Allocates: never.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace rxtoken {

// kC rounds for each word, kD at the end. SipHash<1, 3> is for hash tables.
template <int kC, int kD>
class SipHash {
 public:
  explicit constexpr SipHash(const std::array<std::uint64_t, 2>& key) noexcept
      : a_(key[0] ^ 0x736f6d6570736575),
        b_(key[1] ^ 0x646f72616e646f6d),
        c_(key[0] ^ 0x6c7967656e657261),
        d_(key[1] ^ 0x7465646279746573) {}

  constexpr void Add(std::uint64_t word) noexcept {
    d_ ^= word;
    Rounds(kC);
    a_ ^= word;
  }
  // `last`: the bytes after the last whole word, with the length of all (mod 256) on top.
  constexpr std::uint64_t Finish(std::uint64_t last) noexcept {
    Add(last);
    c_ ^= 0xFF;
    Rounds(kD);
    return a_ ^ b_ ^ c_ ^ d_;
  }

 private:
  constexpr void Rounds(int n) noexcept {
    for (; n != 0; n--) {
      a_ += b_;
      c_ += d_;
      b_ = std::rotl(b_, 13) ^ a_;
      d_ = std::rotl(d_, 16) ^ c_;
      a_ = std::rotl(a_, 32) + d_;
      c_ += b_;
      d_ = std::rotl(d_, 21) ^ a_;
      b_ = std::rotl(b_, 17) ^ c_;
      c_ = std::rotl(c_, 32);
    }
  }

  std::uint64_t a_, b_, c_, d_;
};

}  // namespace rxtoken
