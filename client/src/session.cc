// SPDX-License-Identifier: Apache-2.0
#include "client/src/session.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "tokens/abi/limits.h"
#include "tokens/abi/ring.h"

namespace rxtoken {
inline namespace sdk {
namespace {

constexpr std::size_t kMaxFds = 3;

AttachMessage Request(AttachKind kind) noexcept {
  AttachMessage message = {};
  message.magic = kAbiMagic;
  message.abi_major = kAbiMajor;
  message.abi_minor = kAbiMinor;
  message.kind = static_cast<std::uint32_t>(kind);
  return message;
}

// Receives one message and its descriptors. -1, 0 or bytes, as recvmsg().
ssize_t ReceiveMessage(int socket, AttachMessage& message, std::vector<UniqueFd>& fds) {
  iovec data = {&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t n;
  do {
    n = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) return n;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; i++) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return n;
}

std::string Text(const AttachMessage& message) {
  const auto end = std::find(message.text.begin(), message.text.end(), '\0');
  return std::string(message.text.begin(), end);
}

}  // namespace

Result<std::unique_ptr<Session>> Session::Open(const std::string& run_dir,
                                               std::chrono::milliseconds answer_timeout) {
  const std::string path = run_dir + "/descriptors.sock";
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Status(Code::kInvalidArgument, path + " is longer than a socket's path may be, " +
                                              std::to_string(sizeof(address.sun_path) - 1) +
                                              " characters");
  }
  path.copy(address.sun_path, path.size());

  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) {
    return Status(Code::kResourceExhausted, "cannot open a socket: " + ErrnoText(errno));
  }
  const timeval timeout = {.tv_sec = answer_timeout.count() / 1000,
                           .tv_usec = answer_timeout.count() % 1000 * 1000};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    const Code code = errno == EACCES ? Code::kPermissionDenied : Code::kUnavailable;
    return Status(code, "cannot connect to " + path + ": " + ErrnoText(errno) +
                            "; is rxtokend running, and with this run directory?");
  }

  std::unique_ptr<Session> session(new Session(path, std::move(fd)));
  auto welcome = session->Ask(Request(AttachKind::kHello), AttachKind::kWelcome, 0);
  if (!welcome.ok()) return welcome.status();
  const auto& key = welcome->message.key;
  session->key_.assign(key.begin(), key.end());
  return session;
}

Status Session::Check() const {
  char peeked;
  const ssize_t n = recv(fd_.get(), &peeked, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n > 0 || (n < 0 && errno == EAGAIN)) return Status();
  return Status(Code::kUnavailable, path_ + ": the session has ended; connect again");
}

void Session::End() noexcept { shutdown(fd_.get(), SHUT_RDWR); }

Result<Session::Answer> Session::Ask(const AttachMessage& request, AttachKind kind,
                                     std::size_t fds) {
  std::lock_guard lock(mutex_);
  return AskLocked(request, kind, fds);
}

Result<Session::Answer> Session::AskLocked(const AttachMessage& request, AttachKind kind,
                                           std::size_t fds) {
  Answer answer = {};
  ssize_t n = send(fd_.get(), &request, sizeof(request), MSG_NOSIGNAL);
  if (n == sizeof(request)) n = ReceiveMessage(fd_.get(), answer.message, answer.fds);
  if (n <= 0) {
    const bool late = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    End();  // an answer that comes later would be taken for that of another request
    return Status(Code::kUnavailable,
                  path_ + (late ? ": the daemon does not answer" : ": the session has ended") +
                      "; connect again");
  }
  const AttachMessage& message = answer.message;
  if (message.magic == kAbiMagic && message.abi_major != kAbiMajor) {
    End();
    return Status(Code::kFailedPrecondition,
                  path_ + ": the daemon speaks version " + std::to_string(message.abi_major) +
                      " of the ABI, this program " + std::to_string(kAbiMajor) +
                      "; rebuild the older of them");
  }
  const bool refused = message.code != 0;
  if (n != sizeof(message) || message.magic != kAbiMagic ||
      message.kind != static_cast<std::uint32_t>(kind) ||
      answer.fds.size() != (refused ? 0 : fds)) {
    End();
    return Status(Code::kInternal, path_ + ": the daemon's answer makes no sense");
  }
  if (refused) return Status(static_cast<Code>(message.code), Text(message));
  return answer;
}

Result<Attached> Session::Attach(const std::string& rx_socket, std::string_view secret) {
  AttachMessage request = Request(AttachKind::kAttach);
  if (secret.size() != request.key.size()) {
    return Status(Code::kInternal, "rx socket '" + rx_socket + "': the daemon's secret has " +
                                       std::to_string(secret.size()) + " characters, not 32");
  }
  secret.copy(request.key.data(), request.key.size());
  auto answer = Ask(request, AttachKind::kAttached, 3);
  if (!answer.ok()) return answer.status();
  auto attached = MapLanes(rx_socket, answer->message, answer->fds[0].get(), answer->fds[1].get());
  if (attached.ok()) attached->doorbell = std::move(answer->fds[2]);
  return attached;
}

Result<std::shared_ptr<const Buffer>> Session::MapBuffer(std::uint64_t binding) {
  std::lock_guard lock(mutex_);
  if (auto buffer = buffers_[binding].lock()) return buffer;

  AttachMessage request = Request(AttachKind::kMapBuffer);
  request.id = binding;
  auto answer = AskLocked(request, AttachKind::kBuffer, 1);
  if (!answer.ok()) return answer.status();
  const std::string what = "buffer of binding " + std::to_string(binding);
  const std::uint64_t bytes = answer->message.bytes;
  const std::uint32_t page_bytes = answer->message.page_bytes;
  if (!std::has_single_bit(page_bytes) || page_bytes < kMinPageBytes ||
      page_bytes > kMaxPageBytes || bytes == 0 || bytes % page_bytes != 0 ||
      bytes / page_bytes > kMaxPagesPerBuffer) {
    return Status(Code::kInternal, what + ": the daemon announced " + std::to_string(bytes) +
                                       " bytes in pages of " + std::to_string(page_bytes));
  }
  auto memory = MemoryMap::Map(what, answer->fds[0].get(), bytes, PROT_READ);
  if (!memory.ok()) return memory.status();
  auto buffer = std::make_shared<Buffer>();
  buffer->data = memory->data();
  buffer->pages = static_cast<std::uint32_t>(bytes / page_bytes);
  buffer->page_bytes = page_bytes;
  buffer->memory.emplace(std::move(*memory));
  std::erase_if(buffers_, [](const auto& entry) { return entry.second.expired(); });
  buffers_[binding] = buffer;
  return std::shared_ptr<const Buffer>(std::move(buffer));
}

Result<Attached> MapLanes(const std::string& rx_socket, const AttachMessage& answer,
                          int descriptor_fd, int return_fd) {
  const std::string what = "rx socket '" + rx_socket + "'";
  const std::uint32_t lanes = answer.lanes;
  const std::uint32_t entries = answer.entries;
  if (lanes < 1 || lanes > kMaxWorkers || !std::has_single_bit(entries) ||
      entries < kMinRingEntries || entries > kMaxRingEntries) {
    return Status(Code::kInternal, what + ": the daemon announced " + std::to_string(lanes) +
                                       " lanes of " + std::to_string(entries) + " entries");
  }
  auto descriptors = MemoryMap::Map(what + ": descriptor rings", descriptor_fd,
                                    lanes * DescriptorRingBytes(entries), PROT_READ);
  if (!descriptors.ok()) return descriptors.status();
  auto returns = MemoryMap::Map(what + ": return rings", return_fd,
                                lanes * ReturnRingBytes(entries), PROT_READ | PROT_WRITE);
  if (!returns.ok()) return returns.status();

  Attached attached;
  for (std::uint32_t lane = 0; lane < lanes; lane++) {
    const auto* ring = reinterpret_cast<const DescriptorRing*>(descriptors->data() +
                                                               lane * DescriptorRingBytes(entries));
    if (ring->magic != kAbiMagic || ring->abi_major != kAbiMajor || ring->entries != entries) {
      return Status(Code::kInternal,
                    what + ": lane " + std::to_string(lane) + " is not what was announced");
    }
    attached.rings.emplace_back(
        ring, reinterpret_cast<ReturnRing*>(returns->data() + lane * ReturnRingBytes(entries)));
  }
  attached.memory.push_back(std::move(*descriptors));
  attached.memory.push_back(std::move(*returns));
  return attached;
}

}  // namespace sdk
}  // namespace rxtoken
