// SPDX-License-Identifier: Apache-2.0
#include "client/src/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tokens/abi/attach.h"
#include "tokens/abi/ring.h"

namespace rxtoken {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

const std::string kKey = "0123456789abcdef0123456789abcdef";

UniqueFd Memory(std::size_t bytes) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

AttachMessage Answer(AttachKind kind) {
  AttachMessage message = {};
  message.magic = kAbiMagic;
  message.abi_major = kAbiMajor;
  message.kind = static_cast<std::uint32_t>(kind);
  return message;
}

AttachMessage Welcome() {
  AttachMessage message = Answer(AttachKind::kWelcome);
  kKey.copy(message.key.data(), kKey.size());
  return message;
}

// The daemon's descriptor socket: answers each request of one connection with the next of
// the given answers, then hangs up.
class FakeDaemon {
 public:
  struct Reply {
    AttachMessage message;
    std::vector<UniqueFd> fds = {};
  };

  explicit FakeDaemon(std::vector<Reply> replies) : replies_(std::move(replies)) {
    const char* base = std::getenv("TMPDIR");
    dir_ = std::string(base != nullptr ? base : "/tmp") + "/rxtoken_session_XXXXXX";
    EXPECT_NE(mkdtemp(dir_.data()), nullptr);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path().copy(address.sun_path, sizeof(address.sun_path) - 1);
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_.get(), 1), 0);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeDaemon() {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
    unlink(path().c_str());
    rmdir(dir_.c_str());
  }
  const std::string& dir() const { return dir_; }
  // Valid once the session has had all answers.
  const std::vector<AttachMessage>& requests() const { return requests_; }

 private:
  std::string path() const { return dir_ + "/descriptors.sock"; }

  void Serve() {
    UniqueFd connection(accept(listener_.get(), nullptr, nullptr));
    for (const Reply& reply : replies_) {
      AttachMessage request;
      if (recv(connection.get(), &request, sizeof(request), 0) != sizeof(request)) return;
      requests_.push_back(request);
      Send(connection.get(), reply);
    }
  }
  static void Send(int to, const Reply& reply) {
    AttachMessage message = reply.message;
    iovec data = {&message, sizeof(message)};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    if (!reply.fds.empty()) {
      const std::size_t bytes = reply.fds.size() * sizeof(int);
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(bytes);
      cmsghdr* part = CMSG_FIRSTHDR(&header);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(bytes);
      for (std::size_t i = 0; i < reply.fds.size(); i++) {
        const int fd = reply.fds[i].get();
        std::memcpy(CMSG_DATA(part) + i * sizeof(int), &fd, sizeof(int));
      }
    }
    sendmsg(to, &header, MSG_NOSIGNAL);
  }

  std::vector<Reply> replies_;
  std::string dir_;
  UniqueFd listener_;
  std::vector<AttachMessage> requests_;
  std::thread thread_;
};

template <typename... Replies>
std::vector<FakeDaemon::Reply> Script(Replies... replies) {
  std::vector<FakeDaemon::Reply> script;
  (script.push_back(std::move(replies)), ...);
  return script;
}

// The status of opening a session, then doing `what` with it.
Status Try(std::vector<FakeDaemon::Reply> script,
           const std::function<Status(Session&)>& what = nullptr) {
  FakeDaemon daemon(std::move(script));
  auto session = Session::Open(daemon.dir());
  if (!session.ok() || !what) return session.status();
  return what(**session);
}

AttachMessage BufferAnswer(std::uint64_t bytes, std::uint32_t page_bytes) {
  AttachMessage message = Answer(AttachKind::kBuffer);
  message.id = 7;
  message.bytes = bytes;
  message.page_bytes = page_bytes;
  return message;
}

FakeDaemon::Reply BufferReply(std::uint64_t bytes, std::uint32_t page_bytes,
                              std::size_t file_bytes) {
  FakeDaemon::Reply reply{BufferAnswer(bytes, page_bytes)};
  reply.fds.push_back(Memory(file_bytes));
  return reply;
}

Status MapSeven(Session& session) { return session.MapBuffer(7).status(); }
Status AttachOne(Session& session) { return session.Attach("rx", kKey).status(); }

TEST(Session, KnowsItsKey) {
  FakeDaemon daemon(Script(FakeDaemon::Reply{Welcome()}));

  auto session = Session::Open(daemon.dir());

  ASSERT_TRUE(session.ok()) << session.status().ToString();
  EXPECT_EQ((*session)->key(), kKey);
}

TEST(Session, NeedsADaemon) {
  const Status status = Session::Open("/nonexistent/rxtoken").status();

  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("/nonexistent/rxtoken/descriptors.sock"));
  EXPECT_EQ(Session::Open(std::string(200, 'x')).status().code(), Code::kInvalidArgument);
}

TEST(Session, RefusesAnotherVersion) {
  AttachMessage welcome = Welcome();
  welcome.abi_major = kAbiMajor + 1;

  const Status status = Try(Script(FakeDaemon::Reply{welcome}));

  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("version 2"));
}

TEST(Session, RefusesAnswersThatMakeNoSense) {
  AttachMessage no_magic = Welcome();
  no_magic.magic = 0;
  EXPECT_EQ(Try(Script(FakeDaemon::Reply{no_magic})).code(), Code::kInternal);
  EXPECT_EQ(Try(Script(FakeDaemon::Reply{Answer(AttachKind::kBuffer)})).code(), Code::kInternal);
}

TEST(Session, PassesRefusalsOn) {
  AttachMessage refusal = Answer(AttachKind::kAttached);
  refusal.code = static_cast<std::uint32_t>(Code::kPermissionDenied);
  std::strcpy(refusal.text.data(), "rx socket 'rx' is not yours");

  const Status status =
      Try(Script(FakeDaemon::Reply{Welcome()}, FakeDaemon::Reply{refusal}), AttachOne);

  EXPECT_EQ(status.ToString(), "PERMISSION_DENIED: rx socket 'rx' is not yours");
}

TEST(Session, EndsWithTheDaemon) {
  EXPECT_EQ(Try({}).code(), Code::kUnavailable);
  EXPECT_EQ(Try(Script(FakeDaemon::Reply{Welcome()}), MapSeven).code(), Code::kUnavailable);
}

TEST(Session, CanBeEndedHere) {
  FakeDaemon daemon(Script(FakeDaemon::Reply{Welcome()}, BufferReply(4096, 4096, 4096)));
  auto session = Session::Open(daemon.dir());
  ASSERT_TRUE(session.ok());
  EXPECT_TRUE((*session)->Check().ok());

  (*session)->End();

  EXPECT_EQ((*session)->Check().code(), Code::kUnavailable);
  EXPECT_EQ((*session)->MapBuffer(7).status().code(), Code::kUnavailable);
}

// ---- buffers -----------------------------------------------------------------------------

TEST(Session, MapsABufferOnceForAll) {
  FakeDaemon daemon(Script(FakeDaemon::Reply{Welcome()}, BufferReply(65536, 2048, 65536),
                           BufferReply(65536, 2048, 65536)));
  auto session = Session::Open(daemon.dir());
  ASSERT_TRUE(session.ok());

  auto first = (*session)->MapBuffer(7);
  auto second = (*session)->MapBuffer(7);

  ASSERT_TRUE(first.ok()) << first.status().ToString();
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->get(), second->get());
  EXPECT_EQ((*first)->pages, 32u);
  EXPECT_EQ((*first)->page_bytes, 2048u);
  EXPECT_THAT(daemon.requests(), SizeIs(2));
  EXPECT_EQ(daemon.requests()[1].id, 7u);

  first = Status();
  second = Status();
  EXPECT_TRUE((*session)->MapBuffer(7).ok()) << "asks again once nobody uses it";
}

TEST(Session, ChecksWhatItMaps) {
  const std::uint32_t bad_pages[] = {0, 1024, 3000, 131072};
  for (const std::uint32_t page_bytes : bad_pages) {
    EXPECT_EQ(Try(Script(FakeDaemon::Reply{Welcome()}, BufferReply(1 << 20, page_bytes, 1 << 20)),
                  MapSeven)
                  .code(),
              Code::kInternal)
        << page_bytes;
  }
  const std::uint64_t bad_bytes[] = {0, 2047, 65536 + 1, std::uint64_t{1} << 60};
  for (const std::uint64_t bytes : bad_bytes) {
    EXPECT_EQ(
        Try(Script(FakeDaemon::Reply{Welcome()}, BufferReply(bytes, 2048, 65536)), MapSeven).code(),
        Code::kInternal)
        << bytes;
  }
  const Status too_short =
      Try(Script(FakeDaemon::Reply{Welcome()}, BufferReply(65536, 4096, 4096)), MapSeven);
  EXPECT_EQ(too_short.code(), Code::kInternal);
  EXPECT_THAT(too_short.message(), HasSubstr("fewer than the 65536 bytes"));
  EXPECT_EQ(Try(Script(FakeDaemon::Reply{Welcome()}, FakeDaemon::Reply{BufferAnswer(65536, 4096)}),
                MapSeven)
                .code(),
            Code::kInternal)
      << "no descriptor";
}

// ---- lanes -------------------------------------------------------------------------------

class Lanes : public testing::Test {
 protected:
  static constexpr std::uint32_t kLanes = 2;
  static constexpr std::uint32_t kEntries = 64;

  Lanes()
      : descriptors_(Memory(kLanes * DescriptorRingBytes(kEntries))),
        returns_(Memory(kLanes * ReturnRingBytes(kEntries))) {
    for (std::uint32_t lane = 0; lane < kLanes; lane++) {
      WriteHeader(lane, {kAbiMagic, kAbiMajor, kAbiMinor, kEntries});
    }
    answer_.lanes = kLanes;
    answer_.entries = kEntries;
  }

  struct Header {
    std::uint32_t magic;
    std::uint16_t abi_major;
    std::uint16_t abi_minor;
    std::uint32_t entries;
  };
  void WriteHeader(std::uint32_t lane, const Header& header) {
    const auto at = static_cast<off_t>(lane * DescriptorRingBytes(kEntries));
    EXPECT_EQ(pwrite(descriptors_.get(), &header, sizeof(header), at),
              static_cast<ssize_t>(sizeof(header)));
  }
  Result<Attached> Map() { return MapLanes("rx", answer_, descriptors_.get(), returns_.get()); }

  AttachMessage answer_ = Answer(AttachKind::kAttached);
  UniqueFd descriptors_;
  UniqueFd returns_;
};

TEST_F(Lanes, AreMapped) {
  auto attached = Map();

  ASSERT_TRUE(attached.ok()) << attached.status().ToString();
  EXPECT_THAT(attached->rings, SizeIs(kLanes));
  EXPECT_EQ(attached->rings[1].first->entries, kEntries);
}

TEST_F(Lanes, OfAnImpossibleNumberOrLengthAreRefused) {
  const std::pair<std::uint32_t, std::uint32_t> impossible[] = {
      {0, 64}, {17, 64}, {1, 0}, {1, 32}, {1, 96}, {1, 131072}, {0xFFFFFFFF, 0x80000000}};
  for (const auto& [lanes, entries] : impossible) {
    answer_.lanes = lanes;
    answer_.entries = entries;
    EXPECT_EQ(Map().status().code(), Code::kInternal) << lanes << " x " << entries;
  }
}

TEST_F(Lanes, InFilesThatAreTooShortAreRefused) {
  answer_.lanes = 3;
  EXPECT_EQ(Map().status().code(), Code::kInternal);
  answer_.lanes = 2;
  returns_ = Memory(kLanes * ReturnRingBytes(kEntries) - 1);
  EXPECT_EQ(Map().status().code(), Code::kInternal);
}

TEST_F(Lanes, WithAnotherHeaderThanAnnouncedAreRefused) {
  const Header wrong[] = {{0, kAbiMajor, 0, kEntries},
                          {kAbiMagic, kAbiMajor + 1, 0, kEntries},
                          {kAbiMagic, kAbiMajor, 0, 128}};
  for (const Header& header : wrong) {
    WriteHeader(1, header);
    const Status status = Map().status();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("lane 1"));
  }
}

}  // namespace
}  // namespace rxtoken
