// SPDX-License-Identifier: Apache-2.0
// local_reader.h - reads a rx socket's rings inside the daemon, for Tokens.Receive.
//
// It belongs to the rx socket and outlives the streams that use it one after the other, so
// that each goes on where the one before stopped.
//
// Thread-safety: any thread. The lock is held while rings or pages are touched, never while
//                a stream waits or writes; so Close(), after which the rings may be
//                freed, waits for one batch to be copied at most. No worker takes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "dataplane/dataplane.h"
#include "rxtoken/v1/token.pb.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/abi/limits.h"

namespace rxtoken {

// A read-only mapping of our own of a binding's buffer: it stays readable when the binding
// is freed behind our back, as it does for an application.
class BufferMapping {
 public:
  BufferMapping() = default;  // a buffer that is gone: nothing can be read from it
  // The empty mapping if there is no room for it.
  explicit BufferMapping(const BufferView& view);
  BufferMapping(BufferMapping&& other) noexcept;
  BufferMapping& operator=(BufferMapping&&) = delete;
  ~BufferMapping();

  // From `offset` in the page to the page's end; empty if there is no such place.
  std::span<const std::uint8_t> Page(std::uint32_t page) const noexcept;

 private:
  const std::uint8_t* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint32_t page_bytes_ = 0;
};

class LocalReader {
 public:
  // `rings` as in Attachment; they stay valid until Close().
  explicit LocalReader(std::span<const std::pair<const DescriptorRing*, ReturnRing*>> rings);

  struct ReadResult {
    bool closed = false;
    // The next descriptor names a binding of which we have no buffer yet: AddBuffer() it.
    std::optional<std::uint64_t> unknown_binding;
  };
  // Moves messages to the end of `batch` until there are `max_messages`, or about 1 MiB, or
  // no more. Payload is copied. Their tokens are Settle()d once the batch is sent.
  ReadResult Read(v1::ReceiveResponse& batch, int max_messages);
  void AddBuffer(std::uint64_t binding, BufferMapping buffer);

  // Ends the batch that Read() gave out: gives its tokens back, or leaves them held.
  void Settle(bool give_back);

  // Asks for a doorbell. False: do not wait, there is something to read.
  bool Arm();
  void Disarm();

  // Tokens that are to be given back but found the return ring full; they are the caller's
  // from now on.
  std::vector<std::uint32_t> TakeUnreturned();

  // The binding's buffer is not needed any more.
  void Forget(std::uint64_t binding);
  // Nothing is read or written after this.
  void Close();

 private:
  struct Lane {
    Lane(const DescriptorRing* descriptors, ReturnRing* returns) : reader(descriptors, returns) {}

    LaneReader reader;
    std::uint32_t time_high = 0;
    std::array<std::uint64_t, kSlotsPerRxSocket> slots = {};  // binding of each
    v1::Message partial;                                      // fragments of a message that goes on
    std::vector<std::uint32_t> partial_tokens;
    std::vector<std::uint32_t> batch_tokens;   // of messages that Read() gave out
    std::vector<std::uint32_t> return_tokens;  // to give back
  };

  bool ReadLane(Lane& lane, v1::ReceiveResponse& batch, int max_messages, ReadResult& result);
  void AddFragment(Lane& lane, const Descriptor& descriptor);
  static void PushReturns(Lane& lane);

  std::mutex mutex_;
  bool closed_ = false;
  std::vector<Lane> lanes_;
  std::map<std::uint64_t, BufferMapping> buffers_;
  std::size_t batch_bytes_ = 0;
  std::int64_t realtime_offset_ns_ = 0;
};

}  // namespace rxtoken
