// SPDX-License-Identifier: Apache-2.0
// hostile_client.cc - an application that does one thing that it must not do, as fast as it can.
//
// usage: hostile_client <run dir> <what> [<user id> <group id>]
//
// As that user, if one is given. Prints "ready" once it begins, and goes on until its input ends;
// then it prints "rounds <n>". What it does: see kDeeds. Only `forge` waits for lines:
//   hold N M        holds its first N tokens of lane 0 and M of lane 1, and prints "holds"
//   return SEED     gives back random words, half of them pages of the buffer, and those next to
//   return all      what it holds or to a limit; or all 2^32. Then what it holds of lane 0, twice;
//                   the last of them is not among the others. Prints "returned <other slots>
//                   <out of range> <others>"
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grp.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "rxtoken/v1/binding.pb.h"
#include "rxtoken/v1/flow.grpc.pb.h"
#include "rxtoken/v1/port.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/session.pb.h"
#include "rxtoken/v1/token.pb.h"
#include "rxtoken/v1/worker.pb.h"
#include "tests/process/raw_client.h"
#include "tokens/abi/attach.h"
#include "tokens/abi/token.h"

namespace rxtoken::test {
namespace {

using Words = std::vector<std::uint32_t>;

constexpr std::uint16_t kUdpPort = 5001;

void Say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// What all deeds have in common.
struct Hostile {
  explicit Hostile(const std::filesystem::path& directory)
      : run_dir(directory),
        channel(grpc::CreateChannel("unix:" + (directory / "api.sock").string(),
                                    grpc::InsecureChannelCredentials())),
        rx_sockets(v1::RxSockets::NewStub(channel)),
        flows(v1::Flows::NewStub(channel)) {}

  // Begins a round; false: the input has ended.
  bool GoesOn() {
    if (rounds++ == 0) Say("ready");
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    return poll(&input, 1, 0) == 0;
  }

  std::uint32_t Random() { return static_cast<std::uint32_t>(random()); }
  std::uint32_t Below(std::uint32_t n) { return Random() % n; }

  // Its secret; empty if it is refused.
  std::string OpenRxSocket(const RawClient& client, std::uint32_t ring_entries = 0) {
    v1::OpenRxSocketRequest request;
    request.set_name("hostile" + std::to_string(++last_name));
    request.set_session(client.session());
    request.set_ring_entries(ring_entries);
    grpc::ClientContext context;
    v1::OpenRxSocketResponse response;
    (void)rx_sockets->OpenRxSocket(&context, request, &response);
    return response.attach_secret();
  }

  // A client with a rx socket that gets what is sent to kUdpPort.
  std::unique_ptr<RawClient> Open(std::uint32_t ring_entries = 0) {
    auto client = std::make_unique<RawClient>(run_dir);
    client->Attach(OpenRxSocket(*client, ring_entries));
    v1::AddFlowRequest request;
    request.set_session(client->session());
    request.add_rx_sockets("hostile" + std::to_string(last_name));
    request.set_priority(static_cast<std::int32_t>(last_name % 1000));  // the former may still be
    request.mutable_match()->set_protocol(17);
    request.mutable_match()->set_destination_port(kUdpPort);
    grpc::ClientContext context;
    v1::Flow flow;
    const grpc::Status status = flows->AddFlow(&context, request, &flow);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return client;
  }

  const std::filesystem::path run_dir;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::RxSockets::Stub> rx_sockets;
  const std::unique_ptr<v1::Flows::Stub> flows;
  std::mt19937 random{1};
  std::uint64_t rounds = 0;
  std::uint32_t last_name = 0;
};

// ---- rings -----------------------------------------------------------------------------------

// Indices that jump, go back, and are further ahead than the ring is long.
void WriteIndices(Hostile& hostile) {
  const auto client = hostile.Open();
  const std::uint32_t entries = client->entries();
  while (hostile.GoesOn()) {
    for (std::uint32_t lane = 0; lane < client->lanes(); lane++) {
      ReturnRing* const ring = client->return_ring(lane);
      const DescriptorRing* const theirs = client->descriptor_ring(lane);
      for (std::atomic<std::uint32_t>* index : {&ring->tail, &ring->descriptor_head}) {
        const std::uint32_t true_one = index == &ring->tail ? theirs->return_head : theirs->tail;
        const std::array<std::uint32_t, 8> lies = {
            true_one + entries, true_one + entries + 1, true_one - 1, true_one - entries,
            true_one + 1,       true_one + (1u << 31),  true_one,     hostile.Random()};
        index->store(lies[hostile.Below(lies.size())], std::memory_order_release);
      }
      ring->waiting.store(hostile.Random(), std::memory_order_relaxed);
    }
  }
}

// Tokens that change while they are read; the indices are right.
void ChangeTokens(Hostile& hostile) {
  const auto client = hostile.Open();
  std::jthread writer([&](const std::stop_token& stop) {
    for (std::uint32_t word = 1; !stop.stop_requested();) {
      for (std::uint32_t i = 0; i < client->entries(); i++) {
        word = word * 1'664'525 + 1'013'904'223;
        client->return_ring(0)->tokens()[i].store(word >> 16, std::memory_order_relaxed);
      }
    }
  });
  while (hostile.GoesOn()) {
    client->Poll();
    client->return_ring(0)->tail.store(
        client->descriptor_ring(0)->return_head.load(std::memory_order_acquire) + client->entries(),
        std::memory_order_release);
  }
}

// Forged tokens among those that it was lent, each of which it gives back twice.
void ForgeTokens(Hostile& hostile) {
  const auto client = hostile.Open();
  while (hostile.GoesOn()) {
    Words tokens;
    for (const RawFragment& fragment : client->Poll()) {
      tokens.insert(tokens.end(), {fragment.token, hostile.Random(), fragment.token});
    }
    for (int i = 0; i < 256; i++) tokens.push_back(hostile.Random() & 0xF800'FFFF);
    for (std::uint32_t lane = 0; lane < client->lanes(); lane++) client->TryReturn(lane, tokens);
  }
}

void NeverReturn(Hostile& hostile) {
  const auto client = hostile.Open();
  while (hostile.GoesOn()) client->Poll();
}

// Wants a doorbell all the time, but does not read them; closes the socket; goes, comes again.
void AbuseDoorbell(Hostile& hostile) {
  constexpr int kRings = 100'000;
  while (hostile.GoesOn()) {
    const auto client = hostile.Open();
    for (int i = 0; i < 2 * kRings; i++) {
      if (i == kRings) shutdown(client->doorbell_fd(), SHUT_RDWR);
      ReturnRing* const ring = client->return_ring(0);
      ring->waiting.store(hostile.Random(), std::memory_order_relaxed);
      if (i % 16 != 0) continue;
      for (const RawFragment& fragment : client->Poll()) {
        client->TryReturn(fragment.lane, Words{fragment.token});
      }
    }
  }
}

// ---- sockets ---------------------------------------------------------------------------------

class Socket {
 public:
  Socket(const std::filesystem::path& path, int type)
      : fd_(socket(AF_UNIX, type | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
        << std::strerror(errno);
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Whatever becomes of it.
  void Send(const void* data, std::size_t bytes, const std::vector<int>& descriptors = {}) {
    iovec part = {const_cast<void*>(data), bytes};
    std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (!descriptors.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* const rights = CMSG_FIRSTHDR(&header);
      *rights = {CMSG_LEN(descriptors.size() * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
      std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size() * sizeof(int));
    }
    (void)sendmsg(fd_, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  // True if there was something to read.
  bool Receive() {
    AttachMessage message;
    return recv(fd_, &message, sizeof(message), 0) > 0;
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

AttachMessage Request(AttachKind kind) {
  AttachMessage message = {};
  message.magic = kAbiMagic;
  message.abi_major = kAbiMajor;
  message.abi_minor = kAbiMinor;
  message.kind = static_cast<std::uint32_t>(kind);
  return message;
}

// Garbage, half messages, messages out of order, answers that are not read.
void SendGarbage(Hostile& hostile) {
  while (hostile.GoesOn()) {
    Socket socket(hostile.run_dir / "descriptors.sock", SOCK_SEQPACKET);
    AttachMessage message = Request(AttachKind::kHello);
    if (hostile.Below(2) == 0) socket.Send(&message, sizeof(message));
    for (std::uint32_t n = hostile.Below(4); n != 0; n--) {
      std::array<std::uint32_t, 256> noise;
      std::generate(noise.begin(), noise.end(), [&] { return hostile.Random(); });
      message = Request(static_cast<AttachKind>(hostile.Below(8)));
      message.id = hostile.Random();
      switch (hostile.Below(4)) {
        case 0: socket.Send(&noise, hostile.Below(sizeof(noise) + 1)); break;
        case 1: socket.Send(&message, hostile.Below(sizeof(message) + 1)); break;
        case 2: socket.Send(&message, sizeof(message)); break;
        case 3: socket.Send(&noise, sizeof(message)); break;
      }
    }
  }
}

// As many descriptors as a message can have, before and after the greeting.
void SendDescriptors(Hostile& hostile) {
  constexpr std::size_t kMost = 253;
  while (hostile.GoesOn()) {
    Socket socket(hostile.run_dir / "descriptors.sock", SOCK_SEQPACKET);
    const AttachMessage hello = Request(AttachKind::kHello);
    const AttachMessage map = Request(AttachKind::kMapBuffer);
    const std::vector<int> descriptors(1 + hostile.Below(kMost), socket.fd());
    if (hostile.Below(2) == 0) {
      socket.Send(&hello, sizeof(hello));
      socket.Receive();
    }
    for (int i = 0; i < 4; i++) socket.Send(&map, sizeof(map), descriptors);
  }
}

// Secrets that are wrong, nearly right, of another session, or used up.
void GuessSecrets(Hostile& hostile) {
  while (hostile.GoesOn()) {
    RawClient client(hostile.run_dir);
    const std::string secret = hostile.OpenRxSocket(client);
    ASSERT_FALSE(secret.empty());
    AttachMessage attach = Request(AttachKind::kAttach);
    for (int i = 0; i < 100; i++) {
      secret.copy(attach.key.data(), attach.key.size());
      char& digit = attach.key[hostile.Below(attach.key.size())];
      digit = static_cast<char>(digit ^ (1 + hostile.Below(255)));
      EXPECT_NE(client.Ask(attach).code, 0u);
    }
    client.session().copy(attach.key.data(), attach.key.size());
    EXPECT_NE(client.Ask(attach).code, 0u);
    client.Attach(secret);
    secret.copy(attach.key.data(), attach.key.size());
    EXPECT_NE(client.Ask(attach).code, 0u);
    EXPECT_NE(RawClient(hostile.run_dir).Ask(attach).code, 0u);
  }
}

void DropSessions(Hostile& hostile) {
  while (hostile.GoesOn()) {
    if (hostile.Below(2) == 0) hostile.Open(64);
    RawClient client(hostile.run_dir);
  }
}

// ---- calls -----------------------------------------------------------------------------------

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Fills a message with values at the limits of their types, and with some that mean something.
class Extremes {
 public:
  Extremes(Hostile& hostile, std::string session)
      : hostile_(hostile), session_(std::move(session)) {}

  void Fill(Message& message) {
    const std::uint32_t filled = hostile_.Below(5);  // quarters of its fields
    for (int i = 0; i < message.GetDescriptor()->field_count(); i++) {
      const FieldDescriptor& field = *message.GetDescriptor()->field(i);
      // Always there: what it makes goes with it.
      if (hostile_.Below(4) >= filled && field.name() != "session") continue;
      for (int n = field.is_repeated() ? Count() : 1; n != 0; n--) Set(message, field);
    }
  }

 private:
  std::uint64_t Number() {
    static constexpr std::array<std::uint64_t, 12> kNumbers = {
        0, 1, 17, kUdpPort, 4096, 65535, 65536, 1u << 20, 1u << 31, 0xFFFF'FFFF, 1ull << 63, ~0ull};
    return hostile_.Below(4) == 0 ? hostile_.Random() : kNumbers[hostile_.Below(kNumbers.size())];
  }
  int Count() { return hostile_.Below(100) == 0 ? 70'000 : 1 << hostile_.Below(7); }
  std::string Text(const FieldDescriptor& field) {
    if (field.name() == "session") return hostile_.Below(4) != 0 ? session_ : "none";
    if (hostile_.Below(1000) == 0) return std::string(1 << 16, 'x');
    static constexpr std::array kTexts = {"",        "b0",         "p0",   "p1",    "bystander",
                                          "hostile", "10.0.0.0/8", "::/0", "\n\"=", "../.."};
    return kTexts[hostile_.Below(kTexts.size())];
  }

  void Set(Message& message, const FieldDescriptor& field) {
    const auto& reflection = *message.GetReflection();
    const bool more = field.is_repeated();
    const auto number = Number();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Fill(more ? *reflection.AddMessage(&message, &field)
                         : *reflection.MutableMessage(&message, &field));
      case FieldDescriptor::CPPTYPE_STRING:
        return more ? reflection.AddString(&message, &field, Text(field))
                    : reflection.SetString(&message, &field, Text(field));
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection.SetEnumValue(
            &message, &field, static_cast<int>(number % 2 == 0 ? number : hostile_.Below(4)));
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection.SetBool(&message, &field, number % 2 != 0);
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection.SetInt32(&message, &field, static_cast<std::int32_t>(number));
      case FieldDescriptor::CPPTYPE_UINT32:
        return reflection.SetUInt32(&message, &field, static_cast<std::uint32_t>(number));
      case FieldDescriptor::CPPTYPE_UINT64: return reflection.SetUInt64(&message, &field, number);
      default: FAIL() << field.full_name() << ": a type that no request has had so far";
    }
  }

  Hostile& hostile_;
  const std::string session_;
};

// Every method, with values that nobody would send.
void CallWithExtremes(Hostile& hostile) {
  RawClient client(hostile.run_dir);
  Extremes extremes(hostile, client.session());
  grpc::GenericStub stub(hostile.channel);
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const Message* of_file : std::initializer_list<const Message*>{
           &v1::Binding::default_instance(), &v1::Flow::default_instance(),
           &v1::Port::default_instance(), &v1::RxSocket::default_instance(),
           &v1::KeepAliveRequest::default_instance(), &v1::TokenRange::default_instance(),
           &v1::Worker::default_instance()}) {
    const auto& service = *of_file->GetDescriptor()->file()->service(0);
    for (int i = 0; i < service.method_count(); i++) methods.push_back(service.method(i));
  }
  while (hostile.GoesOn()) {
    const auto& method = *methods[hostile.Below(static_cast<std::uint32_t>(methods.size()))];
    const std::unique_ptr<Message> request(google::protobuf::MessageFactory::generated_factory()
                                               ->GetPrototype(method.input_type())
                                               ->New());
    extremes.Fill(*request);
    grpc::Slice slice(request->SerializeAsString());
    grpc::ByteBuffer bytes(&slice, 1);
    grpc::ClientContext context;
    context.AddMetadata("rxtoken-session", client.session());
    // A stream goes on for as long as it may.
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(method.server_streaming() ? 20 : 10'000));
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareUnaryCall(
        &context, "/" + method.service()->full_name() + "/" + method.name(), bytes, &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    if (!method.server_streaming()) {
      EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << method.full_name();
      EXPECT_NE(status.error_code(), grpc::StatusCode::INTERNAL) << status.error_message();
      EXPECT_NE(status.error_code(), grpc::StatusCode::UNKNOWN) << status.error_message();
    }
  }
}

// Connections that send what is no HTTP, or nothing; and many at a time.
void ConnectAndSendNoise(Hostile& hostile) {
  while (hostile.GoesOn()) {
    std::vector<std::unique_ptr<Socket>> sockets;
    for (int i = 0; i < 100; i++) {
      const auto& socket =
          sockets.emplace_back(std::make_unique<Socket>(hostile.run_dir / "api.sock", SOCK_STREAM));
      if (hostile.Below(4) == 0) continue;
      std::string text = hostile.Below(2) == 0 ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" : "";
      for (std::uint32_t n = hostile.Below(256); n != 0; n--) {
        text += static_cast<char>(hostile.Random());
      }
      socket->Send(text.data(), text.size());
    }
  }
}

// ---- the campaign of forged tokens --------------------------------------------------------------

class Campaign {
 public:
  Campaign(RawClient& client, Words held, std::uint32_t pages)
      : client_(client), held_(std::move(held)), pages_(pages) {}

  void ReturnAll() {
    std::uint32_t token = 0;
    do Push(token);
    while (++token != 0);
  }

  void ReturnRandom(std::uint64_t seed) {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      for (const std::uint32_t page : {0u, 1u, pages_ - 1, pages_, pages_ + 1,
                                       kMaxPagesPerBuffer - 2, kMaxPagesPerBuffer - 1}) {
        Push(slot << kPageBits | page);
      }
      for (const std::uint32_t token : held_) {
        for (const std::uint32_t next : {token - 1, token, token + 1}) {
          Push(next ^ slot << kPageBits);
        }
      }
    }
    std::mt19937_64 random(seed);
    for (std::uint32_t i = 0; i < 1 << 23; i++) {
      const std::uint64_t word = random();
      Push(static_cast<std::uint32_t>(word));
      const std::uint32_t slot = held_.front() >> kPageBits;
      Push(slot << kPageBits | static_cast<std::uint32_t>((word >> 32) % pages_));
    }
  }

  // The last of them keeps the daemon reading until all others are read.
  void ReturnHeld() {
    for (int i = 0; i < 2; i++) {
      for (const std::uint32_t token : held_) Push(token);
    }
    Flush();
    client_.Return(0, std::array{held_.front()});
    others_++;
  }

  void Print() const {
    Say("returned " + std::to_string(other_slots_) + " " + std::to_string(out_of_range_) + " " +
        std::to_string(others_));
  }

 private:
  void Push(std::uint32_t token) {
    if (token == held_.front()) return;
    if (token >> kPageBits != held_.front() >> kPageBits) {
      other_slots_++;
    } else if ((token & (kMaxPagesPerBuffer - 1)) >= pages_) {
      out_of_range_++;
    } else {
      others_++;
    }
    lot_.push_back(token);
    if (lot_.size() == kLot) Flush();
  }
  void Flush() {
    client_.Return(0, lot_);
    lot_.clear();
  }

  static constexpr std::size_t kLot = kMaxRingEntries / 4;
  RawClient& client_;
  const Words held_;
  const std::uint32_t pages_;
  Words lot_;
  std::uint64_t other_slots_ = 0;
  std::uint64_t out_of_range_ = 0;
  std::uint64_t others_ = 0;
};

void RunCampaign(Hostile& hostile) {
  const auto client = hostile.Open(kMaxRingEntries);
  std::string command;
  std::array<std::size_t, 2> wanted = {};
  Say("ready");
  std::cin >> command >> wanted[0] >> wanted[1];
  std::array<Words, 2> held;
  std::uint64_t binding = 0;
  while (held[0].size() < wanted[0] || held[1].size() < wanted[1]) {
    for (const RawFragment& fragment : client->Poll()) {
      held.at(fragment.lane).push_back(fragment.token);
      binding = fragment.binding;
    }
  }
  Say("holds");
  const RawBuffer buffer = client->MapBuffer(binding);
  std::cin >> command >> command;
  client->Return(1, held[0]);
  Campaign campaign(*client, held[0], static_cast<std::uint32_t>(buffer.bytes / buffer.page_bytes));
  if (command == "all") {
    campaign.ReturnAll();
  } else {
    campaign.ReturnRandom(std::stoull(command));
  }
  campaign.ReturnHeld();
  campaign.Print();
  while (std::cin.get() != EOF) {
  }
}

struct Deed {
  std::string_view name;
  void (*run)(Hostile&);
};
constexpr std::array<Deed, 12> kDeeds = {{
    {"indices", WriteIndices},
    {"changes", ChangeTokens},
    {"forgery", ForgeTokens},
    {"hoarding", NeverReturn},
    {"doorbell", AbuseDoorbell},
    {"garbage", SendGarbage},
    {"descriptors", SendDescriptors},
    {"secrets", GuessSecrets},
    {"sessions", DropSessions},
    {"extremes", CallWithExtremes},
    {"noise", ConnectAndSendNoise},
    {"campaign", RunCampaign},
}};

}  // namespace
}  // namespace rxtoken::test

int main(int argc, char** argv) {
  using namespace rxtoken::test;
  const std::string_view what = argc >= 3 ? argv[2] : "";
  const auto deed = std::find_if(kDeeds.begin(), kDeeds.end(),
                                 [&](const Deed& some) { return some.name == what; });
  if (deed == kDeeds.end() || argc == 4) {
    std::fprintf(stderr, "usage: hostile_client <run dir> <what> [<user id> <group id>]\n");
    return 2;
  }
  if (argc > 4) {
    const auto uid = static_cast<uid_t>(std::stoul(argv[3]));
    const auto gid = static_cast<gid_t>(std::stoul(argv[4]));
    if (setgroups(0, nullptr) != 0 || setgid(gid) != 0 || setuid(uid) != 0) return 2;
  }
  Hostile hostile(argv[1]);
  deed->run(hostile);
  std::printf("rounds %lu\n", hostile.rounds);
  return testing::UnitTest::GetInstance()->Failed() ? 1 : 0;
}
