// SPDX-License-Identifier: Apache-2.0
// flow_table.h - from a frame's key to the flow rule that wins.
//
// Tuple space search: rules of one priority that fix the same bits of the key share a hash
// table, and a queue tries the tables that can apply to it, best first. So the cost follows
// the number of distinct masks, usually one, and not the number of rules. An own table
// rather than rte_hash, which takes 14 ns a packet more on the whole path.
//
// A change costs what it changes: hash tables change under the workers' eyes, and only which
// tables there are is published anew. A place in a hash table that a rule once had keeps its
// key for good, so a worker never reads a key that is being written; a table that is half
// full of rules and former rules makes room by becoming another one.
//
// Thread-safety: FlowRules by the control thread; FlowTable, and Find in its tables, by
//                workers, from one quiescent state to the next.
// Hot path: Lookup.   Allocates: when rules change.
#pragma once

#include <rte_hash_crc.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "dataplane/dataplane.h"
#include "dataplane/flow_rule.h"
#include "tokens/abi/limits.h"
#include "tokens/rcu.h"

namespace rxtoken {

struct RxLane;

// What one worker needs of a rule, on one line: where its frames go and its counters, whose
// only writer is the worker.
struct alignas(64) RuleTarget {
  // The common case is one lane that may be lent pages of any binding. Else it is nullptr, and
  // `lanes` has all of them.
  RxLane* lane = nullptr;
  std::span<RxLane* const> lanes = {};
  std::uint64_t rule = 0;  // id
  std::atomic<std::uint64_t> packets{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> drops{0};
  std::atomic<std::uint64_t> copied{0};

  std::span<RxLane* const> all() const noexcept {
    return lane != nullptr ? std::span<RxLane* const>(&lane, 1) : lanes;
  }

  static void Add(std::atomic<std::uint64_t>& counter, std::uint64_t n) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  void Count(std::uint64_t n, std::uint64_t n_bytes) noexcept {
    Add(packets, n);
    Add(bytes, n_bytes);
  }
};

// A rule as the workers see it. It outlives every table that names it.
struct CompiledRule {
  FlowRule rule;
  std::array<RuleTarget, kMaxWorkers> targets;
  std::vector<RxLane*> lanes;  // all workers' that RuleTarget::lanes point into
  RuleInfo before;             // [ctl] counters of what this rule was before an update
};

// One hash table: all rules of one priority, scope and mask.
class FlowSubTable {
 public:
  // For `rules` rules at least.
  FlowSubTable(const FlowKey& mask, std::size_t rules);

  // nullptr: none matches.
  CompiledRule* Find(const FlowKey& key) const noexcept;
  bool matches_all() const noexcept { return matches_all_; }
  bool has_ports() const noexcept { return (mask_.w[1] & 0xFFFF'FFFF) != 0; }
  template <typename F>
  void ForEach(F f) const {
    for (const auto& place : rules_) {
      if (CompiledRule* rule = Live(place.load(std::memory_order_acquire))) f(*rule);
    }
  }

  // [ctl] Has one rule more, or another one in the place of that with the same match. False:
  // it is full.
  bool Insert(CompiledRule& rule) noexcept;
  // [ctl] Precondition: it has the rule.
  void Remove(const CompiledRule& rule) noexcept;
  // [ctl] of rules
  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::uint64_t kAddressWords[3] = {2, 3, 4};

  // What is where a rule was.
  static CompiledRule* Former() noexcept { return reinterpret_cast<CompiledRule*>(1); }
  static CompiledRule* Live(CompiledRule* rule) noexcept {
    return rule == Former() ? nullptr : rule;
  }
  std::uint32_t PlaceOf(const FlowKey& value) const noexcept;

  FlowKey mask_;
  bool long_key_;     // the mask reaches words 2..4
  bool matches_all_;  // the mask is empty
  std::uint32_t index_mask_;
  std::size_t size_ = 0;
  std::size_t used_ = 0;                           // places, by rules and former rules
  std::vector<std::atomic<CompiledRule*>> rules_;  // open addressing; nullptr: free
  std::vector<FlowKey> keys_;
};

// Which frames' queues a rule can apply to; more fixed fields come first.
struct FlowScope {
  std::int64_t port;   // -1: any
  std::int64_t queue;  // -1: any

  bool Covers(std::int64_t p, std::int64_t q) const noexcept {
    return (port < 0 || port == p) && (queue < 0 || queue == q);
  }
  friend auto operator<=>(const FlowScope&, const FlowScope&) = default;
};

// The hash tables that there are, as published to the workers. Immutable, but for what changes
// inside the hash tables, which outlive it.
class FlowTable {
 public:
  using Entry = std::pair<FlowScope, const FlowSubTable*>;
  // In the order in which they are tried.
  FlowTable(std::span<const Entry> entries, std::uint64_t serial);

  std::uint64_t serial() const noexcept { return serial_; }  // of all tables ever built

  // The tables that can apply to frames of one queue, in the order in which they are tried.
  using Plan = std::vector<const FlowSubTable*>;
  const Plan& plan(std::uint32_t port, std::uint32_t queue) const;

  // The rule that wins for `key`; nullptr: none matches.
  static CompiledRule* Lookup(const Plan& plan, const FlowKey& key) noexcept {
    for (const FlowSubTable* table : plan) {
      if (CompiledRule* rule = table->Find(key); rule != nullptr) return rule;
    }
    return nullptr;
  }

  // What Lookup() will say of the whole datagram, for the key of one of its fragments, in which
  // there are no ports. Nothing: it depends on the ports.
  static std::optional<CompiledRule*> LookupFragment(const Plan& plan,
                                                     const FlowKey& key) noexcept {
    for (const FlowSubTable* table : plan) {
      if (table->has_ports() && key.has_ports()) return std::nullopt;
      if (CompiledRule* rule = table->Find(key); rule != nullptr) return rule;
    }
    return nullptr;
  }

  // All rules.
  template <typename F>
  void ForEach(F f) const {
    for (const FlowSubTable* table : tables_) table->ForEach(f);
  }

 private:
  std::uint64_t serial_;
  Plan tables_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Plan> plans_;  // queues that rules name
  std::map<std::uint32_t, Plan> port_plans_;  // other queues of ports that rules name
  Plan default_plan_;
};

// The rules, and the control thread's side of what is published of them.
class FlowRules {
 public:
  FlowRules();
  ~FlowRules();  // no worker reads any more
  FlowRules(const FlowRules&) = delete;
  FlowRules& operator=(const FlowRules&) = delete;

  const rcu::Pointer<FlowTable>& table() const noexcept { return table_; }

  // Workers may find the rule from now on, and in any case after Publish(). One with the same
  // match and priority is replaced. The rule outlives its Remove(), or its replacement, by a
  // Publish().
  void Insert(CompiledRule& rule);
  // Precondition: it was inserted, and neither replaced nor removed.
  void Remove(const CompiledRule& rule);
  // Returns when all workers see what was changed, and none sees anything older.
  void Publish();

  // All rules, in the order in which they are tried.
  std::vector<const CompiledRule*> InOrder() const;

 private:
  // Sorts tables into the order in which they are tried.
  struct Group {
    std::int32_t priority;
    int bits;
    FlowScope scope;
    std::array<std::uint64_t, 5> mask;

    static Group Of(const FlowRule& rule) noexcept;
    auto Order() const { return std::tuple(-std::int64_t{priority}, -bits, scope, mask); }
    bool operator<(const Group& other) const { return Order() < other.Order(); }
  };

  std::map<Group, std::unique_ptr<FlowSubTable>> groups_;
  std::vector<std::unique_ptr<FlowSubTable>> replaced_;  // which workers may still read
  bool to_publish_ = false;                              // there are other tables than before
  std::uint64_t tables_built_ = 0;
  rcu::Pointer<FlowTable> table_;
};

// The bits of a key that a match looks at, and their values.
struct MaskedKey {
  FlowKey mask;
  FlowKey value;
};
MaskedKey KeyOf(const FlowMatch& match) noexcept;

inline CompiledRule* FlowSubTable::Find(const FlowKey& key) const noexcept {
  const auto masked = [&](std::uint64_t i) { return key.w[i] & mask_.w[i]; };
  const std::uint64_t w0 = masked(0);
  const std::uint64_t w1 = masked(1);
  std::uint32_t hash = rte_hash_crc_8byte(w1, rte_hash_crc_8byte(w0, 0));
  if (long_key_) {
    for (const std::uint64_t i : kAddressWords) hash = rte_hash_crc_8byte(masked(i), hash);
  }
  for (std::uint32_t at = hash & index_mask_;; at = (at + 1) & index_mask_) {
    // order: acquire pairs with the release in Insert(): the key, and the rule, are complete.
    CompiledRule* const rule = rules_[at].load(std::memory_order_acquire);
    if (rule == nullptr) return nullptr;
    const FlowKey& candidate = keys_[at];
    if (candidate.w[0] != w0 || candidate.w[1] != w1) continue;
    if (long_key_ && (candidate.w[2] != masked(2) || candidate.w[3] != masked(3) ||
                      candidate.w[4] != masked(4))) {
      continue;
    }
    return Live(rule);
  }
}

}  // namespace rxtoken
