// SPDX-License-Identifier: Apache-2.0
// memif_source.h - a process that sends a stream (stream.h) into a memif port of the daemon.
//
// Thread-safety: none; one thread uses an object.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/stream.h"

namespace rxtoken::test {

class MemifSource {
 public:
  // The daemon's argument for a port that listens at `socket`.
  static std::string Port(const std::string& name, const std::string& socket) {
    return name + "=net_memif_" + name + ",role=server,socket-abstract=no,socket=" + socket;
  }

  // Waits until it is connected with the daemon's `port`, or fails the test.
  MemifSource(Daemon& daemon, const std::string& port, const std::string& socket,
              const Stream& stream = {})
      : daemon_(daemon), port_(port), sender_(Arguments(socket, stream)) {
    EXPECT_FALSE(sender_.WaitForLine("connected").empty());
  }

  // The next datagrams of the stream to a UDP port. When this returns, the daemon has taken them
  // all from its port, and delivered or dropped them.
  void Send(std::uint16_t udp_port, std::uint64_t datagrams) {
    Begin(udp_port, datagrams);
    EXPECT_TRUE(WaitUntil([&] { return daemon_.GetPort(port_).queues(0).rx_packets() == sent_; }));
  }
  // The same without waiting.
  void Begin(std::uint16_t udp_port, std::uint64_t datagrams) {
    sender_.Tell(std::to_string(udp_port) + " " + std::to_string(datagrams));
    sent_ += datagrams;
  }

 private:
  static std::vector<std::string> Arguments(const std::string& socket, const Stream& stream) {
    std::vector<std::string> argv = {RXTOKEN_MEMIF_SENDER, socket, std::to_string(stream.seed),
                                     std::to_string(stream.min_bytes),
                                     std::to_string(stream.max_bytes)};
    if (stream.numbered) argv.push_back("numbered");
    return argv;
  }

  Daemon& daemon_;
  const std::string port_;
  Process sender_;
  std::uint64_t sent_ = 0;
};

}  // namespace rxtoken::test
