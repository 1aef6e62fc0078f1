// SPDX-License-Identifier: Apache-2.0
// attach_fuzz.cc - what an application sends to the descriptor socket, over one connection.
//
// Input: records of a byte for the kind of the message, a byte for its length, and its bytes.
//   kind 0: as they are   1: behind the right magic and version   2: an attachment, with a secret
//   that is good   3: as 1, with a descriptor

#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "control/descriptor_server.h"
#include "tests/unit/control/fake_dataplane.h"

namespace {

using namespace rxtoken;

void Require(bool condition) {
  if (!condition) std::abort();
}

// Made once; sessions come and go.
struct Daemon {
  Daemon() {
    v1::BindRequest bind;
    bind.set_name("b");
    bind.set_buffer_bytes(1 << 20);
    Require(manager.Bind(manager.Configuration(), bind).ok());
  }
  ~Daemon() {
    server.reset();
    unlink(path.c_str());
    rmdir(directory.c_str());
  }

  static std::string MakeDirectory() {
    std::string pattern = "/tmp/rxtoken-fuzz-XXXXXX";
    Require(mkdtemp(pattern.data()) != nullptr);
    return pattern;
  }

  const std::string directory = MakeDirectory();
  const std::string path = directory + "/s";
  FakeDataplane dataplane;
  Manager manager{dataplane};
  std::unique_ptr<ControlLoop> loop = ControlLoop::Create().value();
  std::unique_ptr<DescriptorServer> server =
      DescriptorServer::Start(*loop, manager, {path}).value();
};

void Send(int socket, const std::uint8_t* data, std::size_t bytes, bool with_descriptor) {
  iovec part = {const_cast<std::uint8_t*>(data), bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (with_descriptor) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    *rights = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(rights), &socket, sizeof(int));
  }
  (void)sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Daemon daemon;
  const auto turn = [] {
    for (int i = 0; i < 3; i++) daemon.loop->RunOnce(std::chrono::milliseconds(0));
  };
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  const std::string secret =
      daemon.manager.OpenRxSocket(daemon.manager.Configuration(), open)->attach_secret();
  {
    const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    daemon.path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    Require(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    while (size >= 2) {
      const unsigned kind = data[0] % 4;
      const std::size_t bytes = std::min<std::size_t>(data[1], size - 2);
      AttachMessage message = {};
      std::memcpy(&message, data + 2, std::min(bytes, sizeof(message)));
      if (kind == 0) {
        Send(socket.get(), data + 2, bytes, false);
      } else {
        message.magic = kAbiMagic;
        message.abi_major = kAbiMajor;
        if (kind == 2) {
          message.kind = static_cast<std::uint32_t>(AttachKind::kAttach);
          secret.copy(message.key.data(), message.key.size());
        }
        Send(socket.get(), reinterpret_cast<const std::uint8_t*>(&message), sizeof(message),
             kind == 3);
      }
      turn();
      AttachMessage answer;
      (void)recv(socket.get(), &answer, sizeof(answer), MSG_DONTWAIT);
      data += 2 + bytes;
      size -= 2 + bytes;
    }
  }
  turn();
  // It ended with the session that attached it, or was never attached.
  v1::CloseRxSocketRequest close;
  close.set_name("s");
  (void)daemon.manager.CloseRxSocket(daemon.manager.Configuration(), close);
  Require(daemon.dataplane.sockets.empty());
  daemon.dataplane.calls.clear();
  return 0;
}
