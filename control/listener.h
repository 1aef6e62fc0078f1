// SPDX-License-Identifier: Apache-2.0
// listener.h - a socket that others connect to, watched by the control loop.
//
// When there are no descriptors left it pauses, and tries again by itself: what waits in the
// kernel's queue is accepted then.
//
// Thread-safety: the control thread only, or the thread that starts and stops it.
// Blocks: never.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "control/control_loop.h"
#include "control/log.h"
#include "control/rights.h"
#include "control/run_dir.h"
#include "control/unique_fd.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// Whether ADDRESS:PORT is one that no other host can reach. False if it is none.
bool IsLoopback(const std::string& address);

class Listener {
 public:
  using OnConnection = std::function<void(UniqueFd socket, const Credentials& peer)>;

  // Listens on the Unix socket `place.path`, which does not exist yet. `type` is SOCK_STREAM or
  // SOCK_SEQPACKET. `loop` outlives the listener.
  // Errors: kFailedPrecondition  the socket file cannot be made, or given to the group
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<Listener>> Start(ControlLoop& loop, const SocketPlace& place,
                                                 int type, OnConnection on_connection);
  // Listens on a TCP socket. Of the peer nothing is known.
  // Errors: kInvalidArgument     `address` is not ADDRESS:PORT, like "[::]:4433"
  //         kFailedPrecondition  the address cannot be had
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<Listener>> StartTcp(ControlLoop& loop, const std::string& address,
                                                    OnConnection on_connection);
  ~Listener();

  // "127.0.0.1:4433", or the path. The port is the one that the kernel chose, if it was 0.
  const std::string& name() const { return name_; }

 private:
  Listener(ControlLoop& loop, std::string name, UniqueFd socket, OnConnection on_connection)
      : loop_(loop),
        name_(std::move(name)),
        socket_(std::move(socket)),
        on_connection_(std::move(on_connection)) {}
  static Result<std::unique_ptr<Listener>> Start(ControlLoop& loop, std::string name,
                                                 UniqueFd socket, OnConnection on_connection);
  Status Watch();
  void Accept();

  ControlLoop& loop_;
  const std::string name_;
  const UniqueFd socket_;
  const OnConnection on_connection_;
  std::optional<Timer> retry_;
  LogLimit log_limit_;
};

}  // namespace rxtoken
