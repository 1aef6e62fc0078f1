// SPDX-License-Identifier: Apache-2.0
#include "dataplane/flow_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

namespace rxtoken {
namespace {

std::array<std::uint8_t, 16> PrefixMask(unsigned bits) noexcept {
  std::array<std::uint8_t, 16> mask = {};
  for (unsigned i = 0; i < bits; i++) mask[i / 8] |= static_cast<std::uint8_t>(0x80 >> (i % 8));
  return mask;
}

std::uint32_t Load32(const std::uint8_t* p) noexcept {
  std::uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

std::uint64_t Load64(const std::uint8_t* p) noexcept {
  std::uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Which frames' queues a rule can apply to; more fixed fields come first.
struct Scope {
  std::int64_t port;   // -1: any
  std::int64_t queue;  // -1: any

  static Scope Of(const FlowMatch& match) noexcept {
    return {match.port ? std::int64_t{*match.port} : -1,
            match.queue ? std::int64_t{*match.queue} : -1};
  }
  int bits() const noexcept { return (port >= 0 ? 16 : 0) + (queue >= 0 ? 16 : 0); }
  bool Covers(std::int64_t p, std::int64_t q) const noexcept {
    return (port < 0 || port == p) && (queue < 0 || queue == q);
  }
  friend auto operator<=>(const Scope&, const Scope&) = default;
};

int Bits(const FlowKey& mask) noexcept {
  int bits = 0;
  for (const std::uint64_t w : mask.w) bits += std::popcount(w);
  return bits;
}

}  // namespace

MaskedKey KeyOf(const FlowMatch& match) noexcept {
  MaskedKey key = {};
  FlowKey& mask = key.mask;
  FlowKey& value = key.value;
  const IpFamily family =
      match.source.family != IpFamily::kNone ? match.source.family : match.destination.family;
  const auto all8 = [](bool set) -> std::uint8_t { return set ? 0xFF : 0; };
  const auto all16 = [](bool set) -> std::uint16_t { return set ? 0xFFFF : 0; };
  mask.w[1] = FlowKey::PortsWord(
      all16(match.source_port.has_value()), all16(match.destination_port.has_value()),
      all8(match.protocol.has_value()), IpFamily{all8(family != IpFamily::kNone)},
      all16(match.vlan.has_value()));
  value.w[1] = FlowKey::PortsWord(match.source_port.value_or(0), match.destination_port.value_or(0),
                                  match.protocol.value_or(0), family, match.vlan.value_or(0));
  const auto source_mask = PrefixMask(match.source.length);
  const auto destination_mask = PrefixMask(match.destination.length);
  if (family == IpFamily::kV4) {
    mask.w[0] = Load32(&source_mask[0]) | std::uint64_t{Load32(&destination_mask[0])} << 32;
    value.w[0] = Load32(&match.source.address[0]) |
                 std::uint64_t{Load32(&match.destination.address[0])} << 32;
  } else if (family == IpFamily::kV6) {
    mask.w[0] = Load64(&source_mask[0]);
    mask.w[2] = Load64(&source_mask[8]);
    mask.w[3] = Load64(&destination_mask[0]);
    mask.w[4] = Load64(&destination_mask[8]);
    value.w[0] = Load64(&match.source.address[0]);
    value.w[2] = Load64(&match.source.address[8]);
    value.w[3] = Load64(&match.destination.address[0]);
    value.w[4] = Load64(&match.destination.address[8]);
  }
  return key;
}

FlowTable::SubTable::SubTable(const FlowKey& mask, std::span<CompiledRule* const> rules)
    : mask_(mask),
      long_key_((mask.w[2] | mask.w[3] | mask.w[4]) != 0),
      matches_all_(Bits(mask) == 0) {
  // At most half full, so that probing ends soon.
  const auto size = static_cast<std::uint32_t>(std::bit_ceil(2 * rules.size()));
  index_mask_ = size - 1;
  rules_.resize(size);
  keys_.resize(size);
  for (CompiledRule* rule : rules) {
    const FlowKey value = KeyOf(rule->rule.match).value;
    std::uint32_t hash = rte_hash_crc_8byte(value.w[1], rte_hash_crc_8byte(value.w[0], 0));
    if (long_key_) {
      for (const std::uint64_t i : kAddressWords) hash = rte_hash_crc_8byte(value.w[i], hash);
    }
    std::uint32_t at = hash & index_mask_;
    while (rules_[at] != nullptr) at = (at + 1) & index_mask_;
    rules_[at] = rule;
    keys_[at] = value;
  }
}

FlowTable::FlowTable(std::span<CompiledRule* const> rules, std::uint64_t serial) : serial_(serial) {
  // Sorts tables into the order in which they are tried.
  struct Group {
    std::int32_t priority;
    int bits;
    Scope scope;
    std::array<std::uint64_t, 5> mask;
    auto Order() const { return std::tuple(-std::int64_t{priority}, -bits, scope, mask); }
    bool operator<(const Group& other) const { return Order() < other.Order(); }
  };
  std::map<Group, std::vector<CompiledRule*>> groups;
  for (CompiledRule* rule : rules) {
    const FlowKey mask = KeyOf(rule->rule.match).mask;
    const Scope scope = Scope::Of(rule->rule.match);
    groups[{rule->rule.priority, Bits(mask) + scope.bits(), scope, mask.w}].push_back(rule);
    if (scope.port >= 0) {
      const auto port = static_cast<std::uint32_t>(scope.port);
      port_plans_[port];
      if (scope.queue >= 0) plans_[{port, static_cast<std::uint32_t>(scope.queue)}];
    }
  }
  for (const auto& [group, members] : groups) {
    tables_.push_back(std::make_unique<SubTable>(FlowKey{group.mask}, members));
    const SubTable* table = tables_.back().get();
    in_order_.insert(in_order_.end(), members.begin(), members.end());
    if (group.scope.Covers(-1, -1)) default_plan_.push_back(table);
    for (auto& [port, plan] : port_plans_) {
      if (group.scope.Covers(port, -1)) plan.push_back(table);
    }
    for (auto& [queue, plan] : plans_) {
      if (group.scope.Covers(queue.first, queue.second)) plan.push_back(table);
    }
  }
}

const FlowTable::Plan& FlowTable::plan(std::uint32_t port, std::uint32_t queue) const {
  if (const auto it = plans_.find({port, queue}); it != plans_.end()) return it->second;
  if (const auto it = port_plans_.find(port); it != port_plans_.end()) return it->second;
  return default_plan_;
}

}  // namespace rxtoken
