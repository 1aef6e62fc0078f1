// SPDX-License-Identifier: Apache-2.0
// bad_neighbour_test.cc - two applications on one port: whatever the one does, the other misses
// nothing; and when the one is gone, all its pages are back.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kNeighbourPort = 5001;
constexpr std::uint16_t kBystanderPort = 5002;
constexpr std::uint64_t kPages = 16384;
constexpr std::uint64_t kHeld = 8000;
constexpr std::uint64_t kDatagrams = 50'000;  // to the bystander

// Milliseconds of the day of the first line of the daemon's log that contains all of `words`.
std::optional<std::int64_t> TimeOf(const std::string& log, const std::vector<std::string>& words) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const bool all = std::all_of(words.begin(), words.end(), [&](const std::string& word) {
      return line.find(word) != std::string::npos;
    });
    int hours = 0, minutes = 0, seconds = 0, milliseconds = 0;
    if (all && std::sscanf(line.c_str(), "time=%*d-%*d-%*dT%d:%d:%d.%dZ", &hours, &minutes,
                           &seconds, &milliseconds) == 4) {
      return ((hours * 60 + minutes) * 60 + seconds) * 1000 + milliseconds;
    }
  }
  return std::nullopt;
}

// A port that another process sends into, and an application that checks what it gets.
class BadNeighbour : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    bystander =
        std::make_unique<Process>(ClientArguments("bystander", kBystanderPort, kDatagrams, 4096));
    ASSERT_FALSE(bystander->WaitForLine("ready").empty());
    daemon.Bind("b0", "p0", kPages);
    sender = std::make_unique<Process>(
        std::vector<std::string>{RXTOKEN_MEMIF_SENDER, socket, "1", "0", "1472"});
    ASSERT_FALSE(sender->WaitForLine("connected").empty());
  }

  std::vector<std::string> ClientArguments(const std::string& name, std::uint16_t udp_port,
                                           std::uint64_t count, std::uint32_t ring_entries) {
    return {RXTOKEN_TEST_CLIENT,
            "--run-dir",
            daemon.run_dir(),
            "--port",
            "p0",
            "--name",
            name,
            "--udp-port",
            std::to_string(udp_port),
            "--ring-entries",
            std::to_string(ring_entries),
            "--count",
            std::to_string(count)};
  }

  // Sends to the bystander, until it was sent `end` datagrams, and `to_neighbour` to the other
  // with each lot. What is on the way fits into the sender's ring of 1024.
  void SendUntil(std::uint64_t end, std::uint64_t to_neighbour) {
    constexpr std::uint64_t kLot = 64;
    constexpr std::uint64_t kWindow = 128;
    while (sent < end && !HasFailure()) {
      const std::uint64_t lot = std::min(end - sent, kLot);
      if (to_neighbour != 0) {
        sender->Tell(std::to_string(kNeighbourPort) + " " + std::to_string(to_neighbour));
      }
      sender->Tell(std::to_string(kBystanderPort) + " " + std::to_string(lot));
      sent += lot;
      EXPECT_TRUE(WaitUntil([&] {
        return daemon.GetRxSocket("bystander").statistics().returned() + kWindow >= sent;
      }));
    }
  }

  void ExpectBystanderUnharmed() {
    const std::string done = bystander->WaitForLine("done");
    EXPECT_NE(done.find("messages=" + std::to_string(kDatagrams) + " "), std::string::npos) << done;
    EXPECT_NE(done.find("errors=0"), std::string::npos) << done;
    const v1::RxSocketStatistics statistics = daemon.GetRxSocket("bystander").statistics();
    EXPECT_TRUE(statistics.drops().empty()) << statistics.ShortDebugString();
    EXPECT_TRUE(statistics.refusals().empty()) << statistics.ShortDebugString();
    EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", "p0=net_memif0,role=server,socket-abstract=no,socket=" + socket}};
  std::unique_ptr<Process> bystander;
  std::unique_ptr<Process> sender;
  std::uint64_t sent = 0;  // to the bystander
};

TEST_F(BadNeighbour, DiesWhileItHoldsThousandsOfTokens) {
  std::vector<std::string> arguments = ClientArguments("victim", kNeighbourPort, kHeld, 8192);
  arguments.push_back("--keep");
  Process victim(arguments);
  ASSERT_FALSE(victim.WaitForLine("ready").empty());
  constexpr std::uint64_t kPerLot = 200;
  SendUntil(kHeld / kPerLot * 64, kPerLot);
  ASSERT_NE(victim.WaitForLine("done").find("errors=0"), std::string::npos);
  ASSERT_EQ(daemon.GetRxSocket("victim", true).statistics().audited_outstanding(), kHeld);

  victim.Signal(SIGKILL);
  SendUntil(kDatagrams, 0);

  ExpectBystanderUnharmed();
  // The daemon's own log says when it noticed, and when the last page was back.
  const std::string log = daemon.process().Errors();
  const auto noticed = TimeOf(log, {"event=flow_deleted"});
  const auto reclaimed = TimeOf(log, {"event=rx_socket_closed", "rx_socket=victim",
                                      "reclaimed_fragments=" + std::to_string(kHeld)});
  ASSERT_TRUE(noticed.has_value() && reclaimed.has_value()) << log;
  EXPECT_LE(*reclaimed - *noticed, 100) << "milliseconds";
  std::printf("%lu pages were back %ld ms after the daemon noticed\n",
              static_cast<unsigned long>(kHeld), static_cast<long>(*reclaimed - *noticed));
}

TEST_F(BadNeighbour, IsStopped) {
  constexpr std::uint32_t kRingEntries = 1024;
  Process slow(ClientArguments("slow", kNeighbourPort, kDatagrams, kRingEntries));
  ASSERT_FALSE(slow.WaitForLine("ready").empty());
  slow.Signal(SIGSTOP);

  SendUntil(kDatagrams, 64);

  // Its ring is full, and what it holds are the pages of that ring.
  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("slow").statistics();
  EXPECT_TRUE(statistics.drops().contains("ring_full")) << statistics.ShortDebugString();
  EXPECT_LE(statistics.outstanding(), kRingEntries);
  slow.Signal(SIGKILL);
  ExpectBystanderUnharmed();
}

// Everything that an application can write, filled with noise again and again.
TEST_F(BadNeighbour, WritesNoiseIntoItsRings) {
  auto hostile = std::make_unique<RawClient>(daemon.run_dir());
  hostile->Attach(daemon.OpenRxSocket("hostile", hostile->session()).attach_secret());
  v1::Match match;
  match.set_protocol(17);
  match.set_destination_port(kNeighbourPort);
  daemon.AddFlow("hostile", match, hostile->session());
  ReturnRing* ring = hostile->return_ring(0);
  std::mt19937 noise(1);

  while (sent < kDatagrams && !HasFailure()) {
    SendUntil(std::min(sent + 256, kDatagrams), 64);
    for (std::uint32_t i = 0; i < hostile->entries(); i++) {
      // Half of them name pages that exist.
      const std::uint32_t word = noise();
      ring->tokens()[i].store(word % 2 == 0 ? word : word % kPages, std::memory_order_relaxed);
    }
    ring->descriptor_head.store(noise(), std::memory_order_relaxed);
    ring->waiting.store(noise(), std::memory_order_relaxed);
    ring->tail.store(noise(), std::memory_order_release);
  }

  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("hostile", true).statistics();
  EXPECT_FALSE(statistics.refusals().empty());
  EXPECT_EQ(statistics.lent(), statistics.returned() + statistics.outstanding());
  EXPECT_EQ(statistics.audited_outstanding(), statistics.outstanding());
  hostile.reset();
  ExpectBystanderUnharmed();
  EXPECT_TRUE(daemon.process().Running());
}

// It has guessed the tokens before it is lent them, so that they come back while the frame is
// still being delivered. Such a frame goes to each rx socket by itself, because this one names its
// binding.
TEST(Guesser, GetsNoPageFreedTwice) {
  constexpr std::uint32_t kFewPages = 1024;
  Daemon daemon{{"--port", "p0=net_null0,size=64,copy=1"}};
  ASSERT_TRUE(daemon.process().Running());
  daemon.Bind("b0", "p0", kFewPages);
  v1::OpenRxSocketRequest request;
  request.set_name("guesser");
  request.add_bindings("b0");
  RawClient client(daemon.run_dir());
  client.Attach(daemon.OpenRxSocket(request).attach_secret());
  std::vector<std::uint32_t> guesses(256);  // as many as a worker reads at once
  std::iota(guesses.begin(), guesses.end(), 0);
  client.Return(0, guesses);

  // When fewer pages are free than the driver takes at a time, everything stands still.
  daemon.AddFlow("guesser", {});
  EXPECT_TRUE(WaitUntil([&] {
    client.Poll();
    return daemon.GetBinding("b0").pages_free() < 32;
  }));
  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("guesser", true).statistics();
  EXPECT_GT(statistics.returned(), 0u);
  EXPECT_EQ(statistics.audited_outstanding(), statistics.outstanding());
  EXPECT_EQ(statistics.outstanding() + daemon.GetBinding("b0").pages_free(), kFewPages);

  daemon.Unbind("b0", /*drain_timeout_ms=*/1);
  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("b0"); }));
}

}  // namespace
}  // namespace rxtoken::test
