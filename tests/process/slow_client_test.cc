// SPDX-License-Identifier: Apache-2.0
// slow_client_test.cc - applications that hold pages for long, and what is done about them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

using testing::HasSubstr;

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
  EXPECT_THAT(output, testing::ContainsRegex("many +2048 .* b0=50.0%\nfew +41 .* b0=1.0%\n$"));
  holders({});
  EXPECT_THAT(output, testing::ContainsRegex("none +0 +0 +[0-9]+ +[0-9]+ +-\n"));
  std::printf("%s", output.c_str());
}

}  // namespace
}  // namespace rxtoken::test
