// SPDX-License-Identifier: Apache-2.0
#include "dataplane/flow_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

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

// ---- one hash table ----------------------------------------------------------------------------

// At most half full, so that probing ends soon.
FlowSubTable::FlowSubTable(const FlowKey& mask, std::size_t rules)
    : mask_(mask),
      long_key_((mask.w[2] | mask.w[3] | mask.w[4]) != 0),
      matches_all_(Bits(mask) == 0),
      index_mask_(static_cast<std::uint32_t>(std::bit_ceil(2 * rules)) - 1),
      rules_(index_mask_ + 1),
      keys_(index_mask_ + 1) {}

// Where a rule with this value is or was, or the free place where it would be.
std::uint32_t FlowSubTable::PlaceOf(const FlowKey& value) const noexcept {
  std::uint32_t hash = rte_hash_crc_8byte(value.w[1], rte_hash_crc_8byte(value.w[0], 0));
  if (long_key_) {
    for (const std::uint64_t i : kAddressWords) hash = rte_hash_crc_8byte(value.w[i], hash);
  }
  std::uint32_t at = hash & index_mask_;
  while (rules_[at].load(std::memory_order_relaxed) != nullptr && keys_[at] != value) {
    at = (at + 1) & index_mask_;
  }
  return at;
}

bool FlowSubTable::Insert(CompiledRule& rule) noexcept {
  const FlowKey value = KeyOf(rule.rule.match).value;
  const std::uint32_t at = PlaceOf(value);
  CompiledRule* const before = rules_[at].load(std::memory_order_relaxed);
  if (before == nullptr) {
    if (2 * (used_ + 1) > keys_.size()) return false;
    used_++;
    keys_[at] = value;
  }
  if (Live(before) == nullptr) size_++;
  // order: release, so that workers see key and rule complete.
  rules_[at].store(&rule, std::memory_order_release);
  return true;
}

void FlowSubTable::Remove(const CompiledRule& rule) noexcept {
  rules_[PlaceOf(KeyOf(rule.rule.match).value)].store(Former(), std::memory_order_relaxed);
  size_--;
}

// ---- the tables that there are -----------------------------------------------------------------

FlowTable::FlowTable(std::span<const Entry> entries, std::uint64_t serial) : serial_(serial) {
  for (const auto& [scope, table] : entries) {
    if (scope.port < 0) continue;
    const auto port = static_cast<std::uint32_t>(scope.port);
    port_plans_[port];
    if (scope.queue >= 0) plans_[{port, static_cast<std::uint32_t>(scope.queue)}];
  }
  for (const auto& [scope, table] : entries) {
    tables_.push_back(table);
    if (scope.Covers(-1, -1)) default_plan_.push_back(table);
    for (auto& [port, plan] : port_plans_) {
      if (scope.Covers(port, -1)) plan.push_back(table);
    }
    for (auto& [queue, plan] : plans_) {
      if (scope.Covers(queue.first, queue.second)) plan.push_back(table);
    }
  }
}

const FlowTable::Plan& FlowTable::plan(std::uint32_t port, std::uint32_t queue) const {
  if (const auto it = plans_.find({port, queue}); it != plans_.end()) return it->second;
  if (const auto it = port_plans_.find(port); it != port_plans_.end()) return it->second;
  return default_plan_;
}

// ---- the rules ---------------------------------------------------------------------------------

FlowRules::FlowRules() { table_.Exchange(new FlowTable({}, ++tables_built_)); }

FlowRules::~FlowRules() { delete table_.Exchange(nullptr); }

FlowRules::Group FlowRules::Group::Of(const FlowRule& rule) noexcept {
  const FlowKey mask = KeyOf(rule.match).mask;
  const FlowScope scope = {.port = rule.match.port ? std::int64_t{*rule.match.port} : -1,
                           .queue = rule.match.queue ? std::int64_t{*rule.match.queue} : -1};
  const int scope_bits = (scope.port >= 0 ? 16 : 0) + (scope.queue >= 0 ? 16 : 0);
  return {rule.priority, Bits(mask) + scope_bits, scope, mask.w};
}

void FlowRules::Insert(CompiledRule& rule) {
  const Group group = Group::Of(rule.rule);
  std::unique_ptr<FlowSubTable>& table = groups_[group];
  if (table != nullptr && table->Insert(rule)) return;
  // Room for half as many again: however many rules come, each is moved a few times only.
  const std::size_t size = table == nullptr ? 0 : table->size();
  auto larger = std::make_unique<FlowSubTable>(FlowKey{group.mask}, size + size / 2 + 1);
  if (table != nullptr) {
    table->ForEach([&](CompiledRule& old) { larger->Insert(old); });
    replaced_.push_back(std::move(table));
  }
  larger->Insert(rule);
  table = std::move(larger);
  to_publish_ = true;
}

void FlowRules::Remove(const CompiledRule& rule) {
  const auto group = groups_.find(Group::Of(rule.rule));
  group->second->Remove(rule);
  if (group->second->size() != 0) return;
  replaced_.push_back(std::move(group->second));
  groups_.erase(group);
  to_publish_ = true;
}

void FlowRules::Publish() {
  std::unique_ptr<FlowTable> old;
  if (to_publish_) {
    std::vector<FlowTable::Entry> entries;
    for (const auto& [group, table] : groups_) entries.emplace_back(group.scope, table.get());
    old.reset(table_.Exchange(new FlowTable(entries, ++tables_built_)));
    to_publish_ = false;
  }
  rcu::WaitForReaders();
  replaced_.clear();
}

std::vector<const CompiledRule*> FlowRules::InOrder() const {
  std::vector<const CompiledRule*> rules;
  for (const auto& [group, table] : groups_) {
    const std::size_t first = rules.size();
    table->ForEach([&](const CompiledRule& rule) { rules.push_back(&rule); });
    std::sort(rules.begin() + static_cast<std::ptrdiff_t>(first), rules.end(),
              [](const auto* a, const auto* b) { return a->rule.id < b->rule.id; });
  }
  return rules;
}

}  // namespace rxtoken
