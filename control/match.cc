// SPDX-License-Identifier: Apache-2.0
#include "control/match.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>
#include <limits>

namespace rxtoken {
namespace {

Status Invalid(std::string message) {
  return Status(Code::kInvalidArgument, "match: " + std::move(message));
}

std::string PrefixText(const IpPrefix& prefix) {
  char text[INET6_ADDRSTRLEN];
  inet_ntop(prefix.family == IpFamily::kV4 ? AF_INET : AF_INET6, prefix.address.data(), text,
            sizeof(text));
  return std::string(text) + "/" + std::to_string(prefix.length);
}

// Clears the bits below the prefix; true if all were clear already.
bool ClearHostBits(IpPrefix& prefix) {
  const auto given = prefix.address;
  for (unsigned byte = 0; byte < prefix.address.size(); byte++) {
    const unsigned first_bit = byte * 8;
    const unsigned kept = prefix.length > first_bit ? prefix.length - first_bit : 0;
    if (kept < 8) prefix.address[byte] &= static_cast<std::uint8_t>(0xFF00u >> kept);
  }
  return prefix.address == given;
}

// A port number of TCP or UDP.
Status CheckPort(const char* field, const v1::Match& match, std::uint32_t number) {
  if (number < 1 || number > std::numeric_limits<std::uint16_t>::max()) {
    return Invalid(std::string(field) + " is " + std::to_string(number) + "; use 1..65535");
  }
  if (!match.has_protocol() ||
      (match.protocol() != IPPROTO_TCP && match.protocol() != IPPROTO_UDP)) {
    return Invalid(std::string(field) +
                   " is set, but only TCP and UDP have ports; set protocol to 6 or 17");
  }
  return Status();
}

}  // namespace

Result<IpPrefix> ParsePrefix(const std::string& field, const std::string& text) {
  IpPrefix prefix;
  if (text.empty()) return prefix;

  const std::size_t slash = text.find('/');
  const std::string address = text.substr(0, slash);
  if (inet_pton(AF_INET, address.c_str(), prefix.address.data()) == 1) {
    prefix.family = IpFamily::kV4;
  } else if (inet_pton(AF_INET6, address.c_str(), prefix.address.data()) == 1) {
    prefix.family = IpFamily::kV6;
  } else {
    return Invalid(field + " is '" + text +
                   "'; use an IPv4 or IPv6 address, with or without /LENGTH");
  }

  const unsigned longest = prefix.family == IpFamily::kV4 ? 32 : 128;
  unsigned length = longest;
  if (slash != std::string::npos) {
    const char* const begin = text.c_str() + slash + 1;
    const char* const end = text.c_str() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, length);
    if (error != std::errc() || stop != end || length > longest) {
      return Invalid(field + " is '" + text + "'; its prefix length must be 0.." +
                     std::to_string(longest));
    }
  }
  prefix.length = static_cast<std::uint8_t>(length);
  if (!ClearHostBits(prefix)) {
    return Invalid(field + " is '" + text + "', which has bits set below its prefix; use '" +
                   PrefixText(prefix) + "'");
  }
  return prefix;
}

Result<FlowMatch> ParseMatch(const v1::Match& match) {
  FlowMatch parsed;
  if (match.has_queue() && match.port().empty()) {
    return Invalid("queue is " + std::to_string(match.queue()) +
                   " but port is empty; name the port that the queue belongs to");
  }
  if (match.has_vlan()) {
    if (match.vlan() > 4094) {
      return Invalid("vlan is " + std::to_string(match.vlan()) + "; use 0..4094, 0 is untagged");
    }
    parsed.vlan = static_cast<std::uint16_t>(match.vlan());
  }

  Result<IpPrefix> source = ParsePrefix("source", match.source());
  if (!source.ok()) return source.status();
  Result<IpPrefix> destination = ParsePrefix("destination", match.destination());
  if (!destination.ok()) return destination.status();
  if (source->family != IpFamily::kNone && destination->family != IpFamily::kNone &&
      source->family != destination->family) {
    return Invalid("source '" + match.source() + "' and destination '" + match.destination() +
                   "' are of different families; no packet has both");
  }
  parsed.source = *source;
  parsed.destination = *destination;
  if (source->family == IpFamily::kNone) parsed.source.family = destination->family;
  if (destination->family == IpFamily::kNone) parsed.destination.family = source->family;

  if (match.has_protocol()) {
    if (match.protocol() > std::numeric_limits<std::uint8_t>::max()) {
      return Invalid("protocol is " + std::to_string(match.protocol()) +
                     "; use 0..255 (17 is UDP, 6 is TCP)");
    }
    parsed.protocol = static_cast<std::uint8_t>(match.protocol());
  }
  if (match.has_source_port()) {
    const Status status = CheckPort("source_port", match, match.source_port());
    if (!status.ok()) return status;
    parsed.source_port = static_cast<std::uint16_t>(match.source_port());
  }
  if (match.has_destination_port()) {
    const Status status = CheckPort("destination_port", match, match.destination_port());
    if (!status.ok()) return status;
    parsed.destination_port = static_cast<std::uint16_t>(match.destination_port());
  }
  return parsed;
}

bool Covers(const FlowMatch& outer, const FlowMatch& inner) {
  const auto same = [](const auto& wide, const auto& narrow) { return !wide || wide == narrow; };
  const auto within = [](const IpPrefix& wide, IpPrefix narrow) {
    if (wide.family == IpFamily::kNone) return true;
    if (wide.family != narrow.family || wide.length > narrow.length) return false;
    narrow.length = wide.length;
    (void)ClearHostBits(narrow);
    return narrow == wide;
  };
  return same(outer.port, inner.port) && same(outer.queue, inner.queue) &&
         same(outer.vlan, inner.vlan) && within(outer.source, inner.source) &&
         within(outer.destination, inner.destination) && same(outer.protocol, inner.protocol) &&
         same(outer.source_port, inner.source_port) &&
         same(outer.destination_port, inner.destination_port);
}

}  // namespace rxtoken
