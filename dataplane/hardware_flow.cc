// SPDX-License-Identifier: Apache-2.0
#include "dataplane/hardware_flow.h"

#include <netinet/in.h>
#include <rte_byteorder.h>
#include <rte_errno.h>
#include <rte_flow.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "dataplane/eal.h"

namespace rxtoken {
namespace {

constexpr std::uint16_t kVlanIdBits = 0x0FFF;

using Address = std::array<std::uint8_t, 16>;

// The first `bits` bits of an address.
Address MaskOf(unsigned bits) {
  Address mask;
  for (std::uint8_t& byte : mask) {
    byte = static_cast<std::uint8_t>(bits >= 8 ? 0xFF : 0xFF << (8 - bits));
    bits -= std::min(bits, 8u);
  }
  return mask;
}

rte_be32_t Ipv4(const Address& address) {
  rte_be32_t word;
  std::memcpy(&word, address.data(), sizeof word);
  return word;
}

// What a header of a frame must have; a zero mask asks only that it is there.
template <typename Item>
struct Header {
  Item value = {};
  Item mask = {};
};

// The pattern of a match, with all that it points to.
class Pattern {
 public:
  // `family`: the IP header that frames must have, or none in particular.
  Pattern(const FlowMatch& match, IpFamily family) {
    if (match.vlan == 0) {
      ethernet_.mask.has_vlan = 1;
    }
    Append(RTE_FLOW_ITEM_TYPE_ETH, ethernet_, match.vlan == 0);
    if (match.vlan.value_or(0) != 0) {
      vlan_.value.tci = rte_cpu_to_be_16(*match.vlan);
      vlan_.mask.tci = rte_cpu_to_be_16(kVlanIdBits);
      Append(RTE_FLOW_ITEM_TYPE_VLAN, vlan_, true);
    }
    if (family == IpFamily::kV4) AppendIpv4(match);
    if (family == IpFamily::kV6) AppendIpv6(match);
    const bool ports = match.source_port || match.destination_port;
    if (match.protocol == IPPROTO_UDP) {
      SetPorts(match, udp_);
      Append(RTE_FLOW_ITEM_TYPE_UDP, udp_, ports);
    } else if (match.protocol == IPPROTO_TCP) {
      SetPorts(match, tcp_);
      Append(RTE_FLOW_ITEM_TYPE_TCP, tcp_, ports);
    }
    items_[n_].type = RTE_FLOW_ITEM_TYPE_END;
  }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  const rte_flow_item* items() const noexcept { return items_; }

 private:
  template <typename Item>
  void Append(rte_flow_item_type type, const Header<Item>& header, bool constrained) {
    rte_flow_item& item = items_[n_++];
    item.type = type;
    if (!constrained) return;
    item.spec = &header.value;
    item.mask = &header.mask;
  }

  void AppendIpv4(const FlowMatch& match) {
    rte_ipv4_hdr& value = ipv4_.value.hdr;
    rte_ipv4_hdr& mask = ipv4_.mask.hdr;
    value.src_addr = Ipv4(match.source.address);
    value.dst_addr = Ipv4(match.destination.address);
    mask.src_addr = Ipv4(MaskOf(match.source.length));
    mask.dst_addr = Ipv4(MaskOf(match.destination.length));
    value.next_proto_id = match.protocol.value_or(0);
    mask.next_proto_id = match.protocol ? 0xFF : 0;
    Append(RTE_FLOW_ITEM_TYPE_IPV4, ipv4_,
           match.protocol || match.source.length != 0 || match.destination.length != 0);
  }

  void AppendIpv6(const FlowMatch& match) {
    rte_ipv6_hdr& value = ipv6_.value.hdr;
    rte_ipv6_hdr& mask = ipv6_.mask.hdr;
    std::memcpy(value.src_addr, match.source.address.data(), sizeof value.src_addr);
    std::memcpy(value.dst_addr, match.destination.address.data(), sizeof value.dst_addr);
    std::memcpy(mask.src_addr, MaskOf(match.source.length).data(), sizeof mask.src_addr);
    std::memcpy(mask.dst_addr, MaskOf(match.destination.length).data(), sizeof mask.dst_addr);
    value.proto = match.protocol.value_or(0);
    mask.proto = match.protocol ? 0xFF : 0;
    Append(RTE_FLOW_ITEM_TYPE_IPV6, ipv6_,
           match.protocol || match.source.length != 0 || match.destination.length != 0);
  }

  // UDP and TCP call them the same.
  template <typename Item>
  static void SetPorts(const FlowMatch& match, Header<Item>& header) {
    header.value.hdr.src_port = rte_cpu_to_be_16(match.source_port.value_or(0));
    header.mask.hdr.src_port = match.source_port ? 0xFFFF : 0;
    header.value.hdr.dst_port = rte_cpu_to_be_16(match.destination_port.value_or(0));
    header.mask.hdr.dst_port = match.destination_port ? 0xFFFF : 0;
  }

  Header<rte_flow_item_eth> ethernet_;
  Header<rte_flow_item_vlan> vlan_;
  Header<rte_flow_item_ipv4> ipv4_;
  Header<rte_flow_item_ipv6> ipv6_;
  Header<rte_flow_item_udp> udp_;
  Header<rte_flow_item_tcp> tcp_;
  rte_flow_item items_[5] = {};  // Ethernet, VLAN, IP, UDP or TCP, end
  std::size_t n_ = 0;
};

Status Refused(const Port& port, const rte_flow_error& error, int code, const std::string& log) {
  const bool cannot = code == ENOSYS || code == ENOTSUP;
  const std::string reason = std::strerror(code);
  std::string words = error.message == nullptr ? reason : error.message;
  if (words != reason) words += " (" + reason + ")";
  return {cannot ? Code::kUnimplemented : Code::kFailedPrecondition,
          port.driver() + ": " + words + log};
}

}  // namespace

Result<std::unique_ptr<HardwareFlow>> HardwareFlow::Install(const Port& port,
                                                            const FlowRule& rule) {
  const FlowMatch& match = rule.match;
  std::unique_ptr<HardwareFlow> flow(new HardwareFlow(port.id()));
  std::vector<IpFamily> families = {
      std::max(match.source.family, match.destination.family)};  // kNone is the least
  if (families[0] == IpFamily::kNone && match.protocol) families = {IpFamily::kV4, IpFamily::kV6};
  for (const IpFamily family : families) {
    if (Status status = flow->Add(port, rule, family); !status.ok()) return status;
  }
  return flow;
}

Status HardwareFlow::Add(const Port& port, const FlowRule& rule, IpFamily family) {
  const Pattern pattern(rule.match, family);
  rte_flow_attr attributes = {};
  attributes.priority = static_cast<std::uint32_t>(std::max(0, -rule.priority));
  attributes.ingress = 1;
  const rte_flow_action_queue queue = {.index = static_cast<std::uint16_t>(rule.steer_to->queue)};
  const rte_flow_action actions[] = {{.type = RTE_FLOW_ACTION_TYPE_QUEUE, .conf = &queue},
                                     {.type = RTE_FLOW_ACTION_TYPE_END, .conf = nullptr}};
  LogCapture log;
  rte_flow_error error = {};
  const int invalid = rte_flow_validate(port_id_, &attributes, pattern.items(), actions, &error);
  if (invalid != 0) return Refused(port, error, -invalid, log.Take());
  rte_flow* const flow = rte_flow_create(port_id_, &attributes, pattern.items(), actions, &error);
  if (flow == nullptr) return Refused(port, error, rte_errno, log.Take());
  flows_.push_back(flow);
  return {};
}

HardwareFlow::~HardwareFlow() {
  for (rte_flow* flow : flows_) {
    rte_flow_error error = {};
    rte_flow_destroy(port_id_, flow, &error);
  }
}

}  // namespace rxtoken
