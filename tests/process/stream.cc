// SPDX-License-Identifier: Apache-2.0
#include "tests/process/stream.h"

#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <random>

#include "tests/process/wait_until.h"

namespace rxtoken::test {

namespace {

static_assert(std::endian::native == std::endian::little);

// splitmix64's finalizer: neighbouring numbers give unrelated words.
constexpr std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E37'79B9'7F4A'7C15;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EB;
  return x ^ (x >> 31);
}

void Append16(std::vector<std::uint8_t>& frame, std::uint16_t value) {
  frame.push_back(static_cast<std::uint8_t>(value >> 8));
  frame.push_back(static_cast<std::uint8_t>(value));
}

void Append32(std::vector<std::uint8_t>& frame, std::uint32_t value) {
  Append16(frame, static_cast<std::uint16_t>(value >> 16));
  Append16(frame, static_cast<std::uint16_t>(value));
}

void Append(std::vector<std::uint8_t>& frame, std::span<const std::uint8_t> bytes) {
  frame.resize(frame.size() + bytes.size());
  std::copy(bytes.begin(), bytes.end(), frame.end() - static_cast<std::ptrdiff_t>(bytes.size()));
}

// As this machine writes them.
std::vector<std::uint8_t> Words(std::initializer_list<std::uint32_t> words) {
  std::vector<std::uint8_t> bytes(words.size() * sizeof(std::uint32_t));
  std::memcpy(bytes.data(), words.begin(), bytes.size());
  return bytes;
}

std::uint16_t InternetChecksum(std::span<const std::uint8_t> bytes) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) sum += bytes[i] << 8 | bytes[i + 1];
  while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

using Packets = std::vector<std::vector<std::uint8_t>>;

bool SendAll(int fd, Packets& packets) {
  std::vector<iovec> vectors(packets.size());
  std::vector<mmsghdr> messages(packets.size());
  for (std::size_t i = 0; i < packets.size(); i++) {
    vectors[i] = {packets[i].data(), packets[i].size()};
    messages[i].msg_hdr.msg_iov = &vectors[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  for (std::size_t sent = 0; sent < packets.size();) {
    const int n = sendmmsg(fd, &messages[sent], static_cast<unsigned>(packets.size() - sent), 0);
    if (n <= 0) {
      std::perror("sendmmsg");
      return false;
    }
    sent += static_cast<std::size_t>(n);
  }
  return true;
}

// `append` puts what datagram `number` is to be sent as behind `packets`.
bool Send(int fd, const Pace& pace,
          const std::function<void(std::uint64_t number, Packets& packets)>& append) {
  constexpr std::uint64_t kLot = 64;
  std::uint64_t seen = 0;
  for (std::uint64_t sent = 0; sent < pace.count;) {
    std::uint64_t lot = std::min(kLot, pace.count - sent);
    if (pace.received) lot = std::min(lot, pace.window);
    const auto in_window = [&] { return (seen = pace.received()) + pace.window >= sent + lot; };
    if (pace.received && sent + lot > seen + pace.window && !WaitUntil(in_window)) return false;
    Packets packets;
    for (std::uint64_t i = 0; i < lot; i++) append(sent + i, packets);
    if (!SendAll(fd, packets)) return false;
    sent += lot;
  }
  return true;
}

int PacketSocket(const std::string& interface) {
  const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
  sockaddr_ll address = {};
  address.sll_family = AF_PACKET;
  address.sll_ifindex = static_cast<int>(if_nametoindex(interface.c_str()));
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  std::perror("bind");
  close(fd);
  return -1;
}

}  // namespace

std::size_t DatagramBytes(const Stream& stream, std::uint64_t number) {
  // The first two are the extremes, so that they occur in every test.
  if (number == 0) return stream.min_bytes;
  if (number == 1) return stream.max_bytes;
  return stream.min_bytes +
         Mix(stream.seed ^ Mix(number)) % (stream.max_bytes - stream.min_bytes + 1);
}

std::vector<std::uint8_t> Datagram(const Stream& stream, std::uint64_t number) {
  const std::uint64_t key = Mix(Mix(stream.seed) ^ number);
  std::vector<std::uint8_t> payload((DatagramBytes(stream, number) + 7) / 8 * 8);
  for (std::size_t i = 0; i < payload.size(); i += 8) {
    const std::uint64_t word = Mix(key + i);
    std::memcpy(&payload[i], &word, sizeof(word));
  }
  if (stream.numbered) std::memcpy(payload.data(), &number, sizeof number);
  payload.resize(DatagramBytes(stream, number));
  return payload;
}

namespace {

constexpr std::uint16_t kUdpHeaderBytes = 8;

std::vector<std::uint8_t> EthernetHeader(const FrameOptions& options, std::uint16_t type) {
  constexpr std::array<std::uint8_t, 12> kAddresses = {2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1};
  std::vector<std::uint8_t> frame;
  frame.reserve(2048);
  Append(frame, kAddresses);
  if (options.vlan != 0) {
    Append16(frame, 0x8100);
    Append16(frame, options.vlan);
  }
  Append16(frame, type);
  return frame;
}

// `fragment`: the header's word of flags and offset.
void AppendIpv4Header(std::vector<std::uint8_t>& frame, const FrameOptions& options,
                      std::size_t bytes, std::uint16_t id, std::uint16_t fragment) {
  constexpr std::uint16_t kIpHeaderBytes = 20;
  const std::size_t ip = frame.size();
  Append16(frame, 0x4500);
  Append16(frame, static_cast<std::uint16_t>(kIpHeaderBytes + bytes));
  Append16(frame, id);
  Append16(frame, fragment);
  Append16(frame, 64 << 8 | IPPROTO_UDP);
  Append16(frame, 0);
  Append32(frame, options.source);
  Append32(frame, options.destination);
  const std::uint16_t checksum = InternetChecksum(std::span(frame).subspan(ip));
  frame[ip + 10] = static_cast<std::uint8_t>(checksum >> 8);
  frame[ip + 11] = static_cast<std::uint8_t>(checksum);
}

// With a fragment header. From 2001:db8::1 to 2001:db8::2.
void AppendIpv6Header(std::vector<std::uint8_t>& frame, std::size_t bytes, std::uint32_t id,
                      std::uint16_t fragment) {
  constexpr std::uint16_t kFragmentHeaderBytes = 8;
  Append32(frame, 0x6000'0000);
  Append16(frame, static_cast<std::uint16_t>(kFragmentHeaderBytes + bytes));
  Append16(frame, IPPROTO_FRAGMENT << 8 | 64);
  for (const std::uint32_t last : {1, 2}) {
    Append32(frame, 0x2001'0db8);
    Append32(frame, 0);
    Append32(frame, 0);
    Append32(frame, last);
  }
  Append16(frame, IPPROTO_UDP << 8);
  Append16(frame, fragment);
  Append32(frame, id);
}

std::vector<std::uint8_t> UdpPacket(const FrameOptions& options,
                                    std::span<const std::uint8_t> payload) {
  std::vector<std::uint8_t> packet;
  packet.reserve(kUdpHeaderBytes + payload.size());
  Append16(packet, options.source_port);
  Append16(packet, options.destination_port);
  Append16(packet, static_cast<std::uint16_t>(kUdpHeaderBytes + payload.size()));
  Append16(packet, 0);  // no checksum
  Append(packet, payload);
  return packet;
}

}  // namespace

std::vector<std::uint8_t> UdpFrame(const FrameOptions& options,
                                   std::span<const std::uint8_t> payload) {
  constexpr std::uint16_t kDontFragment = 0x4000;
  const std::vector<std::uint8_t> packet = UdpPacket(options, payload);
  std::vector<std::uint8_t> frame = EthernetHeader(options, 0x0800);
  AppendIpv4Header(frame, options, packet.size(), 0, kDontFragment);
  Append(frame, packet);
  if (frame.size() < 60) frame.resize(60);  // as on a wire
  return frame;
}

std::vector<std::vector<std::uint8_t>> Fragments(const FrameOptions& options,
                                                 std::span<const std::uint8_t> payload, bool ipv6,
                                                 std::uint32_t id, std::size_t room) {
  const std::vector<std::uint8_t> packet = UdpPacket(options, payload);
  std::vector<std::vector<std::uint8_t>> frames;
  for (std::size_t at = 0; at < packet.size(); at += room) {
    const auto piece = std::span(packet).subspan(at, std::min(room, packet.size() - at));
    const bool more = at + piece.size() != packet.size();
    std::vector<std::uint8_t>& frame =
        frames.emplace_back(EthernetHeader(options, ipv6 ? 0x86DD : 0x0800));
    if (ipv6) {
      AppendIpv6Header(frame, piece.size(), id, static_cast<std::uint16_t>(at | more));
    } else {
      AppendIpv4Header(frame, options, piece.size(), static_cast<std::uint16_t>(id),
                       static_cast<std::uint16_t>(at / 8 | (more ? 0x2000 : 0)));
    }
    Append(frame, piece);
    if (frame.size() < 60) frame.resize(60);
  }
  return frames;
}

std::vector<std::uint8_t> PcapHeader() {
  // Magic, version 2.4, time zone, accuracy, longest frame, Ethernet.
  return Words({0xA1B2'C3D4, 0x0004'0002, 0, 0, 65535, 1});
}

std::vector<std::uint8_t> PcapRecord(std::span<const std::uint8_t> frame) {
  const auto bytes = static_cast<std::uint32_t>(frame.size());
  std::vector<std::uint8_t> record = Words({0, 0, bytes, bytes});  // time, captured, length
  Append(record, frame);
  return record;
}

bool SendUdp(const std::string& address, std::uint16_t port, const Stream& stream,
             const Pace& pace) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* destination = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &destination) != 0) {
    return false;
  }
  const int fd = socket(destination->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool ok = connect(fd, destination->ai_addr, destination->ai_addrlen) == 0 &&
                  Send(fd, pace, [&](std::uint64_t number, Packets& packets) {
                    packets.push_back(Datagram(stream, number));
                  });
  freeaddrinfo(destination);
  close(fd);
  return ok;
}

bool SendFrames(const std::string& interface, const FrameOptions& options, const Stream& stream,
                const Pace& pace) {
  const int fd = PacketSocket(interface);
  const bool ok = Send(fd, pace, [&](std::uint64_t number, Packets& packets) {
    packets.push_back(UdpFrame(options, Datagram(stream, number)));
  });
  close(fd);
  return ok;
}

bool SendShuffledFragments(const std::string& interface, bool ipv6, const Stream& stream,
                           const Pace& pace) {
  constexpr std::size_t kRoom = 1448;
  std::minstd_rand random(static_cast<std::uint32_t>(stream.seed));
  const int fd = PacketSocket(interface);
  const bool ok = Send(fd, pace, [&](std::uint64_t number, Packets& packets) {
    Packets fragments =
        Fragments({}, Datagram(stream, number), ipv6, static_cast<std::uint32_t>(number), kRoom);
    std::shuffle(fragments.begin(), fragments.end(), random);
    std::move(fragments.begin(), fragments.end(), std::back_inserter(packets));
  });
  close(fd);
  return ok;
}

}  // namespace rxtoken::test
