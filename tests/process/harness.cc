// SPDX-License-Identifier: Apache-2.0
#include "tests/process/harness.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

namespace rxtoken::test {

using std::chrono::milliseconds;

namespace {

std::string ReadFile(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "rxtoken-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    std::perror(pattern.c_str());
    std::abort();
  }
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Process::Process(const std::vector<std::string>& argv) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const std::string out = directory_.path() / "out";
  const std::string err = directory_.path() / "err";
  int input[2];
  if (pipe2(input, O_CLOEXEC) != 0) {
    ADD_FAILURE() << "pipe2: " << std::strerror(errno);
    return;
  }

  std::signal(SIGPIPE, SIG_IGN);  // Tell() to a process that has died is a failure, not our end
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    // Only async-signal-safe calls from here to exec.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    std::signal(SIGPIPE, SIG_DFL);
    dup2(input[0], STDIN_FILENO);
    dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600), STDOUT_FILENO);
    dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600), STDERR_FILENO);
    execvp(words[0], words.data());
    _exit(127);
  }
  close(input[0]);
  input_ = input[1];
}

Process::~Process() {
  if (Running()) {
    Signal(SIGKILL);
    Wait();
  }
  if (input_ >= 0) close(input_);
  // A failed test is read from what its processes said.
  if (testing::Test::HasFailure() && !Errors().empty()) {
    std::fprintf(stderr, "-- standard error of process %d:\n%s--\n", pid_, Errors().c_str());
  }
}

std::string Process::Output() const { return ReadFile(directory_.path() / "out"); }
std::string Process::Errors() const { return ReadFile(directory_.path() / "err"); }

std::string Process::FindLine(std::string_view prefix) const {
  std::istringstream lines(Output());
  for (std::string line; std::getline(lines, line);) {
    // A line without end is not complete yet.
    if (!lines.eof() && line.starts_with(prefix)) return line;
  }
  return "";
}

std::string Process::WaitForLine(std::string_view prefix) {
  std::string found;
  WaitUntil([&] {
    const bool running = Running();  // before reading: its last words count
    found = FindLine(prefix);
    return !found.empty() || !running;
  });
  return found;
}

void Process::CloseInput() {
  close(input_);
  input_ = -1;
}

void Process::Tell(std::string_view line) {
  const std::string text = std::string(line) + "\n";
  EXPECT_EQ(write(input_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

void Process::Signal(int signal) {
  if (Running()) kill(pid_, signal);
}

bool Process::Running() { return pid_ > 0 && !Wait(milliseconds(0)).has_value(); }

std::optional<int> Process::Wait(milliseconds timeout) {
  WaitUntil(
      [&] {
        int status = 0;
        if (!status_ && pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
          status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        }
        return status_.has_value();
      },
      timeout);
  return status_;
}

std::ptrdiff_t Process::Descriptors() const {
  const std::filesystem::path fds = "/proc/" + std::to_string(pid_) + "/fd";
  return std::distance(std::filesystem::directory_iterator(fds), {});
}

std::uint64_t Process::ResidentKiB() const {
  std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoull(line.substr(6));
  }
  return 0;
}

bool FullCampaign() { return std::getenv("RXTOKEN_CAMPAIGN") != nullptr; }

int RunProgram(const std::vector<std::string>& argv, std::string* output, std::string* errors) {
  Process process(argv);
  const int status = process.Wait().value_or(-1);
  if (output != nullptr) *output = process.Output();
  if (errors != nullptr) *errors = process.Errors();
  return status;
}

Daemon::Daemon(const std::vector<std::string>& arguments, const std::vector<std::string>& wrapper,
               const std::filesystem::path& run_dir)
    : run_dir_(run_dir.empty() ? own_run_dir_.path() : run_dir) {
  std::vector<std::string> argv = wrapper;
  argv.insert(argv.end(), {RXTOKEND, "--run-dir", run_dir_});
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  process_ = std::make_unique<Process>(argv);

  // Not that of a daemon which was there before.
  grpc::ChannelArguments own_connection;
  own_connection.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel("unix:" + (run_dir_ / "api.sock").string(),
                                grpc::InsecureChannelCredentials(), own_connection);
  ports_ = v1::Ports::NewStub(channel);
  bindings_ = v1::Bindings::NewStub(channel);
  rx_sockets_ = v1::RxSockets::NewStub(channel);
  flows_ = v1::Flows::NewStub(channel);
  tokens_ = v1::Tokens::NewStub(channel);
  workers_ = v1::Workers::NewStub(channel);

  WaitUntil([&] {
    const bool running = process_->Running();
    return process_->Errors().find("event=ready") != std::string::npos || !running;
  });
}

Daemon::~Daemon() {
  // A sanitizer that had something to report changes the exit status.
  if (process_->Running()) {
    EXPECT_EQ(Stop(), 0) << process_->Errors();
  }
}

std::optional<int> Daemon::Stop() {
  process_->Signal(SIGTERM);
  return process_->Wait();
}

// Unwraps what the daemon answered.
template <typename Stub, typename Request, typename Response>
Response Daemon::Call(Stub& stub,
                      grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                      const Request& request) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  if (!session_.empty()) context.AddMetadata("rxtoken-session", session_);
  Response response;
  const grpc::Status status = (stub.*method)(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_code() << ": " << status.error_message() << " for "
                           << request.ShortDebugString();
  return response;
}

v1::Port Daemon::GetPort(const std::string& name) {
  v1::GetPortRequest request;
  request.set_name(name);
  return Call(*ports_, &v1::Ports::Stub::GetPort, request);
}

v1::Worker Daemon::GetWorker(int index) {
  return Call(*workers_, &v1::Workers::Stub::ListWorkers, v1::ListWorkersRequest()).workers(index);
}

v1::Binding Daemon::GetBinding(const std::string& name) {
  v1::GetBindingRequest request;
  request.set_name(name);
  return Call(*bindings_, &v1::Bindings::Stub::GetBinding, request);
}

v1::RxSocket Daemon::GetRxSocket(const std::string& name, bool audit) {
  v1::GetRxSocketRequest request;
  request.set_name(name);
  request.set_audit(audit);
  return Call(*rx_sockets_, &v1::RxSockets::Stub::GetRxSocket, request);
}

v1::Binding Daemon::Bind(const std::string& name, const std::string& port, std::uint64_t pages,
                         std::uint32_t page_bytes, std::uint32_t queues) {
  v1::BindRequest request;
  request.set_name(name);
  request.set_buffer_bytes(pages * page_bytes);
  request.set_page_bytes(page_bytes);
  request.set_memory(v1::MEMORY_PLAIN);
  for (std::uint32_t queue = 0; queue < queues; queue++) {
    v1::QueueId& id = *request.add_queues();
    id.set_port(port);
    id.set_queue(queue);
  }
  return Call(*bindings_, &v1::Bindings::Stub::Bind, request);
}

v1::Binding Daemon::AttachQueue(const std::string& name, const std::string& port,
                                std::uint32_t queue) {
  v1::AttachQueuesRequest request;
  request.set_name(name);
  v1::QueueId& id = *request.add_queues();
  id.set_port(port);
  id.set_queue(queue);
  return Call(*bindings_, &v1::Bindings::Stub::AttachQueues, request);
}

v1::Binding Daemon::Unbind(const std::string& name, std::uint32_t drain_timeout_ms) {
  v1::UnbindRequest request;
  request.set_name(name);
  request.set_drain_timeout_ms(drain_timeout_ms);
  return Call(*bindings_, &v1::Bindings::Stub::Unbind, request);
}

bool Daemon::HasBinding(const std::string& name) {
  const auto list = Call(*bindings_, &v1::Bindings::Stub::ListBindings, v1::ListBindingsRequest());
  return std::any_of(list.bindings().begin(), list.bindings().end(),
                     [&](const v1::Binding& binding) { return binding.name() == name; });
}

int Daemon::RxSockets() {
  return Call(*rx_sockets_, &v1::RxSockets::Stub::ListRxSockets, v1::ListRxSocketsRequest())
      .rx_sockets_size();
}

v1::OpenRxSocketResponse Daemon::OpenRxSocket(const v1::OpenRxSocketRequest& request) {
  return Call(*rx_sockets_, &v1::RxSockets::Stub::OpenRxSocket, request);
}

v1::OpenRxSocketResponse Daemon::OpenRxSocket(const std::string& name, const std::string& session) {
  v1::OpenRxSocketRequest request;
  request.set_name(name);
  request.set_session(session);
  return OpenRxSocket(request);
}

v1::Flow Daemon::AddFlow(const std::vector<std::string>& rx_sockets, const v1::Match& match) {
  v1::AddFlowRequest request;
  request.mutable_rx_sockets()->Assign(rx_sockets.begin(), rx_sockets.end());
  *request.mutable_match() = match;
  return Call(*flows_, &v1::Flows::Stub::AddFlow, request);
}

v1::Flow Daemon::AddFlow(const std::string& rx_socket, const v1::Match& match,
                         const std::string& session) {
  v1::AddFlowRequest request;
  request.add_rx_sockets(rx_socket);
  *request.mutable_match() = match;
  request.set_session(session);
  return Call(*flows_, &v1::Flows::Stub::AddFlow, request);
}

v1::Flow Daemon::GetFlow(std::uint64_t id) {
  const auto list = Call(*flows_, &v1::Flows::Stub::ListFlows, v1::ListFlowsRequest());
  for (const v1::Flow& flow : list.flows()) {
    if (flow.id() == id) return flow;
  }
  ADD_FAILURE() << "no flow rule " << id;
  return {};
}

NetworkNamespace::NetworkNamespace() {
  const int previous = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  if (previous >= 0 && unshare(CLONE_NEWNET) == 0) {
    previous_ = previous;
  } else if (previous >= 0) {
    close(previous);
  }
}

NetworkNamespace::~NetworkNamespace() {
  if (previous_ < 0) return;
  setns(previous_, CLONE_NEWNET);
  close(previous_);
}

void Ip(const std::string& arguments) {
  std::vector<std::string> argv = {"ip"};
  std::istringstream words(arguments);
  for (std::string word; words >> word;) argv.push_back(word);
  std::string errors;
  EXPECT_EQ(RunProgram(argv, nullptr, &errors), 0) << "ip " << arguments << ": " << errors;
}

}  // namespace rxtoken::test
