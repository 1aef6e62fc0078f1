// SPDX-License-Identifier: Apache-2.0
// slow_client_test.cc - applications that hold pages for long, and what is done about them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"
#include "tests/process/raw_client.h"
#include "tests/process/stream.h"
#include "tokens/abi/token.h"

namespace rxtoken::test {
namespace {

constexpr std::uint64_t kPages = 4096;

class SlowClient : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    daemon.Bind("b0", "p0", kPages);
  }

  // An application that takes what is sent to a UDP port, and does with it what the test says.
  std::unique_ptr<RawClient> Open(v1::OpenRxSocketRequest request, std::uint16_t udp_port) {
    auto client = std::make_unique<RawClient>(daemon.run_dir());
    request.set_session(client->session());
    client->Attach(daemon.OpenRxSocket(request).attach_secret());
    v1::Match match;
    match.set_protocol(17);
    match.set_destination_port(udp_port);
    daemon.AddFlow(request.name(), match, client->session());
    return client;
  }
  std::unique_ptr<RawClient> Open(const std::string& name, std::uint16_t udp_port) {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    return Open(request, udp_port);
  }

  // What came since the last call is what was sent next to that port.
  std::vector<RawFragment> PollChecked(RawClient& client, std::uint64_t first) {
    std::vector<RawFragment> fragments = client.Poll();
    for (const RawFragment& fragment : fragments) {
      const RawBuffer buffer = client.MapBuffer(fragment.binding);
      const auto page = static_cast<std::size_t>(PageToken::FromWire(fragment.token).page());
      const std::uint8_t* const payload = buffer.data + page * buffer.page_bytes + fragment.offset;
      const std::vector<std::uint8_t> expected = Datagram({}, first++);
      EXPECT_TRUE(std::equal(payload, payload + fragment.length, expected.begin(), expected.end()));
    }
    return fragments;
  }
  static void Return(RawClient& client, std::span<const RawFragment> fragments) {
    std::vector<std::uint32_t> tokens;
    for (const RawFragment& fragment : fragments) tokens.push_back(fragment.token);
    client.Return(0, tokens);
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", MemifSource::Port("p0", socket)}};
  MemifSource source{daemon, "p0", socket};
};

TEST_F(SlowClient, IsSeenAmongTheHolders) {
  const auto few = Open("few", 5001);
  const auto many = Open("many", 5002);
  const auto none = Open("none", 5003);
  source.Send(5001, 41);
  source.Send(5002, 2048);
  source.Send(5003, 100);
  std::vector<std::uint32_t> tokens;
  for (const RawFragment& fragment : none->Poll()) tokens.push_back(fragment.token);
  none->Return(0, tokens);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetRxSocket("none").statistics().returned() == 100; }));

  std::string output;
  std::string errors;
  const auto holders = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {RXTOKENCTL, "--run-dir", daemon.run_dir(), "holders"});
    EXPECT_EQ(RunProgram(arguments, &output, &errors), 0) << errors;
  };
  holders({"--top", "2"});
  EXPECT_THAT(output, testing::ContainsRegex(
                          "many +uid:[0-9]+ +2048 .* b0=50.0%\nfew +uid:[0-9]+ +41 .* b0=1.0%\n$"));
  holders({});
  EXPECT_THAT(output, testing::ContainsRegex("none +uid:[0-9]+ +0 +0 +[0-9]+ +[0-9]+ +-\n"));
  std::printf("%s", output.c_str());
}

TEST_F(SlowClient, IsToldOfItsLimitAndThatPagesGetFew) {
  constexpr std::uint64_t kHeld = 500;
  v1::OpenRxSocketRequest request;
  request.set_name("greedy");
  request.set_max_held_fragments(kHeld);
  const auto greedy = Open(request, 5001);
  const auto hoarder = Open("hoarder", 5002);
  // The events that there are from now on, and no others.
  const auto told = [](RawClient& client) {
    std::vector<DescriptorKind> kinds;
    EXPECT_TRUE(WaitUntil([&] {
      client.Poll();
      for (const Descriptor& event : client.TakeEvents()) kinds.push_back(event.kind);
      return !kinds.empty();
    }));
    return kinds;
  };
  source.Send(5001, kHeld + 100);
  EXPECT_THAT(told(*greedy), testing::ElementsAre(DescriptorKind::kHeldLimit));

  source.Send(5002, kPages - kHeld - kPages / 10);
  EXPECT_THAT(told(*hoarder), testing::ElementsAre(DescriptorKind::kLowWater));
  EXPECT_THAT(told(*greedy), testing::ElementsAre(DescriptorKind::kLowWater));
  EXPECT_EQ(daemon.GetRxSocket("hoarder").statistics().drops_size(), 0);
}

TEST_F(SlowClient, WithCopyOutItHoldsNoMorePagesThanItMayAndMissesNothing) {
  constexpr std::uint64_t kMayHold = 100;
  constexpr std::uint64_t kCopies = 200;
  v1::OpenRxSocketRequest request;
  request.set_name("slow");
  request.set_max_held_fragments(kMayHold);
  request.set_slow(v1::SLOW_COPY_OUT);
  request.set_copy_out_bytes(kCopies * 4096);
  auto slow = Open(request, 5001);
  const auto statistics = [&] { return daemon.GetRxSocket("slow", true).statistics(); };

  source.Send(5001, kMayHold + kCopies + 10);

  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages - kMayHold);
  const std::vector<RawFragment> held = PollChecked(*slow, 0);
  ASSERT_EQ(held.size(), kMayHold + kCopies);
  EXPECT_NE(held.front().binding, held.back().binding);
  v1::RxSocketStatistics now = statistics();
  EXPECT_EQ(now.copied_messages(), kCopies);
  EXPECT_EQ(now.drops().at("held_limit"), 10u);
  EXPECT_EQ(now.audited_outstanding(), kMayHold + kCopies);
  EXPECT_EQ(daemon.GetPort("p0").queues(0).copied_packets(), kCopies);
  std::string output;
  EXPECT_EQ(RunProgram({RXTOKENCTL, "--run-dir", daemon.run_dir(), "holders"}, &output), 0);
  EXPECT_THAT(output, testing::HasSubstr("copies=100.0% b0=2.4%"));

  // It may hold pages of the binding again, whatever it holds of the copies.
  Return(*slow, std::span(held).first(kMayHold));
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  source.Send(5001, 5);
  EXPECT_EQ(statistics().copied_messages(), kCopies);
  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages - 5);
  Return(*slow, std::span(held).subspan(kMayHold, kCopies / 2));
  EXPECT_TRUE(WaitUntil([&] { return statistics().outstanding() == 5 + kCopies / 2; }));
  source.Send(5001, kMayHold);
  EXPECT_EQ(statistics().copied_messages(), kCopies + 5);

  slow.reset();
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  slow = Open(request, 5001);
  source.Send(5001, kMayHold + 1);
  EXPECT_EQ(statistics().copied_messages(), 1u);
}

TEST_F(SlowClient, PausedItMissesNothingHoweverSlowItIs) {
  constexpr std::uint64_t kDatagrams = 5000;
  v1::OpenRxSocketRequest request;
  request.set_name("slow");
  request.set_ring_entries(64);
  request.set_slow(v1::SLOW_PAUSE);
  const auto slow = Open(request, 5001);
  ASSERT_EQ(daemon.GetRxSocket("slow").paused_queues_size(), 1);
  EXPECT_EQ(daemon.GetRxSocket("slow").paused_queues(0).port(), "p0");

  source.Begin(5001, kDatagrams);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetPort("p0").queues(0).pauses() > 0; }));
  EXPECT_LE(daemon.GetPort("p0").queues(0).rx_packets(), 64u);
  std::uint64_t received = 0;
  EXPECT_TRUE(WaitUntil([&] {
    const std::vector<RawFragment> fragments = PollChecked(*slow, received);
    received += fragments.size();
    Return(*slow, fragments);
    return received == kDatagrams;
  }));
  EXPECT_TRUE(daemon.GetPort("p0").queues(0).drops().empty());
  EXPECT_TRUE(daemon.GetRxSocket("slow").statistics().drops().empty());
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));

  // Others do not wait for it.
  const auto other = Open("other", 5002);
  EXPECT_EQ(daemon.GetRxSocket("slow").paused_queues_size(), 0);
  source.Send(5001, 200);
  EXPECT_TRUE(daemon.GetRxSocket("slow").statistics().drops().contains("ring_full"));
  source.Send(5002, 200);
  EXPECT_EQ(other->Poll().size(), 200u);
}

TEST_F(SlowClient, WhenItGoesItsQueuesPauseNoLonger) {
  constexpr std::uint64_t kDatagrams = 5000;
  v1::OpenRxSocketRequest request;
  request.set_name("slow");
  request.set_ring_entries(64);
  request.set_slow(v1::SLOW_PAUSE);
  auto slow = Open(request, 5001);
  source.Begin(5001, kDatagrams);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetPort("p0").queues(0).pauses() > 0; }));
  slow.reset();
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetPort("p0").queues(0).rx_packets() == kDatagrams; }));
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));

  const auto other = Open("other", 5001);
  source.Send(5001, 200);
  EXPECT_EQ(other->Poll().size(), 200u);
}

TEST_F(SlowClient, StoppedItLosesWhatItHoldsLongerThanItsLeaseAndOthersNothing) {
  constexpr std::uint64_t kHeld = 1000;
  constexpr std::uint64_t kLot = 64;
  const auto arguments = [&](const std::string& name, std::uint16_t udp_port, std::uint64_t count) {
    return std::vector<std::string>{
        RXTOKEN_TEST_CLIENT,      "--run-dir", daemon.run_dir(),     "--name", name, "--udp-port",
        std::to_string(udp_port), "--count",   std::to_string(count)};
  };
  std::vector<std::string> victims = arguments("victim", 5001, kHeld);
  victims.insert(victims.end(), {"--lease-ms", "1000", "--keep"});
  Process victim(victims);
  ASSERT_FALSE(victim.WaitForLine("ready").empty());
  source.Send(5001, kHeld);
  ASSERT_TRUE(victim.WaitForLine("done").ends_with("errors=0"));
  victim.Signal(SIGSTOP);
  // Both streams are one, and the bystander's begins here.
  const auto bystander = Open("bystander", 5002);
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  EXPECT_TRUE(WaitUntil([&] {
    source.Send(5001, 1);
    source.Send(5002, kLot);
    sent += kLot;
    std::vector<std::uint32_t> tokens;
    EXPECT_TRUE(WaitUntil([&] {
      for (const RawFragment& fragment : bystander->Poll()) tokens.push_back(fragment.token);
      return tokens.size() == kLot;
    }));
    received += tokens.size();
    bystander->Return(0, tokens);
    return daemon.GetRxSocket("victim").statistics().drops().contains("lease_lost") || HasFailure();
  }));
  EXPECT_EQ(received, sent);
  EXPECT_TRUE(daemon.GetRxSocket("bystander").statistics().drops().empty());
  // What it was sent before its lease ended expires as well.
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  const v1::RxSocketStatistics lost = daemon.GetRxSocket("victim", true).statistics();
  EXPECT_GE(lost.revoked(), kHeld);
  EXPECT_EQ(lost.outstanding(), 0u);
  EXPECT_EQ(lost.audited_outstanding(), 0u);
  EXPECT_EQ(lost.lent(), lost.revoked());

  victim.Signal(SIGCONT);
  victim.Tell("events");
  EXPECT_EQ(victim.WaitForLine("expired"),
            "expired " + std::to_string(daemon.GetBinding("b0").id()));
  victim.Tell("return");
  EXPECT_FALSE(victim.WaitForLine("returned").empty());
  // Once it has read all about that, it is served again.
  victim.Tell("more 1000000");
  EXPECT_TRUE(WaitUntil([&] {
    source.Send(5001, 1);
    return daemon.GetRxSocket("victim").statistics().lent() > lost.lent();
  }));
}

TEST_F(SlowClient, WhatItReturnsTooLateIsStale) {
  constexpr std::uint64_t kHeld = 500;
  v1::OpenRxSocketRequest request;
  request.set_name("late");
  request.set_lease_ms(1000);
  const auto late = Open(request, 5001);
  const auto statistics = [&] { return daemon.GetRxSocket("late", true).statistics(); };
  source.Send(5001, kHeld);
  std::vector<std::uint32_t> tokens;
  for (const RawFragment& fragment : late->Poll()) tokens.push_back(fragment.token);
  EXPECT_EQ(tokens.size(), kHeld);
  EXPECT_TRUE(WaitUntil([&] { return statistics().revoked() == kHeld; }));
  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages);

  late->Return(0, tokens);
  EXPECT_TRUE(WaitUntil([&] { return statistics().refusals().contains("stale"); }));
  EXPECT_TRUE(WaitUntil([&] { return statistics().refusals().at("stale") == kHeld; }));
  EXPECT_EQ(statistics().slots_in_use(), 1u);

  EXPECT_TRUE(late->Poll().empty());
  const std::vector<Descriptor> events = late->TakeEvents();
  EXPECT_FALSE(events.empty());
  for (const Descriptor& event : events) {  // what came after the first look is another one
    EXPECT_EQ(event.kind, DescriptorKind::kExpired);
    EXPECT_EQ(event.binding, daemon.GetBinding("b0").id());
  }
  EXPECT_TRUE(WaitUntil([&] { return statistics().slots_in_use() == 0; }));
  source.Send(5001, 1);
  EXPECT_EQ(statistics().outstanding(), 1u);
  EXPECT_EQ(statistics().audited_outstanding(), 1u);
}

}  // namespace
}  // namespace rxtoken::test
