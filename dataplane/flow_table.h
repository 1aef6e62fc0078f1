// SPDX-License-Identifier: Apache-2.0
// flow_table.h - from a frame's key to the flow rule that wins, for one set of rules.
//
// Tuple space search: rules of one priority that fix the same bits of the key share a hash
// table, and a queue tries the tables that can apply to it, best first. So the cost follows
// the number of distinct masks, usually one, and not the number of rules. An own table
// rather than rte_hash, which takes 14 ns a packet more on the whole path.
//
// Thread-safety: immutable once built; published to the workers by RCU.
// Hot path: Lookup.   Allocates: when built.
#pragma once

#include <rte_hash_crc.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "dataplane/dataplane.h"
#include "dataplane/flow_rule.h"
#include "tokens/abi/limits.h"

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

class FlowTable {
 public:
  // The rules outlive the table.
  FlowTable(std::span<CompiledRule* const> rules, std::uint64_t serial);

  std::uint64_t serial() const noexcept { return serial_; }  // of all tables ever built

  // One hash table: all rules of one priority, scope and mask.
  class SubTable {
   public:
    SubTable(const FlowKey& mask, std::span<CompiledRule* const> rules);
    CompiledRule* Find(const FlowKey& key) const noexcept;
    bool matches_all() const noexcept { return matches_all_; }

   private:
    static constexpr std::uint64_t kAddressWords[3] = {2, 3, 4};

    FlowKey mask_;
    bool long_key_;     // the mask reaches words 2..4
    bool matches_all_;  // the mask is empty
    std::uint32_t index_mask_;
    std::vector<CompiledRule*> rules_;  // open addressing; nullptr: free
    std::vector<FlowKey> keys_;
  };

  // The tables that can apply to frames of one queue, in the order in which they are tried.
  using Plan = std::vector<const SubTable*>;
  const Plan& plan(std::uint32_t port, std::uint32_t queue) const;

  // The rule that wins for `key`; nullptr: none matches.
  static CompiledRule* Lookup(const Plan& plan, const FlowKey& key) noexcept {
    for (const SubTable* table : plan) {
      if (CompiledRule* rule = table->Find(key); rule != nullptr) return rule;
    }
    return nullptr;
  }

  // All rules, in the order in which they are tried.
  const std::vector<CompiledRule*>& in_order() const noexcept { return in_order_; }

 private:
  std::uint64_t serial_;
  std::vector<std::unique_ptr<SubTable>> tables_;
  std::vector<CompiledRule*> in_order_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Plan> plans_;  // queues that rules name
  std::map<std::uint32_t, Plan> port_plans_;  // other queues of ports that rules name
  Plan default_plan_;
};

// The bits of a key that a match looks at, and their values.
struct MaskedKey {
  FlowKey mask;
  FlowKey value;
};
MaskedKey KeyOf(const FlowMatch& match) noexcept;

inline CompiledRule* FlowTable::SubTable::Find(const FlowKey& key) const noexcept {
  FlowKey masked;
  masked.w[0] = key.w[0] & mask_.w[0];
  masked.w[1] = key.w[1] & mask_.w[1];
  std::uint32_t hash = rte_hash_crc_8byte(masked.w[1], rte_hash_crc_8byte(masked.w[0], 0));
  if (long_key_) {
    for (const std::uint64_t i : kAddressWords) {
      masked.w[i] = key.w[i] & mask_.w[i];
      hash = rte_hash_crc_8byte(masked.w[i], hash);
    }
  }
  for (std::uint32_t at = hash & index_mask_;; at = (at + 1) & index_mask_) {
    CompiledRule* const rule = rules_[at];
    if (rule == nullptr) return nullptr;
    const FlowKey& candidate = keys_[at];
    if (candidate.w[0] != masked.w[0] || candidate.w[1] != masked.w[1]) continue;
    if (long_key_ && (candidate.w[2] != masked.w[2] || candidate.w[3] != masked.w[3] ||
                      candidate.w[4] != masked.w[4])) {
      continue;
    }
    return rule;
  }
}

}  // namespace rxtoken
