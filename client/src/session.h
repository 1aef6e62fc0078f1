// SPDX-License-Identifier: Apache-2.0
// session.h - a connection to the daemon's descriptor socket; see tokens/abi/attach.h.
//
// Thread-safety: all functions, by any thread; a mutex is held from request to answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/os.h"
#include "client/src/receiver.h"
#include "tokens/abi/attach.h"
#include "tokens/abi/status.h"

namespace rxtoken {
inline namespace sdk {

// The lanes of a rx socket, mapped and checked.
struct Attached {
  std::vector<MemoryMap> memory;
  std::vector<Receiver::RingPair> rings;
  UniqueFd doorbell;
};

class Session {
 public:
  // Errors: kUnavailable if nobody listens in `run_dir`, kPermissionDenied,
  // kFailedPrecondition if the daemon speaks another version.
  // `answer_timeout`: without it, a daemon that is stopped would hang us.
  static Result<std::unique_ptr<Session>> Open(
      const std::string& run_dir,
      std::chrono::milliseconds answer_timeout = std::chrono::milliseconds(10'000));

  // What gRPC requests name this session by.
  const std::string& key() const noexcept { return key_; }

  Result<Attached> Attach(const std::string& rx_socket, std::string_view secret);

  // The same mapping for all who ask, as long as one of them keeps it.
  Result<std::shared_ptr<const Buffer>> MapBuffer(std::uint64_t binding);

  // OK, or kUnavailable once the session has ended, at either side.
  Status Check() const;

  // Ends the session; requests that come later, or are in flight, answer kUnavailable.
  void End() noexcept;

 private:
  struct Answer {
    AttachMessage message;
    std::vector<UniqueFd> fds;
  };

  Session(std::string path, UniqueFd fd) noexcept : path_(std::move(path)), fd_(std::move(fd)) {}

  // Sends a request and checks its answer's form, kind, code and number of descriptors.
  Result<Answer> Ask(const AttachMessage& request, AttachKind kind, std::size_t fds);
  Result<Answer> AskLocked(const AttachMessage& request, AttachKind kind, std::size_t fds);

  const std::string path_;
  const UniqueFd fd_;
  std::string key_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<const Buffer>> buffers_;  // under mutex_, by binding
};

// Maps and checks the lanes that the daemon described in `answer`.
Result<Attached> MapLanes(const std::string& rx_socket, const AttachMessage& answer,
                          int descriptor_fd, int return_fd);

}  // namespace sdk
}  // namespace rxtoken
