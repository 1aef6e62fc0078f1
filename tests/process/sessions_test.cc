// SPDX-License-Identifier: Apache-2.0
// sessions_test.cc - sessions that come and go, and a daemon that does: nothing is left of them.
#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"
#include "tests/process/raw_client.h"
#include "tests/sanitized.h"

namespace rxtoken::test {
namespace {

TEST(Sessions, TenThousandLeaveNothingInTheDaemon) {
  Daemon daemon({"--port", "p0=net_null0"});
  ASSERT_TRUE(daemon.process().Running());
  Process& process = daemon.process();
  const auto open_and_drop = [&](int count) {
    for (int i = 0; i < count && !testing::Test::HasFailure(); i++) {
      RawClient client(daemon.run_dir());
      if (i % 10 != 0) continue;
      client.Attach(daemon.OpenRxSocket("s" + std::to_string(i), client.session()).attach_secret());
    }
  };
  open_and_drop(1000);  // what is kept for the next ones is there now
  const std::ptrdiff_t descriptors = process.Descriptors();
  const std::uint64_t resident_kib = process.ResidentKiB();
  open_and_drop(10'000);
  EXPECT_TRUE(WaitUntil([&] { return process.Descriptors() <= descriptors; }));
  // A sanitizer keeps what was freed for a while.
  if (!kSanitized) {
    EXPECT_TRUE(WaitUntil([&] { return process.ResidentKiB() < resident_kib + 2048; }))
        << resident_kib << " KiB became " << process.ResidentKiB();
  }
}

// The application goes on with the new daemon, and tokens of the old one are void.
TEST(Restart, TheApplicationIsToldAndReturnsNothingOld) {
  constexpr std::uint64_t kMessages = 100;
  TempDir directory;
  const std::string socket = directory.path() / "memif.sock";
  const std::string next_socket = directory.path() / "next.sock";
  Daemon former({"--port", MemifSource::Port("p0", socket), "--bind", "b0=p0:0"});
  ASSERT_TRUE(former.process().Running());
  Process client({RXTOKEN_TEST_CLIENT, "--run-dir", former.run_dir(), "--udp-port", "5000",
                  "--count", std::to_string(kMessages), "--keep"});
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  {
    MemifSource source(former, "p0", socket);
    source.Send(5000, kMessages);
    ASSERT_FALSE(client.WaitForLine("done").empty());
    former.process().Signal(SIGKILL);
    ASSERT_EQ(former.process().Wait(), -SIGKILL);
  }

  Daemon daemon({"--port", MemifSource::Port("p0", next_socket), "--bind", "b0=p0:0"}, {},
                former.run_dir());
  ASSERT_TRUE(daemon.process().Running());
  client.Tell("again");
  EXPECT_EQ(client.WaitForLine("ended"), "ended UNAVAILABLE");
  EXPECT_TRUE(WaitUntil([&] {
    const std::string output = client.Output();
    return output.find("ready") != output.rfind("ready");
  })) << client.Errors();
  client.Tell("check");
  EXPECT_EQ(client.WaitForLine("held"), "held messages=100 errors=0");
  client.Tell("return");
  EXPECT_EQ(client.WaitForLine("returned"), "returned messages=100");
  MemifSource source(daemon, "p0", next_socket);
  source.Send(5000, 1);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetRxSocket("rx").statistics().lent() == 1; }));
  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("rx").statistics();
  EXPECT_EQ(statistics.returned(), 0u);
  EXPECT_TRUE(statistics.refusals().empty()) << statistics.ShortDebugString();
}

}  // namespace
}  // namespace rxtoken::test
