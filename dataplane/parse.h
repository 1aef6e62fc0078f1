// SPDX-License-Identifier: Apache-2.0
// parse.h - from the bytes of a frame to the key of its flow and the place of its payload.
//
// Ethernet, up to two VLAN tags, IPv4 with options, IPv6 with extension headers, UDP, TCP.
// Nothing is read that was not checked to be there, whatever the bytes say. Checksums are
// not looked at.
//
// Hot path: yes; an untagged IPv4 UDP frame without options takes the inline short cut.
// Thread-safety: pure functions.   Allocates: never.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dataplane/flow_rule.h"

namespace rxtoken {

enum class ParseStatus : std::uint8_t {
  kOk,
  kTruncated,  // a header or a length field reaches past the frame, or a header past `length`
  kMalformed,  // a field has a value that its protocol forbids
};

// A piece of a datagram. Positions count from the start of the frame.
struct IpFragment {
  std::uint32_t id;            // compared only
  std::uint16_t ip_header;     // position
  std::uint16_t next_header;   // position of the byte that names the fragment header; IPv6 only
  std::uint16_t data;          // position of what it carries
  std::uint16_t data_bytes;    // without Ethernet padding; may be 0
  std::uint16_t offset_bytes;  // of its data in the datagram's; a multiple of 8
  bool more;                   // it is not the datagram's last
};

struct ParsedFrame {
  FlowKey key;                      // w[2] to w[4] are left alone unless the frame is IPv6
  std::uint16_t payload_length;     // UDP only, else 0
  std::uint16_t payload_offset;     // from the start of the frame; UDP only, else 0
  std::uint8_t ip_header_distance;  // payload_offset - start of the IP header; UDP only, else 0.
                                    // 0 as well where extension headers make it more than 255
  bool udp;                         // a whole UDP datagram: payload_* are set
  bool is_fragment;                 // of an IP datagram: `fragment` is set
  IpFragment fragment;
};

namespace parse_internal {

static_assert(std::endian::native == std::endian::little);

inline std::uint16_t Load16(const std::uint8_t* at) noexcept {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return __builtin_bswap16(value);
}

// As they lie there, for addresses and fragment ids.
inline std::uint32_t LoadRaw32(const std::uint8_t* at) noexcept {
  std::uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
inline std::uint64_t LoadRaw64(const std::uint8_t* at) noexcept {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

ParseStatus ParseAnyFrame(const std::uint8_t* frame, std::uint32_t length,
                          std::uint32_t frame_length, ParsedFrame& out) noexcept;

}  // namespace parse_internal

// Parses the frame whose first `length` bytes lie at `frame`; the rest of its `frame_length`
// bytes may lie elsewhere. All headers must be in the first part, the payload need not be.
// A frame with no IP header, or a protocol other than UDP, is kOk with udp = false. Bytes
// past the end that the IP header states (Ethernet padding) are not payload. An IPv6 packet in a
// single fragment (RFC 6946) is whole; fragments of fragments are malformed.
//
// Precondition: length <= frame_length <= 2^31. `out` means something only after kOk.
inline ParseStatus ParseFrame(const std::uint8_t* frame, std::uint32_t length,
                              std::uint32_t frame_length, ParsedFrame& out) noexcept {
  using namespace parse_internal;
  constexpr std::uint32_t kIp = 14;
  constexpr std::uint32_t kUdp = kIp + 20;
  constexpr std::uint32_t kPayload = kUdp + 8;
  constexpr std::uint8_t kProtocolUdp = 17;

  if (length >= kPayload && Load16(frame + 12) == 0x0800 && frame[kIp] == 0x45 &&
      frame[kIp + 9] == kProtocolUdp && (Load16(frame + kIp + 6) & 0x3FFF) == 0) [[likely]] {
    const std::uint32_t ip_length = Load16(frame + kIp + 2);
    const std::uint32_t udp_length = Load16(frame + kUdp + 4);
    if (ip_length <= frame_length - kIp && udp_length >= 8 && udp_length + 20 <= ip_length)
        [[likely]] {
      out.key.w[0] = LoadRaw64(frame + kIp + 12);
      out.key.w[1] = FlowKey::PortsWord(Load16(frame + kUdp), Load16(frame + kUdp + 2),
                                        kProtocolUdp, IpFamily::kV4, 0);
      out.payload_offset = kPayload;
      out.payload_length = static_cast<std::uint16_t>(udp_length - 8);
      out.ip_header_distance = kPayload - kIp;
      out.udp = true;
      out.is_fragment = false;
      return ParseStatus::kOk;
    }
  }
  return ParseAnyFrame(frame, length, frame_length, out);
}

}  // namespace rxtoken
