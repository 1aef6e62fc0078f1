// SPDX-License-Identifier: Apache-2.0
// message.h - one received message: pieces of payload, in place, on loan.
//
// Thread-safety: a Message belongs to one thread at a time. Messages of one RxSocket may be
//                read, moved, returned and destroyed by different threads at once, also
//                while another thread receives.
// Memory: 64 bytes. A message of more than one fragment allocates once.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "tokens/abi/token.h"

// An inline namespace, so that a program that links the daemon's libraries as well keeps
// their classes and these apart.
namespace rxtoken {
inline namespace sdk {

class Receiver;

// What it takes to give one fragment back: a page of a binding, and the lane it came over.
// A plain value: copy it, keep it, give it back once.
struct HeldToken {
  PageToken token = PageToken::FromWire(0);
  std::uint8_t lane = 0;
  std::uint16_t epoch = 0;    // which of the bindings that the token's slot has named on that lane
  std::uint32_t arrived = 0;  // by HoldClock(), to see whether its lease has ended
};

// A piece of a message that lies on one page.
class Fragment {
 public:
  // Readable until the fragment is given back. Empty for an empty datagram, which holds its
  // page all the same.
  std::span<const std::byte> payload() const noexcept { return {data_, length_}; }
  HeldToken token() const noexcept { return token_; }
  // Bytes from the start of the page to the payload.
  std::uint16_t offset() const noexcept { return offset_; }

 private:
  friend class Receiver;
  const std::byte* data_ = nullptr;
  HeldToken token_;
  std::uint16_t offset_ = 0;
  std::uint16_t length_ = 0;
};

// Who sent a message.
struct SourceAddress {
  std::uint8_t version = 0;                   // of IP: 4, 6, or 0 if the frame has no IP header
  std::uint16_t port = 0;                     // 0 if the frame has none
  std::array<std::uint8_t, 16> address = {};  // in network order; IPv4: the first four bytes

  // "192.0.2.1:4000", "[2001:db8::1]:4000", "192.0.2.1" without a port, "-" without IP.
  std::string ToString() const;

  friend bool operator==(const SourceAddress&, const SourceAddress&) = default;
};

// A message is on loan from its RxSocket: its pages take no new frames until it is given
// back, and a buffer without a free page drops what arrives. The destructor gives it back;
// Return() does so earlier; Release() leaves it to the caller's RxSocket::Return().
//
// A Message that outlives its RxSocket is harmless: there is nothing left to give back, and
// its payload stays mapped, but it may have been overwritten.
class Message {
 public:
  Message() noexcept = default;  // holds nothing
  Message(Message&& other) noexcept { Swap(other); }
  Message& operator=(Message&& other) noexcept {
    Message(std::move(other)).Swap(*this);
    return *this;
  }
  ~Message() {
    if (owner_ != nullptr) Return();
  }

  // In order; together they are the message. Empty if this holds nothing.
  std::span<const Fragment> fragments() const noexcept {
    return {more_ ? more_.get() : &first_, count_};
  }
  // Of the first fragment, which is the whole message unless its frame spans several pages.
  std::span<const std::byte> payload() const noexcept { return first_.payload(); }
  // Bytes, of all fragments.
  std::size_t size() const noexcept { return size_; }

  // Copies the front of the message, over all fragments; answers how many bytes.
  std::size_t CopyTo(std::span<std::byte> out) const noexcept;

  // Read from the frame's own headers, on each call. Precondition: fragments() is not empty.
  SourceAddress source() const noexcept;

  // When the worker took the frame from its queue; CLOCK_MONOTONIC.
  std::chrono::nanoseconds arrival_mono() const noexcept {
    return std::chrono::nanoseconds(arrival_mono_ns_);
  }
  // The same by the wall clock, as that clock is set now.
  std::chrono::system_clock::time_point arrival_time() const noexcept;

  // The payload starts at the Ethernet header: the RxSocket was opened with Content::kFrame,
  // or the frame is no UDP datagram.
  bool whole_frame() const noexcept;
  // The daemon copied it into its page, because it arrived outside the binding.
  bool copied() const noexcept;

  // Gives all fragments back. They are sent in lots: see RxSocket::Flush().
  void Return() noexcept;
  // Forgets the fragments without giving them back: the caller has their tokens. Payload
  // stays readable until its token goes to RxSocket::Return() or the RxSocket ends.
  void Release() noexcept { count_ = 0; }

 private:
  friend class Receiver;

  void Swap(Message& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(more_, other.more_);
    std::swap(first_, other.first_);
    std::swap(arrival_mono_ns_, other.arrival_mono_ns_);
    std::swap(count_, other.count_);
    std::swap(size_, other.size_);
    std::swap(flags_, other.flags_);
    std::swap(ip_header_distance_, other.ip_header_distance_);
  }

  Receiver* owner_ = nullptr;         // which counts us, until owner_ is null again
  std::unique_ptr<Fragment[]> more_;  // all fragments, if there are several
  Fragment first_;
  std::uint64_t arrival_mono_ns_ = 0;
  std::uint32_t count_ = 0;
  std::uint32_t size_ = 0;
  std::uint8_t flags_ = 0;
  std::uint8_t ip_header_distance_ = 0;
};
static_assert(sizeof(Message) == 64);

}  // namespace sdk
}  // namespace rxtoken
