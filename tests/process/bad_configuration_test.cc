// SPDX-License-Identifier: Apache-2.0
// bad_configuration_test.cc - what the daemon cannot do it refuses at once: with a non-zero
// exit status, or a gRPC status, and a message that names what is wrong.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/process/harness.h"

namespace rxtoken::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int kFailure = 1;
constexpr int kUsage = 2;

// Starts a daemon that must not come up, and checks what it says and exits with.
void ExpectRefused(std::vector<std::string> arguments,
                   const testing::Matcher<const std::string&>& message, int exit_code = kUsage,
                   const std::vector<std::string>& wrapper = {}) {
  const TempDir run_dir;
  std::vector<std::string> argv = wrapper;
  argv.insert(argv.end(), {RXTOKEND, "--run-dir", run_dir.path()});
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::string errors;
  EXPECT_EQ(RunProgram(argv, nullptr, &errors), exit_code) << errors;
  EXPECT_THAT(errors, message);
  EXPECT_FALSE(std::filesystem::exists(run_dir.path() / "api.sock"));
}

TEST(BadConfiguration, AFileThatIsMissingOrWrong) {
  const TempDir directory;
  const std::string path = directory.path() / "rxtokend.yaml";
  ExpectRefused({"--config", path}, HasSubstr(path));
  const auto write = [&](std::string_view text) { std::ofstream(path) << text; };

  write("ports:\n  - name: p0\n    devise: net_null0\n");
  ExpectRefused({"--config", path}, AllOf(HasSubstr(path + ":3"), HasSubstr("devise")));
  write("ports: [unclosed\n");
  ExpectRefused({"--config", path}, HasSubstr("YAML"));
  write("poll: sometimes\n");
  ExpectRefused({"--config", path}, AllOf(HasSubstr("sometimes"), HasSubstr("adaptive")));
  write("memory_mib: -5\n");
  ExpectRefused({"--config", path}, HasSubstr("'-5'"));
  write("poll: adaptive\n---\nports: []\n");
  ExpectRefused({"--config", path}, AllOf(HasSubstr(path), HasSubstr("2 YAML documents")));
  write(
      {"\x7F"
       "ELF\2\1\1\0\0",
       9});
  ExpectRefused({"--config", path}, HasSubstr(path + ":1: not a text in UTF-8"));
  write("ports:\n  - {name: p0, device: \"net_null0,\xFF\"}\n");
  ExpectRefused({"--config", path}, HasSubstr(path + ":2: not a text in UTF-8"));
}

TEST(BadConfiguration, UnknownFlag) {
  ExpectRefused({"--no-such-flag"}, HasSubstr("no-such-flag"));
  ExpectRefused({"--port", "p0"}, HasSubstr("NAME=DEVICE"));
  ExpectRefused({"--bind", "b0=p0"}, HasSubstr("PORT:QUEUE"));
  ExpectRefused({"--port", "p0=net_null0,\xFF"}, HasSubstr("UTF-8"));
  ExpectRefused({"--run-dir", ""}, HasSubstr("--run-dir"));
}

TEST(BadConfiguration, UnknownDevice) {
  ExpectRefused({"--port", "p0=net_nothing0"}, AllOf(HasSubstr("p0"), HasSubstr("net_nothing0")));
  ExpectRefused({"--port", "p0=net_af_packet0,iface=nosuchif"}, HasSubstr("nosuchif"));
}

TEST(BadConfiguration, UnknownPortOrQueue) {
  ExpectRefused({"--port", "p0=net_null0", "--bind", "b0=p9:0"}, HasSubstr("p9"));
  ExpectRefused({"--port", "p0=net_null0", "--bind", "b0=p0:7"}, HasSubstr("7"));
}

TEST(BadConfiguration, QueueInUse) {
  ExpectRefused({"--port", "p0=net_null0", "--bind", "b0=p0:0", "--bind", "b1=p0:0"},
                AllOf(HasSubstr("b0"), HasSubstr("b1"), HasSubstr("queue")));
}

TEST(BadConfiguration, NameTaken) {
  ExpectRefused({"--port", "p0=net_null0", "--port", "p0=net_null1"}, HasSubstr("p0"));
  ExpectRefused({"--port", "p0=net_null0;queues=2", "--bind", "b0=p0:0", "--bind", "b0=p0:1"},
                HasSubstr("b0"));
}

TEST(BadConfiguration, NoSuchCpu) { ExpectRefused({"--worker", "1000"}, HasSubstr("1000")); }

TEST(BadConfiguration, MissingCapabilityIsNamed) {
  const std::vector<std::string> af_packet = {"--port", "p0=net_af_packet0,iface=lo"};
  const std::vector<std::string> tap = {"--port", "p0=net_tap0,iface=rxtoken0"};
  if (geteuid() != 0) {
    ExpectRefused(af_packet, HasSubstr("CAP_NET_RAW"), kFailure);
    ExpectRefused(tap, HasSubstr("CAP_NET_ADMIN"), kFailure);
    return;
  }
  ExpectRefused(af_packet, AllOf(HasSubstr("CAP_NET_RAW"), Not(HasSubstr("CAP_NET_ADMIN"))),
                kFailure, {"setpriv", "--bounding-set", "-net_raw"});
  ExpectRefused(tap, HasSubstr("CAP_NET_ADMIN"), kFailure,
                {"setpriv", "--bounding-set", "-net_admin"});
}

TEST(BadConfiguration, ExceptionTap) {
  const std::vector<std::string> tap = {"--port", "p0=net_null0;exception_tap=kernel0"};
  ExpectRefused({"--port", "p0=net_null0;exception_tap="}, HasSubstr("exception_tap=INTERFACE"));
  ExpectRefused({"--port", "p0=net_null0;exception_tap=sixteen-letters-"},
                AllOf(HasSubstr("port 'p0'"), HasSubstr("sixteen-letters-"), HasSubstr("15")));
  if (access("/dev/net/tun", R_OK | W_OK) != 0) {
    ExpectRefused(tap, HasSubstr("/dev/net/tun"));
    return;
  }
  if (geteuid() != 0) {
    ExpectRefused(tap, HasSubstr("CAP_NET_ADMIN"), kFailure);
    return;
  }
  ExpectRefused(tap, AllOf(HasSubstr("kernel0"), HasSubstr("CAP_NET_ADMIN")), kFailure,
                {"setpriv", "--bounding-set", "-net_admin"});
  ExpectRefused({"--port", "p0=net_null0;exception_tap=lo"},
                AllOf(HasSubstr("'lo'"), HasSubstr("already")));
}

TEST(RunDirectory, InUseByAnotherDaemon) {
  Daemon first({});
  ASSERT_TRUE(first.process().Running());
  std::string errors;
  EXPECT_GT(RunProgram({RXTOKEND, "--run-dir", first.run_dir()}, nullptr, &errors), 0);
  EXPECT_THAT(errors,
              AllOf(HasSubstr(first.run_dir()), HasSubstr(std::to_string(first.process().pid()))));
  // The first one serves on.
  EXPECT_TRUE(std::filesystem::exists(first.run_dir() / "api.sock"));
  grpc::ClientContext context;
  v1::ListPortsResponse response;
  EXPECT_TRUE(first.ports().ListPorts(&context, {}, &response).ok());
}

TEST(RunDirectory, WithAFileInTheWayOfASocket) {
  const TempDir run_dir;
  std::ofstream(run_dir.path() / "api.sock") << "precious";
  std::string errors;
  EXPECT_GT(RunProgram({RXTOKEND, "--run-dir", run_dir.path()}, nullptr, &errors), 0);
  EXPECT_THAT(errors, HasSubstr("api.sock"));
  EXPECT_EQ(std::filesystem::file_size(run_dir.path() / "api.sock"), 8u);
}

TEST(RunDirectory, IsTakenOverFromADaemonThatWasKilled) {
  const TempDir run_dir;
  const std::vector<std::string> argv = {RXTOKEND, "--run-dir", run_dir.path()};
  const std::filesystem::path socket = run_dir.path() / "api.sock";
  Process first(argv);
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(socket); }));
  first.Signal(SIGKILL);
  first.Wait();
  ASSERT_TRUE(std::filesystem::exists(socket));

  Process second(argv);
  EXPECT_TRUE(WaitUntil([&] { return second.Errors().find("event=ready") != std::string::npos; }));
  second.Signal(SIGTERM);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_FALSE(std::filesystem::exists(socket));
}

// The same over gRPC, while the daemon goes on.
class RefusedCalls : public testing::Test {
 protected:
  grpc::Status Bind(const std::string& name, const std::string& port, std::uint32_t queue,
                    std::uint64_t buffer_bytes, std::uint32_t page_bytes) {
    v1::BindRequest request;
    request.set_name(name);
    request.set_buffer_bytes(buffer_bytes);
    request.set_page_bytes(page_bytes);
    request.add_queues()->set_port(port);
    request.mutable_queues(0)->set_queue(queue);
    v1::Binding response;
    grpc::ClientContext context;
    return daemon.bindings().Bind(&context, request, &response);
  }

  static void ExpectStatus(const grpc::Status& status, grpc::StatusCode code,
                           const std::string& text) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  }

  static constexpr std::uint64_t kMiB = 1 << 20;
  Daemon daemon{{"--port", "p0=net_null0;queues=2"}};
};

TEST_F(RefusedCalls, Bind) {
  ExpectStatus(Bind("b0", "p9", 0, 64 * kMiB, 4096), grpc::StatusCode::NOT_FOUND, "p9");
  ExpectStatus(Bind("b0", "p0", 9, 64 * kMiB, 4096), grpc::StatusCode::NOT_FOUND, "9");
  ExpectStatus(Bind("b0", "p0", 0, 64 * kMiB, 3000), grpc::StatusCode::INVALID_ARGUMENT, "3000");
  ExpectStatus(Bind("b0", "p0", 0, 64 * kMiB + 1, 4096), grpc::StatusCode::INVALID_ARGUMENT,
               "67108865");
  ExpectStatus(Bind("", "p0", 0, 64 * kMiB, 4096), grpc::StatusCode::INVALID_ARGUMENT, "name");
  // Fewer than 1.5 pages for each of the 512 entries of the queue's ring.
  ExpectStatus(Bind("b0", "p0", 0, 767 * 4096, 4096), grpc::StatusCode::INVALID_ARGUMENT, "768");

  EXPECT_TRUE(Bind("b0", "p0", 0, 64 * kMiB, 4096).ok());
  ExpectStatus(Bind("b0", "p0", 1, 64 * kMiB, 4096), grpc::StatusCode::ALREADY_EXISTS, "b0");
  ExpectStatus(Bind("b1", "p0", 0, 64 * kMiB, 4096), grpc::StatusCode::FAILED_PRECONDITION,
               "binding already");
  EXPECT_TRUE(Bind("b1", "p0", 1, 768 * 4096, 4096).ok());
}

TEST_F(RefusedCalls, MemoryThatCannotBeHad) {
  const grpc::Status status = Bind("b0", "p0", 0, std::uint64_t{1} << 39, 4096);
  ExpectStatus(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "b0");
}

TEST_F(RefusedCalls, RxSocketsAndFlows) {
  v1::OpenRxSocketRequest open;
  open.set_name("rx");
  open.set_ring_entries(100);
  v1::OpenRxSocketResponse opened;
  {
    grpc::ClientContext context;
    ExpectStatus(daemon.rx_sockets().OpenRxSocket(&context, open, &opened),
                 grpc::StatusCode::INVALID_ARGUMENT, "100");
  }
  daemon.OpenRxSocket("rx");
  open.set_ring_entries(0);
  {
    grpc::ClientContext context;
    ExpectStatus(daemon.rx_sockets().OpenRxSocket(&context, open, &opened),
                 grpc::StatusCode::ALREADY_EXISTS, "rx");
  }

  v1::AddFlowRequest add;
  const auto add_flow = [&] {
    v1::Flow flow;
    grpc::ClientContext context;
    return daemon.flows().AddFlow(&context, add, &flow);
  };
  add.add_rx_sockets("nobody");
  ExpectStatus(add_flow(), grpc::StatusCode::NOT_FOUND, "nobody");
  add.set_rx_sockets(0, "rx");
  add.mutable_match()->set_source("10.0.0.1/8");
  ExpectStatus(add_flow(), grpc::StatusCode::INVALID_ARGUMENT, "10.0.0.1/8");
  add.mutable_match()->set_source("10.0.0.0/8");
  EXPECT_TRUE(add_flow().ok());
  ExpectStatus(add_flow(), grpc::StatusCode::ALREADY_EXISTS, "priority");
}

}  // namespace
}  // namespace rxtoken::test
