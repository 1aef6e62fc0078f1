// SPDX-License-Identifier: Apache-2.0
#include "control/listener.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

namespace rxtoken {
namespace {

constexpr std::chrono::milliseconds kRetryPeriod{100};

}  // namespace

Result<std::unique_ptr<Listener>> Listener::Start(ControlLoop& loop, const std::string& path,
                                                  int type, OnConnection on_connection) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  // Nobody can connect before listen(), so that the mode is never wrong.
  if (!socket.valid() ||
      bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), 0660) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    return Status(Code::kFailedPrecondition,
                  "socket '" + path + "': cannot listen: " + strerror(errno));
  }
  std::unique_ptr<Listener> listener(
      new Listener(loop, path, std::move(socket), std::move(on_connection)));
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
                   {{"socket", path_}, {"reason", strerror(errno)}, {"suppressed", *suppressed}});
      }
      loop_.Unwatch(socket_.get());
      retry_->Set(kRetryPeriod);
    }
    return;
  }
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
  on_connection_(std::move(socket), {.pid = peer.pid, .uid = peer.uid});
}

}  // namespace rxtoken
