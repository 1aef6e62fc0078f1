// SPDX-License-Identifier: Apache-2.0
// refusal_test.cc - tokens that an application must not return, through its ring and over
// gRPC: refused, with the reason, and without any other effect.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"
#include "tokens/abi/limits.h"

namespace rxtoken::test {
namespace {

constexpr std::uint64_t kPages = 4096;
constexpr std::uint32_t kSlotNotInUse = 31u << kPageBits | 5;
constexpr std::uint32_t kOutOfRange = kPages;

using Refusals = std::map<std::string, std::uint64_t>;

Refusals ToMap(const google::protobuf::Map<std::string, std::uint64_t>& map) {
  return {map.begin(), map.end()};
}

// Two workers with a port each. Both rx sockets are lent a few frames of each port, and hold
// them. From then on nothing moves any more but what a test does.
class RefusedTokens : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    BindBoth();
    of_a = Lend("a", a, 5001);
    of_b = Lend("b", b, 5002);
    ASSERT_FALSE(HasFailure());
    before_a = daemon.GetRxSocket("a", true).statistics();
    before_b = daemon.GetRxSocket("b", true).statistics();
    free_before = daemon.GetBinding("b0").pages_free();
  }

  void BindBoth() {
    v1::BindRequest request;
    request.set_name("b0");
    request.set_buffer_bytes(kPages * 4096);
    for (const char* port : {"p0", "p1"}) request.add_queues()->set_port(port);
    v1::Binding response;
    grpc::ClientContext context;
    ASSERT_TRUE(daemon.bindings().Bind(&context, request, &response).ok());
    for (Process* sender : {&sender0, &sender1}) {
      ASSERT_FALSE(sender->WaitForLine("connected").empty());
    }
  }

  // Makes a rx socket for `client`, and has kLent frames sent to it from each port, one port
  // after the other.
  std::vector<RawFragment> Lend(const std::string& name, RawClient& client,
                                std::uint32_t udp_port) {
    client.Attach(daemon.OpenRxSocket(name, client.session()).attach_secret());
    v1::Match match;
    match.set_protocol(17);
    match.set_destination_port(udp_port);
    daemon.AddFlow(name, match, client.session());
    std::vector<RawFragment> got;
    for (Process* sender : {&sender0, &sender1}) {
      const std::size_t enough = got.size() + kLent;
      sender->Tell(std::to_string(udp_port) + " " + std::to_string(kLent));
      EXPECT_TRUE(WaitUntil([&] {
        for (const RawFragment& fragment : client.Poll()) got.push_back(fragment);
        return got.size() >= enough;
      }));
    }
    EXPECT_EQ(OfLane(got, 0).size(), kLent);
    EXPECT_EQ(OfLane(got, 1).size(), kLent);
    return got;
  }

  static std::vector<RawFragment> OfLane(const std::vector<RawFragment>& all, std::uint32_t lane) {
    std::vector<RawFragment> some;
    for (const RawFragment& fragment : all) {
      if (fragment.lane == lane) some.push_back(fragment);
    }
    return some;
  }

  // `a` has been refused exactly this since SetUp, and has returned exactly so many
  // fragments; `b` has noticed nothing, and the pool has changed by those pages only.
  void ExpectOnly(const Refusals& refusals, std::uint64_t returned) {
    EXPECT_TRUE(WaitUntil([&] {
      const v1::RxSocketStatistics now = daemon.GetRxSocket("a").statistics();
      return ToMap(now.refusals()) == refusals && now.returned() == before_a.returned() + returned;
    })) << daemon.GetRxSocket("a").statistics().ShortDebugString();
    const v1::RxSocketStatistics now = daemon.GetRxSocket("a", true).statistics();
    EXPECT_EQ(now.lent(), before_a.lent());
    EXPECT_EQ(now.outstanding(), before_a.outstanding() - returned);
    EXPECT_EQ(now.audited_outstanding(), now.outstanding());
    const v1::RxSocketStatistics now_b = daemon.GetRxSocket("b", true).statistics();
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(now_b, before_b))
        << now_b.ShortDebugString() << "\n"
        << before_b.ShortDebugString();
    EXPECT_EQ(daemon.GetBinding("b0").pages_free(), free_before + returned);
  }

  // One range of one token, over gRPC.
  v1::RangeResult ReturnOverGrpc(std::uint32_t token) {
    v1::ReturnTokensRequest request;
    request.set_rx_socket("a");
    request.set_session(a.session());
    request.add_ranges()->set_first_token(token);
    request.mutable_ranges(0)->set_count(1);
    v1::ReturnTokensResponse response;
    grpc::ClientContext context;
    const grpc::Status status = daemon.tokens().ReturnTokens(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.results_size() == 1 ? response.results(0) : v1::RangeResult();
  }

  void ExpectRefusedOverGrpc(std::uint32_t token, const std::string& reason) {
    const v1::RangeResult result = ReturnOverGrpc(token);
    EXPECT_EQ(result.released(), 0u);
    EXPECT_EQ(ToMap(result.refusals()), (Refusals{{reason, 1}}));
  }

  static std::string MemifPort(const std::string& name, const std::string& socket) {
    return name + "=net_memif_" + name + ",role=server,socket-abstract=no,socket=" + socket;
  }

  static constexpr std::size_t kLent = 10;  // fragments of each lane
  TempDir directory;
  std::string socket0 = directory.path() / "memif0.sock";
  std::string socket1 = directory.path() / "memif1.sock";
  Daemon daemon{{"--worker", "any,any", "--port", MemifPort("p0", socket0), "--port",
                 MemifPort("p1", socket1)}};
  Process sender0{{RXTOKEN_MEMIF_SENDER, socket0, "1", "18", "1472"}};
  Process sender1{{RXTOKEN_MEMIF_SENDER, socket1, "2", "18", "1472"}};
  RawClient a{daemon.run_dir()};
  RawClient b{daemon.run_dir()};
  std::vector<RawFragment> of_a;
  std::vector<RawFragment> of_b;
  v1::RxSocketStatistics before_a;
  v1::RxSocketStatistics before_b;
  std::uint64_t free_before = 0;
};

TEST_F(RefusedTokens, ReturnedTwice) {
  const std::uint32_t token = of_a.front().token;
  a.Return(of_a.front().lane, std::array{token, token});
  ExpectOnly({{"not_held", 1}}, 1);
  ExpectRefusedOverGrpc(token, "not_held");
  ExpectOnly({{"not_held", 2}}, 1);
}

TEST_F(RefusedTokens, OutOfRange) {
  const std::uint32_t slot = of_a.front().token >> kPageBits << kPageBits;
  a.Return(0, std::array{slot | kOutOfRange, slot | (kMaxPagesPerBuffer - 1)});
  ExpectOnly({{"out_of_range", 2}}, 0);
  ExpectRefusedOverGrpc(slot | kOutOfRange, "out_of_range");
  ExpectOnly({{"out_of_range", 3}}, 0);
}

TEST_F(RefusedTokens, OfASlotNotInUse) {
  a.Return(0, std::array{kSlotNotInUse, 0xFFFF'FFFFu});
  ExpectOnly({{"slot_not_in_use", 2}}, 0);
  ExpectRefusedOverGrpc(kSlotNotInUse, "slot_not_in_use");
  ExpectOnly({{"slot_not_in_use", 3}}, 0);
}

TEST_F(RefusedTokens, OfAnotherRxSocket) {
  a.Return(0, std::array{OfLane(of_b, 0).front().token});
  ExpectOnly({{"not_held", 1}}, 0);
  ExpectRefusedOverGrpc(OfLane(of_b, 0).front().token, "not_held");
  ExpectOnly({{"not_held", 2}}, 0);
}

TEST_F(RefusedTokens, ThroughTheLaneOfAnotherWorker) {
  a.Return(0, std::array{OfLane(of_a, 1).front().token});
  ExpectOnly({{"wrong_owner", 1}}, 0);
}

TEST_F(RefusedTokens, HeldTokensGoBackOverGrpc) {
  std::uint64_t returned = 0;
  for (const RawFragment& fragment : of_a) {
    EXPECT_EQ(ReturnOverGrpc(fragment.token).released(), 1u);
    ExpectOnly({}, ++returned);
  }
}

TEST_F(RefusedTokens, AllOrNothingOverBothWorkers) {
  v1::ReturnTokensRequest request;
  request.set_rx_socket("a");
  request.set_session(a.session());
  request.set_all_or_nothing(true);
  const auto call = [&] {
    v1::ReturnTokensResponse response;
    grpc::ClientContext context;
    const grpc::Status status = daemon.tokens().ReturnTokens(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  std::size_t tokens = 0;
  for (const RawFragment& fragment : of_a) {
    v1::TokenRange& range = *request.add_ranges();
    range.set_first_token(fragment.token);
    range.set_count(1);
    tokens++;
  }
  *request.add_ranges() = request.ranges(0);  // held once only

  const v1::ReturnTokensResponse refused = call();
  for (const v1::RangeResult& result : refused.results()) EXPECT_EQ(result.released(), 0u);
  ASSERT_EQ(refused.results_size(), static_cast<int>(tokens) + 1);
  EXPECT_EQ(ToMap(refused.results(refused.results_size() - 1).refusals()),
            (Refusals{{"not_held", 1}}));
  ExpectOnly({{"not_held", 1}}, 0);

  request.mutable_ranges()->RemoveLast();
  const v1::ReturnTokensResponse accepted = call();
  for (const v1::RangeResult& result : accepted.results()) EXPECT_EQ(result.released(), 1u);
  ExpectOnly({{"not_held", 1}}, tokens);
}

TEST_F(RefusedTokens, ATailThatIsFurtherAheadThanTheRingIsLong) {
  a.return_ring(0)->tail.store(a.entries() + 1000, std::memory_order_release);
  EXPECT_TRUE(WaitUntil(
      [&] { return daemon.GetRxSocket("a").statistics().refusals().contains("bad_ring"); }));
  EXPECT_EQ(daemon.GetRxSocket("a").statistics().outstanding(), before_a.outstanding());
  EXPECT_EQ(daemon.GetBinding("b0").pages_free(), free_before);
}

}  // namespace
}  // namespace rxtoken::test
