// SPDX-License-Identifier: Apache-2.0
// workers_test.cc - two workers, and a binding whose pages are all with the one: the other gets
// them when it receives for that binding.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/memif_source.h"

namespace rxtoken::test {
namespace {

constexpr std::uint64_t kPages = 4096;
constexpr std::uint64_t kDatagrams = 4000;  // nearly all pages
constexpr std::uint16_t kFirstPort = 5000;
constexpr std::uint16_t kSecondPort = 5001;

// p0 and b0 are the first worker's, p1 and b1 the second's. The first has used the pages of b0.
class TwoWorkers : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    daemon.Bind("b0", "p0", kPages);
    daemon.Bind("b1", "p1", kPages);
    Process first(Client("first", kFirstPort));
    ASSERT_FALSE(first.WaitForLine("ready").empty());
    source0.Send(kFirstPort, kDatagrams);
    ASSERT_TRUE(first.WaitForLine("done").ends_with("errors=0"));
    ASSERT_EQ(daemon.GetBinding("b0").pages_free(), kPages - kDatagrams);
    first.Tell("return");
    ASSERT_TRUE(WaitUntil([&] { return daemon.GetBinding("b0").pages_free() == kPages; }));
  }

  // The arguments of an application that keeps what it receives.
  std::vector<std::string> Client(const std::string& name, std::uint16_t udp_port) {
    return {RXTOKEN_TEST_CLIENT,
            "--run-dir",
            daemon.run_dir(),
            "--name",
            name,
            "--udp-port",
            std::to_string(udp_port),
            "--count",
            std::to_string(kDatagrams),
            "--keep"};
  }

  TempDir directory;
  std::string socket0 = directory.path() / "memif0.sock";
  std::string socket1 = directory.path() / "memif1.sock";
  Daemon daemon{{"--worker", "any,any", "--port", MemifSource::Port("p0", socket0), "--port",
                 MemifSource::Port("p1", socket1)}};
  MemifSource source0{daemon, "p0", socket0};
  MemifSource source1{daemon, "p1", socket1};
};

TEST_F(TwoWorkers, ABindingMovesToAQueueOfTheOther) {
  Process second(Client("second", kSecondPort));
  ASSERT_FALSE(second.WaitForLine("ready").empty());

  daemon.AttachQueue("b0", "p1", 0);
  daemon.AttachQueue("b1", "p0", 0);
  source1.Send(kSecondPort, kDatagrams);

  const std::string done = second.WaitForLine("done");
  EXPECT_TRUE(done.ends_with("errors=0")) << done;
  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), kPages - kDatagrams);
  EXPECT_TRUE(daemon.GetRxSocket("second").statistics().drops().empty());
}

TEST_F(TwoWorkers, TheOtherCopiesIntoABinding) {
  v1::OpenRxSocketRequest request;
  request.set_name("second");
  request.add_bindings("b0");
  v1::Match match;
  match.set_protocol(17);
  match.set_destination_port(kSecondPort);
  std::vector<std::string> arguments = Client("second", kSecondPort);
  arguments.insert(arguments.end(),
                   {"--copied", "--secret", daemon.OpenRxSocket(request).attach_secret()});
  daemon.AddFlow("second", match);
  Process second(arguments);
  ASSERT_FALSE(second.WaitForLine("ready").empty());

  // The first worker may keep some for itself.
  constexpr std::uint64_t kCopies = kDatagrams / 2;
  source1.Send(kSecondPort, kCopies);

  const v1::RxSocketStatistics statistics = daemon.GetRxSocket("second").statistics();
  EXPECT_EQ(statistics.copied_messages(), kCopies);
  EXPECT_TRUE(statistics.drops().empty()) << statistics.ShortDebugString();
}

}  // namespace
}  // namespace rxtoken::test
