// SPDX-License-Identifier: Apache-2.0
#include "client/src/source.h"

#include <algorithm>
#include <cstdint>

#include "rxtoken/rxtoken.h"

namespace rxtoken {
inline namespace sdk {
namespace {

constexpr std::size_t kUdpHeaderBytes = 8;
constexpr std::size_t kIpv4HeaderBytes = 20;
constexpr std::size_t kIpv6HeaderBytes = 40;

using Bytes = std::span<const std::byte>;

// Precondition for both: the bytes are there.
std::uint8_t Load8(Bytes bytes, std::size_t at) noexcept {
  return static_cast<std::uint8_t>(bytes[at]);
}
std::uint16_t Load16(Bytes bytes, std::size_t at) noexcept {
  return static_cast<std::uint16_t>(Load8(bytes, at) << 8 | Load8(bytes, at + 1));
}

// The address of an IP header, without the port.
SourceAddress SourceOfIp(Bytes ip) noexcept {
  SourceAddress source;
  const int version = ip.empty() ? 0 : Load8(ip, 0) >> 4;
  if (version == 4 && ip.size() >= kIpv4HeaderBytes) {
    source.version = 4;
    std::copy_n(reinterpret_cast<const std::uint8_t*>(ip.data()) + 12, 4, source.address.begin());
  } else if (version == 6 && ip.size() >= kIpv6HeaderBytes) {
    source.version = 6;
    std::copy_n(reinterpret_cast<const std::uint8_t*>(ip.data()) + 8, 16, source.address.begin());
  }
  return source;
}

bool HasPorts(std::uint8_t protocol) noexcept { return protocol == kUdp || protocol == kTcp; }

// Where the TCP or UDP header of an IP packet starts; 0 if there is none.
std::size_t FindTransport(Bytes ip, int version) noexcept {
  if (version == 4) {
    const bool later_fragment = (Load16(ip, 6) & 0x1FFF) != 0;
    const std::size_t header = std::size_t{4} * (Load8(ip, 0) & 0xF);
    return HasPorts(Load8(ip, 9)) && !later_fragment && header >= kIpv4HeaderBytes ? header : 0;
  }
  std::uint8_t next = Load8(ip, 6);
  std::size_t at = kIpv6HeaderBytes;
  while (!HasPorts(next)) {
    constexpr std::uint8_t kHopByHop = 0, kRouting = 43, kFragment = 44, kOptions = 60;
    if (next != kHopByHop && next != kRouting && next != kFragment && next != kOptions) return 0;
    if (ip.size() < at + 8) return 0;
    if (next == kFragment && (Load16(ip, at + 2) & 0xFFF8) != 0) return 0;  // a later fragment
    const std::size_t bytes = next == kFragment ? 8 : 8 * (Load8(ip, at + 1) + std::size_t{1});
    next = Load8(ip, at);
    at += bytes;
  }
  return at;
}

}  // namespace

SourceAddress SourceOfDatagram(Bytes headers) noexcept {
  SourceAddress source = SourceOfIp(headers);
  const std::size_t ip_bytes = source.version == 4 ? kIpv4HeaderBytes : kIpv6HeaderBytes;
  if (source.version != 0 && headers.size() >= ip_bytes + kUdpHeaderBytes) {
    source.port = Load16(headers, headers.size() - kUdpHeaderBytes);
  }
  return source;
}

SourceAddress SourceOfFrame(Bytes frame) noexcept {
  std::size_t at = 12;  // of the EtherType
  constexpr std::uint16_t kVlan = 0x8100, kQinQ = 0x88A8, kIpv4 = 0x0800, kIpv6 = 0x86DD;
  while (frame.size() >= at + 2 && (Load16(frame, at) == kVlan || Load16(frame, at) == kQinQ)) {
    at += 4;
  }
  if (frame.size() < at + 2) return {};
  const std::uint16_t type = Load16(frame, at);
  if (type != kIpv4 && type != kIpv6) return {};
  const Bytes ip = frame.subspan(at + 2);
  SourceAddress source = SourceOfIp(ip);
  if (source.version == 0) return source;
  const std::size_t transport = FindTransport(ip, source.version);
  if (transport != 0 && ip.size() >= transport + 2) source.port = Load16(ip, transport);
  return source;
}

}  // namespace sdk
}  // namespace rxtoken
