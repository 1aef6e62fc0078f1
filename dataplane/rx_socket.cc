// SPDX-License-Identifier: Apache-2.0
#include "dataplane/rx_socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

namespace rxtoken {

Status RxSocket::Shared::Create(const std::string& name, std::size_t size) {
  fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(size)) == 0) {
    void* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p != MAP_FAILED) {
      data = static_cast<std::uint8_t*>(p);
      bytes = size;
      return Status();
    }
  }
  return Status(Code::kResourceExhausted,
                name + ": " + std::to_string(size) +
                    " bytes of shared memory cannot be had: " + std::strerror(errno));
}

// A file that the application could shrink would kill us by SIGBUS.
Status RxSocket::Shared::Seal(bool application_writes) const {
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (!application_writes) seals |= F_SEAL_FUTURE_WRITE;
  if (::fcntl(fd, F_ADD_SEALS, seals) == 0) return Status();
  return Status(Code::kInternal,
                std::string("shared memory cannot be sealed: ") + std::strerror(errno));
}

RxSocket::Shared::~Shared() {
  if (data != nullptr) ::munmap(data, bytes);
  if (fd >= 0) ::close(fd);
}

Result<std::unique_ptr<RxSocket>> RxSocket::Open(const RxSocketOptions& options,
                                                 std::uint32_t workers) {
  const std::uint32_t entries = options.ring_entries;
  if (entries < kMinRingEntries || entries > kMaxRingEntries || !std::has_single_bit(entries)) {
    return Status(Code::kInvalidArgument,
                  "rx socket '" + options.name + "': ring_entries is " + std::to_string(entries) +
                      "; use a power of two from " + std::to_string(kMinRingEntries) + " to " +
                      std::to_string(kMaxRingEntries));
  }
  std::unique_ptr<RxSocket> socket(new RxSocket(options));
  Rings& rings = *socket->rings_;
  const std::size_t descriptor_stride = DescriptorRingBytes(entries);
  const std::size_t return_stride = ReturnRingBytes(entries);
  if (Status s = rings.descriptors.Create("rxtoken-descriptors", workers * descriptor_stride);
      !s.ok()) {
    return s;
  }
  if (Status s = rings.returns.Create("rxtoken-returns", workers * return_stride); !s.ok()) {
    return s;
  }
  for (std::uint32_t worker = 0; worker < workers; worker++) {
    auto* descriptors =
        reinterpret_cast<DescriptorRing*>(rings.descriptors.data + worker * descriptor_stride);
    auto* returns = reinterpret_cast<ReturnRing*>(rings.returns.data + worker * return_stride);
    descriptors->magic = kAbiMagic;
    descriptors->abi_major = kAbiMajor;
    descriptors->abi_minor = kAbiMinor;
    descriptors->entries = entries;
    descriptors->worker = worker;
    socket->lanes_.push_back(
        std::make_unique<RxLane>(worker, &socket->slots_, descriptors, returns, options));
  }
  if (Status s = rings.descriptors.Seal(false); !s.ok()) return s;
  if (Status s = rings.returns.Seal(true); !s.ok()) return s;
  return socket;
}

RxSocket::~RxSocket() { Detach(); }

void RxSocket::SetCopyOut(BufferPool& pool) noexcept {
  for (auto& lane : lanes_) {
    lane->copy_out = &pool;
    lane->lane.set_uncounted(&pool.table());
  }
}

Result<Attachment> RxSocket::Attach() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
    return Status(Code::kResourceExhausted,
                  "rx socket '" + options_.name + "': no doorbell: " + std::strerror(errno));
  }
  doorbell_ = pair[0];
  Attachment attachment{.descriptor_fd = rings_->descriptors.fd,
                        .return_fd = rings_->returns.fd,
                        .doorbell = pair[1],
                        .lanes = static_cast<std::uint32_t>(lanes_.size()),
                        .entries = options_.ring_entries,
                        .rings = {},
                        .memory = rings_};
  for (std::uint32_t i = 0; i < attachment.lanes; i++) {
    attachment.rings.emplace_back(
        reinterpret_cast<const DescriptorRing*>(rings_->descriptors.data +
                                                i * DescriptorRingBytes(options_.ring_entries)),
        reinterpret_cast<ReturnRing*>(rings_->returns.data +
                                      i * ReturnRingBytes(options_.ring_entries)));
  }
  return attachment;
}

void RxSocket::Detach() noexcept {
  if (doorbell_ >= 0) ::close(doorbell_);
  doorbell_ = -1;
}

}  // namespace rxtoken
