// SPDX-License-Identifier: Apache-2.0
// client_death_test.cc - an application dies while it holds thousands of tokens: its pages come
// back at once, and another application on the same port does not notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tests/process/harness.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kVictimPort = 5001;
constexpr std::uint16_t kBystanderPort = 5002;
constexpr std::uint64_t kPages = 16384;
constexpr std::uint64_t kHeld = 8000;
constexpr std::uint64_t kDatagrams = 50'000;
constexpr std::uint64_t kWindow = 256;

std::vector<std::string> ClientArguments(Daemon& daemon, const std::string& name,
                                         std::uint16_t udp_port, std::uint64_t count) {
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
          "16384",
          "--count",
          std::to_string(count)};
}

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

TEST(ClientDeath, HeldPagesComeBackAndTheOtherClientMissesNothing) {
  const TempDir directory;
  const std::string socket = directory.path() / "memif.sock";
  Daemon daemon({"--port", "p0=net_memif0,role=server,socket-abstract=no,socket=" + socket});
  ASSERT_TRUE(daemon.process().Running());
  std::vector<std::string> arguments = ClientArguments(daemon, "victim", kVictimPort, kHeld);
  arguments.push_back("--keep");
  Process victim(arguments);
  ASSERT_FALSE(victim.WaitForLine("ready").empty());
  Process bystander(ClientArguments(daemon, "bystander", kBystanderPort, kDatagrams));
  ASSERT_FALSE(bystander.WaitForLine("ready").empty());
  daemon.Bind("b0", "p0", kPages);
  Process sender({RXTOKEN_MEMIF_SENDER, socket, "1", "0", "1472"});
  ASSERT_FALSE(sender.WaitForLine("connected").empty());

  // Both receive; the victim keeps what it gets.
  std::uint64_t sent = 0;
  const auto send_to_bystander = [&](std::uint64_t n) {
    for (const std::uint64_t end = sent + n; sent < end && !HasFailure(); sent += 64) {
      sender.Tell(std::to_string(kBystanderPort) + " " +
                  std::to_string(std::min(end - sent, std::uint64_t{64})));
      EXPECT_TRUE(WaitUntil([&] {
        return daemon.GetRxSocket("bystander").statistics().returned() + kWindow >= sent;
      }));
    }
    sent = std::min(sent, kDatagrams);
  };
  for (std::uint64_t i = 0; i < kHeld; i += 200) {
    sender.Tell(std::to_string(kVictimPort) + " 200");
    send_to_bystander(64);
  }
  ASSERT_NE(victim.WaitForLine("done").find("errors=0"), std::string::npos);
  ASSERT_EQ(daemon.GetRxSocket("victim", true).statistics().audited_outstanding(), kHeld);

  victim.Signal(SIGKILL);
  send_to_bystander(kDatagrams - sent);

  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  const std::string done = bystander.WaitForLine("done");
  EXPECT_NE(done.find("messages=" + std::to_string(kDatagrams) + " "), std::string::npos) << done;
  EXPECT_NE(done.find("errors=0"), std::string::npos) << done;
  EXPECT_TRUE(daemon.GetRxSocket("bystander").statistics().drops().empty());

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

}  // namespace
}  // namespace rxtoken::test
