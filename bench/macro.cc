// SPDX-License-Identifier: Apache-2.0
// macro.cc - one measurement of the whole path; bench/macro.py runs many and makes a table.
//
// Question:  how many packets a second does a worker lend to an application that holds W of
//            them, on one core each?
// Baselines: `bare`, which receives into the same kind of pool and frees at once, and so
//            reuses the same 32 pages for ever; `hold`, which keeps W mbufs before it frees
//            the oldest, without tokens and without an application. With lump=N it frees N at
//            once, as an application may do; with pool=ring the mbufs are DPDK's own, behind its
//            default ring and a cache of 512.
// What would change our mind: less than 0.35 of bare with 256 held at 64 bytes.
//
// `ours` is the dataplane of rxtokend in this process, and an application in another one that
// reads the rings as the SDK does: it holds `hold` fragments in order of arrival, reads the
// first 8 bytes of each payload, or all of them, and returns the oldest.
#include <fcntl.h>
#include <rte_ethdev.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "dataplane/buffer_pool.h"
#include "dataplane/dataplane.h"
#include "dataplane/eal.h"
#include "dataplane/port.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/abi/token.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string mode;    // ours, bare or hold
  std::string device;  // for DPDK
  std::uint32_t hold = 256;
  bool read_all = false;
  std::uint32_t rules = 0;  // exact UDP flows; 0: one rule for all frames, whole
  std::uint32_t sockets = 1;
  std::uint32_t lump = 0;  // baselines: how many are freed at once; 0: as many as came
  bool ring = false;       // baselines: DPDK's default pool
  std::uint32_t idle = 0;  // more rx sockets, attached, that no rule names
  bool updates = false;    // a rule changes each millisecond
  double seconds = 1;
  std::uint32_t pages = 0;  // 0: enough for what is held and what waits in the rings
  std::uint64_t buffer_bytes = 0;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "macro: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T OrDie(Result<T> result) {
  if (!result.ok()) Die(result.status().ToString());
  return std::move(*result);
}

void Pin(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<unsigned>(cpu), &one);
  ::sched_setaffinity(0, sizeof one, &one);
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- the application -------------------------------------------------------------------------

// What both processes share besides rings and buffer.
struct Shared {
  std::atomic<std::uint32_t> stop{0};  // 1: return what is held; 2: exit
  std::atomic<std::uint64_t> received{0};
  std::atomic<std::uint64_t> gap_ns{0};  // the longest time without a fragment; reset from outside
};

struct ApplicationSocket {
  LaneReader lane;
  std::vector<std::uint32_t> held;  // a ring
  std::uint64_t first = 0, last = 0;
};

std::uint64_t ReadPayload(const std::uint8_t* payload, std::size_t length, bool all) {
  std::uint64_t sum = 0;
  std::size_t at = 0;
  do {
    std::uint64_t word;
    std::memcpy(&word, payload + at, sizeof word);
    sum |= word;
    at += 8;
  } while (all && at + 8 <= length);
  return sum;
}

void Application(const Arguments& arguments, Shared& shared,
                 std::vector<ApplicationSocket>& sockets, const std::uint8_t* buffer,
                 unsigned page_shift) {
  std::array<Descriptor, 128> batch;
  std::uint64_t sum = 0;
  std::uint64_t received = 0;
  const std::uint64_t window = std::max(1u, arguments.hold / arguments.sockets);
  auto last = Clock::now();
  bool was_idle = false;
  for (;;) {
    const std::uint32_t stop = shared.stop.load(std::memory_order_acquire);
    bool idle = true;
    for (ApplicationSocket& socket : sockets) {
      const std::uint64_t mask = socket.held.size() - 1;
      const std::size_t n = socket.lane.Poll(batch);
      for (std::size_t i = 0; i < n; i++) {
        const Descriptor& d = batch[i];
        if (d.kind != DescriptorKind::kFragment) continue;
        const PageToken token = PageToken::FromWire(d.token);
        sum |= ReadPayload(
            buffer + (std::uint64_t{static_cast<std::uint32_t>(token.page())} << page_shift) +
                d.offset,
            d.length, arguments.read_all);
        socket.held[socket.last++ & mask] = d.token;
        received++;
      }
      if (n != 0) socket.lane.Consume(n);
      const std::uint64_t keep = stop != 0 ? 0 : window;
      while (socket.last - socket.first > keep) {
        const std::uint64_t at = socket.first & mask;
        const std::size_t lot = std::min<std::uint64_t>(
            {socket.last - socket.first - keep, mask + 1 - at, std::uint64_t{128}});
        const std::size_t returned = socket.lane.Return(std::span(&socket.held[at], lot));
        socket.first += returned;
        if (returned != lot) break;
      }
      idle &= n == 0;
    }
    // Only when there was a pause: reading the clock at every poll would be noticed.
    if (!idle && was_idle) {
      const auto now = Clock::now();
      const auto gap = static_cast<std::uint64_t>((now - last).count());
      if (gap > shared.gap_ns.load(std::memory_order_relaxed)) shared.gap_ns = gap;
    }
    if (idle && !was_idle) last = Clock::now();
    was_idle = idle;
    if (idle) {
      shared.received.store(received, std::memory_order_release);
      if (stop == 2) break;
      __builtin_ia32_pause();
    }
  }
  if (sum == 1) std::puts("");  // the payload was really read
}

// ---- ours ------------------------------------------------------------------------------------

void SendFd(int socket, int fd) {
  char byte = 0;
  iovec io{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket, &message, 0) != 1) Die("sendmsg");
}

int ReceiveFd(int socket) {
  char byte = 0;
  iovec io{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(socket, &message, 0) != 1) std::exit(1);  // the other side gave up
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  return fd;
}

void* Map(int fd, std::size_t bytes, int protection) {
  void* p = ::mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (p == MAP_FAILED) Die("mmap");
  return p;
}

void ApplicationProcess(const Arguments& arguments, Shared& shared, int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Pin(1);
  const auto* buffer =
      static_cast<const std::uint8_t*>(Map(ReceiveFd(socket), arguments.buffer_bytes, PROT_READ));
  std::uint64_t capacity = 1;
  while (capacity < arguments.hold + 2 * kDefaultRingEntries) capacity *= 2;
  std::vector<ApplicationSocket> sockets;
  for (std::uint32_t i = 0; i < arguments.sockets; i++) {
    const auto* descriptors = static_cast<const DescriptorRing*>(
        Map(ReceiveFd(socket), DescriptorRingBytes(kDefaultRingEntries), PROT_READ));
    auto* returns = static_cast<ReturnRing*>(
        Map(ReceiveFd(socket), ReturnRingBytes(kDefaultRingEntries), PROT_READ | PROT_WRITE));
    sockets.push_back(
        {.lane = LaneReader(descriptors, returns), .held = std::vector<std::uint32_t>(capacity)});
  }
  const char ready = 1;
  if (::write(socket, &ready, 1) != 1) Die("write");
  Application(arguments, shared, sockets, buffer, 12);
}

FlowMatch ExactFlow(std::uint32_t i) {
  FlowMatch match;
  const auto address = [](std::uint8_t second, std::uint8_t third, std::uint8_t fourth) {
    IpPrefix prefix{.family = IpFamily::kV4, .length = 32, .address = {}};
    prefix.address = {10, second, third, fourth};
    return prefix;
  };
  match.source = address(0, static_cast<std::uint8_t>(i >> 8), static_cast<std::uint8_t>(i));
  match.destination = address(1, 0, 0);
  match.protocol = 17;
  match.source_port = static_cast<std::uint16_t>(10000 + i);
  match.destination_port = 7000;
  return match;
}

void MeasureOurs(const Arguments& arguments) {
  auto* const shared = new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) Die("socketpair");
  const pid_t application = ::fork();
  if (application == 0) {
    ::close(pair[0]);
    ApplicationProcess(arguments, *shared, pair[1]);
    std::_Exit(0);
  }
  ::close(pair[1]);

  DataplaneOptions options;
  options.worker_cpus = {0};
  options.poll = PollMode::kBusy;
  const auto dataplane = OrDie(Dataplane::Start(options));
  std::vector<std::uint64_t> sockets;
  for (std::uint32_t i = 0; i < arguments.idle; i++) {
    const auto idle =
        OrDie(dataplane->OpenRxSocket({.name = "idle" + std::to_string(i), .ring_entries = 64}));
    ::close(OrDie(dataplane->Attach(idle)).doorbell);
  }
  std::vector<FlowRule> rules;
  for (std::uint32_t i = 0; i < arguments.sockets; i++) {
    RxSocketOptions socket;
    socket.name = "s" + std::to_string(i);
    socket.content = arguments.rules == 0 ? Content::kFrame : Content::kPayload;
    sockets.push_back(OrDie(dataplane->OpenRxSocket(socket)));
  }
  for (std::uint32_t i = 0; i < std::max(1u, arguments.rules); i++) {
    FlowRule rule{.id = i + 1, .rx_sockets = {sockets[i % sockets.size()]}};
    if (arguments.rules != 0) rule.match = ExactFlow(i);
    rules.push_back(rule);
  }
  OrDie(dataplane->OpenPort({.name = "p0", .device = arguments.device}));
  const std::uint64_t binding = OrDie(dataplane->Bind({.name = "b0",
                                                       .buffer_bytes = arguments.buffer_bytes,
                                                       .page_bytes = 4096,
                                                       .memory = Memory::kPlain,
                                                       .queues = {{0, 0}}}));
  const BufferView buffer = OrDie(dataplane->GetBuffer(binding));
  SendFd(pair[0], buffer.fd);
  for (const std::uint64_t socket : sockets) {
    const Attachment attachment = OrDie(dataplane->Attach(socket));
    SendFd(pair[0], attachment.descriptor_fd);
    SendFd(pair[0], attachment.return_fd);
    ::close(attachment.doorbell);
  }
  char ready;
  if (::read(pair[0], &ready, 1) != 1) Die("the application did not start");
  dataplane->ChangeRules({}, rules);

  const auto totals = [&] {
    RxSocketInfo sum;
    for (const std::uint64_t socket : sockets) {
      const RxSocketInfo info = OrDie(dataplane->GetRxSocket(socket, false));
      if (info.lent != info.returned + info.outstanding) Die("the books do not balance");
      sum.messages += info.messages;
      sum.lent += info.lent;
      sum.returned += info.returned;
      sum.outstanding += info.outstanding;
      for (std::size_t i = 0; i < kDropReasons; i++) sum.drops[i] += info.drops[i];
      for (const std::uint64_t refused : info.refusals) {
        if (refused != 0) Die("a token was refused");
      }
    }
    return sum;
  };
  std::size_t updates = 0;
  const auto wait = [&](double seconds) {
    const auto start = Clock::now();
    while (SecondsSince(start) < seconds) {
      ::usleep(1000);
      if (!arguments.updates) continue;
      FlowRule& rule = rules[++updates % rules.size()];
      rule.priority ^= 1;
      dataplane->ChangeRules({}, {&rule, 1});
    }
  };
  wait(0.2);  // warm
  const RxSocketInfo before = totals();
  shared->gap_ns = 0;
  const auto start = Clock::now();
  wait(arguments.seconds);
  const RxSocketInfo after = totals();
  const double seconds = SecondsSince(start);
  const double gap_us = static_cast<double>(shared->gap_ns.load()) / 1e3;

  // The end: no rule any more, everything comes home.
  std::vector<std::uint64_t> all;
  for (const FlowRule& rule : rules) all.push_back(rule.id);
  dataplane->ChangeRules(all, {});
  shared->stop.store(1, std::memory_order_release);
  const auto deadline = Clock::now();
  RxSocketInfo end;
  do {
    end = totals();
    if (SecondsSince(deadline) > 5) Die("tokens do not come back");
  } while (end.outstanding != 0);
  shared->stop.store(2, std::memory_order_release);
  ::waitpid(application, nullptr, 0);
  if (shared->received.load() != end.lent) Die("the application did not see every fragment");
  const auto ring_full = after.drops[static_cast<std::size_t>(DropReason::kRingFull)] -
                         before.drops[static_cast<std::size_t>(DropReason::kRingFull)];
  std::printf("%.3f %.3f %.1f\n",
              static_cast<double>(after.messages - before.messages) / seconds / 1e6,
              static_cast<double>(ring_full) / seconds / 1e6, gap_us);
}

// ---- baselines -------------------------------------------------------------------------------

void MeasureBaseline(const Arguments& arguments) {
  DataplaneOptions options;
  options.memory_mib = 512;  // for the ring's mbufs
  if (Status s = StartEal(options); !s.ok()) Die(s.ToString());
  Pin(0);
  this_worker = 0;
  auto port = OrDie(Port::Open({.name = "p0", .device = arguments.device}, 0));
  auto pool = OrDie(BufferPool::Create(
      OrDie(Buffer::Create("b0", arguments.buffer_bytes, 4096, Memory::kPlain)), 1));
  pool->set_copied_into(port->writes_payload());
  rte_mempool* const ring =
      arguments.ring
          ? rte_pktmbuf_pool_create("ring", static_cast<unsigned>(arguments.buffer_bytes / 4096),
                                    512, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY)
          : nullptr;
  if (arguments.ring && ring == nullptr) Die("DPDK has no memory for that many mbufs");
  port->Attach(0, ring != nullptr ? ring : pool->mempool());

  const bool hold = arguments.mode == "hold";
  std::uint64_t capacity = 1;
  while (capacity < arguments.hold + arguments.lump + 64) capacity *= 2;
  std::vector<rte_mbuf*> held(capacity);
  std::uint64_t first = 0, last = 0, packets = 0;
  PageRecycler recycler;
  const auto round = [&] {
    rte_mbuf* mbufs[32];
    const std::uint16_t n = rte_eth_rx_burst(port->id(), 0, mbufs, 32);
    packets += n;
    if (!hold) return rte_pktmbuf_free_bulk(mbufs, n);
    for (std::uint16_t i = 0; i < n; i++) held[last++ & (capacity - 1)] = mbufs[i];
    if (last - first <= arguments.hold + arguments.lump) return;
    if (ring != nullptr) {
      while (last - first > arguments.hold) {
        rte_mbuf** const oldest = &held[first & (capacity - 1)];
        const std::uint64_t lot =
            std::min({last - first - arguments.hold, capacity - (first & (capacity - 1)),
                      std::uint64_t{64}});
        rte_pktmbuf_free_bulk(oldest, static_cast<unsigned>(lot));
        first += lot;
      }
    } else {
      auto give = recycler.Open(pool->table());
      while (last - first > arguments.hold) {
        give(pool->PageOf(held[first++ & (capacity - 1)]->buf_addr));
      }
    }
  };
  const auto run = [&](double seconds) {
    const auto start = Clock::now();
    double elapsed;
    packets = 0;
    do {
      for (int i = 0; i < 1000; i++) round();
      elapsed = SecondsSince(start);
    } while (elapsed < seconds);
    return static_cast<double>(packets) / elapsed / 1e6;
  };
  run(0.1);
  std::printf("%.3f 0 0\n", run(arguments.seconds));
  std::fflush(stdout);
  std::_Exit(0);  // the mbufs that are held need no home any more
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  if (argc < 3)
    Die("usage: macro ours|bare|hold DEVICE [hold=N] [read=first|all] [rules=N]"
        " [sockets=N] [idle=N] [updates=1]"
        " [lump=N] [pool=ring] [pages=N] [seconds=S]");
  arguments.mode = argv[1];
  arguments.device = argv[2];
  for (int i = 3; i < argc; i++) {
    const std::string_view argument = argv[i];
    const std::size_t equals = argument.find('=');
    if (equals == argument.npos) Die("not NAME=VALUE: " + std::string(argument));
    const std::string_view name = argument.substr(0, equals);
    const char* value = argv[i] + equals + 1;
    if (name == "hold")
      arguments.hold = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "read")
      arguments.read_all = std::string_view(value) == "all";
    else if (name == "rules")
      arguments.rules = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "sockets")
      arguments.sockets = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "idle")
      arguments.idle = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "lump")
      arguments.lump = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "pages")
      arguments.pages = static_cast<std::uint32_t>(std::atol(value));
    else if (name == "pool")
      arguments.ring = std::string_view(value) == "ring";
    else if (name == "updates")
      arguments.updates = std::atol(value) != 0;
    else if (name == "seconds")
      arguments.seconds = std::atof(value);
    else
      Die("unknown argument: " + std::string(name));
  }
  if (arguments.pages == 0) {
    arguments.pages = std::bit_ceil(arguments.hold + arguments.lump +
                                    kDefaultRingEntries * arguments.sockets + 1);
  }
  arguments.buffer_bytes = std::uint64_t{arguments.pages} * 4096;
  return arguments;
}

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) {
  const rxtoken::Arguments arguments = rxtoken::Parse(argc, argv);
  if (arguments.mode == "ours") {
    rxtoken::MeasureOurs(arguments);
  } else {
    rxtoken::MeasureBaseline(arguments);
  }
}
