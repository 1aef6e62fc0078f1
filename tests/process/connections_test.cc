// SPDX-License-Identifier: Apache-2.0
// connections_test.cc - more connections than the daemon has descriptors for: it goes on, and
// serves again once there are some.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

// Connections to one of the daemon's sockets over which nothing is ever sent.
class IdleConnections {
 public:
  IdleConnections(const std::filesystem::path& path, int type, int count) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    for (int i = 0; i < count; i++) {
      sockets_.push_back(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
      EXPECT_EQ(connect(sockets_.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
          << std::strerror(errno);
    }
  }
  ~IdleConnections() {
    for (const int socket : sockets_) close(socket);
  }

 private:
  std::vector<int> sockets_;
};

class Connections : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(daemon.process().Running()); }

  // Over a connection of its own.
  bool Answers() {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel("unix:" + (daemon.run_dir() / "api.sock").string(),
                                  grpc::InsecureChannelCredentials(), own);
    v1::ListPortsResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    return v1::Ports::NewStub(channel)->ListPorts(&context, {}, &response).ok();
  }

  Daemon daemon{{"--port", "p0=net_null0"}, {"prlimit", "--nofile=64"}};
};

TEST_F(Connections, ToTheApiThatSayNothingAreClosed) {
  IdleConnections idle(daemon.run_dir() / "api.sock", SOCK_STREAM, 80);
  EXPECT_TRUE(WaitUntil([&] {
    return daemon.process().Errors().find("event=api_connection_refused") != std::string::npos;
  }));
  EXPECT_NE(RawClient(daemon.run_dir()).session(), "");
  EXPECT_TRUE(WaitUntil([&] { return Answers(); }));
}

TEST_F(Connections, ThatTakeAllDescriptorsPauseTheOthers) {
  {
    IdleConnections idle(daemon.run_dir() / "descriptors.sock", SOCK_SEQPACKET, 80);
    EXPECT_TRUE(WaitUntil([&] {
      return daemon.process().Errors().find("event=accept_paused") != std::string::npos;
    }));
  }
  EXPECT_NE(RawClient(daemon.run_dir()).session(), "");
  EXPECT_TRUE(Answers());
}

// Descriptors that are on their way to nobody, of our user.
class DescriptorsInFlight {
 public:
  explicit DescriptorsInFlight(int count) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends_), 0);
    for (int i = 0; i < count; i++) {
      char byte = 0;
      iovec data = {&byte, 1};
      alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
      msghdr header = {};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* const rights = CMSG_FIRSTHDR(&header);
      *rights = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
      std::memcpy(CMSG_DATA(rights), &ends_[0], sizeof(int));
      EXPECT_EQ(sendmsg(ends_[0], &header, 0), 1) << std::strerror(errno);
    }
  }
  ~DescriptorsInFlight() {
    for (const int end : ends_) close(end);
  }

 private:
  int ends_[2] = {-1, -1};
};

TEST_F(Connections, GoOnWhenDescriptorsCannotBeSent) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to have more in flight than the daemon may";
  RawClient client(daemon.run_dir());
  AttachMessage map = {};
  map.kind = static_cast<std::uint32_t>(AttachKind::kMapBuffer);
  map.id = daemon.Bind("b0", "p0", 4096).id();
  {
    // The socket's queue has a limit, too.
    std::array<std::optional<DescriptorsInFlight>, 20> in_flight;
    for (auto& some : in_flight) some.emplace(8);
    const AttachMessage refused = client.Ask(map);
    EXPECT_EQ(refused.code, static_cast<std::uint32_t>(grpc::StatusCode::RESOURCE_EXHAUSTED))
        << refused.text.data();
  }
  EXPECT_EQ(client.Ask(map).code, 0u) << "the session goes on";
}

// Whether it would ignore SIGTERM, if it did not look for it itself.
bool BlocksStopSignals(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("SigBlk:")) continue;
    return (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
  }
  return false;
}

// DPDK waits for a primary process that never comes.
TEST(Start, IsEndedByASignal) {
  TempDir directory;
  Process daemon({RXTOKEND, "--run-dir", directory.path(), "--eal", "--proc-type=secondary"});
  ASSERT_TRUE(WaitUntil([&] { return BlocksStopSignals(daemon.pid()); }));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Errors();
}

}  // namespace
}  // namespace rxtoken::test
