// SPDX-License-Identifier: Apache-2.0
#include "control/services.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/token.grpc.pb.h"
#include "tests/unit/control/fake_dataplane.h"
#include "tests/unit/control/temp_dir.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

class ServicesTest : public testing::Test {
 protected:
  ServicesTest() {
    loop_thread_ = std::thread([this] { loop_->RunUntilStopped(); });
    api_ = ApiServer::Start(*loop_, manager_, {path_}).value();
    auto channel = grpc::CreateChannel("unix:" + path_, grpc::InsecureChannelCredentials());
    tokens_ = v1::Tokens::NewStub(channel);
    rx_sockets_ = v1::RxSockets::NewStub(channel);
  }
  ~ServicesTest() override {
    api_.reset();
    loop_->Stop();
    loop_thread_.join();
  }

  static void SetDeadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }
  // Runs on the loop, where the fake belongs.
  template <typename Work>
  void OnLoop(Work work) {
    const Status status = loop_->Run(ControlLoop::Clock::time_point::max(), [&] {
      work();
      return Status();
    });
    EXPECT_TRUE(status.ok());
  }

  std::uint64_t Open(const std::string& name) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    v1::OpenRxSocketResponse response;
    EXPECT_TRUE(rx_sockets_->OpenRxSocket(&context, request, &response).ok());
    return response.rx_socket().id();
  }
  grpc::Status Close(const std::string& name) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::CloseRxSocketRequest request;
    request.set_name(name);
    v1::CloseRxSocketResponse response;
    return rx_sockets_->CloseRxSocket(&context, request, &response);
  }
  grpc::Status ReturnTokens(const v1::ReturnTokensRequest& request,
                            v1::ReturnTokensResponse* response) {
    grpc::ClientContext context;
    SetDeadline(context);
    return tokens_->ReturnTokens(&context, request, response);
  }
  // Puts messages with tokens first..first+count-1 into the ring.
  void Lend(std::uint64_t rx_socket, std::uint32_t first, std::uint32_t count) {
    OnLoop([&] {
      if (binding_ == 0) {
        binding_ = *dataplane_.Bind({.name = "b", .buffer_bytes = 1 << 20, .queues = {}});
        dataplane_.MapSlot(rx_socket, 0, binding_);
      }
      for (std::uint32_t i = 0; i < count; i++) {
        dataplane_.Lend(rx_socket, binding_, first + i, 0, std::to_string(first + i));
      }
    });
  }
  // Tokens and payloads of the next `count` messages of a new stream.
  std::vector<std::string> Receive(const std::string& name, std::uint64_t count,
                                   bool hold = false) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::ReceiveRequest request;
    request.set_rx_socket(name);
    request.set_max_messages(count);
    request.set_hold(hold);
    const auto stream = tokens_->Receive(&context, request);
    std::vector<std::string> payloads;
    for (v1::ReceiveResponse response; stream->Read(&response);) {
      EXPECT_GT(response.messages_size(), 0);
      for (const v1::Message& message : response.messages()) {
        payloads.push_back(message.fragments(0).payload());
      }
    }
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return payloads;
  }

  TempDir temp_;
  std::string path_ = temp_.path() + "/api.sock";
  FakeDataplane dataplane_;
  Manager manager_{dataplane_};
  std::unique_ptr<ControlLoop> loop_ = ControlLoop::Create().value();
  std::unique_ptr<ApiServer> api_;
  std::thread loop_thread_;
  std::unique_ptr<v1::Tokens::Stub> tokens_;
  std::unique_ptr<v1::RxSockets::Stub> rx_sockets_;
  std::uint64_t binding_ = 0;
};

TEST_F(ServicesTest, ErrorsAreStatusCodesThatNameTheObject) {
  const grpc::Status status = Close("nobody");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no rx socket 'nobody'");
}

TEST_F(ServicesTest, AStreamDeliversAndReturnsAndTheNextOneGoesOn) {
  const std::uint64_t id = Open("s");
  Lend(id, 1, 3);
  EXPECT_THAT(Receive("s", 2), ElementsAre("1", "2"));
  EXPECT_THAT(Receive("s", 1, /*hold=*/true), ElementsAre("3"));
  Lend(id, 4, 1);
  EXPECT_THAT(Receive("s", 1), ElementsAre("4"));
  OnLoop([&] { EXPECT_THAT(dataplane_.DrainReturns(id), ElementsAre(1, 2, 4)); });
}

TEST_F(ServicesTest, AStreamEndsWithOkWhenItsRxSocketIsClosed) {
  Open("s");
  grpc::ClientContext context;
  SetDeadline(context);
  v1::ReceiveRequest request;
  request.set_rx_socket("s");
  const auto stream = tokens_->Receive(&context, request);
  // Wait until it is attached.
  v1::RxSocket rx_socket;
  while (!rx_socket.attached()) {
    grpc::ClientContext get_context;
    SetDeadline(get_context);
    v1::GetRxSocketRequest get;
    get.set_name("s");
    ASSERT_TRUE(rx_sockets_->GetRxSocket(&get_context, get, &rx_socket).ok());
  }
  EXPECT_TRUE(Close("s").ok());
  v1::ReceiveResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServicesTest, AStreamEndsWhenTheServerStops) {
  const std::uint64_t id = Open("s");
  Lend(id, 1, 1);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::ReceiveRequest request;
  request.set_rx_socket("s");
  const auto stream = tokens_->Receive(&context, request);
  v1::ReceiveResponse response;
  EXPECT_TRUE(stream->Read(&response));
  api_.reset();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServicesTest, RangesAreReturnedInChunksAndAnsweredOneByOne) {
  Open("s");
  v1::ReturnTokensRequest request;
  request.set_rx_socket("s");
  for (const std::uint32_t count : {1u, 200'000u, 2u}) {
    v1::TokenRange& range = *request.add_ranges();
    range.set_first_token(std::numeric_limits<std::uint32_t>::max() - count + 1);
    range.set_count(count);
  }
  v1::ReturnTokensResponse response;
  ASSERT_TRUE(ReturnTokens(request, &response).ok());
  ASSERT_EQ(response.results_size(), 3);
  EXPECT_EQ(response.results(0).released(), 1u);
  EXPECT_EQ(response.results(1).released(), 200'000u);
  EXPECT_EQ(response.results(2).released(), 2u);
  const std::uint32_t first = 4'294'967'295u - 200'000 + 1;
  OnLoop([&] {
    EXPECT_THAT(dataplane_.returned,
                ElementsAre(Pair(4'294'967'295u, 1), Pair(first, 65'535),
                            Pair(first + 65'535, 65'536), Pair(first + 131'071, 65'536),
                            Pair(first + 196'607, 3'393), Pair(4'294'967'294u, 2)));
  });
}

TEST_F(ServicesTest, AllOrNothingIsOnePiece) {
  Open("s");
  v1::ReturnTokensRequest request;
  request.set_rx_socket("s");
  request.set_all_or_nothing(true);
  request.add_ranges()->set_count(100'000);
  request.add_ranges()->set_count(900'000);
  v1::ReturnTokensResponse response;
  ASSERT_TRUE(ReturnTokens(request, &response).ok());
  OnLoop([&] {
    EXPECT_THAT(dataplane_.returned, ElementsAre(Pair(0, 100'000), Pair(0, 900'000)));
    EXPECT_TRUE(dataplane_.returned_all_or_nothing);
  });
}

TEST_F(ServicesTest, RangesOutOfBoundsReturnNothing) {
  Open("s");
  const auto refused = [&](const v1::ReturnTokensRequest& request) {
    v1::ReturnTokensResponse response;
    const grpc::Status status = ReturnTokens(request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    OnLoop([&] { EXPECT_TRUE(dataplane_.returned.empty()); });
    return status.error_message();
  };
  v1::ReturnTokensRequest request;
  request.set_rx_socket("s");
  EXPECT_THAT(refused(request), HasSubstr("no range"));
  v1::TokenRange& range = *request.add_ranges();
  EXPECT_THAT(refused(request), HasSubstr("count is 0"));
  range.set_first_token(std::numeric_limits<std::uint32_t>::max());
  range.set_count(2);
  EXPECT_THAT(refused(request), HasSubstr("run past"));
  range.set_first_token(0);
  range.set_count((1 << 20) + 1);
  EXPECT_THAT(refused(request), HasSubstr("at most 1048576"));
  range.set_count(1);
  for (int i = 0; i < 65536; i++) request.add_ranges()->set_count(1);
  EXPECT_THAT(refused(request), HasSubstr("at most 65536"));
}

}  // namespace
}  // namespace rxtoken
