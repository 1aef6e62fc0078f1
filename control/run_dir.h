// SPDX-License-Identifier: Apache-2.0
// run_dir.h - the directory with the daemon's sockets, and the lock that says it is in use.
//
// Thread-safety: one thread.
#pragma once

#include <string>

#include "control/unique_fd.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// $RXTOKEN_RUN_DIR, else $RUNTIME_DIRECTORY (systemd), else /run/rxtoken for root, else
// $XDG_RUNTIME_DIR/rxtoken, else /tmp/rxtoken-<uid>.
std::string DefaultRunDir();

class RunDir {
 public:
  // Makes the directory if it is missing, takes its lock, and removes socket files that a
  // dead daemon left behind.
  // Errors: kInvalidArgument     the path is too long for a socket address
  //         kAlreadyExists       another daemon holds it; the message has its process id
  //         kFailedPrecondition  not a directory of ours, or something in it is in the way
  static Result<RunDir> Claim(const std::string& path);
  // Removes the sockets. The lock file stays, since another daemon may wait at it.
  ~RunDir();
  RunDir(RunDir&&) = default;

  std::string api_socket() const { return path_ + "/api.sock"; }
  std::string descriptor_socket() const { return path_ + "/descriptors.sock"; }

 private:
  RunDir(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  UniqueFd lock_;  // not valid: moved from
};

}  // namespace rxtoken
