// SPDX-License-Identifier: Apache-2.0
// shutdown_test.cc - what was closed, or stopped, is gone: no memory, no socket, no thread.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

using testing::IsEmpty;

// The memfds that a process has open or mapped.
std::vector<std::string> Memfds(pid_t pid) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
    const std::string name = std::filesystem::read_symlink(entry.path(), error);
    if (name.starts_with("/memfd:")) names.push_back(name);
  }
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t at = line.find("/memfd:");
    if (at != std::string::npos) names.push_back("mapped " + line.substr(at));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Our own threads, without those of gRPC.
std::vector<std::string> Threads(pid_t pid) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", error)) {
    std::string name;
    std::getline(std::ifstream(entry.path() / "comm"), name);
    if (name.starts_with("rxtoken/")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> SocketsIn(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.is_socket()) names.push_back(entry.path().filename());
  }
  return names;
}

TEST(Close, OfASessionLeavesNothingInTheDaemon) {
  Daemon daemon({"--worker", "any,any", "--port", "p0=net_null0;queues=2"});
  ASSERT_TRUE(daemon.process().Running());
  const pid_t pid = daemon.process().pid();
  const std::vector<std::string> memory_before = Memfds(pid);
  const std::vector<std::string> threads_before = Threads(pid);
  EXPECT_EQ(threads_before.size(), 3u) << "two workers and the control thread";

  for (int i = 0; i < 3; i++) {
    RawClient client(daemon.run_dir());
    v1::BindRequest bind;
    bind.set_name("b0");
    bind.set_session(client.session());
    bind.set_buffer_bytes(16 << 20);
    bind.add_queues()->set_port("p0");
    v1::Binding binding;
    grpc::ClientContext context;
    ASSERT_TRUE(daemon.bindings().Bind(&context, bind, &binding).ok());
    client.Attach(daemon.OpenRxSocket("rx", client.session()).attach_secret());
    daemon.AddFlow("rx", {}, client.session());
    // It holds pages when it goes.
    EXPECT_TRUE(WaitUntil([&] { return !client.Poll().empty(); }));
    EXPECT_NE(Memfds(pid), memory_before);
  }

  EXPECT_TRUE(WaitUntil([&] { return Memfds(pid) == memory_before; }))
      << testing::PrintToString(Memfds(pid));
  EXPECT_EQ(Threads(pid), threads_before);
  v1::ListBindingsResponse bindings;
  grpc::ClientContext context;
  EXPECT_TRUE(daemon.bindings().ListBindings(&context, {}, &bindings).ok());
  EXPECT_EQ(bindings.bindings_size(), 0);
}

TEST(Close, OfARxSocketTellsHowMuchItHeld) {
  Daemon daemon({"--port", "p0=net_null0"});
  ASSERT_TRUE(daemon.process().Running());
  daemon.Bind("b0", "p0", 4096);
  RawClient client(daemon.run_dir());
  client.Attach(daemon.OpenRxSocket("rx", client.session()).attach_secret());
  daemon.AddFlow("rx", {}, client.session());
  EXPECT_TRUE(WaitUntil([&] { return !client.Poll().empty(); }));

  v1::CloseRxSocketRequest request;
  request.set_name("rx");
  request.set_session(client.session());
  v1::CloseRxSocketResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(daemon.rx_sockets().CloseRxSocket(&context, request, &response).ok());
  EXPECT_GT(response.reclaimed_fragments(), 0u);
  EXPECT_NE(client.descriptor_ring(0)->closed.load(), 0u);
  // All are back, but for the burst that the worker has in hand.
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == 4096; }));
}

// While an application is attached and holds pages.
TEST(Stop, BySignalLeavesNothingBehind) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Daemon daemon({"--port", "p0=net_null0", "--bind", "b0=p0:0"});
    ASSERT_TRUE(daemon.process().Running());
    RawClient client(daemon.run_dir());
    client.Attach(daemon.OpenRxSocket("rx", client.session()).attach_secret());
    daemon.AddFlow("rx", {}, client.session());
    EXPECT_TRUE(WaitUntil([&] { return !client.Poll().empty(); }));
    EXPECT_EQ(SocketsIn(daemon.run_dir()).size(), 2u);

    daemon.process().Signal(signal);

    EXPECT_EQ(daemon.process().Wait(), 0) << daemon.process().Errors();
    EXPECT_THAT(SocketsIn(daemon.run_dir()), IsEmpty());
    // The application is told; what it maps is its own now.
    EXPECT_EQ(client.descriptor_ring(0)->closed.load(),
              static_cast<std::uint32_t>(CloseReason::kDaemonStopped));
  }
}

TEST(Stop, EndsAReceiveStream) {
  Daemon daemon({"--port", "p0=net_null0", "--bind", "b0=p0:0"});
  ASSERT_TRUE(daemon.process().Running());
  daemon.OpenRxSocket("rx");
  daemon.AddFlow("rx", {});
  grpc::ClientContext context;
  v1::ReceiveRequest request;
  request.set_rx_socket("rx");
  const auto stream = daemon.tokens().Receive(&context, request);
  v1::ReceiveResponse response;
  ASSERT_TRUE(stream->Read(&response));

  daemon.process().Signal(SIGTERM);

  while (stream->Read(&response)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
  EXPECT_EQ(daemon.process().Wait(), 0);
}

}  // namespace
}  // namespace rxtoken::test
