// SPDX-License-Identifier: Apache-2.0
#include "dataplane/hardware_flow.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <rte_byteorder.h>
#include <rte_flow.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/dataplane/test_eal.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;

// What a driver was asked for: items with a specification have their bytes, and their mask.
struct Item {
  rte_flow_item_type type;
  std::vector<std::uint8_t> value;
  std::vector<std::uint8_t> mask;
};
struct Request {
  rte_flow_attr attributes;
  std::vector<Item> pattern;
  std::uint16_t queue;
};

std::size_t ItemBytes(rte_flow_item_type type) {
  switch (type) {
    case RTE_FLOW_ITEM_TYPE_ETH: return sizeof(rte_flow_item_eth);
    case RTE_FLOW_ITEM_TYPE_VLAN: return sizeof(rte_flow_item_vlan);
    case RTE_FLOW_ITEM_TYPE_IPV4: return sizeof(rte_flow_item_ipv4);
    case RTE_FLOW_ITEM_TYPE_IPV6: return sizeof(rte_flow_item_ipv6);
    case RTE_FLOW_ITEM_TYPE_UDP: return sizeof(rte_flow_item_udp);
    case RTE_FLOW_ITEM_TYPE_TCP: return sizeof(rte_flow_item_tcp);
    default: return 0;
  }
}

// The driver. It takes `takes` rules, and refuses the next.
struct FakeDriver {
  std::size_t takes = 100;
  std::vector<Request> installed;
  std::size_t destroyed = 0;
} driver;

int Refuse(rte_flow_error* error) {
  return rte_flow_error_set(error, EINVAL, RTE_FLOW_ERROR_TYPE_ITEM, nullptr, "not in this mood");
}

}  // namespace
}  // namespace rxtoken

// These stand in front of DPDK's functions of the same name: no device that a test machine has
// places frames.
extern "C" {

int rte_flow_validate(std::uint16_t, const rte_flow_attr*, const rte_flow_item*,
                      const rte_flow_action*, rte_flow_error* error) {
  using namespace rxtoken;
  return driver.installed.size() < driver.takes ? 0 : Refuse(error);
}

rte_flow* rte_flow_create(std::uint16_t, const rte_flow_attr* attributes,
                          const rte_flow_item* items, const rte_flow_action* actions,
                          rte_flow_error*) {
  using namespace rxtoken;
  Request request = {*attributes, {}, 0};
  for (; items->type != RTE_FLOW_ITEM_TYPE_END; items++) {
    Item& item = request.pattern.emplace_back(Item{items->type, {}, {}});
    const auto bytes = [&](const void* from) {
      const auto* const first = static_cast<const std::uint8_t*>(from);
      return std::vector<std::uint8_t>(first, first + ItemBytes(items->type));
    };
    if (items->spec != nullptr) item.value = bytes(items->spec);
    if (items->mask != nullptr) item.mask = bytes(items->mask);
  }
  EXPECT_EQ(actions[0].type, RTE_FLOW_ACTION_TYPE_QUEUE);
  EXPECT_EQ(actions[1].type, RTE_FLOW_ACTION_TYPE_END);
  request.queue = static_cast<const rte_flow_action_queue*>(actions[0].conf)->index;
  driver.installed.push_back(request);
  return reinterpret_cast<rte_flow*>(driver.installed.size());
}

int rte_flow_destroy(std::uint16_t, rte_flow*, rte_flow_error*) {
  rxtoken::driver.destroyed++;
  return 0;
}

}  // extern "C"

namespace rxtoken {
namespace {

class HardwareFlowTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(TestEal().ok()) << TestEal().message();
    driver = {};
    auto port = Port::Open({.name = "p0", .device = "net_null0", .queues = 4}, 0);
    ASSERT_TRUE(port.ok()) << port.status().message();
    port_ = std::move(*port);
  }

  Result<std::unique_ptr<HardwareFlow>> Install(const FlowMatch& match, std::int32_t priority = 0) {
    return HardwareFlow::Install(
        *port_, {.id = 1, .match = match, .priority = priority, .steer_to = QueueRef{0, 3}});
  }
  // What the driver is asked for a match that makes one rule of the driver's.
  Request Only(const FlowMatch& match, std::int32_t priority = 0) {
    driver = {};
    EXPECT_TRUE(Install(match, priority).ok());
    EXPECT_EQ(driver.installed.size(), 1u);
    return driver.installed.empty() ? Request{} : driver.installed.front();
  }
  static std::vector<rte_flow_item_type> Types(const Request& request) {
    std::vector<rte_flow_item_type> types;
    for (const Item& item : request.pattern) types.push_back(item.type);
    return types;
  }
  static IpPrefix Prefix(const char* address, std::uint8_t length) {
    IpPrefix prefix{.length = length};
    const bool v4 = std::string(address).find(':') == std::string::npos;
    prefix.family = v4 ? IpFamily::kV4 : IpFamily::kV6;
    EXPECT_EQ(inet_pton(v4 ? AF_INET : AF_INET6, address, prefix.address.data()), 1);
    return prefix;
  }
  template <typename T>
  static T As(const std::vector<std::uint8_t>& bytes) {
    T item = {};
    EXPECT_EQ(bytes.size(), sizeof item);
    if (bytes.size() == sizeof item) std::memcpy(&item, bytes.data(), sizeof item);
    return item;
  }

  std::unique_ptr<Port> port_;
};

TEST_F(HardwareFlowTest, AsksForAnIpv4FlowOfOneVlan) {
  const Request request = Only({.vlan = std::uint16_t{7},
                                .source = Prefix("10.1.2.0", 23),
                                .destination = Prefix("192.0.2.1", 32),
                                .protocol = IPPROTO_UDP,
                                .destination_port = std::uint16_t{4000}});

  EXPECT_EQ(request.queue, 3);
  EXPECT_EQ(request.attributes.ingress, 1u);
  EXPECT_THAT(Types(request), ElementsAre(RTE_FLOW_ITEM_TYPE_ETH, RTE_FLOW_ITEM_TYPE_VLAN,
                                          RTE_FLOW_ITEM_TYPE_IPV4, RTE_FLOW_ITEM_TYPE_UDP));
  EXPECT_TRUE(request.pattern[0].value.empty());
  EXPECT_EQ(As<rte_flow_item_vlan>(request.pattern[1].value).tci, rte_cpu_to_be_16(7));
  EXPECT_EQ(As<rte_flow_item_vlan>(request.pattern[1].mask).tci, rte_cpu_to_be_16(0x0FFF));
  const rte_ipv4_hdr value = As<rte_flow_item_ipv4>(request.pattern[2].value).hdr;
  const rte_ipv4_hdr mask = As<rte_flow_item_ipv4>(request.pattern[2].mask).hdr;
  EXPECT_EQ(value.src_addr, inet_addr("10.1.2.0"));
  EXPECT_EQ(mask.src_addr, inet_addr("255.255.254.0"));
  EXPECT_EQ(value.dst_addr, inet_addr("192.0.2.1"));
  EXPECT_EQ(mask.dst_addr, 0xFFFFFFFFu);
  EXPECT_EQ(value.next_proto_id, IPPROTO_UDP);
  EXPECT_EQ(mask.next_proto_id, 0xFF);
  const rte_udp_hdr ports = As<rte_flow_item_udp>(request.pattern[3].value).hdr;
  const rte_udp_hdr ports_mask = As<rte_flow_item_udp>(request.pattern[3].mask).hdr;
  EXPECT_EQ(ports.dst_port, rte_cpu_to_be_16(4000));
  EXPECT_EQ(ports_mask.dst_port, 0xFFFF);
  EXPECT_EQ(ports_mask.src_port, 0);
}

TEST_F(HardwareFlowTest, AsksForAnIpv6FlowWithoutTag) {
  const Request request = Only({.vlan = std::uint16_t{0},
                                .destination = Prefix("2001:db8::", 33),
                                .protocol = IPPROTO_TCP,
                                .source_port = std::uint16_t{80}});

  EXPECT_THAT(Types(request),
              ElementsAre(RTE_FLOW_ITEM_TYPE_ETH, RTE_FLOW_ITEM_TYPE_IPV6, RTE_FLOW_ITEM_TYPE_TCP));
  EXPECT_EQ(As<rte_flow_item_eth>(request.pattern[0].value).has_vlan, 0u);
  EXPECT_EQ(As<rte_flow_item_eth>(request.pattern[0].mask).has_vlan, 1u);
  const rte_ipv6_hdr mask = As<rte_flow_item_ipv6>(request.pattern[1].mask).hdr;
  EXPECT_THAT(std::vector(mask.dst_addr, mask.dst_addr + 6),
              ElementsAre(0xFF, 0xFF, 0xFF, 0xFF, 0x80, 0));
  EXPECT_EQ(As<rte_flow_item_tcp>(request.pattern[2].value).hdr.src_port, rte_cpu_to_be_16(80));
}

TEST_F(HardwareFlowTest, AsksForBothFamiliesOfAProtocol) {
  const FlowMatch udp = {.protocol = IPPROTO_UDP, .destination_port = std::uint16_t{4000}};
  {
    const auto flow = Install(udp);
    ASSERT_TRUE(flow.ok());
    ASSERT_EQ(driver.installed.size(), 2u);
    EXPECT_THAT(
        Types(driver.installed[0]),
        ElementsAre(RTE_FLOW_ITEM_TYPE_ETH, RTE_FLOW_ITEM_TYPE_IPV4, RTE_FLOW_ITEM_TYPE_UDP));
    EXPECT_THAT(
        Types(driver.installed[1]),
        ElementsAre(RTE_FLOW_ITEM_TYPE_ETH, RTE_FLOW_ITEM_TYPE_IPV6, RTE_FLOW_ITEM_TYPE_UDP));
    EXPECT_EQ(driver.destroyed, 0u);
  }
  EXPECT_EQ(driver.destroyed, 2u);

  // Half of it is nothing.
  driver = {};
  driver.takes = 1;
  EXPECT_FALSE(Install(udp).ok());
  EXPECT_EQ(driver.installed.size(), 1u);
  EXPECT_EQ(driver.destroyed, 1u);
}

TEST_F(HardwareFlowTest, AsksForEverything) {
  const Request request = Only({});
  EXPECT_THAT(Types(request), ElementsAre(RTE_FLOW_ITEM_TYPE_ETH));
  EXPECT_TRUE(request.pattern[0].value.empty());
}

TEST_F(HardwareFlowTest, TurnsPrioritiesRound) {
  EXPECT_EQ(Only({}, 0).attributes.priority, 0u);
  EXPECT_EQ(Only({}, 32767).attributes.priority, 0u);
  EXPECT_EQ(Only({}, -1).attributes.priority, 1u);
  EXPECT_EQ(Only({}, -32768).attributes.priority, 32768u);
}

TEST_F(HardwareFlowTest, RepeatsWhatTheDriverSays) {
  driver.takes = 0;
  const Status status = Install({}).status();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(status.message(), "net_null: not in this mood (Invalid argument)");
}

}  // namespace
}  // namespace rxtoken
