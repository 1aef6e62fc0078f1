// SPDX-License-Identifier: Apache-2.0
// placement_test.cc - a flow rule that the port is asked to apply itself (rte_flow). Whatever
// the port says to that, it is reported, and the rule works.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/process/harness.h"
#include "tests/process/stream.h"

namespace rxtoken::test {
namespace {

using testing::StartsWith;

constexpr std::uint16_t kUdpPort = 5000;
constexpr std::uint32_t kSteeredQueue = 1;

// A rx socket "rx" and a rule for it, which port p0 shall apply if `steer` says so.
v1::Flow AddSteeredFlow(Daemon& daemon, const v1::Match& match, bool steer = true,
                        std::int32_t priority = 0) {
  v1::AddFlowRequest request;
  request.set_priority(priority);
  request.add_rx_sockets("rx");
  *request.mutable_match() = match;
  if (steer) {
    request.mutable_steer_to()->set_port("p0");
    request.mutable_steer_to()->set_queue(kSteeredQueue);
  }
  v1::Flow flow;
  grpc::ClientContext context;
  const grpc::Status status = daemon.flows().AddFlow(&context, request, &flow);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return flow;
}

void DeleteFlow(Daemon& daemon, const v1::Flow& flow) {
  v1::DeleteFlowRequest request;
  request.set_id(flow.id());
  v1::DeleteFlowResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(daemon.flows().DeleteFlow(&context, request, &response).ok());
}

v1::Flow OnlyFlow(Daemon& daemon) {
  v1::ListFlowsResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(daemon.flows().ListFlows(&context, {}, &response).ok());
  EXPECT_EQ(response.flows_size(), 1);
  return response.flows_size() == 1 ? response.flows(0) : v1::Flow();
}

TEST(Placement, ADriverWithoutRteFlowLeavesARuleToTheWorkers) {
  Daemon daemon({"--port", "p0=net_null0,size=64;queues=2"});
  ASSERT_TRUE(daemon.process().Running()) << daemon.process().Errors();
  daemon.Bind("b0", "p0", 4096, 4096, /*queues=*/2);
  daemon.OpenRxSocket("rx");

  const v1::Flow flow = AddSteeredFlow(daemon, {});

  EXPECT_EQ(flow.placement(), v1::PLACEMENT_SOFTWARE);
  EXPECT_EQ(flow.placement_reason(), "net_null: Function not implemented");
  EXPECT_EQ(flow.steer_to().queue(), kSteeredQueue);
  EXPECT_TRUE(WaitUntil([&] { return OnlyFlow(daemon).packets() > 1000; }));
}

TEST(Placement, ARuleWithoutAQueueIsNotOfferedToThePort) {
  Daemon daemon({"--port", "p0=net_null0,size=64;queues=2"});
  ASSERT_TRUE(daemon.process().Running()) << daemon.process().Errors();
  daemon.OpenRxSocket("rx");

  const v1::Flow flow = AddSteeredFlow(daemon, {}, /*steer=*/false);

  EXPECT_EQ(flow.placement(), v1::PLACEMENT_SOFTWARE);
  EXPECT_EQ(flow.placement_reason(), "");
  EXPECT_FALSE(flow.has_steer_to());
}

// net_tap hands rules to the kernel's traffic control, if the kernel has what it takes: flower
// classifiers and multiqueue qdiscs.
TEST(Placement, ATapAppliesARuleOrSaysWhyNot) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";
  constexpr int kSenders = 8;  // which the kernel would spread over both queues
  constexpr std::uint64_t kCount = 25;
  Daemon daemon({"--port", "p0=net_tap0,iface=tap0;queues=2"});
  ASSERT_TRUE(daemon.process().Running()) << daemon.process().Errors();
  daemon.Bind("b0", "p0", 4096, 4096, /*queues=*/2);
  Ip("link set tap0 up");
  Ip("addr add 198.18.0.1/24 dev tap0");
  Ip("neigh add 198.18.0.2 dev tap0 lladdr 02:00:00:00:00:02");
  daemon.OpenRxSocket("rx");
  v1::Match match;
  match.set_destination("198.18.0.2/32");
  match.set_protocol(17);
  match.set_destination_port(kUdpPort);

  const v1::Flow flow = AddSteeredFlow(daemon, match);
  const bool in_hardware = flow.placement() == v1::PLACEMENT_HARDWARE;
  std::printf("%s\n", in_hardware ? "HARDWARE" : flow.placement_reason().c_str());
  if (in_hardware) {
    EXPECT_EQ(flow.placement_reason(), "");
  } else {
    EXPECT_EQ(flow.placement(), v1::PLACEMENT_SOFTWARE);
    EXPECT_THAT(flow.placement_reason(), StartsWith("net_tap: "));
  }
  // A priority that no kernel has is refused everywhere.
  const v1::Flow refused = AddSteeredFlow(daemon, match, /*steer=*/true, -32768);
  EXPECT_EQ(refused.placement(), v1::PLACEMENT_SOFTWARE);
  EXPECT_THAT(refused.placement_reason(), StartsWith("net_tap: "));
  std::printf("%s\n", refused.placement_reason().c_str());
  DeleteFlow(daemon, refused);
  // What is deleted is gone from the port: the same again is not in its own way.
  DeleteFlow(daemon, flow);
  EXPECT_EQ(AddSteeredFlow(daemon, match).placement(), flow.placement());

  v1::ReceiveRequest request;
  request.set_rx_socket("rx");
  request.set_max_messages(kSenders * kCount);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const auto stream = daemon.tokens().Receive(&context, request);
  ASSERT_TRUE(WaitUntil([&] { return daemon.GetRxSocket("rx").attached(); }));
  for (int sender = 0; sender < kSenders; sender++) {
    EXPECT_TRUE(SendUdp("198.18.0.2", kUdpPort, {}, {.count = kCount}));
  }
  v1::ReceiveResponse response;
  std::uint64_t received = 0;
  while (stream->Read(&response)) received += static_cast<std::uint64_t>(response.messages_size());
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(received, kSenders * kCount);
  EXPECT_EQ(OnlyFlow(daemon).packets(), kSenders * kCount);
  if (in_hardware) {
    EXPECT_GE(daemon.GetPort("p0").queues(kSteeredQueue).rx_packets(), kSenders * kCount);
  }
}

}  // namespace
}  // namespace rxtoken::test
