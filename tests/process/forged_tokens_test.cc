// SPDX-License-Identifier: Apache-2.0
// forged_tokens_test.cc - an application that holds a hundred tokens returns millions that it does
// not hold: the hundred are released, each once, and nobody else notices.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "tests/process/bad_neighbour.h"
#include "tests/process/harness.h"
#include "tests/process/memif_source.h"

namespace rxtoken::test {
namespace {

constexpr std::uint64_t kHeld = 100;
constexpr std::uint64_t kHeldOfOther = 28;  // worker

class ForgedTokens : public BadNeighbour {};

TEST_F(ForgedTokens, ReleaseNothing) {
  Process forger({RXTOKEN_HOSTILE_CLIENT, daemon->run_dir(), "campaign"});
  ASSERT_FALSE(forger.WaitForLine("ready").empty());
  sender->Tell(std::to_string(kNeighbourPort) + " " + std::to_string(kHeld));
  MemifSource other(*daemon, "p1", second_socket);
  daemon->AttachQueue("b0", "p1", 0);
  other.Send(kNeighbourPort, kHeldOfOther);
  forger.Tell("hold " + std::to_string(kHeld) + " " + std::to_string(kHeldOfOther));
  ASSERT_FALSE(forger.WaitForLine("holds").empty());

  const char* const wish = std::getenv("RXTOKEN_SEED");
  const std::string seed = wish != nullptr ? wish : std::to_string(std::random_device()());
  if (!FullCampaign()) std::printf("RXTOKEN_SEED=%s\n", seed.c_str());
  forger.Tell("return " + (FullCampaign() ? "all" : seed));
  while (forger.FindLine("returned").empty() && forger.Running() && !HasFailure()) {
    SendUntil(sent + 256, 0);
  }

  std::uint64_t other_slots = 0;
  std::uint64_t out_of_range = 0;
  std::uint64_t others = 0;
  const std::string returned = forger.WaitForLine("returned");
  ASSERT_EQ(
      std::sscanf(returned.c_str(), "returned %lu %lu %lu", &other_slots, &out_of_range, &others),
      3)
      << returned;
  EXPECT_TRUE(WaitUntil(
      [&] { return daemon->GetRxSocket("hostile1").statistics().outstanding() == kHeldOfOther; }));
  const v1::RxSocketStatistics statistics = daemon->GetRxSocket("hostile1", true).statistics();
  std::printf("%lu tokens while %lu datagrams went to the other: %s\n",
              other_slots + out_of_range + others, sent, statistics.ShortDebugString().c_str());
  EXPECT_EQ(statistics.returned(), kHeld);
  EXPECT_EQ(statistics.audited_outstanding(), kHeldOfOther);
  const auto refused = [&](const char* reason) {
    const auto found = statistics.refusals().find(reason);
    return found == statistics.refusals().end() ? 0 : found->second;
  };
  EXPECT_EQ(refused("slot_not_in_use"), other_slots);
  EXPECT_EQ(refused("out_of_range"), out_of_range);
  // Those of lane 0 were returned on lane 1, too.
  EXPECT_EQ(refused("not_held") + refused("wrong_owner"), others - kHeld + kHeld);
  EXPECT_GE(refused("wrong_owner"), kHeld);

  forger.CloseInput();
  EXPECT_EQ(forger.Wait(), 0) << forger.Output();
  ExpectBystanderUnharmed();
}

}  // namespace
}  // namespace rxtoken::test
