// SPDX-License-Identifier: Apache-2.0
#include "tests/process/raw_client.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "tests/process/harness.h"
#include "tokens/abi/token.h"

namespace rxtoken::test {

RawClient::RawClient(const std::filesystem::path& run_dir) {
  socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (run_dir / "descriptors.sock").c_str(),
               sizeof(address.sun_path) - 1);
  EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0)
      << std::strerror(errno);
  AttachMessage hello = {};
  hello.kind = static_cast<std::uint32_t>(AttachKind::kHello);
  const AttachMessage welcome = Ask(hello);
  session_.assign(welcome.key.data(), welcome.key.size());
}

RawClient::~RawClient() {
  if (descriptor_rings_ != nullptr) {
    munmap(descriptor_rings_, lanes() * DescriptorRingBytes(entries_));
  }
  if (return_rings_ != nullptr) munmap(return_rings_, lanes() * ReturnRingBytes(entries_));
  for (const auto& [binding, buffer] : buffers_) {
    munmap(const_cast<std::uint8_t*>(buffer.data), buffer.bytes);
    close(buffer.fd);
  }
  for (const int fd : {socket_, descriptor_fd_, return_fd_, doorbell_fd_}) {
    if (fd >= 0) close(fd);
  }
}

AttachMessage RawClient::Ask(AttachMessage request, std::vector<int>* fds) {
  request.magic = kAbiMagic;
  request.abi_major = kAbiMajor;
  request.abi_minor = kAbiMinor;
  EXPECT_EQ(send(socket_, &request, sizeof(request), MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(request)));

  AttachMessage answer = {};
  iovec vector = {&answer, sizeof(answer)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  EXPECT_EQ(recvmsg(socket_, &message, MSG_CMSG_CLOEXEC), static_cast<ssize_t>(sizeof(answer)));
  EXPECT_EQ(answer.magic, kAbiMagic);
  EXPECT_EQ(answer.kind, request.kind + 1);
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    const std::size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::vector<int> received(n);
    std::memcpy(received.data(), CMSG_DATA(c), n * sizeof(int));
    if (fds != nullptr) {
      *fds = received;
    } else {
      for (const int fd : received) close(fd);
    }
  }
  return answer;
}

void RawClient::Attach(const std::string& secret) {
  AttachMessage request = {};
  request.kind = static_cast<std::uint32_t>(AttachKind::kAttach);
  ASSERT_EQ(secret.size(), request.key.size());
  std::memcpy(request.key.data(), secret.data(), secret.size());
  std::vector<int> fds;
  const AttachMessage answer = Ask(request, &fds);
  ASSERT_EQ(answer.code, 0u) << answer.text.data();
  ASSERT_EQ(fds.size(), 3u);
  descriptor_fd_ = fds[0];
  return_fd_ = fds[1];
  doorbell_fd_ = fds[2];
  entries_ = answer.entries;

  void* descriptors = mmap(nullptr, answer.lanes * DescriptorRingBytes(entries_), PROT_READ,
                           MAP_SHARED, descriptor_fd_, 0);
  void* returns = mmap(nullptr, answer.lanes * ReturnRingBytes(entries_), PROT_READ | PROT_WRITE,
                       MAP_SHARED, return_fd_, 0);
  ASSERT_NE(descriptors, MAP_FAILED);
  ASSERT_NE(returns, MAP_FAILED);
  descriptor_rings_ = static_cast<std::uint8_t*>(descriptors);
  return_rings_ = static_cast<std::uint8_t*>(returns);
  for (std::uint32_t lane = 0; lane < answer.lanes; lane++) {
    readers_.emplace_back(descriptor_ring(lane), return_ring(lane));
  }
  slots_.resize(answer.lanes);
}

const DescriptorRing* RawClient::descriptor_ring(std::uint32_t lane) const {
  return reinterpret_cast<const DescriptorRing*>(descriptor_rings_ +
                                                 lane * DescriptorRingBytes(entries_));
}

ReturnRing* RawClient::return_ring(std::uint32_t lane) const {
  return reinterpret_cast<ReturnRing*>(return_rings_ + lane * ReturnRingBytes(entries_));
}

RawBuffer RawClient::MapBuffer(std::uint64_t binding) {
  if (buffers_.contains(binding)) return buffers_[binding];
  AttachMessage request = {};
  request.kind = static_cast<std::uint32_t>(AttachKind::kMapBuffer);
  request.id = binding;
  std::vector<int> fds;
  const AttachMessage answer = Ask(request, &fds);
  EXPECT_EQ(answer.code, 0u) << answer.text.data();
  if (fds.size() != 1) return {};
  void* data = mmap(nullptr, answer.bytes, PROT_READ, MAP_SHARED, fds[0], 0);
  EXPECT_NE(data, MAP_FAILED);
  return buffers_[binding] = {fds[0], static_cast<const std::uint8_t*>(data), answer.bytes,
                              answer.page_bytes};
}

std::vector<RawFragment> RawClient::Poll() {
  std::vector<RawFragment> fragments;
  std::array<Descriptor, 64> lot;
  for (std::uint32_t lane = 0; lane < lanes(); lane++) {
    while (const std::size_t n = readers_[lane].Poll(lot)) {
      for (const Descriptor& descriptor : std::span(lot).first(n)) {
        if (descriptor.kind == DescriptorKind::kSlotMapped) {
          slots_[lane][descriptor.slot] = descriptor.binding;
        } else if (descriptor.kind == DescriptorKind::kFragment) {
          const auto slot =
              static_cast<std::uint32_t>(PageToken::FromWire(descriptor.token).slot());
          fragments.push_back({descriptor.token, lane, slots_[lane][slot], descriptor.offset,
                               descriptor.length, (descriptor.flags & kMoreFragments) != 0});
        } else if (descriptor.kind != DescriptorKind::kTime) {
          events_.push_back(descriptor);
        }
      }
      readers_[lane].Consume(n);
    }
  }
  return fragments;
}

void RawClient::Return(std::uint32_t lane, std::span<const std::uint32_t> tokens) {
  EXPECT_TRUE(WaitUntil([&] {
    tokens = tokens.subspan(readers_[lane].Return(tokens));
    return tokens.empty();
  }));
}

}  // namespace rxtoken::test
