// SPDX-License-Identifier: Apache-2.0
#include "tests/process/bad_neighbour.h"

#include <algorithm>

namespace rxtoken::test {

void BadNeighbour::SetUp() {
  std::vector<std::string> arguments = {"--worker", "any,any",
                                        "--port",   MemifSource::Port("p0", socket),
                                        "--port",   MemifSource::Port("p1", second_socket)};
  const std::vector<std::string> more = Arguments();
  arguments.insert(arguments.end(), more.begin(), more.end());
  daemon = std::make_unique<Daemon>(arguments);
  ASSERT_TRUE(daemon->process().Running());
  session = std::make_unique<RawClient>(daemon->run_dir());
  daemon->UseSession(session->session());
  std::vector<std::string> client = ClientArguments("bystander", kBystanderPort, 4096);
  client.insert(client.end(), {"--hold", "32", "--until-end"});
  bystander = std::make_unique<Process>(client);
  ASSERT_FALSE(bystander->WaitForLine("ready").empty());
  daemon->Bind("b0", "p0", kPages);
  sender = std::make_unique<Process>(
      std::vector<std::string>{RXTOKEN_MEMIF_SENDER, socket, "1", "0", "1472"});
  ASSERT_FALSE(sender->WaitForLine("connected").empty());
}

std::vector<std::string> BadNeighbour::ClientArguments(const std::string& name,
                                                       std::uint16_t udp_port,
                                                       std::uint32_t ring_entries) {
  return {RXTOKEN_TEST_CLIENT,
          "--run-dir",
          daemon->run_dir(),
          "--port",
          "p0",
          "--name",
          name,
          "--udp-port",
          std::to_string(udp_port),
          "--ring-entries",
          std::to_string(ring_entries)};
}

void BadNeighbour::SendUntil(std::uint64_t end, std::uint64_t to_neighbour) {
  constexpr std::uint64_t kWindow = 1024;  // a quarter of the bystander's ring
  while (sent < end && !HasFailure()) {
    const std::uint64_t lot = std::min(end - sent, kLot);
    if (to_neighbour != 0) {
      sender->Tell(std::to_string(kNeighbourPort) + " " + std::to_string(to_neighbour));
    }
    sender->Tell(std::to_string(kBystanderPort) + " " + std::to_string(lot));
    sent += lot;
    EXPECT_TRUE(WaitUntil([&] {
      return daemon->GetRxSocket("bystander").statistics().returned() + kWindow >= sent;
    }));
  }
}

void BadNeighbour::ExpectBystanderUnharmed() {
  v1::RxSocketStatistics statistics;
  EXPECT_TRUE(WaitUntil([&] {
    statistics = daemon->GetRxSocket("bystander").statistics();
    return statistics.outstanding() <= 32 && statistics.lent() == sent;
  })) << statistics.ShortDebugString();
  EXPECT_TRUE(statistics.drops().empty()) << statistics.ShortDebugString();
  EXPECT_TRUE(statistics.refusals().empty()) << statistics.ShortDebugString();
  bystander->CloseInput();
  const std::string done = bystander->WaitForLine("done");
  EXPECT_NE(done.find("messages=" + std::to_string(sent) + " "), std::string::npos) << done;
  EXPECT_TRUE(done.ends_with("errors=0")) << done;
  EXPECT_TRUE(WaitUntil([&] { return daemon->GetBinding("b0").pages_free() == kPages; }));
}

}  // namespace rxtoken::test
