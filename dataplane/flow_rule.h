// SPDX-License-Identifier: Apache-2.0
// flow_rule.h - what a flow rule matches, and the key that is taken from each frame.
//
// Thread-safety: value types.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace rxtoken {

enum class IpFamily : std::uint8_t { kNone = 0, kV4 = 4, kV6 = 6 };

// Addresses in network order; an IPv4 address uses the first four bytes. Bits past `length`
// are zero.
struct IpPrefix {
  IpFamily family = IpFamily::kNone;  // kNone: any address, of either family
  std::uint8_t length = 0;            // bits, 0..32 or 0..128
  std::array<std::uint8_t, 16> address = {};

  friend auto operator<=>(const IpPrefix&, const IpPrefix&) = default;
};

// Fields that are not set match everything. If one prefix has a family, so has the other: then
// two matches are equal exactly if they are for the same frames.
struct FlowMatch {
  std::optional<std::uint32_t> port = {};   // index of a port
  std::optional<std::uint32_t> queue = {};  // only together with port
  std::optional<std::uint16_t> vlan = {};   // ID of the outermost tag; 0 = untagged
  IpPrefix source = {};
  IpPrefix destination = {};
  std::optional<std::uint8_t> protocol = {};
  std::optional<std::uint16_t> source_port = {};  // host order; only with protocol TCP or UDP
  std::optional<std::uint16_t> destination_port = {};

  friend auto operator<=>(const FlowMatch&, const FlowMatch&) = default;
};

struct QueueRef {
  std::uint32_t port = 0;
  std::uint32_t queue = 0;

  friend auto operator<=>(const QueueRef&, const QueueRef&) = default;
};

struct FlowRule {
  std::uint64_t id = 0;
  FlowMatch match = {};
  std::int32_t priority = 0;  // highest wins; among equals the rule that fixes more bits
  std::vector<std::uint64_t> rx_sockets = {};  // ids; each gets every frame
  std::optional<QueueRef> steer_to = {};       // the port is asked to deliver there

  friend bool operator==(const FlowRule&, const FlowRule&) = default;
};

inline constexpr std::size_t kMaxFanOut = 32;  // rx sockets of one rule

// What a frame is looked up by: five words, of which IPv4 and non-IP frames use the first
// two, so that the common key is 16 bytes.
//
//   w[0]  IPv4: source | destination << 32 (as they lie in the packet)
//         IPv6: first 8 bytes of the source
//   w[1]  source port | destination port << 16 (host order)
//         | protocol << 32 | IpFamily << 40 | vlan << 48
//   w[2]  IPv6: last 8 bytes of the source
//   w[3], w[4]  IPv6: the destination
//
// A frame without IP header has family kNone and zero addresses, protocol and ports; an IP
// fragment, and every protocol but TCP and UDP, has zero ports.
struct FlowKey {
  std::array<std::uint64_t, 5> w;

  friend bool operator==(const FlowKey&, const FlowKey&) = default;

  static constexpr std::uint64_t PortsWord(std::uint16_t source, std::uint16_t destination,
                                           std::uint8_t protocol, IpFamily family,
                                           std::uint16_t vlan) noexcept {
    return std::uint64_t{source} | std::uint64_t{destination} << 16 |
           std::uint64_t{protocol} << 32 | std::uint64_t{static_cast<std::uint8_t>(family)} << 40 |
           std::uint64_t{vlan} << 48;
  }
  // A protocol that has ports: TCP or UDP.
  constexpr bool has_ports() const noexcept {
    const std::uint64_t protocol = (w[1] >> 32) & 0xFF;
    return protocol == 6 || protocol == 17;
  }
  constexpr IpFamily family() const noexcept { return static_cast<IpFamily>((w[1] >> 40) & 0xFF); }
};

}  // namespace rxtoken
