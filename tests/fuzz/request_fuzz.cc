// SPDX-License-Identifier: Apache-2.0
// request_fuzz.cc - every request of the API, some of them one after the other, as the manager gets
// them: it is the first code of ours that looks at what gRPC and protobuf have taken apart, and
// all that the services add is a thread. The dataplane is that of the unit tests; it judges sizes
// as the real one does.
//
// Input: records of a byte for the kind of the request, a byte for its length, and the request. A
// request with a session is of the one that the first character of its key chooses.

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "control/manager.h"
#include "tests/unit/control/fake_dataplane.h"

namespace {

using namespace rxtoken;

void Require(bool condition) {
  if (!condition) std::abort();
}

class JudgingDataplane : public FakeDataplane {
 public:
  Result<BindingDraft> BeginBind(const BindingOptions& options) override {
    if (!std::has_single_bit(options.page_bytes) || options.page_bytes < kMinPageBytes ||
        options.buffer_bytes == 0 || options.buffer_bytes % options.page_bytes != 0) {
      return Status(Code::kInvalidArgument, "size");
    }
    return FakeDataplane::BeginBind(options);
  }
  Result<std::uint64_t> OpenRxSocket(const RxSocketOptions& options) override {
    if (!std::has_single_bit(options.ring_entries) || options.ring_entries < kMinRingEntries ||
        options.ring_entries > kMaxRingEntries) {
      return Status(Code::kInvalidArgument, "ring_entries");
    }
    return FakeDataplane::OpenRxSocket(options);
  }
};

Access MakeAccess() {
  Access access;
  access.configured = true;
  access.limits.amounts.fill(8);
  const auto limit = [&](Resource resource, std::uint64_t amount) {
    access.limits.amounts[static_cast<std::size_t>(resource)] = amount;
  };
  limit(Resource::kBufferBytes, 1 << 20);
  limit(Resource::kRingEntries, 1024);
  limit(Resource::kHeldFragments, 1024);
  Tenant& tenant = access.tenants.emplace_back();
  tenant.uids = {4001};
  tenant.certificate_names = {"c"};
  tenant.flows.emplace().emplace_back().set_destination("10.0.0.0/8");
  tenant.limits = access.limits;
  return access;
}

struct Daemon {
  Daemon() {
    Require(manager.OpenPort({.name = "p", .device = "fake", .queues = 4}).ok());
    for (const uid_t uid : {4001u, 0u}) {
      const Manager::Session session = manager.StartSession({.uid = uid}).value();
      sessions.push_back(session);
      users.push_back(manager.Identify({.request_key = session.key})->user);
    }
  }
  const std::string& Key(const std::string& chosen) const {
    static const std::string kNone;
    return chosen.empty() ? kNone : sessions[chosen[0] % sessions.size()].key;
  }

  JudgingDataplane dataplane;
  Manager manager{dataplane, MakeAccess()};
  std::vector<Manager::Session> sessions;
  std::vector<std::shared_ptr<User>> users;
};

// For the user of the request's session, or of the first.
template <typename Request>
Result<Caller> CallerOf(Daemon& daemon, const Request& request) {
  Manager::Claim claim = {.metadata_key = daemon.sessions[0].key};
  if constexpr (requires { request.session(); }) claim.request_key = daemon.Key(request.session());
  return daemon.manager.Identify(claim);
}

template <auto kMethod>
struct Handler;
template <typename Response, typename Request,
          Result<Response> (Manager::*kMethod)(const Caller&, const Request&)>
struct Handler<kMethod> {
  static void Handle(Daemon& daemon, const std::uint8_t* data, int bytes) {
    Request request;
    if (!request.ParseFromArray(data, bytes)) return;
    const Result<Caller> caller = CallerOf(daemon, request);
    if (caller.ok()) (void)(daemon.manager.*kMethod)(*caller, request);
  }
};

void Receive(Daemon& daemon, const std::uint8_t* data, int bytes) {
  v1::ReceiveRequest request;
  if (!request.ParseFromArray(data, bytes)) return;
  const Result<Caller> caller = CallerOf(daemon, request);
  const auto stream = daemon.manager.BeginStream(*caller, request);
  if (!stream.ok()) return;
  v1::ReceiveResponse batch;
  stream->reader->Read(batch, 64);
  daemon.manager.EndStream(stream->rx_socket);
}

void OpenSession(Daemon& daemon, const std::uint8_t* data, int bytes) {
  v1::OpenSessionRequest request;
  if (!request.ParseFromArray(data, bytes)) return;
  (void)daemon.manager.OpenSession({.certificate_name = "c"}, request);
}

constexpr std::array kHandlers = {
    Handler<&Manager::GetPort>::Handle,
    Handler<&Manager::ListPorts>::Handle,
    Handler<&Manager::Bind>::Handle,
    Handler<&Manager::AttachQueues>::Handle,
    Handler<&Manager::Unbind>::Handle,
    Handler<&Manager::GetBinding>::Handle,
    Handler<&Manager::ListBindings>::Handle,
    Handler<&Manager::OpenRxSocket>::Handle,
    Handler<&Manager::CloseRxSocket>::Handle,
    Handler<&Manager::GetRxSocket>::Handle,
    Handler<&Manager::ListRxSockets>::Handle,
    Handler<&Manager::AddFlow>::Handle,
    Handler<&Manager::UpdateFlow>::Handle,
    Handler<&Manager::DeleteFlow>::Handle,
    Handler<&Manager::ListFlows>::Handle,
    Handler<&Manager::KeepAlive>::Handle,
    Handler<&Manager::CloseSession>::Handle,
    Receive,
    OpenSession,
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::shared_ptr<User>> users;
  {
    Daemon daemon;
    users = daemon.users;
    while (size >= 2) {
      const std::size_t kind = data[0] % kHandlers.size();
      const std::size_t bytes = std::min<std::size_t>(data[1], size - 2);
      kHandlers[kind](daemon, data + 2, static_cast<int>(bytes));
      data += 2 + bytes;
      size -= 2 + bytes;
    }
    for (const Manager::Session& session : daemon.sessions) daemon.manager.EndSession(session.id);
  }
  // Whatever was refused half-way: nothing is left of it.
  for (const auto& user : users) Require(user->used == Amounts());
  return 0;
}
