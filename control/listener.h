// SPDX-License-Identifier: Apache-2.0
// listener.h - a socket that others connect to, watched by the control loop.
//
// When there are no descriptors left it pauses, and tries again by itself: what waits in the
// kernel's queue is accepted then.
//
// Thread-safety: the control thread only, or the thread that starts and stops it.
// Blocks: never.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "control/control_loop.h"
#include "control/log.h"
#include "control/unique_fd.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// Who is at the other end of a Unix socket, as the kernel knows it.
struct Credentials {
  std::int64_t pid = 0;
  std::uint32_t uid = 0;
};

class Listener {
 public:
  using OnConnection = std::function<void(UniqueFd socket, const Credentials& peer)>;

  // Listens on the Unix socket `path`, which does not exist yet, for the owner and the group of
  // the file. `type` is SOCK_STREAM or SOCK_SEQPACKET. `loop` outlives the listener.
  // Errors: kFailedPrecondition  the socket file cannot be made
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<Listener>> Start(ControlLoop& loop, const std::string& path,
                                                 int type, OnConnection on_connection);
  ~Listener();

 private:
  Listener(ControlLoop& loop, std::string path, UniqueFd socket, OnConnection on_connection)
      : loop_(loop),
        path_(std::move(path)),
        socket_(std::move(socket)),
        on_connection_(std::move(on_connection)) {}
  Status Watch();
  void Accept();

  ControlLoop& loop_;
  const std::string path_;
  const UniqueFd socket_;
  const OnConnection on_connection_;
  std::optional<Timer> retry_;
  LogLimit log_limit_;
};

}  // namespace rxtoken
