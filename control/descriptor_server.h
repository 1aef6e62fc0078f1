// SPDX-License-Identifier: Apache-2.0
// descriptor_server.h - the daemon's end of the descriptor socket (tokens/abi/attach.h).
//
// One connection is one session. A connection that does not keep to the protocol, or does
// not read its answers, is closed, and its session ends. So is one that says nothing.
//
// Thread-safety: the control thread only, or the thread that starts and stops it.
// Blocks: never.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "control/control_loop.h"
#include "control/listener.h"
#include "control/log.h"
#include "control/manager.h"
#include "control/rights.h"
#include "control/run_dir.h"
#include "control/unique_fd.h"
#include "tokens/abi/attach.h"

namespace rxtoken {

class DescriptorServer {
 public:
  // How long a connection may take until kHello.
  static constexpr std::chrono::milliseconds kHelloTimeout{5000};

  // Listens in `place`, where nothing is yet. `loop` and `manager` outlive the server.
  // Errors: kFailedPrecondition  the socket file cannot be made
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<DescriptorServer>> Start(
      ControlLoop& loop, Manager& manager, const SocketPlace& place,
      std::chrono::milliseconds hello_timeout = kHelloTimeout);
  // Closes all connections. What their sessions own is left to the dataplane's end.
  ~DescriptorServer();

 private:
  struct Connection {
    UniqueFd socket;
    Credentials peer;
    ControlLoop::Clock::time_point deadline = {};  // of kHello
    SessionId session = SessionId::kNone;          // until kHello

    bool greeted() const { return session != SessionId::kNone; }
  };

  DescriptorServer(ControlLoop& loop, Manager& manager, std::chrono::milliseconds hello_timeout)
      : loop_(loop), manager_(manager), hello_timeout_(hello_timeout) {}
  void Add(UniqueFd socket, const Credentials& peer);
  // Connections of this user that have not said kHello.
  std::ptrdiff_t Silent(std::uint32_t uid) const;
  void CloseSilent();
  void Serve(int fd);
  // Why the connection has to be closed; empty if it goes on.
  std::string_view ServeOne(Connection& connection);
  std::string_view Hello(Connection& connection, AttachMessage& answer);
  std::string_view Attach(Connection& connection, std::string_view secret, AttachMessage& answer);
  std::string_view MapBuffer(Connection& connection, AttachMessage& answer);
  // Answers that descriptors cannot be sent now.
  std::string_view RefuseDescriptors(const Connection& connection, AttachMessage answer);
  void Close(int fd);
  void LogRarely(std::string_view event, std::string_view reason, const Connection& connection);

  ControlLoop& loop_;
  Manager& manager_;
  const std::chrono::milliseconds hello_timeout_;
  std::unordered_map<int, Connection> connections_;  // by descriptor
  std::map<std::string_view, LogLimit> log_limits_;  // by reason, all literals
  std::unique_ptr<Listener> listener_;
  std::optional<Timer> silence_timer_;
};

}  // namespace rxtoken
