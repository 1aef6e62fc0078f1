// SPDX-License-Identifier: Apache-2.0
// rxtokenctl_test.cc - the command line against a real daemon: what it does, prints, and exits
// with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/stream.h"

namespace rxtoken::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kRefused = 1;
constexpr int kUsage = 2;

// A daemon whose port another process sends into through memif.
class Rxtokenctl : public testing::Test {
 protected:
  // Exit code; what it printed is in `output` and `errors`.
  int Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {RXTOKENCTL, "--run-dir", daemon.run_dir()});
    return RunProgram(arguments, &output, &errors);
  }

  // Starts a receiver and, once it has its flow rule, sends it `count` datagrams. What it wrote
  // to standard output when it has ended.
  std::string Receive(std::vector<std::string> arguments, std::uint64_t count) {
    arguments.insert(arguments.begin(), {RXTOKENCTL, "--run-dir", daemon.run_dir(), "recv", "-n",
                                         std::to_string(count)});
    Process receiver(arguments);
    EXPECT_TRUE(WaitUntil([&] {
      v1::ListFlowsResponse flows;
      v1::ListBindingsResponse bindings;
      grpc::ClientContext context;
      grpc::ClientContext context2;
      return daemon.flows().ListFlows(&context, {}, &flows).ok() && flows.flows_size() == 1 &&
             daemon.bindings().ListBindings(&context2, {}, &bindings).ok() &&
             bindings.bindings_size() == 1;
    }));
    Process sender({RXTOKEN_MEMIF_SENDER, socket, "1", "0", "1472"});
    EXPECT_FALSE(sender.WaitForLine("connected").empty());
    sender.Tell("5000 " + std::to_string(count));
    EXPECT_EQ(receiver.Wait(), 0) << receiver.Errors();
    return receiver.Output();
  }

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  Daemon daemon{{"--port", "p0=net_memif0,role=server,socket-abstract=no,socket=" + socket}};
  std::string output;
  std::string errors;
};

TEST_F(Rxtokenctl, ReceivedPayloadIsWrittenByteForByte) {
  constexpr std::uint64_t kCount = 200;
  std::string expected;
  for (std::uint64_t i = 0; i < kCount; i++) {
    for (const std::uint8_t byte : Datagram({}, i)) expected += static_cast<char>(byte);
  }
  EXPECT_TRUE(Receive({"--bind", "p0:0", "--proto", "udp", "--dport", "5000", "--write", "-"},
                      kCount) == expected);
}

TEST_F(Rxtokenctl, ReceivedFramesMakeACaptureFile) {
  constexpr std::uint64_t kCount = 20;
  const std::filesystem::path file = directory.path() / "out.pcap";
  Receive({"--bind", "p0:0", "--frames", "--pcap", file}, kCount);

  std::ifstream stream(file, std::ios::binary);
  const std::string got{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  std::size_t expected_bytes = PcapHeader().size();
  for (std::uint64_t i = 0; i < kCount; i++) {
    const std::vector<std::uint8_t> frame = UdpFrame({}, Datagram({}, i));
    expected_bytes += PcapRecord(frame).size();
    EXPECT_THAT(got, HasSubstr(std::string(frame.begin(), frame.end()))) << "frame " << i;
  }
  EXPECT_EQ(got.size(), expected_bytes);
}

TEST_F(Rxtokenctl, EveryNounCanBeMadeListedAndRemoved) {
  EXPECT_EQ(Run({"bind", "b0", "p0:0", "--buffer", "16MiB"}), 0) << errors;
  EXPECT_EQ(Run({"binding", "list"}), 0);
  EXPECT_THAT(output, HasSubstr("b0"));
  EXPECT_EQ(Run({"socket", "open", "s0"}), 0) << errors;
  EXPECT_EQ(Run({"flow", "add", "s0", "--port", "p0"}), 0) << errors;
  EXPECT_EQ(Run({"--json", "flow", "list"}), 0);
  EXPECT_THAT(output, HasSubstr("\"s0\""));
  EXPECT_EQ(Run({"port", "list"}), 0);
  EXPECT_THAT(output, HasSubstr("net_memif"));
  EXPECT_EQ(Run({"stats"}), 0);
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_EQ(Run({"socket", "open", "s1", "--max-held", "100", "--binding", "b0", "--outside",
                 "drop", "--steering", "strict"}),
            0)
      << errors;
  EXPECT_THAT(output, AllOf(HasSubstr("drop"), HasSubstr("strict"), HasSubstr("100")));
  EXPECT_EQ(Run({"flow", "update", "1", "s1", "s0"}), 0) << errors;
  EXPECT_THAT(output, HasSubstr("s1 s0"));
  EXPECT_EQ(Run({"flow", "add", "s0", "s1", "--vlan", "5", "--steer-to", "p0:0"}), 0) << errors;
  EXPECT_THAT(output, AllOf(HasSubstr("s0 s1"), HasSubstr("p0:0"), HasSubstr("software")));
  EXPECT_EQ(Run({"bind", "b1", "--buffer", "16MiB", "--frames-per-page", "2"}), 0) << errors;
  EXPECT_EQ(Run({"attach-queues", "b1", "p0:0"}), 0) << errors;
  EXPECT_THAT(output, HasSubstr("p0:0"));
  EXPECT_EQ(Run({"unbind", "b1", "--drain-timeout", "0.5"}), 0) << errors;
  EXPECT_EQ(Run({"flow", "delete", "1"}), 0) << errors;
  EXPECT_EQ(Run({"socket", "close", "s0"}), 0) << errors;
  EXPECT_EQ(Run({"unbind", "b0"}), 0) << errors;
  EXPECT_EQ(Run({"binding", "list"}), 0);
}

TEST_F(Rxtokenctl, SaysWhyTheDaemonRefused) {
  EXPECT_EQ(Run({"bind", "b0", "p9:0", "--buffer", "16MiB"}), kRefused);
  EXPECT_THAT(errors, HasSubstr("p9"));
  EXPECT_EQ(Run({"unbind", "nothing"}), kRefused);
  EXPECT_THAT(errors, HasSubstr("nothing"));
  EXPECT_EQ(Run({"return", "nobody", "17"}), kRefused);
  EXPECT_THAT(errors, HasSubstr("nobody"));
  EXPECT_EQ(Run({"bind", "b0"}), kUsage);
  EXPECT_EQ(Run({"no-such-verb"}), kUsage);
  const std::vector<std::vector<std::string>> wrong = {
      {"recv", "-n", "-1"},
      {"recv", "--hold", "-1"},
      {"recv", "--seconds", "nan"},
      {"recv", "--bind", "p0:0", "--buffer", "-1"},
      {"flow", "delete", "-1"},
      {"flow", "add", "--port", "p0"},
      {"flow", "add", "s0", "--steer-to", "p0:x"},
      {"socket", "open", "s0", "--outside", "keep"},
      {"socket", "open", "s0", "--max-held", "-1"},
      {"unbind", "b0", "--drain-timeout", "nan"},
      {"--timeout", "0", "stats"},
      {"--run-dir", "", "stats"}};
  for (const std::vector<std::string>& arguments : wrong) {
    EXPECT_EQ(Run(arguments), kUsage) << testing::PrintToString(arguments);
  }

  EXPECT_EQ(daemon.Stop(), 0);
  EXPECT_EQ(Run({"stats"}), kRefused);
  EXPECT_THAT(errors, HasSubstr(daemon.run_dir().string()));
}

TEST_F(Rxtokenctl, AStrictRxSocketKeepsItsRulesUnlessForced) {
  ASSERT_EQ(Run({"socket", "open", "s0", "--steering", "strict"}), 0) << errors;
  ASSERT_EQ(Run({"flow", "add", "s0"}), 0) << errors;
  Process receiver(
      {RXTOKENCTL, "--run-dir", daemon.run_dir(), "recv", "--stream", "--socket", "s0"});
  ASSERT_TRUE(WaitUntil([&] { return daemon.GetRxSocket("s0").attached(); }));
  EXPECT_EQ(Run({"flow", "delete", "1"}), kRefused);
  EXPECT_THAT(errors, AllOf(HasSubstr("'s0'"), HasSubstr("force")));
  EXPECT_EQ(Run({"flow", "delete", "1", "--force"}), 0) << errors;
}

TEST_F(Rxtokenctl, GivesUpOnADaemonThatDoesNotAnswer) {
  ASSERT_EQ(Run({"socket", "open", "s0"}), 0) << errors;
  daemon.process().Signal(SIGSTOP);
  for (const std::vector<std::string>& verb : std::vector<std::vector<std::string>>{
           {"stats"}, {"health"}, {"recv", "--stream", "--socket", "s0"}}) {
    std::vector<std::string> arguments = {"--timeout", "0.2"};
    arguments.insert(arguments.end(), verb.begin(), verb.end());
    EXPECT_EQ(Run(arguments), kRefused) << verb[0];
    EXPECT_THAT(errors, HasSubstr("does not answer")) << verb[0];
  }
  daemon.process().Signal(SIGCONT);
}

}  // namespace
}  // namespace rxtoken::test
