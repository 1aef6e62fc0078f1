// SPDX-License-Identifier: Apache-2.0
#include "dataplane/parse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

namespace rxtoken {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t kTcp = 6;
constexpr std::uint8_t kUdp = 17;
constexpr std::uint8_t kHopByHop = 0;
constexpr std::uint8_t kRouting = 43;
constexpr std::uint8_t kFragment = 44;
constexpr std::uint8_t kAuthentication = 51;
constexpr std::uint8_t kNoNextHeader = 59;
constexpr std::uint8_t kDestinationOptions = 60;

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Bytes Be16(std::size_t value) {
  return {static_cast<std::uint8_t>(value >> 8), static_cast<std::uint8_t>(value)};
}

Bytes Ethernet(std::uint16_t ether_type) { return Bytes(12, 0x02) + Be16(ether_type); }

// What follows the tag type of the header before it.
Bytes Vlan(std::uint16_t tci, std::uint16_t ether_type) { return Be16(tci) + Be16(ether_type); }

Bytes Ipv4(std::uint8_t protocol, const Bytes& payload, std::uint16_t fragment = 0,
           std::size_t option_words = 0) {
  const std::size_t header = 20 + option_words * 4;
  return Bytes{static_cast<std::uint8_t>(0x40 | header / 4), 0} + Be16(header + payload.size()) +
         Be16(0x1234) + Be16(fragment) + Bytes{64, protocol, 0, 0} + Bytes{10, 0, 0, 1} +
         Bytes{10, 0, 0, 2} + Bytes(option_words * 4, 1) + payload;
}

Bytes Ipv6(std::uint8_t next, const Bytes& payload) {
  Bytes header = Bytes{0x60, 0, 0, 0} + Be16(payload.size()) + Bytes{next, 64};
  for (std::uint8_t i = 0; i < 32; ++i) header.push_back(static_cast<std::uint8_t>(0xA0 + i));
  return header + payload;
}

// Hop-by-hop, routing or destination options of 8 * `units` bytes.
Bytes Options(std::uint8_t next, std::size_t units = 1) {
  return Bytes{next, static_cast<std::uint8_t>(units - 1)} + Bytes(units * 8 - 2, 0);
}

Bytes FragmentHeader(std::uint8_t next, std::uint16_t offset_and_more) {
  return Bytes{next, 0} + Be16(offset_and_more) + Bytes{0, 0, 0, 7};
}

Bytes Authentication(std::uint8_t next, std::size_t words) {
  return Bytes{next, static_cast<std::uint8_t>(words - 2)} + Bytes(words * 4 - 2, 9);
}

Bytes Udp(const Bytes& payload) {
  return Be16(1000) + Be16(2000) + Be16(8 + payload.size()) + Be16(0) + payload;
}

Bytes Tcp(const Bytes& payload, std::size_t option_words = 0) {
  return Be16(1000) + Be16(2000) + Bytes(8, 0) +
         Bytes{static_cast<std::uint8_t>((5 + option_words) << 4), 0} + Bytes(6, 0) +
         Bytes(option_words * 4, 1) + payload;
}

const Bytes kHello = {'h', 'e', 'l', 'l', 'o'};

struct Parsed : ParsedFrame {
  ParseStatus status;
};

// Parses a frame of which only the first `length` bytes lie together. They are copied to a
// block of exactly that size, so that the address sanitizer sees every read past it.
Parsed Parse(const Bytes& frame, std::size_t length) {
  const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[length]);
  std::copy_n(frame.begin(), length, exact.get());
  Parsed parsed = {};
  parsed.status = ParseFrame(exact.get(), static_cast<std::uint32_t>(length),
                             static_cast<std::uint32_t>(frame.size()), parsed);
  return parsed;
}
Parsed Parse(const Bytes& frame) { return Parse(frame, frame.size()); }

std::uint64_t PortsWord(std::uint8_t protocol, IpFamily family, std::uint16_t vlan = 0) {
  return FlowKey::PortsWord(1000, 2000, protocol, family, vlan);
}
std::uint64_t NoPortsWord(std::uint8_t protocol, IpFamily family, std::uint16_t vlan = 0) {
  return FlowKey::PortsWord(0, 0, protocol, family, vlan);
}

void ExpectHello(const Bytes& frame, const Parsed& parsed) {
  ASSERT_EQ(parsed.status, ParseStatus::kOk);
  ASSERT_TRUE(parsed.udp);
  ASSERT_EQ(parsed.payload_length, kHello.size());
  ASSERT_LE(parsed.payload_offset + kHello.size(), frame.size());
  EXPECT_TRUE(std::equal(kHello.begin(), kHello.end(), frame.begin() + parsed.payload_offset));
}

void ExpectNoPayload(const Parsed& parsed) {
  EXPECT_EQ(parsed.status, ParseStatus::kOk);
  EXPECT_FALSE(parsed.udp);
  EXPECT_EQ(parsed.payload_offset, 0);
  EXPECT_EQ(parsed.payload_length, 0);
  EXPECT_EQ(parsed.ip_header_distance, 0);
}

TEST(ParseFrame, FindsThePayloadAndTheKeyOfAPlainUdpFrame) {
  const Bytes frame = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello));

  const Parsed parsed = Parse(frame);

  ExpectHello(frame, parsed);
  EXPECT_EQ(parsed.payload_offset, 42);
  EXPECT_EQ(parsed.ip_header_distance, 28);
  EXPECT_EQ(parsed.key.w[0], 0x0200'000A'0100'000Au);
  EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV4));
}

TEST(ParseFrame, TakesAnEmptyDatagramForADatagram) {
  const Parsed parsed = Parse(Ethernet(0x0800) + Ipv4(kUdp, Udp({})));

  EXPECT_EQ(parsed.status, ParseStatus::kOk);
  EXPECT_TRUE(parsed.udp);
  EXPECT_EQ(parsed.payload_length, 0);
  EXPECT_EQ(parsed.payload_offset, 42);
}

TEST(ParseFrame, CutsEthernetPaddingOff) {
  const Bytes frame = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello)) + Bytes(13, 0xEE);

  ExpectHello(frame, Parse(frame));
}

TEST(ParseFrame, CutsOffWhatFollowsTheUdpDatagramInTheIpPacket) {
  const Bytes frame = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello) + Bytes(7, 0xEE));

  ExpectHello(frame, Parse(frame));
}

TEST(ParseFrame, SkipsIpv4Options) {
  for (std::size_t words = 1; words <= 10; ++words) {
    const Bytes frame = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello), 0, words);

    const Parsed parsed = Parse(frame);

    ExpectHello(frame, parsed);
    EXPECT_EQ(parsed.ip_header_distance, 28 + words * 4);
    EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV4));
  }
}

TEST(ParseFrame, TakesTheVlanOfTheOutermostTag) {
  const Bytes ip = Ipv4(kUdp, Udp(kHello));
  const Bytes tagged = Ethernet(0x8100) + Vlan(0xE000 | 7, 0x0800) + ip;
  const Bytes stacked = Ethernet(0x88A8) + Vlan(7, 0x8100) + Vlan(9, 0x0800) + ip;
  const Bytes old_stacked = Ethernet(0x9100) + Vlan(7, 0x8100) + Vlan(9, 0x0800) + ip;

  for (const Bytes& frame : {tagged, stacked, old_stacked}) {
    const Parsed parsed = Parse(frame);
    ExpectHello(frame, parsed);
    EXPECT_EQ(parsed.ip_header_distance, 28);
    EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV4, 7));
  }
}

TEST(ParseFrame, TakesAPriorityTagForNoVlan) {
  const Bytes frame = Ethernet(0x8100) + Vlan(0xE000, 0x0800) + Ipv4(kUdp, Udp(kHello));

  const Parsed parsed = Parse(frame);

  ExpectHello(frame, parsed);
  EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV4, 0));
}

TEST(ParseFrame, LooksBehindTwoTagsAtMost) {
  const Parsed parsed = Parse(Ethernet(0x8100) + Vlan(7, 0x8100) + Vlan(8, 0x8100) +
                              Vlan(9, 0x0800) + Ipv4(kUdp, Udp(kHello)));

  ExpectNoPayload(parsed);
  EXPECT_EQ(parsed.key.w[0], 0u);
  EXPECT_EQ(parsed.key.w[1], NoPortsWord(0, IpFamily::kNone, 7));
}

TEST(ParseFrame, GivesAFrameWithoutIpNothingButItsVlan) {
  for (std::uint16_t type : {0x0806, 0x88CC, 0x0040}) {  // ARP, LLDP, a length
    const Parsed untagged = Parse(Ethernet(type) + Bytes(46, 0xEE));
    const Parsed tagged = Parse(Ethernet(0x8100) + Vlan(4095, type) + Bytes(46, 0xEE));
    ExpectNoPayload(untagged);
    ExpectNoPayload(tagged);
    EXPECT_EQ(untagged.key.w[0], 0u);
    EXPECT_EQ(untagged.key.w[1], NoPortsWord(0, IpFamily::kNone));
    EXPECT_EQ(tagged.key.w[1], NoPortsWord(0, IpFamily::kNone, 4095));
  }
}

TEST(ParseFrame, FindsThePayloadAndTheKeyOfAnIpv6UdpFrame) {
  const Bytes frame = Ethernet(0x86DD) + Ipv6(kUdp, Udp(kHello));

  const Parsed parsed = Parse(frame);

  ExpectHello(frame, parsed);
  EXPECT_EQ(parsed.payload_offset, 62);
  EXPECT_EQ(parsed.ip_header_distance, 48);
  EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV6));
  std::uint64_t addresses[4];
  std::memcpy(addresses, frame.data() + 14 + 8, sizeof addresses);
  EXPECT_EQ(parsed.key.w[0], addresses[0]);
  EXPECT_EQ(parsed.key.w[2], addresses[1]);
  EXPECT_EQ(parsed.key.w[3], addresses[2]);
  EXPECT_EQ(parsed.key.w[4], addresses[3]);
}

TEST(ParseFrame, SkipsEveryKindOfExtensionHeader) {
  const Bytes chain = Options(kDestinationOptions) + Options(kRouting, 2) +
                      Options(kAuthentication, 3) + Authentication(kFragment, 6) +
                      FragmentHeader(kUdp, 0);  // an atomic fragment: the whole packet
  const Bytes frame = Ethernet(0x86DD) + Ipv6(kHopByHop, chain + Udp(kHello));

  const Parsed parsed = Parse(frame);

  ExpectHello(frame, parsed);
  EXPECT_EQ(parsed.ip_header_distance, 40 + chain.size() + 8);
  EXPECT_EQ(parsed.key.w[1], PortsWord(kUdp, IpFamily::kV6));
}

TEST(ParseFrame, SkipsEightExtensionHeadersAtMost) {
  Bytes chain;
  for (int i = 0; i < 7; ++i) chain = chain + Options(kDestinationOptions);
  const Bytes eight =
      Ethernet(0x86DD) + Ipv6(kDestinationOptions, chain + Options(kUdp) + Udp(kHello));
  const Bytes nine =
      Ethernet(0x86DD) +
      Ipv6(kDestinationOptions, chain + Options(kDestinationOptions) + Options(kUdp) + Udp(kHello));

  ExpectHello(eight, Parse(eight));
  EXPECT_EQ(Parse(nine).status, ParseStatus::kMalformed);
}

TEST(ParseFrame, GivesNoDistanceWhereExtensionHeadersMakeItTooLong) {
  for (std::size_t units : {25u, 26u, 256u}) {
    const Bytes frame =
        Ethernet(0x86DD) + Ipv6(kDestinationOptions, Options(kUdp, units) + Udp(kHello));

    const Parsed parsed = Parse(frame);

    ExpectHello(frame, parsed);
    const std::size_t distance = 40 + units * 8 + 8;
    EXPECT_EQ(parsed.ip_header_distance, distance <= 255 ? distance : 0);
  }
}

TEST(ParseFrame, GivesFragmentsNoPortsAndNoPayload) {
  constexpr std::uint16_t kMore = 0x2000, kDontFragment = 0x4000;
  for (std::uint16_t field : {+kMore, kMore | 1, 1, 0x1FFF}) {
    const Parsed parsed = Parse(Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello), field));
    ExpectNoPayload(parsed);
    EXPECT_EQ(parsed.key.w[0], 0x0200'000A'0100'000Au);
    EXPECT_EQ(parsed.key.w[1], NoPortsWord(kUdp, IpFamily::kV4));
  }
  for (std::uint16_t field : {1, 8, 0xFFF8}) {  // more fragments, an offset, the last one
    const Parsed parsed =
        Parse(Ethernet(0x86DD) + Ipv6(kFragment, FragmentHeader(kUdp, field) + Udp(kHello)));
    ExpectNoPayload(parsed);
    EXPECT_EQ(parsed.key.w[1], NoPortsWord(kUdp, IpFamily::kV6));
  }
  const Bytes whole = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello), kDontFragment);
  ExpectHello(whole, Parse(whole));
}

TEST(ParseFrame, SaysWhatAFragmentIsPartOf) {
  const Bytes data(16, 0xDA);
  const Bytes padding(10, 0);
  const Bytes v4 = Ethernet(0x8100) + Vlan(7, 0x0800) + Ipv4(kUdp, data, 0x2005, 2) + padding;
  const Parsed parsed4 = Parse(v4);
  ASSERT_TRUE(parsed4.is_fragment);
  EXPECT_EQ(parsed4.fragment.id, 0x1234u);
  EXPECT_EQ(parsed4.fragment.ip_header, 18u);
  EXPECT_EQ(parsed4.fragment.data, 18u + 28);
  EXPECT_EQ(parsed4.fragment.data_bytes, 16u);
  EXPECT_EQ(parsed4.fragment.offset_bytes, 40u);
  EXPECT_TRUE(parsed4.fragment.more);
  EXPECT_FALSE(Parse(Ethernet(0x0800) + Ipv4(kUdp, data, 5)).fragment.more);

  for (const bool options : {false, true}) {
    const Bytes fragment = FragmentHeader(kUdp, 0xFFF8) + data;
    const Bytes ip = options ? Ipv6(kDestinationOptions, Options(kFragment, 2) + fragment)
                             : Ipv6(kFragment, fragment);
    const Parsed parsed6 = Parse(Ethernet(0x86DD) + ip + padding);
    ASSERT_TRUE(parsed6.is_fragment);
    EXPECT_EQ(parsed6.fragment.id, 0x0700'0000u);
    EXPECT_EQ(parsed6.fragment.ip_header, 14u);
    EXPECT_EQ(parsed6.fragment.next_header, options ? 14u + 40 : 14u + 6);
    EXPECT_EQ(parsed6.fragment.data, 14u + 40 + (options ? 16 : 0) + 8);
    EXPECT_EQ(parsed6.fragment.data_bytes, 16u);
    EXPECT_EQ(parsed6.fragment.offset_bytes, 0xFFF8u);
    EXPECT_FALSE(parsed6.fragment.more);
  }
  EXPECT_FALSE(Parse(Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello))).is_fragment);
  EXPECT_FALSE(
      Parse(Ethernet(0x86DD) + Ipv6(kFragment, FragmentHeader(kUdp, 0) + Udp(kHello))).is_fragment);
}

TEST(ParseFrame, CallsFragmentsOfFragmentsMalformed) {
  for (const std::uint16_t field : {0, 1, 8, 9}) {
    const Bytes inner = FragmentHeader(kUdp, 1) + Udp(kHello);
    EXPECT_EQ(
        Parse(Ethernet(0x86DD) + Ipv6(kFragment, FragmentHeader(kFragment, field) + inner)).status,
        ParseStatus::kMalformed);
    EXPECT_EQ(Parse(Ethernet(0x86DD) +
                    Ipv6(kFragment, FragmentHeader(kHopByHop, field) + Options(kUdp) + inner))
                  .status,
              ParseStatus::kMalformed);
  }
}

TEST(ParseFrame, DoesNotReadTheDataOfLaterFragmentsAsHeaders) {
  const Bytes data = {0xFF, 0xFF, 0xFF};  // no UDP header fits

  EXPECT_EQ(Parse(Ethernet(0x0800) + Ipv4(kUdp, data, 5)).status, ParseStatus::kOk);
  EXPECT_EQ(Parse(Ethernet(0x86DD) + Ipv6(kFragment, FragmentHeader(kUdp, 8) + data)).status,
            ParseStatus::kOk);
}

TEST(ParseFrame, TakesThePortsOfTcp) {
  for (std::size_t option_words : {0u, 3u, 10u}) {
    const Parsed v4 = Parse(Ethernet(0x0800) + Ipv4(kTcp, Tcp(kHello, option_words)));
    const Parsed v6 = Parse(Ethernet(0x86DD) + Ipv6(kTcp, Tcp(kHello, option_words)));
    ExpectNoPayload(v4);
    ExpectNoPayload(v6);
    EXPECT_EQ(v4.key.w[1], PortsWord(kTcp, IpFamily::kV4));
    EXPECT_EQ(v6.key.w[1], PortsWord(kTcp, IpFamily::kV6));
  }
}

TEST(ParseFrame, GivesOtherProtocolsNoPorts) {
  for (std::uint8_t protocol : {1, 2, 50, 58, 132}) {
    const Parsed v4 = Parse(Ethernet(0x0800) + Ipv4(protocol, kHello));
    const Parsed v6 = Parse(Ethernet(0x86DD) + Ipv6(protocol, kHello));
    ExpectNoPayload(v4);
    ExpectNoPayload(v6);
    EXPECT_EQ(v4.key.w[1], NoPortsWord(protocol, IpFamily::kV4));
    EXPECT_EQ(v6.key.w[1], NoPortsWord(protocol, IpFamily::kV6));
  }
  ExpectNoPayload(Parse(Ethernet(0x86DD) + Ipv6(kNoNextHeader, {})));
}

TEST(ParseFrame, RefusesValuesThatTheProtocolsForbid) {
  struct Case {
    const char* what;
    Bytes frame;
    std::size_t at;  // from the start of the frame
    Bytes value;
  };
  const Bytes v4 = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello));
  const Bytes v6 = Ethernet(0x86DD) + Ipv6(kUdp, Udp(kHello));
  const Bytes tcp = Ethernet(0x0800) + Ipv4(kTcp, Tcp(kHello));
  const Bytes hop = Ethernet(0x86DD) + Ipv6(kHopByHop, Options(kUdp) + Udp(kHello));
  const Bytes late_hop = Ethernet(0x86DD) + Ipv6(kDestinationOptions,
                                                 Options(kHopByHop) + Options(kUdp) + Udp(kHello));
  for (const Case& c : {
           Case{"version 6 in an IPv4 frame", v4, 14, {0x65}},
           Case{"IPv4 header of 16 bytes", v4, 14, {0x44}},
           Case{"IPv4 header longer than the packet", v4, 14, {0x4F}},
           Case{"IPv4 total length 19", v4, 16, {0, 19}},
           Case{"IPv4 total length 0", v4, 16, {0, 0}},
           Case{"version 4 in an IPv6 frame", v6, 14, {0x40}},
           Case{"UDP length 7", v4, 38, {0, 7}},
           Case{"UDP length 0", v4, 38, {0, 0}},
           Case{"UDP length 0 in IPv6", v6, 58, {0, 0}},
           Case{"TCP header of 16 bytes", tcp, 46, {0x40}},
           Case{"jumbogram", hop, 18, {0, 0}},
           Case{"hop-by-hop options in second place", late_hop, 0, {}},
       }) {
    Bytes frame = c.frame;
    std::copy(c.value.begin(), c.value.end(), frame.begin() + static_cast<long>(c.at));
    EXPECT_EQ(Parse(frame).status, ParseStatus::kMalformed) << c.what;
  }
}

TEST(ParseFrame, RefusesLengthsThatReachPastTheEnd) {
  struct Case {
    const char* what;
    Bytes frame;
    std::size_t at;
    Bytes value;
  };
  const Bytes v4 = Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello));  // 33 bytes of IP
  const Bytes padded = v4 + Bytes(13, 0xEE);
  const Bytes v6 = Ethernet(0x86DD) + Ipv6(kUdp, Udp(kHello));
  const Bytes tcp = Ethernet(0x0800) + Ipv4(kTcp, Tcp(kHello));
  const Bytes options = Ethernet(0x86DD) + Ipv6(kRouting, Options(kUdp) + Udp(kHello));
  for (const Case& c : {
           Case{"IPv4 total length", v4, 16, {0, 34}},
           Case{"UDP length past the frame", v4, 38, {0, 14}},
           Case{"UDP length into the padding", padded, 38, {0, 14}},
           Case{"IPv4 options past the contiguous part",
                Ethernet(0x0800) + Bytes{0x46, 0, 0, 24} + Bytes(16, 0),
                0,
                {}},
           Case{"no room for UDP in IPv4", padded, 16, {0, 27}},
           Case{"IPv6 payload length", v6, 18, {0, 14}},
           Case{"no room for UDP in IPv6", v6, 18, {0, 7}},
           Case{"TCP header length", tcp, 46, {0xF0}},
           Case{"IPv6 routing header length", options, 55, {2}},
       }) {
    Bytes frame = c.frame;
    std::copy(c.value.begin(), c.value.end(), frame.begin() + static_cast<long>(c.at));
    EXPECT_EQ(Parse(frame).status, ParseStatus::kTruncated) << c.what;
  }
}

std::vector<Bytes> ValidFrames() {
  const Bytes v4 = Ipv4(kUdp, Udp(kHello));
  const Bytes v6 = Ipv6(kUdp, Udp(kHello));
  return {
      Ethernet(0x0800) + v4,
      Ethernet(0x8100) + Vlan(7, 0x0800) + v4,
      Ethernet(0x88A8) + Vlan(7, 0x8100) + Vlan(9, 0x86DD) + v6,
      Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello), 0, 10),
      Ethernet(0x0800) + Ipv4(kTcp, Tcp(kHello, 10), 0, 3),
      Ethernet(0x0800) + Ipv4(kUdp, Udp(kHello), 0x2000),
      Ethernet(0x0800) + Ipv4(1, kHello),
      Ethernet(0x86DD) + v6,
      Ethernet(0x86DD) + Ipv6(kTcp, Tcp(kHello, 3)),
      Ethernet(0x86DD) +
          Ipv6(kHopByHop, Options(kRouting) + Options(kAuthentication, 2) +
                              Authentication(kFragment, 6) +
                              FragmentHeader(kDestinationOptions, 0) + Options(kUdp) + Udp(kHello)),
      Ethernet(0x86DD) + Ipv6(kFragment, FragmentHeader(kUdp, 1) + Udp(kHello)),
  };
}

TEST(ParseFrame, CallsEveryValidFrameTruncatedThatIsCutShort) {
  for (const Bytes& frame : ValidFrames()) {
    ASSERT_EQ(Parse(frame).status, ParseStatus::kOk);
    for (std::size_t length = 0; length < frame.size(); ++length) {
      const Bytes cut(frame.begin(), frame.begin() + static_cast<long>(length));
      EXPECT_EQ(Parse(cut).status, ParseStatus::kTruncated) << "after " << length;
    }
  }
}

TEST(ParseFrame, WantsTheHeadersInTheFirstPartAndThePayloadAnywhere) {
  for (const Bytes& frame : ValidFrames()) {
    const Parsed whole = Parse(frame);
    for (std::size_t length = 0; length < frame.size(); ++length) {
      const Parsed parsed = Parse(frame, length);
      if (whole.udp && length < whole.payload_offset) {
        EXPECT_EQ(parsed.status, ParseStatus::kTruncated) << length;
      } else if (parsed.status == ParseStatus::kOk) {
        EXPECT_EQ(parsed.key.w[0], whole.key.w[0]);
        EXPECT_EQ(parsed.key.w[1], whole.key.w[1]);
        EXPECT_EQ(parsed.payload_offset, whole.payload_offset);
        EXPECT_EQ(parsed.payload_length, whole.payload_length);
      } else {
        EXPECT_FALSE(whole.udp);
        EXPECT_EQ(parsed.status, ParseStatus::kTruncated);
      }
    }
  }
}

// Every single byte of every valid frame, with every value: no read past the end (the address
// sanitizer looks), and no payload outside of the frame.
TEST(ParseFrame, StaysInsideTheFrameWhateverAByteSays) {
  for (const Bytes& valid : ValidFrames()) {
    Bytes frame = valid;
    for (std::size_t at = 0; at < frame.size(); ++at) {
      for (int value = 0; value < 256; ++value) {
        frame[at] = static_cast<std::uint8_t>(value);
        const Parsed parsed = Parse(frame);
        if (parsed.status != ParseStatus::kOk || !parsed.udp) continue;
        ASSERT_GE(parsed.payload_offset, 42u);
        ASSERT_LE(std::size_t{parsed.payload_offset} + parsed.payload_length, frame.size());
      }
      frame[at] = valid[at];
    }
  }
}

TEST(ParseFrame, TakesThePayloadOfTheLargestDatagram) {
  const Bytes frame = Ethernet(0x0800) + Ipv4(kUdp, Udp(Bytes(65507, 0xAB)));

  const Parsed parsed = Parse(frame, 42);  // the rest in other segments

  EXPECT_EQ(parsed.status, ParseStatus::kOk);
  EXPECT_TRUE(parsed.udp);
  EXPECT_EQ(parsed.payload_length, 65507);
}

}  // namespace
}  // namespace rxtoken
