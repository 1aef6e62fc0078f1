// SPDX-License-Identifier: Apache-2.0
#include "control/descriptor_server.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#include "control/log.h"

namespace rxtoken {
namespace {

// Some more than sessions, so that one session too many gets an answer that says so.
constexpr std::size_t kMaxConnections = kMaxSessions + 64;
constexpr std::size_t kMaxDescriptors = 3;
constexpr auto kComplaintPeriod = std::chrono::seconds(1);

constexpr std::string_view kPeerClosed = "peer closed";
constexpr std::string_view kNotReading = "answer does not fit: the peer does not read";

AttachMessage Answer(AttachKind kind) {
  AttachMessage message = {};
  message.magic = kAbiMagic;
  message.abi_major = kAbiMajor;
  message.abi_minor = kAbiMinor;
  message.kind = static_cast<std::uint32_t>(kind);
  return message;
}

void Refuse(const Status& status, AttachMessage& answer) {
  answer.code = static_cast<std::uint32_t>(status.code());
  status.message().copy(answer.text.data(), answer.text.size() - 1);
}

// Empty, or why the connection has to be closed.
std::string_view Send(int socket, const AttachMessage& message,
                      std::initializer_list<int> descriptors = {}) {
  iovec data = {const_cast<AttachMessage*>(&message), sizeof(message)};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control = {};
  if (descriptors.size() > 0) {
    const std::size_t bytes = descriptors.size() * sizeof(int);
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(rights), descriptors.begin(), bytes);
  }
  if (sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof(message)) return {};
  return errno == EAGAIN ? kNotReading : kPeerClosed;
}

// One message of the peer's. Empty text and no message: there is none now.
struct Received {
  std::optional<AttachMessage> message;
  std::string_view close_reason;
};

Received Receive(int socket) {
  AttachMessage message;
  iovec data = {&message, sizeof(message)};
  // No room for control data: descriptors that the peer sends are closed by the kernel.
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  const ssize_t n = recvmsg(socket, &header, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  if (n <= 0) return {{}, kPeerClosed};
  if (header.msg_flags & MSG_CTRUNC) return {{}, "peer sent file descriptors"};
  if (n != sizeof(message) || (header.msg_flags & MSG_TRUNC)) {
    return {{}, "message of the wrong size"};
  }
  if (message.magic != kAbiMagic) return {{}, "message with the wrong magic"};
  if (message.abi_major != kAbiMajor) return {{}, "message of another major version"};
  return {message, {}};
}

}  // namespace

Result<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(ControlLoop& loop,
                                                                  Manager& manager,
                                                                  const std::string& path) {
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (!listener.valid() ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), 0660) != 0 || listen(listener.get(), SOMAXCONN) != 0) {
    return Status(Code::kFailedPrecondition,
                  "descriptor socket '" + path + "': cannot listen: " + strerror(errno));
  }
  std::unique_ptr<DescriptorServer> server(
      new DescriptorServer(loop, manager, std::move(listener)));
  const Status status = server->Listen(true);
  if (!status.ok()) return status;
  return server;
}

DescriptorServer::DescriptorServer(ControlLoop& loop, Manager& manager, UniqueFd listener)
    : loop_(loop), manager_(manager), listener_(std::move(listener)) {}

DescriptorServer::~DescriptorServer() {
  for (const auto& [fd, connection] : connections_) loop_.Unwatch(fd);
  loop_.Unwatch(listener_.get());
}

Status DescriptorServer::Listen(bool on) {
  listening_ = on;
  if (on) return loop_.Watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { Accept(); });
  loop_.Unwatch(listener_.get());
  return Status();
}

void DescriptorServer::Accept() {
  UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      // It would come back at once, again and again. The next Close() listens again.
      LogWarning("accept_paused", {{"reason", strerror(errno)}});
      (void)Listen(false);
    }
    return;
  }
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
  const int fd = socket.get();
  Connection connection{.socket = std::move(socket), .pid = peer.pid, .uid = peer.uid};
  if (connections_.size() >= kMaxConnections) {
    LogRarely("too many connections", connection);
    return;
  }
  if (!loop_.Watch(fd, EPOLLIN, [this, fd](std::uint32_t) { Serve(fd); }).ok()) return;
  connections_.emplace(fd, std::move(connection));
}

void DescriptorServer::Serve(int fd) {
  Connection& connection = connections_.at(fd);
  const std::string_view close_reason = ServeOne(connection);
  if (close_reason.empty()) return;
  if (close_reason != kPeerClosed) LogRarely(close_reason, connection);
  Close(fd);
}

std::string_view DescriptorServer::ServeOne(Connection& connection) {
  const Received received = Receive(connection.socket.get());
  if (!received.message) return received.close_reason;
  const AttachMessage& request = *received.message;
  const auto kind = static_cast<AttachKind>(request.kind);
  const bool greeted = connection.session != SessionId::kNone;
  if (kind == AttachKind::kHello && !greeted) {
    AttachMessage answer = Answer(AttachKind::kWelcome);
    return Hello(connection, answer);
  }
  if (kind == AttachKind::kAttach && greeted) {
    AttachMessage answer = Answer(AttachKind::kAttached);
    return Attach(connection, {request.key.data(), request.key.size()}, answer);
  }
  if (kind == AttachKind::kMapBuffer && greeted) {
    AttachMessage answer = Answer(AttachKind::kBuffer);
    answer.id = request.id;
    return MapBuffer(connection, answer);
  }
  return "message out of order or of an unknown kind";
}

std::string_view DescriptorServer::Hello(Connection& connection, AttachMessage& answer) {
  const Result<Manager::Session> session = manager_.StartSession(connection.pid, connection.uid);
  if (!session.ok()) {
    Refuse(session.status(), answer);
    (void)Send(connection.socket.get(), answer);
    return "no session to be had";
  }
  connection.session = session->id;
  session->key.copy(answer.key.data(), answer.key.size());
  return Send(connection.socket.get(), answer);
}

std::string_view DescriptorServer::Attach(Connection& connection, std::string_view secret,
                                          AttachMessage& answer) {
  Result<Manager::Attached> attached = manager_.Attach(connection.session, secret);
  if (!attached.ok()) {
    Refuse(attached.status(), answer);
    return Send(connection.socket.get(), answer);
  }
  const Attachment& attachment = attached->attachment;
  const UniqueFd doorbell(attachment.doorbell);
  answer.id = attached->rx_socket;
  answer.lanes = attachment.lanes;
  answer.entries = attachment.entries;
  // If this fails the connection ends, and what was attached with it.
  return Send(connection.socket.get(), answer,
              {attachment.descriptor_fd, attachment.return_fd, doorbell.get()});
}

std::string_view DescriptorServer::MapBuffer(Connection& connection, AttachMessage& answer) {
  const Result<BufferView> buffer = manager_.GetBufferFor(connection.session, answer.id);
  if (!buffer.ok()) {
    Refuse(buffer.status(), answer);
    return Send(connection.socket.get(), answer);
  }
  answer.bytes = buffer->bytes;
  answer.page_bytes = buffer->page_bytes;
  return Send(connection.socket.get(), answer, {buffer->fd});
}

void DescriptorServer::Close(int fd) {
  const auto found = connections_.find(fd);
  const SessionId session = found->second.session;
  loop_.Unwatch(fd);
  connections_.erase(found);
  if (session != SessionId::kNone) manager_.EndSession(session);
  if (!listening_) (void)Listen(true);
}

void DescriptorServer::LogRarely(std::string_view reason, const Connection& connection) {
  Complaint& complaint = complaints_[reason];
  const auto now = std::chrono::steady_clock::now();
  if (complaint.last_logged != std::chrono::steady_clock::time_point() &&
      now - complaint.last_logged < kComplaintPeriod) {
    complaint.suppressed++;
    return;
  }
  LogWarning("connection_closed", {{"reason", reason},
                                   {"pid", connection.pid},
                                   {"uid", connection.uid},
                                   {"session", static_cast<std::uint64_t>(connection.session)},
                                   {"suppressed", complaint.suppressed}});
  complaint = {now, 0};
}

}  // namespace rxtoken
