// SPDX-License-Identifier: Apache-2.0
// os.h - owners of what the kernel hands out: file descriptors and memory mappings.
//
// Thread-safety: value types, one thread at a time.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "tokens/abi/status.h"

namespace rxtoken {
inline namespace sdk {

inline std::string ErrnoText(int error) { return std::strerror(error); }

class UniqueFd {
 public:
  UniqueFd() noexcept = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

class MemoryMap {
 public:
  // Maps a whole file, shared. `protection`: PROT_READ, also | PROT_WRITE.
  // Errors: kInternal if it has fewer than `bytes`, kResourceExhausted if the kernel refuses.
  static Result<MemoryMap> Map(const std::string& what, int fd, std::size_t bytes, int protection) {
    struct stat file;
    if (fstat(fd, &file) != 0 || static_cast<std::size_t>(file.st_size) < bytes) {
      return Status(Code::kInternal, what + ": the daemon sent a file of fewer than the " +
                                         std::to_string(bytes) + " bytes that it announced");
    }
    // All of it, because part of a huge page cannot be unmapped.
    const auto file_bytes = static_cast<std::size_t>(file.st_size);
    void* data = mmap(nullptr, file_bytes, protection, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      return Status(Code::kResourceExhausted, what + ": cannot map " + std::to_string(file_bytes) +
                                                  " bytes: " + ErrnoText(errno));
    }
    return MemoryMap(data, file_bytes);
  }
  MemoryMap(MemoryMap&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  MemoryMap& operator=(MemoryMap&&) = delete;
  ~MemoryMap() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }

 private:
  MemoryMap(void* data, std::size_t bytes) noexcept : data_(data), bytes_(bytes) {}
  void* data_;
  std::size_t bytes_;
};

}  // namespace sdk
}  // namespace rxtoken
