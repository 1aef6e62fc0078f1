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

bool Send(int fd, const Pace& pace,
          const std::function<std::vector<std::uint8_t>(std::uint64_t)>& make) {
  constexpr std::uint64_t kLot = 64;
  std::uint64_t seen = 0;
  for (std::uint64_t sent = 0; sent < pace.count;) {
    const std::uint64_t lot = std::min(kLot, pace.count - sent);
    const auto in_window = [&] { return (seen = pace.received()) + pace.window >= sent + lot; };
    if (pace.received && sent + lot > seen + pace.window && !WaitUntil(in_window)) return false;
    std::array<std::vector<std::uint8_t>, kLot> packets;
    std::array<iovec, kLot> vectors = {};
    std::array<mmsghdr, kLot> messages = {};
    for (std::uint64_t i = 0; i < lot; i++) {
      packets[i] = make(sent + i);
      vectors[i] = {packets[i].data(), packets[i].size()};
      messages[i].msg_hdr.msg_iov = &vectors[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
    const int n = sendmmsg(fd, messages.data(), static_cast<unsigned>(lot), 0);
    if (n <= 0) {
      std::perror("sendmmsg");
      return false;
    }
    sent += static_cast<std::uint64_t>(n);
  }
  return true;
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

std::vector<std::uint8_t> UdpFrame(const FrameOptions& options,
                                   std::span<const std::uint8_t> payload) {
  constexpr std::array<std::uint8_t, 12> kAddresses = {2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1};
  constexpr std::uint16_t kUdpHeaderBytes = 8;
  constexpr std::uint16_t kIpHeaderBytes = 20;
  const auto udp_bytes = static_cast<std::uint16_t>(kUdpHeaderBytes + payload.size());

  std::vector<std::uint8_t> frame;
  frame.reserve(64 + payload.size());
  Append(frame, kAddresses);
  if (options.vlan != 0) {
    Append16(frame, 0x8100);
    Append16(frame, options.vlan);
  }
  Append16(frame, 0x0800);

  const std::size_t ip = frame.size();
  Append16(frame, 0x4500);
  Append16(frame, static_cast<std::uint16_t>(kIpHeaderBytes + udp_bytes));
  Append32(frame, 0x0000'4000);  // no fragment
  Append16(frame, 64 << 8 | IPPROTO_UDP);
  Append16(frame, 0);
  Append32(frame, options.source);
  Append32(frame, options.destination);
  const std::uint16_t checksum = InternetChecksum(std::span(frame).subspan(ip));
  frame[ip + 10] = static_cast<std::uint8_t>(checksum >> 8);
  frame[ip + 11] = static_cast<std::uint8_t>(checksum);

  Append16(frame, options.source_port);
  Append16(frame, options.destination_port);
  Append16(frame, udp_bytes);
  Append16(frame, 0);  // no checksum
  Append(frame, payload);
  if (frame.size() < 60) frame.resize(60);  // as on a wire
  return frame;
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
                  Send(fd, pace, [&](std::uint64_t number) { return Datagram(stream, number); });
  freeaddrinfo(destination);
  close(fd);
  return ok;
}

bool SendFrames(const std::string& interface, const FrameOptions& options, const Stream& stream,
                const Pace& pace) {
  const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
  sockaddr_ll address = {};
  address.sll_family = AF_PACKET;
  address.sll_ifindex = static_cast<int>(if_nametoindex(interface.c_str()));
  const bool ok = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                  Send(fd, pace, [&](std::uint64_t number) {
                    return UdpFrame(options, Datagram(stream, number));
                  });
  close(fd);
  return ok;
}

}  // namespace rxtoken::test
