// SPDX-License-Identifier: Apache-2.0
// local_reader.h - reads a rx socket's rings inside the daemon, for Tokens.Receive.
//
// It belongs to the rx socket and outlives the streams that use it one after the other, so
// that each goes on where the one before stopped.
//
// It holds the memory that it reads, of rings and buffers, so that the rx socket and its
// bindings may go at any time.
//
// Thread-safety: any thread. The lock is held while rings or pages are touched, never while
//                a stream waits or writes; so Close(), after which pages are taken back
//                and what they hold changes, waits for one batch to be copied at most. No
//                worker takes it.
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
#include "tokens/abi/token.h"
#include "tokens/held.h"

namespace rxtoken {

class LocalReader {
 public:
  // Of `attachment`, what is for an application inside the daemon.
  explicit LocalReader(const Attachment& attachment);

  struct ReadResult {
    bool closed = false;
    // The next descriptor names a binding of which we have no buffer yet: AddBuffer() it.
    std::optional<std::uint64_t> unknown_binding;
  };
  // Moves messages to the end of `batch` until there are `max_messages`, or about 1 MiB, or
  // no more. Payload is copied. Their tokens are Settle()d once the batch is sent.
  ReadResult Read(v1::ReceiveResponse& batch, int max_messages);
  // The empty view for a binding that is gone: its fragments are shown without payload.
  void AddBuffer(std::uint64_t binding, BufferView buffer);

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
  // Nothing is read after this.
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
  void SetTime(std::uint64_t mono_ns, google::protobuf::Timestamp& time) const;
  static void DropTokens(Lane& lane, SlotId slot);
  static void PushReturns(Lane& lane);

  std::mutex mutex_;
  bool closed_ = false;
  const Held<const Holdable> memory_;  // of the rings
  std::vector<Lane> lanes_;
  std::map<std::uint64_t, BufferView> buffers_;
  std::size_t batch_bytes_ = 0;
  std::int64_t realtime_offset_ns_ = 0;
};

}  // namespace rxtoken
