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
constexpr std::uint32_t kMaxDrainTimeoutMs = 3'600'000;

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

// "a,b,c"
std::string Joined(const google::protobuf::RepeatedPtrField<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
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

void SetHoldTimes(const std::array<std::uint64_t, kHoldBuckets>& buckets,
                  google::protobuf::RepeatedPtrField<v1::HoldTime>& times) {
  for (std::uint32_t i = 0; i < kHoldBuckets; i++) {
    if (buckets[i] == 0) continue;
    v1::HoldTime& time = *times.Add();
    if (i + 1 != kHoldBuckets) time.set_upper_us(HoldClockNs(std::uint32_t{1} << i) / 1000);
    time.set_count(buckets[i]);
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
  if (info.exception_path) {
    v1::ExceptionPath& path = *message.mutable_exception_path();
    path.set_interface(info.exception_path->interface);
    path.set_to_kernel(info.exception_path->to_kernel);
    path.set_from_kernel(info.exception_path->from_kernel);
    path.set_to_kernel_drops(info.exception_path->to_kernel_drops);
    path.set_from_kernel_drops(info.exception_path->from_kernel_drops);
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
  if (request.frames_per_page() != 0) options.frames_per_page = request.frames_per_page();
  Result<std::vector<QueueRef>> queues = FindQueues(request.name(), request.queues());
  if (!queues.ok()) return queues.status();
  options.queues = *std::move(queues);

  const Result<std::uint64_t> id = dataplane_.Bind(options);
  if (!id.ok()) return id.status();
  bindings_[*id] = Binding{.name = request.name(), .owner = *session};
  LogInfo("binding_bound", {{"binding", request.name()},
                            {"id", *id},
                            {"buffer_bytes", options.buffer_bytes},
                            {"page_bytes", options.page_bytes},
                            {"frames_per_page", options.frames_per_page},
                            {"queues", options.queues.size()},
                            {"session", Number(*session)}});
  return BindingMessage(*id);
}

Result<std::vector<QueueRef>> Manager::FindQueues(const std::string& name,
                                                  const QueueIds& queues) const {
  std::vector<QueueRef> found;
  for (const v1::QueueId& id : queues) {
    const Result<QueueRef> queue = FindQueue(id);
    if (!queue.ok()) {
      return Status(queue.status().code(),
                    Quoted("binding", name) + ": " + queue.status().message());
    }
    found.push_back(*queue);
  }
  return found;
}

Result<v1::Binding> Manager::AttachQueues(const v1::AttachQueuesRequest& request) {
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const Result<std::uint64_t> id = FindBinding(request.name());
  if (!id.ok()) return id.status();
  if (request.queues().empty()) {
    return Status(Code::kInvalidArgument,
                  Quoted("binding", request.name()) + ": no queues; name at least one");
  }
  const Result<std::vector<QueueRef>> queues = FindQueues(request.name(), request.queues());
  if (!queues.ok()) return queues.status();
  const auto gets = [&](const QueueRef& queue) {
    return std::find(queues->begin(), queues->end(), queue) != queues->end();
  };
  for (const auto& [other, binding] : bindings_) {
    const Status allowed = CheckOwner("binding", binding.name, binding.owner, *session);
    if (allowed.ok()) continue;
    if (other == *id) return allowed;
    const Result<BindingInfo> info = dataplane_.GetBinding(other);
    if (!info.ok()) return info.status();
    if (std::any_of(info->queues.begin(), info->queues.end(), gets)) return allowed;
  }
  const Status status = dataplane_.AttachQueues(*id, *queues);
  if (!status.ok()) return status;
  for (const v1::QueueId& queue : request.queues()) {
    LogInfo("queue_attached", {{"binding", request.name()},
                               {"id", *id},
                               {"port", queue.port()},
                               {"queue", queue.queue()}});
  }
  return BindingMessage(*id);
}

Result<v1::Binding> Manager::Unbind(const v1::UnbindRequest& request) {
  const std::uint32_t timeout_ms = request.drain_timeout_ms();
  if (timeout_ms > kMaxDrainTimeoutMs) {
    return Status(Code::kInvalidArgument, Quoted("binding", request.name()) +
                                              ": drain_timeout_ms is " +
                                              std::to_string(timeout_ms) + "; use 0.." +
                                              std::to_string(kMaxDrainTimeoutMs));
  }
  const Result<SessionId> session = FindSession(request.session());
  if (!session.ok()) return session.status();
  const Result<std::uint64_t> id = FindBinding(request.name());
  if (!id.ok()) return id.status();
  const Status allowed = CheckOwner("binding", request.name(), bindings_[*id].owner, *session);
  if (!allowed.ok()) return allowed;
  Binding& binding = bindings_[*id];
  if (!binding.draining || timeout_ms == 0) {
    const Status status = BeginDraining(*id);
    if (!status.ok()) return status;
  }
  if (timeout_ms != 0) {
    binding.drain_deadline = now_() + std::chrono::milliseconds(timeout_ms);
    LogInfo("binding_drain_deadline",
            {{"binding", request.name()}, {"id", *id}, {"timeout_ms", timeout_ms}});
  }
  return BindingMessage(*id);
}

Status Manager::BeginDraining(std::uint64_t id) {
  Binding& binding = bindings_[id];
  if (binding.draining) {
    return Status(Code::kFailedPrecondition,
                  Quoted("binding", binding.name) +
                      " is draining already; it goes when the last page is back, or give a "
                      "drain timeout");
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
  message.set_frames_per_page(info->frames_per_page);
  if (binding.drain_deadline) {
    using std::chrono::milliseconds;
    const auto left = std::chrono::ceil<milliseconds>(*binding.drain_deadline - now_());
    message.set_drain_left_ms(
        static_cast<std::uint32_t>(std::max<milliseconds::rep>(left.count(), 1)));
  }
  message.set_saturated_pages(info->saturated_pages);
  return message;
}

bool Manager::ReapBindings() {
  const auto draining = [&] {
    return std::any_of(bindings_.begin(), bindings_.end(),
                       [](const auto& entry) { return entry.second.draining; });
  };
  if (!draining()) return false;
  for (auto& [id, binding] : bindings_) {
    if (!binding.drain_deadline || now_() < *binding.drain_deadline) continue;
    binding.drain_deadline.reset();
    const Result<std::uint64_t> revoked = dataplane_.Revoke(id);
    LogFailure(revoked.status());
    if (!revoked.ok()) continue;
    LogWarning("binding_revoked", {{"binding", binding.name}, {"id", id}, {"fragments", *revoked}});
  }
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
  const auto invalid = [&](const char* field, int value, const char* allowed) {
    return Status(Code::kInvalidArgument, Quoted("rx socket", request.name()) + ": " + field +
                                              " is " + std::to_string(value) + "; use 0, " +
                                              allowed);
  };
  if (!v1::Content_IsValid(request.content())) {
    return invalid("content", request.content(), "PAYLOAD (1) or FRAME (2)");
  }
  if (!v1::Outside_IsValid(request.outside())) {
    return invalid("outside", request.outside(), "COPY (1) or DROP (2)");
  }
  if (!v1::Steering_IsValid(request.steering())) {
    return invalid("steering", request.steering(), "MIGRATE (1) or STRICT (2)");
  }
  Result<std::string> secret = RandomKey();
  if (!secret.ok()) return secret.status();

  RxSocketOptions options;
  options.name = request.name();
  const bool frame = request.content() == v1::CONTENT_FRAME;
  options.content = frame ? Content::kFrame : Content::kPayload;
  if (request.ring_entries() != 0) options.ring_entries = request.ring_entries();
  options.max_held_fragments = request.max_held_fragments();
  for (const std::string& name : request.bindings()) {
    const Result<std::uint64_t> binding = FindBinding(name);
    if (!binding.ok()) return binding.status();
    if (bindings_[*binding].draining) {
      return Status(Code::kFailedPrecondition, Quoted("rx socket", request.name()) + ": " +
                                                   Quoted("binding", name) +
                                                   " is draining; name one that is not");
    }
    options.bindings.push_back(*binding);
  }
  const bool drop = request.outside() == v1::OUTSIDE_DROP;
  options.outside = drop ? Outside::kDrop : Outside::kCopy;
  const Result<std::uint64_t> id = dataplane_.OpenRxSocket(options);
  if (!id.ok()) return id.status();

  RxSocket& rx_socket = rx_sockets_[*id];
  rx_socket.name = request.name();
  rx_socket.owner = *session;
  rx_socket.content = frame ? v1::CONTENT_FRAME : v1::CONTENT_PAYLOAD;
  rx_socket.ring_entries = options.ring_entries;
  rx_socket.max_held_fragments = options.max_held_fragments;
  rx_socket.bindings = options.bindings;
  rx_socket.outside = drop ? v1::OUTSIDE_DROP : v1::OUTSIDE_COPY;
  if (request.steering() == v1::STEERING_STRICT) rx_socket.steering = v1::STEERING_STRICT;
  rx_socket.secret = *secret;
  LogInfo("rx_socket_opened",
          {{"rx_socket", request.name()}, {"id", *id}, {"session", Number(*session)}});

  Result<v1::RxSocket> message = RxSocketMessage(*id, false, false);
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

// It goes out of the rules that name it, whoever made them; a Receive stream on it finds its end.
Result<std::uint64_t> Manager::EndRxSocket(std::uint64_t id) {
  RemoveReceivers([&](const Flow&, std::uint64_t rx_socket) { return rx_socket == id; });
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
  return RxSocketMessage(*id, request.audit(), request.held());
}

Result<v1::ListRxSocketsResponse> Manager::ListRxSockets(
    const v1::ListRxSocketsRequest& request) {
  v1::ListRxSocketsResponse response;
  for (const auto& [id, rx_socket] : rx_sockets_) {
    Result<v1::RxSocket> message = RxSocketMessage(id, false, request.held());
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

Result<v1::RxSocket> Manager::RxSocketMessage(std::uint64_t id, bool audit, bool held) {
  const Result<RxSocketInfo> info = dataplane_.GetRxSocket(id, audit);
  if (!info.ok()) return info.status();
  const RxSocket& rx_socket = rx_sockets_[id];
  v1::RxSocket message;
  message.set_name(rx_socket.name);
  message.set_id(id);
  message.set_content(rx_socket.content);
  message.set_ring_entries(rx_socket.ring_entries);
  message.set_attached(rx_socket.attached());
  message.set_owned(rx_socket.owner != SessionId::kNone);
  message.set_max_held_fragments(rx_socket.max_held_fragments);
  for (const std::uint64_t binding : rx_socket.bindings) {
    const auto found = bindings_.find(binding);
    if (found != bindings_.end()) message.add_bindings(found->second.name);
  }
  message.set_outside(rx_socket.outside);
  message.set_steering(rx_socket.steering);
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
  statistics.set_waiting(info->waiting);
  statistics.set_revoked(info->revoked);
  SetHoldTimes(info->hold_times, *statistics.mutable_hold_times());
  if (held) {
    Result<v1::Held> pages = HeldMessage(id);
    if (!pages.ok()) return pages.status();
    *statistics.mutable_held() = *std::move(pages);
  }
  return message;
}

Result<v1::Held> Manager::HeldMessage(std::uint64_t rx_socket) {
  const Result<HeldInfo> info = dataplane_.GetHeld(rx_socket);
  if (!info.ok()) return info.status();
  v1::Held message;
  message.set_oldest_us(info->oldest_ns / 1000);
  for (const auto& [id, pages] : info->pages) {
    const Result<BindingInfo> binding = dataplane_.GetBinding(id);
    if (!binding.ok()) return binding.status();
    message.set_pages(message.pages() + pages);
    v1::HeldPages& held = *message.add_bindings();
    held.set_binding(bindings_[id].name);
    held.set_pages(pages);
    held.set_of_pages(binding->pages);
  }
  std::stable_sort(message.mutable_bindings()->begin(), message.mutable_bindings()->end(),
                   [](const auto& a, const auto& b) { return a.pages() > b.pages(); });
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

void Manager::AbandonRxSocket(std::uint64_t id) { LogFailure(EndRxSocket(id).status()); }

Result<Manager::Stream> Manager::BeginStream(const v1::ReceiveRequest& request) {
  const Result<std::uint64_t> id = FindOwnRxSocket(request.rx_socket(), request.session());
  if (!id.ok()) return id.status();
  RxSocket& rx_socket = rx_sockets_[*id];
  if (rx_socket.attached()) {
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
  const auto receivers = FindReceivers(request.rx_sockets(), request.session());
  if (!receivers.ok()) return receivers.status();
  FlowRule rule = {last_flow_ + 1, *match, request.priority(), *receivers};
  if (request.has_steer_to()) {
    const Result<QueueRef> steer_to = ResolveSteering(request);
    if (!steer_to.ok()) return steer_to.status();
    rule.steer_to = *steer_to;
  }
  const auto [same, is_new] = rule_ids_.try_emplace({rule.priority, rule.match}, rule.id);
  if (!is_new) {
    return Status(Code::kAlreadyExists,
                  "flow rule " + std::to_string(same->second) +
                      " matches the same frames with the same priority; choose another "
                      "priority, or update that rule");
  }

  last_flow_ = rule.id;
  flows_[rule.id] = {*session, request.match(), rule};
  dataplane_.ChangeRules({}, {&rule, 1});
  LogInfo("flow_added", {{"flow", last_flow_},
                         {"match", request.match().ShortDebugString()},
                         {"priority", request.priority()},
                         {"rx_sockets", Joined(request.rx_sockets())},
                         {"session", Number(*session)}});
  return FlowMessage(dataplane_.GetRule(last_flow_));
}

Result<std::vector<std::uint64_t>> Manager::FindReceivers(const Names& names,
                                                          const std::string& session_key) const {
  if (names.empty() || names.size() > static_cast<int>(kMaxFanOut)) {
    return Status(Code::kInvalidArgument, "rx_sockets has " + std::to_string(names.size()) +
                                              " names; use 1.." + std::to_string(kMaxFanOut));
  }
  std::vector<std::uint64_t> receivers;
  for (const std::string& name : names) {
    const Result<std::uint64_t> id = FindOwnRxSocket(name, session_key);
    if (!id.ok()) return id.status();
    if (std::find(receivers.begin(), receivers.end(), *id) != receivers.end()) {
      return Status(Code::kInvalidArgument,
                    Quoted("rx socket", name) + " is named twice; name each once");
    }
    receivers.push_back(*id);
  }
  return receivers;
}

Result<QueueRef> Manager::ResolveSteering(const v1::AddFlowRequest& request) const {
  const Result<QueueRef> queue = FindQueue(request.steer_to());
  if (!queue.ok()) return Status(queue.status().code(), "steer_to: " + queue.status().message());
  const v1::Match& match = request.match();
  if (match.has_queue()) {
    return Status(Code::kInvalidArgument,
                  "steer_to is set, and match.queue as well; leave out match.queue, since the "
                  "rule would only match where frames are before they are steered");
  }
  if (!match.port().empty() && match.port() != request.steer_to().port()) {
    return Status(Code::kInvalidArgument, "steer_to is a queue of " +
                                              Quoted("port", request.steer_to().port()) +
                                              ", but match.port is '" + match.port() +
                                              "'; name the same port, or leave out match.port");
  }
  return *queue;
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

Result<Manager::Flow*> Manager::FindChangeableFlow(std::uint64_t id, const std::string& session_key,
                                                   bool force) {
  const Result<SessionId> session = FindSession(session_key);
  if (!session.ok()) return session.status();
  const std::string name = std::to_string(id);
  const auto found = flows_.find(id);
  if (found == flows_.end()) return NotFound("flow rule", name);
  const Status allowed = CheckOwner("flow rule", name, found->second.owner, *session);
  if (!allowed.ok()) return allowed;
  for (const std::uint64_t receiver : found->second.rule.rx_sockets) {
    const RxSocket& rx_socket = rx_sockets_.at(receiver);
    if (force || rx_socket.steering != v1::STEERING_STRICT || !rx_socket.attached()) continue;
    return Status(Code::kFailedPrecondition,
                  Quoted("flow rule", name) + " delivers to " +
                      Quoted("rx socket", rx_socket.name) +
                      ", which is STRICT and has an application attached; `force` overrides");
  }
  return &found->second;
}

Result<v1::Flow> Manager::UpdateFlow(const v1::UpdateFlowRequest& request) {
  const Result<Flow*> flow = FindChangeableFlow(request.id(), request.session(), request.force());
  if (!flow.ok()) return flow.status();
  auto receivers = FindReceivers(request.rx_sockets(), request.session());
  if (!receivers.ok()) return receivers.status();
  FlowRule& rule = (*flow)->rule;
  rule.rx_sockets = *std::move(receivers);
  dataplane_.ChangeRules({}, {&rule, 1});
  LogInfo("flow_updated", {{"flow", request.id()}, {"rx_sockets", Joined(request.rx_sockets())}});
  return FlowMessage(dataplane_.GetRule(request.id()));
}

Result<v1::DeleteFlowResponse> Manager::DeleteFlow(const v1::DeleteFlowRequest& request) {
  const Status changeable =
      FindChangeableFlow(request.id(), request.session(), request.force()).status();
  if (!changeable.ok()) return changeable;
  ForgetFlows({request.id()}, {});
  return v1::DeleteFlowResponse();
}

Result<v1::ListFlowsResponse> Manager::ListFlows() {
  v1::ListFlowsResponse response;
  for (const RuleInfo& info : dataplane_.GetRules()) {
    *response.add_flows() = FlowMessage(info);
  }
  return response;
}

v1::Flow Manager::FlowMessage(const RuleInfo& info) const {
  const Flow& flow = flows_.at(info.id);
  const FlowRule& rule = flow.rule;
  v1::Flow message;
  message.set_id(rule.id);
  *message.mutable_match() = flow.match;
  for (const std::uint64_t id : rule.rx_sockets) message.add_rx_sockets(rx_sockets_.at(id).name);
  message.set_priority(rule.priority);
  message.set_owned(flow.owner != SessionId::kNone);
  message.set_packets(info.packets);
  message.set_bytes(info.bytes);
  message.set_drops(info.drops);
  message.set_copied(info.copied);
  if (rule.steer_to) {
    message.mutable_steer_to()->set_port(ports_[rule.steer_to->port].name);
    message.mutable_steer_to()->set_queue(rule.steer_to->queue);
  }
  message.set_placement(info.in_hardware ? v1::PLACEMENT_HARDWARE : v1::PLACEMENT_SOFTWARE);
  message.set_placement_reason(info.placement_reason);
  return message;
}

template <typename Ends>
void Manager::RemoveReceivers(Ends ends) {
  std::vector<std::uint64_t> gone;
  std::vector<FlowRule> changed;
  for (auto& [id, flow] : flows_) {
    if (std::erase_if(flow.rule.rx_sockets,
                      [&](std::uint64_t rx_socket) { return ends(flow, rx_socket); }) == 0) {
      continue;
    }
    if (flow.rule.rx_sockets.empty()) {
      gone.push_back(id);
    } else {
      changed.push_back(flow.rule);
    }
  }
  if (!gone.empty() || !changed.empty()) ForgetFlows(gone, changed);
}

void Manager::ForgetFlows(const std::vector<std::uint64_t>& gone,
                          const std::vector<FlowRule>& changed) {
  dataplane_.ChangeRules(gone, changed);
  for (const std::uint64_t id : gone) {
    const auto flow = flows_.find(id);
    rule_ids_.erase({flow->second.rule.priority, flow->second.rule.match});
    flows_.erase(flow);
    LogInfo("flow_deleted", {{"flow", id}});
  }
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
  RemoveReceivers([&](const Flow& flow, std::uint64_t rx_socket) {
    return flow.owner == session || ends(rx_sockets_.at(rx_socket));
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
