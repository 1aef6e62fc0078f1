// SPDX-License-Identifier: Apache-2.0
#include "client/src/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "client/src/receiver.h"
#include "tests/unit/client/lanes.h"

namespace rxtoken {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

std::span<const std::byte> View(const Bytes& bytes) { return std::as_bytes(std::span(bytes)); }

const Bytes kEthernet = Bytes(12, 0x02);
const Bytes kTypeV4 = {0x08, 0x00};
const Bytes kTypeV6 = {0x86, 0xDD};
const Bytes kPorts = {0x0F, 0xA0, 0x00, 0x35};  // 4000 to 53
const Bytes kUdpHeader = kPorts + Bytes{0, 12, 0, 0};

// An IPv4 header from 192.0.2.1; `words` of 4 bytes.
Bytes Ipv4(std::uint8_t protocol, std::uint8_t words = 5, std::uint16_t fragment = 0) {
  Bytes header(4u * words, 0);
  header[0] = static_cast<std::uint8_t>(0x40 | words);
  header[6] = static_cast<std::uint8_t>(fragment >> 8);
  header[7] = static_cast<std::uint8_t>(fragment);
  header[9] = protocol;
  header[12] = 192, header[13] = 0, header[14] = 2, header[15] = 1;
  return header;
}

// An IPv6 header from 2001:db8::1.
Bytes Ipv6(std::uint8_t next) {
  Bytes header(40, 0);
  header[0] = 0x60;
  header[6] = next;
  header[8] = 0x20, header[9] = 0x01, header[10] = 0x0D, header[11] = 0xB8, header[23] = 1;
  return header;
}

std::string OfDatagram(const Bytes& headers) { return SourceOfDatagram(View(headers)).ToString(); }
std::string OfFrame(const Bytes& frame) { return SourceOfFrame(View(frame)).ToString(); }

TEST(SourceOfDatagram, IsReadFromTheHeadersInFrontOfThePayload) {
  EXPECT_EQ(OfDatagram(Ipv4(17) + kUdpHeader), "192.0.2.1:4000");
  EXPECT_EQ(OfDatagram(Ipv4(17, 15) + kUdpHeader), "192.0.2.1:4000");
  EXPECT_EQ(OfDatagram(Ipv6(17) + kUdpHeader), "[2001:db8::1]:4000");
  EXPECT_EQ(OfDatagram(Ipv6(60) + Bytes{17, 1} + Bytes(14, 0) + kUdpHeader), "[2001:db8::1]:4000");
}

TEST(SourceOfDatagram, NoHeaderIsNoSource) {
  EXPECT_EQ(OfDatagram({}), "-");
  EXPECT_EQ(OfDatagram(Bytes(28, 0x50)), "-") << "no such version of IP";
  EXPECT_EQ(OfDatagram(Bytes{0x45}), "-") << "cut off";
  EXPECT_EQ(OfDatagram(Bytes(39, 0x60)), "-") << "cut off";
  EXPECT_EQ(OfDatagram(Ipv4(17)), "192.0.2.1") << "no room for a port";
  EXPECT_EQ(OfDatagram(Ipv6(17)), "2001:db8::1") << "no room for a port";
}

TEST(SourceOfFrame, IsFoundBehindTags) {
  const Bytes vlan = {0x81, 0x00, 0x00, 0x07};
  const Bytes qinq = {0x88, 0xA8, 0x00, 0x08};
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + Ipv4(17) + kUdpHeader), "192.0.2.1:4000");
  EXPECT_EQ(OfFrame(kEthernet + vlan + kTypeV4 + Ipv4(6) + kPorts), "192.0.2.1:4000");
  EXPECT_EQ(OfFrame(kEthernet + qinq + vlan + kTypeV6 + Ipv6(17) + kUdpHeader),
            "[2001:db8::1]:4000");
}

TEST(SourceOfFrame, IsFoundBehindOptionsAndExtensionHeaders) {
  const Bytes options = Bytes{6, 1} + Bytes(14, 0);  // 16 bytes, TCP next
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + Ipv4(17, 7) + kUdpHeader), "192.0.2.1:4000");
  EXPECT_EQ(OfFrame(kEthernet + kTypeV6 + Ipv6(0) + options + kPorts), "[2001:db8::1]:4000");
  EXPECT_EQ(OfFrame(kEthernet + kTypeV6 + Ipv6(44) + Bytes{17, 0, 0, 1, 0, 0, 0, 9} + kUdpHeader),
            "[2001:db8::1]:4000")
      << "the first fragment";
}

TEST(SourceOfFrame, HasNoPortWhereTheFrameHasNone) {
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + Ipv4(1) + kUdpHeader), "192.0.2.1") << "ICMP";
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + Ipv4(17, 5, 100) + kUdpHeader), "192.0.2.1")
      << "a later fragment";
  EXPECT_EQ(OfFrame(kEthernet + kTypeV6 + Ipv6(44) + Bytes{17, 0, 0, 8, 0, 0, 0, 9} + kUdpHeader),
            "2001:db8::1")
      << "a later fragment";
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + Ipv4(17) + Bytes{0x0F}), "192.0.2.1") << "cut off";
  EXPECT_EQ(OfFrame(kEthernet + kTypeV6 + Ipv6(0) + Bytes{0}), "2001:db8::1") << "cut off";
  EXPECT_EQ(OfFrame(kEthernet + kTypeV6 + Ipv6(0) + Bytes{17, 200} + Bytes(6, 0)), "2001:db8::1")
      << "an option longer than the frame";
  Bytes short_header = Ipv4(17);
  short_header[0] = 0x44;
  EXPECT_EQ(OfFrame(kEthernet + kTypeV4 + short_header + kUdpHeader), "192.0.2.1");
}

TEST(SourceOfFrame, OtherFramesHaveNoSource) {
  EXPECT_EQ(OfFrame({}), "-");
  EXPECT_EQ(OfFrame(kEthernet), "-");
  EXPECT_EQ(OfFrame(kEthernet + Bytes{0x08, 0x06} + Ipv4(17)), "-") << "ARP";
}

// Each input lies in memory of its own, so that the address sanitizer sees a read past it.
TEST(Source, HostileHeadersAreNotReadPast) {
  std::mt19937 random(1);
  const Bytes frames[] = {kEthernet + kTypeV4 + Ipv4(17, 15) + kUdpHeader,
                          kEthernet + Bytes{0x81, 0, 0, 1} + kTypeV6 + Ipv6(0) +
                              Bytes{44, 0, 0, 0, 0, 0, 0, 0} + Bytes{17, 0, 0, 0, 0, 0, 0, 0} +
                              kUdpHeader};
  for (int i = 0; i < 20000; i++) {
    const Bytes& frame = frames[i % 2];
    Bytes hostile(frame.begin(), frame.begin() + static_cast<long>(random() % (frame.size() + 1)));
    for (int flips = 0; flips < 3 && !hostile.empty(); flips++) {
      hostile[random() % hostile.size()] = static_cast<std::uint8_t>(random());
    }
    OfFrame(hostile);
    OfDatagram(hostile);
    if (hostile.size() > 14) OfDatagram(Bytes(hostile.begin() + 14, hostile.end()));
  }
}

TEST(MessageSource, IsReadFromThePage) {
  TestSocket socket;
  const Bytes headers = Ipv4(17) + kUdpHeader;
  socket.Write(1, 100, headers);
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 128, 5, 0, 28);
  std::vector<Message> messages(1);

  EXPECT_EQ(socket.ReceiveNow(messages)[0].source().ToString(), "192.0.2.1:4000");
}

TEST(MessageSource, NeverReachesInFrontOfThePage) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(0), 27, 5, 0, 28);
  std::vector<Message> messages(1);

  EXPECT_EQ(socket.ReceiveNow(messages)[0].source().version, 0);
}

TEST(MessageSource, OfAWholeFrameIsReadFromTheFrame) {
  TestSocket socket;
  const Bytes frame = kEthernet + kTypeV4 + Ipv4(17) + kUdpHeader;
  socket.Write(1, 128, frame);
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 128, static_cast<std::uint16_t>(frame.size()), kWholeFrame);
  std::vector<Message> messages(1);

  EXPECT_EQ(socket.ReceiveNow(messages)[0].source().ToString(), "192.0.2.1:4000");
}

}  // namespace
}  // namespace rxtoken
