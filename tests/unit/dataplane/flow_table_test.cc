// SPDX-License-Identifier: Apache-2.0
#include "dataplane/flow_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <tuple>
#include <vector>

namespace rxtoken {
namespace {

constexpr std::uint8_t kUdp = 17;
constexpr std::uint8_t kTcp = 6;

// What a frame's headers say, from which its key follows.
struct Headers {
  std::uint32_t port = 0;
  std::uint32_t queue = 0;
  std::uint16_t vlan = 0;
  IpFamily family = IpFamily::kNone;
  std::array<std::uint8_t, 16> source = {};
  std::array<std::uint8_t, 16> destination = {};
  std::uint8_t protocol = 0;
  std::uint16_t source_port = 0;
  std::uint16_t destination_port = 0;
};

// As flow_rule.h describes it. Words that the family does not use are rubbish, as they are
// when a worker parses one frame after another.
FlowKey KeyOfFrame(const Headers& headers) {
  FlowKey key;
  key.w.fill(0xDEAD'BEEF'DEAD'BEEF);
  key.w[1] = FlowKey::PortsWord(headers.source_port, headers.destination_port, headers.protocol,
                                headers.family, headers.vlan);
  switch (headers.family) {
    case IpFamily::kNone: key.w[0] = 0; break;
    case IpFamily::kV4:
      std::memcpy(&key.w[0], headers.source.data(), 4);
      std::memcpy(reinterpret_cast<std::uint8_t*>(&key.w[0]) + 4, headers.destination.data(), 4);
      break;
    case IpFamily::kV6:
      std::memcpy(&key.w[0], headers.source.data(), 8);
      std::memcpy(&key.w[2], headers.source.data() + 8, 8);
      std::memcpy(&key.w[3], headers.destination.data(), 16);
      break;
  }
  return key;
}

IpPrefix V4(std::initializer_list<std::uint8_t> address, std::uint8_t length = 32) {
  IpPrefix prefix = {.family = IpFamily::kV4, .length = length, .address = {}};
  std::copy(address.begin(), address.end(), prefix.address.begin());
  return prefix;
}

// 2001:db8::/32, with `last` as its last byte.
IpPrefix V6(std::uint8_t last, std::uint8_t length = 128) {
  IpPrefix prefix = {.family = IpFamily::kV6, .length = length, .address = {}};
  prefix.address = {0x20, 0x01, 0x0d, 0xb8};
  prefix.address[15] = last;
  return prefix;
}

Headers UdpFrame(const IpPrefix& source, const IpPrefix& destination, std::uint16_t source_port,
                 std::uint16_t destination_port) {
  Headers headers;
  headers.family = source.family;
  headers.source = source.address;
  headers.destination = destination.address;
  headers.protocol = kUdp;
  headers.source_port = source_port;
  headers.destination_port = destination_port;
  return headers;
}

// A match, field by field.
class Match : public FlowMatch {
 public:
  Match& Port(std::uint32_t n) { return port = n, *this; }
  Match& Queue(std::uint32_t n) { return queue = n, *this; }
  Match& Vlan(std::uint16_t n) { return vlan = n, *this; }
  Match& From(const IpPrefix& prefix) { return source = prefix, *this; }
  Match& To(const IpPrefix& prefix) { return destination = prefix, *this; }
  Match& Protocol(std::uint8_t n) { return protocol = n, *this; }
  Match& FromPort(std::uint16_t n) { return source_port = n, *this; }
  Match& ToPort(std::uint16_t n) { return destination_port = n, *this; }
};

// Rules, numbered from 1 in the order of Add().
class Rules {
 public:
  using List = std::vector<std::shared_ptr<CompiledRule>>;

  Rules& Add(const FlowMatch& match, std::int32_t priority = 0) {
    list_.push_back(std::make_shared<CompiledRule>());
    list_.back()->rule = {
        .id = list_.size(), .match = match, .priority = priority, .rx_sockets = {1}};
    return *this;
  }
  const List& list() const { return list_; }

 private:
  List list_;
};

// Rules and the table that is made of them.
class TestTable {
 public:
  TestTable(const Rules& rules)  // NOLINT: implicit on purpose
      : rules_(rules.list()) {
    for (const auto& rule : rules_) flow_rules_->Insert(*rule);
    flow_rules_->Publish();
  }
  const FlowTable* operator->() const { return flow_rules_->table().Read(); }
  const FlowTable& operator*() const { return *flow_rules_->table().Read(); }
  const FlowRules& flow_rules() const { return *flow_rules_; }

 private:
  Rules::List rules_;
  std::unique_ptr<FlowRules> flow_rules_ = std::make_unique<FlowRules>();
};

// Number of the rule that wins; 0: none.
std::uint64_t Winner(const FlowTable& table, const Headers& headers) {
  const FlowTable::Plan& plan = table.plan(headers.port, headers.queue);
  const CompiledRule* rule = FlowTable::Lookup(plan, KeyOfFrame(headers));
  return rule == nullptr ? 0 : rule->rule.id;
}

const Headers kFrame = UdpFrame(V4({10, 0, 0, 1}), V4({10, 0, 0, 2}), 1000, 2000);
const Headers kFrame6 = UdpFrame(V6(1), V6(2), 1000, 2000);

TEST(FlowTable, WithoutRulesNothingMatches) {
  const TestTable table = Rules();

  EXPECT_TRUE(table->plan(0, 0).empty());
  EXPECT_EQ(Winner(*table, kFrame), 0u);
}

TEST(FlowTable, ARuleWithoutFieldsMatchesEveryFrame) {
  const TestTable table = Rules().Add(Match());

  EXPECT_EQ(Winner(*table, kFrame), 1u);
  EXPECT_EQ(Winner(*table, kFrame6), 1u);
  EXPECT_EQ(Winner(*table, Headers()), 1u);
  EXPECT_TRUE(table->plan(3, 4).front()->matches_all());
}

TEST(FlowTable, OnlyARuleWithoutFieldsOfTheFrameMatchesAll) {
  EXPECT_FALSE(TestTable(Rules().Add(Match().Vlan(0)))->plan(0, 0).front()->matches_all());
  EXPECT_FALSE(TestTable(Rules().Add(Match().From(V4({}, 0))))->plan(0, 0).front()->matches_all());
  EXPECT_TRUE(TestTable(Rules().Add(Match().Port(1).Queue(2)))->plan(1, 2).front()->matches_all());
}

TEST(FlowTable, EachFieldOfAnExactRuleCounts) {
  const Match match = Match()
                          .Vlan(5)
                          .From(V4({10, 0, 0, 1}))
                          .To(V4({10, 0, 0, 2}))
                          .Protocol(kUdp)
                          .FromPort(1000)
                          .ToPort(2000);
  const TestTable table = Rules().Add(match);
  Headers frame = kFrame;
  frame.vlan = 5;
  ASSERT_EQ(Winner(*table, frame), 1u);

  const auto with = [&](auto change) {
    Headers other = frame;
    change(other);
    return Winner(*table, other);
  };
  EXPECT_EQ(with([](Headers& h) { h.vlan = 6; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.source[3] = 2; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.destination[0] = 11; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.protocol = kTcp; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.source_port = 1001; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.destination_port = 2001; }), 0u);
  EXPECT_EQ(with([](Headers& h) { std::swap(h.source_port, h.destination_port); }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.family = IpFamily::kV6; }), 0u);
  EXPECT_EQ(with([](Headers& h) { h.port = 9, h.queue = 3; }), 1u) << "not fields of the rule";
}

// ---- which rule wins -------------------------------------------------------------------------

TEST(FlowTable, TheHighestPriorityWins) {
  const TestTable table = Rules()
                              .Add(Match().Protocol(kUdp).ToPort(2000), 1)
                              .Add(Match(), 2)
                              .Add(Match().From(V4({10, 0, 0, 1})), -5);

  EXPECT_EQ(Winner(*table, kFrame), 2u);
}

TEST(FlowTable, PrioritiesReachOverTheWholeRange) {
  const TestTable table = Rules()
                              .Add(Match().Vlan(0), INT32_MIN)
                              .Add(Match().Protocol(kUdp), INT32_MAX)
                              .Add(Match().From(V4({10, 0, 0, 1})), 0);

  EXPECT_EQ(Winner(*table, kFrame), 2u);
  EXPECT_EQ(table.flow_rules().InOrder().front()->rule.id, 2u);
  EXPECT_EQ(table.flow_rules().InOrder().back()->rule.id, 1u);
}

TEST(FlowTable, AmongEqualPrioritiesTheRuleThatFixesMoreBitsWins) {
  const TestTable table = Rules()
                              .Add(Match())
                              .Add(Match().From(V4({10}, 8)))
                              .Add(Match().From(V4({10, 0, 0, 1})))
                              .Add(Match().From(V4({10, 0}, 16)))
                              .Add(Match().From(V4({10, 0, 0, 1})).Protocol(kUdp).ToPort(2000));
  Headers frame = kFrame;
  EXPECT_EQ(Winner(*table, frame), 5u);
  frame.destination_port = 1;
  EXPECT_EQ(Winner(*table, frame), 3u);
  frame.source[3] = 77;
  EXPECT_EQ(Winner(*table, frame), 4u);
  frame.source[1] = 77;
  EXPECT_EQ(Winner(*table, frame), 2u);
  frame.source[0] = 77;
  EXPECT_EQ(Winner(*table, frame), 1u);
}

TEST(FlowTable, ARuleOfALowerPriorityTakesWhatTheOthersLeave) {
  const TestTable table = Rules()
                              .Add(Match().Protocol(kUdp).ToPort(2000), 10)
                              .Add(Match().Protocol(kUdp).ToPort(2001), 10)
                              .Add(Match(), -1);
  Headers frame = kFrame;
  EXPECT_EQ(Winner(*table, frame), 1u);
  frame.destination_port = 2001;
  EXPECT_EQ(Winner(*table, frame), 2u);
  frame.destination_port = 2002;
  EXPECT_EQ(Winner(*table, frame), 3u);
}

TEST(FlowTable, ListsTheRulesInTheOrderInWhichTheyAreTried) {
  const TestTable table = Rules()
                              .Add(Match())
                              .Add(Match().Protocol(kUdp))
                              .Add(Match(), 5)
                              .Add(Match().Protocol(kUdp).FromPort(1));

  std::vector<std::uint64_t> ids;
  for (const CompiledRule* rule : table.flow_rules().InOrder()) ids.push_back(rule->rule.id);
  EXPECT_EQ(ids, (std::vector<std::uint64_t>{3, 4, 2, 1}));
}

// ---- ports and queues ------------------------------------------------------------------------

TEST(FlowTable, APortRuleMatchesAllQueuesOfThePortOnly) {
  const TestTable table = Rules().Add(Match().Port(1));

  for (const auto& [port, queue, winner] :
       std::vector<std::array<std::uint32_t, 3>>{{0, 0, 0}, {1, 0, 1}, {1, 7, 1}, {2, 1, 0}}) {
    Headers frame = kFrame;
    frame.port = port;
    frame.queue = queue;
    EXPECT_EQ(Winner(*table, frame), winner) << port << "," << queue;
  }
}

TEST(FlowTable, AQueueRuleBeatsAPortRuleBeatsAnyRule) {
  const TestTable table =
      Rules().Add(Match()).Add(Match().Port(1)).Add(Match().Port(1).Queue(2)).Add(Match().Port(3));

  for (const auto& [port, queue, winner] : std::vector<std::array<std::uint32_t, 3>>{
           {0, 0, 1}, {1, 0, 2}, {1, 2, 3}, {2, 2, 1}, {3, 2, 4}}) {
    Headers frame = kFrame;
    frame.port = port;
    frame.queue = queue;
    EXPECT_EQ(Winner(*table, frame), winner) << port << "," << queue;
  }
}

TEST(FlowTable, AQueueHasNoTablesThatCannotApplyToIt) {
  const TestTable table = Rules()
                              .Add(Match().Port(0).Queue(0).Protocol(kUdp))
                              .Add(Match().Port(0).Queue(1))
                              .Add(Match().Port(1))
                              .Add(Match().Vlan(3));

  EXPECT_EQ(table->plan(0, 0).size(), 2u);
  EXPECT_EQ(table->plan(0, 1).size(), 2u);
  EXPECT_EQ(table->plan(0, 2).size(), 1u);
  EXPECT_EQ(table->plan(1, 0).size(), 2u);
  EXPECT_EQ(table->plan(2, 0).size(), 1u);
}

// ---- VLAN, families, prefixes ----------------------------------------------------------------

TEST(FlowTable, VlanZeroMeansUntagged) {
  const TestTable table = Rules().Add(Match().Vlan(0)).Add(Match().Vlan(100));
  Headers frame = kFrame;

  EXPECT_EQ(Winner(*table, frame), 1u);
  frame.vlan = 100;
  EXPECT_EQ(Winner(*table, frame), 2u);
  frame.vlan = 101;
  EXPECT_EQ(Winner(*table, frame), 0u);
}

TEST(FlowTable, ARuleWithoutVlanMatchesTaggedAndUntaggedFrames) {
  const TestTable table = Rules().Add(Match().Protocol(kUdp));
  Headers frame = kFrame;
  EXPECT_EQ(Winner(*table, frame), 1u);
  frame.vlan = 4095;

  EXPECT_EQ(Winner(*table, frame), 1u);
}

TEST(FlowTable, ARuleWithoutAddressesMatchesBothFamilies) {
  const TestTable table = Rules().Add(Match().Protocol(kUdp).ToPort(2000));

  EXPECT_EQ(Winner(*table, kFrame), 1u);
  EXPECT_EQ(Winner(*table, kFrame6), 1u);
  EXPECT_EQ(Winner(*table, Headers()), 0u) << "no IP header";
}

TEST(FlowTable, APrefixOfLengthZeroMatchesItsFamilyOnly) {
  const TestTable table = Rules().Add(Match().From(V4({}, 0))).Add(Match().To(V6(0, 0)));

  EXPECT_EQ(Winner(*table, kFrame), 1u);
  EXPECT_EQ(Winner(*table, kFrame6), 2u);
  EXPECT_EQ(Winner(*table, Headers()), 0u);
}

TEST(FlowTable, PrefixesEndAtAnyBit) {
  for (const IpFamily family : {IpFamily::kV4, IpFamily::kV6}) {
    const unsigned bits = family == IpFamily::kV4 ? 32 : 128;
    for (unsigned length = 1; length <= bits; length++) {
      for (const bool source : {true, false}) {
        // All ones up to the prefix's length.
        IpPrefix prefix = {.family = family, .length = static_cast<std::uint8_t>(length)};
        for (unsigned i = 0; i < length; i++) {
          prefix.address[i / 8] |= static_cast<std::uint8_t>(0x80 >> i % 8);
        }
        const TestTable table = Rules().Add(source ? Match().From(prefix) : Match().To(prefix));
        Headers frame;
        frame.family = family;
        std::array<std::uint8_t, 16>& address = source ? frame.source : frame.destination;
        address = prefix.address;

        EXPECT_EQ(Winner(*table, frame), 1u) << length;
        if (length < bits) {
          address[length / 8] |= static_cast<std::uint8_t>(0x80 >> length % 8);
          EXPECT_EQ(Winner(*table, frame), 1u) << length << ": the bit behind it does not count";
        }
        address[(length - 1) / 8] ^= static_cast<std::uint8_t>(0x80 >> (length - 1) % 8);
        EXPECT_EQ(Winner(*table, frame), 0u) << length << ": its last bit counts";
      }
    }
  }
}

TEST(FlowTable, SourceAndDestinationOfIpv6AreNotMixedUp) {
  const TestTable table = Rules().Add(Match().From(V6(1)).To(V6(2)));

  EXPECT_EQ(Winner(*table, kFrame6), 1u);
  EXPECT_EQ(Winner(*table, UdpFrame(V6(2), V6(1), 1000, 2000)), 0u);
}

// ---- IP fragments ------------------------------------------------------------------------------

TEST(FlowTable, WhatAFragmentIsForMayDependOnItsDatagramsPorts) {
  const auto lookup = [](const TestTable& table, std::uint8_t protocol) {
    Headers fragment = UdpFrame(V4({10, 0, 0, 1}), V4({10, 0, 0, 2}), 0, 0);
    fragment.protocol = protocol;
    return FlowTable::LookupFragment(table->plan(0, 0), KeyOfFrame(fragment));
  };
  const TestTable without_ports = Rules().Add(Match().Protocol(kUdp));
  ASSERT_TRUE(lookup(without_ports, kUdp).has_value());
  EXPECT_EQ((*lookup(without_ports, kUdp))->rule.id, 1u);
  EXPECT_EQ(lookup(without_ports, kTcp), nullptr) << "no rule, whatever the ports are";

  const TestTable above =
      Rules().Add(Match().Protocol(kUdp).ToPort(2000), 1).Add(Match().Protocol(kUdp));
  EXPECT_EQ(lookup(above, kUdp), std::nullopt);
  EXPECT_EQ(lookup(above, kTcp), std::nullopt) << "a rule of TCP could be in that table";
  EXPECT_EQ(lookup(above, 1), nullptr) << "ICMP has no ports";

  const TestTable below =
      Rules().Add(Match().Protocol(kUdp), 1).Add(Match().Protocol(kUdp).ToPort(2000));
  ASSERT_TRUE(lookup(below, kUdp).has_value());
  EXPECT_EQ((*lookup(below, kUdp))->rule.id, 1u);
}

// ---- many rules ------------------------------------------------------------------------------

TEST(FlowTable, TenThousandExactFlowsEachFindTheirRule) {
  constexpr std::uint32_t kFlows = 10'000;
  const auto frame = [](std::uint32_t i) {
    return UdpFrame(V4({10, 1, static_cast<std::uint8_t>(i >> 8), static_cast<std::uint8_t>(i)}),
                    V4({10, 2, 0, 1}), static_cast<std::uint16_t>(i % 7), 2000);
  };
  Rules rules;
  for (std::uint32_t i = 0; i < kFlows; i++) {
    const Headers headers = frame(i);
    rules.Add(Match()
                  .From({IpFamily::kV4, 32, headers.source})
                  .To({IpFamily::kV4, 32, headers.destination})
                  .Protocol(kUdp)
                  .FromPort(headers.source_port)
                  .ToPort(headers.destination_port));
  }
  const TestTable table(rules);

  EXPECT_EQ(table->plan(0, 0).size(), 1u) << "one mask, one table";
  for (std::uint32_t i = 0; i < kFlows; i++) ASSERT_EQ(Winner(*table, frame(i)), i + 1);
  for (std::uint32_t i = kFlows; i < 2 * kFlows; i++) ASSERT_EQ(Winner(*table, frame(i)), 0u);
}

CompiledRule& ToPort(Rules& rules, std::uint16_t port) {
  return *rules.Add(Match().Protocol(kUdp).ToPort(port)).list().back();
}

TEST(FlowRules, AChangeAmongManyRulesTouchesNoOtherTable) {
  Rules rules;
  FlowRules flow_rules;
  for (std::uint16_t port = 0; port < 10'000; port++) flow_rules.Insert(ToPort(rules, port));
  flow_rules.Publish();
  const FlowTable* const table = flow_rules.table().Read();
  const Headers frame = UdpFrame(V4({}), V4({}), 1, 10'001);
  ASSERT_EQ(Winner(*table, frame), 0u);

  CompiledRule& added = ToPort(rules, 10'001);
  flow_rules.Insert(added);
  flow_rules.Publish();
  EXPECT_EQ(Winner(*table, frame), 10'001u);

  CompiledRule& instead = ToPort(rules, 10'001);
  flow_rules.Insert(instead);
  flow_rules.Publish();
  EXPECT_EQ(Winner(*table, frame), 10'002u);
  EXPECT_EQ(flow_rules.InOrder().size(), 10'001u);

  flow_rules.Remove(instead);
  flow_rules.Publish();
  EXPECT_EQ(Winner(*table, frame), 0u);
  EXPECT_EQ(flow_rules.table().Read(), table) << "published anew";
}

TEST(FlowRules, RulesThatComeAndGoLeaveNothing) {
  Rules rules;
  FlowRules flow_rules;
  CompiledRule& stays = ToPort(rules, 0);
  flow_rules.Insert(stays);
  for (std::uint16_t port = 1; port < 20'000; port++) {
    CompiledRule& comes = ToPort(rules, port);
    flow_rules.Insert(comes);
    flow_rules.Publish();
    ASSERT_EQ(Winner(*flow_rules.table().Read(), UdpFrame(V4({}), V4({}), 1, port)), port + 1u);
    flow_rules.Remove(comes);
  }
  flow_rules.Remove(stays);
  flow_rules.Publish();

  EXPECT_TRUE(flow_rules.InOrder().empty());
  EXPECT_TRUE(flow_rules.table().Read()->plan(0, 0).empty());
}

// Field by field, as flow_rule.h says it.
bool PrefixMatches(const IpPrefix& prefix, IpFamily family,
                   const std::array<std::uint8_t, 16>& address) {
  if (prefix.family == IpFamily::kNone) return true;
  if (prefix.family != family) return false;
  for (unsigned i = 0; i < prefix.length; i++) {
    if (((prefix.address[i / 8] ^ address[i / 8]) >> (7 - i % 8) & 1) != 0) return false;
  }
  return true;
}
bool Matches(const FlowMatch& match, const Headers& headers) {
  return (!match.port || *match.port == headers.port) &&
         (!match.queue || *match.queue == headers.queue) &&
         (!match.vlan || *match.vlan == headers.vlan) &&
         PrefixMatches(match.source, headers.family, headers.source) &&
         PrefixMatches(match.destination, headers.family, headers.destination) &&
         (!match.protocol || *match.protocol == headers.protocol) &&
         (!match.source_port || *match.source_port == headers.source_port) &&
         (!match.destination_port || *match.destination_port == headers.destination_port);
}
int FixedBits(const FlowMatch& match) {
  const bool family =
      match.source.family != IpFamily::kNone || match.destination.family != IpFamily::kNone;
  return 16 * (match.port.has_value() + match.queue.has_value() + match.vlan.has_value() +
               match.source_port.has_value() + match.destination_port.has_value()) +
         8 * (match.protocol.has_value() + family) + match.source.length + match.destination.length;
}

// Names the family in both prefixes or in none, which is the same match.
FlowMatch Plain(FlowMatch match) {
  if (match.source.family == IpFamily::kNone) match.source.family = match.destination.family;
  if (match.destination.family == IpFamily::kNone) match.destination.family = match.source.family;
  return match;
}

// Few different values, so that rules and frames often meet.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : random_(seed) {}

  FlowMatch Match() {
    FlowMatch match;
    if (OneIn(3)) match.port = Below(3);
    if (match.port && OneIn(2)) match.queue = Below(3);
    if (OneIn(3)) match.vlan = static_cast<std::uint16_t>(Below(3));
    const IpFamily family = OneIn(2) ? IpFamily::kV4 : IpFamily::kV6;
    if (OneIn(2)) match.source = Prefix(family);
    if (OneIn(2)) match.destination = Prefix(family);
    if (OneIn(2)) {
      match.protocol = OneIn(2) ? kUdp : kTcp;
      if (OneIn(2)) match.source_port = static_cast<std::uint16_t>(Below(3));
      if (OneIn(2)) match.destination_port = static_cast<std::uint16_t>(Below(3));
    }
    return match;
  }
  struct Headers Headers() {
    struct Headers headers;
    headers.port = Below(4);
    headers.queue = Below(4);
    headers.vlan = static_cast<std::uint16_t>(Below(4));
    const std::uint32_t family = Below(9);
    if (family == 0) return headers;
    headers.family = family % 2 == 0 ? IpFamily::kV4 : IpFamily::kV6;
    headers.source = Address(headers.family);
    headers.destination = Address(headers.family);
    headers.protocol = std::array<std::uint8_t, 3>{kUdp, kTcp, 1}[Below(3)];
    if (headers.protocol == 1) return headers;
    headers.source_port = static_cast<std::uint16_t>(Below(4));
    headers.destination_port = static_cast<std::uint16_t>(Below(4));
    return headers;
  }
  std::int32_t Priority() { return static_cast<std::int32_t>(Below(3)) - 1; }
  std::uint32_t Below(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }
  std::mt19937_64& random() { return random_; }

 private:
  bool OneIn(std::uint32_t n) { return Below(n) == 0; }
  // Differs from zero in one bit or none.
  std::array<std::uint8_t, 16> Address(IpFamily family) {
    std::array<std::uint8_t, 16> address = {};
    const std::uint32_t bits = family == IpFamily::kV4 ? 32 : 128;
    const std::uint32_t bit = Below(2) == 0 ? Below(bits) : std::array{0u, bits - 1}[Below(2)];
    if (Below(4) != 0) address[bit / 8] = static_cast<std::uint8_t>(0x80 >> bit % 8);
    return address;
  }
  IpPrefix Prefix(IpFamily family) {
    const std::uint32_t bits = family == IpFamily::kV4 ? 32 : 128;
    IpPrefix prefix = {
        .family = family,
        .length = static_cast<std::uint8_t>(std::array{0u, 1u, Below(bits), bits}[Below(4)]),
        .address = Address(family)};
    for (std::uint32_t i = prefix.length; i < 128; i++) {
      prefix.address[i / 8] &= static_cast<std::uint8_t>(~(0x80 >> i % 8));
    }
    return prefix;
  }

  std::mt19937_64 random_;
};

// The rule of the highest rank wins; among equals it does not matter which.
std::tuple<std::int64_t, int> Rank(const FlowRule& rule) {
  return {rule.priority, FixedBits(rule.match)};
}

TEST(FlowTable, FindsWhatALinearSearchFinds) {
  const char* const given = std::getenv("RXTOKEN_SEED");
  const std::uint64_t first =
      given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device()();
  std::printf("seeds: RXTOKEN_SEED=%llu and those after it\n",
              static_cast<unsigned long long>(first));
  std::uint64_t found = 0;
  std::uint64_t missed = 0;
  for (std::uint64_t seed = first; seed < first + 60; seed++) {
    Generator generator(seed);
    Rules rules;
    for (std::uint32_t n = 1 + generator.Below(120); n != 0; n--) {
      const FlowMatch match = generator.Match();
      const std::int32_t priority = generator.Priority();
      // Duplicates are refused before they come here.
      const bool known =
          std::any_of(rules.list().begin(), rules.list().end(), [&](const auto& rule) {
            return Plain(rule->rule.match) == Plain(match) && rule->rule.priority == priority;
          });
      if (!known) rules.Add(match, priority);
    }
    const TestTable table(rules);
    // The same rules, given in another order, some of them several times.
    FlowRules changed;
    Rules::List shuffled = rules.list();
    std::shuffle(shuffled.begin(), shuffled.end(), generator.random());
    for (const auto& rule : shuffled) changed.Insert(*rule);
    for (std::uint32_t n = generator.Below(300); n != 0; n--) {
      CompiledRule& rule = *shuffled[generator.Below(static_cast<std::uint32_t>(shuffled.size()))];
      changed.Remove(rule);
      if (generator.Below(2) == 0) changed.Publish();
      changed.Insert(rule);
    }
    changed.Publish();
    const FlowTable& same = *changed.table().Read();

    for (int i = 0; i < 3000; i++) {
      const Headers headers = generator.Headers();
      const CompiledRule* best = nullptr;
      for (const auto& rule : rules.list()) {
        if (!Matches(rule->rule.match, headers)) continue;
        if (best == nullptr || Rank(rule->rule) > Rank(best->rule)) best = rule.get();
      }
      const std::uint64_t winner = Winner(*table, headers);
      (winner != 0 ? found : missed)++;

      ASSERT_EQ(winner != 0, best != nullptr) << "RXTOKEN_SEED=" << seed << " frame " << i;
      ASSERT_EQ(Winner(same, headers), winner) << "RXTOKEN_SEED=" << seed << " frame " << i;
      if (winner == 0) continue;
      const FlowRule& rule = rules.list()[winner - 1]->rule;
      ASSERT_TRUE(Matches(rule.match, headers)) << "RXTOKEN_SEED=" << seed << " frame " << i;
      ASSERT_EQ(Rank(rule), Rank(best->rule)) << "RXTOKEN_SEED=" << seed << " frame " << i;
    }
  }
  EXPECT_GT(found, 1000u);
  EXPECT_GT(missed, 1000u);
}

TEST(RuleTarget, Counts) {
  RuleTarget target;

  target.Count(2, 300);
  target.Count(1, 60);

  EXPECT_EQ(target.packets.load(), 3u);
  EXPECT_EQ(target.bytes.load(), 360u);
}

}  // namespace
}  // namespace rxtoken
