// SPDX-License-Identifier: Apache-2.0
#include "dataplane/eal.h"

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_log.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace rxtoken {
namespace {

// Where DPDK logs to. Lives as long as the process: DPDK may log at exit.
struct LogStream {
  std::mutex mutex;
  std::optional<std::string> captured;  // set while a LogCapture lives
};

LogStream& Stream() {
  static LogStream& stream = *new LogStream;
  return stream;
}

ssize_t WriteLog(void*, const char* text, std::size_t bytes) {
  LogStream& stream = Stream();
  const std::lock_guard lock(stream.mutex);
  if (stream.captured) {
    stream.captured->append(text, bytes);
  } else {
    std::fwrite(text, 1, bytes, stderr);
  }
  return static_cast<ssize_t>(bytes);
}

bool OpenLogStream() {
  cookie_io_functions_t functions = {};
  functions.write = WriteLog;
  FILE* file = fopencookie(nullptr, "w", functions);
  return file != nullptr && rte_openlog_stream(file) == 0;
}

int FirstCpu(const cpu_set_t& cpus) {
  int cpu = 0;
  while (cpu < CPU_SETSIZE - 1 && !CPU_ISSET(cpu, &cpus)) ++cpu;
  return cpu;
}

// The user says which devices are probed at start.
bool ChoosesDevices(const std::vector<std::string>& args) {
  return std::any_of(args.begin(), args.end(), [](std::string_view arg) {
    return arg.starts_with("-a") || arg.starts_with("--allow") || arg.starts_with("-b") ||
           arg.starts_with("--block");
  });
}

std::vector<std::string> Arguments(const DataplaneOptions& options, int main_cpu) {
  std::vector<std::string> args = {"rxtoken", "--no-telemetry", "--log-level=error",
                                   // One lcore, for the calling thread. Its number need not be
                                   // the CPU's, which may be larger than DPDK's numbers go.
                                   "--lcores=0@" + std::to_string(main_cpu)};
  if (options.hugepages) {
    args.insert(args.end(), {"--in-memory", "--iova-mode=va"});
    // An address that no device has: nothing is probed until a port asks for it.
    if (!ChoosesDevices(options.eal_args)) args.insert(args.end(), {"-a", "0000:00:00.0"});
  } else {
    args.insert(args.end(), {"--no-huge", "-m", std::to_string(options.memory_mib), "--no-shconf"});
    if (!ChoosesDevices(options.eal_args)) args.push_back("--no-pci");
  }
  args.insert(args.end(), options.eal_args.begin(), options.eal_args.end());
  return args;
}

}  // namespace

Status StartEal(const DataplaneOptions& options) {
  static bool called = false;
  if (called) {
    return {Code::kFailedPrecondition, "DPDK can be started only once in a process's life"};
  }
  called = true;
  if (!OpenLogStream()) return {Code::kInternal, "cannot redirect DPDK's log"};

  cpu_set_t affinity;
  CPU_ZERO(&affinity);
  sched_getaffinity(0, sizeof affinity, &affinity);

  // DPDK keeps pointers into these.
  static std::vector<std::string>& args =
      *new std::vector<std::string>(Arguments(options, FirstCpu(affinity)));
  static std::vector<char*>& argv = *new std::vector<char*>;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  LogCapture log;
  const int result = rte_eal_init(static_cast<int>(args.size()), argv.data());
  const int error = rte_errno;
  sched_setaffinity(0, sizeof affinity, &affinity);  // DPDK has pinned this thread
  if (result >= 0) return {};

  std::string message = "DPDK does not start with";
  for (std::size_t i = 1; i < args.size(); ++i) message += " " + args[i];
  message += " (" + std::string(rte_strerror(error)) + ")" + log.Take();
  if (message.find("hugepage") != std::string::npos) {
    message += " Reserve huge pages (sysctl vm.nr_hugepages=512), or start without them.";
  }
  return {Code::kFailedPrecondition, message};
}

void StopEal() { rte_eal_cleanup(); }

LogCapture::LogCapture() {
  LogStream& stream = Stream();
  const std::lock_guard lock(stream.mutex);
  stream.captured.emplace();
}

LogCapture::~LogCapture() {
  LogStream& stream = Stream();
  const std::lock_guard lock(stream.mutex);
  std::fwrite(stream.captured->data(), 1, stream.captured->size(), stderr);
  stream.captured.reset();
}

std::string LogCapture::Take() {
  constexpr std::size_t kLines = 6;
  LogStream& stream = Stream();
  const std::lock_guard lock(stream.mutex);
  std::vector<std::string_view> lines;
  const std::string text = std::exchange(*stream.captured, {});
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    if (!line.empty()) lines.push_back(line);
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
  }
  std::string appendix;
  for (std::size_t i = lines.size() - std::min(lines.size(), kLines); i < lines.size(); ++i) {
    appendix.append(appendix.empty() ? ": " : "; ").append(lines[i]);
  }
  return appendix;
}

}  // namespace rxtoken
