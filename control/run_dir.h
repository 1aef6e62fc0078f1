// SPDX-License-Identifier: Apache-2.0
// run_dir.h - the directory with the daemon's sockets, and the lock that says it is in use.
//
// Thread-safety: one thread.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>

#include "control/unique_fd.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// $RXTOKEN_RUN_DIR, else $RUNTIME_DIRECTORY (systemd), else /run/rxtoken for root, else
// $XDG_RUNTIME_DIR/rxtoken, else /tmp/rxtoken-<uid>.
std::string DefaultRunDir();

// Where a socket is, and who may connect: the owner of the file, and the group if there is one.
struct SocketPlace {
  std::string path;
  std::optional<gid_t> gid = {};
};

class RunDir {
 public:
  // Makes the directory if it is missing, for us and the group `gid` only, takes its lock, and
  // removes socket files that a dead daemon left behind. Errors: kInvalidArgument     the path is
  // too long for a socket address
  //         kAlreadyExists       another daemon holds it; the message has its process id
  //         kFailedPrecondition  not a directory of ours, or something in it is in the way
  static Result<RunDir> Claim(const std::string& path, std::optional<gid_t> gid = {});
  // Removes the sockets. The lock file stays, since another daemon may wait at it.
  ~RunDir();
  RunDir(RunDir&&) = default;

  SocketPlace api_socket() const { return {path_ + "/api.sock", gid_}; }
  SocketPlace descriptor_socket() const { return {path_ + "/descriptors.sock", gid_}; }

 private:
  RunDir(std::string path, std::optional<gid_t> gid, UniqueFd lock)
      : path_(std::move(path)), gid_(gid), lock_(std::move(lock)) {}

  std::string path_;
  std::optional<gid_t> gid_;
  UniqueFd lock_;  // not valid: moved from
};

}  // namespace rxtoken
