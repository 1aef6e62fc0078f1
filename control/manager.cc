// SPDX-License-Identifier: Apache-2.0
#include "control/manager.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "control/log.h"
#include "control/match.h"

namespace rxtoken {
namespace {

constexpr std::size_t kMaxNameBytes = 64;

std::uint64_t Number(SessionId session) { return static_cast<std::uint64_t>(session); }

std::string Quoted(std::string_view what, std::string_view name) {
  return std::string(what) + " '" + std::string(name) + "'";
}

Status CheckName(std::string_view what, const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (!name.empty() && name.size() <= kMaxNameBytes &&
      std::all_of(name.begin(), name.end(), allowed)) {
    return Status();
  }
  return Status(Code::kInvalidArgument,
                Quoted(what, name) + ": a name is 1 to 64 of letters, digits, '.', '_', '-'");
}

Status NameTaken(std::string_view what, const std::string& name) {
  return Status(Code::kAlreadyExists, Quoted(what, name) + " exists already; choose another name");
}

Status NotFound(std::string_view what, const std::string& name) {
  return Status(Code::kNotFound, "no " + Quoted(what, name));
}

// May `caller` change what `owner` owns?
Status CheckOwner(std::string_view what, const std::string& name, SessionId owner,
                  SessionId caller) {
  if (owner == SessionId::kNone || owner == caller) return Status();
  return Status(Code::kPermissionDenied,
                Quoted(what, name) + " belongs to another session; give that session's key");
}

// 128 random bits as 32 hex digits: session keys and attach secrets.
Result<std::string> RandomKey() {
  std::array<std::uint8_t, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return Status(Code::kUnavailable,
                  std::string("cannot get random bytes from the kernel: ") + strerror(errno));
  }
  std::string key;
  for (const std::uint8_t byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    key += kDigits[byte >> 4];
    key += kDigits[byte & 15];
  }
  return key;
}

// In a time that tells nothing about where the two differ.
bool SameKey(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); i++) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

// For what cannot fail unless the dataplane and the manager disagree, where nobody waits for
// an answer.
void LogFailure(const Status& status) {
  if (!status.ok()) LogError("cleanup_failed", {{"reason", status.ToString()}});
}

// Counters that are not zero, by name.
template <std::size_t kCount>
void SetCounters(const std::array<std::uint64_t, kCount>& counters,
                 const std::array<std::string_view, kCount>& names,
                 google::protobuf::Map<std::string, std::uint64_t>& map) {
  for (std::size_t i = 0; i < kCount; i++) {
    if (counters[i] != 0) map[std::string(names[i])] = counters[i];
  }
}

}  // namespace

// -- ports ------------------------------------------------------------------------------------

Status Manager::OpenPort(const PortOptions& options) {
  const Status name_ok = CheckName("port", options.name);
  if (!name_ok.ok()) return name_ok;
  if (FindPort(options.name).ok()) return NameTaken("port", options.name);
  const Result<std::uint32_t> port = dataplane_.OpenPort(options);
  if (!port.ok()) return port.status();
  const PortInfo info = dataplane_.GetPort(*port);
  ports_.push_back({options.name, static_cast<std::uint32_t>(info.queues.size())});
  LogInfo("port_opened", {{"port", options.name},
                          {"device", info.device},
                          {"driver", info.driver},
                          {"queues", info.queues.size()},
                          {"ring_entries", info.ring_entries}});
  return Status();
}

Result<std::uint32_t> Manager::FindPort(const std::string& name) const {
  const auto found = std::find_if(ports_.begin(), ports_.end(),
                                  [&](const Port& port) { return port.name == name; });
  if (found == ports_.end()) return NotFound("port", name);
  return static_cast<std::uint32_t>(found - ports_.begin());
}

Result<QueueRef> Manager::FindQueue(const v1::QueueId& queue) const {
  const Result<std::uint32_t> port = FindPort(queue.port());
  if (!port.ok()) return port.status();
  const std::uint32_t queues = ports_[*port].queues;
  if (queue.queue() >= queues) {
    return Status(Code::kNotFound, Quoted("port", queue.port()) + " has no queue " +
                                       std::to_string(queue.queue()) + "; it has 0.." +
                                       std::to_string(queues - 1));
  }
  return QueueRef{*port, queue.queue()};
}

Result<v1::Port> Manager::GetPort(const v1::GetPortRequest& request) {
  const Result<std::uint32_t> port = FindPort(request.name());
  if (!port.ok()) return port.status();
  return PortMessage(*port);
}

Result<v1::ListPortsResponse> Manager::ListPorts() {
  v1::ListPortsResponse response;
  for (std::uint32_t port = 0; port < ports_.size(); port++) {
    *response.add_ports() = PortMessage(port);
  }
  return response;
}

v1::Port Manager::PortMessage(std::uint32_t port) {
  const PortInfo info = dataplane_.GetPort(port);
  v1::Port message;
  message.set_name(ports_[port].name);
  message.set_device(info.device);
  message.set_driver(info.driver);
  message.set_mac(info.mac);
  message.set_link_up(info.link_up);
  message.set_link_mbps(info.link_mbps);
  message.set_mtu_bytes(info.mtu_bytes);
  message.set_ring_entries(info.ring_entries);
  v1::PortStatistics& statistics = *message.mutable_statistics();
  statistics.set_rx_packets(info.rx_packets);
  statistics.set_rx_bytes(info.rx_bytes);
  statistics.set_rx_missed(info.rx_missed);
  statistics.set_rx_errors(info.rx_errors);
  statistics.set_rx_no_buffer(info.rx_no_buffer);
  for (std::uint32_t i = 0; i < info.queues.size(); i++) {
    const QueueInfo& from = info.queues[i];
    v1::Queue& queue = *message.add_queues();
    queue.set_index(i);
    queue.set_worker(from.worker);
    const auto binding = bindings_.find(from.binding);
    if (binding != bindings_.end()) queue.set_binding(binding->second.name);
    queue.set_rx_packets(from.rx_packets);
    queue.set_rx_bytes(from.rx_bytes);
    queue.set_copied_packets(from.copied_packets);
    SetCounters(from.drops, kDropReasonNames, *queue.mutable_drops());
  }
  return message;
}

// -- bindings ---------------------------------------------------------------------------------

Result<v1::Binding> Manager::Bind(const v1::BindRequest& request) {
  const Status name_ok = CheckName("binding", request.name());
  if (!name_ok.ok()) return name_ok;
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  if (FindBinding(request.name()).ok()) return NameTaken("binding", request.name());

  BindingOptions options;
  options.name = request.name();
  options.buffer_bytes = request.buffer_bytes();
  if (request.page_bytes() != 0) options.page_bytes = request.page_bytes();
  switch (request.memory()) {
    case v1::MEMORY_UNSPECIFIED: options.memory = Memory::kAuto; break;
    case v1::MEMORY_PLAIN: options.memory = Memory::kPlain; break;
    case v1::MEMORY_HUGE: options.memory = Memory::kHuge; break;
    default:
      return Status(Code::kInvalidArgument, Quoted("binding", request.name()) + ": memory is " +
                                                std::to_string(request.memory()) +
                                                "; use 0, PLAIN (1) or HUGE (2)");
  }
  if (request.queues().empty()) {
    return Status(Code::kInvalidArgument,
                  Quoted("binding", request.name()) + ": no queues; name at least one");
  }
  for (const v1::QueueId& queue : request.queues()) {
    const Result<QueueRef> found = FindQueue(queue);
    if (!found.ok()) {
      return Status(found.status().code(),
                    Quoted("binding", request.name()) + ": " + found.status().message());
    }
    options.queues.push_back(*found);
  }

  const Result<std::uint64_t> id = dataplane_.Bind(options);
  if (!id.ok()) return id.status();
  bindings_[*id] = Binding{.name = request.name(), .owner = *session};
  LogInfo("binding_bound", {{"binding", request.name()},
                            {"id", *id},
                            {"buffer_bytes", options.buffer_bytes},
                            {"page_bytes", options.page_bytes},
                            {"queues", options.queues.size()},
                            {"session", Number(*session)}});
  return BindingMessage(*id);
}

Result<v1::Binding> Manager::Unbind(const v1::UnbindRequest& request) {
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const Result<std::uint64_t> id = FindBinding(request.name());
  if (!id.ok()) return id.status();
  const Status allowed = CheckOwner("binding", request.name(), bindings_[*id].owner, *session);
  if (!allowed.ok()) return allowed;
  const Status status = BeginDraining(*id);
  if (!status.ok()) return status;
  return BindingMessage(*id);
}

Status Manager::BeginDraining(std::uint64_t id) {
  Binding& binding = bindings_[id];
  if (binding.draining) {
    return Status(Code::kFailedPrecondition,
                  Quoted("binding", binding.name) +
                      " is draining already; it goes when the last page is back");
  }
  const Status status = dataplane_.Unbind(id);
  if (!status.ok()) return status;
  binding.draining = true;
  LogInfo("binding_unbound", {{"binding", binding.name}, {"id", id}});
  return Status();
}

Result<v1::Binding> Manager::GetBinding(const v1::GetBindingRequest& request) {
  const Result<std::uint64_t> id = FindBinding(request.name());
  if (!id.ok()) return id.status();
  return BindingMessage(*id);
}

Result<v1::ListBindingsResponse> Manager::ListBindings() {
  v1::ListBindingsResponse response;
  for (const auto& [id, binding] : bindings_) {
    Result<v1::Binding> message = BindingMessage(id);
    if (!message.ok()) return message.status();
    *response.add_bindings() = std::move(*message);
  }
  return response;
}

Result<std::uint64_t> Manager::FindBinding(const std::string& name) const {
  for (const auto& [id, binding] : bindings_) {
    if (binding.name == name) return id;
  }
  return NotFound("binding", name);
}

Result<v1::Binding> Manager::BindingMessage(std::uint64_t id) {
  const Result<BindingInfo> info = dataplane_.GetBinding(id);
  if (!info.ok()) return info.status();
  const Binding& binding = bindings_[id];
  v1::Binding message;
  message.set_name(binding.name);
  message.set_id(id);
  message.set_state(info->draining ? v1::BINDING_STATE_DRAINING : v1::BINDING_STATE_ACTIVE);
  message.set_buffer_bytes(info->buffer_bytes);
  message.set_page_bytes(info->page_bytes);
  message.set_memory(info->memory == Memory::kHuge ? v1::MEMORY_HUGE : v1::MEMORY_PLAIN);
  for (const QueueRef& from : info->queues) {
    v1::QueueId& queue = *message.add_queues();
    queue.set_port(ports_[from.port].name);
    queue.set_queue(from.queue);
  }
  message.set_pages(info->pages);
  message.set_pages_free(info->pages_free);
  message.set_owned(binding.owner != SessionId::kNone);
  return message;
}

bool Manager::ReapBindings() {
  const auto draining = [&] {
    return std::any_of(bindings_.begin(), bindings_.end(),
                       [](const auto& entry) { return entry.second.draining; });
  };
  if (!draining()) return false;
  for (const std::uint64_t id : dataplane_.ReapBindings()) {
    LogInfo("binding_freed", {{"binding", bindings_[id].name}, {"id", id}});
    bindings_.erase(id);
    for (auto& [_, rx_socket] : rx_sockets_) {
      if (rx_socket.reader) rx_socket.reader->Forget(id);
    }
  }
  return draining();
}

Result<BufferView> Manager::GetBuffer(std::uint64_t binding) {
  return dataplane_.GetBuffer(binding);
}

Result<BufferView> Manager::GetBufferFor(SessionId session, std::uint64_t id) {
  const auto binding = bindings_.find(id);
  if (binding == bindings_.end()) {
    return Status(Code::kNotFound, "no binding with id " + std::to_string(id));
  }
  const bool attached = std::any_of(rx_sockets_.begin(), rx_sockets_.end(), [&](const auto& entry) {
    return entry.second.attached_to == session;
  });
  if (!attached && binding->second.owner != session) {
    return Status(Code::kPermissionDenied,
                  Quoted("binding", binding->second.name) +
                      ": its buffer is for its owner and for sessions with an attached rx "
                      "socket; attach one first");
  }
  return dataplane_.GetBuffer(id);
}

// -- rx sockets -------------------------------------------------------------------------------

Result<v1::OpenRxSocketResponse> Manager::OpenRxSocket(const v1::OpenRxSocketRequest& request) {
  const Status name_ok = CheckName("rx socket", request.name());
  if (!name_ok.ok()) return name_ok;
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  if (FindRxSocket(request.name()).ok()) return NameTaken("rx socket", request.name());
  if (!v1::Content_IsValid(request.content())) {
    return Status(Code::kInvalidArgument, Quoted("rx socket", request.name()) + ": content is " +
                                              std::to_string(request.content()) +
                                              "; use 0, PAYLOAD (1) or FRAME (2)");
  }
  Result<std::string> secret = RandomKey();
  if (!secret.ok()) return secret.status();

  RxSocketOptions options;
  options.name = request.name();
  const bool frame = request.content() == v1::CONTENT_FRAME;
  options.content = frame ? Content::kFrame : Content::kPayload;
  if (request.ring_entries() != 0) options.ring_entries = request.ring_entries();
  const Result<std::uint64_t> id = dataplane_.OpenRxSocket(options);
  if (!id.ok()) return id.status();

  RxSocket& rx_socket = rx_sockets_[*id];
  rx_socket.name = request.name();
  rx_socket.owner = *session;
  rx_socket.content = frame ? v1::CONTENT_FRAME : v1::CONTENT_PAYLOAD;
  rx_socket.ring_entries = options.ring_entries;
  rx_socket.secret = *secret;
  LogInfo("rx_socket_opened",
          {{"rx_socket", request.name()}, {"id", *id}, {"session", Number(*session)}});

  Result<v1::RxSocket> message = RxSocketMessage(*id, false);
  if (!message.ok()) return message.status();
  v1::OpenRxSocketResponse response;
  *response.mutable_rx_socket() = std::move(*message);
  response.set_attach_secret(*std::move(secret));
  return response;
}

Result<v1::CloseRxSocketResponse> Manager::CloseRxSocket(const v1::CloseRxSocketRequest& request) {
  const Result<std::uint64_t> id = FindOwnRxSocket(request.name(), request.session());
  if (!id.ok()) return id.status();
  const Result<std::uint64_t> reclaimed = EndRxSocket(*id);
  if (!reclaimed.ok()) return reclaimed.status();
  v1::CloseRxSocketResponse response;
  response.set_reclaimed_fragments(*reclaimed);
  return response;
}

// Rules that name it go, whoever made them; a Receive stream on it finds its end.
Result<std::uint64_t> Manager::EndRxSocket(std::uint64_t id) {
  RemoveFlowsIf([&](const Flow& flow) { return flow.rule.rx_socket == id; });
  const RxSocket& rx_socket = rx_sockets_[id];
  if (rx_socket.reader) rx_socket.reader->Close();
  const Result<std::uint64_t> reclaimed = dataplane_.CloseRxSocket(id);
  if (!reclaimed.ok()) return reclaimed.status();
  LogInfo("rx_socket_closed",
          {{"rx_socket", rx_socket.name}, {"id", id}, {"reclaimed_fragments", *reclaimed}});
  rx_sockets_.erase(id);
  return *reclaimed;
}

Result<v1::RxSocket> Manager::GetRxSocket(const v1::GetRxSocketRequest& request) {
  const Result<std::uint64_t> id = FindRxSocket(request.name());
  if (!id.ok()) return id.status();
  return RxSocketMessage(*id, request.audit());
}

Result<v1::ListRxSocketsResponse> Manager::ListRxSockets() {
  v1::ListRxSocketsResponse response;
  for (const auto& [id, rx_socket] : rx_sockets_) {
    Result<v1::RxSocket> message = RxSocketMessage(id, false);
    if (!message.ok()) return message.status();
    *response.add_rx_sockets() = std::move(*message);
  }
  return response;
}

Result<std::uint64_t> Manager::FindRxSocket(const std::string& name) const {
  for (const auto& [id, rx_socket] : rx_sockets_) {
    if (rx_socket.name == name) return id;
  }
  return NotFound("rx socket", name);
}

Result<std::uint64_t> Manager::FindOwnRxSocket(const std::string& name,
                                               const std::string& session_key) const {
  const Result<SessionId> session = FindSession(session_key);
  if (!session.ok()) return session.status();
  const Result<std::uint64_t> id = FindRxSocket(name);
  if (!id.ok()) return id.status();
  const Status allowed = CheckOwner("rx socket", name, rx_sockets_.at(*id).owner, *session);
  if (!allowed.ok()) return allowed;
  return *id;
}

Result<v1::RxSocket> Manager::RxSocketMessage(std::uint64_t id, bool audit) {
  const Result<RxSocketInfo> info = dataplane_.GetRxSocket(id, audit);
  if (!info.ok()) return info.status();
  const RxSocket& rx_socket = rx_sockets_[id];
  v1::RxSocket message;
  message.set_name(rx_socket.name);
  message.set_id(id);
  message.set_content(rx_socket.content);
  message.set_ring_entries(rx_socket.ring_entries);
  message.set_attached(rx_socket.streaming || rx_socket.attached_to != SessionId::kNone);
  message.set_owned(rx_socket.owner != SessionId::kNone);
  v1::RxSocketStatistics& statistics = *message.mutable_statistics();
  statistics.set_messages(info->messages);
  statistics.set_bytes(info->bytes);
  statistics.set_lent(info->lent);
  statistics.set_returned(info->returned);
  statistics.set_outstanding(info->outstanding);
  if (info->audited_outstanding) {
    statistics.set_audited_outstanding(*info->audited_outstanding);
  }
  statistics.set_slots_in_use(info->slots_in_use);
  SetCounters(info->drops, kDropReasonNames, *statistics.mutable_drops());
  SetCounters(info->refusals, kRefusalNames, *statistics.mutable_refusals());
  statistics.set_copied_messages(info->copied_messages);
  statistics.set_doorbells(info->doorbells);
  return message;
}

Result<Manager::Attached> Manager::Attach(SessionId session, std::string_view secret) {
  // Used-up secrets are empty, and no empty one comes over the wire.
  const auto found = std::find_if(rx_sockets_.begin(), rx_sockets_.end(), [&](const auto& entry) {
    return SameKey(entry.second.secret, secret);
  });
  if (secret.empty() || found == rx_sockets_.end()) {
    return Status(Code::kNotFound,
                  "no rx socket has this attach secret; it is good once, open another rx socket");
  }
  auto& [id, rx_socket] = *found;
  const Status allowed = CheckOwner("rx socket", rx_socket.name, rx_socket.owner, session);
  if (!allowed.ok()) return allowed;
  Result<Attachment> attachment = dataplane_.Attach(id);
  if (!attachment.ok()) return attachment.status();
  rx_socket.secret.clear();
  rx_socket.attached_to = session;
  LogInfo("rx_socket_attached",
          {{"rx_socket", rx_socket.name}, {"id", id}, {"session", Number(session)}});
  return Attached{id, *std::move(attachment)};
}

Result<Manager::Stream> Manager::BeginStream(const v1::ReceiveRequest& request) {
  const Result<std::uint64_t> id = FindOwnRxSocket(request.rx_socket(), request.session());
  if (!id.ok()) return id.status();
  RxSocket& rx_socket = rx_sockets_[*id];
  if (rx_socket.streaming || rx_socket.attached_to != SessionId::kNone) {
    return Status(Code::kFailedPrecondition,
                  Quoted("rx socket", rx_socket.name) +
                      " has an application attached already; wait for its end or open another");
  }
  const Result<Attachment> attachment = dataplane_.Attach(*id);
  if (!attachment.ok()) return attachment.status();
  if (!rx_socket.reader) rx_socket.reader = std::make_shared<LocalReader>(*attachment);
  // An application outside would not know where in the rings we stopped.
  rx_socket.secret.clear();
  rx_socket.streaming = true;
  LogInfo("rx_socket_attached", {{"rx_socket", rx_socket.name}, {"id", *id}, {"by", "Receive"}});
  return Stream{*id, rx_socket.reader, UniqueFd(attachment->doorbell)};
}

void Manager::EndStream(std::uint64_t id) {
  const auto found = rx_sockets_.find(id);
  if (found == rx_sockets_.end()) return;
  RxSocket& rx_socket = found->second;
  std::vector<TokenRange> unreturned;
  for (const std::uint32_t token : rx_socket.reader->TakeUnreturned()) {
    unreturned.push_back({token, 1});
  }
  if (!unreturned.empty()) LogFailure(dataplane_.ReturnTokens(id, unreturned, false).status());
  LogFailure(dataplane_.Detach(id));
  rx_socket.streaming = false;
  LogInfo("rx_socket_detached", {{"rx_socket", rx_socket.name}, {"id", id}});
}

// -- flows ------------------------------------------------------------------------------------

Result<v1::Flow> Manager::AddFlow(const v1::AddFlowRequest& request) {
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const Result<FlowMatch> match = ResolveMatch(request.match());
  if (!match.ok()) return match.status();
  using Priority = std::numeric_limits<std::int16_t>;
  if (request.priority() < Priority::min() || request.priority() > Priority::max()) {
    return Status(Code::kInvalidArgument,
                  "priority is " + std::to_string(request.priority()) + "; use -32768..32767");
  }
  const Result<std::uint64_t> rx_socket = FindOwnRxSocket(request.rx_socket(), request.session());
  if (!rx_socket.ok()) return rx_socket.status();
  for (const auto& [id, other] : flows_) {
    if (other.rule.match == *match && other.rule.priority == request.priority()) {
      return Status(Code::kAlreadyExists,
                    "flow rule " + std::to_string(id) +
                        " has the same match and priority; choose another priority, or update "
                        "that rule");
    }
  }

  const std::uint64_t id = ++last_flow_;
  Flow& flow = flows_[id];
  flow.rule = {id, *match, request.priority(), *rx_socket};
  flow.owner = *session;
  flow.match = request.match();
  PublishFlows();
  LogInfo("flow_added", {{"flow", id},
                         {"match", request.match().ShortDebugString()},
                         {"priority", request.priority()},
                         {"rx_socket", request.rx_socket()},
                         {"session", Number(*session)}});
  return FlowMessage(flow, RuleCounters{});
}

Result<FlowMatch> Manager::ResolveMatch(const v1::Match& match) const {
  Result<FlowMatch> parsed = ParseMatch(match);
  if (!parsed.ok() || match.port().empty()) return parsed;
  const Result<std::uint32_t> port = FindPort(match.port());
  if (!port.ok()) return port.status();
  parsed->port = *port;
  if (match.has_queue()) {
    v1::QueueId queue;
    queue.set_port(match.port());
    queue.set_queue(match.queue());
    const Result<QueueRef> found = FindQueue(queue);
    if (!found.ok()) return found.status();
    parsed->queue = found->queue;
  }
  return parsed;
}

Result<v1::Flow> Manager::UpdateFlow(const v1::UpdateFlowRequest& request) {
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const std::string name = std::to_string(request.id());
  const auto found = flows_.find(request.id());
  if (found == flows_.end()) return NotFound("flow rule", name);
  Flow& flow = found->second;
  const Status allowed = CheckOwner("flow rule", name, flow.owner, *session);
  if (!allowed.ok()) return allowed;
  const Result<std::uint64_t> rx_socket = FindOwnRxSocket(request.rx_socket(), request.session());
  if (!rx_socket.ok()) return rx_socket.status();

  flow.rule.rx_socket = *rx_socket;
  PublishFlows();
  LogInfo("flow_updated", {{"flow", request.id()}, {"rx_socket", request.rx_socket()}});
  for (const auto& [id, counters] : dataplane_.GetRules()) {
    if (id == request.id()) return FlowMessage(flow, counters);
  }
  return FlowMessage(flow, RuleCounters{});
}

Result<v1::DeleteFlowResponse> Manager::DeleteFlow(const v1::DeleteFlowRequest& request) {
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const std::string name = std::to_string(request.id());
  const auto found = flows_.find(request.id());
  if (found == flows_.end()) return NotFound("flow rule", name);
  const Status allowed = CheckOwner("flow rule", name, found->second.owner, *session);
  if (!allowed.ok()) return allowed;
  RemoveFlowsIf([&](const Flow& flow) { return flow.rule.id == request.id(); });
  return v1::DeleteFlowResponse();
}

Result<v1::ListFlowsResponse> Manager::ListFlows() {
  v1::ListFlowsResponse response;
  for (const auto& [id, counters] : dataplane_.GetRules()) {
    *response.add_flows() = FlowMessage(flows_.at(id), counters);
  }
  return response;
}

v1::Flow Manager::FlowMessage(const Flow& flow, const RuleCounters& counters) const {
  v1::Flow message;
  message.set_id(flow.rule.id);
  *message.mutable_match() = flow.match;
  message.set_rx_socket(rx_sockets_.at(flow.rule.rx_socket).name);
  message.set_priority(flow.rule.priority);
  message.set_owned(flow.owner != SessionId::kNone);
  message.set_packets(counters.packets);
  message.set_bytes(counters.bytes);
  return message;
}

template <typename Predicate>
void Manager::RemoveFlowsIf(Predicate predicate) {
  const std::size_t removed = std::erase_if(flows_, [&](const auto& entry) {
    if (!predicate(entry.second)) return false;
    LogInfo("flow_deleted", {{"flow", entry.first}});
    return true;
  });
  if (removed > 0) PublishFlows();
}

void Manager::PublishFlows() {
  std::vector<FlowRule> rules;
  rules.reserve(flows_.size());
  for (const auto& [id, flow] : flows_) rules.push_back(flow.rule);
  dataplane_.SetRules(rules);
}

// -- tokens -----------------------------------------------------------------------------------

Result<std::vector<RangeResult>> Manager::ReturnTokens(std::uint64_t rx_socket,
                                                       std::span<const TokenRange> ranges,
                                                       bool all_or_nothing) {
  return dataplane_.ReturnTokens(rx_socket, ranges, all_or_nothing);
}

// -- sessions ---------------------------------------------------------------------------------

Result<Manager::Session> Manager::StartSession(std::int64_t pid, std::int64_t uid) {
  if (sessions_.size() >= kMaxSessions) {
    return Status(Code::kResourceExhausted, "there are " + std::to_string(kMaxSessions) +
                                                " sessions, which is the limit; end one first");
  }
  Result<std::string> key = RandomKey();
  if (!key.ok()) return key.status();
  const auto id = static_cast<SessionId>(++last_session_);
  sessions_[id] = *key;
  LogInfo("session_started", {{"session", Number(id)}, {"pid", pid}, {"uid", uid}});
  return Session{id, *std::move(key)};
}

void Manager::EndSession(SessionId session) {
  const auto ends = [&](const RxSocket& rx_socket) {
    return rx_socket.owner == session || rx_socket.attached_to == session;
  };
  RemoveFlowsIf([&](const Flow& flow) {
    return flow.owner == session || ends(rx_sockets_.at(flow.rule.rx_socket));
  });
  std::vector<std::uint64_t> ended;
  for (const auto& [id, rx_socket] : rx_sockets_) {
    if (ends(rx_socket)) ended.push_back(id);
  }
  for (const std::uint64_t id : ended) LogFailure(EndRxSocket(id).status());
  for (auto& [id, binding] : bindings_) {
    if (binding.owner != session) continue;
    binding.owner = SessionId::kNone;
    if (!binding.draining) LogFailure(BeginDraining(id));
  }
  sessions_.erase(session);
  LogInfo("session_ended", {{"session", Number(session)}});
}

Result<SessionId> Manager::FindSession(const std::string& key) const {
  if (key.empty()) return SessionId::kNone;
  for (const auto& [id, other] : sessions_) {
    if (SameKey(key, other)) return id;
  }
  return Status(Code::kNotFound,
                "no session has this key; it ends with the connection to the descriptor socket");
}

}  // namespace rxtoken
