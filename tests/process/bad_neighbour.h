// SPDX-License-Identifier: Apache-2.0
// bad_neighbour.h - two applications on one port: one that checks that it misses nothing, and one
// that the test lets do whatever it likes.
//
// Thread-safety: none; one thread uses an object.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {

class BadNeighbour : public testing::Test {
 protected:
  static constexpr std::uint16_t kNeighbourPort = 5001;
  static constexpr std::uint16_t kBystanderPort = 5002;
  static constexpr std::uint64_t kPages = 16384;
  static constexpr std::uint64_t kLot = 256;

  // More arguments of the daemon.
  virtual std::vector<std::string> Arguments() { return {}; }
  void SetUp() override;

  std::vector<std::string> ClientArguments(const std::string& name, std::uint16_t udp_port,
                                           std::uint32_t ring_entries);

  // Sends to the bystander, until it was sent `end` datagrams, and `to_neighbour` to the other
  // with each lot, at the pace at which the bystander gives them back.
  void SendUntil(std::uint64_t end, std::uint64_t to_neighbour);
  // Ends the bystander: it got all that was sent to it, in order, and every byte was right, also
  // of what it held. All pages are back.
  void ExpectBystanderUnharmed();

  TempDir directory;
  std::string socket = directory.path() / "memif.sock";
  std::string second_socket = directory.path() / "second.sock";  // of p1, another worker's
  std::unique_ptr<Daemon> daemon;
  std::unique_ptr<RawClient> session;  // that the test's calls have
  std::unique_ptr<Process> bystander;
  std::unique_ptr<Process> sender;
  std::uint64_t sent = 0;  // to the bystander
};

}  // namespace rxtoken::test
