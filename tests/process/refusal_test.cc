// SPDX-License-Identifier: Apache-2.0
// refusal_test.cc - tokens that an application must not return, through its ring and over
// gRPC: refused, with the reason, and without any other effect.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
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

// Two workers with a queue each. `a` is lent frames of both queues, `b` some of the first.
// Then the frames stop to have a rule, and nothing moves any more but what a test does.
class RefusedTokens : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(daemon.process().Running());
    daemon.Bind("b0", "p0", kPages, 4096, 2);
    v1::Match any;
    const std::string secret_b = daemon.OpenRxSocket("b", b.session()).attach_secret();
    b.Attach(secret_b);
    of_b = Collect(b, daemon.AddFlow("b", any, b.session()), b.session());
    const std::string secret_a = daemon.OpenRxSocket("a", a.session()).attach_secret();
    a.Attach(secret_a);
    of_a = Collect(a, daemon.AddFlow("a", any, a.session()), a.session());
    ASSERT_FALSE(HasFailure());
    before_a = daemon.GetRxSocket("a", true).statistics();
    before_b = daemon.GetRxSocket("b", true).statistics();
    free_before = PagesFree();
  }

  // Frames go on coming, and a page that a worker is about to drop is not free. So this is the
  // most that it sees within so many looks.
  std::uint64_t PagesFree() {
    std::uint64_t most = 0;
    for (int i = 0; i < 500; i++)
      most = std::max<std::uint64_t>(most, daemon.GetBinding("b0").pages_free());
    return most;
  }

  // Receives on both lanes, then removes the rule and returns all but a few fragments.
  std::vector<RawFragment> Collect(RawClient& client, const v1::Flow& flow,
                                   const std::string& session) {
    std::vector<RawFragment> got;
    EXPECT_TRUE(WaitUntil([&] {
      for (const RawFragment& fragment : client.Poll()) got.push_back(fragment);
      return OfLane(got, 0).size() > kKept && OfLane(got, 1).size() > kKept;
    }));
    v1::DeleteFlowRequest request;
    request.set_id(flow.id());
    request.set_session(session);
    v1::DeleteFlowResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(daemon.flows().DeleteFlow(&context, request, &response).ok());
    for (const RawFragment& fragment : client.Poll()) got.push_back(fragment);

    std::vector<RawFragment> kept;
    for (const std::uint32_t lane : {0u, 1u}) {
      const std::vector<RawFragment> all = OfLane(got, lane);
      std::vector<std::uint32_t> tokens;
      for (std::size_t i = 0; i < all.size(); i++) {
        if (i < kKept) {
          kept.push_back(all[i]);
        } else {
          tokens.push_back(all[i].token);
        }
      }
      client.Return(lane, tokens);
    }
    const std::string name = &client == &a ? "a" : "b";
    EXPECT_TRUE(WaitUntil(
        [&] { return daemon.GetRxSocket(name).statistics().outstanding() == kept.size(); }));
    return kept;
  }

  static std::vector<RawFragment> OfLane(const std::vector<RawFragment>& all, std::uint32_t lane) {
    std::vector<RawFragment> some;
    for (const RawFragment& fragment : all) {
      if (fragment.lane == lane) some.push_back(fragment);
    }
    return some;
  }

  // A token that `b` holds and `a` does not.
  std::uint32_t Foreign() const {
    for (const RawFragment& of : of_b) {
      bool held_by_a = false;
      for (const RawFragment& fragment : of_a) held_by_a |= fragment.token == of.token;
      if (!held_by_a && of.lane == 0) return of.token;
    }
    ADD_FAILURE() << "a and b hold the same pages";
    return 0;
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
    EXPECT_EQ(PagesFree(), free_before + returned);
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

  static constexpr std::size_t kKept = 10;  // fragments of each lane
  Daemon daemon{{"--worker", "any,any", "--port", "p0=net_null0,size=64;queues=2"}};
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
  a.Return(0, std::array{Foreign()});
  ExpectOnly({{"not_held", 1}}, 0);
  ExpectRefusedOverGrpc(Foreign(), "not_held");
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

TEST_F(RefusedTokens, ATailThatIsFurtherAheadThanTheRingIsLong) {
  a.return_ring(0)->tail.store(a.entries() + 1000, std::memory_order_release);
  EXPECT_TRUE(WaitUntil(
      [&] { return daemon.GetRxSocket("a").statistics().refusals().contains("bad_ring"); }));
  EXPECT_EQ(daemon.GetRxSocket("a").statistics().outstanding(), before_a.outstanding());
  EXPECT_EQ(PagesFree(), free_before);
}

TEST_F(RefusedTokens, AnotherSessionMayNotReturn) {
  v1::ReturnTokensRequest request;
  request.set_rx_socket("a");
  request.set_session(b.session());
  request.add_ranges()->set_first_token(of_a.front().token);
  request.mutable_ranges(0)->set_count(1);
  v1::ReturnTokensResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(daemon.tokens().ReturnTokens(&context, request, &response).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  ExpectOnly({}, 0);
}

}  // namespace
}  // namespace rxtoken::test
