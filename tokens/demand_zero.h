// SPDX-License-Identifier: Apache-2.0
// demand_zero.h - an array that reads as zero and costs memory only where it was written.
//
// Thread-safety: as for a plain array.   Allocates: on construction, address space only.
// Memory: 4 KiB for each 4 KiB range that was ever written; reading costs nothing.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace rxtoken {

// T's zero value is the all-zero bit pattern, and it needs no construction.
template <typename T>
class DemandZeroArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  DemandZeroArray() = default;

  // Empty (see ok()) if the address space cannot be had.
  explicit DemandZeroArray(std::size_t size) : size_(size) {
    void* p = ::mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = p == MAP_FAILED ? nullptr : static_cast<T*>(p);
  }
  ~DemandZeroArray() {
    if (data_ != nullptr) ::munmap(data_, size_ * sizeof(T));
  }
  DemandZeroArray(DemandZeroArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DemandZeroArray& operator=(DemandZeroArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  bool ok() const noexcept { return data_ != nullptr; }
  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t i) const noexcept { return data_[i]; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace rxtoken
