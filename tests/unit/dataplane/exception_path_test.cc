// SPDX-License-Identifier: Apache-2.0
#include "dataplane/exception_path.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dataplane/port.h"
#include "tests/unit/dataplane/test_eal.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Frame = std::vector<std::uint8_t>;

constexpr int kDeadlineMs = 20'000;

// The calling thread plays the worker, in a network of its own.
class ExceptionPathTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(TestEal().ok()) << TestEal().message();
    network_ = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (unshare(CLONE_NEWNET) != 0) GTEST_SKIP() << "a network namespace needs root";
    if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";
    std::string pattern = (std::filesystem::temp_directory_path() / "rxtoken-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    this_worker = 3;
    pool_.reset(rte_pktmbuf_pool_create("frames", 64, 0, 0, 2048, SOCKET_ID_ANY));
    ASSERT_NE(pool_, nullptr);
  }
  void TearDown() override {
    this_worker = kNotAWorker;
    std::error_code ignored;
    if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
    if (network_ < 0) return;
    setns(network_, CLONE_NEWNET);
    close(network_);
  }

  static Result<std::unique_ptr<Port>> Open(const std::string& interface) {
    return Port::Open({.name = "p0", .device = "net_null0,size=64", .exception_tap = interface}, 0);
  }

  struct MbufDeleter {
    void operator()(rte_mbuf* mbuf) const { rte_pktmbuf_free(mbuf); }
  };
  using Mbuf = std::unique_ptr<rte_mbuf, MbufDeleter>;
  // In segments of at most that many bytes.
  Mbuf MakeMbuf(const Frame& frame, std::size_t segment_bytes) {
    Mbuf first;
    for (std::size_t at = 0; at < frame.size(); at += segment_bytes) {
      Mbuf segment(rte_pktmbuf_alloc(pool_.get()));
      const std::size_t bytes = std::min(segment_bytes, frame.size() - at);
      std::memcpy(rte_pktmbuf_append(segment.get(), static_cast<std::uint16_t>(bytes)), &frame[at],
                  bytes);
      if (first == nullptr) {
        first = std::move(segment);
      } else {
        EXPECT_EQ(rte_pktmbuf_chain(first.get(), segment.release()), 0);
      }
    }
    return first;
  }
  // Sends and receives on an interface.
  static int PacketSocket(const std::string& interface) {
    const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, htons(kEtherType));
    sockaddr_ll address = {};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(kEtherType);
    address.sll_ifindex = static_cast<int>(if_nametoindex(interface.c_str()));
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  // Of an Ethernet type that nobody else sends.
  static constexpr std::uint16_t kEtherType = 0x88B5;
  static Frame MakeFrame(std::size_t bytes) {
    Frame frame(bytes);
    for (std::size_t i = 0; i < bytes; i++) frame[i] = static_cast<std::uint8_t>(2 + i * 7);
    frame[12] = kEtherType >> 8;
    frame[13] = kEtherType & 0xFF;
    return frame;
  }

  struct PoolDeleter {
    void operator()(rte_mempool* pool) const { rte_mempool_free(pool); }
  };
  std::unique_ptr<rte_mempool, PoolDeleter> pool_;
  int network_ = -1;
  std::filesystem::path directory_;
};

TEST_F(ExceptionPathTest, HasTheAddressAndTheMtuOfThePort) {
  const auto port = Open("kernel0");
  ASSERT_TRUE(port.ok()) << port.status().message();
  rte_ether_addr mac;
  rte_eth_macaddr_get((*port)->id(), &mac);
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request = {};
  std::strcpy(request.ifr_name, "kernel0");
  EXPECT_EQ(ioctl(socket, SIOCGIFHWADDR, &request), 0);
  EXPECT_EQ(std::memcmp(request.ifr_hwaddr.sa_data, mac.addr_bytes, sizeof mac.addr_bytes), 0);
  EXPECT_EQ(ioctl(socket, SIOCGIFMTU, &request), 0);
  EXPECT_EQ(request.ifr_mtu, 1500);
  EXPECT_EQ(ioctl(socket, SIOCGIFFLAGS, &request), 0);
  EXPECT_NE(request.ifr_flags & IFF_UP, 0);
  EXPECT_NE(request.ifr_flags & IFF_MULTICAST, 0);
  close(socket);
}

// Each kind of driver has its own idea of how many queues it must send with.
TEST_F(ExceptionPathTest, SendsByEveryKindOfPort) {
  const std::string capture = directory_ / "in.pcap";
  std::ofstream(capture).write("\xD4\xC3\xB2\xA1\x02\0\x04\0\0\0\0\0\0\0\0\0\xFF\xFF\0\0\x01\0\0\0",
                               24);
  const struct {
    std::string device;
    std::uint32_t queues;
  } kinds[] = {
      {"net_null0", 3},
      {"net_pcap0,rx_pcap=" + capture, 1},
      {"net_memif0,role=server,socket-abstract=no,socket=" + (directory_ / "memif").string(), 2},
      {"net_tap0,iface=wire0", 2}};
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.device);
    const auto port = Port::Open(
        {.name = "p0", .device = kind.device, .queues = kind.queues, .exception_tap = "kernel0"},
        0);
    ASSERT_TRUE(port.ok()) << port.status().message();
    const int kernel = PacketSocket("kernel0");
    const Frame frame = MakeFrame(1514);
    ASSERT_EQ(send(kernel, frame.data(), frame.size(), 0), 1514);
    const ExceptionPath& path = *(*port)->exception_path();
    // A memif has nobody to send to.
    EXPECT_TRUE(
        Eventually([&] { return path.info().from_kernel + path.info().from_kernel_drops != 0; }));
    if (!kind.device.starts_with("net_memif")) {
      EXPECT_EQ(path.info().from_kernel_drops, 0u);
    }
    close(kernel);
  }
}

TEST_F(ExceptionPathTest, HandsAFrameOfSeveralSegmentsOverInOnePiece) {
  const auto port = Open("kernel0");
  ASSERT_TRUE(port.ok()) << port.status().message();
  const int kernel = PacketSocket("kernel0");
  ExceptionPath& path = *(*port)->exception_path();

  for (const std::size_t segment_bytes : {1514, 700, 100}) {
    const Frame frame = MakeFrame(1514);
    EXPECT_TRUE(path.Send(MakeMbuf(frame, segment_bytes).get()));
    pollfd readable = {.fd = kernel, .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&readable, 1, kDeadlineMs), 1);
    Frame received(65536);
    received.resize(static_cast<std::size_t>(recv(kernel, received.data(), received.size(), 0)));
    EXPECT_EQ(received, frame);
  }
  close(kernel);
}

TEST_F(ExceptionPathTest, RefusesAFrameThatIsLongerThanTheMtu) {
  const auto port = Open("kernel0");
  ASSERT_TRUE(port.ok()) << port.status().message();
  ExceptionPath& path = *(*port)->exception_path();
  const std::uint32_t room = ExceptionPath::RoomBytes(1500);
  EXPECT_EQ(room, 1500u + 14 + 2 * 4);

  EXPECT_TRUE(path.Send(MakeMbuf(MakeFrame(room), 1000).get()));
  EXPECT_FALSE(path.Send(MakeMbuf(MakeFrame(room + 1), 1000).get()));
  EXPECT_EQ(path.info().to_kernel_drops, 1u);
}

// More than the kernel takes in the time: each frame is handed over, or counted.
TEST_F(ExceptionPathTest, CountsEveryFrame) {
  constexpr std::uint64_t kFrames = 200'000;
  const auto port = Open("kernel0");
  ASSERT_TRUE(port.ok()) << port.status().message();
  ExceptionPath& path = *(*port)->exception_path();
  const Mbuf mbuf = MakeMbuf(MakeFrame(60), 60);

  std::uint64_t taken = 0;
  for (std::uint64_t i = 0; i < kFrames; i++) taken += path.Send(mbuf.get());
  EXPECT_GE(taken, 256u);
  EXPECT_EQ(path.info().to_kernel_drops, kFrames - taken);
  EXPECT_TRUE(Eventually([&] { return path.info().to_kernel == taken; }));
  EXPECT_EQ(path.info().to_kernel_drops, kFrames - taken);
}

TEST_F(ExceptionPathTest, RefusesNamesThatCannotBe) {
  const auto refused = [](const std::string& interface) { return Open(interface).status(); };
  for (const std::string name : {"sixteen-letters-", "a/b", "tap%d", "a b", "."}) {
    EXPECT_EQ(refused(name).code(), Code::kInvalidArgument);
    EXPECT_THAT(refused(name).message(), AllOf(HasSubstr("'p0'"), HasSubstr("'" + name + "'")));
  }
  EXPECT_EQ(refused("lo").code(), Code::kAlreadyExists);
  EXPECT_THAT(refused("lo").message(), HasSubstr("'lo'"));

  const auto port = Open("fifteen-letters");
  ASSERT_TRUE(port.ok()) << port.status().message();
  EXPECT_EQ(Port::Open({.name = "p1", .device = "net_null1", .exception_tap = "fifteen-letters"}, 1)
                .status()
                .code(),
            Code::kAlreadyExists);
}

TEST_F(ExceptionPathTest, GoesWithThePort) {
  for (int round = 0; round < 3; round++) {
    const auto port = Open("kernel0");
    ASSERT_TRUE(port.ok()) << port.status().message();
    EXPECT_NE(if_nametoindex("kernel0"), 0u);
  }
  EXPECT_EQ(if_nametoindex("kernel0"), 0u);
}

}  // namespace
}  // namespace rxtoken
