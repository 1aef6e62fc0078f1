// SPDX-License-Identifier: Apache-2.0
#include "control/manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/unit/control/fake_dataplane.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

constexpr uid_t kAlice = 4001;
constexpr uid_t kBob = 4002;
constexpr gid_t kAdmins = 4003;

class ManagerTest : public testing::Test {
 protected:
  ManagerTest() {
    PortOptions port;
    port.name = "p0";
    port.device = "fake";
    port.queues = 4;
    EXPECT_TRUE(manager_.OpenPort(port).ok());
  }

  // Of an administrator, unless another user is named.
  Manager::Session NewSession(uid_t uid = geteuid()) {
    return manager_.StartSession({.pid = 1, .uid = uid}).value();
  }
  // Makes a call for the user of the request's session.
  template <typename Response, typename Request>
  Result<Response> Call(Result<Response> (Manager::*method)(const Caller&, const Request&),
                        const Request& request) {
    std::string key;
    if constexpr (requires { request.session(); }) key = request.session();
    const Result<Caller> caller = manager_.Identify({.request_key = key});
    if (!caller.ok()) return caller.status();
    return (manager_.*method)(*caller, request);
  }

  Result<v1::Binding> Bind(const std::string& name, std::uint32_t queue,
                           const std::string& session = "") {
    v1::BindRequest request;
    request.set_name(name);
    request.set_session(session);
    request.set_buffer_bytes(1 << 20);
    request.add_queues()->set_port("p0");
    request.mutable_queues(0)->set_queue(queue);
    return Call(&Manager::Bind, request);
  }
  Result<v1::Binding> Unbind(const std::string& name, const std::string& session = "",
                             std::uint32_t drain_timeout_ms = 0) {
    v1::UnbindRequest request;
    request.set_name(name);
    request.set_session(session);
    request.set_drain_timeout_ms(drain_timeout_ms);
    return Call(&Manager::Unbind, request);
  }

  Result<v1::Binding> AttachQueue(const std::string& name, std::uint32_t queue,
                                  const std::string& session = "") {
    v1::AttachQueuesRequest request;
    request.set_name(name);
    request.set_session(session);
    request.add_queues()->set_port("p0");
    request.mutable_queues(0)->set_queue(queue);
    return Call(&Manager::AttachQueues, request);
  }

  Result<v1::OpenRxSocketResponse> Open(const std::string& name, const std::string& session = "") {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_session(session);
    return Call(&Manager::OpenRxSocket, request);
  }
  Result<v1::CloseRxSocketResponse> Close(const std::string& name,
                                          const std::string& session = "") {
    v1::CloseRxSocketRequest request;
    request.set_name(name);
    request.set_session(session);
    return Call(&Manager::CloseRxSocket, request);
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
    return Call(&Manager::BeginStream, request);
  }

  Result<v1::Flow> Add(const std::string& rx_socket, std::uint32_t vlan,
                       const std::string& session = "", int priority = 0) {
    v1::AddFlowRequest request;
    request.mutable_match()->set_vlan(vlan);
    request.add_rx_sockets(rx_socket);
    request.set_priority(priority);
    request.set_session(session);
    return Call(&Manager::AddFlow, request);
  }

  Result<v1::Flow> AddTo(const std::vector<std::string>& rx_sockets, std::uint32_t vlan,
                         const std::string& session = "") {
    v1::AddFlowRequest request;
    request.mutable_match()->set_vlan(vlan);
    request.mutable_rx_sockets()->Assign(rx_sockets.begin(), rx_sockets.end());
    request.set_session(session);
    return Call(&Manager::AddFlow, request);
  }
  // A STRICT rx socket with an application attached, over the session `owner`.
  void OpenStrict(const std::string& name, const Manager::Session& owner) {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_session(owner.key);
    request.set_steering(v1::STEERING_STRICT);
    ASSERT_EQ(AttachCode(owner.id, Call(&Manager::OpenRxSocket, request)->attach_secret()),
              Code::kOk);
  }
  std::vector<std::uint64_t> Receivers(std::size_t rule) const {
    return dataplane_.rules.at(rule).rx_sockets;
  }

  Manager::Clock::time_point now_ = Manager::Clock::time_point(std::chrono::hours(1));
  FakeDataplane dataplane_;
  Manager manager_{dataplane_, {}, [this] { return now_; }};
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
  EXPECT_EQ(Call(&Manager::GetPort, request).status().code(), Code::kNotFound);
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
  EXPECT_EQ(Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings_size(), 0);
  EXPECT_TRUE(Bind("b", 0).ok());
}

TEST_F(ManagerTest, WhatIsStillHeldAtTheDrainDeadlineIsRevoked) {
  using std::chrono::milliseconds;
  const std::uint64_t id = Bind("b", 0)->id();
  EXPECT_EQ(Unbind("b", "", 100)->drain_left_ms(), 100u);
  now_ += milliseconds(99);
  EXPECT_TRUE(manager_.ReapBindings());
  EXPECT_EQ(Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings(0).drain_left_ms(),
            1u);
  EXPECT_THAT(dataplane_.calls, ElementsAre("Unbind b"));
  now_ += milliseconds(1);
  EXPECT_TRUE(manager_.ReapBindings());
  EXPECT_TRUE(manager_.ReapBindings());
  EXPECT_THAT(dataplane_.calls, ElementsAre("Unbind b", "Revoke b"));
  EXPECT_FALSE(
      Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings(0).has_drain_left_ms());
  dataplane_.drained.insert(id);
  EXPECT_FALSE(manager_.ReapBindings());
}

TEST_F(ManagerTest, ASecondUnbindSetsAnotherDrainTimeout) {
  using std::chrono::milliseconds;
  ASSERT_TRUE(Bind("b", 0).ok());
  EXPECT_FALSE(Unbind("b")->has_drain_left_ms());
  EXPECT_EQ(Unbind("b", "", 1000)->drain_left_ms(), 1000u);
  EXPECT_EQ(Unbind("b", "", 2000)->drain_left_ms(), 2000u);
  EXPECT_EQ(Unbind("b").status().code(), Code::kFailedPrecondition);
  now_ += milliseconds(1000);
  EXPECT_TRUE(manager_.ReapBindings());
  EXPECT_THAT(dataplane_.calls, ElementsAre("Unbind b"));
}

// A Bind that is getting memory.
class DraftTest : public ManagerTest {
 protected:
  Result<BindingDraft> Begin(const std::string& name, const Manager::Session& session) {
    v1::BindRequest request;
    request.set_name(name);
    request.set_session(session.key);
    request.set_buffer_bytes(1 << 20);
    request.add_queues()->set_port("p0");
    return Call(&Manager::BeginBind, request);
  }

  const Manager::Session session_ = NewSession();
};

TEST_F(DraftTest, HoldsItsNameAndNotItsQueue) {
  Result<BindingDraft> draft = Begin("b0", session_);
  ASSERT_TRUE(draft.ok());
  EXPECT_EQ(Begin("b0", session_).status().code(), Code::kAlreadyExists);
  EXPECT_EQ(Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings_size(), 0);

  const Result<v1::Binding> binding = manager_.EndBind(*draft, Status());
  ASSERT_TRUE(binding.ok());
  EXPECT_EQ(binding->id(), draft->id);
  EXPECT_EQ(Bind("b0", 1).status().code(), Code::kAlreadyExists);
}

TEST_F(DraftTest, WithoutMemoryNothingIsLeft) {
  Result<BindingDraft> draft = Begin("b0", session_);
  const Status none(Code::kResourceExhausted, "no memory");
  EXPECT_EQ(manager_.EndBind(*draft, none).status().message(), "no memory");
  EXPECT_TRUE(Bind("b0", 0).ok());
}

TEST_F(DraftTest, GoesWithItsSession) {
  Result<BindingDraft> draft = Begin("b0", session_);
  manager_.EndSession(session_.id);
  EXPECT_EQ(manager_.EndBind(*draft, Status()).status().code(), Code::kNotFound);
  EXPECT_TRUE(dataplane_.buffers.empty());
  EXPECT_TRUE(Bind("b0", 0).ok());
}

TEST_F(DraftTest, AUserHasFourAtATime) {
  std::vector<Result<BindingDraft>> drafts;
  for (int i = 0; i < 4; i++) drafts.push_back(Begin("b" + std::to_string(i), session_));
  const Status refused = Begin("b4", session_).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("4 of 4 Bind calls"));
  EXPECT_TRUE(Begin("c", NewSession(4711)).ok());
  ASSERT_TRUE(manager_.EndBind(*drafts[0], Status()).ok());
  EXPECT_TRUE(Begin("b4", session_).ok());
}

TEST_F(ManagerTest, ADrainTimeoutHasALimit) {
  ASSERT_TRUE(Bind("b", 0).ok());
  EXPECT_EQ(Unbind("b", "", 3'600'001).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(dataplane_.calls.empty());
  EXPECT_EQ(Unbind("b", "", 3'600'000)->drain_left_ms(), 3'600'000u);
}

TEST_F(ManagerTest, AQueueMovesToAnotherBinding) {
  ASSERT_TRUE(Bind("a", 0).ok());
  ASSERT_TRUE(Bind("b", 1).ok());
  EXPECT_EQ(AttachQueue("b", 0)->queues_size(), 2);
  EXPECT_EQ(AttachQueue("b", 2)->queues_size(), 3);
  EXPECT_EQ(Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings(0).queues_size(), 0);
  EXPECT_EQ(AttachQueue("b", 4).status().code(), Code::kNotFound);
  EXPECT_EQ(AttachQueue("c", 0).status().code(), Code::kNotFound);
  v1::AttachQueuesRequest none;
  none.set_name("b");
  EXPECT_EQ(Call(&Manager::AttachQueues, none).status().code(), Code::kInvalidArgument);
}

TEST_F(ManagerTest, QueuesAreTakenFromBindingsOfTheSameUser) {
  const auto mine = NewSession(kAlice);
  const auto theirs = NewSession(kBob);
  ASSERT_TRUE(Bind("mine", 0, mine.key).ok());
  ASSERT_TRUE(Bind("mine2", 1, mine.key).ok());
  ASSERT_TRUE(Bind("theirs", 2, theirs.key).ok());
  EXPECT_TRUE(AttachQueue("mine", 1, mine.key).ok());
  EXPECT_TRUE(AttachQueue("mine2", 0, NewSession(kAlice).key).ok());
  const Status taken = AttachQueue("mine", 2, mine.key).status();
  EXPECT_EQ(taken.code(), Code::kPermissionDenied);
  EXPECT_THAT(taken.message(), HasSubstr("queue 2 of port 'p0'"));
  EXPECT_EQ(Bind("mine3", 2, mine.key).status().code(), Code::kPermissionDenied);
  EXPECT_EQ(AttachQueue("mine", 3, theirs.key).status().code(), Code::kNotFound);
  EXPECT_TRUE(AttachQueue("mine", 2).ok()) << "by an administrator";
}

TEST_F(ManagerTest, ABindingSaysHowManyFramesAPageCarries) {
  EXPECT_EQ(Bind("a", 0)->frames_per_page(), 1u);
  v1::BindRequest request;
  request.set_name("b");
  request.set_buffer_bytes(1 << 20);
  request.set_frames_per_page(2);
  request.add_queues()->set_port("p0");
  EXPECT_EQ(Call(&Manager::Bind, request)->frames_per_page(), 2u);
  EXPECT_EQ(Call(&Manager::ListBindings, v1::ListBindingsRequest())->bindings(1).saturated_pages(),
            11u);
}

TEST_F(ManagerTest, ABindingMayGetItsQueuesLater) {
  v1::BindRequest request;
  request.set_name("b");
  request.set_buffer_bytes(1 << 20);
  EXPECT_EQ(Call(&Manager::Bind, request)->queues_size(), 0);
  EXPECT_EQ(AttachQueue("b", 0)->queues_size(), 1);
}

TEST_F(ManagerTest, TheExceptionPathOfAPortIsShown) {
  ASSERT_TRUE(manager_.OpenPort({.name = "p1", .device = "fake", .exception_tap = "tap1"}).ok());
  const auto ports = Call(&Manager::ListPorts, v1::ListPortsRequest());
  EXPECT_FALSE(ports->ports(0).has_exception_path());
  const v1::ExceptionPath& path = ports->ports(1).exception_path();
  EXPECT_EQ(path.interface(), "tap1");
  EXPECT_EQ(path.to_kernel(), 1u);
  EXPECT_EQ(path.from_kernel(), 2u);
  EXPECT_EQ(path.to_kernel_drops(), 3u);
  EXPECT_EQ(path.from_kernel_drops(), 4u);
}

TEST_F(ManagerTest, ARxSocketIsOpenedWithItsOptions) {
  const std::uint64_t a = Bind("a", 0)->id();
  const std::uint64_t b = Bind("b", 1)->id();
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  request.set_max_held_fragments(100);
  request.add_bindings("b");
  request.add_bindings("a");
  request.set_outside(v1::OUTSIDE_DROP);
  request.set_steering(v1::STEERING_STRICT);
  const v1::RxSocket opened = Call(&Manager::OpenRxSocket, request)->rx_socket();
  EXPECT_EQ(opened.max_held_fragments(), 100u);
  EXPECT_THAT(opened.bindings(), ElementsAre("b", "a"));
  EXPECT_EQ(opened.outside(), v1::OUTSIDE_DROP);
  EXPECT_EQ(opened.steering(), v1::STEERING_STRICT);
  EXPECT_EQ(opened.statistics().waiting(), 4u);
  EXPECT_EQ(opened.statistics().revoked(), 5u);
  const RxSocketOptions& options = dataplane_.sockets.at(opened.id()).options;
  EXPECT_EQ(options.max_held_fragments, 100u);
  EXPECT_THAT(options.bindings, ElementsAre(b, a));
  EXPECT_EQ(options.outside, Outside::kDrop);

  ASSERT_TRUE(Unbind("b").ok());
  dataplane_.drained.insert(b);
  manager_.ReapBindings();
  EXPECT_THAT(Call(&Manager::ListRxSockets, v1::ListRxSocketsRequest())->rx_sockets(0).bindings(),
              ElementsAre("a"));
}

TEST_F(ManagerTest, LeasesAreLookedAtFourTimesInTheirTime) {
  EXPECT_FALSE(manager_.ExpireLeases());
  ASSERT_TRUE(Open("none").ok());
  EXPECT_FALSE(manager_.ExpireLeases());
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  request.set_lease_ms(400);
  EXPECT_EQ(Call(&Manager::OpenRxSocket, request)->rx_socket().lease_ms(), 400u);
  EXPECT_EQ(dataplane_.sockets.rbegin()->second.options.lease_ns, 400'000'000u);
  const auto expired = [&] { return std::exchange(dataplane_.calls, {}); };

  EXPECT_TRUE(manager_.ExpireLeases());
  EXPECT_THAT(expired(), ElementsAre("Expire s"));
  now_ += std::chrono::milliseconds(99);
  EXPECT_TRUE(manager_.ExpireLeases());
  EXPECT_THAT(expired(), IsEmpty());
  now_ += std::chrono::milliseconds(1);
  EXPECT_TRUE(manager_.ExpireLeases());
  EXPECT_THAT(expired(), ElementsAre("Expire s"));
  ASSERT_TRUE(Close("s").ok());
  EXPECT_FALSE(manager_.ExpireLeases());
}

TEST_F(ManagerTest, ALeaseHasLimits) {
  for (const std::uint32_t lease : {1u, 99u, 3'600'001u}) {
    v1::OpenRxSocketRequest request;
    request.set_name("s");
    request.set_lease_ms(lease);
    const Status status = Call(&Manager::OpenRxSocket, request).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("100 to 3600000"));
  }
}

TEST_F(ManagerTest, CopyOutNeedsALimitAndABuffer) {
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  const auto refused = [&](const char* why) {
    const Status status = Call(&Manager::OpenRxSocket, request).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(why));
  };
  request.set_copy_out_bytes(4096);
  refused("slow is not COPY_OUT");
  request.set_slow(v1::SLOW_COPY_OUT);
  refused("set max_held_fragments");
  request.set_max_held_fragments(10);
  for (const std::uint64_t bytes : {0ul, 4097ul, (256ul << 20) + 4096}) {
    request.set_copy_out_bytes(bytes);
    refused("multiple of 4096 up to 268435456");
  }
  request.set_slow(static_cast<v1::Slow>(4));
  refused("slow is 4; use 0, DROP_NEW (1), COPY_OUT (2) or PAUSE (3)");

  request.set_slow(v1::SLOW_COPY_OUT);
  request.set_copy_out_bytes(8192);
  const Result<v1::OpenRxSocketResponse> opened = Call(&Manager::OpenRxSocket, request);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->rx_socket().slow(), v1::SLOW_COPY_OUT);
  EXPECT_EQ(opened->rx_socket().copy_out_bytes(), 8192u);
  const RxSocketOptions& options = dataplane_.sockets.rbegin()->second.options;
  EXPECT_EQ(options.slow, Slow::kCopyOut);
  EXPECT_EQ(options.copy_out_bytes, 8192u);
}

TEST_F(ManagerTest, SaysOnRequestWhatARxSocketHolds) {
  const std::uint64_t a = Bind("a", 0)->id();
  const std::uint64_t b = Bind("b", 1)->id();
  ASSERT_TRUE(Open("s").ok());
  dataplane_.held = {.pages = {{a, 3}, {b, 100}}, .oldest_ns = 5'000'999};
  v1::GetRxSocketRequest request;
  request.set_name("s");
  EXPECT_FALSE(Call(&Manager::GetRxSocket, request)->statistics().has_held());

  request.set_held(true);
  const v1::RxSocketStatistics statistics = Call(&Manager::GetRxSocket, request)->statistics();

  const v1::Held& held = statistics.held();
  EXPECT_EQ(held.pages(), 103u);
  EXPECT_EQ(held.oldest_us(), 5000u);
  ASSERT_EQ(held.bindings_size(), 2);
  EXPECT_EQ(held.bindings(0).binding(), "b");
  EXPECT_EQ(held.bindings(0).pages(), 100u);
  EXPECT_EQ(held.bindings(0).of_pages(), dataplane_.GetBinding(b)->pages);
  ASSERT_EQ(statistics.hold_times_size(), 2);
  EXPECT_EQ(statistics.hold_times(0).upper_us(), 262u);
  EXPECT_EQ(statistics.hold_times(0).count(), 6u);
  EXPECT_FALSE(statistics.hold_times(1).has_upper_us());
  v1::ListRxSocketsRequest list;
  list.set_held(true);
  EXPECT_EQ(Call(&Manager::ListRxSockets, list)->rx_sockets(0).statistics().held().pages(), 103u);
}

TEST_F(ManagerTest, ARxSocketMayNotNameABindingThatIsDraining) {
  ASSERT_TRUE(Bind("b", 0).ok());
  ASSERT_TRUE(Unbind("b").ok());
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  request.add_bindings("b");
  const Status status = Call(&Manager::OpenRxSocket, request).status();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(status.message(), "rx socket 's': binding 'b' is draining; name one that is not");
}

TEST_F(ManagerTest, ARxSocketCopiesAndMigratesUnlessToldOtherwise) {
  const v1::RxSocket opened = Open("s")->rx_socket();
  EXPECT_EQ(opened.outside(), v1::OUTSIDE_COPY);
  EXPECT_EQ(opened.steering(), v1::STEERING_MIGRATE);
  EXPECT_EQ(dataplane_.sockets.at(opened.id()).options.outside, Outside::kCopy);
}

TEST_F(ManagerTest, RxSocketOptionsThatDoNotExistAreRefused) {
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  request.set_outside(static_cast<v1::Outside>(3));
  EXPECT_THAT(Call(&Manager::OpenRxSocket, request).status().message(), HasSubstr("outside is 3"));
  request.clear_outside();
  request.set_steering(static_cast<v1::Steering>(3));
  EXPECT_THAT(Call(&Manager::OpenRxSocket, request).status().message(), HasSubstr("steering is 3"));
  request.clear_steering();
  request.add_bindings("b");
  EXPECT_EQ(Call(&Manager::OpenRxSocket, request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, WhatBelongsToAUserIsNotThereForAnother) {
  const auto alice = NewSession(kAlice);
  const auto bob = NewSession(kBob);
  ASSERT_TRUE(Bind("b", 0, alice.key).ok());
  ASSERT_TRUE(Open("s", alice.key).ok());
  v1::DeleteFlowRequest remove;
  remove.set_id(Add("s", 1, alice.key)->id());
  remove.set_session(bob.key);
  v1::UpdateFlowRequest update;
  update.set_id(remove.id());
  update.set_session(bob.key);
  EXPECT_EQ(Unbind("b", bob.key).status().code(), Code::kNotFound);
  EXPECT_EQ(Close("s", bob.key).status().code(), Code::kNotFound);
  EXPECT_EQ(Stream("s", bob.key).status().code(), Code::kNotFound);
  EXPECT_EQ(Add("s", 2, bob.key).status().code(), Code::kNotFound);
  EXPECT_EQ(Call(&Manager::DeleteFlow, remove).status().code(), Code::kNotFound);
  EXPECT_EQ(Call(&Manager::UpdateFlow, update).status().code(), Code::kNotFound);

  const Caller as_bob = *manager_.Identify({.metadata_key = bob.key});
  EXPECT_EQ(manager_.FindRxSocket(as_bob, "s").status().code(), Code::kNotFound);
  v1::GetBindingRequest get;
  get.set_name("b");
  EXPECT_EQ(manager_.GetBinding(as_bob, get).status().code(), Code::kNotFound);
  EXPECT_EQ(manager_.ListBindings(as_bob, {})->bindings_size(), 0);
  EXPECT_EQ(manager_.ListRxSockets(as_bob, {})->rx_sockets_size(), 0);
  EXPECT_EQ(manager_.ListFlows(as_bob, {})->flows_size(), 0);
  EXPECT_EQ(manager_.ListPorts(as_bob, {})->ports(0).queues(0).binding(), "");
  EXPECT_EQ(Open("s", bob.key).status().code(), Code::kAlreadyExists) << "names are for all";
  ASSERT_TRUE(Bind("b2", 1, bob.key).ok());
  ASSERT_TRUE(Open("s2", bob.key).ok());
  EXPECT_THAT(Add("s2", 1, bob.key).status().message(), HasSubstr("another user's flow rule"));
}

TEST_F(ManagerTest, SessionsOfAUserAndAdministratorsChangeWhatBelongsToTheUser) {
  const auto alice = NewSession(kAlice);
  ASSERT_TRUE(Bind("b", 0, alice.key).ok());
  ASSERT_TRUE(Open("s", alice.key).ok());
  ASSERT_TRUE(Open("t", alice.key).ok());
  EXPECT_EQ(Call(&Manager::ListRxSockets, v1::ListRxSocketsRequest())->rx_sockets(0).user(),
            "uid:" + std::to_string(kAlice));
  const auto again = NewSession(kAlice);
  EXPECT_TRUE(Add("s", 1, again.key).ok());
  EXPECT_EQ(Close("s", again.key)->reclaimed_fragments(), 7u);
  EXPECT_TRUE(Close("t").ok());
  EXPECT_TRUE(Unbind("b", NewSession().key).ok());
}

TEST_F(ManagerTest, WhatIsMadeWithAKeyInTheMetadataOutlivesTheSession) {
  const auto alice = NewSession(kAlice);
  ASSERT_TRUE(Bind("b", 0, alice.key).ok());
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  const v1::RxSocket opened =
      manager_.OpenRxSocket(*manager_.Identify({.metadata_key = alice.key}), open)->rx_socket();
  EXPECT_FALSE(opened.owned());
  manager_.EndSession(alice.id);
  EXPECT_EQ(dataplane_.sockets.size(), 1u);
  EXPECT_TRUE(Close("s", NewSession(kAlice).key).ok());
}

TEST_F(ManagerTest, ARxSocketIsLentPagesOfItsUsersBindingsOnly) {
  const auto alice = NewSession(kAlice);
  const auto bob = NewSession(kBob);
  ASSERT_TRUE(Bind("theirs", 0, bob.key).ok());
  EXPECT_EQ(Open("s", alice.key).status().code(), Code::kFailedPrecondition);
  const std::uint64_t mine = Bind("mine", 1, alice.key)->id();
  const v1::RxSocket opened = Open("s", alice.key)->rx_socket();
  EXPECT_THAT(opened.bindings(), ElementsAre("mine"));
  EXPECT_THAT(dataplane_.sockets.at(opened.id()).options.bindings, ElementsAre(mine));
  v1::OpenRxSocketRequest request;
  request.set_name("t");
  request.set_session(alice.key);
  request.add_bindings("theirs");
  EXPECT_EQ(Call(&Manager::OpenRxSocket, request).status().code(), Code::kNotFound);
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
  EXPECT_THAT(dataplane_.calls,
              ElementsAre("rule 1 gone", "rule 2 gone", "CloseRxSocket s", "Unbind b"));
  EXPECT_EQ(Open("x", session.key).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, ARuleGoesOnWithoutARxSocketThatEndedAndGoesWithTheLast) {
  const std::uint64_t s = Open("s")->rx_socket().id();
  const std::uint64_t t = Open("t")->rx_socket().id();
  EXPECT_THAT(AddTo({"s", "t"}, 1)->rx_sockets(), ElementsAre("s", "t"));
  EXPECT_THAT(Receivers(0), ElementsAre(s, t));
  ASSERT_TRUE(Close("s").ok());
  EXPECT_THAT(Receivers(0), ElementsAre(t));
  ASSERT_TRUE(Close("t").ok());
  EXPECT_TRUE(dataplane_.rules.empty());
  EXPECT_EQ(Call(&Manager::ListFlows, v1::ListFlowsRequest())->flows_size(), 0);
}

TEST_F(ManagerTest, ARuleGoesOnWithoutTheRxSocketsOfASessionThatEnds) {
  const auto session = NewSession();
  ASSERT_TRUE(Open("s", session.key).ok());
  const std::uint64_t shared = Open("shared")->rx_socket().id();
  const std::string secret = Open("read")->attach_secret();
  ASSERT_TRUE(AddTo({"shared", "read"}, 1).ok());
  ASSERT_TRUE(AddTo({"s", "shared"}, 2, session.key).ok());
  ASSERT_EQ(AttachCode(session.id, secret), Code::kOk);
  manager_.EndSession(session.id);
  ASSERT_EQ(dataplane_.rules.size(), 1u);
  EXPECT_EQ(dataplane_.rules[0].match.vlan, 1);
  EXPECT_THAT(Receivers(0), ElementsAre(shared));
}

TEST_F(ManagerTest, ARuleNamesOneTo32RxSocketsEachOnce) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i <= kMaxFanOut; i++) {
    names.push_back("s" + std::to_string(i));
    ASSERT_TRUE(Open(names.back()).ok());
  }
  EXPECT_EQ(AddTo({}, 1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(AddTo(names, 1).status().code(), Code::kInvalidArgument);
  EXPECT_THAT(AddTo({"s1", "s2", "s1"}, 1).status().message(), HasSubstr("'s1' is named twice"));
  EXPECT_EQ(AddTo({"s1", "nobody"}, 1).status().code(), Code::kNotFound);
  names.pop_back();
  EXPECT_EQ(AddTo(names, 1)->rx_sockets_size(), 32);
}

TEST_F(ManagerTest, EachRxSocketOfARuleIsTheUsersOwn) {
  const auto owner = NewSession(kAlice);
  const auto other = NewSession(kBob);
  ASSERT_TRUE(Bind("a", 0, owner.key).ok());
  ASSERT_TRUE(Bind("b", 1, other.key).ok());
  ASSERT_TRUE(Open("mine", owner.key).ok());
  ASSERT_TRUE(Open("theirs", other.key).ok());
  EXPECT_EQ(AddTo({"mine", "theirs"}, 1, owner.key).status().code(), Code::kNotFound);
  EXPECT_TRUE(dataplane_.rules.empty());
}

TEST_F(ManagerTest, AStrictRxSocketKeepsItsRulesUnlessForced) {
  const auto session = NewSession();
  OpenStrict("s", session);
  ASSERT_TRUE(Open("t").ok());
  v1::UpdateFlowRequest update;
  update.set_id(AddTo({"t", "s"}, 1, session.key)->id());
  update.set_session(session.key);
  update.add_rx_sockets("t");
  v1::DeleteFlowRequest remove;
  remove.set_id(update.id());
  remove.set_session(session.key);
  for (const Status& status :
       {Call(&Manager::UpdateFlow, update).status(), Call(&Manager::DeleteFlow, remove).status()}) {
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_THAT(status.message(), testing::AllOf(HasSubstr("'s'"), HasSubstr("`force`")));
  }
  EXPECT_EQ(Receivers(0).size(), 2u);
  update.set_force(true);
  EXPECT_TRUE(Call(&Manager::UpdateFlow, update).ok());
  EXPECT_EQ(Receivers(0).size(), 1u);
  EXPECT_TRUE(Call(&Manager::DeleteFlow, remove).ok()) << "'s' is not in it any more";
}

TEST_F(ManagerTest, StrictIsNothingWithoutAnApplicationAndDoesNotKeepARxSocketFromEnding) {
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  open.set_steering(v1::STEERING_STRICT);
  ASSERT_TRUE(Call(&Manager::OpenRxSocket, open).ok());
  v1::DeleteFlowRequest remove;
  remove.set_id(Add("s", 1)->id());
  EXPECT_TRUE(Call(&Manager::DeleteFlow, remove).ok());

  const auto session = NewSession();
  OpenStrict("t", session);
  OpenStrict("u", session);
  ASSERT_TRUE(AddTo({"t", "u"}, 1, session.key).ok());
  EXPECT_TRUE(Close("t", session.key).ok());
  manager_.EndSession(session.id);
  EXPECT_TRUE(dataplane_.rules.empty());
}

TEST_F(ManagerTest, ARuleSaysWhatItDidAndWhereItIs) {
  ASSERT_TRUE(Open("s").ok());
  v1::AddFlowRequest request;
  request.add_rx_sockets("s");
  request.mutable_steer_to()->set_port("p0");
  request.mutable_steer_to()->set_queue(FakeDataplane::kHardwareQueue);
  const v1::Flow hardware = *Call(&Manager::AddFlow, request);
  EXPECT_EQ(hardware.placement(), v1::PLACEMENT_HARDWARE);
  EXPECT_EQ(hardware.steer_to().queue(), 3u);
  EXPECT_EQ(hardware.drops(), 1000u);
  EXPECT_EQ(hardware.copied(), 10000u);

  request.mutable_match()->set_port("p0");
  request.mutable_steer_to()->set_queue(1);
  const v1::Flow software = *Call(&Manager::AddFlow, request);
  EXPECT_EQ(software.placement(), v1::PLACEMENT_SOFTWARE);
  EXPECT_EQ(software.placement_reason(), "not that queue");

  const v1::Flow plain = *Add("s", 1);
  EXPECT_EQ(plain.placement(), v1::PLACEMENT_SOFTWARE);
  EXPECT_FALSE(plain.has_steer_to());
  EXPECT_FALSE(dataplane_.rules[2].steer_to.has_value());
}

TEST_F(ManagerTest, SteeringNeedsAQueueOfTheSamePortAndNoQueueInTheMatch) {
  ASSERT_TRUE(manager_.OpenPort({.name = "p1", .device = "fake"}).ok());
  ASSERT_TRUE(Open("s").ok());
  v1::AddFlowRequest request;
  request.add_rx_sockets("s");
  request.mutable_match()->set_port("p1");
  request.mutable_steer_to()->set_port("p0");
  EXPECT_EQ(Call(&Manager::AddFlow, request).status().code(), Code::kInvalidArgument);
  request.mutable_match()->set_port("p0");
  request.mutable_match()->set_queue(0);
  EXPECT_EQ(Call(&Manager::AddFlow, request).status().code(), Code::kInvalidArgument);
  request.mutable_match()->clear_queue();
  request.mutable_steer_to()->set_queue(4);
  EXPECT_EQ(Call(&Manager::AddFlow, request).status().code(), Code::kNotFound);
  request.mutable_steer_to()->set_queue(2);
  EXPECT_TRUE(Call(&Manager::AddFlow, request).ok());
  EXPECT_EQ(dataplane_.rules[0].steer_to, (QueueRef{0, 2}));
}

TEST_F(ManagerTest, TheSameFramesWrittenInAnotherWayConflictToo) {
  ASSERT_TRUE(Open("s").ok());
  v1::AddFlowRequest request;
  request.add_rx_sockets("s");
  request.mutable_match()->set_source("0.0.0.0/0");
  ASSERT_TRUE(Call(&Manager::AddFlow, request).ok());
  request.mutable_match()->clear_source();
  request.mutable_match()->set_destination("0.0.0.0/0");
  EXPECT_EQ(Call(&Manager::AddFlow, request).status().code(), Code::kAlreadyExists);
  request.mutable_match()->set_destination("::/0");
  EXPECT_TRUE(Call(&Manager::AddFlow, request).ok());
  request.mutable_match()->clear_destination();
  EXPECT_TRUE(Call(&Manager::AddFlow, request).ok());
}

TEST_F(ManagerTest, AMatchIsFreeAgainOnceItsRuleIsGone) {
  ASSERT_TRUE(Open("s").ok());
  v1::DeleteFlowRequest remove;
  remove.set_id(Add("s", 1)->id());
  ASSERT_TRUE(Add("s", 2).ok());
  ASSERT_TRUE(Call(&Manager::DeleteFlow, remove).ok());
  EXPECT_EQ(Call(&Manager::DeleteFlow, remove).status().code(), Code::kNotFound);
  EXPECT_TRUE(Add("s", 1).ok());
  EXPECT_EQ(Add("s", 2).status().code(), Code::kAlreadyExists);
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

TEST_F(ManagerTest, ListsWorkers) {
  const Result<v1::ListWorkersResponse> workers = manager_.ListWorkers({}, {});
  ASSERT_EQ(workers->workers_size(), 1);
  EXPECT_EQ(workers->workers(0).index(), 0u);
  EXPECT_EQ(workers->workers(0).cpu(), 2);
  EXPECT_EQ(workers->workers(0).reassembly().fragments(), 5u);
  EXPECT_EQ(workers->workers(0).reassembly().overlap(), 1u);
  EXPECT_EQ(workers->workers(0).reassembly().pages(), 3u);
}

TEST_F(ManagerTest, ARuleIsPointedAtAnotherRxSocketInOneStep) {
  ASSERT_TRUE(Open("s").ok());
  ASSERT_TRUE(Open("t").ok());
  v1::UpdateFlowRequest request;
  request.set_id(Add("s", 1)->id());
  request.add_rx_sockets("t");
  dataplane_.calls.clear();
  const Result<v1::Flow> flow = Call(&Manager::UpdateFlow, request);
  EXPECT_THAT(flow->rx_sockets(), ElementsAre("t"));
  EXPECT_EQ(flow->packets(), 10u);
  EXPECT_THAT(dataplane_.calls, ElementsAre("rule 1 changed"));
  request.set_rx_sockets(0, "u");
  EXPECT_EQ(Call(&Manager::UpdateFlow, request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, RulesAreListedInTheOrderInWhichTheyAreTried) {
  ASSERT_TRUE(Open("s").ok());
  ASSERT_TRUE(Add("s", 1).ok());
  ASSERT_TRUE(Add("s", 2).ok());
  const auto list = Call(&Manager::ListFlows, v1::ListFlowsRequest());
  ASSERT_EQ(list->flows_size(), 2);
  EXPECT_EQ(list->flows(0).match().vlan(), 2u);
  EXPECT_EQ(list->flows(0).packets(), 20u);
  EXPECT_EQ(list->flows(1).match().vlan(), 1u);
}

TEST_F(ManagerTest, AMatchOnAQueueIsResolved) {
  ASSERT_TRUE(Open("s").ok());
  v1::AddFlowRequest request;
  request.add_rx_sockets("s");
  request.mutable_match()->set_port("p0");
  request.mutable_match()->set_queue(3);
  ASSERT_TRUE(Call(&Manager::AddFlow, request).ok());
  EXPECT_EQ(dataplane_.rules[0].match.port, 0u);
  EXPECT_EQ(dataplane_.rules[0].match.queue, 3u);
  request.mutable_match()->set_queue(4);
  EXPECT_EQ(Call(&Manager::AddFlow, request).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, AnAttachSecretIsGoodOnceAndForItsUserOnly) {
  const auto owner = NewSession(kAlice);
  const auto other = NewSession(kBob);
  ASSERT_TRUE(Bind("b", 0, owner.key).ok());
  const std::string secret = Open("s", owner.key)->attach_secret();
  EXPECT_EQ(secret.size(), 32u);
  EXPECT_EQ(AttachCode(other.id, secret), Code::kNotFound);
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

TEST_F(ManagerTest, BuffersAreForTheirUserAndForRxSocketsThatMayBeLentTheirPages) {
  const auto owner = NewSession(kAlice);
  const auto reader = NewSession(kBob);
  const std::uint64_t id = Bind("b", 0, owner.key)->id();
  ASSERT_TRUE(Bind("readers", 1, reader.key).ok());
  EXPECT_TRUE(manager_.GetBufferFor(owner.id, id).ok());
  EXPECT_EQ(manager_.GetBufferFor(owner.id, id + 99).status().code(), Code::kNotFound);
  ASSERT_EQ(AttachCode(reader.id, Open("s", reader.key)->attach_secret()), Code::kOk);
  EXPECT_EQ(manager_.GetBufferFor(reader.id, id).status().code(), Code::kNotFound);
}

TEST_F(ManagerTest, SessionsAreLimited) {
  const Credentials alice = {.pid = 1, .uid = kAlice};
  for (int i = 0; i < 256; i++) ASSERT_TRUE(manager_.StartSession(alice).ok());
  const Status refused = manager_.StartSession(alice).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("256 of 256 sessions"));
  for (uid_t uid = 1; uid <= 3; uid++) {
    for (int i = 0; i < 256; i++) NewSession(kBob + uid);
  }
  EXPECT_EQ(manager_.StartSession({.uid = kBob}).status().code(), Code::kResourceExhausted);
}

TEST_F(ManagerTest, ASessionWithALeaseEndsUnlessItIsRenewed) {
  using std::chrono::milliseconds;
  const Credentials remote = {.certificate_name = "rx1.example"};
  v1::OpenSessionRequest request;
  EXPECT_EQ(manager_.OpenSession({.uid = kAlice}, request).status().code(),
            Code::kPermissionDenied);
  request.set_lease_ms(3'600'001);
  EXPECT_EQ(manager_.OpenSession(remote, request).status().code(), Code::kInvalidArgument);
  request.set_lease_ms(1000);
  const std::string key = manager_.OpenSession(remote, request)->session();
  const Manager::Claim claim = {.request_key = key, .certificate_name = "rx1.example"};
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  v1::BindRequest bind;
  bind.set_name("b");
  ASSERT_TRUE(manager_.Bind(*manager_.Identify(claim), bind).ok());
  ASSERT_TRUE(manager_.OpenRxSocket(*manager_.Identify(claim), open).ok());

  now_ += milliseconds(999);
  manager_.EndExpiredSessions();
  EXPECT_TRUE(manager_.KeepAlive(*manager_.Identify(claim), {}).ok());
  now_ += milliseconds(999);
  manager_.EndExpiredSessions();
  EXPECT_EQ(dataplane_.sockets.size(), 1u);
  now_ += milliseconds(1);
  manager_.EndExpiredSessions();
  EXPECT_TRUE(dataplane_.sockets.empty());
  EXPECT_EQ(manager_.Identify(claim).status().code(), Code::kNotFound);

  const Caller local = *manager_.Identify({.request_key = NewSession(kAlice).key});
  EXPECT_EQ(manager_.KeepAlive(local, {}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(manager_.CloseSession(local, {}).status().code(), Code::kFailedPrecondition);
}

TEST_F(ManagerTest, AKeyIsForTheCertificateThatItWasGivenTo) {
  const std::string key = manager_.OpenSession({.certificate_name = "rx1.example"}, {})->session();
  const auto code = [&](const Manager::Claim& claim) {
    return manager_.Identify(claim).status().code();
  };
  EXPECT_EQ(code({.request_key = key, .certificate_name = "rx1.example"}), Code::kOk);
  EXPECT_EQ(code({.request_key = key, .certificate_name = "rx2.example"}), Code::kNotFound);
  EXPECT_EQ(code({.request_key = key}), Code::kNotFound);
  EXPECT_EQ(code({.metadata_key = NewSession(kAlice).key, .certificate_name = "rx1.example"}),
            Code::kNotFound);
  EXPECT_EQ(code({.certificate_name = "rx1.example"}), Code::kPermissionDenied);
}

// A tenant may do little, and have little.
class TenantTest : public testing::Test {
 protected:
  static Access MakeAccess() {
    Access access;
    access.configured = true;
    access.admin_gid = kAdmins;
    Tenant& tenant = access.tenants.emplace_back();
    tenant.uids = {kAlice};
    tenant.ports = {"p0"};
    tenant.flows.emplace();
    tenant.flows->emplace_back().set_destination("10.1.0.0/16");
    tenant.flows->emplace_back().set_vlan(7);
    tenant.bindings = {"shared"};
    const auto limit = [&](Resource resource, std::uint64_t amount) {
      tenant.limits.amounts[static_cast<std::size_t>(resource)] = amount;
    };
    limit(Resource::kBindings, 2);
    limit(Resource::kBufferBytes, 3 << 20);
    limit(Resource::kRxSockets, 3);
    limit(Resource::kRingEntries, 1024);
    limit(Resource::kHeldFragments, 100);
    limit(Resource::kFlows, 1);
    limit(Resource::kStreams, 1);
    return access;
  }
  TenantTest() {
    for (const char* port : {"p0", "p1"}) {
      EXPECT_TRUE(manager_.OpenPort({.name = port, .device = "fake"}).ok());
    }
    EXPECT_TRUE(manager_.CheckTenants().ok());
    v1::BindRequest shared;
    shared.set_name("shared");
    shared.set_buffer_bytes(1 << 20);
    EXPECT_TRUE(manager_.Bind(manager_.Configuration(), shared).ok());
    session_ = manager_.StartSession({.uid = kAlice}).value();
    alice_ = *manager_.Identify({.request_key = session_.key});
  }

  Result<v1::Binding> Bind(const std::string& name, std::uint64_t bytes,
                           const std::string& port = "") {
    v1::BindRequest request;
    request.set_name(name);
    request.set_buffer_bytes(bytes);
    if (!port.empty()) request.add_queues()->set_port(port);
    return manager_.Bind(alice_, request);
  }
  Result<v1::OpenRxSocketResponse> Open(const std::string& name, std::uint32_t ring_entries = 64,
                                        std::uint32_t max_held_fragments = 10) {
    v1::OpenRxSocketRequest request;
    request.set_name(name);
    request.set_ring_entries(ring_entries);
    request.set_max_held_fragments(max_held_fragments);
    return manager_.OpenRxSocket(alice_, request);
  }
  Result<v1::Flow> Add(const v1::Match& match) {
    v1::AddFlowRequest request;
    *request.mutable_match() = match;
    request.add_rx_sockets("s");
    return manager_.AddFlow(alice_, request);
  }

  FakeDataplane dataplane_;
  Manager manager_{dataplane_, MakeAccess()};
  Manager::Session session_;
  Caller alice_;
};

TEST_F(TenantTest, WhoIsNoneGetsNoSession) {
  EXPECT_EQ(manager_.StartSession({.uid = kBob}).status().code(), Code::kPermissionDenied);
  EXPECT_TRUE(manager_.StartSession({.uid = kBob, .gids = {1, kAdmins}}).ok());
  EXPECT_TRUE(manager_.StartSession({.uid = 0}).ok());
}

TEST_F(TenantTest, ACallWithoutAKeyIsRefused) {
  const Status status = manager_.Identify({}).status();
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("descriptors.sock"));
  EXPECT_EQ(manager_.Identify({.metadata_key = std::string(32, '0')}).status().code(),
            Code::kNotFound);
}

TEST_F(TenantTest, OtherPortsAreNotThere) {
  EXPECT_TRUE(Bind("a", 1 << 20, "p0").ok());
  EXPECT_EQ(Bind("b", 1 << 20, "p1").status().code(), Code::kNotFound);
  EXPECT_EQ(manager_.ListPorts(alice_, {})->ports_size(), 1);
  v1::GetPortRequest get;
  get.set_name("p1");
  EXPECT_EQ(manager_.GetPort(alice_, get).status().code(), Code::kNotFound);
}

TEST_F(TenantTest, RulesMatchWithinItsFlows) {
  ASSERT_TRUE(Open("s").ok());
  v1::Match match;
  EXPECT_EQ(Add(match).status().code(), Code::kPermissionDenied);
  match.set_destination("10.0.0.0/8");
  EXPECT_EQ(Add(match).status().code(), Code::kPermissionDenied);
  match.set_destination("10.2.0.0/16");
  EXPECT_THAT(Add(match).status().message(), HasSubstr("10.2.0.0/16"));
  match.set_destination("10.1.2.0/24");
  EXPECT_TRUE(Add(match).ok());
}

TEST_F(TenantTest, WithoutFlowsRulesMatchOnItsPorts) {
  Access access = MakeAccess();
  access.tenants[0].flows.reset();
  FakeDataplane dataplane;
  Manager manager(dataplane, access);
  ASSERT_TRUE(manager.OpenPort({.name = "p0", .device = "fake"}).ok());
  const Caller alice =
      *manager.Identify({.request_key = manager.StartSession({.uid = kAlice})->key});
  v1::BindRequest bind;
  bind.set_name("b");
  ASSERT_TRUE(manager.Bind(alice, bind).ok());
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  open.set_ring_entries(64);
  ASSERT_TRUE(manager.OpenRxSocket(alice, open).ok());
  v1::AddFlowRequest add;
  add.add_rx_sockets("s");
  EXPECT_EQ(manager.AddFlow(alice, add).status().code(), Code::kPermissionDenied);
  add.mutable_match()->set_port("p0");
  EXPECT_TRUE(manager.AddFlow(alice, add).ok());
}

TEST_F(TenantTest, ItIsLentPagesOfTheBindingsThatAreNamedForIt) {
  EXPECT_THAT(Open("s")->rx_socket().bindings(), ElementsAre("shared"));
  EXPECT_EQ(manager_.ListBindings(alice_, {})->bindings_size(), 0) << "it does not see them";
}

TEST_F(TenantTest, LimitsAreNamedAndComeBack) {
  const auto refused = [](const Status& status, const char* limit) {
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_THAT(status.message(), HasSubstr(limit));
  };
  ASSERT_TRUE(Bind("a", 2 << 20).ok());
  refused(Bind("b", 2 << 20).status(), "2097152 of 3145728 buffer_bytes and asks for 2097152 more");
  ASSERT_TRUE(Bind("b", 1 << 20).ok());
  refused(Bind("c", 0).status(), "2 of 2 bindings");

  ASSERT_TRUE(Open("s").ok());
  refused(Open("t", 1024).status(), "ring_entries");
  refused(Open("t", 64, 91).status(), "held_fragments");
  EXPECT_EQ(Open("t", 64, 0)->rx_socket().max_held_fragments(), 90u) << "what is left";
  refused(Open("u", 64, 0).status(), "held_fragments");
  v1::CloseRxSocketRequest close;
  close.set_name("t");
  ASSERT_TRUE(manager_.CloseRxSocket(alice_, close).ok());
  ASSERT_TRUE(Open("t").ok());
  ASSERT_TRUE(Open("u").ok());
  refused(Open("v").status(), "3 of 3 rx_sockets");

  v1::Match match;
  match.set_vlan(7);
  const std::uint64_t flow = Add(match)->id();
  match.set_protocol(17);
  refused(Add(match).status(), "1 of 1 flows");
  v1::DeleteFlowRequest remove;
  remove.set_id(flow);
  ASSERT_TRUE(manager_.DeleteFlow(alice_, remove).ok());
  EXPECT_TRUE(Add(match).ok());

  v1::ReceiveRequest receive;
  receive.set_rx_socket("s");
  const auto stream = manager_.BeginStream(alice_, receive);
  ASSERT_TRUE(stream.ok());
  receive.set_rx_socket("t");
  refused(manager_.BeginStream(alice_, receive).status(), "1 of 1 streams");
  manager_.EndStream(stream->rx_socket);
  EXPECT_TRUE(manager_.BeginStream(alice_, receive).ok());
}

TEST_F(TenantTest, ABufferForCopiesCountsAsOne) {
  v1::OpenRxSocketRequest request;
  request.set_name("s");
  request.set_ring_entries(64);
  request.set_max_held_fragments(10);
  request.set_slow(v1::SLOW_COPY_OUT);
  request.set_copy_out_bytes(4 << 20);
  const Status refused = manager_.OpenRxSocket(alice_, request).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("buffer_bytes"));
  request.set_copy_out_bytes(1 << 20);
  ASSERT_TRUE(manager_.OpenRxSocket(alice_, request).ok());
  EXPECT_EQ(Bind("a", 3 << 20).status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(Bind("a", 2 << 20).ok());
}

TEST_F(TenantTest, ASecondSessionOfTheUserSharesItsLimits) {
  ASSERT_TRUE(Bind("a", 3 << 20).ok());
  alice_ = *manager_.Identify({.request_key = manager_.StartSession({.uid = kAlice})->key});
  EXPECT_EQ(Bind("b", 4096).status().code(), Code::kResourceExhausted);
  manager_.EndSession(session_.id);
  EXPECT_EQ(Bind("b", 4096).status().code(), Code::kResourceExhausted) << "until it has drained";
}

}  // namespace
}  // namespace rxtoken
