// SPDX-License-Identifier: Apache-2.0
// main.cc - rxtokend: reads its configuration, starts the dataplane, and serves until it is
// told to stop.
//
// Threads: this one starts everything, then sleeps until SIGTERM or SIGINT, then stops
// everything; "rxtoken/ctl" runs the control loop in between. The dataplane adds its
// workers, gRPC its pool.
#include <linux/capability.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "control/capabilities.h"
#include "control/config.h"
#include "control/control_loop.h"
#include "control/descriptor_server.h"
#include "control/log.h"
#include "control/manager.h"
#include "control/run_dir.h"
#include "control/services.h"
#include "control/unique_fd.h"
#include "dataplane/dataplane.h"

namespace rxtoken {
namespace {

constexpr std::chrono::seconds kSecond{1};
constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

constexpr const char* kExamples = R"(
Examples:
  Generated packets, no root, hugepages or NIC needed:
    rxtokend --port p0=net_null0,size=64 --bind b0=p0:0,size=64MiB
  A network interface through its kernel driver, two queues on two pinned workers:
    rxtokend --worker 2,3 --port 'p0=net_af_packet0,iface=eth1,qpairs=2;queues=2' \
             --bind b0=p0:0,p0:1,size=1GiB
  A capture file:
    rxtokend --port p0=net_pcap0,rx_pcap=traffic.pcap --bind b0=p0:0

Exit status: 0 stopped by SIGTERM or SIGINT, 1 failure at run time, 2 wrong usage or
configuration.)";

int Fail(const Status& status, int exit_code) {
  fprintf(stderr, "rxtokend: %s\n", status.message().c_str());
  return exit_code;
}

// Wrong configuration, or a failure of the machine?
int ExitCode(const Status& status) {
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kAlreadyExists:
    case Code::kFailedPrecondition: return kExitUsage;
    default: return kExitFailure;
  }
}

// The configuration file with the flags on top. Exits after --help, --version and errors.
Config ReadCommandLine(int argc, char** argv) {
  std::string file, run_dir, poll, eal;
  std::vector<std::string> ports, bindings, workers;
  bool hugepages = false;
  std::uint32_t memory_mib = 0;

  CLI::App app("rxtokend: receives packets into registered buffers and lends them as tokens");
  app.footer(kExamples);
  app.set_version_flag("--version", "rxtokend " RXTOKEN_VERSION);
  app.add_option("--config", file, "YAML file; flags add to it and win over it")->type_name("FILE");
  app.add_option("--run-dir", run_dir,
                 "directory of api.sock and descriptors.sock (default: $RXTOKEN_RUN_DIR, "
                 "$RUNTIME_DIRECTORY, /run/rxtoken for root, else below $XDG_RUNTIME_DIR or /tmp)")
      ->type_name("DIR")
      ->check([](const std::string& dir) { return dir.empty() ? "the path is empty" : ""; });
  app.add_option("--port", ports,
                 "NAME=DEVICE[;queues=N][;ring=N][;exception_tap=INTERFACE], DEVICE as DPDK writes "
                 "it; can be repeated")
      ->type_name("PORT")
      ->allow_extra_args(false);
  app.add_option("--bind", bindings,
                 "NAME=PORT:QUEUE[,PORT:QUEUE...][,size=64MiB][,page=4096][,memory=plain|huge]; "
                 "can be repeated")
      ->type_name("BINDING")
      ->allow_extra_args(false);
  app.add_option("--worker", workers,
                 "CPU of a worker, or 'any'; a list with commas, or repeated (default: any)")
      ->type_name("CPU")
      ->allow_extra_args(false)
      ->delimiter(',');
  app.add_option("--poll", poll, "adaptive: idle workers nap (default); busy: they never sleep")
      ->type_name("MODE")
      ->check(CLI::IsMember({"adaptive", "busy"}).description(""));
  app.add_flag("--hugepages", hugepages, "DPDK's own memory in huge pages; probe PCI devices");
  app.add_option("--memory-mib", memory_mib, "DPDK's own memory (default: 256)")
      ->type_name("MIB")
      ->check(CLI::Range(1u, std::numeric_limits<std::uint32_t>::max()).description(""));
  app.add_option("--eal", eal, "more arguments for DPDK, separated by spaces")->type_name("ARGS");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    exit(app.exit(help_or_version));
  } catch (const CLI::ParseError& error) {
    fprintf(stderr, "rxtokend: %s; see --help\n", error.what());
    exit(kExitUsage);
  }

  const auto value_or_exit = [](auto result) {
    if (!result.ok()) exit(Fail(result.status(), kExitUsage));
    return *std::move(result);
  };
  Config config;
  if (!file.empty()) config = value_or_exit(LoadConfig(file));
  if (!run_dir.empty()) config.run_dir = run_dir;
  if (config.run_dir.empty()) config.run_dir = DefaultRunDir();
  for (const std::string& port : ports) {
    config.ports.push_back(value_or_exit(ParsePortFlag(port)));
  }
  for (const std::string& binding : bindings) {
    config.bindings.push_back(value_or_exit(ParseBindFlag(binding)));
  }
  DataplaneOptions& dataplane = config.dataplane;
  if (!workers.empty()) dataplane.worker_cpus.clear();
  for (const std::string& worker : workers) {
    dataplane.worker_cpus.push_back(value_or_exit(ParseWorkerFlag(worker)));
  }
  if (!poll.empty()) dataplane.poll = poll == "busy" ? PollMode::kBusy : PollMode::kAdaptive;
  if (hugepages) dataplane.hugepages = true;
  if (memory_mib != 0) dataplane.memory_mib = memory_mib;
  for (std::string& arg : CLI::detail::split_up(eal)) {
    dataplane.eal_args.push_back(std::move(arg));
  }
  return config;
}

// Applies `apply` to each item; the first error is answered, and says where it comes from.
template <typename Request, typename Apply>
Status ApplyAll(const std::vector<Item<Request>>& items, Apply apply) {
  for (const Item<Request>& item : items) {
    const Status status = apply(item.request);
    if (!status.ok()) return Status(status.code(), item.where + ": " + status.message());
  }
  return Status();
}

Status ApplyConfig(const Config& config, Manager& manager) {
  const Caller caller = manager.Configuration();
  Status status = ApplyAll(config.ports, [&](const auto& r) { return manager.OpenPort(r); });
  if (status.ok()) status = manager.CheckTenants();
  if (status.ok()) {
    status =
        ApplyAll(config.bindings, [&](const auto& r) { return manager.Bind(caller, r).status(); });
  }
  if (status.ok()) {
    status = ApplyAll(config.rx_sockets,
                      [&](const auto& r) { return manager.OpenRxSocket(caller, r).status(); });
  }
  if (status.ok()) {
    status =
        ApplyAll(config.flows, [&](const auto& r) { return manager.AddFlow(caller, r).status(); });
  }
  return status;
}

// A session needs a descriptor for its connection, and each rx socket three: as many as we
// may have.
void RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Blocks the signals that stop us, in all threads made from now on, and answers a descriptor
// that becomes readable when one arrives.
UniqueFd CatchStopSignals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return UniqueFd(signalfd(-1, &signals, SFD_CLOEXEC));
}

void WaitForStopSignal(const UniqueFd& signals) {
  signalfd_siginfo signal = {};
  while (read(signals.get(), &signal, sizeof(signal)) != sizeof(signal)) {
  }
  LogInfo("stopping", {{"signal", signal.ssi_signo}, {"sender_pid", signal.ssi_pid}});
}

// While there is one, a stop signal ends the process at once. DPDK may wait for something that
// never comes.
class EndAtStopSignal {
 public:
  explicit EndAtStopSignal(const UniqueFd& signals) : over_(eventfd(0, EFD_CLOEXEC)) {
    thread_ = std::thread([this, &signals] {
      std::array<pollfd, 2> events = {{{.fd = over_.get(), .events = POLLIN, .revents = 0},
                                       {.fd = signals.get(), .events = POLLIN, .revents = 0}}};
      while (poll(events.data(), events.size(), -1) < 0) {
      }
      if (events[0].revents != 0) return;
      WaitForStopSignal(signals);
      _exit(0);
    });
  }
  ~EndAtStopSignal() {
    eventfd_write(over_.get(), 1);
    thread_.join();
  }

 private:
  const UniqueFd over_;
  std::thread thread_;
};

// Tells systemd, if it started us with Type=notify, that we serve.
void NotifyReady() {
  const char* const path = getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::size_t length =
      std::string_view(path).copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';  // an abstract name
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  constexpr std::string_view kReady = "READY=1";
  sendto(socket.get(), kReady.data(), kReady.size(), MSG_NOSIGNAL,
         reinterpret_cast<const sockaddr*>(&address),
         static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length));
}

void WarnIfAllMayCall(const Config& config) {
  if (config.tcp.address.empty() || !config.tcp.certificate.empty()) return;
  LogWarning("no_certificate",
             {{"tcp", config.tcp.address},
              {"meaning", config.access.configured ? "nobody can have a session there"
                                                   : "every user of this host may do everything"}});
}

// Of what the process was given for its start, what it still needs: nothing for most drivers.
std::uint64_t NeededCapabilities(const Config& config, Dataplane& dataplane) {
  // Each buffer that is bound is locked in memory for the device.
  std::uint64_t needed = config.dataplane.hugepages ? CapabilityBit(CAP_IPC_LOCK) : 0;
  for (std::uint32_t port = 0; port < dataplane.ports(); port++) {
    // Its flow rules are the kernel's.
    if (dataplane.GetPort(port).driver == "net_tap") needed |= CapabilityBit(CAP_NET_ADMIN);
  }
  return needed;
}

int Serve(const Config& config, const UniqueFd& stop_signals) {
  Result<RunDir> run_dir = RunDir::Claim(config.run_dir, config.access_gid);
  if (!run_dir.ok()) {
    const bool busy = run_dir.status().code() == Code::kAlreadyExists;
    return Fail(run_dir.status(), busy ? kExitFailure : ExitCode(run_dir.status()));
  }
  std::optional<EndAtStopSignal> starting(std::in_place, stop_signals);
  Result<std::unique_ptr<Dataplane>> dataplane = Dataplane::Start(config.dataplane);
  if (!dataplane.ok()) return Fail(dataplane.status(), ExitCode(dataplane.status()));
  Manager manager(**dataplane, config.access);
  const Status applied = ApplyConfig(config, manager);
  if (!applied.ok()) return Fail(applied, ExitCode(applied));
  starting.reset();

  Result<std::unique_ptr<ControlLoop>> created = ControlLoop::Create();
  if (!created.ok()) return Fail(created.status(), kExitFailure);
  ControlLoop& loop = **created;
  loop.SetHousekeeping([&] {
    const bool draining = manager.ReapBindings();
    return manager.ExpireLeases() || draining;
  });
  Result<Timer> every_second = Timer::Create(loop, [&] {
    (*dataplane)->TrimMemory();
    manager.EndExpiredSessions();
  });
  if (!every_second.ok()) return Fail(every_second.status(), kExitFailure);
  every_second->Set(kSecond, kSecond);
  const auto descriptors = DescriptorServer::Start(loop, manager, run_dir->descriptor_socket());
  if (!descriptors.ok()) return Fail(descriptors.status(), kExitFailure);

  const std::uint64_t needed_capabilities = NeededCapabilities(config, **dataplane);
  std::thread control([&] {
    pthread_setname_np(pthread_self(), "rxtoken/ctl");
    loop.RunUntilStopped();
  });
  int exit_code = 0;
  {
    const auto api = ApiServer::Start(loop, manager, run_dir->api_socket(), config.tcp);
    if (api.ok()) {
      const Status dropped = KeepCapabilities(needed_capabilities);
      if (!dropped.ok()) LogWarning("capabilities_kept", {{"reason", dropped.message()}});
      WarnIfAllMayCall(config);
      LogInfo("ready", {{"api_socket", run_dir->api_socket().path},
                        {"descriptor_socket", run_dir->descriptor_socket().path},
                        {"tcp", (*api)->tcp_address()}});
      NotifyReady();
      WaitForStopSignal(stop_signals);
    } else {
      exit_code = Fail(api.status(), ExitCode(api.status()));
    }
  }  // all calls have ended
  loop.Stop();
  control.join();
  // Before the connections, so that applications find out that it is the daemon that stopped.
  dataplane->reset();
  return exit_code;
}

int Main(int argc, char** argv) {
  // Fixed: else the largest request that ever came raises it, and what requests took is kept.
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
  const Config config = ReadCommandLine(argc, argv);
  RaiseDescriptorLimit();
  const UniqueFd stop_signals = CatchStopSignals();
  const int exit_code = Serve(config, stop_signals);
  if (exit_code == 0) LogInfo("stopped");
  return exit_code;
}

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) { return rxtoken::Main(argc, argv); }
