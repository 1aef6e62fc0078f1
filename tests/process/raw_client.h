// SPDX-License-Identifier: Apache-2.0
// raw_client.h - an application that speaks the ABI itself, and so can do what the SDK would
// not let it: write where it must not, return what it does not hold, stop half-way.
//
// Thread-safety: none; one thread uses an object.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tokens/abi/attach.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/abi/ring.h"

namespace rxtoken::test {

struct RawBuffer {
  int fd = -1;
  const std::uint8_t* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t page_bytes = 0;
};

struct RawFragment {
  std::uint32_t token = 0;
  std::uint32_t lane = 0;
  std::uint64_t binding = 0;
  std::uint16_t offset = 0;
  std::uint16_t length = 0;
  bool more = false;
};

// One session with at most one rx socket. A step that fails also fails the test.
class RawClient {
 public:
  explicit RawClient(const std::filesystem::path& run_dir);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  const std::string& session() const noexcept { return session_; }

  // One exchange on the descriptor socket; `fds` takes what came with the answer.
  AttachMessage Ask(AttachMessage request, std::vector<int>* fds = nullptr);

  void Attach(const std::string& secret);
  RawBuffer MapBuffer(std::uint64_t binding);

  // All fragments that lie in the rings now.
  std::vector<RawFragment> Poll();
  // kUnbound, kRevoked and kExpired, as far as Poll() has come, since the last call.
  std::vector<Descriptor> TakeEvents() { return std::exchange(events_, {}); }
  // Any word, whether it is a token that we hold or not. Waits for room in the ring.
  void Return(std::uint32_t lane, std::span<const std::uint32_t> tokens);
  // Those for which there is room.
  void TryReturn(std::uint32_t lane, std::span<const std::uint32_t> tokens) {
    readers_[lane].Return(tokens);
  }

  std::uint32_t lanes() const noexcept { return static_cast<std::uint32_t>(readers_.size()); }
  std::uint32_t entries() const noexcept { return entries_; }
  int descriptor_fd() const noexcept { return descriptor_fd_; }
  int return_fd() const noexcept { return return_fd_; }
  int doorbell_fd() const noexcept { return doorbell_fd_; }
  const DescriptorRing* descriptor_ring(std::uint32_t lane) const;
  ReturnRing* return_ring(std::uint32_t lane) const;

 private:
  int socket_ = -1;
  std::string session_;
  int descriptor_fd_ = -1;
  int return_fd_ = -1;
  int doorbell_fd_ = -1;
  std::uint32_t entries_ = 0;
  std::uint8_t* descriptor_rings_ = nullptr;
  std::uint8_t* return_rings_ = nullptr;
  std::vector<LaneReader> readers_;
  std::vector<Descriptor> events_;
  std::vector<std::map<std::uint32_t, std::uint64_t>> slots_;  // of each lane: slot -> binding
  std::map<std::uint64_t, RawBuffer> buffers_;
};

}  // namespace rxtoken::test
