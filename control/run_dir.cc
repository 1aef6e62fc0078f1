// SPDX-License-Identifier: Apache-2.0
#include "control/run_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace rxtoken {
namespace {

Status Failed(const std::string& path, const std::string& reason) {
  return Status(Code::kFailedPrecondition, "run directory '" + path + "': " + reason);
}

Status MakeDirectory(const std::string& path, std::optional<gid_t> gid) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::create_directories(path, error)) {
    if (gid && chown(path.c_str(), static_cast<uid_t>(-1), *gid) != 0) {
      return Failed(path, "cannot give it to group " + std::to_string(*gid) + ": " +
                              strerror(errno) + "; be a member, or use another access.group");
    }
    fs::permissions(path, fs::perms(gid ? 0750 : 0700), error);
  }
  struct stat info;
  if (error || stat(path.c_str(), &info) != 0) {
    return Failed(path, "cannot make it: " + (error ? error.message() : strerror(errno)) +
                            "; choose another with --run-dir");
  }
  if (!S_ISDIR(info.st_mode)) return Failed(path, "not a directory");
  // The default below /tmp could have been put there by anybody.
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return Failed(path, "belongs to user " + std::to_string(info.st_uid) +
                            "; choose a directory of your own with --run-dir");
  }
  return Status();
}

Result<UniqueFd> Lock(const std::string& run_dir) {
  const std::string path = run_dir + "/rxtokend.lock";
  UniqueFd lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!lock.valid()) {
    return Failed(run_dir, std::string("cannot open rxtokend.lock: ") + strerror(errno));
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    std::array<char, 32> text = {};
    const ssize_t n = pread(lock.get(), text.data(), text.size() - 1, 0);
    const std::string pid(text.data(), n > 0 ? strcspn(text.data(), "\n") : 0);
    return Status(Code::kAlreadyExists, "run directory '" + run_dir +
                                            "' is in use by rxtokend with process id " + pid +
                                            "; stop it, or choose another with --run-dir");
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(lock.get(), 0) != 0 ||
      pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return Failed(run_dir, std::string("cannot write rxtokend.lock: ") + strerror(errno));
  }
  return lock;
}

Status RemoveStaleSocket(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return Status();
  if (!S_ISSOCK(info.st_mode)) {
    return Status(Code::kFailedPrecondition,
                  "'" + path + "' is in the way and is not a socket; remove it");
  }
  if (unlink(path.c_str()) != 0) {
    return Status(Code::kFailedPrecondition,
                  "cannot remove the stale socket '" + path + "': " + strerror(errno));
  }
  return Status();
}

}  // namespace

std::string DefaultRunDir() {
  for (const char* variable : {"RXTOKEN_RUN_DIR", "RUNTIME_DIRECTORY"}) {
    const char* const value = getenv(variable);
    if (value != nullptr && *value != '\0') return value;
  }
  if (geteuid() == 0) return "/run/rxtoken";
  const char* const user_dir = getenv("XDG_RUNTIME_DIR");
  if (user_dir != nullptr && *user_dir != '\0') return std::string(user_dir) + "/rxtoken";
  return "/tmp/rxtoken-" + std::to_string(geteuid());
}

Result<RunDir> RunDir::Claim(const std::string& path, std::optional<gid_t> gid) {
  constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - sizeof("/descriptors.sock");
  if (path.empty() || path.size() > kLongest) {
    return Status(Code::kInvalidArgument,
                  "run directory '" + path + "': the path has " + std::to_string(path.size()) +
                      " bytes; a socket address has room for 1.." + std::to_string(kLongest));
  }
  const Status made = MakeDirectory(path, gid);
  if (!made.ok()) return made;
  Result<UniqueFd> lock = Lock(path);
  if (!lock.ok()) return lock.status();
  for (const std::string& socket : {path + "/api.sock", path + "/descriptors.sock"}) {
    const Status removed = RemoveStaleSocket(socket);
    if (!removed.ok()) return removed;
  }
  return RunDir(path, gid, *std::move(lock));
}

RunDir::~RunDir() {
  if (!lock_.valid()) return;
  unlink(api_socket().path.c_str());
  unlink(descriptor_socket().path.c_str());
}

}  // namespace rxtoken
