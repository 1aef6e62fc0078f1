// SPDX-License-Identifier: Apache-2.0
// rx_socket.h - one application endpoint: its slots, its lanes and their shared memory.
//
// Thread-safety: the control thread; lanes belong to their workers.
// Memory: rings as tokens/abi/ring.h has them, for each worker; urefs as pages are lent.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dataplane/dataplane.h"
#include "dataplane/worker.h"
#include "tokens/held.h"
#include "tokens/slot_table.h"

namespace rxtoken {

class RxSocket {
 public:
  // Errors: kInvalidArgument    ring_entries
  //         kResourceExhausted  memory or file descriptors cannot be had
  static Result<std::unique_ptr<RxSocket>> Open(const RxSocketOptions& options,
                                                std::uint32_t workers);
  ~RxSocket();
  RxSocket(const RxSocket&) = delete;
  RxSocket& operator=(const RxSocket&) = delete;

  RxLane& lane(std::uint32_t worker) noexcept { return *lanes_[worker]; }
  SlotTable& slots() noexcept { return slots_; }
  const RxSocketOptions& options() const noexcept { return options_; }
  bool attached() const noexcept { return doorbell_ >= 0; }
  // Has what it may not hold copied into a pool of its own, which outlives it. Before it is used.
  void SetCopyOut(BufferPool& pool) noexcept;
  BufferPool* copy_out() const noexcept { return lanes_.front()->copy_out; }

  // A fresh doorbell and what else an application needs; lanes are not told yet.
  // Errors: kResourceExhausted
  Result<Attachment> Attach();
  int doorbell() const noexcept { return doorbell_; }
  // Ends the doorbell, which wakes the application. Precondition: no lane uses it.
  void Detach() noexcept;

 private:
  RxSocket(const RxSocketOptions& options) : options_(options) {}

  // Shared memory of one size for ever, which only we may map for writing unless
  // `application_writes`.
  struct Shared {
    int fd = -1;
    std::uint8_t* data = nullptr;
    std::size_t bytes = 0;

    Status Create(const std::string& name, std::size_t size);
    Status Seal(bool application_writes) const;
    ~Shared();
  };

  // Of all lanes.
  struct Rings : Holdable {
    Shared descriptors;
    Shared returns;
  };

  RxSocketOptions options_;
  const Held<Rings> rings_{std::make_unique<Rings>()};
  SlotTable slots_;
  std::vector<std::unique_ptr<RxLane>> lanes_;
  int doorbell_ = -1;
};

}  // namespace rxtoken
