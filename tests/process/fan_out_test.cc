// SPDX-License-Identifier: Apache-2.0
// fan_out_test.cc - one flow to many applications, on the same pages: each gets all of it, and one
// that stands still misses what it has no room for, alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"

namespace rxtoken::test {
namespace {

using Range = std::pair<std::uint64_t, std::uint64_t>;  // first and last

constexpr std::uint16_t kUdpPort = 5000;
constexpr std::uint64_t kPages = 16384;
constexpr std::uint64_t kDatagrams = 20'000;
constexpr std::size_t kReceivers = 8;
constexpr std::size_t kSlow = kReceivers - 1;  // the last
constexpr std::uint32_t kSlowEntries = 1024;
const Stream kStream = {.min_bytes = 8, .numbered = true};

class FanOut : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    for (std::size_t i = 0; i < kReceivers; i++) {
      names.push_back("rx" + std::to_string(i));
      v1::OpenRxSocketRequest request;
      request.set_name(names[i]);
      request.set_ring_entries(i == kSlow ? kSlowEntries : 4096);
      std::vector<std::string> argv = {RXTOKEN_TEST_CLIENT,
                                       "--run-dir",
                                       daemon.run_dir(),
                                       "--name",
                                       names[i],
                                       "--secret",
                                       daemon.OpenRxSocket(request).attach_secret(),
                                       "--min-bytes",
                                       std::to_string(kStream.min_bytes),
                                       "--numbered"};
      receivers.push_back(std::make_unique<Process>(argv));
    }
    for (const auto& receiver : receivers) ASSERT_FALSE(receiver->WaitForLine("ready").empty());
    v1::Match match;
    match.set_protocol(17);
    match.set_destination_port(kUdpPort);
    flow = daemon.AddFlow(names, match).id();
    daemon.Bind("b0", "p0", kPages);
  }

  v1::RxSocketStatistics Statistics(std::size_t receiver) {
    return daemon.GetRxSocket(names[receiver]).statistics();
  }

  // The datagrams that it got, each right in every byte. It ends.
  std::vector<Range> Received(std::size_t receiver) {
    Process& process = *receivers[receiver];
    process.CloseInput();
    const std::string done = process.WaitForLine("done");
    EXPECT_TRUE(done.ends_with("errors=0")) << done << process.Errors();
    std::vector<Range> ranges;
    std::istringstream lines(process.Output());
    for (std::string line; std::getline(lines, line);) {
      Range range;
      if (std::sscanf(line.c_str(), "range %lu %lu", &range.first, &range.second) == 2) {
        ranges.push_back(range);
      }
    }
    return ranges;
  }

  // Sends until `end` datagrams were sent, never far ahead of the first `n` receivers, and waits
  // until those have given all of them back.
  void SendUntil(std::uint64_t end, std::size_t n) {
    constexpr std::uint64_t kLot = kSlowEntries / 4;
    while (sent < end && !HasFailure()) {
      const std::uint64_t lot = std::min(kLot, end - sent);
      source.Send(kUdpPort, lot);
      sent += lot;
      const std::uint64_t window = sent < end ? kLot : 0;
      for (std::size_t i = 0; i < n; i++) {
        EXPECT_TRUE(WaitUntil([&] { return Statistics(i).outstanding() <= window; }));
      }
    }
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", MemifSource::Port("p0", socket)}};
  MemifSource source{daemon, "p0", socket, kStream};
  std::vector<std::string> names;
  std::vector<std::unique_ptr<Process>> receivers;
  std::uint64_t flow = 0;
  std::uint64_t sent = 0;
};

TEST_F(FanOut, AStoppedReceiverMissesItsDatagramsAlone) {
  SendUntil(kDatagrams / 4, kReceivers);
  receivers[kSlow]->Signal(SIGSTOP);
  SendUntil(kDatagrams / 2, kReceivers - 1);
  receivers[kSlow]->Signal(SIGCONT);
  SendUntil(kDatagrams, kReceivers);

  for (std::size_t i = 0; i < kSlow; i++) {
    EXPECT_TRUE(Statistics(i).drops().empty()) << Statistics(i).ShortDebugString();
    EXPECT_EQ(Statistics(i).copied_messages(), 0u);
    EXPECT_EQ(Received(i), std::vector<Range>({{0, kDatagrams - 1}}));
  }
  // What the slow one missed is what its ring had no room for.
  const v1::RxSocketStatistics slow = Statistics(kSlow);
  const std::uint64_t missed = kDatagrams - slow.messages();
  EXPECT_GE(missed, kDatagrams / 4 - kSlowEntries);
  ASSERT_EQ(slow.drops().size(), 1u) << slow.ShortDebugString();
  EXPECT_EQ(slow.drops().begin()->first, "ring_full");
  EXPECT_EQ(slow.drops().begin()->second, missed);
  EXPECT_EQ(slow.copied_messages(), 0u);

  const v1::Flow counted = daemon.GetFlow(flow);
  EXPECT_EQ(counted.packets(), kDatagrams);
  EXPECT_EQ(counted.drops(), missed);
  EXPECT_EQ(counted.copied(), 0u);
  EXPECT_EQ(daemon.GetPort("p0").queues(0).copied_packets(), 0u);
  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages);
  const std::vector<Range> received = Received(kSlow);
  std::uint64_t next = 0;
  std::uint64_t gaps = 0;
  for (const auto& [first, last] : received) {
    EXPECT_GE(first, next) << "in order, and none twice";
    gaps += first - next;
    next = last + 1;
  }
  EXPECT_EQ(next, kDatagrams) << "it goes on to the end";
  EXPECT_EQ(gaps, missed);
  std::printf("the stopped one missed %lu of %lu, the others nothing\n", missed, kDatagrams);
}

}  // namespace
}  // namespace rxtoken::test
