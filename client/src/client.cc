// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <limits>

#include "client/src/receiver.h"
#include "client/src/session.h"
#include "rxtoken/rxtoken.h"
#include "rxtoken/v1/binding.grpc.pb.h"
#include "rxtoken/v1/flow.grpc.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"

namespace rxtoken {
inline namespace sdk {
namespace {

// No request takes as long as this, but Bind: the kernel clears a buffer's memory for it.
constexpr std::chrono::seconds kRequestTimeout{10};
constexpr std::uint64_t kClearedBytesPerSecond = 100'000'000;

v1::Memory ToProto(Memory memory) {
  switch (memory) {
    case Memory::kAuto: return v1::MEMORY_UNSPECIFIED;
    case Memory::kPlain: return v1::MEMORY_PLAIN;
    case Memory::kHuge: return v1::MEMORY_HUGE;
  }
  return v1::MEMORY_UNSPECIFIED;
}

v1::Match ToProto(const Match& match) {
  v1::Match proto;
  proto.set_port(match.port);
  if (match.queue) proto.set_queue(*match.queue);
  if (match.vlan) proto.set_vlan(*match.vlan);
  proto.set_source(match.source);
  proto.set_destination(match.destination);
  if (match.protocol) proto.set_protocol(*match.protocol);
  if (match.source_port) proto.set_source_port(*match.source_port);
  if (match.destination_port) proto.set_destination_port(*match.destination_port);
  return proto;
}

void ToProto(const QueueId& queue, v1::QueueId& proto) {
  proto.set_port(queue.port);
  proto.set_queue(queue.queue);
}

void SetNames(std::span<const RxSocket* const> rx_sockets,
              google::protobuf::RepeatedPtrField<std::string>& names) {
  for (const RxSocket* rx_socket : rx_sockets) *names.Add() = rx_socket->name();
}

bool ListensIn(const std::string& run_dir) {
  return access((run_dir + "/descriptors.sock").c_str(), F_OK) == 0;
}

}  // namespace

std::string DefaultRunDir() {
  std::string system_wide = "/run/rxtoken";
  for (const char* variable : {"RXTOKEN_RUN_DIR", "RUNTIME_DIRECTORY"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr && *value != '\0') return value;
  }
  if (geteuid() == 0) return system_wide;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string own = runtime != nullptr && *runtime != '\0'
                              ? std::string(runtime) + "/rxtoken"
                              : "/tmp/rxtoken-" + std::to_string(geteuid());
  return !ListensIn(own) && ListensIn(system_wide) ? system_wide : own;
}

struct Client::Connection {
  Connection(std::unique_ptr<Session> opened, const std::shared_ptr<grpc::Channel>& channel)
      : session(std::move(opened)), bindings(channel), rx_sockets(channel), flows(channel) {}

  // Makes a unary call. Codes of gRPC and ours are the same numbers.
  template <typename Stub, typename Request, typename Response>
  Status Call(Stub& stub,
              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& request, Response* response,
              std::chrono::seconds timeout = kRequestTimeout) const {
    // A daemon that was restarted would answer, but knows nothing of what was made before.
    Status alive = session->Check();
    if (!alive.ok()) return alive;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    context.AddMetadata("rxtoken-session", session->key());
    const grpc::Status status = (stub.*method)(&context, request, response);
    if (status.ok()) return Status();
    return Status(static_cast<Code>(status.error_code()), status.error_message());
  }

  // Closes a rx socket that nobody here uses; there is nothing to be done if that fails.
  void CloseRxSocket(const std::string& name) {
    v1::CloseRxSocketRequest request;
    request.set_name(name);
    request.set_session(session->key());
    v1::CloseRxSocketResponse response;
    (void)Call(rx_sockets, &v1::RxSockets::Stub::CloseRxSocket, request, &response);
  }

  const std::unique_ptr<Session> session;
  v1::Bindings::Stub bindings;
  v1::RxSockets::Stub rx_sockets;
  v1::Flows::Stub flows;
};

// ---- Client ------------------------------------------------------------------------------

Client::Client(std::shared_ptr<Connection> connection) noexcept
    : connection_(std::move(connection)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&& other) noexcept {
  Client(std::move(other)).connection_.swap(connection_);
  return *this;
}
Client::~Client() {
  if (connection_) connection_->session->End();
}

Result<Client> Client::Connect(const ConnectOptions& options) {
  auto session = Session::Open(options.run_dir, options.answer_timeout);
  if (!session.ok()) return session.status();
  // Channels to one address share connections. That to a daemon which was there before is none to
  // this one.
  grpc::ChannelArguments own_connection;
  own_connection.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel = grpc::CreateCustomChannel(
      "unix:" + options.run_dir + "/api.sock", grpc::InsecureChannelCredentials(), own_connection);
  return Client(std::make_shared<Connection>(std::move(*session), channel));
}

const std::string& Client::session_key() const noexcept { return connection_->session->key(); }

Result<BindingId> Client::Bind(const BindOptions& options) {
  v1::BindRequest request;
  request.set_name(options.name);
  request.set_session(connection_->session->key());
  request.set_buffer_bytes(options.buffer_bytes);
  request.set_page_bytes(options.page_bytes);
  request.set_frames_per_page(options.frames_per_page);
  request.set_memory(ToProto(options.memory));
  for (const QueueId& queue : options.queues) ToProto(queue, *request.add_queues());
  v1::Binding binding;
  const std::chrono::seconds clearing(options.buffer_bytes / kClearedBytesPerSecond);
  const Status status = connection_->Call(connection_->bindings, &v1::Bindings::Stub::Bind, request,
                                          &binding, kRequestTimeout + clearing);
  if (!status.ok()) return status;
  return BindingId{binding.id()};
}

Status Client::AttachQueues(const std::string& name, std::span<const QueueId> queues) {
  v1::AttachQueuesRequest request;
  request.set_name(name);
  request.set_session(connection_->session->key());
  for (const QueueId& queue : queues) ToProto(queue, *request.add_queues());
  v1::Binding binding;
  return connection_->Call(connection_->bindings, &v1::Bindings::Stub::AttachQueues, request,
                           &binding);
}

Status Client::Unbind(const std::string& name, std::chrono::milliseconds drain_timeout) {
  using TimeoutMs = std::numeric_limits<std::uint32_t>;
  v1::UnbindRequest request;
  request.set_name(name);
  request.set_session(connection_->session->key());
  // What is out of range the daemon refuses, with the limit.
  request.set_drain_timeout_ms(drain_timeout.count() < 0 || drain_timeout.count() > TimeoutMs::max()
                                   ? TimeoutMs::max()
                                   : static_cast<std::uint32_t>(drain_timeout.count()));
  v1::Binding binding;
  return connection_->Call(connection_->bindings, &v1::Bindings::Stub::Unbind, request, &binding);
}

Result<FlowId> Client::AddFlow(const Match& match, const RxSocket& rx_socket,
                               const FlowOptions& options) {
  return AddFlow(match, std::array{&rx_socket}, options);
}

Result<FlowId> Client::AddFlow(const Match& match, std::span<const RxSocket* const> rx_sockets,
                               const FlowOptions& options) {
  v1::AddFlowRequest request;
  *request.mutable_match() = ToProto(match);
  SetNames(rx_sockets, *request.mutable_rx_sockets());
  request.set_priority(options.priority);
  request.set_session(connection_->session->key());
  if (options.steer_to) ToProto(*options.steer_to, *request.mutable_steer_to());
  v1::Flow flow;
  const Status status =
      connection_->Call(connection_->flows, &v1::Flows::Stub::AddFlow, request, &flow);
  if (!status.ok()) return status;
  return FlowId{flow.id()};
}

Status Client::UpdateFlow(FlowId flow, const RxSocket& rx_socket, Force force) {
  return UpdateFlow(flow, std::array{&rx_socket}, force);
}

Status Client::UpdateFlow(FlowId flow, std::span<const RxSocket* const> rx_sockets, Force force) {
  v1::UpdateFlowRequest request;
  request.set_id(static_cast<std::uint64_t>(flow));
  SetNames(rx_sockets, *request.mutable_rx_sockets());
  request.set_session(connection_->session->key());
  request.set_force(force == Force::kYes);
  v1::Flow response;
  return connection_->Call(connection_->flows, &v1::Flows::Stub::UpdateFlow, request, &response);
}

Status Client::DeleteFlow(FlowId flow, Force force) {
  v1::DeleteFlowRequest request;
  request.set_id(static_cast<std::uint64_t>(flow));
  request.set_session(connection_->session->key());
  request.set_force(force == Force::kYes);
  v1::DeleteFlowResponse response;
  return connection_->Call(connection_->flows, &v1::Flows::Stub::DeleteFlow, request, &response);
}

// ---- RxSocket ----------------------------------------------------------------------------

struct RxSocket::Impl {
  Impl(std::shared_ptr<Client::Connection> shared, std::string rx_socket, Attached attached)
      : connection(std::move(shared)),
        name(std::move(rx_socket)),
        receiver(new Receiver(name, attached.rings, std::move(attached.memory),
                              std::move(attached.doorbell),
                              [session = connection->session.get()](std::uint64_t binding) {
                                return session->MapBuffer(binding);
                              })) {}
  ~Impl() {
    receiver->Abandon();
    connection->CloseRxSocket(name);
  }

  const std::shared_ptr<Client::Connection> connection;
  const std::string name;
  Receiver* const receiver;  // shared with its messages
};

Result<RxSocket> Client::OpenRxSocket(const RxSocketOptions& options) {
  v1::OpenRxSocketRequest request;
  request.set_name(options.name);
  request.set_session(connection_->session->key());
  request.set_content(options.content == Content::kFrame ? v1::CONTENT_FRAME : v1::CONTENT_PAYLOAD);
  request.set_ring_entries(options.ring_entries);
  request.set_max_held_fragments(options.max_held_fragments);
  request.mutable_bindings()->Assign(options.bindings.begin(), options.bindings.end());
  request.set_outside(options.outside == Outside::kDrop ? v1::OUTSIDE_DROP : v1::OUTSIDE_COPY);
  request.set_steering(options.steering == Steering::kStrict ? v1::STEERING_STRICT
                                                             : v1::STEERING_MIGRATE);
  request.set_slow(options.slow == Slow::kCopyOut ? v1::SLOW_COPY_OUT
                   : options.slow == Slow::kPause ? v1::SLOW_PAUSE
                                                  : v1::SLOW_DROP_NEW);
  request.set_copy_out_bytes(options.copy_out_bytes);
  using LeaseMs = std::numeric_limits<std::uint32_t>;
  // What is out of range the daemon refuses, with the limits.
  request.set_lease_ms(options.lease.count() < 0 || options.lease.count() > LeaseMs::max()
                           ? LeaseMs::max()
                           : static_cast<std::uint32_t>(options.lease.count()));
  v1::OpenRxSocketResponse response;
  const Status status = connection_->Call(connection_->rx_sockets,
                                          &v1::RxSockets::Stub::OpenRxSocket, request, &response);
  if (!status.ok()) return status;

  auto rx_socket = AttachRxSocket(options.name, response.attach_secret());
  if (!rx_socket.ok()) connection_->CloseRxSocket(options.name);
  return rx_socket;
}

Result<RxSocket> Client::AttachRxSocket(const std::string& name, std::string_view attach_secret) {
  auto attached = connection_->session->Attach(name, attach_secret);
  if (!attached.ok()) return attached.status();
  return RxSocket(std::make_unique<RxSocket::Impl>(connection_, name, std::move(*attached)));
}

RxSocket::RxSocket(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
RxSocket::RxSocket(RxSocket&&) noexcept = default;
RxSocket& RxSocket::operator=(RxSocket&&) noexcept = default;
RxSocket::~RxSocket() = default;

const std::string& RxSocket::name() const noexcept { return impl_->name; }

Result<std::span<Message>> RxSocket::Receive(std::span<Message> out,
                                             std::chrono::nanoseconds timeout) {
  return impl_->receiver->Receive(out, timeout);
}
std::vector<BindingEvent> RxSocket::TakeEvents() { return impl_->receiver->TakeEvents(); }
void RxSocket::Return(std::span<const HeldToken> tokens) noexcept {
  impl_->receiver->Return(tokens);
}
void RxSocket::Return(std::span<Message> messages) noexcept { impl_->receiver->Return(messages); }
void RxSocket::Flush() noexcept { impl_->receiver->Flush(); }

Result<RxSocketStats> RxSocket::GetStats() const {
  v1::GetRxSocketRequest request;
  request.set_name(impl_->name);
  v1::RxSocket response;
  const Status status = impl_->connection->Call(
      impl_->connection->rx_sockets, &v1::RxSockets::Stub::GetRxSocket, request, &response);
  if (!status.ok()) return status;
  const v1::RxSocketStatistics& from = response.statistics();
  RxSocketStats stats;
  stats.messages = from.messages();
  stats.bytes = from.bytes();
  stats.copied_messages = from.copied_messages();
  stats.lent = from.lent();
  stats.returned = from.returned();
  stats.revoked = from.revoked();
  stats.outstanding = from.outstanding();
  stats.waiting = from.waiting();
  stats.slots_in_use = from.slots_in_use();
  stats.void_returns = impl_->receiver->void_returns();
  stats.drops = {from.drops().begin(), from.drops().end()};
  stats.refusals = {from.refusals().begin(), from.refusals().end()};
  return stats;
}

}  // namespace sdk
}  // namespace rxtoken
