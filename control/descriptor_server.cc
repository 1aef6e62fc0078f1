// SPDX-License-Identifier: Apache-2.0
#include "control/descriptor_server.h"

#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#include "control/log.h"

namespace rxtoken {
namespace {

// Some more than sessions, so that one session too many gets an answer that says so.
constexpr std::size_t kMaxConnections = kMaxSessions + 64;
constexpr std::ptrdiff_t kMaxSilent = 64;  // of one user
constexpr std::size_t kMaxDescriptors = 3;

constexpr std::string_view kPeerClosed = "peer closed";
constexpr std::string_view kNotReading = "the peer does not read its answers";
constexpr std::string_view kTooManyInFlight = "too many descriptors that nobody reads";

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
  if (errno == ETOOMANYREFS) return kTooManyInFlight;
  return errno == EAGAIN ? kNotReading : kPeerClosed;
}

bool HasUnreadAnswer(int socket) {
  int unread = 0;
  return ioctl(socket, SIOCOUTQ, &unread) == 0 && unread > 0;
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

Result<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(
    ControlLoop& loop, Manager& manager, const SocketPlace& place,
    std::chrono::milliseconds hello_timeout) {
  std::unique_ptr<DescriptorServer> server(new DescriptorServer(loop, manager, hello_timeout));
  DescriptorServer* const raw = server.get();
  auto timer = Timer::Create(loop, [raw] { raw->CloseSilent(); });
  if (!timer.ok()) return timer.status();
  server->silence_timer_.emplace(*std::move(timer));
  server->silence_timer_->Set(hello_timeout, hello_timeout);
  auto listener = Listener::Start(
      loop, place, SOCK_SEQPACKET,
      [raw](UniqueFd socket, const Credentials& peer) { raw->Add(std::move(socket), peer); });
  if (!listener.ok()) return listener.status();
  server->listener_ = *std::move(listener);
  return server;
}

DescriptorServer::~DescriptorServer() {
  for (const auto& [fd, connection] : connections_) loop_.Unwatch(fd);
}

void DescriptorServer::Add(UniqueFd socket, const Credentials& peer) {
  const int fd = socket.get();
  Connection connection{.socket = std::move(socket),
                        .peer = peer,
                        .deadline = ControlLoop::Clock::now() + hello_timeout_};
  if (connections_.size() >= kMaxConnections || Silent(peer.uid) >= kMaxSilent) {
    return LogRarely("connection_refused", "too many connections", connection);
  }
  if (!loop_.Watch(fd, EPOLLIN, [this, fd](std::uint32_t) { Serve(fd); }).ok()) return;
  connections_.emplace(fd, std::move(connection));
}

std::ptrdiff_t DescriptorServer::Silent(std::uint32_t uid) const {
  return std::count_if(connections_.begin(), connections_.end(), [uid](const auto& entry) {
    return !entry.second.greeted() && entry.second.peer.uid == uid;
  });
}

void DescriptorServer::CloseSilent() {
  const auto now = ControlLoop::Clock::now();
  std::erase_if(connections_, [&](const auto& entry) {
    const auto& [fd, connection] = entry;
    if (connection.greeted() || now < connection.deadline) return false;
    LogRarely("connection_closed", "silence", connection);
    loop_.Unwatch(fd);
    return true;
  });
}

void DescriptorServer::Serve(int fd) {
  Connection& connection = connections_.at(fd);
  const std::string_view close_reason = ServeOne(connection);
  if (close_reason.empty()) return;
  if (close_reason != kPeerClosed) LogRarely("connection_closed", close_reason, connection);
  Close(fd);
}

std::string_view DescriptorServer::ServeOne(Connection& connection) {
  // The descriptors of an answer count against the limits of our own user until it is read: there
  // is only one of them for each connection.
  if (HasUnreadAnswer(connection.socket.get())) return kNotReading;
  const Received received = Receive(connection.socket.get());
  if (!received.message) return received.close_reason;
  const AttachMessage& request = *received.message;
  const auto kind = static_cast<AttachKind>(request.kind);
  if (kind == AttachKind::kHello && !connection.greeted()) {
    AttachMessage answer = Answer(AttachKind::kWelcome);
    return Hello(connection, answer);
  }
  if (kind == AttachKind::kAttach && connection.greeted()) {
    AttachMessage answer = Answer(AttachKind::kAttached);
    return Attach(connection, {request.key.data(), request.key.size()}, answer);
  }
  if (kind == AttachKind::kMapBuffer && connection.greeted()) {
    AttachMessage answer = Answer(AttachKind::kBuffer);
    answer.id = request.id;
    return MapBuffer(connection, answer);
  }
  return "message out of order or of an unknown kind";
}

std::string_view DescriptorServer::Hello(Connection& connection, AttachMessage& answer) {
  const Result<Manager::Session> session = manager_.StartSession(connection.peer);
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
  const std::string_view failed =
      Send(connection.socket.get(), answer,
           {attachment.descriptor_fd, attachment.return_fd, doorbell.get()});
  if (failed != kTooManyInFlight) return failed;
  manager_.AbandonRxSocket(attached->rx_socket);
  return RefuseDescriptors(connection, Answer(AttachKind::kAttached));
}

std::string_view DescriptorServer::MapBuffer(Connection& connection, AttachMessage& answer) {
  const Result<BufferView> buffer = manager_.GetBufferFor(connection.session, answer.id);
  if (!buffer.ok()) {
    Refuse(buffer.status(), answer);
    return Send(connection.socket.get(), answer);
  }
  answer.bytes = buffer->bytes;
  answer.page_bytes = buffer->page_bytes;
  const std::string_view failed = Send(connection.socket.get(), answer, {buffer->fd});
  if (failed != kTooManyInFlight) return failed;
  return RefuseDescriptors(connection, Answer(AttachKind::kBuffer));
}

std::string_view DescriptorServer::RefuseDescriptors(const Connection& connection,
                                                     AttachMessage answer) {
  LogRarely("descriptors_not_sent", kTooManyInFlight, connection);
  Refuse(Status(Code::kResourceExhausted,
                "too many descriptors are on their way to applications that do not read them; "
                "try again later, or raise the daemon's limit of open files"),
         answer);
  return Send(connection.socket.get(), answer);
}

void DescriptorServer::Close(int fd) {
  const auto found = connections_.find(fd);
  const SessionId session = found->second.session;
  loop_.Unwatch(fd);
  connections_.erase(found);
  if (session != SessionId::kNone) manager_.EndSession(session);
}

void DescriptorServer::LogRarely(std::string_view event, std::string_view reason,
                                 const Connection& connection) {
  const auto suppressed = log_limits_[reason].Pass();
  if (!suppressed) return;
  LogWarning(event, {{"reason", reason},
                     {"pid", connection.peer.pid},
                     {"uid", connection.peer.uid},
                     {"session", static_cast<std::uint64_t>(connection.session)},
                     {"suppressed", *suppressed}});
}

}  // namespace rxtoken
