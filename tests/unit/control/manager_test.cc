// SPDX-License-Identifier: Apache-2.0
#include "control/manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/control/fake_dataplane.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

class ManagerTest : public testing::Test {
 protected:
  ManagerTest() {
    PortOptions port;
    port.name = "p0";
    port.device = "fake";
    port.queues = 4;
    EXPECT_TRUE(manager_.OpenPort(port).ok());
  }

  Manager::Session NewSession() { return manager_.StartSession(1, 1).value(); }

  Result<v1::Binding> Bind(const std::string& name, std::uint32_t queue,
                           const std::string& session = "") {
    v1::BindRequest request;
    request.set_name(name);
    request.set_session(session);
    request.set_buffer_bytes(1 << 20);
    request.add_queues()->set_port("p0");
    request.mutable_queues(0)->set_queue(queue);
    return manager_.Bind(request);
  }
  Result<v1::Binding> Unbind(const std::string& name, const std::string& session = "") {
    v1::UnbindRequest request;
    request.set_name(name);
    request.set_session(session);
    return manager_.Unbind(request);
  }

  Result<v1::OpenRxSocketResponse> Open(const std::string& name, const std::string& session = "") {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_session(session);
    return manager_.OpenRxSocket(request);
  }
  Result<v1::CloseRxSocketResponse> Close(const std::string& name,
                                          const std::string& session = "") {
    v1::CloseRxSocketRequest request;
    request.set_name(name);
    request.set_session(session);
    return manager_.CloseRxSocket(request);
  }
  Code AttachCode(SessionId session, const std::string& secret) {
    const Result<Manager::Attached> attached = manager_.Attach(session, secret);
    if (attached.ok()) UniqueFd(attached->attachment.doorbell);
    return attached.status().code();
  }
  Result<Manager::Stream> Stream(const std::string& name, const std::string& session = "") {
    v1::ReceiveRequest request;
    request.set_rx_socket(name);
    request.set_session(session);
    return manager_.BeginStream(request);
  }

  Result<v1::Flow> Add(const std::string& rx_socket, std::uint32_t vlan,
                       const std::string& session = "", int priority = 0) {
    v1::AddFlowRequest request;
    request.mutable_match()->set_vlan(vlan);
    request.set_rx_socket(rx_socket);
    request.set_priority(priority);
    request.set_session(session);
    return manager_.AddFlow(request);
  }

  FakeDataplane dataplane_;
  Manager manager_{dataplane_};
};

TEST_F(ManagerTest, NamesKeepToTheirSyntax) {
  EXPECT_TRUE(Open("aZ0._-").ok());
  EXPECT_TRUE(Open(std::string(64, 'a')).ok());
  for (const std::string& name : {std::string(), std::string(65, 'a'), std::string("a b"),
                                  std::string("a/b"), std::string("a\n")}) {
    EXPECT_EQ(Open(name).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(Bind(name, 0).status().code(), Code::kInvalidArgument);
  }
}

TEST_F(ManagerTest, NamesAreTakenOnceOfEachKind) {
  EXPECT_TRUE(Open("x").ok());
  EXPECT_TRUE(Bind("x", 0).ok());
  EXPECT_EQ(Open("x").status().code(), Code::kAlreadyExists);
  EXPECT_EQ(Bind("x", 1).status().code(), Code::kAlreadyExists);
  EXPECT_EQ(manager_.OpenPort({.name = "p0", .device = "fake"}).code(), Code::kAlreadyExists);
}

TEST_F(ManagerTest, UnknownPortsQueuesAndSessionsAreNotFound) {
  EXPECT_THAT(Bind("b", 4).status().message(), HasSubstr("it has 0..3"));
  EXPECT_EQ(Bind("b", 4).status().code(), Code::kNotFound);
  EXPECT_EQ(Bind("b", 0, std::string(32, '0')).status().code(), Code::kNotFound);
  v1::GetPortRequest request;
  request.set_name("p1");
  EXPECT_EQ(manager_.GetPort(request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, ABindingDrainsUntilItIsReaped) {
  const std::uint64_t id = Bind("b", 0)->id();
  EXPECT_FALSE(manager_.ReapBindings());
  EXPECT_EQ(Unbind("b")->state(), v1::BINDING_STATE_DRAINING);
  EXPECT_EQ(Unbind("b").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Bind("b", 1).status().code(), Code::kAlreadyExists);
  EXPECT_TRUE(manager_.ReapBindings());
  dataplane_.drained.insert(id);
  EXPECT_FALSE(manager_.ReapBindings());
  EXPECT_EQ(manager_.ListBindings()->bindings_size(), 0);
  EXPECT_TRUE(Bind("b", 0).ok());
}

TEST_F(ManagerTest, OnlyTheOwnerChangesWhatIsOwned) {
  const auto owner = NewSession();
  const auto other = NewSession();
  ASSERT_TRUE(Bind("b", 0, owner.key).ok());
  ASSERT_TRUE(Open("s", owner.key).ok());
  const std::uint64_t flow = Add("s", 1, owner.key)->id();
  v1::DeleteFlowRequest remove;
  remove.set_id(flow);
  for (const std::string& key : {other.key, std::string()}) {
    remove.set_session(key);
    EXPECT_EQ(Unbind("b", key).status().code(), Code::kPermissionDenied);
    EXPECT_EQ(Close("s", key).status().code(), Code::kPermissionDenied);
    EXPECT_EQ(Stream("s", key).status().code(), Code::kPermissionDenied);
    EXPECT_EQ(Add("s", 2, key).status().code(), Code::kPermissionDenied);
    EXPECT_EQ(manager_.DeleteFlow(remove).status().code(), Code::kPermissionDenied);
    EXPECT_EQ(manager_.FindOwnRxSocket("s", key).status().code(), Code::kPermissionDenied);
  }
  remove.set_session(owner.key);
  EXPECT_TRUE(manager_.DeleteFlow(remove).ok());
  EXPECT_TRUE(Close("s", owner.key).ok());
  EXPECT_TRUE(Unbind("b", owner.key).ok());
}

TEST_F(ManagerTest, AnybodyChangesWhatNobodyOwns) {
  const auto session = NewSession();
  ASSERT_TRUE(Open("s").ok());
  EXPECT_TRUE(Add("s", 1, session.key).ok());
  EXPECT_EQ(Close("s", session.key)->reclaimed_fragments(), 7u);
}

TEST_F(ManagerTest, ClosingARxSocketRemovesAllRulesThatNameIt) {
  const auto session = NewSession();
  ASSERT_TRUE(Open("s").ok());
  ASSERT_TRUE(Open("t").ok());
  ASSERT_TRUE(Add("s", 1).ok());
  ASSERT_TRUE(Add("s", 2, session.key).ok());
  ASSERT_TRUE(Add("t", 3).ok());
  ASSERT_TRUE(Close("s").ok());
  ASSERT_EQ(dataplane_.rules.size(), 1u);
  EXPECT_EQ(dataplane_.rules[0].match.vlan, 3);
}

TEST_F(ManagerTest, ASessionsRulesThenRxSocketsThenBindingsGoWithIt) {
  const auto session = NewSession();
  ASSERT_TRUE(Open("shared").ok());
  ASSERT_TRUE(Open("s", session.key).ok());
  ASSERT_TRUE(Bind("b", 0, session.key).ok());
  ASSERT_TRUE(Bind("kept", 1).ok());
  ASSERT_TRUE(Add("shared", 1, session.key).ok());
  ASSERT_TRUE(Add("s", 2, session.key).ok());
  ASSERT_TRUE(Add("shared", 3).ok());
  dataplane_.calls.clear();
  manager_.EndSession(session.id);
  EXPECT_THAT(dataplane_.calls, ElementsAre("SetRules 1", "CloseRxSocket s", "Unbind b"));
  EXPECT_EQ(Open("x", session.key).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, TheSameMatchAndPriorityIsRefusedAndTheOtherRuleNamed) {
  ASSERT_TRUE(Open("s").ok());
  const std::uint64_t first = Add("s", 1)->id();
  const Status status = Add("s", 1).status();
  EXPECT_EQ(status.code(), Code::kAlreadyExists);
  EXPECT_THAT(status.message(), HasSubstr("flow rule " + std::to_string(first)));
  EXPECT_TRUE(Add("s", 1, "", 1).ok());
  EXPECT_EQ(Add("s", 2, "", 32768).status().code(), Code::kInvalidArgument);
}

TEST_F(ManagerTest, ARuleIsPointedAtAnotherRxSocketInOneStep) {
  ASSERT_TRUE(Open("s").ok());
  ASSERT_TRUE(Open("t").ok());
  v1::UpdateFlowRequest request;
  request.set_id(Add("s", 1)->id());
  request.set_rx_socket("t");
  dataplane_.calls.clear();
  const Result<v1::Flow> flow = manager_.UpdateFlow(request);
  EXPECT_EQ(flow->rx_socket(), "t");
  EXPECT_EQ(flow->packets(), 10u);
  EXPECT_THAT(dataplane_.calls, ElementsAre("SetRules 1"));
  request.set_rx_socket("u");
  EXPECT_EQ(manager_.UpdateFlow(request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, RulesAreListedInTheOrderInWhichTheyAreTried) {
  ASSERT_TRUE(Open("s").ok());
  ASSERT_TRUE(Add("s", 1).ok());
  ASSERT_TRUE(Add("s", 2).ok());
  const auto list = manager_.ListFlows();
  ASSERT_EQ(list->flows_size(), 2);
  EXPECT_EQ(list->flows(0).match().vlan(), 2u);
  EXPECT_EQ(list->flows(0).packets(), 20u);
  EXPECT_EQ(list->flows(1).match().vlan(), 1u);
}

TEST_F(ManagerTest, AMatchOnAQueueIsResolved) {
  ASSERT_TRUE(Open("s").ok());
  v1::AddFlowRequest request;
  request.set_rx_socket("s");
  request.mutable_match()->set_port("p0");
  request.mutable_match()->set_queue(3);
  ASSERT_TRUE(manager_.AddFlow(request).ok());
  EXPECT_EQ(dataplane_.rules[0].match.port, 0u);
  EXPECT_EQ(dataplane_.rules[0].match.queue, 3u);
  request.mutable_match()->set_queue(4);
  EXPECT_EQ(manager_.AddFlow(request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, AnAttachSecretIsGoodOnceAndForItsOwnerOnly) {
  const auto owner = NewSession();
  const auto other = NewSession();
  const std::string secret = Open("s", owner.key)->attach_secret();
  EXPECT_EQ(secret.size(), 32u);
  EXPECT_EQ(AttachCode(other.id, secret), Code::kPermissionDenied);
  EXPECT_EQ(AttachCode(owner.id, std::string(32, '0')), Code::kNotFound);
  EXPECT_EQ(AttachCode(owner.id, ""), Code::kNotFound);
  EXPECT_EQ(AttachCode(owner.id, secret), Code::kOk);
  EXPECT_EQ(AttachCode(owner.id, secret), Code::kNotFound);
  EXPECT_EQ(Stream("s", owner.key).status().code(), Code::kFailedPrecondition);
}

TEST_F(ManagerTest, ARxSocketEndsWithTheSessionThatIsAttachedToIt) {
  const auto session = NewSession();
  const std::string secret = Open("s")->attach_secret();
  ASSERT_EQ(AttachCode(session.id, secret), Code::kOk);
  ASSERT_TRUE(Add("s", 1).ok());
  manager_.EndSession(session.id);
  EXPECT_TRUE(dataplane_.sockets.empty());
  EXPECT_TRUE(dataplane_.rules.empty());
}

TEST_F(ManagerTest, OneStreamAtATimeAndNoApplicationAfterIt) {
  const auto session = NewSession();
  const std::string secret = Open("s")->attach_secret();
  const auto first = Stream("s");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Stream("s").status().code(), Code::kFailedPrecondition);
  manager_.EndStream(first->rx_socket);
  const auto second = Stream("s");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->reader, first->reader);
  EXPECT_EQ(AttachCode(session.id, secret), Code::kNotFound);
}

TEST_F(ManagerTest, ClosingARxSocketEndsItsStream) {
  ASSERT_TRUE(Open("s").ok());
  const auto stream = Stream("s");
  ASSERT_TRUE(Close("s").ok());
  v1::ReceiveResponse batch;
  EXPECT_TRUE(stream->reader->Read(batch, 64).closed);
  manager_.EndStream(stream->rx_socket);  // nothing happens
}

TEST_F(ManagerTest, BuffersAreForTheirOwnerAndForSessionsWithAnAttachedRxSocket) {
  const auto owner = NewSession();
  const auto reader = NewSession();
  const std::uint64_t id = Bind("b", 0, owner.key)->id();
  EXPECT_TRUE(manager_.GetBufferFor(owner.id, id).ok());
  EXPECT_EQ(manager_.GetBufferFor(reader.id, id).status().code(), Code::kPermissionDenied);
  EXPECT_EQ(manager_.GetBufferFor(owner.id, id + 99).status().code(), Code::kNotFound);
  ASSERT_EQ(AttachCode(reader.id, Open("s", reader.key)->attach_secret()), Code::kOk);
  EXPECT_TRUE(manager_.GetBufferFor(reader.id, id).ok());
}

TEST_F(ManagerTest, SessionsAreLimited) {
  for (std::size_t i = 0; i < kMaxSessions; i++) ASSERT_TRUE(manager_.StartSession(1, 1).ok());
  EXPECT_EQ(manager_.StartSession(1, 1).status().code(), Code::kResourceExhausted);
}

}  // namespace
}  // namespace rxtoken
