// SPDX-License-Identifier: Apache-2.0
// receiver.h - what a RxSocket and its messages share: the lanes, and the mapped buffers.
//
//   receiving half    one thread at a time       lanes' reader (Poll, Consume, Arm), slots,
//                                                partial messages, events
//   returning half    any thread, under mutex_   lanes' reader (Return), slots' returns, unsent
//                                                tokens, what is held of former slots, the
//                                                count of messages that still point here
//
// A slot names one binding after the other. When it ends to name one, because that was unbound
// or revoked or the slot is mapped anew, its epoch is counted up, and what the application still
// holds of it is looked after apart: its buffer stays mapped until the last of it is given back.
// The same when a lease has ended: then the time of arrival says what of it is void.
//
// A Message holds a plain pointer to its Receiver, and the Receiver lives until its RxSocket
// and the last message are gone. What is counted for that, the receiving thread counts on
// its way out and the returning half on its way in, both once per batch: no atomic and no
// lock per message.
//
// Thread-safety: Receive() one thread at a time; the rest any thread. Abandon() comes last.
// Hot path: Receive, Return. The mutex is taken once for each call, and by each message that
//           is destroyed by itself.
// Allocates: for a message of several fragments; for what the return ring has no room for.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/src/os.h"
#include "rxtoken/message.h"
#include "rxtoken/rxtoken.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/abi/ring.h"
#include "tokens/abi/status.h"

namespace rxtoken {
inline namespace sdk {

// A binding's pages, as this process sees them.
struct Buffer {
  const std::byte* data = nullptr;
  std::uint32_t pages = 0;
  std::uint32_t page_bytes = 0;
  std::optional<MemoryMap> memory = {};  // what `data` points into, if it is ours to unmap
};

class Receiver {
 public:
  using RingPair = std::pair<const DescriptorRing*, ReturnRing*>;
  // Finds the buffer of a binding, when a slot is first used for it.
  using MapBuffer = std::function<Result<std::shared_ptr<const Buffer>>(std::uint64_t binding)>;

  // The rings were checked; one pair for each lane. `memory` is what they lie in.
  Receiver(std::string name, std::span<const RingPair> rings, std::vector<MemoryMap> memory,
           UniqueFd doorbell, MapBuffer map_buffer);

  // These are RxSocket's, see rxtoken.h.
  Result<std::span<Message>> Receive(std::span<Message> out, std::chrono::nanoseconds timeout);
  std::vector<BindingEvent> TakeEvents();
  void Return(std::span<const HeldToken> tokens) noexcept;
  void Return(std::span<Message> messages) noexcept;
  void Flush() noexcept;
  // Fragments that were given back, but not sent because they were void.
  std::uint64_t void_returns();

  // Puts the fragments of one message aside, and sends when there are enough. Deletes this
  // if it was abandoned and that was the last message.
  void PutAside(Message& message) noexcept;

  // The RxSocket is gone: nothing is sent any more. Deletes this with the last message.
  void Abandon() noexcept;

 private:
  // What a slot names now: the receiving half's part of it. The epoch is in both parts; the
  // receiving thread changes it, under mutex_.
  struct Slot {
    std::shared_ptr<const Buffer> buffer;  // null: nothing
    std::uint32_t binding = 0;
    std::uint32_t received = 0;  // fragments
    std::uint16_t epoch = 0;
  };
  // The returning half's part.
  struct SlotReturns {
    std::uint32_t returned = 0;  // fragments
    std::uint16_t epoch = 0;
  };
  // Fragments of a binding that a slot named before.
  struct Former {
    std::shared_ptr<const Buffer> buffer;
    std::uint32_t binding;
    std::uint8_t slot;
    std::uint16_t epoch;
    std::uint32_t held;
    bool revoked;                                     // not to be sent
    std::optional<std::uint32_t> expired_until = {};  // nor what arrived by then, HoldClock()

    bool IsVoid(const HeldToken& token) const noexcept {
      return revoked || (expired_until && !IsAfter(token.arrived, *expired_until));
    }
  };

  struct Lane {
    Lane(const RingPair& rings, std::uint8_t at) : reader(rings.first, rings.second), index(at) {}

    LaneReader reader;
    const std::uint8_t index;
    // -- receiving half
    std::uint64_t time_high = 0;  // upper half of the arrival time, in place
    std::array<Slot, kSlotsPerRxSocket> slots;
    std::vector<Fragment> partial;  // of the message whose end was not published yet
    Descriptor partial_first;       // its first descriptor
    // -- returning half
    std::array<SlotReturns, kSlotsPerRxSocket> returns;
    std::vector<Former> former;
    std::vector<std::uint32_t> unsent;  // tokens; the first `sent` of them are sent already
    std::size_t sent = 0;
  };

  class Lot;

  ~Receiver() = default;

  // What is there now; 0 and a status that is not OK if that is an error.
  std::size_t Poll(std::span<Message> out, Status& status);
  std::size_t PollLane(Lane& lane, std::span<Message> out, Status& status);
  // False if the descriptor points outside the slot's buffer.
  static bool Locate(Lane& lane, const Descriptor& descriptor, Fragment& fragment) noexcept;
  // All of a message but its fragments; `first` is that of its first fragment.
  void Begin(Message& message, const Lane& lane, const Descriptor& first) noexcept;
  // Whatever is not a message of one fragment. True if it completes `message`.
  bool TakeRare(Lane& lane, const Descriptor& descriptor, Message& message, Status& status);
  bool TakeFragment(Lane& lane, const Descriptor& descriptor, Message& message, Status& status);
  void FinishPartial(Lane& lane, Message& message);
  void DropPartial(Lane& lane);
  Status MapSlot(Lane& lane, const Descriptor& descriptor);
  void Revoke(Lane& lane, const Descriptor& descriptor);
  // False: what is to be sent has no room yet, and the descriptor must wait.
  bool Expire(Lane& lane, const Descriptor& descriptor);
  void EndSlots(Lane& lane, std::uint32_t binding);
  void Tell(BindingEvent::Kind kind, std::uint32_t binding);
  // Sleeps until the doorbell rings or `deadline`. False if a signal was handled.
  bool Sleep(std::chrono::steady_clock::time_point deadline);
  // Empties the doorbell; at its end of file, sets ended_.
  void DrainDoorbell();

  // All fragments of a message came over the same lane.
  Lane& LaneOf(const Message& message) noexcept { return lanes_[message.first_.token_.lane]; }

  // Under mutex_:
  static void EndSlot(Lane& lane, std::uint8_t slot);
  // One fragment less of a former binding. True if it has to be sent.
  bool TakeFormer(Lane& lane, const HeldToken& token) noexcept;
  void Send(Lane& lane) noexcept;
  bool SendAll() noexcept;  // false if something found no room

  const std::string name_;
  const std::vector<MemoryMap> memory_;
  std::vector<Lane> lanes_;
  UniqueFd doorbell_;
  const MapBuffer map_buffer_;

  // -- receiving half
  std::size_t first_lane_ = 0;   // where the next poll starts, so that no lane starves
  std::uint64_t delivered_ = 0;  // messages
  std::uint32_t empty_polls_ = 0;
  std::vector<BindingEvent> events_;  // that were not taken yet
  // Of bindings that ended last, whether kUnbound and kRevoked were told.
  std::map<std::uint32_t, std::array<bool, 2>> told_;
  Status ended_;  // not OK once there is nothing more to receive

  // -- returning half
  alignas(64) std::mutex mutex_;
  std::uint64_t forgotten_ = 0;  // messages that no longer point here
  std::uint64_t void_returns_ = 0;
  bool sleeping_ = false;  // the receiving thread cannot send what is put aside
  bool abandoned_ = false;
};

}  // namespace sdk
}  // namespace rxtoken
