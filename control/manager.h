// SPDX-License-Identifier: Apache-2.0
// manager.h - names, sessions, ownership and rights: what the dataplane's numbers mean.
//
// Requests and answers are the API's own messages; errors are those that the comments of
// the .proto files list. An object made with a session's key belongs to that session: others
// may not change it, and it goes when the session ends. What nobody owns, anybody may change.
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
#include "control/unique_fd.h"
#include "dataplane/dataplane.h"
#include "rxtoken/v1/binding.pb.h"
#include "rxtoken/v1/flow.pb.h"
#include "rxtoken/v1/port.pb.h"
#include "rxtoken/v1/rx_socket.pb.h"
#include "rxtoken/v1/token.pb.h"
#include "tokens/abi/status.h"

namespace rxtoken {

enum class SessionId : std::uint64_t { kNone = 0 };  // counted from 1, never reused

inline constexpr std::size_t kMaxSessions = 1024;

class Manager {
 public:
  using Clock = std::chrono::steady_clock;

  // `dataplane` outlives the manager.
  explicit Manager(Dataplane& dataplane, std::function<Clock::time_point()> now = Clock::now)
      : dataplane_(dataplane), now_(std::move(now)) {}

  // -- ports --------------------------------------------------------------------------------
  // Errors: kAlreadyExists, and those of Dataplane::OpenPort
  Status OpenPort(const PortOptions& options);
  Result<v1::Port> GetPort(const v1::GetPortRequest& request);
  Result<v1::ListPortsResponse> ListPorts();

  // -- bindings -----------------------------------------------------------------------------
  Result<v1::Binding> Bind(const v1::BindRequest& request);
  Result<v1::Binding> AttachQueues(const v1::AttachQueuesRequest& request);
  Result<v1::Binding> Unbind(const v1::UnbindRequest& request);
  Result<v1::Binding> GetBinding(const v1::GetBindingRequest& request);
  Result<v1::ListBindingsResponse> ListBindings();
  // Revokes what draining bindings have lent past their deadline, and forgets the bindings that
  // have drained. True while some still drain.
  bool ReapBindings();
  // Errors: kNotFound
  Result<BufferView> GetBuffer(std::uint64_t binding);
  // As GetBuffer, for an application: its session must own the binding, or have a rx socket
  // attached, which may have been lent pages of it.
  // Errors: kNotFound, kPermissionDenied
  Result<BufferView> GetBufferFor(SessionId session, std::uint64_t binding);

  // -- rx sockets ---------------------------------------------------------------------------
  Result<v1::OpenRxSocketResponse> OpenRxSocket(const v1::OpenRxSocketRequest& request);
  Result<v1::CloseRxSocketResponse> CloseRxSocket(const v1::CloseRxSocketRequest& request);
  Result<v1::RxSocket> GetRxSocket(const v1::GetRxSocketRequest& request);
  Result<v1::ListRxSocketsResponse> ListRxSockets(const v1::ListRxSocketsRequest& request);

  // The id of a rx socket that the session with this key, or nobody, owns.
  // Errors: kNotFound, kPermissionDenied
  Result<std::uint64_t> FindOwnRxSocket(const std::string& name,
                                        const std::string& session_key) const;

  struct Attached {
    std::uint64_t rx_socket = 0;
    Attachment attachment;
  };
  // Attaches the rx socket whose secret this is to the application behind `session`. It ends
  // with that session from now on, whoever owns it; the secret is used up.
  // Errors: kNotFound          no such secret, or used before
  //         kPermissionDenied  another session owns the rx socket
  Result<Attached> Attach(SessionId session, std::string_view secret);
  // Ends a rx socket that was attached, but could not be handed over.
  void AbandonRxSocket(std::uint64_t rx_socket);

  struct Stream {
    std::uint64_t rx_socket = 0;
    std::shared_ptr<LocalReader> reader;
    UniqueFd doorbell;
  };
  // Attaches a Receive stream. Every success is followed by EndStream().
  Result<Stream> BeginStream(const v1::ReceiveRequest& request);
  // Detaches it; nothing happens if the rx socket was closed meanwhile.
  void EndStream(std::uint64_t rx_socket);

  // -- flows --------------------------------------------------------------------------------
  Result<v1::Flow> AddFlow(const v1::AddFlowRequest& request);
  Result<v1::Flow> UpdateFlow(const v1::UpdateFlowRequest& request);
  Result<v1::DeleteFlowResponse> DeleteFlow(const v1::DeleteFlowRequest& request);
  Result<v1::ListFlowsResponse> ListFlows();

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
  // `pid` and `uid` of the application, for the log.
  // Errors: kResourceExhausted  kMaxSessions are there
  Result<Session> StartSession(std::int64_t pid, std::int64_t uid);
  // Its rules, its rx sockets, its bindings go, in this order.
  void EndSession(SessionId session);

 private:
  struct Port {
    std::string name;
    std::uint32_t queues = 0;
  };
  struct Binding {
    std::string name;
    SessionId owner = SessionId::kNone;
    bool draining = false;
    std::optional<Clock::time_point> drain_deadline = {};
  };
  struct RxSocket {
    std::string name;
    SessionId owner = SessionId::kNone;
    v1::Content content = v1::CONTENT_PAYLOAD;
    std::uint32_t ring_entries = 0;
    std::uint32_t max_held_fragments = 0;
    std::vector<std::uint64_t> bindings;  // ids, also of those that are gone
    v1::Outside outside = v1::OUTSIDE_COPY;
    v1::Steering steering = v1::STEERING_MIGRATE;
    std::string secret;                        // empty once it is used up
    SessionId attached_to = SessionId::kNone;  // the application that reads it
    bool streaming = false;                    // a Receive stream reads it
    std::shared_ptr<LocalReader> reader;       // from the first stream on

    bool attached() const { return streaming || attached_to != SessionId::kNone; }
  };
  struct Flow {
    SessionId owner = SessionId::kNone;
    v1::Match match;  // as it was given
    FlowRule rule;    // as published
  };

  Result<SessionId> FindSession(const std::string& key) const;
  Result<std::uint32_t> FindPort(const std::string& name) const;
  Result<QueueRef> FindQueue(const v1::QueueId& queue) const;
  using QueueIds = google::protobuf::RepeatedPtrField<v1::QueueId>;
  // Of a request about a binding; `name` is the binding's, for messages.
  Result<std::vector<QueueRef>> FindQueues(const std::string& name, const QueueIds& queues) const;
  Result<std::uint64_t> FindBinding(const std::string& name) const;
  Result<std::uint64_t> FindRxSocket(const std::string& name) const;
  using Names = google::protobuf::RepeatedPtrField<std::string>;
  // What a rule is to deliver to: ids.
  Result<std::vector<std::uint64_t>> FindReceivers(const Names& names,
                                                   const std::string& session_key) const;
  // The rule `id`, if the session with this key may change it and no STRICT rx socket objects.
  Result<Flow*> FindChangeableFlow(std::uint64_t id, const std::string& session_key, bool force);
  Result<FlowMatch> ResolveMatch(const v1::Match& match) const;
  Result<QueueRef> ResolveSteering(const v1::AddFlowRequest& request) const;

  v1::Port PortMessage(std::uint32_t port);
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
  const std::function<Clock::time_point()> now_;
  std::vector<Port> ports_;
  std::map<std::uint64_t, Binding> bindings_;     // by id, as the dataplane gave it
  std::map<std::uint64_t, RxSocket> rx_sockets_;  // the same
  std::map<std::uint64_t, Flow> flows_;           // by id
  std::map<std::pair<std::int32_t, FlowMatch>, std::uint64_t> rule_ids_;  // by priority, match
  std::map<SessionId, std::string> sessions_;                             // key of each
  std::uint64_t last_flow_ = 0;
  std::uint64_t last_session_ = 0;
};

}  // namespace rxtoken
