// SPDX-License-Identifier: Apache-2.0
// ring.h - the shared memory between one worker and one application: a lane.
//
//     worker ---- DescriptorRing (application maps it read-only) ----> application
//     worker <--- ReturnRing (application maps it read-write) -------- application
//
// A rx socket has one lane per worker. Its descriptor rings lie one after the other in
// one memfd, its return rings in another; lane i starts at i * DescriptorRingBytes(n),
// respectively i * ReturnRingBytes(n). Indices are free-running 32-bit counters; an
// entry's place is index & (entries - 1).
//
//   word               writer        reader        order
//   ----               ------        ------        -----
//   tail               worker        application   release / acquire
//   return_head        worker        application   release / acquire
//   closed             worker        application   release / acquire
//   ReturnRing::*      application   worker        release / acquire, and not trusted:
//                                                  copied once, checked, then used
//
// A return ring is read while something is outstanding on its lane. What is put there when
// nothing is, by mistake therefore, waits until the lane is lent to again.
//
// This file is the ABI: a change of any size or offset below bumps kAbiMajor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tokens/abi/limits.h"

namespace rxtoken {

inline constexpr std::uint32_t kAbiMagic = 0x4B54'5852;  // "RXTK"
inline constexpr std::uint16_t kAbiMajor = 1;            // other value: refuse
inline constexpr std::uint16_t kAbiMinor = 1;            // higher value: ignore what is new

enum class DescriptorKind : std::uint8_t {
  kFragment = 1,    // a piece of a message, lent
  kSlotMapped = 2,  // from here on this lane's `slot` names pages of `binding`
  kTime = 3,        // from here on arrival times have `time_high` as upper half
  kUnbound = 4,     // `binding` was unbound: nothing more of it will come on this lane
  kRevoked = 5,     // the tokens of this lane's `slot` are void; their pages were taken back
  // The lease of fragments of this lane's `slot`, which names `binding`, has ended: those that
  // arrived at `expired_at` or before are void. The slot's other tokens stay good, but nothing
  // more is lent under it until it is mapped again; and nothing at all is lent on this lane until
  // this descriptor is consumed. What is void must not be put into the return ring after that.
  kExpired = 6,
  // Of `binding`, of which this lane holds something, less than an eighth of the pages are free.
  // Said again only after a quarter was.
  kLowWater = 7,
  // max_held_fragments are outstanding on this lane, and what arrives for it is not lent. Said
  // again only after half of them have come back.
  kHeldLimit = 8,
};

// The clock by which it is seen for how long a page is held: a tick is 65.5 us. It wraps after
// three days; a difference, as a signed number, holds for half of that.
constexpr std::uint32_t HoldClock(std::uint64_t time_ns) noexcept {
  return static_cast<std::uint32_t>(time_ns >> 16);
}
constexpr std::uint64_t HoldClockNs(std::uint32_t ticks) noexcept {
  return std::uint64_t{ticks} << 16;
}
constexpr bool IsAfter(std::uint32_t ticks, std::uint32_t other) noexcept {
  return static_cast<std::int32_t>(ticks - other) > 0;
}

// Flags of a kFragment descriptor.
inline constexpr std::uint8_t kMoreFragments = 1u << 0;  // the message goes on in the next one
inline constexpr std::uint8_t kWholeFrame = 1u << 1;     // starts at the Ethernet header
inline constexpr std::uint8_t kCopied = 1u << 2;         // the daemon copied it into the page

// One entry of the descriptor ring: 16 bytes, because 32 cost 2 to 3.4 ns a packet more.
struct Descriptor {
  DescriptorKind kind;
  std::uint8_t flags;
  // kFragment, first of its message: bytes from the start of the IP header to the payload,
  // in front of which it lies on the same page; the source address is read from there.
  // 0: no IP header was recognised.
  std::uint8_t ip_header_distance;
  std::uint8_t slot;  // kSlotMapped, kRevoked, kExpired
  union {
    std::uint32_t token;      // kFragment: PageToken::wire()
    std::uint32_t binding;    // kSlotMapped, kUnbound, kRevoked, kExpired, kLowWater: id, never
                              // reused while the daemon runs
    std::uint32_t time_high;  // kTime
  };
  std::uint16_t offset;  // kFragment: bytes from the start of the page
  std::uint16_t length;  // kFragment: bytes; 0 for an empty datagram
  union {
    std::uint32_t time_low;    // kFragment: lower half of the arrival time, CLOCK_MONOTONIC ns
    std::uint32_t expired_at;  // kExpired: HoldClock() of that clock
  };
};
static_assert(sizeof(Descriptor) == 16);
static_assert(offsetof(Descriptor, token) == 4);
static_assert(offsetof(Descriptor, offset) == 8);
static_assert(offsetof(Descriptor, length) == 10);
static_assert(offsetof(Descriptor, time_low) == 12);

// Why a rx socket ended; DescriptorRing::closed.
enum class CloseReason : std::uint32_t { kOpen = 0, kClosed = 1, kDaemonStopped = 2 };

struct DescriptorRing {
  // -- daemon writes once, before the application can map it ----------------------------
  std::uint32_t magic;
  std::uint16_t abi_major;
  std::uint16_t abi_minor;
  std::uint32_t entries;  // power of two, also of the return ring
  std::uint32_t worker;

  // -- worker writes ----------------------------------------------------------------------
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> tail;
  std::atomic<std::uint32_t> closed;  // CloseReason
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> return_head;

  Descriptor* descriptors() noexcept { return reinterpret_cast<Descriptor*>(this + 1); }
  const Descriptor* descriptors() const noexcept {
    return reinterpret_cast<const Descriptor*>(this + 1);
  }
};
static_assert(sizeof(DescriptorRing) == 384);
static_assert(offsetof(DescriptorRing, tail) == 128);
static_assert(offsetof(DescriptorRing, closed) == 132);
static_assert(offsetof(DescriptorRing, return_head) == 256);

struct ReturnRing {
  // -- application writes, worker reads: untrusted ----------------------------------------
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> tail;
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> descriptor_head;
  // Not 0: the application is about to sleep and wants one doorbell. Each sleep uses a new
  // value, so that the worker rings once per sleep without ever writing here. On a line of
  // its own: the worker reads it at every publication.
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> waiting;

  std::atomic<std::uint32_t>* tokens() noexcept {
    return reinterpret_cast<std::atomic<std::uint32_t>*>(this + 1);
  }
};
static_assert(sizeof(ReturnRing) == 384);
static_assert(offsetof(ReturnRing, descriptor_head) == 128);
static_assert(offsetof(ReturnRing, waiting) == 256);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Bytes from one lane to the next. `entries` is a power of two in
// [kMinRingEntries, kMaxRingEntries].
constexpr std::size_t DescriptorRingBytes(std::uint32_t entries) noexcept {
  return (sizeof(DescriptorRing) + entries * sizeof(Descriptor) + 4095) / 4096 * 4096;
}
constexpr std::size_t ReturnRingBytes(std::uint32_t entries) noexcept {
  return (sizeof(ReturnRing) + entries * sizeof(std::uint32_t) + 4095) / 4096 * 4096;
}

}  // namespace rxtoken
