// SPDX-License-Identifier: Apache-2.0
// exception_path_test.cc - a port that applications and the kernel share: what no flow rule
// matches goes to the kernel through a tap, and the kernel's answers leave by the port.
//
//   here:  va 198.18.0.1 === vb  <- rxtokend ->  kernel0 198.18.0.2  in the other network
//
// The tap is moved to a network of its own: nothing but the exception path leads there.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/stream.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kApplicationPort = 5000;
constexpr std::uint16_t kEchoPort = 7;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) { EXPECT_GE(fd, 0) << std::strerror(errno); }
  Socket(int type, int protocol) : Socket(socket(AF_INET, type | SOCK_CLOEXEC, protocol)) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const noexcept { return fd_; }

  // Whether there is something to read before the deadline.
  bool Readable(std::chrono::milliseconds timeout = kDeadline) const {
    pollfd readable = {.fd = fd_, .events = POLLIN, .revents = 0};
    return poll(&readable, 1, static_cast<int>(timeout.count())) == 1;
  }
  void Bind(const std::string& address, std::uint16_t port) const {
    const sockaddr_in at = Address(address, port);
    EXPECT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0)
        << std::strerror(errno);
  }
  void Connect(const std::string& address, std::uint16_t port) const {
    const timeval timeout = {.tv_sec = std::chrono::seconds(kDeadline).count(), .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    const sockaddr_in at = Address(address, port);
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0)
        << std::strerror(errno);
  }

 private:
  static sockaddr_in Address(const std::string& address, std::uint16_t port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    inet_pton(AF_INET, address.c_str(), &at.sin_addr);
    return at;
  }

  int fd_;
};

// A second network. Nobody lives there, but interfaces and sockets can be put into it.
class OtherNetwork {
 public:
  OtherNetwork() {
    const NetworkNamespace inside;
    if (inside.ok()) fd_ = open(kOwn, O_RDONLY | O_CLOEXEC);
  }
  ~OtherNetwork() {
    if (fd_ >= 0) close(fd_);
  }
  OtherNetwork(const OtherNetwork&) = delete;
  OtherNetwork& operator=(const OtherNetwork&) = delete;

  // For "ip link set ... netns".
  std::string path() const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
  }
  // Runs `f` there.
  template <typename F>
  auto In(F f) const {
    struct Return {
      int home = open(kOwn, O_RDONLY | O_CLOEXEC);
      ~Return() {
        setns(home, CLONE_NEWNET);
        close(home);
      }
    } const there_and_back;
    EXPECT_EQ(setns(fd_, CLONE_NEWNET), 0) << std::strerror(errno);
    return f();
  }

 private:
  static constexpr char kOwn[] = "/proc/thread-self/ns/net";
  int fd_ = -1;
};

// A veth pair leaves the checksum to the receiving side's kernel, which here is another one.
void SendWithChecksums(const std::string& interface) {
  ethtool_value off = {.cmd = ETHTOOL_STXCSUM, .data = 0};
  ifreq request = {};
  interface.copy(request.ifr_name, IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&off);
  EXPECT_EQ(ioctl(Socket(SOCK_DGRAM, 0).fd(), SIOCETHTOOL, &request), 0) << std::strerror(errno);
}

// Sends everything back that comes, until the object ends.
class EchoServer {
 public:
  explicit EchoServer(const OtherNetwork& network)
      : datagrams_(network.In([] { return Socket(SOCK_DGRAM, 0); })),
        listener_(network.In([] { return Socket(SOCK_STREAM, 0); })) {
    network.In([this] {
      datagrams_.Bind("198.18.0.2", kEchoPort);
      listener_.Bind("198.18.0.2", kEchoPort);
    });
    EXPECT_EQ(listen(listener_.fd(), 8), 0);
    thread_ = std::jthread([this](const std::stop_token& stop) { Serve(stop); });
  }

 private:
  void Serve(const std::stop_token& stop) {
    std::vector<char> data(65536);
    int stream = -1;
    while (!stop.stop_requested()) {
      pollfd fds[] = {{.fd = datagrams_.fd(), .events = POLLIN, .revents = 0},
                      {.fd = listener_.fd(), .events = POLLIN, .revents = 0},
                      {.fd = stream, .events = POLLIN, .revents = 0}};
      if (poll(fds, 3, 20) <= 0) continue;
      if (fds[0].revents != 0) {
        sockaddr_storage from;
        socklen_t size = sizeof from;
        auto* const peer = reinterpret_cast<sockaddr*>(&from);
        const ssize_t n = recvfrom(datagrams_.fd(), data.data(), data.size(), 0, peer, &size);
        if (n >= 0) {
          sendto(datagrams_.fd(), data.data(), static_cast<std::size_t>(n), 0, peer, size);
        }
      }
      if (fds[1].revents != 0) {
        if (stream >= 0) close(stream);
        stream = accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
      } else if (fds[2].revents != 0) {
        const ssize_t n = recv(stream, data.data(), data.size(), 0);
        if (n > 0) send(stream, data.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL);
        if (n <= 0) close(std::exchange(stream, -1));
      }
    }
    if (stream >= 0) close(stream);
  }

  Socket datagrams_;
  Socket listener_;
  std::jthread thread_;
};

std::uint16_t InternetChecksum(const std::vector<std::uint8_t>& bytes) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); i++) sum += i % 2 == 0 ? bytes[i] << 8 : bytes[i];
  while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

// Whether the host answers an ICMP echo request with that many bytes of data.
bool Ping(const std::string& address, std::uint16_t number, std::size_t bytes) {
  constexpr std::size_t kHeader = 8;
  constexpr std::size_t kIpHeader = 20;
  const Socket socket(SOCK_RAW, IPPROTO_ICMP);
  std::vector<std::uint8_t> request(kHeader + bytes, static_cast<std::uint8_t>(number));
  const std::uint8_t header[kHeader] = {ICMP_ECHO,
                                        0,
                                        0,
                                        0,
                                        0x12,
                                        0x34,
                                        static_cast<std::uint8_t>(number >> 8),
                                        static_cast<std::uint8_t>(number)};
  std::copy(std::begin(header), std::end(header), request.begin());
  const std::uint16_t checksum = InternetChecksum(request);
  request[2] = static_cast<std::uint8_t>(checksum >> 8);
  request[3] = static_cast<std::uint8_t>(checksum);
  socket.Connect(address, 0);
  if (send(socket.fd(), request.data(), request.size(), 0) < 0) return false;
  std::vector<std::uint8_t> reply(65536);
  while (socket.Readable()) {
    const ssize_t n = recv(socket.fd(), reply.data(), reply.size(), 0);
    if (n == static_cast<ssize_t>(kIpHeader + request.size()) &&
        reply[kIpHeader] == ICMP_ECHOREPLY &&
        std::equal(request.begin() + 4, request.end(), reply.begin() + kIpHeader + 4)) {
      return true;
    }
  }
  return false;
}

// One datagram at a time, there and back.
void ExpectUdpEcho(std::uint64_t count) {
  const Socket socket(SOCK_DGRAM, 0);
  socket.Connect("198.18.0.2", kEchoPort);
  for (std::uint64_t i = 0; i < count; i++) {
    const std::vector<std::uint8_t> sent = Datagram({.seed = 7}, i);
    ASSERT_EQ(send(socket.fd(), sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));
    ASSERT_TRUE(socket.Readable()) << "datagram " << i;
    std::vector<std::uint8_t> received(65536);
    const ssize_t n = recv(socket.fd(), received.data(), received.size(), 0);
    received.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    ASSERT_EQ(received, sent) << "datagram " << i;
  }
}

// A connection, as ssh would have one.
void ExpectTcpEcho(std::size_t bytes) {
  const Socket socket(SOCK_STREAM, 0);
  socket.Connect("198.18.0.2", kEchoPort);
  const std::vector<std::uint8_t> lot = Datagram({.seed = 9, .min_bytes = 1400}, 1);
  std::vector<std::uint8_t> received(lot.size());
  for (std::size_t sent = 0; sent < bytes; sent += lot.size()) {
    ASSERT_EQ(send(socket.fd(), lot.data(), lot.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(lot.size()));
    for (std::size_t at = 0; at < lot.size();) {
      ASSERT_TRUE(socket.Readable()) << "after " << sent + at << " bytes";
      const ssize_t n = recv(socket.fd(), received.data() + at, lot.size() - at, 0);
      ASSERT_GT(n, 0);
      at += static_cast<std::size_t>(n);
    }
    ASSERT_EQ(received, lot);
  }
}

TEST(ExceptionPath, TheKernelAnswersWhileAnApplicationReceives) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";
  const OtherNetwork other;
  Ip("link set lo up");
  Ip("link add va type veth peer name vb");
  Ip("link set va up");
  Ip("link set vb up");
  Ip("addr add 198.18.0.1/24 dev va");
  SendWithChecksums("va");

  constexpr std::uint64_t kDatagrams = 20'000;
  Daemon daemon({"--port", "p0=net_af_packet0,iface=vb;exception_tap=kernel0"});
  ASSERT_TRUE(daemon.process().Running()) << daemon.process().Errors();
  daemon.Bind("b0", "p0", 4096);
  Process client({RXTOKEN_TEST_CLIENT, "--run-dir", daemon.run_dir(), "--port", "p0", "--udp-port",
                  std::to_string(kApplicationPort), "--source", "198.18.0.1", "--count",
                  std::to_string(kDatagrams)});
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  Ip("link set kernel0 netns " + other.path());
  other.In([] {
    Ip("link set lo up");
    Ip("link set kernel0 up");
    Ip("addr add 198.18.0.2/24 dev kernel0");
  });
  const EchoServer server(other);
  // What arrived while the tap was on its way is lost.
  const v1::ExceptionPath before = daemon.GetPort("p0").exception_path();

  // Nobody wrote down any neighbour: ARP goes this way too.
  for (std::uint16_t number : {1, 2, 3}) {
    EXPECT_TRUE(Ping("198.18.0.2", number, number * 400u)) << number;
  }
  {
    const std::jthread udp([] { ExpectUdpEcho(1000); });
    const std::jthread tcp([] { ExpectTcpEcho(1 << 20); });
    EXPECT_TRUE(SendUdp("198.18.0.2", kApplicationPort, {},
                        {kDatagrams, 300, [&] {
                           const auto now = daemon.GetRxSocket("rx").statistics();
                           return now.messages() - now.outstanding();
                         }}));
  }

  const std::string done = client.WaitForLine("done");
  EXPECT_EQ(done.substr(0, done.find(" fragments")), "done messages=" + std::to_string(kDatagrams));
  EXPECT_EQ(done.substr(done.rfind(' ') + 1), "errors=0") << done;
  const v1::Port port = daemon.GetPort("p0");
  const v1::ExceptionPath& path = port.exception_path();
  EXPECT_EQ(path.interface(), "kernel0");
  EXPECT_GT(path.to_kernel(), 1000u + 3u);
  EXPECT_GT(path.from_kernel(), 1000u + 3u);
  EXPECT_EQ(path.to_kernel_drops(), before.to_kernel_drops());
  EXPECT_EQ(path.from_kernel_drops(), before.from_kernel_drops());
  EXPECT_TRUE(port.queues(0).drops().empty()) << port.ShortDebugString();

  EXPECT_EQ(daemon.Stop(), 0);
  EXPECT_EQ(other.In([] { return if_nametoindex("kernel0"); }), 0u) << "it goes with the daemon";
}

// Somebody deletes the interface: its frames are counted, and the daemon goes on.
TEST(ExceptionPath, OutlivesItsInterface) {
  const NetworkNamespace network;
  if (!network.ok()) GTEST_SKIP() << "a network namespace needs root";
  if (access("/dev/net/tun", R_OK | W_OK) != 0) GTEST_SKIP() << "there is no /dev/net/tun";
  Daemon daemon({"--port", "p0=net_null0,size=64;exception_tap=kernel0"});
  ASSERT_TRUE(daemon.process().Running()) << daemon.process().Errors();
  EXPECT_NE(if_nametoindex("kernel0"), 0u);
  daemon.Bind("b0", "p0", 4096);
  const auto path = [&] { return daemon.GetPort("p0").exception_path(); };
  EXPECT_TRUE(WaitUntil([&] { return path().to_kernel() > 0; }));

  Ip("link delete kernel0");
  const std::uint64_t before = path().to_kernel_drops();
  EXPECT_TRUE(WaitUntil([&] { return path().to_kernel_drops() > before + 1000; }));
  EXPECT_EQ(daemon.Stop(), 0);
}

}  // namespace
}  // namespace rxtoken::test
