// SPDX-License-Identifier: Apache-2.0
// stream.h - datagrams whose size and every byte follow from their number, so that a receiver
// that knows the stream can check each of them; and frames around them.
//
// Thread-safety: value types and functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace rxtoken::test {

struct Stream {
  std::uint64_t seed = 1;
  std::size_t min_bytes = 0;
  std::size_t max_bytes = 1472;  // of payload; every size between the two occurs
  bool numbered = false;         // begins with its number, 8 bytes; then min_bytes >= 8
};

std::size_t DatagramBytes(const Stream& stream, std::uint64_t number);
// Its payload.
std::vector<std::uint8_t> Datagram(const Stream& stream, std::uint64_t number);

// A complete frame: Ethernet, a VLAN tag if `vlan` is not 0, IPv4, UDP and the payload.
struct FrameOptions {
  std::uint16_t vlan = 0;
  std::uint32_t source = 0xC6120001;  // 198.18.0.1, host order
  std::uint32_t destination = 0xC6120002;
  std::uint16_t source_port = 4000;
  std::uint16_t destination_port = 5000;
};
std::vector<std::uint8_t> UdpFrame(const FrameOptions& options,
                                   std::span<const std::uint8_t> payload);

// The same as IP fragments of at most `room` bytes each, a multiple of 8, with IPv4 or IPv6 around
// them, in order.
std::vector<std::vector<std::uint8_t>> Fragments(const FrameOptions& options,
                                                 std::span<const std::uint8_t> payload, bool ipv6,
                                                 std::uint32_t id, std::size_t room);

// The parts of a capture file in libpcap's format.
std::vector<std::uint8_t> PcapHeader();
std::vector<std::uint8_t> PcapRecord(std::span<const std::uint8_t> frame);

// Sends datagrams 0 .. count - 1 from a kernel socket, in lots, and never runs more than
// `window` ahead of what `received` answers: beyond that the kernel would drop them. False if
// sending failed or the receiver made no progress.
struct Pace {
  std::uint64_t count = 0;
  std::uint64_t window = 0;
  std::function<std::uint64_t()> received = nullptr;  // null: no waiting
};
// From a UDP socket to an IPv4 or IPv6 address.
bool SendUdp(const std::string& address, std::uint16_t port, const Stream& stream,
             const Pace& pace);
// As frames from a packet socket, on an interface.
bool SendFrames(const std::string& interface, const FrameOptions& options, const Stream& stream,
                const Pace& pace);
// The same in fragments for an MTU of 1500, those of each datagram in random order.
bool SendShuffledFragments(const std::string& interface, bool ipv6, const Stream& stream,
                           const Pace& pace);

}  // namespace rxtoken::test
