// SPDX-License-Identifier: Apache-2.0
#include "dataplane/buffer.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_memory.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "tokens/abi/limits.h"

namespace rxtoken {
namespace {

constexpr std::uint64_t kSmallPageBytes = 4096;
constexpr std::uint64_t kHugePageBytes = 2u << 20;
constexpr std::array<std::uint32_t, 4> kPageSizes = {2048, 4096, 16384, 65536};

std::uint64_t RoundUp(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::string Mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// 0 if there is no such file or it does not begin with a number.
std::uint64_t ReadNumber(const std::filesystem::path& path) {
  std::uint64_t number = 0;
  std::ifstream(path) >> number;
  return number;
}

// The number that follows `wanted` in a file of lines "key number"; 0 if there is none.
std::uint64_t ReadField(const std::filesystem::path& path, std::string_view wanted) {
  std::ifstream file(path);
  std::string key, rest;
  for (std::uint64_t number = 0; file >> key >> number; std::getline(file, rest)) {
    if (key == wanted) return number;
  }
  return 0;
}

// What can be had without swapping and without waking the kernel's out-of-memory killer: the
// host's memory, or what the tightest control group (a container, a systemd unit) has left.
std::uint64_t AvailableBytes() {
  std::uint64_t available = ReadField("/proc/meminfo", "MemAvailable:") << 10;
  std::string group;
  for (std::ifstream file("/proc/self/cgroup"); std::getline(file, group);) {
    if (!group.starts_with("0::/")) continue;  // version 2 has one line, of this form
    const std::filesystem::path root = "/sys/fs/cgroup";
    for (std::filesystem::path dir = root / group.substr(4); dir != root.parent_path();
         dir = dir.parent_path()) {
      const std::uint64_t limit = ReadNumber(dir / "memory.max");  // or the word "max"
      if (limit == 0) continue;
      const std::uint64_t reclaimable = ReadField(dir / "memory.stat", "active_file") +
                                        ReadField(dir / "memory.stat", "inactive_file");
      const std::uint64_t used = ReadNumber(dir / "memory.current");
      const std::uint64_t bound = used - std::min(used, reclaimable);
      available = std::min(available, limit - std::min(limit, bound));
    }
  }
  return available;
}

std::uint64_t FreeHugeBytes() {
  const std::filesystem::path pool = "/sys/kernel/mm/hugepages/hugepages-2048kB";
  const std::uint64_t free = ReadNumber(pool / "free_hugepages");
  return (free - std::min(free, ReadNumber(pool / "resv_hugepages"))) * kHugePageBytes;
}

// Gets the memory of a file, or fails. Populating a mapping would leave holes instead, and
// touching one of them later kills the process.
bool GetMemory(int fd, std::uint64_t bytes) {
  int result;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

}  // namespace

Status Buffer::CheckSizes(const std::string& binding, std::uint64_t bytes,
                          std::uint32_t page_bytes) {
  const std::string who = "binding '" + binding + "': ";
  if (std::find(kPageSizes.begin(), kPageSizes.end(), page_bytes) == kPageSizes.end()) {
    return {Code::kInvalidArgument, who + "page_bytes is " + std::to_string(page_bytes) +
                                        "; use 2048, 4096, 16384 or 65536"};
  }
  const std::uint64_t most = std::uint64_t{kMaxPagesPerBuffer} * page_bytes;
  if (bytes == 0 || bytes % page_bytes != 0 || bytes > most) {
    return {Code::kInvalidArgument, who + "buffer_bytes is " + std::to_string(bytes) +
                                        "; use a multiple of page_bytes, which is " +
                                        std::to_string(page_bytes) + ", up to " +
                                        std::to_string(most)};
  }
  return {};
}

Result<std::unique_ptr<Buffer>> Buffer::Create(const std::string& binding, std::uint64_t bytes,
                                               std::uint32_t page_bytes, Memory memory) {
  if (Status status = CheckSizes(binding, bytes, page_bytes); !status.ok()) return status;
  if (memory == Memory::kAuto) {
    if (RoundUp(bytes, kHugePageBytes) <= FreeHugeBytes()) {
      auto huge = Create(binding, bytes, page_bytes, Memory::kHuge);
      if (huge.ok()) return huge;  // else somebody was faster
    }
    memory = Memory::kPlain;
  }

  std::unique_ptr<Buffer> buffer(new Buffer);
  buffer->binding_ = binding;
  buffer->bytes_ = bytes;
  buffer->page_shift_ = static_cast<unsigned>(std::countr_zero(page_bytes));
  buffer->memory_ = memory;
  if (Status status = buffer->Allocate(); !status.ok()) return status;
  return buffer;
}

Status Buffer::Allocate() {
  const bool huge = memory_ == Memory::kHuge;
  const std::uint64_t size = RoundUp(bytes_, huge ? kHugePageBytes : kSmallPageBytes);
  const std::uint64_t available = huge ? FreeHugeBytes() : AvailableBytes();
  const std::string who = "binding '" + binding_ + "': ";
  const std::string kind = huge ? " of free 2 MiB pages" : " of available memory";
  const std::string remedy =
      huge ? "; reserve more (sysctl vm.nr_hugepages) or use memory: plain" : "; use a smaller one";
  if (size > available) {
    return {Code::kResourceExhausted, who + "buffer_bytes is " + std::to_string(bytes_) + " (" +
                                          Mib(bytes_) + "), and the host has " + Mib(available) +
                                          kind + remedy};
  }

  fd_ = memfd_create(("rxtoken-" + binding_).c_str(),
                     MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
  void* address = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(size)) == 0 && GetMemory(fd_, size)) {
    address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  }
  if (address == MAP_FAILED) {
    const std::string reason = std::strerror(errno);
    return {Code::kResourceExhausted,
            who + "cannot have " + Mib(size) + kind + " (" + reason + ")" + remedy};
  }
  data_ = static_cast<std::uint8_t*>(address);
  mapped_bytes_ = size;

  // After our own mapping, which stays writable.
  if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) !=
      0) {
    return {Code::kFailedPrecondition, who + "cannot seal its memory (" + std::strerror(errno) +
                                           "); Linux 5.1 or later is needed"};
  }
  return {};
}

Buffer::~Buffer() {
  if (registered_) rte_extmem_unregister(data_, mapped_bytes_);
  if (data_ != nullptr) munmap(data_, mapped_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status Buffer::RegisterForDma() {
  if (registered_) return {};
  const std::string who = "binding '" + binding_ + "': ";
  if (rte_eal_iova_mode() != RTE_IOVA_VA) {
    return {Code::kFailedPrecondition,
            who +
                "DPDK uses physical addresses, in which a buffer is not contiguous; bind the "
                "device to vfio-pci and start with the DPDK argument --iova-mode=va"};
  }
  const std::uint64_t unit = memory_ == Memory::kHuge ? kHugePageBytes : kSmallPageBytes;
  if (rte_extmem_register(data_, mapped_bytes_, nullptr, 0, unit) != 0) {
    return {Code::kResourceExhausted, who + "DPDK does not take its memory (" +
                                          rte_strerror(rte_errno) +
                                          "); some 120 buffers are the most for hardware ports"};
  }
  registered_ = true;
  return {};
}

}  // namespace rxtoken
