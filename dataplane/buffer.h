// SPDX-License-Identifier: Apache-2.0
// buffer.h - one binding's memory: a sealed memfd that only this process can write to.
//
// The memory is there in full when Create returns: no later access can fail for want of it.
// The seals refuse every new writable mapping, write, truncation and hole; our own mapping is
// older than the seals and stays writable. So the fd may be given to anybody.
//
// Thread-safety: const functions from any thread; RegisterForDma from the control thread.
// Memory: shared, plain or 2 MiB pages.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "dataplane/dataplane.h"
#include "tokens/abi/status.h"
#include "tokens/held.h"

namespace rxtoken {

class Buffer : public Holdable {
 public:
  // `binding` is for messages and for /proc/<pid>/maps. `bytes` is a multiple of `page_bytes`;
  // with huge pages the memory is rounded up to 2 MiB, the number of pages is not.
  // Errors: kInvalidArgument    page_bytes is none of 2048, 4096, 16384, 65536; bytes is zero,
  //                             no multiple of it, or more than 2^27 pages
  //         kResourceExhausted  the memory cannot be had
  // Blocks: while the kernel clears the memory, about 0.5 s for each GiB.
  static Result<std::unique_ptr<Buffer>> Create(const std::string& binding, std::uint64_t bytes,
                                                std::uint32_t page_bytes, Memory memory);
  // What Create() asks of its numbers, for those who want to know before.
  // Errors: kInvalidArgument, as above
  static Status CheckSizes(const std::string& binding, std::uint64_t bytes,
                           std::uint32_t page_bytes);
  ~Buffer() override;

  int fd() const noexcept { return fd_; }
  std::uint8_t* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint32_t page_bytes() const noexcept { return 1u << page_shift_; }
  unsigned page_shift() const noexcept { return page_shift_; }
  std::uint32_t pages() const noexcept { return static_cast<std::uint32_t>(bytes_ >> page_shift_); }
  Memory memory() const noexcept { return memory_; }                     // never kAuto
  std::uint64_t mapped_bytes() const noexcept { return mapped_bytes_; }  // bytes(), rounded up

  // Makes the memory known to DPDK, so that Port::MapForDma can map it; does nothing if it is
  // already. Ports of software drivers need none of it.
  // Errors: kFailedPrecondition  DPDK uses physical addresses (a buffer is not contiguous there)
  //         kResourceExhausted   DPDK's table of external memory is full
  Status RegisterForDma();

 private:
  Buffer() = default;
  Status Allocate();

  std::string binding_;
  int fd_ = -1;
  std::uint8_t* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t mapped_bytes_ = 0;
  unsigned page_shift_ = 0;
  Memory memory_ = Memory::kPlain;
  bool registered_ = false;
};

}  // namespace rxtoken
