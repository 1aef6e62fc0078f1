// SPDX-License-Identifier: Apache-2.0
// manager.h - names, sessions, ownership and rights: what the dataplane's numbers mean.
//
// Requests and answers are the API's own messages; errors are those that the comments of
// the .proto files list. An object made with a session's key goes when the session ends.
// Whether it has a session or not, it belongs to the user who made it: others may not see it.
//
// Thread-safety: the control thread only. LocalReaders are shared with Receive streams.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control/local_reader.h"
#include "control/rights.h"
#include "control/unique_fd.h"
#include "dataplane/dataplane.h"
#include "rxtoken/v1/binding.pb.h"
#include "rxtoken/v1/flow.pb.h"
#include "rxtoken/v1/port.pb.h"
#include "rxtoken/v1/rx_socket.pb.h"
#include "rxtoken/v1/session.pb.h"
#include "rxtoken/v1/token.pb.h"
#include "rxtoken/v1/worker.pb.h"
#include "tokens/abi/status.h"

namespace rxtoken {

enum class SessionId : std::uint64_t { kNone = 0 };  // counted from 1, never reused

inline constexpr std::size_t kMaxSessions = 1024;

// Who asks for something.
struct Caller {
  std::shared_ptr<User> user;
  Rights rights;
  SessionId session = SessionId::kNone;  // with which ends what is made; kNone: lives on

  bool Sees(const User* owner) const { return rights.admin || owner == user.get(); }
};

class Manager {
 public:
  using Clock = std::chrono::steady_clock;

  // `dataplane` outlives the manager.
  explicit Manager(Dataplane& dataplane, Access access = {},
                   std::function<Clock::time_point()> now = Clock::now)
      : dataplane_(dataplane), access_(std::move(access)), now_(std::move(now)) {}

  // -- callers ------------------------------------------------------------------------------
  // How a call names its session, and what its connection says about it. May all be empty.
  struct Claim {
    std::string request_key = {};       // the request's `session`, which gets what is made
    std::string metadata_key = {};      // counts if the former is empty
    std::string certificate_name = {};  // of a remote caller, whose sessions have that name, too
  };
  // Errors: kNotFound          the caller has no session with the key
  //         kPermissionDenied  there is no key, and others than administrators may call
  Result<Caller> Identify(const Claim& claim);
  // That of the configuration file: an administrator without limits.
  Caller Configuration();
  // Errors: kNotFound, kInvalidArgument  ports and matches that access.tenants names
  Status CheckTenants();

  // -- ports --------------------------------------------------------------------------------
  // Errors: kAlreadyExists, and those of Dataplane::OpenPort
  Status OpenPort(const PortOptions& options);
  Result<v1::Port> GetPort(const Caller& caller, const v1::GetPortRequest& request);
  Result<v1::ListPortsResponse> ListPorts(const Caller& caller, const v1::ListPortsRequest&);

  // -- workers ------------------------------------------------------------------------------
  Result<v1::ListWorkersResponse> ListWorkers(const Caller& caller, const v1::ListWorkersRequest&);

  // -- bindings -----------------------------------------------------------------------------
  Result<v1::Binding> Bind(const Caller& caller, const v1::BindRequest& request);
  // The same in three steps: the second takes long, and may be done by any thread. The third has
  // to be called after each first that succeeded, with what the second answered.
  Result<BindingDraft> BeginBind(const Caller& caller, const v1::BindRequest& request);
  Status Allocate(BindingDraft& draft) { return dataplane_.Allocate(draft); }
  Result<v1::Binding> EndBind(BindingDraft& draft, const Status& allocated);
  Result<v1::Binding> AttachQueues(const Caller& caller, const v1::AttachQueuesRequest& request);
  Result<v1::Binding> Unbind(const Caller& caller, const v1::UnbindRequest& request);
  Result<v1::Binding> GetBinding(const Caller& caller, const v1::GetBindingRequest& request);
  Result<v1::ListBindingsResponse> ListBindings(const Caller& caller,
                                                const v1::ListBindingsRequest&);
  // Revokes what draining bindings have lent past their deadline, and forgets the bindings that
  // have drained. True while some still drain.
  bool ReapBindings();
  // Errors: kNotFound
  Result<BufferView> GetBuffer(std::uint64_t binding);
  // As GetBuffer, for an application: it must see the binding, or have a rx socket attached that
  // may be lent pages of it.
  // Errors: kNotFound
  Result<BufferView> GetBufferFor(SessionId session, std::uint64_t binding);

  // Takes back what rx sockets hold longer than their leases, for those that are due. True while
  // there are leases.
  bool ExpireLeases();

  // -- rx sockets ---------------------------------------------------------------------------
  Result<v1::OpenRxSocketResponse> OpenRxSocket(const Caller& caller,
                                                const v1::OpenRxSocketRequest& request);
  Result<v1::CloseRxSocketResponse> CloseRxSocket(const Caller& caller,
                                                  const v1::CloseRxSocketRequest& request);
  Result<v1::RxSocket> GetRxSocket(const Caller& caller, const v1::GetRxSocketRequest& request);
  Result<v1::ListRxSocketsResponse> ListRxSockets(const Caller& caller,
                                                  const v1::ListRxSocketsRequest& request);

  // The id of a rx socket that the caller sees.
  // Errors: kNotFound
  Result<std::uint64_t> FindRxSocket(const Caller& caller, const std::string& name) const;

  struct Attached {
    std::uint64_t rx_socket = 0;
    Attachment attachment;
  };
  // Attaches the rx socket whose secret this is to the application behind `session`. It ends
  // with that session from now on, whoever owns it; the secret is used up.
  // Errors: kNotFound  no such secret, used before, or of another user's rx socket
  Result<Attached> Attach(SessionId session, std::string_view secret);
  // Ends a rx socket that was attached, but could not be handed over.
  void AbandonRxSocket(std::uint64_t rx_socket);

  struct Stream {
    std::uint64_t rx_socket = 0;
    std::shared_ptr<LocalReader> reader;
    UniqueFd doorbell;
  };
  // Attaches a Receive stream. Every success is followed by EndStream().
  Result<Stream> BeginStream(const Caller& caller, const v1::ReceiveRequest& request);
  // Detaches it; nothing happens if the rx socket was closed meanwhile.
  void EndStream(std::uint64_t rx_socket);

  // -- flows --------------------------------------------------------------------------------
  Result<v1::Flow> AddFlow(const Caller& caller, const v1::AddFlowRequest& request);
  Result<v1::Flow> UpdateFlow(const Caller& caller, const v1::UpdateFlowRequest& request);
  Result<v1::DeleteFlowResponse> DeleteFlow(const Caller& caller,
                                            const v1::DeleteFlowRequest& request);
  Result<v1::ListFlowsResponse> ListFlows(const Caller& caller, const v1::ListFlowsRequest&);

  // -- tokens -------------------------------------------------------------------------------
  // Errors: kNotFound
  Result<std::vector<RangeResult>> ReturnTokens(std::uint64_t rx_socket,
                                                std::span<const TokenRange> ranges,
                                                bool all_or_nothing);

  // -- sessions -----------------------------------------------------------------------------
  struct Session {
    SessionId id = SessionId::kNone;
    std::string key;  // 32 hex digits
  };
  // Errors: kPermissionDenied   the user may not use this daemon
  //         kResourceExhausted  kMaxSessions are there, or as many as one user may have
  Result<Session> StartSession(const Credentials& credentials) {
    return StartSession(credentials, std::nullopt);
  }
  // Its rules, its rx sockets, its bindings go, in this order.
  void EndSession(SessionId session);
  Result<v1::OpenSessionResponse> OpenSession(const Credentials& credentials,
                                              const v1::OpenSessionRequest& request);
  Result<v1::KeepAliveResponse> KeepAlive(const Caller& caller, const v1::KeepAliveRequest&);
  Result<v1::CloseSessionResponse> CloseSession(const Caller& caller,
                                                const v1::CloseSessionRequest&);
  // Ends the sessions whose lease has run out. To be called once a second.
  void EndExpiredSessions();

 private:
  struct Port {
    std::string name;
    std::uint32_t queues = 0;
  };
  struct Binding {
    std::string name;
    SessionId owner = SessionId::kNone;
    Charge charge;
    bool draining = false;
    std::optional<Clock::time_point> drain_deadline = {};
  };
  struct RxSocket {
    std::string name;
    SessionId owner = SessionId::kNone;
    Charge charge;
    v1::Content content = v1::CONTENT_PAYLOAD;
    std::uint32_t ring_entries = 0;
    std::uint32_t max_held_fragments = 0;
    std::vector<std::uint64_t> bindings;  // ids, also of those that are gone
    v1::Outside outside = v1::OUTSIDE_COPY;
    v1::Steering steering = v1::STEERING_MIGRATE;
    v1::Slow slow = v1::SLOW_DROP_NEW;
    std::uint64_t copy_out_bytes = 0;
    std::uint64_t copy_out_binding = 0;        // its private buffer, which is no binding of ours
    std::chrono::milliseconds lease = {};      // 0: none
    Clock::time_point lease_due = {};          // when to look again whether it has ended
    bool lease_ended = false;                  // for some page, once
    std::string secret;                        // empty once it is used up
    SessionId attached_to = SessionId::kNone;  // the application that reads it
    bool streaming = false;                    // a Receive stream reads it
    Charge stream_charge;
    std::shared_ptr<LocalReader> reader;  // from the first stream on

    bool attached() const { return streaming || attached_to != SessionId::kNone; }
  };
  struct Flow {
    SessionId owner = SessionId::kNone;
    Charge charge;
    v1::Match match;  // as it was given
    FlowRule rule;    // as published
  };

  struct SessionState {
    std::string key;
    Rights rights;
    std::shared_ptr<User> user;
    Charge charge;
    std::optional<std::chrono::milliseconds> lease;
    Clock::time_point deadline = {};  // with a lease
  };

  Result<Session> StartSession(const Credentials& credentials,
                               std::optional<std::chrono::milliseconds> lease);
  // The caller's session, if it has a lease.
  Result<SessionState*> FindLease(const Caller& caller);
  Caller CallerOf(Rights rights);
  Result<SessionId> FindSession(const std::string& key) const;
  // What the caller asks for, of each of its limits. `object` is for messages.
  static Result<Charge> MakeCharge(const Caller& caller, const std::string& object,
                                   const Amounts& amounts) {
    return Charge::Make(caller.user, caller.rights.limits, object, amounts);
  }
  static bool MayUsePort(const Caller& caller, const std::string& name);
  Result<std::uint32_t> FindPort(const Caller& caller, const std::string& name) const;
  Result<QueueRef> FindQueue(const Caller& caller, const v1::QueueId& queue) const;
  using QueueIds = google::protobuf::RepeatedPtrField<v1::QueueId>;
  // Of a request about a binding; `name` is the binding's, for messages.
  Result<std::vector<QueueRef>> FindQueues(const Caller& caller, const std::string& name,
                                           const QueueIds& queues) const;
  // The caller's bindings must keep `queues` away from nobody whom it does not see.
  Status CheckQueues(const Caller& caller, const std::vector<QueueRef>& queues);
  Result<std::uint64_t> FindBinding(const Caller& caller, const std::string& name) const;
  // Sees it, or is a tenant that may be lent its pages.
  static bool MayBeLent(const Caller& caller, const Binding& binding);
  // In which a rx socket may be lent frames: ids. None: in any.
  Result<std::vector<std::uint64_t>> FindLenders(const Caller& caller,
                                                 const v1::OpenRxSocketRequest& request) const;
  // Of a rx socket for which `asked`; 0: no limit.
  static std::uint32_t MaxHeldFragments(const Caller& caller, std::uint32_t asked);
  using Names = google::protobuf::RepeatedPtrField<std::string>;
  // What a rule is to deliver to: ids.
  Result<std::vector<std::uint64_t>> FindReceivers(const Caller& caller, const Names& names) const;
  // The rule `id`, if the caller sees it and no STRICT rx socket objects.
  Result<Flow*> FindChangeableFlow(const Caller& caller, std::uint64_t id, bool force);
  Result<FlowMatch> ResolveMatch(const Caller& caller, const v1::Match& match) const;
  // Whether the caller's tenant may claim these frames.
  Status CheckClaim(const Caller& caller, const v1::Match& match, const FlowMatch& resolved) const;
  Result<QueueRef> ResolveSteering(const Caller& caller, const v1::AddFlowRequest& request) const;

  v1::Port PortMessage(const Caller& caller, std::uint32_t port);
  Result<v1::Binding> BindingMessage(std::uint64_t id);
  Result<v1::RxSocket> RxSocketMessage(std::uint64_t id, bool audit, bool held);
  Result<v1::Held> HeldMessage(std::uint64_t rx_socket);
  v1::Flow FlowMessage(const RuleInfo& info) const;

  Status BeginDraining(std::uint64_t id);
  Result<std::uint64_t> EndRxSocket(std::uint64_t id);
  // Takes the rx sockets for which `ends(flow, rx socket id)` out of all rules. A rule goes with
  // its last one.
  template <typename Ends>
  void RemoveReceivers(Ends ends);
  void ForgetFlows(const std::vector<std::uint64_t>& gone, const std::vector<FlowRule>& changed);

  Dataplane& dataplane_;
  const Access access_;
  const std::function<Clock::time_point()> now_;
  std::vector<Port> ports_;
  std::map<std::uint64_t, Binding> bindings_;     // by id, as the dataplane gave it
  std::map<std::uint64_t, Binding> drafts_;       // as well; draining: its session has ended
  std::map<std::uint64_t, RxSocket> rx_sockets_;  // the same
  std::map<std::uint64_t, Flow> flows_;           // by id
  std::map<std::pair<std::int32_t, FlowMatch>, std::uint64_t> rule_ids_;  // by priority, match
  std::map<SessionId, SessionState> sessions_;
  std::map<std::string, std::weak_ptr<User>> users_;  // by name; while they have something
  std::uint64_t last_flow_ = 0;
  std::uint64_t last_session_ = 0;
};

}  // namespace rxtoken
