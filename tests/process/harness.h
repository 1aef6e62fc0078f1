// SPDX-License-Identifier: Apache-2.0
// harness.h - real processes for the process tests: the daemon, its clients, and a network
// that belongs to the test alone.
//
// Everything that is started or created here ends with the object that stands for it, and
// with the test's process if that crashes.
//
// Thread-safety: none; one thread uses an object.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rxtoken/v1/binding.grpc.pb.h"
#include "rxtoken/v1/flow.grpc.pb.h"
#include "rxtoken/v1/port.grpc.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/token.grpc.pb.h"
#include "rxtoken/v1/worker.grpc.pb.h"
#include "tests/process/wait_until.h"

namespace rxtoken::test {

// A directory that goes, with what is in it, when the object does.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

// A child process. Its output goes to files, so that it never waits for a reader.
class Process {
 public:
  // Runs argv[0], found in PATH if it has no slash.
  explicit Process(const std::vector<std::string>& argv);
  // Kills it if it still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const noexcept { return pid_; }
  // What it wrote so far.
  std::string Output() const;
  std::string Errors() const;
  // The first line on standard output that starts like this; an empty string if there is none.
  std::string FindLine(std::string_view prefix) const;
  // Waits for one; an empty string if the process ended, or the deadline passed, without one.
  std::string WaitForLine(std::string_view prefix);

  // A line for its standard input.
  void Tell(std::string_view line);
  void CloseInput();
  void Signal(int signal);
  bool Running();
  // Waits for its end. Exit code, or minus the number of the signal that ended it; nothing if
  // it runs on.
  std::optional<int> Wait(std::chrono::milliseconds timeout = kDeadline);

  // What it has now.
  std::ptrdiff_t Descriptors() const;
  std::uint64_t ResidentKiB() const;

 private:
  TempDir directory_;
  pid_t pid_ = -1;
  int input_ = -1;
  std::optional<int> status_;
};

// Tests that are short in CI are to be done in full: RXTOKEN_CAMPAIGN is set.
bool FullCampaign();

// Runs a program to its end; its exit code. Its output goes to `output` if that is not null.
int RunProgram(const std::vector<std::string>& argv, std::string* output = nullptr,
               std::string* errors = nullptr);

// rxtokend, with a run directory of its own.
class Daemon {
 public:
  // Waits until the daemon says that it is ready, or ends: then process().Running() is false.
  // `wrapper` is a program that runs it, with its own arguments: {"setpriv", "--nnp"}. `run_dir`
  // is that of a daemon that was before, whose object still is.
  explicit Daemon(const std::vector<std::string>& arguments,
                  const std::vector<std::string>& wrapper = {},
                  const std::filesystem::path& run_dir = {});
  ~Daemon();

  Process& process() noexcept { return *process_; }
  const std::filesystem::path& run_dir() const noexcept { return run_dir_; }

  // SIGTERM; its exit status.
  std::optional<int> Stop();

  // From here on all calls are those of the session's user.
  void UseSession(const std::string& key) { session_ = key; }

  v1::Ports::Stub& ports() noexcept { return *ports_; }
  v1::Bindings::Stub& bindings() noexcept { return *bindings_; }
  v1::RxSockets::Stub& rx_sockets() noexcept { return *rx_sockets_; }
  v1::Flows::Stub& flows() noexcept { return *flows_; }
  v1::Tokens::Stub& tokens() noexcept { return *tokens_; }

  // What every test asks for. They fail the test, and answer an empty message, if the daemon
  // does not answer OK.
  v1::Port GetPort(const std::string& name);
  v1::Worker GetWorker(int index);
  v1::Binding GetBinding(const std::string& name);
  v1::RxSocket GetRxSocket(const std::string& name, bool audit = false);
  v1::Binding Bind(const std::string& name, const std::string& port, std::uint64_t pages,
                   std::uint32_t page_bytes = 4096, std::uint32_t queues = 1);
  // Gives a binding a queue, whichever has it now.
  v1::Binding AttachQueue(const std::string& name, const std::string& port, std::uint32_t queue);
  v1::Binding Unbind(const std::string& name, std::uint32_t drain_timeout_ms = 0);
  bool HasBinding(const std::string& name);
  int RxSockets();
  v1::OpenRxSocketResponse OpenRxSocket(const v1::OpenRxSocketRequest& request);
  v1::OpenRxSocketResponse OpenRxSocket(const std::string& name, const std::string& session = "");
  // To one rx socket or several.
  v1::Flow AddFlow(const std::vector<std::string>& rx_sockets, const v1::Match& match);
  v1::Flow AddFlow(const std::string& rx_socket, const v1::Match& match,
                   const std::string& session = "");
  v1::Flow GetFlow(std::uint64_t id);

 private:
  template <typename Stub, typename Request, typename Response>
  Response Call(Stub& stub,
                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                const Request& request);

  TempDir own_run_dir_;
  const std::filesystem::path run_dir_;
  std::unique_ptr<Process> process_;
  std::string session_;
  std::unique_ptr<v1::Ports::Stub> ports_;
  std::unique_ptr<v1::Bindings::Stub> bindings_;
  std::unique_ptr<v1::RxSockets::Stub> rx_sockets_;
  std::unique_ptr<v1::Flows::Stub> flows_;
  std::unique_ptr<v1::Tokens::Stub> tokens_;
  std::unique_ptr<v1::Workers::Stub> workers_;
};

// Moves the calling thread, and the processes that it starts, into a network of their own.
// The kernel removes it with the last of them.
class NetworkNamespace {
 public:
  // Check ok() first: without root there is none.
  NetworkNamespace();
  ~NetworkNamespace();
  NetworkNamespace(const NetworkNamespace&) = delete;
  NetworkNamespace& operator=(const NetworkNamespace&) = delete;

  bool ok() const noexcept { return previous_ >= 0; }

 private:
  int previous_ = -1;
};

// Runs "ip <arguments>", words separated by spaces. Fails the test if ip does.
void Ip(const std::string& arguments);

}  // namespace rxtoken::test
