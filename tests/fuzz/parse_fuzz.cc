// SPDX-License-Identifier: Apache-2.0
// parse_fuzz.cc - a frame from the wire: any bytes at all, cut anywhere into a first segment and
// the rest.
//
// Input: two bytes, the length of the first segment (less if there are not so many); the frame.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "dataplane/parse.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rxtoken;
  if (size < 2) return 0;
  const auto frame_length = static_cast<std::uint32_t>(size - 2);
  const std::uint32_t length = std::min<std::uint32_t>(data[0] | data[1] << 8, frame_length);
  // The first segment in a block of its own size: the address sanitizer sees what is read past it.
  const std::unique_ptr<std::uint8_t[]> segment(new std::uint8_t[length]);
  std::copy_n(data + 2, length, segment.get());

  ParsedFrame parsed = {};
  const ParseStatus status = ParseFrame(segment.get(), length, frame_length, parsed);
  ParsedFrame again = {};
  const ParseStatus without_short_cut =
      parse_internal::ParseAnyFrame(segment.get(), length, frame_length, again);
  Require(status == without_short_cut);
  if (status != ParseStatus::kOk) return 0;

  Require(parsed.key.w == again.key.w && parsed.udp == again.udp &&
          parsed.payload_offset == again.payload_offset &&
          parsed.payload_length == again.payload_length &&
          parsed.ip_header_distance == again.ip_header_distance &&
          parsed.is_fragment == again.is_fragment);
  if (parsed.is_fragment) {
    const IpFragment& fragment = parsed.fragment;
    Require(!parsed.udp && fragment.ip_header < fragment.data && fragment.data <= length);
    Require(fragment.next_header < fragment.data);
    Require(fragment.data + fragment.data_bytes <= frame_length && fragment.offset_bytes % 8 == 0);
    Require(fragment.more || fragment.offset_bytes != 0);
  }
  if (!parsed.udp) {
    Require(parsed.payload_offset == 0 && parsed.payload_length == 0 &&
            parsed.ip_header_distance == 0);
    return 0;
  }
  Require(parsed.payload_offset <= length);
  Require(parsed.payload_offset + parsed.payload_length <= frame_length);
  if (parsed.ip_header_distance != 0) {
    const std::uint8_t version = segment[parsed.payload_offset - parsed.ip_header_distance] >> 4;
    Require(version == static_cast<std::uint8_t>(parsed.key.family()));
  }
  return 0;
}
