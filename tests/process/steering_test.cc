// SPDX-License-Identifier: Apache-2.0
// steering_test.cc - flows and queues move while numbered datagrams come at full speed: none is
// lost, none comes twice, and a flow stays in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"
#include "tests/process/stream.h"
#include "tests/sanitized.h"

namespace rxtoken::test {
namespace {

using Range = std::pair<std::uint64_t, std::uint64_t>;  // first and last

class Steering : public testing::Test {
 protected:
  static constexpr std::uint16_t kUdpPort = 5000;
  static constexpr std::uint64_t kPages = 65536;
  static constexpr std::uint64_t kMoves = 100;
  static constexpr Stream kStream = {.min_bytes = 8, .max_bytes = 64, .numbered = true};

  void Connect() {
    sender = std::make_unique<Process>(std::vector<std::string>{
        RXTOKEN_MEMIF_SENDER, socket, std::to_string(kStream.seed),
        std::to_string(kStream.min_bytes), std::to_string(kStream.max_bytes), "numbered"});
    ASSERT_FALSE(sender->WaitForLine("connected").empty());
  }

  // Sends without a break, not too far ahead of what `received` answers, and calls `move` kMoves
  // times meanwhile.
  template <typename Received, typename Move>
  void SendWhile(Received received, Move move) {
    constexpr std::uint64_t kLot = 20'000;
    constexpr std::uint64_t kWindow = 50'000;  // less than the rings and the buffer take
    const auto start = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < kMoves && !HasFailure(); i++) {
      sender->Tell(std::to_string(kUdpPort) + " " + std::to_string(kLot));
      sent += kLot;
      move(i);
      ASSERT_TRUE(WaitUntil([&] { return received() + kWindow >= sent; }));
    }
    ASSERT_TRUE(WaitUntil([&] { return received() == sent; }));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%lu moves under %.2f million datagrams a second\n",
                static_cast<unsigned long>(kMoves),
                static_cast<double>(sent) / seconds.count() / 1e6);
  }

  void ExpectNothingDropped() {
    for (const std::string& name : names) {
      const v1::RxSocketStatistics statistics = daemon.GetRxSocket(name).statistics();
      EXPECT_TRUE(statistics.drops().empty()) << statistics.ShortDebugString();
      EXPECT_TRUE(statistics.refusals().empty()) << statistics.ShortDebugString();
      EXPECT_EQ(statistics.copied_messages(), 0u);
    }
    const v1::Queue queue = daemon.GetPort("p0").queues(0);
    EXPECT_EQ(queue.rx_packets(), sent);
    EXPECT_TRUE(queue.drops().empty()) << queue.ShortDebugString();
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", "p0=net_memif0,role=server,socket-abstract=no,socket=" + socket}};
  std::vector<std::string> names;
  std::unique_ptr<Process> sender;
  std::uint64_t sent = 0;
};

// One end of a flow that moves, which belongs to no session.
class End {
 public:
  End(Daemon& daemon, const std::string& name) : client_(daemon.run_dir()) {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_ring_entries(65536);
    grpc::ClientContext context;
    v1::OpenRxSocketResponse response;
    EXPECT_TRUE(daemon.rx_sockets().OpenRxSocket(&context, request, &response).ok());
    client_.Attach(response.attach_secret());
  }

  // Reads, checks and returns what is there; how many datagrams there were so far.
  std::uint64_t Receive(const Stream& stream) {
    std::vector<std::uint32_t> tokens;
    for (const RawFragment& fragment : client_.Poll()) {
      const RawBuffer buffer = client_.MapBuffer(fragment.binding);
      const std::uint8_t* const payload =
          buffer.data +
          std::uint64_t{fragment.token & (kMaxPagesPerBuffer - 1)} * buffer.page_bytes +
          fragment.offset;
      std::uint64_t number;
      std::memcpy(&number, payload, sizeof number);
      const std::vector<std::uint8_t> expected = Datagram(stream, number);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), payload, payload + fragment.length));
      if (ranges_.empty() || number != ranges_.back().second + 1) {
        ranges_.emplace_back(number, number);
      }
      ranges_.back().second = number;
      tokens.push_back(fragment.token);
    }
    client_.Return(0, tokens);
    return received_ += tokens.size();
  }

  const std::vector<Range>& ranges() const noexcept { return ranges_; }

 private:
  RawClient client_;
  std::vector<Range> ranges_;
  std::uint64_t received_ = 0;
};

TEST_F(Steering, AFlowMovesBetweenRxSockets) {
  ASSERT_TRUE(daemon.process().Running());
  names = {"a", "b"};
  End a(daemon, "a");
  End b(daemon, "b");
  daemon.Bind("b0", "p0", kPages);
  v1::Match match;
  match.set_protocol(17);
  match.set_destination_port(kUdpPort);
  const std::uint64_t flow = daemon.AddFlow("a", match).id();
  Connect();

  const auto received = [&] { return a.Receive(kStream) + b.Receive(kStream); };
  SendWhile(received, [&](std::uint64_t i) {
    grpc::ClientContext context;
    v1::UpdateFlowRequest request;
    request.set_id(flow);
    request.add_rx_sockets(i % 2 == 0 ? "b" : "a");
    v1::Flow updated;
    const grpc::Status status = daemon.flows().UpdateFlow(&context, request, &updated);
    EXPECT_TRUE(status.ok()) << status.error_message();
  });

  ExpectNothingDropped();
  // Each end saw its parts in order; together they are the stream, each datagram once.
  std::vector<Range> all;
  for (const End* end : {&a, &b}) {
    EXPECT_GT(end->ranges().size(), kMoves / 4);
    EXPECT_TRUE(std::is_sorted(end->ranges().begin(), end->ranges().end()));
    all.insert(all.end(), end->ranges().begin(), end->ranges().end());
  }
  std::sort(all.begin(), all.end());
  std::uint64_t next = 0;
  for (const Range& range : all) {
    ASSERT_EQ(range.first, next);
    next = range.second + 1;
  }
  EXPECT_EQ(next, sent);
}

TEST_F(Steering, AQueueMovesBetweenBindings) {
  ASSERT_TRUE(daemon.process().Running());
  names = {"a"};
  End a(daemon, "a");
  daemon.AddFlow("a", v1::Match());
  daemon.Bind("b0", "p0", kPages, 4096, 0);
  daemon.Bind("b1", "p0", kPages);
  Connect();

  SendWhile([&] { return a.Receive(kStream); },
            [&](std::uint64_t i) { daemon.AttachQueue(i % 2 == 0 ? "b0" : "b1", "p0", 0); });

  ExpectNothingDropped();
  EXPECT_EQ(a.ranges(), std::vector<Range>({{0, sent - 1}}));
  for (const char* name : {"b0", "b1"}) {
    EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding(name).pages_free() == kPages; }));
  }
}

// Rules are added and deleted, one by one, while datagrams come.
TEST_F(Steering, TenThousandRulesComeAndGoUnderLoad) {
  ASSERT_TRUE(daemon.process().Running());
  constexpr std::uint64_t kRules = kSanitized ? 1000 : 10'000;
  names = {"a"};
  End a(daemon, "a");
  v1::Match match;
  match.set_protocol(17);
  match.set_destination_port(kUdpPort);
  daemon.AddFlow("a", match);
  daemon.Bind("b0", "p0", kPages);
  Connect();

  std::vector<std::uint64_t> rules;
  match.set_source("203.0.113.1/32");
  match.set_destination("203.0.113.2/32");
  SendWhile([&] { return a.Receive(kStream); },
            [&](std::uint64_t) {
              for (std::uint64_t n = 0; n < kRules / kMoves; n++) {
                match.set_source_port(static_cast<std::uint32_t>(rules.size() + 1));
                rules.push_back(daemon.AddFlow("a", match).id());
              }
            });
  SendWhile([&] { return a.Receive(kStream); },
            [&](std::uint64_t i) {
              for (std::uint64_t n = i * kRules / kMoves; n < (i + 1) * kRules / kMoves; n++) {
                grpc::ClientContext context;
                v1::DeleteFlowRequest request;
                request.set_id(rules[n]);
                v1::DeleteFlowResponse response;
                const grpc::Status status = daemon.flows().DeleteFlow(&context, request, &response);
                EXPECT_TRUE(status.ok()) << status.error_message();
              }
            });

  ExpectNothingDropped();
  EXPECT_EQ(a.ranges(), std::vector<Range>({{0, sent - 1}}));
}

// One rx socket that holds what 32 of 40 bindings lent it.
TEST_F(Steering, WhatFindsNoSlotWaitsAndComesInOrder) {
  ASSERT_TRUE(daemon.process().Running());
  constexpr std::uint64_t kBindings = 40;
  constexpr std::uint64_t kSmall = 2048;  // pages
  constexpr std::uint64_t kWaiting = 3;   // for each binding that finds no slot
  RawClient client(daemon.run_dir());
  const v1::OpenRxSocketResponse opened = daemon.OpenRxSocket("a", client.session());
  client.Attach(opened.attach_secret());
  const std::uint64_t flow = daemon.AddFlow("a", v1::Match(), client.session()).id();
  for (std::uint64_t i = 0; i < kBindings; i++) {
    daemon.Bind("b" + std::to_string(i), "p0", kSmall, 4096, 0);
  }
  daemon.AttachQueue("b0", "p0", 0);
  Connect();
  const auto send = [&](std::uint64_t binding, std::uint64_t n) {
    daemon.AttachQueue("b" + std::to_string(binding), "p0", 0);
    sender->Tell(std::to_string(kUdpPort) + " " + std::to_string(n));
    sent += n;
    ASSERT_TRUE(WaitUntil([&] { return daemon.GetPort("p0").queues(0).rx_packets() == sent; }));
  };
  const auto number_of = [&](const RawFragment& fragment) {
    const RawBuffer buffer = client.MapBuffer(fragment.binding);
    std::uint64_t number;
    std::memcpy(&number,
                buffer.data +
                    std::uint64_t{fragment.token & (kMaxPagesPerBuffer - 1)} * buffer.page_bytes +
                    fragment.offset,
                sizeof number);
    return number;
  };
  const auto statistics = [&] { return daemon.GetRxSocket("a", true).statistics(); };

  for (std::uint64_t i = 0; i < kSlotsPerRxSocket; i++) send(i, 2);
  std::vector<RawFragment> held = client.Poll();
  ASSERT_EQ(held.size(), 2 * kSlotsPerRxSocket);
  EXPECT_EQ(statistics().slots_in_use(), kSlotsPerRxSocket);

  // Of the 8 others none finds a slot: three datagrams of each wait, in turn.
  for (std::uint64_t round = 0; round < kWaiting; round++) {
    for (std::uint64_t i = kSlotsPerRxSocket; i < kBindings; i++) send(i, 1);
  }
  constexpr std::uint64_t kLate = kBindings - kSlotsPerRxSocket;
  EXPECT_EQ(statistics().waiting(), kLate * kWaiting);
  EXPECT_TRUE(client.Poll().empty());
  // A binding that has a slot is not held up.
  send(5, 1);
  ASSERT_TRUE(WaitUntil([&] {
    for (const RawFragment& fragment : client.Poll()) held.push_back(fragment);
    return held.size() == 2 * kSlotsPerRxSocket + 1;
  }));

  // Whenever the slot of one drains, one that waits gets it, the first first.
  for (std::uint64_t late = 0; late < kLate; late++) {
    const std::uint64_t drained = held[2 * late].binding;
    std::vector<std::uint32_t> tokens;
    for (const RawFragment& fragment : held) {
      if (fragment.binding == drained) tokens.push_back(fragment.token);
    }
    client.Return(0, tokens);
    std::vector<RawFragment> came;
    ASSERT_TRUE(WaitUntil([&] {
      for (const RawFragment& fragment : client.Poll()) came.push_back(fragment);
      return came.size() == kWaiting;
    }));
    for (std::uint64_t i = 0; i < kWaiting; i++) {
      EXPECT_EQ(number_of(came[i]), 2 * kSlotsPerRxSocket + i * kLate + late);
    }
    EXPECT_EQ(statistics().waiting(), (kLate - late - 1) * kWaiting);
  }
  v1::RxSocketStatistics end = statistics();
  EXPECT_EQ(end.messages(), sent);
  EXPECT_EQ(end.lent(), end.returned() + end.outstanding());
  EXPECT_EQ(end.audited_outstanding(), end.outstanding());
  EXPECT_TRUE(end.drops().empty()) << end.ShortDebugString();

  // More than may wait is dropped, and counted.
  constexpr std::uint64_t kMayWait = 256;
  send(0, kMayWait + 10);
  end = statistics();
  EXPECT_EQ(end.waiting(), kMayWait);
  EXPECT_EQ(end.drops().at("no_slot"), 10u);

  // What still waits when its binding goes is dropped, and counted everywhere.
  daemon.Unbind("b0");
  end = statistics();
  EXPECT_EQ(end.waiting(), 0u);
  EXPECT_EQ(end.drops().at("no_slot"), kMayWait + 10);
  const v1::Queue queue = daemon.GetPort("p0").queues(0);
  EXPECT_EQ(queue.drops().at("no_slot"), kMayWait + 10);
  EXPECT_EQ(queue.rx_packets(), end.lent() + kMayWait + 10);
  EXPECT_EQ(daemon.GetFlow(flow).drops(), kMayWait + 10);
}

}  // namespace
}  // namespace rxtoken::test
