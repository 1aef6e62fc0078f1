// SPDX-License-Identifier: Apache-2.0
#include "control/manager.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "control/log.h"
#include "control/match.h"

namespace rxtoken {
namespace {

constexpr std::size_t kMaxNameBytes = 64;
constexpr std::uint32_t kMaxDrainTimeoutMs = 3'600'000;
constexpr std::uint32_t kMinLeaseMs = 1000;
constexpr std::uint32_t kMaxLeaseMs = 3'600'000;
constexpr std::uint32_t kDefaultLeaseMs = 10'000;

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

Status NoSession() {
  return Status(Code::kNotFound,
                "the caller has no session with this key; it ends with the connection to the "
                "descriptor socket, or with its lease");
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

// Whether one of the objects, whoever sees it, has the name.
bool IsTaken(const auto& objects, const std::string& name) {
  return std::any_of(objects.begin(), objects.end(),
                     [&](const auto& entry) { return entry.second.name == name; });
}

// The id of the object of that name, if the caller sees it.
Result<std::uint64_t> Find(const auto& objects, std::string_view what, const Caller& caller,
                           const std::string& name) {
  for (const auto& [id, object] : objects) {
    if (object.name == name && caller.Sees(object.charge.user())) return id;
  }
  return NotFound(what, name);
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

Status CheckLease(const v1::OpenRxSocketRequest& request) {
  constexpr std::uint32_t kShortest = 100;
  constexpr std::uint32_t kLongest = 3'600'000;
  const std::uint32_t lease = request.lease_ms();
  if (lease == 0 || (lease >= kShortest && lease <= kLongest)) return Status();
  return Status(Code::kInvalidArgument, Quoted("rx socket", request.name()) + ": lease_ms is " +
                                            std::to_string(lease) + "; use 0, or 100 to 3600000");
}

Status CheckCopyOut(const v1::OpenRxSocketRequest& request) {
  const std::string who = Quoted("rx socket", request.name()) + ": ";
  const std::uint64_t bytes = request.copy_out_bytes();
  if (request.slow() != v1::SLOW_COPY_OUT) {
    if (bytes == 0) return Status();
    return Status(Code::kInvalidArgument,
                  who + "copy_out_bytes is set, but slow is not COPY_OUT; set both, or neither");
  }
  if (request.max_held_fragments() == 0) {
    return Status(Code::kInvalidArgument,
                  who +
                      "slow is COPY_OUT, but there is no limit above which frames would be "
                      "copied; set max_held_fragments");
  }
  constexpr std::uint64_t kMost = 256 << 20;
  if (bytes == 0 || bytes % kDefaultPageBytes != 0 || bytes > kMost) {
    return Status(Code::kInvalidArgument, who + "copy_out_bytes is " + std::to_string(bytes) +
                                              "; use a multiple of 4096 up to " +
                                              std::to_string(kMost));
  }
  return Status();
}

}  // namespace

// -- callers ----------------------------------------------------------------------------------

Result<Caller> Manager::Identify(const Claim& claim) {
  const bool in_request = !claim.request_key.empty();
  const std::string& key = in_request ? claim.request_key : claim.metadata_key;
  const bool remote = !claim.certificate_name.empty();
  if (!key.empty()) {
    const Result<SessionId> session = FindSession(key);
    if (!session.ok()) return session.status();
    const SessionState& state = sessions_.at(*session);
    const Credentials credentials = {.certificate_name = claim.certificate_name};
    if (remote ? state.user->name != UserName(credentials) : state.lease.has_value()) {
      return NoSession();
    }
    return Caller{state.user, state.rights, in_request ? *session : SessionId::kNone};
  }
  if (access_.configured || remote) {
    return Status(Code::kPermissionDenied,
                  "a call needs the key of a session, in `session` or as metadata "
                  "'rxtoken-session'; local applications get one over descriptors.sock, as the "
                  "SDK and rxtokenctl do, remote ones with Sessions.OpenSession");
  }
  Result<Rights> rights = access_.RightsOf({.uid = geteuid()});
  if (!rights.ok()) return rights.status();
  return CallerOf(*std::move(rights));
}

Caller Manager::Configuration() {
  Rights rights{.user = "configuration", .admin = true};
  rights.limits.amounts.fill(kUnlimited);
  return CallerOf(std::move(rights));
}

Status Manager::CheckTenants() {
  const Caller caller = Configuration();
  for (std::size_t i = 0; i < access_.tenants.size(); i++) {
    const Tenant& tenant = access_.tenants[i];
    Status status;
    for (const std::string& port : tenant.ports.value_or(std::vector<std::string>())) {
      if (status.ok()) status = FindPort(caller, port).status();
    }
    for (const v1::Match& match : tenant.flows.value_or(std::vector<v1::Match>())) {
      if (status.ok()) status = ResolveMatch(caller, match).status();
    }
    if (status.ok()) continue;
    return Status(status.code(), "access.tenants[" + std::to_string(i) + "]: " + status.message());
  }
  return Status();
}

Caller Manager::CallerOf(Rights rights) {
  std::erase_if(users_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<User>& known = users_[rights.user];
  std::shared_ptr<User> user = known.lock();
  if (!user) known = user = std::make_shared<User>(User{.name = rights.user});
  return Caller{std::move(user), std::move(rights)};
}

// -- ports ------------------------------------------------------------------------------------

Status Manager::OpenPort(const PortOptions& options) {
  const Status name_ok = CheckName("port", options.name);
  if (!name_ok.ok()) return name_ok;
  if (FindPort(Configuration(), options.name).ok()) return NameTaken("port", options.name);
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

bool Manager::MayUsePort(const Caller& caller, const std::string& name) {
  const Tenant* const tenant = caller.rights.tenant;
  if (tenant == nullptr || !tenant->ports) return true;
  return std::find(tenant->ports->begin(), tenant->ports->end(), name) != tenant->ports->end();
}

Result<std::uint32_t> Manager::FindPort(const Caller& caller, const std::string& name) const {
  const auto found = std::find_if(ports_.begin(), ports_.end(),
                                  [&](const Port& port) { return port.name == name; });
  if (found == ports_.end() || !MayUsePort(caller, name)) return NotFound("port", name);
  return static_cast<std::uint32_t>(found - ports_.begin());
}

Result<QueueRef> Manager::FindQueue(const Caller& caller, const v1::QueueId& queue) const {
  const Result<std::uint32_t> port = FindPort(caller, queue.port());
  if (!port.ok()) return port.status();
  const std::uint32_t queues = ports_[*port].queues;
  if (queue.queue() >= queues) {
    return Status(Code::kNotFound, Quoted("port", queue.port()) + " has no queue " +
                                       std::to_string(queue.queue()) + "; it has 0.." +
                                       std::to_string(queues - 1));
  }
  return QueueRef{*port, queue.queue()};
}

Result<v1::Port> Manager::GetPort(const Caller& caller, const v1::GetPortRequest& request) {
  const Result<std::uint32_t> port = FindPort(caller, request.name());
  if (!port.ok()) return port.status();
  return PortMessage(caller, *port);
}

Result<v1::ListPortsResponse> Manager::ListPorts(const Caller& caller,
                                                 const v1::ListPortsRequest&) {
  v1::ListPortsResponse response;
  for (std::uint32_t port = 0; port < ports_.size(); port++) {
    if (!MayUsePort(caller, ports_[port].name)) continue;
    *response.add_ports() = PortMessage(caller, port);
  }
  return response;
}

v1::Port Manager::PortMessage(const Caller& caller, std::uint32_t port) {
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
    if (binding != bindings_.end() && caller.Sees(binding->second.charge.user())) {
      queue.set_binding(binding->second.name);
    }
    queue.set_rx_packets(from.rx_packets);
    queue.set_rx_bytes(from.rx_bytes);
    queue.set_copied_packets(from.copied_packets);
    queue.set_pauses(from.pauses);
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

// -- workers ----------------------------------------------------------------------------------

Result<v1::ListWorkersResponse> Manager::ListWorkers(const Caller&, const v1::ListWorkersRequest&) {
  v1::ListWorkersResponse response;
  for (const WorkerInfo& info : dataplane_.GetWorkers()) {
    v1::Worker& worker = *response.add_workers();
    worker.set_index(static_cast<std::uint32_t>(response.workers_size() - 1));
    worker.set_cpu(info.cpu);
    const ReassemblyInfo& from = info.reassembly;
    v1::Reassembly& to = *worker.mutable_reassembly();
    to.set_fragments(from.fragments);
    to.set_reassembled(from.reassembled);
    to.set_timed_out(from.timed_out);
    to.set_evicted(from.evicted);
    to.set_overlap(from.overlap);
    to.set_invalid(from.invalid);
    to.set_over_budget(from.over_budget);
    to.set_duplicates(from.duplicates);
    to.set_discarded(from.discarded);
    to.set_no_page(from.no_page);
    to.set_copied_out_bytes(from.copied_out_bytes);
    to.set_handed_over(from.handed_over);
    to.set_datagrams(from.datagrams);
    to.set_pages(from.pages);
  }
  return response;
}

// -- bindings ---------------------------------------------------------------------------------

Result<v1::Binding> Manager::Bind(const Caller& caller, const v1::BindRequest& request) {
  Result<BindingDraft> draft = BeginBind(caller, request);
  if (!draft.ok()) return draft.status();
  return EndBind(*draft, Allocate(*draft));
}

Result<BindingDraft> Manager::BeginBind(const Caller& caller, const v1::BindRequest& request) {
  const Status name_ok = CheckName("binding", request.name());
  if (!name_ok.ok()) return name_ok;
  if (IsTaken(bindings_, request.name()) || IsTaken(drafts_, request.name())) {
    return NameTaken("binding", request.name());
  }
  // Each occupies one of gRPC's threads.
  constexpr std::ptrdiff_t kMostDraftsOfUser = 4;
  constexpr std::size_t kMostDrafts = 32;
  const std::ptrdiff_t of_user = std::count_if(
      drafts_.begin(), drafts_.end(),
      [&](const auto& entry) { return entry.second.charge.user() == caller.user.get(); });
  if (of_user >= kMostDraftsOfUser || drafts_.size() >= kMostDrafts) {
    return Status(Code::kResourceExhausted,
                  Quoted("binding", request.name()) + ": " + std::to_string(of_user) + " of " +
                      std::to_string(kMostDraftsOfUser) + " Bind calls of " + caller.user->name +
                      " at a time, and " + std::to_string(drafts_.size()) + " of " +
                      std::to_string(kMostDrafts) + " in all, are getting memory; wait for one");
  }

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
  Result<std::vector<QueueRef>> queues = FindQueues(caller, request.name(), request.queues());
  if (!queues.ok()) return queues.status();
  const Status allowed = CheckQueues(caller, *queues);
  if (!allowed.ok()) return allowed;
  options.queues = *std::move(queues);
  Amounts amounts = AmountOf(Resource::kBindings, 1);
  amounts[static_cast<std::size_t>(Resource::kBufferBytes)] = options.buffer_bytes;
  Result<Charge> charge = MakeCharge(caller, Quoted("binding", request.name()), amounts);
  if (!charge.ok()) return charge.status();

  Result<BindingDraft> draft = dataplane_.BeginBind(options);
  if (!draft.ok()) return draft.status();
  drafts_[draft->id] =
      Binding{.name = request.name(), .owner = caller.session, .charge = *std::move(charge)};
  return draft;
}

Result<v1::Binding> Manager::EndBind(BindingDraft& draft, const Status& allocated) {
  const Binding& binding = drafts_.at(draft.id);
  Status status = binding.draining ? NoSession() : allocated;
  if (status.ok()) status = dataplane_.EndBind(draft);
  if (!status.ok()) {
    drafts_.erase(draft.id);
    return status;
  }
  LogInfo("binding_bound", {{"binding", binding.name},
                            {"id", draft.id},
                            {"buffer_bytes", draft.options.buffer_bytes},
                            {"page_bytes", draft.options.page_bytes},
                            {"frames_per_page", draft.options.frames_per_page},
                            {"queues", draft.options.queues.size()},
                            {"session", Number(binding.owner)}});
  bindings_.insert(drafts_.extract(draft.id));
  return BindingMessage(draft.id);
}

Result<std::vector<QueueRef>> Manager::FindQueues(const Caller& caller, const std::string& name,
                                                  const QueueIds& queues) const {
  std::vector<QueueRef> found;
  for (const v1::QueueId& id : queues) {
    const Result<QueueRef> queue = FindQueue(caller, id);
    if (!queue.ok()) {
      return Status(queue.status().code(),
                    Quoted("binding", name) + ": " + queue.status().message());
    }
    found.push_back(*queue);
  }
  return found;
}

Result<v1::Binding> Manager::AttachQueues(const Caller& caller,
                                          const v1::AttachQueuesRequest& request) {
  const Result<std::uint64_t> id = FindBinding(caller, request.name());
  if (!id.ok()) return id.status();
  if (request.queues().empty()) {
    return Status(Code::kInvalidArgument,
                  Quoted("binding", request.name()) + ": no queues; name at least one");
  }
  const Result<std::vector<QueueRef>> queues = FindQueues(caller, request.name(), request.queues());
  if (!queues.ok()) return queues.status();
  const Status allowed = CheckQueues(caller, *queues);
  if (!allowed.ok()) return allowed;
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

Status Manager::CheckQueues(const Caller& caller, const std::vector<QueueRef>& queues) {
  for (const auto& [id, binding] : bindings_) {
    if (caller.Sees(binding.charge.user())) continue;
    const Result<BindingInfo> info = dataplane_.GetBinding(id);
    if (!info.ok()) return info.status();
    for (const QueueRef& queue : queues) {
      if (std::find(info->queues.begin(), info->queues.end(), queue) == info->queues.end())
        continue;
      return Status(Code::kPermissionDenied,
                    "queue " + std::to_string(queue.queue) + " of " +
                        Quoted("port", ports_[queue.port].name) +
                        " is in another user's binding; use another queue");
    }
  }
  return Status();
}

Result<v1::Binding> Manager::Unbind(const Caller& caller, const v1::UnbindRequest& request) {
  const std::uint32_t timeout_ms = request.drain_timeout_ms();
  if (timeout_ms > kMaxDrainTimeoutMs) {
    return Status(Code::kInvalidArgument, Quoted("binding", request.name()) +
                                              ": drain_timeout_ms is " +
                                              std::to_string(timeout_ms) + "; use 0.." +
                                              std::to_string(kMaxDrainTimeoutMs));
  }
  const Result<std::uint64_t> id = FindBinding(caller, request.name());
  if (!id.ok()) return id.status();
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

Result<v1::Binding> Manager::GetBinding(const Caller& caller,
                                        const v1::GetBindingRequest& request) {
  const Result<std::uint64_t> id = FindBinding(caller, request.name());
  if (!id.ok()) return id.status();
  return BindingMessage(*id);
}

Result<v1::ListBindingsResponse> Manager::ListBindings(const Caller& caller,
                                                       const v1::ListBindingsRequest&) {
  v1::ListBindingsResponse response;
  for (const auto& [id, binding] : bindings_) {
    if (!caller.Sees(binding.charge.user())) continue;
    Result<v1::Binding> message = BindingMessage(id);
    if (!message.ok()) return message.status();
    *response.add_bindings() = std::move(*message);
  }
  return response;
}

Result<std::uint64_t> Manager::FindBinding(const Caller& caller, const std::string& name) const {
  return Find(bindings_, "binding", caller, name);
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
  message.set_user(binding.charge.user()->name);
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

bool Manager::ExpireLeases() {
  constexpr std::chrono::milliseconds kMostOften{25};
  bool any = false;
  for (auto& [id, rx_socket] : rx_sockets_) {
    if (rx_socket.lease.count() == 0) continue;
    any = true;
    if (now_() < rx_socket.lease_due) continue;
    rx_socket.lease_due = now_() + std::max(rx_socket.lease / 4, kMostOften);
    const Result<std::uint64_t> expired = dataplane_.Expire(id);
    LogFailure(expired.status());
    if (!expired.ok() || *expired == 0 || std::exchange(rx_socket.lease_ended, true)) continue;
    LogWarning("lease_ended", {{"rx_socket", rx_socket.name},
                               {"id", id},
                               {"fragments", *expired},
                               {"lease_ms", rx_socket.lease.count()}});
  }
  return any;
}

Result<BufferView> Manager::GetBuffer(std::uint64_t binding) {
  return dataplane_.GetBuffer(binding);
}

Result<BufferView> Manager::GetBufferFor(SessionId session, std::uint64_t id) {
  const auto private_to =
      std::find_if(rx_sockets_.begin(), rx_sockets_.end(), [&](const auto& entry) {
        return entry.second.copy_out_binding == id && entry.second.attached_to == session;
      });
  if (id != 0 && private_to != rx_sockets_.end()) return dataplane_.GetBuffer(id);
  const auto binding = bindings_.find(id);
  const SessionState& state = sessions_.at(session);
  const Caller caller{state.user, state.rights, session};
  const auto may_be_lent = [&](const auto& entry) {
    const std::vector<std::uint64_t>& lenders = entry.second.bindings;
    return entry.second.attached_to == session &&
           (lenders.empty() || std::find(lenders.begin(), lenders.end(), id) != lenders.end());
  };
  if (binding == bindings_.end() ||
      (!caller.Sees(binding->second.charge.user()) &&
       std::none_of(rx_sockets_.begin(), rx_sockets_.end(), may_be_lent))) {
    return Status(Code::kNotFound, "no binding with id " + std::to_string(id));
  }
  return dataplane_.GetBuffer(id);
}

// -- rx sockets -------------------------------------------------------------------------------

Result<v1::OpenRxSocketResponse> Manager::OpenRxSocket(const Caller& caller,
                                                       const v1::OpenRxSocketRequest& request) {
  const Status name_ok = CheckName("rx socket", request.name());
  if (!name_ok.ok()) return name_ok;
  if (IsTaken(rx_sockets_, request.name())) return NameTaken("rx socket", request.name());
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
  if (!v1::Slow_IsValid(request.slow())) {
    return invalid("slow", request.slow(), "DROP_NEW (1), COPY_OUT (2) or PAUSE (3)");
  }
  Status limits_ok = CheckLease(request);
  if (limits_ok.ok()) limits_ok = CheckCopyOut(request);
  if (!limits_ok.ok()) return limits_ok;
  Result<std::string> secret = RandomKey();
  if (!secret.ok()) return secret.status();

  RxSocketOptions options;
  options.name = request.name();
  const bool frame = request.content() == v1::CONTENT_FRAME;
  options.content = frame ? Content::kFrame : Content::kPayload;
  if (request.ring_entries() != 0) options.ring_entries = request.ring_entries();
  options.max_held_fragments = MaxHeldFragments(caller, request.max_held_fragments());
  Amounts amounts = AmountOf(Resource::kRxSockets, 1);
  amounts[static_cast<std::size_t>(Resource::kRingEntries)] = options.ring_entries;
  amounts[static_cast<std::size_t>(Resource::kHeldFragments)] = options.max_held_fragments;
  amounts[static_cast<std::size_t>(Resource::kBufferBytes)] = request.copy_out_bytes();
  Result<Charge> charge = MakeCharge(caller, Quoted("rx socket", request.name()), amounts);
  if (!charge.ok()) return charge.status();
  Result<std::vector<std::uint64_t>> lenders = FindLenders(caller, request);
  if (!lenders.ok()) return lenders.status();
  options.bindings = *std::move(lenders);
  const bool drop = request.outside() == v1::OUTSIDE_DROP;
  options.outside = drop ? Outside::kDrop : Outside::kCopy;
  const v1::Slow slow = request.slow() == v1::SLOW_UNSPECIFIED ? v1::SLOW_DROP_NEW : request.slow();
  options.slow = slow == v1::SLOW_COPY_OUT ? Slow::kCopyOut
                 : slow == v1::SLOW_PAUSE  ? Slow::kPause
                                           : Slow::kDropNew;
  options.copy_out_bytes = request.copy_out_bytes();
  const std::chrono::milliseconds lease(request.lease_ms());
  options.lease_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(lease).count());
  const Result<std::uint64_t> id = dataplane_.OpenRxSocket(options);
  if (!id.ok()) return id.status();

  RxSocket& rx_socket = rx_sockets_[*id];
  rx_socket.name = request.name();
  rx_socket.owner = caller.session;
  rx_socket.charge = *std::move(charge);
  rx_socket.content = frame ? v1::CONTENT_FRAME : v1::CONTENT_PAYLOAD;
  rx_socket.ring_entries = options.ring_entries;
  rx_socket.max_held_fragments = options.max_held_fragments;
  rx_socket.bindings = options.bindings;
  rx_socket.outside = drop ? v1::OUTSIDE_DROP : v1::OUTSIDE_COPY;
  if (request.steering() == v1::STEERING_STRICT) rx_socket.steering = v1::STEERING_STRICT;
  rx_socket.slow = slow;
  rx_socket.copy_out_bytes = options.copy_out_bytes;
  rx_socket.lease = lease;
  rx_socket.secret = *secret;
  LogInfo("rx_socket_opened",
          {{"rx_socket", request.name()}, {"id", *id}, {"session", Number(caller.session)}});

  Result<v1::RxSocket> message = RxSocketMessage(*id, false, false);
  if (!message.ok()) return message.status();
  v1::OpenRxSocketResponse response;
  *response.mutable_rx_socket() = std::move(*message);
  response.set_attach_secret(*std::move(secret));
  return response;
}

bool Manager::MayBeLent(const Caller& caller, const Binding& binding) {
  if (caller.Sees(binding.charge.user())) return true;
  if (caller.rights.tenant == nullptr) return false;
  const std::vector<std::string>& names = caller.rights.tenant->bindings;
  return std::find(names.begin(), names.end(), binding.name) != names.end();
}

// Who sees only what is its own could read in any binding what is delivered to others.
Result<std::vector<std::uint64_t>> Manager::FindLenders(
    const Caller& caller, const v1::OpenRxSocketRequest& request) const {
  std::vector<std::uint64_t> lenders;
  for (const std::string& name : request.bindings()) {
    const auto found = std::find_if(bindings_.begin(), bindings_.end(), [&](const auto& entry) {
      return entry.second.name == name && MayBeLent(caller, entry.second);
    });
    if (found == bindings_.end()) return NotFound("binding", name);
    if (found->second.draining) {
      return Status(Code::kFailedPrecondition, Quoted("rx socket", request.name()) + ": " +
                                                   Quoted("binding", name) +
                                                   " is draining; name one that is not");
    }
    lenders.push_back(found->first);
  }
  if (!lenders.empty() || caller.rights.admin) return lenders;
  for (const auto& [id, binding] : bindings_) {
    if (!binding.draining && MayBeLent(caller, binding)) lenders.push_back(id);
  }
  if (!lenders.empty()) return lenders;
  return Status(Code::kFailedPrecondition, Quoted("rx socket", request.name()) +
                                               ": there is no binding that " + caller.user->name +
                                               " may be lent pages of; bind one first");
}

std::uint32_t Manager::MaxHeldFragments(const Caller& caller, std::uint32_t asked) {
  constexpr auto kHeld = static_cast<std::size_t>(Resource::kHeldFragments);
  const Limits& limits = caller.rights.limits;
  if (asked != 0 || limits.amounts[kHeld] == kUnlimited) return asked;
  if (limits.default_held_fragments != 0) return limits.default_held_fragments;
  const std::uint64_t used = caller.user->used[kHeld];
  const std::uint64_t left = limits.amounts[kHeld] - std::min(used, limits.amounts[kHeld]);
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(left, 1, kMost));
}

Result<v1::CloseRxSocketResponse> Manager::CloseRxSocket(const Caller& caller,
                                                         const v1::CloseRxSocketRequest& request) {
  const Result<std::uint64_t> id = FindRxSocket(caller, request.name());
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
  const Result<RxSocketInfo> info = dataplane_.GetRxSocket(id, false);
  if (!info.ok()) return info.status();
  const Result<std::uint64_t> reclaimed = dataplane_.CloseRxSocket(id);
  if (!reclaimed.ok()) return reclaimed.status();
  LogInfo("rx_socket_closed",
          {{"rx_socket", rx_socket.name},
           {"id", id},
           {"reclaimed_fragments", *reclaimed},
           {"refused_tokens",
            std::accumulate(info->refusals.begin(), info->refusals.end(), std::uint64_t{0})}});
  rx_sockets_.erase(id);
  return *reclaimed;
}

Result<v1::RxSocket> Manager::GetRxSocket(const Caller& caller,
                                          const v1::GetRxSocketRequest& request) {
  const Result<std::uint64_t> id = FindRxSocket(caller, request.name());
  if (!id.ok()) return id.status();
  return RxSocketMessage(*id, request.audit(), request.held());
}

Result<v1::ListRxSocketsResponse> Manager::ListRxSockets(const Caller& caller,
                                                         const v1::ListRxSocketsRequest& request) {
  v1::ListRxSocketsResponse response;
  for (const auto& [id, rx_socket] : rx_sockets_) {
    if (!caller.Sees(rx_socket.charge.user())) continue;
    Result<v1::RxSocket> message = RxSocketMessage(id, false, request.held());
    if (!message.ok()) return message.status();
    *response.add_rx_sockets() = std::move(*message);
  }
  return response;
}

Result<std::uint64_t> Manager::FindRxSocket(const Caller& caller, const std::string& name) const {
  return Find(rx_sockets_, "rx socket", caller, name);
}

Result<v1::RxSocket> Manager::RxSocketMessage(std::uint64_t id, bool audit, bool held) {
  const Result<RxSocketInfo> info = dataplane_.GetRxSocket(id, audit);
  if (!info.ok()) return info.status();
  RxSocket& rx_socket = rx_sockets_[id];
  v1::RxSocket message;
  message.set_name(rx_socket.name);
  message.set_id(id);
  message.set_content(rx_socket.content);
  message.set_ring_entries(rx_socket.ring_entries);
  message.set_attached(rx_socket.attached());
  message.set_owned(rx_socket.owner != SessionId::kNone);
  message.set_user(rx_socket.charge.user()->name);
  message.set_max_held_fragments(rx_socket.max_held_fragments);
  for (const std::uint64_t binding : rx_socket.bindings) {
    const auto found = bindings_.find(binding);
    if (found != bindings_.end()) message.add_bindings(found->second.name);
  }
  message.set_outside(rx_socket.outside);
  message.set_steering(rx_socket.steering);
  message.set_slow(rx_socket.slow);
  message.set_copy_out_bytes(rx_socket.copy_out_bytes);
  rx_socket.copy_out_binding = info->copy_out_binding;
  for (const QueueRef& from : info->paused_queues) {
    v1::QueueId& queue = *message.add_paused_queues();
    queue.set_port(ports_[from.port].name);
    queue.set_queue(from.queue);
  }
  message.set_lease_ms(static_cast<std::uint32_t>(rx_socket.lease.count()));
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
    if (const auto found = bindings_.find(id); found != bindings_.end()) {
      held.set_binding(found->second.name);
    }
    held.set_pages(pages);
    held.set_of_pages(binding->pages);
  }
  std::stable_sort(message.mutable_bindings()->begin(), message.mutable_bindings()->end(),
                   [](const auto& a, const auto& b) { return a.pages() > b.pages(); });
  return message;
}

Result<Manager::Attached> Manager::Attach(SessionId session, std::string_view secret) {
  const SessionState& state = sessions_.at(session);
  const Caller caller{state.user, state.rights, session};
  // Used-up secrets are empty, and no empty one comes over the wire.
  const auto found = std::find_if(rx_sockets_.begin(), rx_sockets_.end(), [&](const auto& entry) {
    return SameKey(entry.second.secret, secret);
  });
  if (secret.empty() || found == rx_sockets_.end() || !caller.Sees(found->second.charge.user())) {
    return Status(Code::kNotFound,
                  "no rx socket has this attach secret; it is good once, open another rx socket");
  }
  auto& [id, rx_socket] = *found;
  Result<Attachment> attachment = dataplane_.Attach(id);
  if (!attachment.ok()) return attachment.status();
  rx_socket.secret.clear();
  rx_socket.attached_to = session;
  LogInfo("rx_socket_attached",
          {{"rx_socket", rx_socket.name}, {"id", id}, {"session", Number(session)}});
  return Attached{id, *std::move(attachment)};
}

void Manager::AbandonRxSocket(std::uint64_t id) { LogFailure(EndRxSocket(id).status()); }

Result<Manager::Stream> Manager::BeginStream(const Caller& caller,
                                             const v1::ReceiveRequest& request) {
  const Result<std::uint64_t> id = FindRxSocket(caller, request.rx_socket());
  if (!id.ok()) return id.status();
  RxSocket& rx_socket = rx_sockets_[*id];
  if (rx_socket.attached()) {
    return Status(Code::kFailedPrecondition,
                  Quoted("rx socket", rx_socket.name) +
                      " has an application attached already; wait for its end or open another");
  }
  Result<Charge> charge =
      MakeCharge(caller, Quoted("rx socket", rx_socket.name), AmountOf(Resource::kStreams, 1));
  if (!charge.ok()) return charge.status();
  const Result<Attachment> attachment = dataplane_.Attach(*id);
  if (!attachment.ok()) return attachment.status();
  rx_socket.stream_charge = *std::move(charge);
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
  rx_socket.stream_charge = Charge();
  LogInfo("rx_socket_detached", {{"rx_socket", rx_socket.name}, {"id", id}});
}

// -- flows ------------------------------------------------------------------------------------

Result<v1::Flow> Manager::AddFlow(const Caller& caller, const v1::AddFlowRequest& request) {
  const Result<FlowMatch> match = ResolveMatch(caller, request.match());
  if (!match.ok()) return match.status();
  const Status allowed = CheckClaim(caller, request.match(), *match);
  if (!allowed.ok()) return allowed;
  using Priority = std::numeric_limits<std::int16_t>;
  if (request.priority() < Priority::min() || request.priority() > Priority::max()) {
    return Status(Code::kInvalidArgument,
                  "priority is " + std::to_string(request.priority()) + "; use -32768..32767");
  }
  const auto receivers = FindReceivers(caller, request.rx_sockets());
  if (!receivers.ok()) return receivers.status();
  FlowRule rule = {last_flow_ + 1, *match, request.priority(), *receivers};
  if (request.has_steer_to()) {
    const Result<QueueRef> steer_to = ResolveSteering(caller, request);
    if (!steer_to.ok()) return steer_to.status();
    rule.steer_to = *steer_to;
  }
  Result<Charge> charge = MakeCharge(caller, "flow rule", AmountOf(Resource::kFlows, 1));
  if (!charge.ok()) return charge.status();
  const auto [same, is_new] = rule_ids_.try_emplace({rule.priority, rule.match}, rule.id);
  if (!is_new) {
    const bool seen = caller.Sees(flows_.at(same->second).charge.user());
    return Status(
        Code::kAlreadyExists,
        (seen ? "flow rule " + std::to_string(same->second) : "another user's flow rule") +
            " matches the same frames with the same priority; choose another "
            "priority, or update that rule");
  }

  last_flow_ = rule.id;
  flows_[rule.id] = Flow{caller.session, *std::move(charge), request.match(), rule};
  dataplane_.ChangeRules({}, {&rule, 1});
  LogInfo("flow_added", {{"flow", last_flow_},
                         {"match", request.match().ShortDebugString()},
                         {"priority", request.priority()},
                         {"rx_sockets", Joined(request.rx_sockets())},
                         {"session", Number(caller.session)}});
  return FlowMessage(dataplane_.GetRule(last_flow_));
}

Result<std::vector<std::uint64_t>> Manager::FindReceivers(const Caller& caller,
                                                          const Names& names) const {
  if (names.empty() || names.size() > static_cast<int>(kMaxFanOut)) {
    return Status(Code::kInvalidArgument, "rx_sockets has " + std::to_string(names.size()) +
                                              " names; use 1.." + std::to_string(kMaxFanOut));
  }
  std::vector<std::uint64_t> receivers;
  for (const std::string& name : names) {
    const Result<std::uint64_t> id = FindRxSocket(caller, name);
    if (!id.ok()) return id.status();
    if (std::find(receivers.begin(), receivers.end(), *id) != receivers.end()) {
      return Status(Code::kInvalidArgument,
                    Quoted("rx socket", name) + " is named twice; name each once");
    }
    receivers.push_back(*id);
  }
  return receivers;
}

Result<QueueRef> Manager::ResolveSteering(const Caller& caller,
                                          const v1::AddFlowRequest& request) const {
  const Result<QueueRef> queue = FindQueue(caller, request.steer_to());
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

Result<FlowMatch> Manager::ResolveMatch(const Caller& caller, const v1::Match& match) const {
  Result<FlowMatch> parsed = ParseMatch(match);
  if (!parsed.ok() || match.port().empty()) return parsed;
  const Result<std::uint32_t> port = FindPort(caller, match.port());
  if (!port.ok()) return port.status();
  parsed->port = *port;
  if (match.has_queue()) {
    v1::QueueId queue;
    queue.set_port(match.port());
    queue.set_queue(match.queue());
    const Result<QueueRef> found = FindQueue(caller, queue);
    if (!found.ok()) return found.status();
    parsed->queue = found->queue;
  }
  return parsed;
}

Status Manager::CheckClaim(const Caller& caller, const v1::Match& match,
                           const FlowMatch& resolved) const {
  const Tenant* const tenant = caller.rights.tenant;
  if (tenant == nullptr) return Status();
  if (tenant->flows) {
    for (const v1::Match& allowed : *tenant->flows) {
      const Result<FlowMatch> outer = ResolveMatch(caller, allowed);
      if (outer.ok() && Covers(*outer, resolved)) return Status();
    }
  } else if (!tenant->ports || !match.port().empty()) {
    return Status();
  }
  return Status(Code::kPermissionDenied,
                "match {" + match.ShortDebugString() + "}: " + caller.user->name +
                    " may not claim all of these frames; give a match that lies within one of its "
                    "tenant's flows, or on one of its ports");
}

Result<Manager::Flow*> Manager::FindChangeableFlow(const Caller& caller, std::uint64_t id,
                                                   bool force) {
  const std::string name = std::to_string(id);
  const auto found = flows_.find(id);
  if (found == flows_.end() || !caller.Sees(found->second.charge.user())) {
    return NotFound("flow rule", name);
  }
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

Result<v1::Flow> Manager::UpdateFlow(const Caller& caller, const v1::UpdateFlowRequest& request) {
  const Result<Flow*> flow = FindChangeableFlow(caller, request.id(), request.force());
  if (!flow.ok()) return flow.status();
  auto receivers = FindReceivers(caller, request.rx_sockets());
  if (!receivers.ok()) return receivers.status();
  FlowRule& rule = (*flow)->rule;
  rule.rx_sockets = *std::move(receivers);
  dataplane_.ChangeRules({}, {&rule, 1});
  LogInfo("flow_updated", {{"flow", request.id()}, {"rx_sockets", Joined(request.rx_sockets())}});
  return FlowMessage(dataplane_.GetRule(request.id()));
}

Result<v1::DeleteFlowResponse> Manager::DeleteFlow(const Caller& caller,
                                                   const v1::DeleteFlowRequest& request) {
  const Status changeable = FindChangeableFlow(caller, request.id(), request.force()).status();
  if (!changeable.ok()) return changeable;
  ForgetFlows({request.id()}, {});
  return v1::DeleteFlowResponse();
}

Result<v1::ListFlowsResponse> Manager::ListFlows(const Caller& caller,
                                                 const v1::ListFlowsRequest&) {
  v1::ListFlowsResponse response;
  for (const RuleInfo& info : dataplane_.GetRules()) {
    if (!caller.Sees(flows_.at(info.id).charge.user())) continue;
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
  message.set_user(flow.charge.user()->name);
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
  for (auto& entry : flows_) {
    const std::uint64_t id = entry.first;
    Flow& flow = entry.second;
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

Result<Manager::Session> Manager::StartSession(const Credentials& credentials,
                                               std::optional<std::chrono::milliseconds> lease) {
  Result<Rights> rights = access_.RightsOf(credentials);
  if (!rights.ok()) return rights.status();
  if (sessions_.size() >= kMaxSessions) {
    return Status(Code::kResourceExhausted, "there are " + std::to_string(kMaxSessions) +
                                                " sessions, which is the limit; end one first");
  }
  Caller caller = CallerOf(*std::move(rights));
  Result<Charge> charge = MakeCharge(caller, "session", AmountOf(Resource::kSessions, 1));
  if (!charge.ok()) return charge.status();
  Result<std::string> key = RandomKey();
  if (!key.ok()) return key.status();
  const auto id = static_cast<SessionId>(++last_session_);
  LogInfo("session_started",
          {{"session", Number(id)}, {"pid", credentials.pid}, {"user", caller.user->name}});
  SessionState& session = sessions_[id];
  session = {*key, std::move(caller.rights), std::move(caller.user), *std::move(charge), lease};
  if (lease) session.deadline = now_() + *lease;
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
  for (auto& [id, draft] : drafts_) draft.draining |= draft.owner == session;
  sessions_.erase(session);
  LogInfo("session_ended", {{"session", Number(session)}});
}

Result<SessionId> Manager::FindSession(const std::string& key) const {
  for (const auto& [id, session] : sessions_) {
    if (SameKey(key, session.key)) return id;
  }
  return NoSession();
}

Result<v1::OpenSessionResponse> Manager::OpenSession(const Credentials& credentials,
                                                     const v1::OpenSessionRequest& request) {
  if (credentials.certificate_name.empty()) {
    return Status(Code::kPermissionDenied,
                  "a session with a lease needs a certificate; local applications get one over "
                  "descriptors.sock");
  }
  const std::uint32_t lease_ms = request.lease_ms() == 0 ? kDefaultLeaseMs : request.lease_ms();
  if (lease_ms < kMinLeaseMs || lease_ms > kMaxLeaseMs) {
    return Status(Code::kInvalidArgument, "lease_ms is " + std::to_string(lease_ms) + "; use " +
                                              std::to_string(kMinLeaseMs) + ".." +
                                              std::to_string(kMaxLeaseMs) + ", or 0");
  }
  Result<Session> session = StartSession(credentials, std::chrono::milliseconds(lease_ms));
  if (!session.ok()) return session.status();
  v1::OpenSessionResponse response;
  response.set_session(std::move(session->key));
  response.set_lease_ms(lease_ms);
  return response;
}

Result<Manager::SessionState*> Manager::FindLease(const Caller& caller) {
  const auto found = sessions_.find(caller.session);
  if (found == sessions_.end()) return NoSession();
  if (!found->second.lease) {
    return Status(Code::kFailedPrecondition,
                  "the session has no lease; it ends with its connection to descriptors.sock");
  }
  return &found->second;
}

Result<v1::KeepAliveResponse> Manager::KeepAlive(const Caller& caller,
                                                 const v1::KeepAliveRequest&) {
  const Result<SessionState*> session = FindLease(caller);
  if (!session.ok()) return session.status();
  (*session)->deadline = now_() + *(*session)->lease;
  return v1::KeepAliveResponse();
}

Result<v1::CloseSessionResponse> Manager::CloseSession(const Caller& caller,
                                                       const v1::CloseSessionRequest&) {
  const Status found = FindLease(caller).status();
  if (!found.ok()) return found;
  EndSession(caller.session);
  return v1::CloseSessionResponse();
}

void Manager::EndExpiredSessions() {
  std::vector<SessionId> expired;
  for (const auto& [id, session] : sessions_) {
    if (session.lease && session.deadline <= now_()) expired.push_back(id);
  }
  for (const SessionId id : expired) {
    LogWarning("lease_expired", {{"session", Number(id)}});
    EndSession(id);
  }
}

}  // namespace rxtoken
