// SPDX-License-Identifier: Apache-2.0
#include "control/listener.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <vector>

namespace rxtoken {
namespace {

constexpr std::chrono::milliseconds kRetryPeriod{100};

// Of the process at the other end, as it was when it connected.
Credentials CredentialsOf(int socket) {
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
  // Refused for want of room, with the room that it takes.
  socklen_t group_bytes = 0;
  getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, nullptr, &group_bytes);
  std::vector<gid_t> gids(group_bytes / sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, gids.data(), &group_bytes) != 0) gids.clear();
  gids.push_back(peer.gid);
  return {.pid = peer.pid, .uid = peer.uid, .gids = std::move(gids)};
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Of "192.0.2.1:4433" or "[::]:4433"; null if it is none. No names: they can change their address.
Addresses Resolve(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return nullptr;
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &list) != 0) return nullptr;
  return Addresses(list);
}

// "127.0.0.1:4433"
std::string NameOf(int socket) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof(address);
  std::array<char, NI_MAXHOST> host = {};
  std::array<char, NI_MAXSERV> port = {};
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
  getnameinfo(reinterpret_cast<sockaddr*>(&address), bytes, host.data(), host.size(), port.data(),
              port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  const bool v6 = address.ss_family == AF_INET6;
  return (v6 ? "[" : "") + std::string(host.data()) + (v6 ? "]:" : ":") + port.data();
}

}  // namespace

bool IsLoopback(const std::string& address) {
  const Addresses found = Resolve(address);
  if (found && found->ai_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(found->ai_addr);
    return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  if (found && found->ai_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(found->ai_addr);
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
  }
  return false;
}

Result<std::unique_ptr<Listener>> Listener::Start(ControlLoop& loop, const SocketPlace& place,
                                                  int type, OnConnection on_connection) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string& path = place.path;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  // Nobody can connect before listen(), so that the mode is never wrong.
  if (!socket.valid() ||
      bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      (place.gid && chown(path.c_str(), static_cast<uid_t>(-1), *place.gid) != 0) ||
      chmod(path.c_str(), place.gid ? 0660 : 0600) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    return Status(Code::kFailedPrecondition,
                  "socket '" + path + "': cannot listen: " + strerror(errno));
  }
  return Start(loop, path, std::move(socket), std::move(on_connection));
}

Result<std::unique_ptr<Listener>> Listener::StartTcp(ControlLoop& loop, const std::string& address,
                                                     OnConnection on_connection) {
  const Addresses found = Resolve(address);
  if (!found) {
    return Status(Code::kInvalidArgument, "'" + address + "' is no address; use ADDRESS:PORT");
  }
  UniqueFd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return Status(Code::kFailedPrecondition,
                  "'" + address + "': cannot listen: " + strerror(errno));
  }
  std::string name = NameOf(socket.get());
  return Start(loop, std::move(name), std::move(socket), std::move(on_connection));
}

Result<std::unique_ptr<Listener>> Listener::Start(ControlLoop& loop, std::string name,
                                                  UniqueFd socket, OnConnection on_connection) {
  std::unique_ptr<Listener> listener(
      new Listener(loop, std::move(name), std::move(socket), std::move(on_connection)));
  auto retry = Timer::Create(loop, [raw = listener.get()] { (void)raw->Watch(); });
  if (!retry.ok()) return retry.status();
  listener->retry_.emplace(*std::move(retry));
  const Status watched = listener->Watch();
  if (!watched.ok()) return watched;
  return listener;
}

Listener::~Listener() { loop_.Unwatch(socket_.get()); }

Status Listener::Watch() {
  return loop_.Watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { Accept(); });
}

void Listener::Accept() {
  UniqueFd socket(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      if (const auto suppressed = log_limit_.Pass()) {
        LogWarning("accept_paused",
                   {{"socket", name_}, {"reason", strerror(errno)}, {"suppressed", *suppressed}});
      }
      loop_.Unwatch(socket_.get());
      retry_->Set(kRetryPeriod);
    }
    return;
  }
  const Credentials peer = CredentialsOf(socket.get());
  on_connection_(std::move(socket), peer);
}

}  // namespace rxtoken
