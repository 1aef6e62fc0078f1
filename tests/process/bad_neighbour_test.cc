// SPDX-License-Identifier: Apache-2.0
// bad_neighbour_test.cc - two applications on one port: whatever the one does, the other misses
// nothing; and when the one is gone, all its pages are back.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/process/bad_neighbour.h"
#include "tests/process/harness.h"
#include "tests/process/raw_client.h"
#include "tests/sanitized.h"

namespace rxtoken::test {
namespace {

using std::chrono::steady_clock;

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

TEST_F(BadNeighbour, DiesWhileItHoldsThousandsOfTokens) {
  std::vector<std::string> arguments = ClientArguments("victim", kNeighbourPort, 8192);
  arguments.insert(arguments.end(), {"--count", std::to_string(kHeld), "--keep"});
  Process victim(arguments);
  ASSERT_FALSE(victim.WaitForLine("ready").empty());
  constexpr std::uint64_t kPerLot = 800;
  SendUntil(kHeld / kPerLot * kLot, kPerLot);
  ASSERT_NE(victim.WaitForLine("done").find("errors=0"), std::string::npos);
  ASSERT_EQ(daemon->GetRxSocket("victim", true).statistics().audited_outstanding(), kHeld);

  victim.Signal(SIGKILL);
  SendUntil(kDatagrams, 0);

  ExpectBystanderUnharmed();
  // The daemon's own log says when it noticed, and when the last page was back.
  const std::string log = daemon->process().Errors();
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
  std::vector<std::string> arguments = ClientArguments("slow", kNeighbourPort, kRingEntries);
  arguments.push_back("--discard");
  Process slow(arguments);
  ASSERT_FALSE(slow.WaitForLine("ready").empty());
  slow.Signal(SIGSTOP);

  const auto end = steady_clock::now() + std::chrono::seconds(FullCampaign() ? 10 : 0);
  while (sent < kDatagrams || (steady_clock::now() < end && !HasFailure())) {
    SendUntil(sent + kLot, kLot);
  }

  // Its ring is full, and what it holds are the pages of that ring.
  const v1::RxSocketStatistics statistics = daemon->GetRxSocket("slow").statistics();
  EXPECT_TRUE(statistics.drops().contains("ring_full")) << statistics.ShortDebugString();
  EXPECT_LE(statistics.outstanding(), kRingEntries);
  slow.Signal(SIGCONT);
  EXPECT_TRUE(WaitUntil([&] {
    SendUntil(sent + kLot, kLot);
    return daemon->GetRxSocket("slow").statistics().returned() > statistics.lent();
  }));
  slow.Signal(SIGKILL);
  ExpectBystanderUnharmed();
}

// At any moment, while they receive as fast as they can.
TEST(Killed, ClientsLeaveThePoolWhole) {
  constexpr std::uint64_t kPages = 16384;
  constexpr int kWarmUp = 10;
  const int kills = FullCampaign() ? 1000 : kSanitized ? 20 : 60;
  Daemon daemon({"--port", "p0=net_null0,size=64"});
  Process& process = daemon.process();
  ASSERT_TRUE(process.Running());
  daemon.Bind("b0", "p0", kPages);
  std::minstd_rand random(std::random_device{}());
  std::ptrdiff_t descriptors = 0;
  std::uint64_t resident_kib = 0;
  std::uint64_t held = 0;
  for (int i = 0; i < kWarmUp + kills && !testing::Test::HasFailure(); i++) {
    const std::string name = "v" + std::to_string(i);
    Process victim({RXTOKEN_TEST_CLIENT, "--run-dir", daemon.run_dir(), "--name", name, "--discard",
                    "--hold", "1000"});
    // Some while they start.
    if (random() % 8 != 0) {
      EXPECT_FALSE(victim.WaitForLine("ready").empty());
      held += daemon.GetRxSocket(name).statistics().outstanding();
    }
    victim.Wait(std::chrono::milliseconds(random() % 16));
    victim.Signal(SIGKILL);
    EXPECT_EQ(victim.Wait(), -SIGKILL);
    EXPECT_TRUE(WaitUntil([&] {
      return daemon.RxSockets() == 0 && daemon.GetBinding("b0").pages_free() == kPages;
    })) << daemon.GetBinding("b0").ShortDebugString();
    if (i + 1 != kWarmUp) continue;
    descriptors = process.Descriptors();
    resident_kib = process.ResidentKiB();
  }
  EXPECT_GT(held, 0u);
  EXPECT_TRUE(WaitUntil([&] { return process.Descriptors() <= descriptors; }));
  // A sanitizer keeps what was freed for a while.
  if (!kSanitized) {
    EXPECT_TRUE(WaitUntil([&] { return process.ResidentKiB() < resident_kib + 2048; }));
  }
  std::printf("%d killed, which held %lu fragments: %ld descriptors, %lu KiB became %ld, %lu KiB\n",
              kills, held, descriptors, resident_kib, process.Descriptors(), process.ResidentKiB());
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
