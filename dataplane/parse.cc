// SPDX-License-Identifier: Apache-2.0
#include "dataplane/parse.h"

namespace rxtoken::parse_internal {
namespace {

constexpr std::uint16_t kEtherTypeIpv4 = 0x0800;
constexpr std::uint16_t kEtherTypeIpv6 = 0x86DD;

constexpr std::uint8_t kHopByHop = 0;
constexpr std::uint8_t kTcp = 6;
constexpr std::uint8_t kUdp = 17;
constexpr std::uint8_t kRouting = 43;
constexpr std::uint8_t kFragment = 44;
constexpr std::uint8_t kAuthentication = 51;
constexpr std::uint8_t kDestinationOptions = 60;

constexpr int kMaxVlanTags = 2;
constexpr int kMaxExtensionHeaders = 8;

constexpr bool IsVlanTag(std::uint16_t ether_type) noexcept {
  return ether_type == 0x8100 || ether_type == 0x88A8 || ether_type == 0x9100;
}

// Where the parser is. Offsets count from the start of the frame.
struct Cursor {
  const std::uint8_t* frame;
  std::uint32_t length;  // bytes that lie at `frame`
  std::uint32_t end;     // of the layer being parsed, as far as its outer headers say
  std::uint32_t at;      // the next header
  std::uint16_t vlan;

  const std::uint8_t* header() const noexcept { return frame + at; }
  std::uint32_t left() const noexcept { return end - at; }
  // The next `bytes` bytes are a header that can be read.
  bool Has(std::uint32_t bytes) const noexcept {
    return bytes <= left() && at <= length && bytes <= length - at;
  }
};

// The transport header, which is at the cursor unless the packet is a fragment.
ParseStatus ParseTransport(const Cursor& cursor, std::uint32_t ip_header, IpFamily family,
                           std::uint8_t protocol, ParsedFrame& out) noexcept {
  std::uint16_t source = 0;
  std::uint16_t destination = 0;
  if (!out.is_fragment && protocol == kUdp) {
    if (!cursor.Has(8)) return ParseStatus::kTruncated;
    const std::uint32_t udp_length = Load16(cursor.header() + 4);
    if (udp_length < 8) return ParseStatus::kMalformed;
    if (udp_length > cursor.left()) return ParseStatus::kTruncated;
    source = Load16(cursor.header());
    destination = Load16(cursor.header() + 2);
    const std::uint32_t payload = cursor.at + 8;
    const std::uint32_t distance = payload - ip_header;
    out.payload_offset = static_cast<std::uint16_t>(payload);
    out.payload_length = static_cast<std::uint16_t>(udp_length - 8);
    out.ip_header_distance = static_cast<std::uint8_t>(distance <= 0xFF ? distance : 0);
    out.udp = true;
  } else if (!out.is_fragment && protocol == kTcp) {
    if (!cursor.Has(20)) return ParseStatus::kTruncated;
    const std::uint32_t header_bytes = (cursor.header()[12] >> 4) * 4u;
    if (header_bytes < 20) return ParseStatus::kMalformed;
    if (!cursor.Has(header_bytes)) return ParseStatus::kTruncated;
    source = Load16(cursor.header());
    destination = Load16(cursor.header() + 2);
  }
  out.key.w[1] = FlowKey::PortsWord(source, destination, protocol, family, cursor.vlan);
  return ParseStatus::kOk;
}

ParseStatus ParseIpv4(Cursor cursor, ParsedFrame& out) noexcept {
  if (!cursor.Has(20)) return ParseStatus::kTruncated;
  const std::uint8_t* ip = cursor.header();
  const std::uint32_t header_bytes = (ip[0] & 0x0F) * 4u;
  const std::uint32_t ip_length = Load16(ip + 2);
  if (ip[0] >> 4 != 4 || header_bytes < 20 || ip_length < header_bytes) {
    return ParseStatus::kMalformed;
  }
  if (ip_length > cursor.left() || !cursor.Has(header_bytes)) return ParseStatus::kTruncated;

  const std::uint32_t ip_header = cursor.at;
  const std::uint32_t field = Load16(ip + 6);
  out.is_fragment = (field & 0x3FFF) != 0;  // more fragments, or an offset
  out.key.w[0] = LoadRaw64(ip + 12);
  cursor.end = cursor.at + ip_length;
  cursor.at += header_bytes;
  if (out.is_fragment) {
    out.fragment = {.id = Load16(ip + 4),
                    .ip_header = static_cast<std::uint16_t>(ip_header),
                    .next_header = 0,
                    .data = static_cast<std::uint16_t>(cursor.at),
                    .data_bytes = static_cast<std::uint16_t>(cursor.left()),
                    .offset_bytes = static_cast<std::uint16_t>((field & 0x1FFF) * 8),
                    .more = (field & 0x2000) != 0};
  }
  return ParseTransport(cursor, ip_header, IpFamily::kV4, ip[9], out);
}

ParseStatus ParseIpv6(Cursor cursor, ParsedFrame& out) noexcept {
  if (!cursor.Has(40)) return ParseStatus::kTruncated;
  const std::uint8_t* ip = cursor.header();
  const std::uint32_t payload_length = Load16(ip + 4);
  std::uint8_t next = ip[6];
  if (ip[0] >> 4 != 6) return ParseStatus::kMalformed;
  // A jumbogram: longer than any frame that gets here can be.
  if (payload_length == 0 && next == kHopByHop) return ParseStatus::kMalformed;
  if (payload_length > cursor.left() - 40) return ParseStatus::kTruncated;

  const std::uint32_t ip_header = cursor.at;
  out.key.w[0] = LoadRaw64(ip + 8);
  out.key.w[2] = LoadRaw64(ip + 16);
  out.key.w[3] = LoadRaw64(ip + 24);
  out.key.w[4] = LoadRaw64(ip + 32);
  cursor.at += 40;
  cursor.end = cursor.at + payload_length;

  std::uint32_t next_header = ip_header + 6;  // where `next` was read
  bool fragment_header = false;
  for (int headers = 0; !out.is_fragment; ++headers) {
    const bool options = next == kHopByHop || next == kRouting || next == kDestinationOptions;
    if (!options && next != kFragment && next != kAuthentication) break;
    // Hop-by-hop options are allowed only as the first, a fragment header only once.
    if (headers == kMaxExtensionHeaders || (next == kHopByHop && headers != 0) ||
        (next == kFragment && fragment_header)) {
      return ParseStatus::kMalformed;
    }
    if (!cursor.Has(8)) return ParseStatus::kTruncated;
    const std::uint8_t* extension = cursor.header();
    std::uint32_t header_bytes = 8;
    if (next == kFragment) {
      fragment_header = true;
      const std::uint32_t field = Load16(extension + 2);
      out.is_fragment = (field & 0xFFF9) != 0;  // an offset, or more fragments
      out.fragment = {.id = LoadRaw32(extension + 4),
                      .ip_header = static_cast<std::uint16_t>(ip_header),
                      .next_header = static_cast<std::uint16_t>(next_header),
                      .data = static_cast<std::uint16_t>(cursor.at + 8),
                      .data_bytes = static_cast<std::uint16_t>(cursor.left() - 8),
                      .offset_bytes = static_cast<std::uint16_t>(field & 0xFFF8),
                      .more = (field & 1) != 0};
    } else {
      header_bytes = options ? (extension[1] + 1u) * 8 : (extension[1] + 2u) * 4;
    }
    if (!cursor.Has(header_bytes)) return ParseStatus::kTruncated;
    next = extension[0];
    next_header = cursor.at;
    cursor.at += header_bytes;
  }
  // What cannot stand behind a fragment header cannot after reassembly either.
  if (out.is_fragment && (next == kFragment || next == kHopByHop)) return ParseStatus::kMalformed;
  return ParseTransport(cursor, ip_header, IpFamily::kV6, next, out);
}

}  // namespace

ParseStatus ParseAnyFrame(const std::uint8_t* frame, std::uint32_t length,
                          std::uint32_t frame_length, ParsedFrame& out) noexcept {
  out.payload_offset = 0;
  out.payload_length = 0;
  out.ip_header_distance = 0;
  out.udp = false;
  out.is_fragment = false;

  Cursor cursor{.frame = frame, .length = length, .end = frame_length, .at = 0, .vlan = 0};
  if (!cursor.Has(14)) return ParseStatus::kTruncated;
  std::uint16_t ether_type = Load16(frame + 12);
  cursor.at = 14;
  for (int tags = 0; tags < kMaxVlanTags && IsVlanTag(ether_type); ++tags) {
    if (!cursor.Has(4)) return ParseStatus::kTruncated;
    if (tags == 0) cursor.vlan = Load16(cursor.header()) & 0x0FFF;
    ether_type = Load16(cursor.header() + 2);
    cursor.at += 4;
  }
  if (ether_type == kEtherTypeIpv4) return ParseIpv4(cursor, out);
  if (ether_type == kEtherTypeIpv6) return ParseIpv6(cursor, out);
  out.key.w[0] = 0;
  out.key.w[1] = FlowKey::PortsWord(0, 0, 0, IpFamily::kNone, cursor.vlan);
  return ParseStatus::kOk;
}

}  // namespace rxtoken::parse_internal
