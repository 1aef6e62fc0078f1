// SPDX-License-Identifier: Apache-2.0
#include "control/services.h"

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <future>
#include <limits>
#include <optional>
#include <semaphore>
#include <sstream>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/listener.h"
#include "control/log.h"
#include "control/unique_fd.h"
#include "rxtoken/v1/binding.grpc.pb.h"
#include "rxtoken/v1/flow.grpc.pb.h"
#include "rxtoken/v1/port.grpc.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/session.grpc.pb.h"
#include "rxtoken/v1/token.grpc.pb.h"
#include "rxtoken/v1/worker.grpc.pb.h"

namespace rxtoken {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLongestWait{10};      // for the control loop
constexpr milliseconds kStopGrace{200};  // for calls that run when the server stops
constexpr milliseconds kStreamNap{100};  // after which a stream looks whether it is cancelled
constexpr int kHandshakeTimeoutMs = 10'000;
constexpr int kMaxStreams = 64;
constexpr int kMaxThreads = kMaxStreams + 64;  // a stream occupies one, other calls share
constexpr int kMessagesPerResponse = 64;

constexpr int kMaxRanges = 65536;
constexpr std::uint32_t kMaxTokensPerCall = 1 << 20;
constexpr std::uint32_t kTokensPerChunk = 65536;  // the control loop is held for that long

static_assert(static_cast<int>(Code::kInvalidArgument) == grpc::StatusCode::INVALID_ARGUMENT);
static_assert(static_cast<int>(Code::kUnavailable) == grpc::StatusCode::UNAVAILABLE);

grpc::Status ToGrpc(const Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message());
}

// The caller's deadline, or kLongestWait from now if that is earlier.
ControlLoop::Clock::time_point Deadline(const grpc::ServerContext& context) {
  const std::chrono::system_clock::duration left =
      context.deadline() - std::chrono::system_clock::now();
  return ControlLoop::Clock::now() +
         std::min(left, std::chrono::system_clock::duration(kLongestWait));
}

struct Daemon {
  ControlLoop& loop;
  Manager& manager;
};

// The key of a session that the call's metadata has; empty if it has none.
std::string MetadataKey(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("rxtoken-session");
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

// The name in the certificate of the caller, who comes by TCP; empty if there is no certificate.
std::string CertificateName(const grpc::ServerContext& context) {
  const auto auth = context.auth_context();
  if (!auth || !auth->IsPeerAuthenticated()) return "";
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    const auto names = auth->FindPropertyValues(property);
    if (!names.empty() && !names[0].empty()) return {names[0].data(), names[0].size()};
  }
  return "(no name)";
}

// Runs `work`, which answers a Result of its caller and the request, on the control loop.
template <typename Request, typename Work>
auto Call(const Daemon& daemon, const grpc::ServerContext& context, const Request& request,
          Work work) {
  using Answer = std::invoke_result_t<Work&, const Caller&, const Request&>;
  Manager::Claim claim;
  if constexpr (requires { request.session(); }) claim.request_key = request.session();
  claim.metadata_key = MetadataKey(context);
  claim.certificate_name = CertificateName(context);
  return daemon.loop.Run(Deadline(context), [&]() -> Answer {
    const Result<Caller> caller = daemon.manager.Identify(claim);
    if (!caller.ok()) return caller.status();
    return work(*caller, request);
  });
}

// Handlers that only convert. What they do and which errors they have is said in the .proto
// file, and done in the manager.
#define RXTOKEN_HANDLER(Method, Response)                                                \
  grpc::Status Method(grpc::ServerContext* context, const v1::Method##Request* request,  \
                      v1::Response* response) override {                                 \
    Result<v1::Response> result =                                                        \
        Call(daemon_, *context, *request, [&](const Caller& caller, const auto& asked) { \
          return daemon_.manager.Method(caller, asked);                                  \
        });                                                                              \
    if (!result.ok()) return ToGrpc(result.status());                                    \
    *response = *std::move(result);                                                      \
    return grpc::Status::OK;                                                             \
  }

class PortsService final : public v1::Ports::Service {
 public:
  explicit PortsService(Daemon daemon) : daemon_(daemon) {}
  RXTOKEN_HANDLER(GetPort, Port)
  RXTOKEN_HANDLER(ListPorts, ListPortsResponse)

 private:
  const Daemon daemon_;
};

class WorkersService final : public v1::Workers::Service {
 public:
  explicit WorkersService(Daemon daemon) : daemon_(daemon) {}
  RXTOKEN_HANDLER(ListWorkers, ListWorkersResponse)

 private:
  const Daemon daemon_;
};

class BindingsService final : public v1::Bindings::Service {
 public:
  explicit BindingsService(Daemon daemon) : daemon_(daemon) {}
  grpc::Status Bind(grpc::ServerContext* context, const v1::BindRequest* request,
                    v1::Binding* response) override {
    Result<BindingDraft> draft =
        Call(daemon_, *context, *request, [&](const Caller& caller, const auto& asked) {
          return daemon_.manager.BeginBind(caller, asked);
        });
    if (!draft.ok()) return ToGrpc(draft.status());
    Status allocated = daemon_.manager.Allocate(*draft);
    if (allocated.ok() && context->IsCancelled()) {
      allocated = Status(Code::kDeadlineExceeded, "the caller does not wait any more");
    }
    Result<v1::Binding> result = daemon_.loop.Run(ControlLoop::Clock::time_point::max(), [&] {
      return daemon_.manager.EndBind(*draft, allocated);
    });
    if (!result.ok()) return ToGrpc(result.status());
    *response = *std::move(result);
    return grpc::Status::OK;
  }
  RXTOKEN_HANDLER(AttachQueues, Binding)
  RXTOKEN_HANDLER(Unbind, Binding)
  RXTOKEN_HANDLER(GetBinding, Binding)
  RXTOKEN_HANDLER(ListBindings, ListBindingsResponse)

 private:
  const Daemon daemon_;
};

class RxSocketsService final : public v1::RxSockets::Service {
 public:
  explicit RxSocketsService(Daemon daemon) : daemon_(daemon) {}
  RXTOKEN_HANDLER(OpenRxSocket, OpenRxSocketResponse)
  RXTOKEN_HANDLER(CloseRxSocket, CloseRxSocketResponse)
  RXTOKEN_HANDLER(GetRxSocket, RxSocket)
  RXTOKEN_HANDLER(ListRxSockets, ListRxSocketsResponse)

 private:
  const Daemon daemon_;
};

class FlowsService final : public v1::Flows::Service {
 public:
  explicit FlowsService(Daemon daemon) : daemon_(daemon) {}
  RXTOKEN_HANDLER(AddFlow, Flow)
  RXTOKEN_HANDLER(UpdateFlow, Flow)
  RXTOKEN_HANDLER(DeleteFlow, DeleteFlowResponse)
  RXTOKEN_HANDLER(ListFlows, ListFlowsResponse)

 private:
  const Daemon daemon_;
};

class SessionsService final : public v1::Sessions::Service {
 public:
  explicit SessionsService(Daemon daemon) : daemon_(daemon) {}
  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    const Credentials credentials = {.certificate_name = CertificateName(*context)};
    Result<v1::OpenSessionResponse> result = daemon_.loop.Run(
        Deadline(*context), [&] { return daemon_.manager.OpenSession(credentials, *request); });
    if (!result.ok()) return ToGrpc(result.status());
    *response = *std::move(result);
    return grpc::Status::OK;
  }
  RXTOKEN_HANDLER(KeepAlive, KeepAliveResponse)
  RXTOKEN_HANDLER(CloseSession, CloseSessionResponse)

 private:
  const Daemon daemon_;
};

#undef RXTOKEN_HANDLER

// Waits for the doorbell, but not longer than kStreamNap.
void WaitForDoorbell(int doorbell) {
  pollfd waiting = {.fd = doorbell, .events = POLLIN, .revents = 0};
  poll(&waiting, 1, static_cast<int>(kStreamNap.count()));
  std::array<char, 64> rings;
  [[maybe_unused]] const ssize_t n = recv(doorbell, rings.data(), rings.size(), MSG_DONTWAIT);
}

Status CheckRanges(const v1::ReturnTokensRequest& request) {
  const auto invalid = [](std::string message) {
    return Status(Code::kInvalidArgument, std::move(message) + "; nothing was returned");
  };
  if (request.ranges().empty()) return invalid("no range; give at least one");
  if (request.ranges_size() > kMaxRanges) {
    return invalid(std::to_string(request.ranges_size()) + " ranges; give at most " +
                   std::to_string(kMaxRanges));
  }
  std::uint64_t tokens = 0;
  for (int i = 0; i < request.ranges_size(); i++) {
    const v1::TokenRange& range = request.ranges(i);
    const std::string name = "ranges[" + std::to_string(i) + "]";
    if (range.count() == 0) return invalid(name + ": count is 0; use 1 or more");
    if (range.count() - 1 > std::numeric_limits<std::uint32_t>::max() - range.first_token()) {
      return invalid(name + ": " + std::to_string(range.count()) + " tokens from " +
                     std::to_string(range.first_token()) + " on run past token 4294967295");
    }
    tokens += range.count();
  }
  if (tokens > kMaxTokensPerCall) {
    return invalid(std::to_string(tokens) + " tokens in all; give at most " +
                   std::to_string(kMaxTokensPerCall));
  }
  return Status();
}

class TokensService final : public v1::Tokens::Service {
 public:
  explicit TokensService(Daemon daemon) : daemon_(daemon) {}

  // Running streams end within kStreamNap, unless they wait for their client to read.
  void Stop() { stopping_ = true; }

  grpc::Status Receive(grpc::ServerContext* context, const v1::ReceiveRequest* request,
                       grpc::ServerWriter<v1::ReceiveResponse>* writer) override {
    if (!streams_.try_acquire()) {
      return grpc::Status(
          grpc::StatusCode::RESOURCE_EXHAUSTED,
          std::to_string(kMaxStreams) + " Receive streams run, which is the limit; end one first");
    }
    const grpc::Status status = ReceiveAdmitted(*context, *request, *writer);
    streams_.release();
    return status;
  }

  grpc::Status ReturnTokens(grpc::ServerContext* context, const v1::ReturnTokensRequest* request,
                            v1::ReturnTokensResponse* response) override {
    Status status = CheckRanges(*request);
    if (status.ok()) status = ReturnInChunks(*context, *request, *response);
    return ToGrpc(status);
  }

 private:
  grpc::Status ReceiveAdmitted(grpc::ServerContext& context, const v1::ReceiveRequest& request,
                               grpc::ServerWriter<v1::ReceiveResponse>& writer) {
    Result<Manager::Stream> stream =
        Call(daemon_, context, request, [&](const Caller& caller, const auto& asked) {
          return daemon_.manager.BeginStream(caller, asked);
        });
    if (!stream.ok()) return ToGrpc(stream.status());
    const grpc::Status status = Deliver(context, request, *stream, writer);
    // Unavailable when the daemon stops: then everything goes anyway.
    (void)daemon_.loop.Run(ControlLoop::Clock::time_point::max(), [&] {
      daemon_.manager.EndStream(stream->rx_socket);
      return Status();
    });
    return status;
  }

  grpc::Status Deliver(grpc::ServerContext& context, const v1::ReceiveRequest& request,
                       const Manager::Stream& stream,
                       grpc::ServerWriter<v1::ReceiveResponse>& writer) {
    LocalReader& reader = *stream.reader;
    const std::uint64_t wanted = request.max_messages() != 0
                                     ? request.max_messages()
                                     : std::numeric_limits<std::uint64_t>::max();
    std::uint64_t delivered = 0;
    v1::ReceiveResponse batch;
    while (delivered < wanted) {
      if (context.IsCancelled()) {
        return grpc::Status(grpc::StatusCode::CANCELLED, "the client cancelled the stream");
      }
      if (stopping_) return ToGrpc(Status(Code::kUnavailable, "the daemon is stopping"));

      batch.Clear();
      const auto room = std::min<std::uint64_t>(wanted - delivered, kMessagesPerResponse);
      const LocalReader::ReadResult read = reader.Read(batch, static_cast<int>(room));
      const bool nothing = batch.messages_size() == 0 && batch.events_size() == 0;
      if (!nothing) {
        const bool sent = writer.Write(batch);
        // Tokens that the client never got to know are not left to it.
        reader.Settle(/*give_back=*/!request.hold() || !sent);
        delivered += static_cast<std::uint64_t>(batch.messages_size());
      }
      if (read.closed) return grpc::Status::OK;
      if (read.unknown_binding) {
        const grpc::Status status = AddBuffer(context, *read.unknown_binding, reader);
        if (!status.ok()) return status;
      } else if (nothing) {
        if (reader.Arm()) WaitForDoorbell(stream.doorbell.get());
        reader.Disarm();
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status AddBuffer(const grpc::ServerContext& context, std::uint64_t binding,
                         LocalReader& reader) {
    Result<BufferView> buffer =
        daemon_.loop.Run(Deadline(context), [&] { return daemon_.manager.GetBuffer(binding); });
    if (!buffer.ok() && buffer.status().code() == Code::kNotFound) buffer = BufferView();
    if (!buffer.ok()) return ToGrpc(buffer.status());
    reader.AddBuffer(binding, *std::move(buffer));
    return grpc::Status::OK;
  }

  // Precondition: CheckRanges(request).ok().
  Status ReturnInChunks(const grpc::ServerContext& context, const v1::ReturnTokensRequest& request,
                        v1::ReturnTokensResponse& response) {
    const Result<std::uint64_t> rx_socket =
        Call(daemon_, context, request, [&](const Caller& caller, const auto& asked) {
          return daemon_.manager.FindRxSocket(caller, asked.rx_socket());
        });
    if (!rx_socket.ok()) return rx_socket.status();

    for (int i = 0; i < request.ranges_size(); i++) response.add_results();
    int index = 0;
    std::uint32_t done = 0;  // of the range at `index`
    while (index < request.ranges_size()) {
      // The next chunk: ranges, or pieces of them, and whose they are.
      std::vector<TokenRange> chunk;
      std::vector<int> owners;
      std::uint32_t room = request.all_or_nothing() ? kMaxTokensPerCall : kTokensPerChunk;
      while (index < request.ranges_size() && room > 0) {
        const v1::TokenRange& range = request.ranges(index);
        const std::uint32_t count = std::min(range.count() - done, room);
        chunk.push_back({range.first_token() + done, count});
        owners.push_back(index);
        room -= count;
        done += count;
        if (done == range.count()) {
          index++;
          done = 0;
        }
      }
      const Result<std::vector<RangeResult>> results = daemon_.loop.Run(Deadline(context), [&] {
        return daemon_.manager.ReturnTokens(*rx_socket, chunk, request.all_or_nothing());
      });
      if (!results.ok()) return results.status();
      for (std::size_t i = 0; i < chunk.size(); i++) {
        AddResult((*results)[i], *response.mutable_results(owners[i]));
      }
    }
    return Status();
  }

  static void AddResult(const RangeResult& from, v1::RangeResult& to) {
    to.set_released(to.released() + from.released);
    for (std::size_t i = 0; i < kRefusals; i++) {
      if (from.refusals[i] == 0) continue;
      (*to.mutable_refusals())[std::string(kRefusalNames[i])] += from.refusals[i];
    }
  }

  const Daemon daemon_;
  std::counting_semaphore<kMaxStreams> streams_{kMaxStreams};
  std::atomic<bool> stopping_{false};
};

// The connections that gRPC serves. It tells nobody when one ends, and loses its own listener for
// good when there are no descriptors left; so we accept, and keep a second descriptor of each, on
// which we see its end.
//
// Thread-safety: the control thread only.
class ApiConnections {
 public:
  static constexpr std::int64_t kRemote = -1;

  explicit ApiConnections(ControlLoop& loop) : loop_(loop) {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    max_ = std::min<std::size_t>(kMaxApiConnections, limit.rlim_cur / 8);
  }
  ~ApiConnections() {
    for (const auto& [fd, connection] : connections_) loop_.Unwatch(fd);
  }

  // True: gRPC may have it. `user` is a user id, or kRemote.
  bool Add(int socket, std::int64_t user) {
    const auto of_user =
        std::count_if(connections_.begin(), connections_.end(),
                      [&](const auto& entry) { return entry.second.user == user; });
    UniqueFd watched(fcntl(socket, F_DUPFD_CLOEXEC, 0));
    const int fd = watched.get();
    const bool added =
        watched.valid() && connections_.size() < max_ &&
        static_cast<std::size_t>(of_user) < (max_ + 1) / 2 &&
        loop_.Watch(fd, /*events=*/0, [this, fd](std::uint32_t) { Forget(fd); }).ok();
    if (added) {
      connections_.emplace(fd, Connection{std::move(watched), user});
    } else if (const auto suppressed = log_limit_.Pass()) {
      LogWarning("api_connection_refused", {{"reason", "too many connections"},
                                            {"uid", user},
                                            {"connections", connections_.size()},
                                            {"suppressed", *suppressed}});
    }
    return added;
  }

  // gRPC does not close one while it writes to a peer that does not read.
  void CutAll() {
    for (const auto& [fd, connection] : connections_) shutdown(fd, SHUT_RDWR);
  }

 private:
  struct Connection {
    UniqueFd socket;
    std::int64_t user;
  };

  void Forget(int fd) {
    loop_.Unwatch(fd);
    connections_.erase(fd);
  }

  ControlLoop& loop_;
  std::size_t max_ = 0;
  std::unordered_map<int, Connection> connections_;  // by our descriptor
  LogLimit log_limit_;
};

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (file && !text.str().empty()) return text.str();
  return Status(Code::kInvalidArgument, "listen: '" + path + "' cannot be read");
}

// What clients by TCP must show. Errors: kInvalidArgument
Result<std::shared_ptr<grpc::ServerCredentials>> CredentialsFor(const TcpOptions& tcp) {
  const bool none = tcp.certificate.empty() && tcp.key.empty() && tcp.client_ca.empty();
  if (none && (tcp.address.empty() || IsLoopback(tcp.address))) {
    return grpc::InsecureServerCredentials();
  }
  if (tcp.certificate.empty() || tcp.key.empty() || tcp.client_ca.empty()) {
    return Status(Code::kInvalidArgument,
                  "listen: '" + tcp.address +
                      "' is for other hosts, or only some of certificate, key and client_ca are "
                      "given; give all three, or listen on 127.0.0.1");
  }
  const Result<std::string> certificate = ReadFile(tcp.certificate);
  if (!certificate.ok()) return certificate.status();
  const Result<std::string> key = ReadFile(tcp.key);
  if (!key.ok()) return key.status();
  const Result<std::string> client_ca = ReadFile(tcp.client_ca);
  if (!client_ca.ok()) return client_ca.status();
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = *client_ca;
  options.pem_key_cert_pairs.push_back({*key, *certificate});
  return grpc::SslServerCredentials(options);
}

using ConnectionAcceptor = grpc::experimental::ExternalConnectionAcceptor;

class GrpcServer final : public ApiServer {
 public:
  explicit GrpcServer(Daemon daemon)
      : loop_(daemon.loop),
        connections_(daemon.loop),
        ports_(daemon),
        workers_(daemon),
        bindings_(daemon),
        rx_sockets_(daemon),
        flows_(daemon),
        tokens_(daemon),
        sessions_(daemon) {}

  Status Listen(const SocketPlace& place, const TcpOptions& tcp) {
    auto tcp_credentials = CredentialsFor(tcp);
    if (!tcp_credentials.ok()) return tcp_credentials.status();
    // Never given back: the last grpc_shutdown() of a process waits up to 10 s for a thread
    // that polls.
    grpc_init();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ResourceQuota quota;
    quota.SetMaxThreads(kMaxThreads);
    grpc::ServerBuilder builder;
    using Builder = grpc::ServerBuilder::experimental_type;
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
    tcp_acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, *tcp_credentials);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
    builder.SetResourceQuota(quota);
    builder.RegisterService(&ports_);
    builder.RegisterService(&workers_);
    builder.RegisterService(&bindings_);
    builder.RegisterService(&rx_sockets_);
    builder.RegisterService(&flows_);
    builder.RegisterService(&tokens_);
    builder.RegisterService(&sessions_);
    server_ = builder.BuildAndStart();
    if (!server_) {
      return Status(Code::kFailedPrecondition,
                    "gRPC does not start; are the certificate and its key well-formed?");
    }
    return OnLoop([&] { return StartListeners(place, tcp); });
  }

  std::string tcp_address() const override { return tcp_address_; }

  ~GrpcServer() override {
    if (!server_) return;
    tokens_.Stop();
    (void)OnLoop([&] {
      listener_.reset();
      tcp_listener_.reset();
      return Status();
    });
    server_->GetHealthCheckService()->SetServingStatus(false);
    // Waits for running calls, and cancels them after the grace.
    auto calls_ended = std::async(std::launch::async, [&] {
      server_->Shutdown(std::chrono::system_clock::now() + kStopGrace);
    });
    const bool cut = calls_ended.wait_for(2 * kStopGrace) == std::future_status::timeout;
    (void)OnLoop([&] {
      if (cut) connections_->CutAll();
      return Status();
    });
    calls_ended.wait();
    server_->Wait();
    (void)OnLoop([&] {
      connections_.reset();
      return Status();
    });
  }

 private:
  template <typename Work>
  Status OnLoop(Work work) {
    return loop_.Run(ControlLoop::Clock::time_point::max(), work);
  }

  Status StartListeners(const SocketPlace& place, const TcpOptions& tcp) {
    auto listener = Listener::Start(loop_, place, SOCK_STREAM,
                                    [this](UniqueFd socket, const Credentials& peer) {
                                      Serve(std::move(socket), peer.uid, *acceptor_);
                                    });
    if (!listener.ok()) return listener.status();
    listener_ = *std::move(listener);
    if (tcp.address.empty()) return Status();
    auto tcp_listener =
        Listener::StartTcp(loop_, tcp.address, [this](UniqueFd socket, const Credentials&) {
          Serve(std::move(socket), ApiConnections::kRemote, *tcp_acceptor_);
        });
    if (!tcp_listener.ok()) return tcp_listener.status();
    tcp_listener_ = *std::move(tcp_listener);
    tcp_address_ = tcp_listener_->name();
    return Status();
  }

  void Serve(UniqueFd socket, std::int64_t user, ConnectionAcceptor& acceptor) {
    if (!connections_->Add(socket.get(), user)) return;
    ConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = socket.Release();
    acceptor.HandleNewConnection(&connection);
  }

  ControlLoop& loop_;
  std::unique_ptr<Listener> listener_;         // on the loop
  std::optional<ApiConnections> connections_;  // on the loop
  std::unique_ptr<Listener> tcp_listener_;
  std::unique_ptr<ConnectionAcceptor> acceptor_;
  std::unique_ptr<ConnectionAcceptor> tcp_acceptor_;
  std::string tcp_address_;
  PortsService ports_;
  WorkersService workers_;
  BindingsService bindings_;
  RxSocketsService rx_sockets_;
  FlowsService flows_;
  TokensService tokens_;
  SessionsService sessions_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

Result<std::unique_ptr<ApiServer>> ApiServer::Start(ControlLoop& loop, Manager& manager,
                                                    const SocketPlace& place,
                                                    const TcpOptions& tcp) {
  auto server = std::make_unique<GrpcServer>(Daemon{loop, manager});
  const Status status = server->Listen(place, tcp);
  if (!status.ok()) return status;
  return std::unique_ptr<ApiServer>(std::move(server));
}

}  // namespace rxtoken
