// SPDX-License-Identifier: Apache-2.0
// users_test.cc - applications of different users at one daemon: none can see, attach, steer or
// return what is another's. Needs root, in order to be several users.
#include <grp.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

constexpr uid_t kAlice = 4001;
constexpr uid_t kBob = 4002;
constexpr uid_t kStranger = 4003;  // not in the group
constexpr gid_t kGroup = 4004;

// We are another user while there is one. Connections that are made meanwhile stay that user's.
class As {
 public:
  As(uid_t uid, gid_t gid) {
    EXPECT_EQ(setgroups(0, nullptr), 0);
    EXPECT_EQ(setegid(gid), 0);
    EXPECT_EQ(seteuid(uid), 0);
  }
  ~As() {
    EXPECT_EQ(seteuid(0), 0);
    EXPECT_EQ(setegid(0), 0);
  }
};

int ConnectError(const std::filesystem::path& path, int type) {
  const int socket = ::socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const bool connected =
      connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  const int error = connected ? 0 : errno;
  close(socket);
  return error;
}

class Users : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to be several users";
    const std::filesystem::path config = directory.path() / "config.yaml";
    std::ofstream(config) << "access: {group: " << kGroup << "}\n";
    daemon = std::make_unique<Daemon>(
        std::vector<std::string>{"--config", config, "--port", "p0=net_null0;queues=2"});
    ASSERT_TRUE(daemon->process().Running());
    std::filesystem::permissions(daemon->run_dir(), std::filesystem::perms(0711));
    alice = Connect(kAlice);
    bob = Connect(kBob);
  }

  std::unique_ptr<RawClient> Connect(uid_t uid) {
    const As user(uid, kGroup);
    return std::make_unique<RawClient>(daemon->run_dir());
  }

  template <typename Stub, typename Request, typename Response>
  grpc::StatusCode Call(Stub& stub,
                        grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
                        const std::string& key, const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    if (!key.empty()) context.AddMetadata("rxtoken-session", key);
    return (stub.*method)(&context, request, response).error_code();
  }

  grpc::StatusCode Bind(const RawClient& client, const std::string& name, std::uint32_t queue,
                        v1::Binding* binding) {
    v1::BindRequest request;
    request.set_name(name);
    request.set_session(client.session());
    request.set_buffer_bytes(16 << 20);
    request.add_queues()->set_port("p0");
    request.mutable_queues(0)->set_queue(queue);
    return Call(daemon->bindings(), &v1::Bindings::Stub::Bind, "", request, binding);
  }
  v1::RxSocket Get(const std::string& name, const RawClient& client, grpc::StatusCode expected) {
    v1::GetRxSocketRequest request;
    request.set_name(name);
    v1::RxSocket rx_socket;
    EXPECT_EQ(Call(daemon->rx_sockets(), &v1::RxSockets::Stub::GetRxSocket, client.session(),
                   request, &rx_socket),
              expected);
    return rx_socket;
  }

  TempDir directory;
  std::unique_ptr<Daemon> daemon;
  std::unique_ptr<RawClient> alice;
  std::unique_ptr<RawClient> bob;
};

TEST_F(Users, SeeAttachSteerAndReturnOnlyWhatIsTheirOwn) {
  v1::Binding binding;
  ASSERT_EQ(Bind(*alice, "b0", 0, &binding), grpc::OK);
  alice->Attach(daemon->OpenRxSocket("a", alice->session()).attach_secret());
  const std::string secret = daemon->OpenRxSocket("unread", alice->session()).attach_secret();
  const std::uint64_t flow = daemon->AddFlow("a", {}, alice->session()).id();
  std::vector<RawFragment> held;
  EXPECT_TRUE(WaitUntil([&] { return !(held = alice->Poll()).empty(); }));

  // See.
  Get("a", *bob, grpc::NOT_FOUND);
  v1::ListRxSocketsResponse list;
  EXPECT_EQ(
      Call(daemon->rx_sockets(), &v1::RxSockets::Stub::ListRxSockets, bob->session(), {}, &list),
      grpc::OK);
  EXPECT_EQ(list.rx_sockets_size(), 0);
  AttachMessage map = {};
  map.kind = static_cast<std::uint32_t>(AttachKind::kMapBuffer);
  map.id = binding.id();
  EXPECT_EQ(bob->Ask(map).code, static_cast<std::uint32_t>(grpc::NOT_FOUND));

  // Attach.
  AttachMessage attach = {};
  attach.kind = static_cast<std::uint32_t>(AttachKind::kAttach);
  secret.copy(attach.key.data(), attach.key.size());
  EXPECT_EQ(bob->Ask(attach).code, static_cast<std::uint32_t>(grpc::NOT_FOUND));
  EXPECT_EQ(alice->Ask(attach).code, 0u) << "it was not used up";
  EXPECT_EQ(alice->Ask(attach).code, static_cast<std::uint32_t>(grpc::NOT_FOUND)) << "now it is";

  // Steer.
  v1::AddFlowRequest add;
  add.add_rx_sockets("a");
  add.set_session(bob->session());
  v1::Flow response;
  EXPECT_EQ(Call(daemon->flows(), &v1::Flows::Stub::AddFlow, "", add, &response), grpc::NOT_FOUND);
  v1::DeleteFlowRequest remove;
  remove.set_id(flow);
  v1::DeleteFlowResponse removed;
  EXPECT_EQ(Call(daemon->flows(), &v1::Flows::Stub::DeleteFlow, bob->session(), remove, &removed),
            grpc::NOT_FOUND);
  EXPECT_EQ(Bind(*bob, "b1", 0, &binding), grpc::PERMISSION_DENIED);

  // Return.
  v1::ReturnTokensRequest give_back;
  give_back.set_rx_socket("a");
  give_back.set_session(bob->session());
  give_back.add_ranges()->set_first_token(held.front().token);
  give_back.mutable_ranges(0)->set_count(1);
  v1::ReturnTokensResponse returned;
  EXPECT_EQ(Call(daemon->tokens(), &v1::Tokens::Stub::ReturnTokens, "", give_back, &returned),
            grpc::NOT_FOUND);
  EXPECT_EQ(Get("a", *alice, grpc::OK).statistics().returned(), 0u);

  // Another session of hers may.
  const auto again = Connect(kAlice);
  give_back.set_session(again->session());
  EXPECT_EQ(Call(daemon->tokens(), &v1::Tokens::Stub::ReturnTokens, "", give_back, &returned),
            grpc::OK);
  EXPECT_EQ(returned.results(0).released(), 1u);
}

TEST_F(Users, ReceiveBesideEachOther) {
  v1::Binding binding;
  ASSERT_EQ(Bind(*alice, "b0", 0, &binding), grpc::OK);
  ASSERT_EQ(Bind(*bob, "b1", 1, &binding), grpc::OK);
  const auto receive = [&](RawClient& client, const std::string& name, std::uint32_t queue) {
    v1::Match match;
    match.set_port("p0");
    match.set_queue(queue);
    client.Attach(daemon->OpenRxSocket(name, client.session()).attach_secret());
    daemon->AddFlow(name, match, client.session());
    EXPECT_TRUE(WaitUntil([&] { return !client.Poll().empty(); }));
  };
  receive(*alice, "a", 0);
  receive(*bob, "b", 1);
  // Root sees both, without a session of its own it sees nothing.
  RawClient root(daemon->run_dir());
  v1::ListRxSocketsResponse list;
  const auto list_with = [&](const std::string& key) {
    return Call(daemon->rx_sockets(), &v1::RxSockets::Stub::ListRxSockets, key, {}, &list);
  };
  EXPECT_EQ(list_with(root.session()), grpc::OK);
  EXPECT_EQ(list.rx_sockets_size(), 2);
  EXPECT_EQ(list_with(""), grpc::PERMISSION_DENIED);
}

TEST_F(Users, RxtokenctlIsAUserToo) {
  // Where all of them can run it.
  const std::filesystem::path program = daemon->run_dir() / "rxtokenctl";
  std::filesystem::copy_file(RXTOKENCTL, program);
  const auto ctl = [&](uid_t uid, const std::vector<std::string>& verb, std::string* output) {
    std::vector<std::string> argv = {"setpriv",
                                     "--reuid=" + std::to_string(uid),
                                     "--regid=" + std::to_string(kGroup),
                                     "--clear-groups",
                                     program,
                                     "--run-dir",
                                     daemon->run_dir(),
                                     "--json"};
    argv.insert(argv.end(), verb.begin(), verb.end());
    return RunProgram(argv, output);
  };
  std::string output;
  EXPECT_EQ(ctl(kAlice, {"bind", "mine", "--buffer", "16MiB"}, &output), 0);
  EXPECT_EQ(ctl(kAlice, {"binding", "list"}, &output), 0);
  EXPECT_NE(output.find("\"uid:4001\""), std::string::npos) << output;
  EXPECT_EQ(ctl(kBob, {"binding", "list"}, &output), 0);
  EXPECT_EQ(output.find("mine"), std::string::npos) << output;
  EXPECT_EQ(ctl(kBob, {"unbind", "mine"}, &output), 1);
  EXPECT_EQ(ctl(kAlice, {"unbind", "mine"}, &output), 0);
  EXPECT_EQ(ctl(kBob, {"health"}, &output), 0);
}

TEST_F(Users, WhoIsNotInTheGroupCannotConnect) {
  const As stranger(kStranger, kStranger);
  EXPECT_EQ(ConnectError(daemon->run_dir() / "api.sock", SOCK_STREAM), EACCES);
  EXPECT_EQ(ConnectError(daemon->run_dir() / "descriptors.sock", SOCK_SEQPACKET), EACCES);
}

TEST(Access, IsForTheDaemonsUserAloneUnlessConfigured) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be several users";
  Daemon daemon({"--port", "p0=net_null0"});
  ASSERT_TRUE(daemon.process().Running());
  std::filesystem::permissions(daemon.run_dir(), std::filesystem::perms(0711));
  const As stranger(kStranger, 0);
  EXPECT_EQ(ConnectError(daemon.run_dir() / "api.sock", SOCK_STREAM), EACCES);
  EXPECT_EQ(ConnectError(daemon.run_dir() / "descriptors.sock", SOCK_SEQPACKET), EACCES);
}

TEST(Capabilities, AreGivenUpOnceTheDaemonIsReady) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to have any";
  Daemon daemon({"--port", "p0=net_null0"});
  ASSERT_TRUE(daemon.process().Running());
  const std::filesystem::path tasks = "/proc/" + std::to_string(daemon.process().pid()) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ostringstream status;
    status << std::ifstream(task.path() / "status").rdbuf();
    EXPECT_NE(status.str().find("CapPrm:\t0000000000000000"), std::string::npos) << status.str();
    EXPECT_NE(status.str().find("NoNewPrivs:\t1"), std::string::npos) << status.str();
  }
}

}  // namespace
}  // namespace rxtoken::test
