// SPDX-License-Identifier: Apache-2.0
// unbind_test.cc - a binding ends while an application holds thousands of its fragments: nothing
// happens to those, and with the last of them the daemon has its memory and its files back.
#include <gtest/gtest.h>
#include <sys/types.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"
#include "tests/process/raw_client.h"
#include "tokens/abi/ring.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kUdpPort = 5000;
constexpr std::uint64_t kPages = 16384;
constexpr std::uint64_t kBufferBytes = kPages * 4096;
constexpr std::uint64_t kSmallPages = 2048;
constexpr std::uint64_t kHeld = 10'000;

// What a process has of the kernel.
struct Resources {
  std::uint64_t resident_bytes = 0;
  std::uint64_t files = 0;

  static Resources Of(const Process& process) {
    const std::filesystem::path proc = "/proc/" + std::to_string(process.pid());
    Resources now;
    std::ifstream status(proc / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) now.resident_bytes = std::stoull(line.substr(6)) << 10;
    }
    const std::filesystem::directory_iterator files(proc / "fd");
    now.files = static_cast<std::uint64_t>(std::distance(begin(files), end(files)));
    return now;
  }
};

// Whether a binding's buffer is mapped into a process.
bool Maps(const Process& process, const std::string& binding) {
  std::ostringstream maps;
  maps << std::ifstream("/proc/" + std::to_string(process.pid()) + "/maps").rdbuf();
  return maps.str().find("/memfd:rxtoken-" + binding + " ") != std::string::npos;
}

class Unbind : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    daemon.GetPort("p0");  // opens our connection, which is one of the daemon's files
  }

  // The arguments of an application that keeps what it receives.
  std::vector<std::string> Keeper(std::uint64_t datagrams) {
    return {RXTOKEN_TEST_CLIENT,
            "--run-dir",
            daemon.run_dir(),
            "--udp-port",
            std::to_string(kUdpPort),
            "--count",
            std::to_string(datagrams),
            "--ring-entries",
            "16384",
            "--keep"};
  }

  v1::RxSocketStatistics statistics() { return daemon.GetRxSocket("rx", true).statistics(); }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", MemifSource::Port("p0", socket)}};
  MemifSource source{daemon, "p0", socket};
};

TEST_F(Unbind, TenThousandFragmentsStayReadableAndTheLastReleasesTheMemory) {
  Process client(Keeper(kHeld));
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  const Resources before = Resources::Of(daemon.process());
  const std::uint64_t old_id = daemon.Bind("old", "p0", kPages).id();
  source.Send(kUdpPort, kHeld);
  ASSERT_TRUE(client.WaitForLine("done").ends_with("errors=0"));
  const Resources held = Resources::Of(daemon.process());
  EXPECT_GE(held.resident_bytes, before.resident_bytes + kBufferBytes);
  EXPECT_GT(held.files, before.files);

  EXPECT_EQ(daemon.Unbind("old").state(), v1::BINDING_STATE_DRAINING);
  // The queue is free at once.
  constexpr std::uint64_t kMore = 1000;
  daemon.Bind("new", "p0", kSmallPages);
  source.Send(kUdpPort, kMore);
  client.Tell("more " + std::to_string(kMore));
  const std::string done = client.WaitForLine("done messages=" + std::to_string(kHeld + kMore));
  EXPECT_TRUE(done.ends_with("errors=0")) << done;
  client.Tell("events");
  EXPECT_EQ(client.WaitForLine("unbound"), "unbound " + std::to_string(old_id));
  client.Tell("check");
  EXPECT_EQ(client.WaitForLine("held"),
            "held messages=" + std::to_string(kHeld + kMore) + " errors=0");
  EXPECT_EQ(daemon.GetBinding("old").pages_free(), kPages - kHeld);
  EXPECT_TRUE(Maps(client, "old"));

  client.Tell("return");
  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("old"); }));
  EXPECT_TRUE(WaitUntil([&] { return statistics().outstanding() == 0; }));
  const v1::RxSocketStatistics end = statistics();
  EXPECT_EQ(end.returned(), kHeld + kMore);
  EXPECT_EQ(end.revoked(), 0u);
  EXPECT_TRUE(end.refusals().empty() && end.drops().empty()) << end.ShortDebugString();

  // Nothing is outstanding of the other one, so it goes at once.
  daemon.Unbind("new");
  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("new"); }));
  const Resources after = Resources::Of(daemon.process());
  EXPECT_LT(after.resident_bytes, before.resident_bytes + kBufferBytes / 8);
  EXPECT_EQ(after.files, before.files);
  EXPECT_FALSE(Maps(daemon.process(), "old"));
  EXPECT_FALSE(Maps(client, "old"));
  std::printf("resident: %lu MiB without binding, %lu with, %lu after; files: %lu, %lu, %lu\n",
              before.resident_bytes >> 20, held.resident_bytes >> 20, after.resident_bytes >> 20,
              before.files, held.files, after.files);
}

TEST_F(Unbind, AtTheDeadlineWhatIsHeldIsRevokedAndNothingElse) {
  constexpr std::uint64_t kMore = 1000;
  Process client(Keeper(kHeld));
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  const std::string old_id = std::to_string(daemon.Bind("old", "p0", kPages).id());
  source.Send(kUdpPort, kHeld);
  ASSERT_TRUE(client.WaitForLine("done").ends_with("errors=0"));
  daemon.Unbind("old");
  daemon.Bind("new", "p0", kSmallPages);
  source.Send(kUdpPort, kMore);
  client.Tell("more " + std::to_string(kMore));
  ASSERT_FALSE(client.WaitForLine("done messages=" + std::to_string(kHeld + kMore)).empty());

  daemon.Unbind("old", /*drain_timeout_ms=*/1);
  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("old"); }));
  const v1::RxSocketStatistics revoked = statistics();
  EXPECT_EQ(revoked.revoked(), kHeld);
  EXPECT_EQ(revoked.outstanding(), kMore);
  EXPECT_EQ(revoked.audited_outstanding(), kMore);
  EXPECT_FALSE(Maps(daemon.process(), "old"));
  client.Tell("events");
  EXPECT_EQ(client.WaitForLine("unbound"), "unbound " + old_id);
  client.Tell("events");
  EXPECT_EQ(client.WaitForLine("revoked"), "revoked " + old_id);
  // Its own mapping keeps what it holds readable.
  client.Tell("check");
  EXPECT_EQ(client.WaitForLine("held"),
            "held messages=" + std::to_string(kHeld + kMore) + " errors=0");

  // What is void is not sent: it would come before the rest, and be refused.
  client.Tell("return");
  EXPECT_TRUE(WaitUntil([&] { return statistics().outstanding() == 0; }));
  const v1::RxSocketStatistics end = statistics();
  EXPECT_EQ(end.returned(), kHeld + kMore);
  EXPECT_TRUE(end.refusals().empty()) << end.ShortDebugString();
  EXPECT_EQ(daemon.GetBinding("new").pages_free(), kSmallPages);
  EXPECT_FALSE(client.WaitForLine("returned").empty());
  EXPECT_FALSE(Maps(client, "old"));
}

// The application gives back what is void, before it has read that it is; meanwhile another
// binding has lent it pages with the same numbers.
TEST_F(Unbind, RevokedTokensThatComeBackAreRefusedAndReturnNothingElse) {
  constexpr std::uint64_t kOld = 2000;
  constexpr std::uint64_t kNew = 1000;
  RawClient client(daemon.run_dir());
  client.Attach(daemon.OpenRxSocket("rx", client.session()).attach_secret());
  daemon.AddFlow("rx", {}, client.session());
  const auto poll = [&](std::uint64_t n) {
    std::vector<std::uint32_t> tokens;
    EXPECT_TRUE(WaitUntil([&] {
      for (const RawFragment& fragment : client.Poll()) tokens.push_back(fragment.token);
      return tokens.size() == n;
    }));
    return tokens;
  };
  const std::uint64_t old_id = daemon.Bind("old", "p0", kPages).id();
  source.Send(kUdpPort, kOld);
  const std::vector<std::uint32_t> old_tokens = poll(kOld);
  daemon.Unbind("old", /*drain_timeout_ms=*/1);
  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("old"); }));
  daemon.Bind("new", "p0", kSmallPages);
  source.Send(kUdpPort, kNew);

  client.Return(0, old_tokens);
  EXPECT_TRUE(WaitUntil([&] {
    const v1::RxSocketStatistics now = statistics();
    std::uint64_t refused = 0;
    for (const auto& [reason, n] : now.refusals()) refused += n;
    return refused + now.returned() - now.revoked() == kOld;
  })) << statistics().ShortDebugString();
  const v1::RxSocketStatistics refused = statistics();
  EXPECT_EQ(refused.revoked(), kOld);
  EXPECT_EQ(refused.returned(), kOld);
  EXPECT_EQ(refused.audited_outstanding(), kNew);

  const std::vector<std::uint32_t> new_tokens = poll(kNew);
  const std::vector<Descriptor> events = client.TakeEvents();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, DescriptorKind::kUnbound);
  EXPECT_EQ(events[0].binding, old_id);
  EXPECT_EQ(events[1].kind, DescriptorKind::kRevoked);
  EXPECT_EQ(events[1].binding, old_id);
  client.Return(0, new_tokens);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("new").pages_free() == kSmallPages; }));
  EXPECT_EQ(statistics().returned(), kOld + kNew);
  // The slot whose end it has read is free, although nothing is received any more.
  EXPECT_TRUE(WaitUntil([&] { return statistics().slots_in_use() == 0; }));
}

TEST_F(Unbind, TheApplicationsDeathEndsTheDrain) {
  const Resources before = Resources::Of(daemon.process());
  Process client(Keeper(kHeld));
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  daemon.Bind("old", "p0", kPages);
  source.Send(kUdpPort, kHeld);
  ASSERT_TRUE(client.WaitForLine("done").ends_with("errors=0"));
  daemon.Unbind("old");
  EXPECT_EQ(daemon.GetBinding("old").pages_free(), kPages - kHeld);

  client.Signal(SIGKILL);

  EXPECT_TRUE(WaitUntil([&] { return !daemon.HasBinding("old"); }));
  // The connection for the application's requests ends by itself.
  EXPECT_TRUE(WaitUntil([&] { return Resources::Of(daemon.process()).files == before.files; }));
  EXPECT_FALSE(Maps(daemon.process(), "old"));
}

}  // namespace
}  // namespace rxtoken::test
