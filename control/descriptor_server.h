// SPDX-License-Identifier: Apache-2.0
// descriptor_server.h - the daemon's end of the descriptor socket (tokens/abi/attach.h).
//
// One connection is one session. A connection that does not keep to the protocol, or does
// not read its answers, is closed, and its session ends.
//
// Thread-safety: the control thread only, or the thread that starts and stops it.
// Blocks: never.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "control/control_loop.h"
#include "control/manager.h"
#include "control/unique_fd.h"
#include "tokens/abi/attach.h"

namespace rxtoken {

class DescriptorServer {
 public:
  // Listens on `path`, which does not exist yet. `loop` and `manager` outlive the server.
  // Errors: kFailedPrecondition  the socket file cannot be made
  static Result<std::unique_ptr<DescriptorServer>> Start(ControlLoop& loop, Manager& manager,
                                                         const std::string& path);
  // Closes all connections. What their sessions own is left to the dataplane's end.
  ~DescriptorServer();

 private:
  struct Connection {
    UniqueFd socket;
    std::int64_t pid = 0;
    std::int64_t uid = 0;
    SessionId session = SessionId::kNone;  // until kHello
  };

  DescriptorServer(ControlLoop& loop, Manager& manager, UniqueFd listener);
  Status Listen(bool on);
  void Accept();
  void Serve(int fd);
  // Why the connection has to be closed; empty if it goes on.
  std::string_view ServeOne(Connection& connection);
  std::string_view Hello(Connection& connection, AttachMessage& answer);
  std::string_view Attach(Connection& connection, std::string_view secret, AttachMessage& answer);
  std::string_view MapBuffer(Connection& connection, AttachMessage& answer);
  void Close(int fd);
  void LogRarely(std::string_view reason, const Connection& connection);

  struct Complaint {
    std::chrono::steady_clock::time_point last_logged;
    std::uint64_t suppressed = 0;
  };

  ControlLoop& loop_;
  Manager& manager_;
  UniqueFd listener_;
  bool listening_ = false;
  std::unordered_map<int, Connection> connections_;   // by descriptor
  std::map<std::string_view, Complaint> complaints_;  // by reason, all literals
};

}  // namespace rxtoken
