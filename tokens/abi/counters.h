// SPDX-License-Identifier: Apache-2.0
// counters.h - every reason for which rxtoken drops a packet or refuses a token.
//
// The one list: enums, the API, rxtokenctl and the documentation take their names
// from here. Append only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace rxtoken {

//   X(enumerator, name, meaning)
#define RXTOKEN_DROP_REASONS(X)                                                                    \
  X(kNoBinding, "no_binding", "the queue has no binding")                                          \
  X(kNoRule, "no_rule", "no flow rule matches the frame")                                          \
  X(kTruncated, "truncated", "a header or length field reaches past the end of the frame")         \
  X(kMalformed, "malformed", "a header field has a value that its protocol forbids")               \
  X(kNotAttached, "not_attached", "the rx socket has no application attached")                     \
  X(kRingFull, "ring_full", "the rx socket's descriptor ring is full")                             \
  X(kNoSlot, "no_slot", "all 32 slots have outstanding tokens, and too much waits")                \
  X(kHeldLimit, "held_limit", "the rx socket holds max_held_fragments already")                    \
  X(kOutside, "outside", "it lies outside the bindings that the rx socket may use")                \
  X(kTooManySegments, "too_many_segments", "the frame is spread over more than 64 pages")          \
  X(kNoPage, "no_page", "no free page to copy a frame into that arrived outside the binding")      \
  X(kFragmentBacklog, "fragment_backlog", "IP fragments came faster than they can be reassembled") \
  X(kLeaseLost, "lease_lost", "the rx socket has not read yet that fragments it held expired")

#define RXTOKEN_REFUSALS(X)                                                                  \
  X(kSlotNotInUse, "slot_not_in_use", "nothing is outstanding under the token's slot")       \
  X(kOutOfRange, "out_of_range", "the buffer has no such page")                              \
  X(kWrongOwner, "wrong_owner", "the page is another worker's")                              \
  X(kNotHeld, "not_held", "the rx socket does not hold the page: returned twice, or forged") \
  X(kBadRing, "bad_ring", "the return ring's tail is further ahead than the ring is long")   \
  X(kStale, "stale", "the page was taken back: its lease ended, or its binding")

#define RXTOKEN_ENUMERATOR(enumerator, name, meaning) enumerator,
#define RXTOKEN_NAME(enumerator, name, meaning) std::string_view(name),
#define RXTOKEN_MEANING(enumerator, name, meaning) std::string_view(meaning),

enum class DropReason : std::uint8_t { RXTOKEN_DROP_REASONS(RXTOKEN_ENUMERATOR) kCount };
enum class Refusal : std::uint8_t { RXTOKEN_REFUSALS(RXTOKEN_ENUMERATOR) kCount };

inline constexpr std::size_t kDropReasons = static_cast<std::size_t>(DropReason::kCount);
inline constexpr std::size_t kRefusals = static_cast<std::size_t>(Refusal::kCount);

inline constexpr std::array<std::string_view, kDropReasons> kDropReasonNames = {
    RXTOKEN_DROP_REASONS(RXTOKEN_NAME)};
inline constexpr std::array<std::string_view, kDropReasons> kDropReasonMeanings = {
    RXTOKEN_DROP_REASONS(RXTOKEN_MEANING)};
inline constexpr std::array<std::string_view, kRefusals> kRefusalNames = {
    RXTOKEN_REFUSALS(RXTOKEN_NAME)};
inline constexpr std::array<std::string_view, kRefusals> kRefusalMeanings = {
    RXTOKEN_REFUSALS(RXTOKEN_MEANING)};

#undef RXTOKEN_ENUMERATOR
#undef RXTOKEN_NAME
#undef RXTOKEN_MEANING

}  // namespace rxtoken
