// SPDX-License-Identifier: Apache-2.0
#include "control/descriptor_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <deque>
#include <optional>

#include "tests/unit/control/fake_dataplane.h"
#include "tests/unit/control/temp_dir.h"

namespace rxtoken {
namespace {

using std::chrono::milliseconds;

// The application's end. The loop is turned by hand, so that everything is one thread.
class Peer {
 public:
  Peer(ControlLoop& loop, const std::string& path)
      : loop_(loop), socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }

  static AttachMessage Message(AttachKind kind) {
    AttachMessage message = {};
    message.magic = kAbiMagic;
    message.abi_major = kAbiMajor;
    message.kind = static_cast<std::uint32_t>(kind);
    return message;
  }

  void Send(const void* data, std::size_t bytes) {
    EXPECT_EQ(send(socket_.get(), data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    Turn();
  }
  void Send(const AttachMessage& message) { Send(&message, sizeof(message)); }
  void SendDescriptor(const AttachMessage& message, int fd) {
    iovec data = {const_cast<AttachMessage*>(&message), sizeof(message)};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    *rights = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    EXPECT_EQ(sendmsg(socket_.get(), &header, 0), static_cast<ssize_t>(sizeof(message)));
    Turn();
  }

  // Nothing if the daemon closed the connection. Descriptors go to `fds`.
  std::optional<AttachMessage> Receive() {
    AttachMessage message;
    iovec data = {&message, sizeof(message)};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control = {};
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t n = recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    fds.clear();
    if (n != sizeof(message)) return std::nullopt;
    if (const cmsghdr* const rights = CMSG_FIRSTHDR(&header); rights != nullptr) {
      const auto* numbers = reinterpret_cast<const int*>(CMSG_DATA(rights));
      for (std::size_t i = 0; i < (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
        fds.emplace_back(numbers[i]);
      }
    }
    return message;
  }
  bool closed() {
    char byte;
    const ssize_t n = recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return n == 0 || (n < 0 && errno == ECONNRESET);
  }

  std::string Hello() {
    Send(Message(AttachKind::kHello));
    const auto answer = Receive();
    EXPECT_TRUE(answer && answer->code == 0);
    return answer ? std::string(answer->key.data(), answer->key.size()) : "";
  }
  std::optional<AttachMessage> Attach(const std::string& secret) {
    AttachMessage message = Message(AttachKind::kAttach);
    secret.copy(message.key.data(), message.key.size());
    Send(message);
    return Receive();
  }
  std::optional<AttachMessage> MapBuffer(std::uint64_t binding) {
    AttachMessage message = Message(AttachKind::kMapBuffer);
    message.id = binding;
    Send(message);
    return Receive();
  }

  void Turn() {
    for (int i = 0; i < 3; i++) loop_.RunOnce(milliseconds(0));
  }
  void Disconnect() {
    socket_ = UniqueFd();
    Turn();
  }

  int socket() const { return socket_.get(); }

  std::vector<UniqueFd> fds;

 private:
  ControlLoop& loop_;
  UniqueFd socket_;
};

class DescriptorServerTest : public testing::Test {
 protected:
  std::string Open(const std::string& name, const std::string& session) {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_session(session);
    return manager_.OpenRxSocket(*manager_.Identify({.request_key = session}), request)
        ->attach_secret();
  }

  TempDir temp_;
  std::string path_ = temp_.path() + "/descriptors.sock";
  FakeDataplane dataplane_;
  Manager manager_{dataplane_};
  std::unique_ptr<ControlLoop> loop_ = ControlLoop::Create().value();
  std::unique_ptr<DescriptorServer> server_ =
      DescriptorServer::Start(*loop_, manager_, {path_}).value();
};

TEST_F(DescriptorServerTest, TheSocketIsForItsOwnerUnlessThereIsAGroup) {
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const std::string path = temp_.path() + "/group.sock";
  server_ = DescriptorServer::Start(*loop_, manager_, {path, getegid()}).value();
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
  EXPECT_EQ(info.st_gid, getegid());
}

TEST_F(DescriptorServerTest, AnApplicationAttachesAndMapsABuffer) {
  Peer peer(*loop_, path_);
  const std::string session = peer.Hello();
  const auto attached = peer.Attach(Open("s", session));
  ASSERT_TRUE(attached && attached->code == 0);
  EXPECT_EQ(attached->lanes, 1u);
  EXPECT_EQ(attached->entries, kDefaultRingEntries);
  EXPECT_EQ(peer.fds.size(), 3u);

  const std::uint64_t binding =
      *dataplane_.Bind({.name = "b", .buffer_bytes = 1 << 20, .queues = {}});
  EXPECT_EQ(peer.MapBuffer(binding)->code, static_cast<std::uint32_t>(Code::kNotFound))
      << "the manager does not know it";
}

TEST_F(DescriptorServerTest, ABufferComesWithItsSizes) {
  ASSERT_TRUE(manager_.OpenPort({.name = "p0", .device = "fake"}).ok());
  Peer peer(*loop_, path_);
  v1::BindRequest request;
  request.set_name("b");
  request.set_session(peer.Hello());
  request.set_buffer_bytes(1 << 20);
  request.add_queues()->set_port("p0");
  const auto answer = peer.MapBuffer(
      manager_.Bind(*manager_.Identify({.request_key = request.session()}), request)->id());
  ASSERT_TRUE(answer && answer->code == 0);
  EXPECT_EQ(answer->bytes, 1u << 20);
  EXPECT_EQ(answer->page_bytes, 4096u);
  EXPECT_EQ(peer.fds.size(), 1u);
}

TEST_F(DescriptorServerTest, ARefusalSaysWhyAndTheConnectionGoesOn) {
  Peer peer(*loop_, path_);
  const std::string session = peer.Hello();
  const auto refused = peer.Attach(std::string(32, 'f'));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, static_cast<std::uint32_t>(Code::kNotFound));
  EXPECT_NE(std::string(refused->text.data()), "");
  EXPECT_TRUE(peer.fds.empty());
  EXPECT_EQ(peer.Attach(Open("s", session))->code, 0u);
}

TEST_F(DescriptorServerTest, TheSessionEndsWithTheConnection) {
  Peer peer(*loop_, path_);
  const std::string session = peer.Hello();
  peer.Attach(Open("s", session));
  ASSERT_EQ(dataplane_.sockets.size(), 1u);
  peer.Disconnect();
  EXPECT_TRUE(dataplane_.sockets.empty());
}

TEST_F(DescriptorServerTest, AllConnectionsEndWithTheServer) {
  Peer peer(*loop_, path_);
  peer.Hello();
  server_.reset();
  EXPECT_TRUE(peer.closed());
}

TEST_F(DescriptorServerTest, WhatIsNotOfTheProtocolEndsTheConnection) {
  AttachMessage magic = Peer::Message(AttachKind::kHello);
  magic.magic = 1;
  AttachMessage major = Peer::Message(AttachKind::kHello);
  major.abi_major = kAbiMajor + 1;
  for (const AttachMessage& message :
       {magic, major, Peer::Message(AttachKind::kAttach), Peer::Message(AttachKind::kMapBuffer),
        Peer::Message(AttachKind::kWelcome), Peer::Message(static_cast<AttachKind>(99))}) {
    Peer peer(*loop_, path_);
    peer.Send(message);
    EXPECT_TRUE(peer.closed());
  }
  Peer twice(*loop_, path_);
  twice.Hello();
  twice.Send(Peer::Message(AttachKind::kHello));
  EXPECT_TRUE(twice.closed());
}

TEST_F(DescriptorServerTest, MessagesOfTheWrongSizeEndTheConnection) {
  const std::array<char, sizeof(AttachMessage) + 1> bytes = {};
  for (const std::size_t size : {std::size_t{1}, bytes.size() - 2, bytes.size()}) {
    Peer peer(*loop_, path_);
    peer.Send(bytes.data(), size);
    EXPECT_TRUE(peer.closed()) << size;
  }
}

TEST_F(DescriptorServerTest, APeerThatSendsDescriptorsIsClosed) {
  Peer peer(*loop_, path_);
  peer.Hello();
  peer.SendDescriptor(Peer::Message(AttachKind::kMapBuffer), STDIN_FILENO);
  EXPECT_TRUE(peer.closed());
}

// So that what nobody reads of one session's descriptors does not grow.
TEST_F(DescriptorServerTest, ASecondRequestBeforeTheAnswerIsReadEndsTheConnection) {
  Peer peer(*loop_, path_);
  peer.Hello();
  for (int i = 0; i < 2; i++) peer.Send(Peer::Message(AttachKind::kMapBuffer));
  EXPECT_TRUE(peer.closed());
}

TEST_F(DescriptorServerTest, AConnectionThatSaysNothingIsClosed) {
  server_.reset();
  const std::string path = temp_.path() + "/impatient.sock";
  server_ = DescriptorServer::Start(*loop_, manager_, {path}, milliseconds(1)).value();
  Peer silent(*loop_, path);
  Peer greeted(*loop_, path);
  greeted.Hello();
  pollfd closed = {.fd = silent.socket(), .events = POLLIN, .revents = 0};
  for (int i = 0; i < 10'000 && poll(&closed, 1, 0) == 0; i++) loop_->RunOnce(milliseconds(1));
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(greeted.MapBuffer(1)) << "it may be silent for ever";
}

TEST_F(DescriptorServerTest, OneUserHasOnlySoManySilentConnections) {
  std::deque<Peer> silent;
  for (int i = 0; i < 64; i++) silent.emplace_back(*loop_, path_).Turn();
  Peer refused(*loop_, path_);
  refused.Turn();
  EXPECT_TRUE(refused.closed());
  silent.front().Hello();
  Peer accepted(*loop_, path_);
  EXPECT_NE(accepted.Hello(), "");
}

TEST_F(DescriptorServerTest, APeerThatDoesNotReadIsClosed) {
  Peer peer(*loop_, path_);
  peer.Hello();
  const AttachMessage message = Peer::Message(AttachKind::kMapBuffer);
  // More answers than a socket buffer holds; once it is closed, sending fails.
  bool open = true;
  for (int i = 0; i < 100'000 && open; i++) {
    open = send(peer.socket(), &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
    peer.Turn();
  }
  EXPECT_FALSE(open);
}

}  // namespace
}  // namespace rxtoken
