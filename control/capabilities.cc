// SPDX-License-Identifier: Apache-2.0
#include "control/capabilities.h"

#include <errno.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace rxtoken {
namespace {

constexpr int kTries = 1000;  // of a millisecond

std::atomic<std::uint64_t> kept_by_all;

// The kernel changes the thread that asks, and no other; so each has to ask, in a signal handler.
void KeepInThisThread(int) {
  const int saved_errno = errno;
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets = {};
  syscall(SYS_capget, &header, sets.data());
  for (unsigned i = 0; i < sets.size(); i++) {
    const auto kept = static_cast<std::uint32_t>(kept_by_all.load() >> (32 * i));
    sets[i] = {.effective = sets[i].effective & kept,
               .permitted = sets[i].permitted & kept,
               .inheritable = 0};
  }
  syscall(SYS_capset, &header, sets.data());
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  errno = saved_errno;
}

// What a thread may do; `task` is its directory in /proc.
std::uint64_t CapabilitiesOf(const std::filesystem::path& task) {
  std::ifstream status(task / "status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("CapPrm:")) return std::stoull(line.substr(7), nullptr, 16);
  }
  return 0;  // it has ended
}

}  // namespace

Status KeepCapabilities(std::uint64_t kept) {
  kept_by_all = kept;
  const int signal = SIGRTMAX;
  // It stays handled: a thread that was asked twice may get the second signal at any time later,
  // and without a handler that would end the process.
  struct sigaction action = {};
  action.sa_handler = KeepInThisThread;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
  std::string thread;
  for (int i = 0; i < kTries; i++) {
    thread.clear();
    std::error_code ignored;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
      if ((CapabilitiesOf(task.path()) & ~kept) == 0) continue;
      thread = task.path().filename();
      syscall(SYS_tgkill, getpid(), std::stoi(thread), signal);
    }
    if (thread.empty()) break;
    poll(nullptr, 0, 1);
  }
  if (thread.empty()) return Status();
  return Status(Code::kInternal, "thread " + thread + " does not give up its capabilities");
}

}  // namespace rxtoken
