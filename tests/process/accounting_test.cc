// SPDX-License-Identifier: Apache-2.0
// accounting_test.cc - at full speed the books balance, at every moment, and nothing grows.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "tests/process/harness.h"
#include "tests/sanitized.h"

namespace rxtoken::test {
namespace {

using std::chrono::steady_clock;

std::uint64_t Sum(const google::protobuf::Map<std::string, std::uint64_t>& reasons) {
  std::uint64_t sum = 0;
  for (const auto& [reason, n] : reasons) sum += n;
  return sum;
}

TEST(Accounting, BalancesAtEveryReadWhileNetNullRunsAtFullSpeed) {
  constexpr std::uint64_t kPages = 16384;
  const std::chrono::seconds run(FullCampaign() ? 600 : 5);
  Daemon daemon({"--port", "p0=net_null0,size=64"});
  ASSERT_TRUE(daemon.process().Running());
  Process client({RXTOKEN_TEST_CLIENT, "--run-dir", daemon.run_dir(), "--port", "p0", "--name",
                  "rx", "--discard", "--hold", "256"});
  ASSERT_FALSE(client.WaitForLine("ready").empty());
  daemon.Bind("b0", "p0", kPages);
  ASSERT_TRUE(
      WaitUntil([&] { return daemon.GetRxSocket("rx").statistics().returned() > 100'000; }));
  Process& process = daemon.process();
  const std::ptrdiff_t descriptors = process.Descriptors();
  const std::uint64_t resident_kib = process.ResidentKiB();

  int reads = 0;
  std::uint64_t lent_before = 0;
  const auto end = steady_clock::now() + run;
  while (steady_clock::now() < end && !HasFailure()) {
    const v1::RxSocketStatistics now = daemon.GetRxSocket("rx").statistics();
    EXPECT_EQ(now.lent(), now.returned() + now.outstanding());
    EXPECT_GE(now.lent(), lent_before);
    EXPECT_TRUE(now.refusals().empty()) << now.ShortDebugString();
    lent_before = now.lent();
    if (reads++ % 10'000 == 0) {
      std::printf("%lu lent, %lu outstanding, %u pages free, %ld descriptors, %lu KiB\n",
                  now.lent(), now.outstanding(), daemon.GetBinding("b0").pages_free(),
                  process.Descriptors(), process.ResidentKiB());
      std::fflush(stdout);
    }
  }
  EXPECT_GT(reads, 100);
  std::printf("%lu lent, %d reads\n", lent_before, reads);

  // The uref arrays say the same as the counters.
  const v1::RxSocketStatistics audited = daemon.GetRxSocket("rx", true).statistics();
  EXPECT_EQ(audited.audited_outstanding(), audited.outstanding());

  // Every frame that came was lent, or dropped for a reason that was counted: once the client
  // stands still and its ring is full, nothing more is lent, and the sums can be compared.
  client.Signal(SIGSTOP);
  v1::RxSocketStatistics full;
  EXPECT_TRUE(WaitUntil([&] {
    const v1::RxSocketStatistics before =
        std::exchange(full, daemon.GetRxSocket("rx").statistics());
    return before.lent() == full.lent() && Sum(full.drops()) > Sum(before.drops());
  }));
  const v1::Queue queue = daemon.GetPort("p0").queues(0);
  EXPECT_EQ(queue.rx_packets(), full.lent() + Sum(queue.drops())) << queue.ShortDebugString();

  EXPECT_LE(process.Descriptors(), descriptors);
  if (!kSanitized) {
    EXPECT_LT(process.ResidentKiB(), resident_kib + 2048);
  }
  client.Signal(SIGKILL);
  EXPECT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
}

}  // namespace
}  // namespace rxtoken::test
