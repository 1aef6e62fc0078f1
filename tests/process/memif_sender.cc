// SPDX-License-Identifier: Apache-2.0
// memif_sender.cc - sends a stream (stream.h) as frames into a memif socket.
//
// usage: memif_sender <socket> <seed> <min bytes> <max bytes> [numbered]
//
// Prints "connected" when the other side is there. Then each line of standard input is a UDP
// port and how many more datagrams to send there; each port gets the whole stream. Waits while
// the ring to the other side is full. Ends with its input.
//
// One memif buffer takes a whole frame: DPDK 22.11 does not clear the "goes on in the next
// buffer" flag when its ring comes round. The receiver cuts frames to its own pages.
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "tests/process/stream.h"
#include "tests/process/wait_until.h"

namespace rxtoken::test {
namespace {

constexpr std::uint16_t kPort = 0;
constexpr std::uint16_t kQueue = 0;
constexpr std::uint16_t kFrameRoom = 16384;
constexpr std::uint64_t kBurst = 32;

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "memif_sender: %s failed\n", what);
  std::exit(1);
}

rte_mempool* OpenPort(const std::string& socket) {
  std::vector<std::string> arguments = {
      "memif_sender",
      "--no-huge",
      "-m",
      "128",
      "--no-pci",
      "--no-shconf",
      "--no-telemetry",
      "--vdev=net_memif0,role=client,socket-abstract=no,bsize=16384,socket=" + socket};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  if (rte_eal_init(static_cast<int>(argv.size()), argv.data()) < 0) Die("rte_eal_init");

  rte_mempool* pool = rte_pktmbuf_pool_create("frames", 2047, 0, 0,
                                              kFrameRoom + RTE_PKTMBUF_HEADROOM, SOCKET_ID_ANY);
  const rte_eth_conf conf = {};
  if (pool == nullptr || rte_eth_dev_configure(kPort, 1, 1, &conf) != 0 ||
      rte_eth_rx_queue_setup(kPort, kQueue, 512, SOCKET_ID_ANY, nullptr, pool) != 0 ||
      rte_eth_tx_queue_setup(kPort, kQueue, 512, SOCKET_ID_ANY, nullptr) != 0 ||
      rte_eth_dev_start(kPort) != 0) {
    Die("opening the port");
  }
  const bool up = WaitUntil([] {
    rte_eth_link link = {};
    return rte_eth_link_get_nowait(kPort, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
  });
  if (!up) Die("connecting");
  return pool;
}

// The next `n` datagrams of a stream, from number `first` on.
void Send(rte_mempool* pool, const Stream& stream, std::uint16_t udp_port, std::uint64_t first,
          std::uint16_t n) {
  std::array<rte_mbuf*, kBurst> mbufs;
  if (rte_pktmbuf_alloc_bulk(pool, mbufs.data(), n) != 0) Die("rte_pktmbuf_alloc_bulk");
  for (std::uint16_t i = 0; i < n; i++) {
    const std::vector<std::uint8_t> frame =
        UdpFrame({.destination_port = udp_port}, Datagram(stream, first + i));
    void* room = rte_pktmbuf_append(mbufs[i], static_cast<std::uint16_t>(frame.size()));
    if (room == nullptr) Die("rte_pktmbuf_append");
    std::memcpy(room, frame.data(), frame.size());
  }
  std::uint16_t sent = 0;
  if (!WaitUntil([&] {
        sent = static_cast<std::uint16_t>(
            sent +
            rte_eth_tx_burst(kPort, kQueue, &mbufs[sent], static_cast<std::uint16_t>(n - sent)));
        return sent == n;
      })) {
    Die("rte_eth_tx_burst");
  }
}

}  // namespace
}  // namespace rxtoken::test

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr,
                 "usage: memif_sender <socket> <seed> <min bytes> <max bytes> [numbered]\n");
    return 2;
  }
  const rxtoken::test::Stream stream = {std::stoul(argv[2]), std::stoul(argv[3]),
                                        std::stoul(argv[4]), argc == 6};
  rte_mempool* pool = rxtoken::test::OpenPort(argv[1]);
  std::puts("connected");
  std::fflush(stdout);

  std::map<std::uint16_t, std::uint64_t> sent;
  std::uint16_t udp_port = 0;
  for (std::uint64_t more = 0; std::cin >> udp_port >> more;) {
    while (more > 0) {
      const auto n = static_cast<std::uint16_t>(std::min(more, rxtoken::test::kBurst));
      rxtoken::test::Send(pool, stream, udp_port, sent[udp_port], n);
      sent[udp_port] += n;
      more -= n;
    }
  }
  rte_eth_dev_stop(rxtoken::test::kPort);
  rte_eth_dev_close(rxtoken::test::kPort);
  rte_eal_cleanup();
  return 0;
}
