// SPDX-License-Identifier: Apache-2.0
// hostile_test.cc - an application of another user does all that it must not do, each for a while
// as fast as it can: its neighbour misses nothing, and nothing of it is left in the daemon. Needs
// root, in order to be several users.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/process/bad_neighbour.h"
#include "tests/process/harness.h"
#include "tests/sanitized.h"

namespace rxtoken::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uid_t kUser = 4001;
constexpr gid_t kGroup = 4004;

class Hostile : public BadNeighbour, public testing::WithParamInterface<const char*> {
 protected:
  std::vector<std::string> Arguments() override {
    const std::filesystem::path config = directory.path() / "config.yaml";
    std::ofstream(config) << "access:\n  group: " << kGroup << "\n  tenants:\n    - uids: ["
                          << kUser << "]\n      ports: [p0, p1]\n      bindings: [b0]\n"
                          << "      flows: [{protocol: 17, destination_port: " << kNeighbourPort
                          << "}]\n      limits: {sessions: 64, buffer_bytes: 64MiB, "
                          << "rx_sockets: 64, ring_entries: 1048576, held_fragments: 131072, "
                          << "default_held_fragments: 2048, flows: 64}\n";
    return {"--config", config};
  }

  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to be several users";
    BadNeighbour::SetUp();
    std::filesystem::permissions(daemon->run_dir(), std::filesystem::perms(0711));
  }

  // Beside the bystander. Returns when nothing of it is left.
  void Misbehave(milliseconds duration) {
    Process hostile({RXTOKEN_HOSTILE_CLIENT, daemon->run_dir(), GetParam(), std::to_string(kUser),
                     std::to_string(kGroup)});
    ASSERT_FALSE(hostile.WaitForLine("ready").empty());
    const auto end = steady_clock::now() + duration;
    while (steady_clock::now() < end && hostile.Running() && !HasFailure()) {
      SendUntil(sent + kLot, kLot);
    }
    hostile.CloseInput();
    EXPECT_EQ(hostile.Wait(), 0) << hostile.Output();
    std::printf("%s\n", hostile.FindLine("rounds").c_str());
    EXPECT_TRUE(WaitUntil([&] { return daemon->RxSockets() == 1; }));
  }
};

TEST_P(Hostile, LeavesItsNeighbourAlone) {
  const milliseconds duration(FullCampaign() ? 30'000 : 1'000);
  Misbehave(duration / 10);  // what is kept for the next ones is there now
  Process& process = daemon->process();
  const std::ptrdiff_t descriptors = process.Descriptors();
  const std::uint64_t resident_kib = process.ResidentKiB();
  const std::uint64_t sent_before = sent;

  Misbehave(duration);

  EXPECT_TRUE(WaitUntil([&] { return process.Descriptors() <= descriptors; }))
      << descriptors << " became " << process.Descriptors();
  // A sanitizer keeps what was freed for a while, and gRPC some of what the largest calls took.
  const std::uint64_t slack_kib = std::string(GetParam()) == "extremes" ? 16384 : 4096;
  if (!kSanitized) {
    EXPECT_TRUE(WaitUntil([&] { return process.ResidentKiB() < resident_kib + slack_kib; }))
        << resident_kib << " KiB became " << process.ResidentKiB();
  }
  const std::string log = process.Errors();
  const auto lines = std::count(log.begin(), log.end(), '\n');
  EXPECT_LT(lines, 5'000);  // ten a second, of each event
  std::printf("%lu datagrams; %ld descriptors, %lu KiB became %ld, %lu KiB; %ld lines of log\n",
              sent - sent_before, descriptors, resident_kib, process.Descriptors(),
              process.ResidentKiB(), lines);
  ExpectBystanderUnharmed();
}

INSTANTIATE_TEST_SUITE_P(Deeds, Hostile,
                         testing::Values("indices", "changes", "forgery", "hoarding", "doorbell",
                                         "garbage", "descriptors", "secrets", "sessions",
                                         "extremes", "noise"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace rxtoken::test
