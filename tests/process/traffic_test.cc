// SPDX-License-Identifier: Apache-2.0
// traffic_test.cc - real packets through every kind of port that a test machine has, into a
// separate process that checks every byte of them where they lie in the buffer.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"
#include "tests/process/stream.h"

namespace rxtoken::test {
namespace {

constexpr std::uint64_t kDatagrams = 100'000;
// What the client may hold, and what may be on the way, before the sender waits: less than the
// 500 frames that a tap device or an af_packet ring takes.
constexpr std::uint64_t kHold = 100;
constexpr std::uint64_t kWindow = 350;
constexpr std::uint16_t kUdpPort = 5000;

struct Setup {
  std::string device;
  std::uint32_t page_bytes = 4096;
  Stream stream = {};
  std::uint64_t fragments_per_message = 1;  // at most
  std::uint64_t window = kWindow;
  std::string source = "198.18.0.1";
  std::vector<std::string> client_arguments = {};
  std::uint64_t count = kDatagrams;
  std::uint64_t hold = kHold;
};

// A daemon with one port, and a client that receives and checks the stream.
class Traffic {
 public:
  explicit Traffic(const Setup& setup)
      : window(setup.window),
        count(setup.count),
        hold(setup.hold),
        daemon({"--port", "p0=" + setup.device}),
        fragments_per_message_(setup.fragments_per_message) {
    if (!daemon.process().Running()) return;
    std::vector<std::string> argv = {RXTOKEN_TEST_CLIENT,
                                     "--run-dir",
                                     daemon.run_dir(),
                                     "--port",
                                     "p0",
                                     "--udp-port",
                                     std::to_string(kUdpPort),
                                     "--page-bytes",
                                     std::to_string(setup.page_bytes),
                                     "--source",
                                     setup.source,
                                     "--seed",
                                     std::to_string(setup.stream.seed),
                                     "--min-bytes",
                                     std::to_string(setup.stream.min_bytes),
                                     "--max-bytes",
                                     std::to_string(setup.stream.max_bytes),
                                     "--count",
                                     std::to_string(count),
                                     "--hold",
                                     std::to_string(hold)};
    argv.insert(argv.end(), setup.client_arguments.begin(), setup.client_arguments.end());
    client = std::make_unique<Process>(argv);
    if (client->WaitForLine("ready").empty()) return;
    daemon.Bind("b0", "p0", kPages, setup.page_bytes);
    ready = !testing::Test::HasFailure();
  }

  // How many messages the client is done with, or may go on holding.
  std::uint64_t Progress() {
    const v1::RxSocketStatistics now = daemon.GetRxSocket("rx").statistics();
    return now.messages() - now.outstanding() / fragments_per_message_ + hold;
  }

  Pace pace() {
    return {count, window, [this] { return Progress(); }};
  }

  // Every datagram came once, in order, complete and in place; everything is back.
  void ExpectAllReceived() {
    const std::string done = client->WaitForLine("done");
    EXPECT_EQ(done.substr(0, done.find(" fragments")), "done messages=" + std::to_string(count));
    EXPECT_EQ(done.substr(done.rfind(' ') + 1), "errors=0") << done;
    EXPECT_TRUE(WaitUntil([&] { return statistics().outstanding() == 0; }));
    const v1::RxSocketStatistics end = statistics();
    EXPECT_EQ(end.messages(), count);
    EXPECT_EQ(end.lent(), end.returned());
    EXPECT_TRUE(end.drops().empty()) << end.ShortDebugString();
    EXPECT_TRUE(end.refusals().empty()) << end.ShortDebugString();
    EXPECT_EQ(end.copied_messages(), 0u);
  }

  v1::RxSocketStatistics statistics() {
    return daemon.GetRxSocket("rx", /*audit=*/true).statistics();
  }

  static constexpr std::uint64_t kPages = 4096;
  const std::uint64_t window;
  const std::uint64_t count;
  const std::uint64_t hold;
  Daemon daemon;
  std::unique_ptr<Process> client;
  bool ready = false;

 private:
  const std::uint64_t fragments_per_message_;
};

// Interfaces va, which the kernel sends from, and vb, which the daemon receives from. Nobody
// answers on vb, so that the neighbours are written down.
void MakeVethPair() {
  Ip("link set lo up");
  Ip("link add va type veth peer name vb");
  Ip("link set va up");
  Ip("link set vb up");
  Ip("addr add 198.18.0.1/24 dev va");
  Ip("neigh add 198.18.0.2 dev va lladdr 02:00:00:00:00:02");
}

constexpr char kAfPacket[] = "net_af_packet0,iface=vb";
constexpr char kTap[] = "net_tap0,iface=tap0";

// Has the kernel send to 198.18.0.2 through the tap. The driver has posted one page before the
// binding was there. Something else takes it, and there is no rule for it.
void StartTap(Traffic& traffic) {
  Ip("link set tap0 up");
  Ip("addr add 198.18.0.1/24 dev tap0");
  Ip("neigh add 198.18.0.2 dev tap0 lladdr 02:00:00:00:00:02");
  EXPECT_TRUE(SendUdp("198.18.0.2", kUdpPort + 1, {}, {.count = 1}));
  EXPECT_TRUE(WaitUntil([&] { return traffic.daemon.GetPort("p0").queues(0).rx_packets() >= 1; }));
}

TEST(Traffic, Ipv4FromAKernelSocketThroughVeth) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  MakeVethPair();

  Traffic traffic({.device = kAfPacket});
  ASSERT_TRUE(traffic.ready);
  EXPECT_TRUE(SendUdp("198.18.0.2", kUdpPort, {}, traffic.pace()));

  traffic.ExpectAllReceived();
  EXPECT_EQ(traffic.daemon.GetBinding("b0").pages_free(), Traffic::kPages);
}

TEST(Traffic, Ipv6FromAKernelSocketThroughVeth) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  MakeVethPair();
  Ip("addr add 2001:db8::1/64 dev va nodad");
  Ip("neigh add 2001:db8::2 dev va lladdr 02:00:00:00:00:02");

  // Up to what an MTU of 1500 leaves.
  const Stream stream = {.max_bytes = 1452};
  Traffic traffic({.device = kAfPacket, .stream = stream, .source = "[2001:db8::1]"});
  ASSERT_TRUE(traffic.ready);
  EXPECT_TRUE(SendUdp("2001:db8::2", kUdpPort, stream, traffic.pace()));

  traffic.ExpectAllReceived();
  EXPECT_EQ(traffic.daemon.GetBinding("b0").pages_free(), Traffic::kPages);
}

// ---- IP fragments ----------------------------------------------------------------------------

// The longest datagrams, in 45 or 46 fragments, of which none is so small that it is copied. IPv4
// through a tap: of an af_packet socket, as the driver opens it, the kernel puts them together.
class Fragmented : public testing::TestWithParam<bool> {
 protected:
  static constexpr Stream kStream = {.min_bytes = 65507, .max_bytes = 65507};
  static constexpr std::uint64_t kCount = 3000;

  bool ipv6() const { return GetParam(); }

  // Runs `send` with a receiver, and expects all of it there, in place.
  template <typename Send>
  void Run(Send send) {
    const NetworkNamespace network;
    if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
    if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";
    if (ipv6()) {
      MakeVethPair();
      Ip("addr add 2001:db8::1/64 dev va nodad");
      Ip("neigh add 2001:db8::2 dev va lladdr 02:00:00:00:00:02");
    }
    Traffic traffic({.device = ipv6() ? kAfPacket : kTap,
                     .stream = kStream,
                     .fragments_per_message = 46,
                     .window = 8,
                     .source = ipv6() ? "[2001:db8::1]" : "198.18.0.1",
                     .count = kCount,
                     .hold = 2});
    ASSERT_TRUE(traffic.ready);
    if (!ipv6()) StartTap(traffic);
    EXPECT_TRUE(send(traffic.pace()));
    traffic.ExpectAllReceived();

    const v1::Reassembly reassembly = traffic.daemon.GetWorker(0).reassembly();
    EXPECT_EQ(reassembly.reassembled(), kCount) << reassembly.ShortDebugString();
    EXPECT_EQ(reassembly.copied_out_bytes(), 0u);
    EXPECT_EQ(reassembly.pages(), 0u);
    EXPECT_EQ(traffic.daemon.GetPort("p0").queues(0).copied_packets(), 0u);
    EXPECT_GE(
        traffic.daemon.GetBinding("b0").pages_free() + traffic.daemon.GetPort("p0").ring_entries(),
        Traffic::kPages);
  }
};

TEST_P(Fragmented, FromAKernelSocket) {
  Run([&](const Pace& pace) {
    return SendUdp(ipv6() ? "2001:db8::2" : "198.18.0.2", kUdpPort, kStream, pace);
  });
}

TEST_P(Fragmented, Shuffled) {
  Run([&](const Pace& pace) {
    return SendShuffledFragments(ipv6() ? "va" : "tap0", ipv6(), kStream, pace);
  });
}

INSTANTIATE_TEST_SUITE_P(Traffic, Fragmented, testing::Bool(),
                         [](const auto& param) { return param.param ? "Ipv6" : "Ipv4"; });

// Not every kernel has VLAN interfaces, so the frames come tagged from a packet socket.
TEST(Traffic, VlanTaggedThroughVeth) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  MakeVethPair();

  Traffic traffic({.device = kAfPacket, .client_arguments = {"--vlan", "7"}});
  ASSERT_TRUE(traffic.ready);
  EXPECT_TRUE(SendFrames("va", {.vlan = 7}, {}, traffic.pace()));

  traffic.ExpectAllReceived();
  EXPECT_EQ(traffic.daemon.GetBinding("b0").pages_free(), Traffic::kPages);
}

TEST(Traffic, FromAKernelSocketThroughTap) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";

  Traffic traffic({.device = kTap});
  ASSERT_TRUE(traffic.ready);
  StartTap(traffic);
  EXPECT_TRUE(SendUdp("198.18.0.2", kUdpPort, {}, traffic.pace()));

  traffic.ExpectAllReceived();
  // The driver keeps pages posted.
  EXPECT_GE(
      traffic.daemon.GetBinding("b0").pages_free() + traffic.daemon.GetPort("p0").ring_entries(),
      Traffic::kPages);
}

TEST(Traffic, JumboFramesOfSeveralFragmentsThroughMemif) {
  const TempDir directory;
  const std::string socket = directory.path() / "memif.sock";
  const Stream stream = {.min_bytes = 0, .max_bytes = 8900};
  Traffic traffic(
      {.device = "net_memif0,role=server,socket-abstract=no,socket=" + socket, .stream = stream});
  ASSERT_TRUE(traffic.ready);
  Process sender({RXTOKEN_MEMIF_SENDER, socket, std::to_string(stream.seed),
                  std::to_string(stream.min_bytes), std::to_string(stream.max_bytes)});
  ASSERT_FALSE(sender.WaitForLine("connected").empty());

  // As for the kernel sender: never too far ahead of the receiver.
  for (std::uint64_t sent = 0; sent < kDatagrams;) {
    const std::uint64_t lot = std::min<std::uint64_t>(64, kDatagrams - sent);
    ASSERT_TRUE(WaitUntil([&] { return traffic.Progress() + traffic.window >= sent + lot; }));
    sender.Tell(std::to_string(kUdpPort) + " " + std::to_string(lot));
    sent += lot;
  }

  traffic.ExpectAllReceived();
  const v1::RxSocketStatistics statistics = traffic.statistics();
  EXPECT_GT(statistics.lent(), kDatagrams * 3 / 2) << "large frames in several fragments";
  EXPECT_EQ(traffic.daemon.GetBinding("b0").pages_free(), Traffic::kPages);
}

// A capture file that is written while the driver reads it: a pipe. net_pcap plays a file
// from the moment when its port is opened; so there is nothing of interest in it before the
// client is there, but always frames for somebody else, as the driver blocks without any.
class CapturePipe {
 public:
  explicit CapturePipe(const std::filesystem::path& path) {
    EXPECT_EQ(mkfifo(path.c_str(), 0600), 0);
    fd_ = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    EXPECT_TRUE(Write(PcapHeader()));
    filler_ = std::jthread([this](const std::stop_token& stop) {
      // More than a burst, which the driver waits for; less than PIPE_BUF.
      const std::vector<std::uint8_t> record =
          PcapRecord(UdpFrame({.destination_port = kUdpPort + 1}, {}));
      std::vector<std::uint8_t> records;
      for (int i = 0; i < 48; i++) records.insert(records.end(), record.begin(), record.end());
      WaitUntil(
          [&] {
            int unread = 0;
            ioctl(fd_, FIONREAD, &unread);
            if (unread == 0) {
              EXPECT_TRUE(Write(records));
            }
            return stop.stop_requested();
          },
          std::chrono::hours(1));
    });
  }
  ~CapturePipe() {
    filler_ = {};
    close(fd_);
  }

  // Thread-safety: any thread; what is at most PIPE_BUF bytes is written in one piece.
  bool Write(const std::vector<std::uint8_t>& bytes) {
    return WaitUntil([&] {
      return write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
    });
  }

 private:
  int fd_ = -1;
  std::jthread filler_;
};

TEST(Traffic, FromACaptureFile) {
  const TempDir directory;
  const std::filesystem::path path = directory.path() / "capture.pcap";
  CapturePipe capture(path);
  // A pipe does not lose anything, so that only the ring's 4096 entries count.
  Traffic traffic({.device = "net_pcap0,rx_pcap=" + path.string(), .window = 3000});
  ASSERT_TRUE(traffic.ready);

  for (std::uint64_t i = 0; i < kDatagrams; i++) {
    if (i % 64 == 0) {
      ASSERT_TRUE(WaitUntil([&] { return traffic.Progress() + traffic.window >= i + 64; }));
    }
    ASSERT_TRUE(capture.Write(PcapRecord(UdpFrame({}, Datagram({}, i)))));
  }

  traffic.ExpectAllReceived();
  // The driver waits inside a burst for the pipe, with the fillers that it has already.
  constexpr std::uint64_t kBurst = 32;
  EXPECT_GT(traffic.daemon.GetBinding("b0").pages_free() + kBurst, Traffic::kPages);
}

// Before each whole frame come ten first fragments of datagrams that will never be whole.
TEST(Traffic, WholeFramesAmongAFloodOfFragments) {
  constexpr std::uint32_t kForged = 10;
  const TempDir directory;
  const std::filesystem::path path = directory.path() / "capture.pcap";
  CapturePipe capture(path);
  Traffic traffic(
      {.device = "net_pcap0,rx_pcap=" + path.string(), .window = 3000, .count = 20'000});
  ASSERT_TRUE(traffic.ready);

  const std::vector<std::uint8_t> forged(600);
  for (std::uint64_t i = 0; i < traffic.count; i++) {
    if (i % 64 == 0) {
      ASSERT_TRUE(WaitUntil([&] { return traffic.Progress() + traffic.window >= i + 64; }));
    }
    for (std::uint32_t k = 0; k < kForged; k++) {
      const auto id = static_cast<std::uint32_t>(i * kForged + k);
      ASSERT_TRUE(
          capture.Write(PcapRecord(Fragments({}, forged, id % 2 == 1, id, /*room=*/512).front())));
    }
    ASSERT_TRUE(capture.Write(PcapRecord(UdpFrame({}, Datagram({}, i)))));
  }

  traffic.ExpectAllReceived();
  const v1::Reassembly table = traffic.daemon.GetWorker(0).reassembly();
  EXPECT_GT(table.evicted() + table.over_budget(), 0u);
  EXPECT_LE(table.pages(), Traffic::kPages / 4);
  EXPECT_EQ(table.reassembled(), 0u);
}

// Two queues, polled by two workers, each of which gets half of every datagram's fragments.
class DividedFragments : public testing::TestWithParam<std::uint32_t> {
 protected:
  static constexpr std::uint64_t kPages = 4096;
  static constexpr std::uint64_t kCount = 2000;
  static constexpr Stream kStream = {.min_bytes = 3000, .max_bytes = 9000, .numbered = true};

  // Writes the fragments of one datagram, in turn to each of the queues below `queues`; the
  // others are lost.
  void Send(std::uint64_t number, std::size_t queues) {
    const auto frames = Fragments({}, Datagram(kStream, number), number % 2 == 1,
                                  static_cast<std::uint32_t>(number), 1000);
    for (std::size_t i = 0; i < frames.size(); i++) {
      CapturePipe& capture = i % 2 == 0 ? first_ : second_;
      if (i % 2 < queues) {
        ASSERT_TRUE(capture.Write(PcapRecord(frames[i])));
      }
    }
  }

  // Whole messages that are there now, each checked.
  void Receive() {
    std::vector<std::vector<std::uint32_t>> tokens(client_->lanes());
    for (const RawFragment& fragment : client_->Poll()) {
      const RawBuffer buffer = client_->MapBuffer(fragment.binding);
      const std::uint8_t* const payload =
          buffer.data +
          std::uint64_t{fragment.token & (kMaxPagesPerBuffer - 1)} * buffer.page_bytes +
          fragment.offset;
      std::vector<std::uint8_t>& message = messages_[fragment.lane];
      message.insert(message.end(), payload, payload + fragment.length);
      tokens[fragment.lane].push_back(fragment.token);
      if (fragment.more) continue;
      std::uint64_t number = ~0ull;
      std::memcpy(&number, message.data(), std::min(sizeof number, message.size()));
      EXPECT_TRUE(received_.insert(number).second) << number << " came twice";
      EXPECT_EQ(message, Datagram(kStream, number));
      message.clear();
    }
    for (std::uint32_t lane = 0; lane < client_->lanes(); lane++) {
      client_->Return(lane, tokens[lane]);
    }
  }

  v1::Reassembly Total() {
    v1::Reassembly total;
    for (const int worker : {0, 1}) {
      const v1::Reassembly one = daemon_.GetWorker(worker).reassembly();
      total.set_reassembled(total.reassembled() + one.reassembled());
      total.set_handed_over(total.handed_over() + one.handed_over());
      total.set_datagrams(total.datagrams() + one.datagrams());
      total.set_pages(total.pages() + one.pages());
    }
    return total;
  }

  TempDir directory_;
  CapturePipe first_{directory_.path() / "first.pcap"};
  CapturePipe second_{directory_.path() / "second.pcap"};
  Daemon daemon_{{"--worker", "any", "--worker", "any", "--port",
                  "p0=net_pcap0,rx_pcap=" + (directory_.path() / "first.pcap").string() +
                      ",rx_pcap=" + (directory_.path() / "second.pcap").string() + ";queues=2"}};
  std::unique_ptr<RawClient> client_;
  std::map<std::uint32_t, std::vector<std::uint8_t>> messages_;  // that are not whole, by lane
  std::set<std::uint64_t> received_;
};

TEST_P(DividedFragments, MeetAtOneWorker) {
  ASSERT_TRUE(daemon_.process().Running());
  client_ = std::make_unique<RawClient>(daemon_.run_dir());
  client_->Attach(daemon_.OpenRxSocket("a", client_->session()).attach_secret());
  v1::Match match;
  match.set_protocol(17);
  match.set_destination_port(kUdpPort);
  daemon_.AddFlow("a", match, client_->session());
  v1::BindRequest request;
  request.set_name("b0");
  request.set_buffer_bytes(kPages * 4096 * GetParam());
  request.set_page_bytes(4096 * GetParam());
  request.set_frames_per_page(GetParam());
  for (const std::uint32_t queue : {0, 1}) {
    v1::QueueId& id = *request.add_queues();
    id.set_port("p0");
    id.set_queue(queue);
  }
  grpc::ClientContext context;
  v1::Binding binding;
  const grpc::Status bound = daemon_.bindings().Bind(&context, request, &binding);
  ASSERT_TRUE(bound.ok()) << bound.error_message();

  for (std::uint64_t number = 0; number < kCount && !HasFailure(); number++) {
    Send(number, 2);
    ASSERT_TRUE(WaitUntil([&] {
      Receive();
      return received_.size() + 20 > number;
    }));
  }
  ASSERT_TRUE(WaitUntil([&] {
    Receive();
    return received_.size() == kCount;
  }));
  v1::Reassembly total = Total();
  EXPECT_EQ(total.reassembled(), kCount);
  EXPECT_GT(total.handed_over(), kCount);
  EXPECT_EQ(total.pages(), 0u);

  // What is incomplete when its binding ends is dropped, at both workers.
  for (std::uint64_t number = kCount; number < kCount + 10; number++) Send(number, 1);
  ASSERT_TRUE(WaitUntil([&] { return Total().datagrams() == 10; }));
  daemon_.Unbind("b0");
  EXPECT_TRUE(WaitUntil([&] { return !daemon_.HasBinding("b0"); }));
  total = Total();
  EXPECT_EQ(total.datagrams(), 0u);
  EXPECT_EQ(total.pages(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Traffic, DividedFragments, testing::Values(1, 4), [](const auto& param) {
  return "FramesPerPage" + std::to_string(param.param);
});

}  // namespace
}  // namespace rxtoken::test
