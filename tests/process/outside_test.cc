// SPDX-License-Identifier: Apache-2.0
// outside_test.cc - a rx socket with limits: frames outside the bindings that it may use are
// copied or dropped, as it chose, and it holds no more than it was granted. All of it is counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kUdpPort = 5000;
constexpr std::uint16_t kNeighbourPort = 5001;
constexpr std::uint64_t kPages = 4096;
constexpr std::uint64_t kDatagrams = 10'000;

std::uint64_t Of(const google::protobuf::Map<std::string, std::uint64_t>& reasons,
                 const std::string& reason) {
  return reasons.contains(reason) ? reasons.at(reason) : 0;
}

// Two ports with a worker and a binding each. Frames come in at p0, which is b0's.
class Limited : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    daemon.Bind("b0", "p0", kPages);
    daemon.Bind("b1", "p1", kPages);
  }

  // Opens it, lets it receive from a UDP port, and answers the arguments of its application.
  std::vector<std::string> Open(const v1::OpenRxSocketRequest& request, std::uint16_t udp_port,
                                std::uint64_t count) {
    const std::string secret = daemon.OpenRxSocket(request).attach_secret();
    v1::Match match;
    match.set_protocol(17);
    match.set_destination_port(udp_port);
    flow = daemon.AddFlow(request.name(), match).id();
    return {RXTOKEN_TEST_CLIENT,  "--run-dir", daemon.run_dir(), "--name",
            request.name(),       "--secret",  secret,           "--count",
            std::to_string(count)};
  }

  // Sends, and waits until all that was lent is back.
  void Send(std::uint16_t udp_port, std::uint64_t datagrams, const std::string& rx_socket) {
    constexpr std::uint64_t kLot = 1000;
    for (; datagrams > 0 && !HasFailure(); datagrams -= kLot) {
      source.Send(udp_port, kLot);
      EXPECT_TRUE(
          WaitUntil([&] { return daemon.GetRxSocket(rx_socket).statistics().outstanding() == 0; }));
    }
  }

  void ExpectAllPagesBack() {
    EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages);
    EXPECT_EQ(daemon.GetBinding("b1").pages_free(), kPages);
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--worker", "any,any", "--port", MemifSource::Port("p0", socket), "--port",
                 MemifSource::Port("p1", directory.path() / "other.sock")}};
  MemifSource source{daemon, "p0", socket};
  std::uint64_t flow = 0;  // the last
};

TEST_F(Limited, FramesOutsideItsBindingsAreCopied) {
  v1::OpenRxSocketRequest request;
  request.set_name("rx");
  request.add_bindings("b1");
  request.set_outside(v1::OUTSIDE_COPY);
  std::vector<std::string> arguments = Open(request, kUdpPort, kDatagrams);
  arguments.push_back("--copied");
  Process client(arguments);
  ASSERT_FALSE(client.WaitForLine("ready").empty());

  Send(kUdpPort, kDatagrams, "rx");

  const std::string done = client.WaitForLine("done");
  EXPECT_TRUE(done.starts_with("done messages=" + std::to_string(kDatagrams) + " ")) << done;
  EXPECT_TRUE(done.ends_with("errors=0")) << done;
  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("rx").statistics();
  EXPECT_EQ(statistics.copied_messages(), kDatagrams);
  EXPECT_TRUE(statistics.drops().empty()) << statistics.ShortDebugString();
  EXPECT_EQ(daemon.GetFlow(flow).copied(), kDatagrams);
  EXPECT_EQ(daemon.GetFlow(flow).drops(), 0u);
  EXPECT_EQ(daemon.GetPort("p0").queues(0).copied_packets(), kDatagrams);
  ExpectAllPagesBack();
}

// A page of two frames, the first of which was lent and returned, and the second never filled.
TEST_F(Limited, ABindingThatOnlyCopiesWentToDrains) {
  v1::BindRequest bind;
  bind.set_name("pairs");
  bind.set_buffer_bytes(kPages * 4096);
  bind.set_frames_per_page(2);
  grpc::ClientContext context;
  v1::Binding bound;
  ASSERT_TRUE(daemon.bindings().Bind(&context, bind, &bound).ok());
  v1::OpenRxSocketRequest request;
  request.set_name("rx");
  request.add_bindings("pairs");
  std::vector<std::string> arguments = Open(request, kUdpPort, 1);
  arguments.push_back("--copied");
  Process client(arguments);
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  source.Send(kUdpPort, 1);
  EXPECT_TRUE(client.WaitForLine("done").ends_with("errors=0"));

  daemon.Unbind("pairs");

  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("pairs"); }));
}

TEST_F(Limited, FramesOutsideItsBindingsAreDropped) {
  v1::OpenRxSocketRequest request;
  request.set_name("rx");
  request.add_bindings("b1");
  request.set_outside(v1::OUTSIDE_DROP);
  Process client(Open(request, kUdpPort, kDatagrams));
  ASSERT_FALSE(client.WaitForLine("ready").empty());

  Send(kUdpPort, kDatagrams, "rx");

  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("rx").statistics();
  EXPECT_EQ(statistics.messages(), 0u);
  EXPECT_EQ(Of(statistics.drops(), "outside"), kDatagrams) << statistics.ShortDebugString();
  EXPECT_EQ(daemon.GetFlow(flow).drops(), kDatagrams);
  EXPECT_EQ(daemon.GetFlow(flow).copied(), 0u);
  ExpectAllPagesBack();
}

TEST_F(Limited, WhoHoldsAllThatItMayDropsItsOwn) {
  constexpr std::uint64_t kHeld = 100;
  v1::OpenRxSocketRequest request;
  request.set_name("greedy");
  request.set_max_held_fragments(kHeld);
  std::vector<std::string> arguments = Open(request, kUdpPort, kHeld);
  arguments.push_back("--keep");
  Process greedy(arguments);
  const std::uint64_t greedy_flow = flow;
  request = {};
  request.set_name("neighbour");
  Process neighbour(Open(request, kNeighbourPort, kDatagrams));
  ASSERT_FALSE(greedy.WaitForLine("ready").empty());
  ASSERT_FALSE(neighbour.WaitForLine("ready").empty());

  source.Send(kUdpPort, kHeld / 2);
  for (int i = 0; i < 10; i++) {
    source.Send(kUdpPort, kHeld);
    Send(kNeighbourPort, kDatagrams / 10, "neighbour");
  }

  EXPECT_TRUE(greedy.WaitForLine("done").ends_with("errors=0"));
  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("greedy").statistics();
  EXPECT_EQ(statistics.outstanding(), kHeld);
  constexpr std::uint64_t kDropped = kHeld / 2 + 9 * kHeld;
  EXPECT_EQ(Of(statistics.drops(), "held_limit"), kDropped) << statistics.ShortDebugString();
  EXPECT_EQ(daemon.GetFlow(greedy_flow).drops(), kDropped);
  const std::string done = neighbour.WaitForLine("done");
  EXPECT_TRUE(done.starts_with("done messages=" + std::to_string(kDatagrams) + " ")) << done;
  EXPECT_TRUE(done.ends_with("errors=0")) << done;
  EXPECT_TRUE(daemon.GetRxSocket("neighbour").statistics().drops().empty());
  EXPECT_EQ(daemon.GetFlow(flow).drops(), 0u);
  // It may hold as many again when it has given them back.
  greedy.Tell("return");
  EXPECT_TRUE(
      WaitUntil([&] { return daemon.GetRxSocket("greedy").statistics().outstanding() == 0; }));
  ExpectAllPagesBack();
  source.Send(kUdpPort, kHeld);
  EXPECT_EQ(daemon.GetRxSocket("greedy").statistics().outstanding(), kHeld);
}

}  // namespace
}  // namespace rxtoken::test
