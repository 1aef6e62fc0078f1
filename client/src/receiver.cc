// SPDX-License-Identifier: Apache-2.0
#include "client/src/receiver.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace rxtoken {
inline namespace sdk {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// Descriptors that are copied out of the ring at a time, and tokens that are put aside before
// they are sent: both as many as the workers publish and take back in a lot.
constexpr std::size_t kLot = 64;
// A worker publishes in lots of some microseconds. An application that is faster than the
// traffic would else sleep, and cost the worker a doorbell, after each of them.
constexpr nanoseconds kSpin{20'000};
// While the return ring is full nobody wakes us when it has room again.
constexpr nanoseconds kRetry{1'000'000};
constexpr std::uint32_t kPollsPerCheck = 65536;

// In a slot whose binding went before we could map it: what was lent of it was revoked.
const std::shared_ptr<const Buffer> kGone = std::make_shared<Buffer>();

// Epochs of one receiver are not those of the next, so that a token which an application has kept
// from before a daemon's restart is not sent to the new one. Both are as good as a number of 16
// bits.
std::uint16_t FirstEpoch() noexcept {
  static std::atomic<std::uint16_t> next = 0;
  // order: relaxed; only the number counts.
  return next.fetch_add(257, std::memory_order_relaxed);
}

void Pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Receiver::Receiver(std::string name, std::span<const RingPair> rings, std::vector<MemoryMap> memory,
                   UniqueFd doorbell, MapBuffer map_buffer)
    : name_(std::move(name)),
      memory_(std::move(memory)),
      doorbell_(std::move(doorbell)),
      map_buffer_(std::move(map_buffer)) {
  lanes_.reserve(rings.size());
  const std::uint16_t epoch = FirstEpoch();
  for (const RingPair& pair : rings) {
    Lane& lane = lanes_.emplace_back(pair, static_cast<std::uint8_t>(lanes_.size()));
    lane.unsent.reserve(2 * kLot);
    for (Slot& slot : lane.slots) slot.epoch = epoch;
    for (SlotReturns& slot : lane.returns) slot.epoch = epoch;
  }
}

Result<std::span<Message>> Receiver::Receive(std::span<Message> out, nanoseconds timeout) {
  if (out.empty()) {
    return Status(Code::kInvalidArgument,
                  "rx socket '" + name_ + "': `out` is empty; give room for one message or more");
  }
  Return(out);
  Status status;
  const std::size_t events_before = events_.size();
  std::size_t n = Poll(out, status);
  if (n > 0 || events_.size() > events_before) return out.first(n);
  if (!status.ok()) return status;
  if (timeout <= nanoseconds::zero()) {
    if (++empty_polls_ % kPollsPerCheck == 0) DrainDoorbell();
    return out.first(0);
  }

  const auto start = steady_clock::now();
  const auto deadline = timeout < steady_clock::time_point::max() - start
                            ? start + timeout
                            : steady_clock::time_point::max();
  const auto spin_until = std::min(start + kSpin, deadline);
  for (;;) {
    n = Poll(out, status);
    if (n > 0 || events_.size() > events_before) return out.first(n);
    if (!status.ok()) return status;
    const auto now = steady_clock::now();
    if (now < spin_until) {
      Pause();
    } else if (now >= deadline || !Sleep(deadline)) {
      return out.first(0);
    }
  }
}

std::size_t Receiver::Poll(std::span<Message> out, Status& status) {
  if (!ended_.ok()) {
    status = ended_;
    return 0;
  }
  std::size_t n = 0;
  for (std::size_t i = 0; i < lanes_.size() && n < out.size() && status.ok(); i++) {
    Lane& lane = lanes_[(first_lane_ + i) % lanes_.size()];
    if (lane.reader.closed()) {
      status = ended_ = Status(Code::kUnavailable, "rx socket '" + name_ +
                                                       "' was closed, by its owner or because "
                                                       "the daemon stopped: open another");
    } else {
      n += PollLane(lane, out.subspan(n), status);
    }
  }
  first_lane_ = (first_lane_ + 1) % lanes_.size();
  delivered_ += n;
  return n;
}

std::size_t Receiver::PollLane(Lane& lane, std::span<Message> out, Status& status) {
  std::array<Descriptor, kLot> descriptors;
  Message* next = out.data();
  Message* const end = next + out.size();
  while (next != end) {
    // A descriptor completes one message at most, so all of these find room.
    const std::size_t got =
        lane.reader.Poll(std::span(descriptors).first(std::min<std::size_t>(kLot, end - next)));
    std::size_t used = 0;
    for (; used < got; used++) {
      const Descriptor& descriptor = descriptors[used];
      const bool whole = descriptor.kind == DescriptorKind::kFragment &&
                         (descriptor.flags & kMoreFragments) == 0 && lane.partial.empty();
      if (whole && Locate(lane, descriptor, next->first_)) [[likely]] {
        Begin(*next++, lane, descriptor);
      } else if (descriptor.kind == DescriptorKind::kExpired && !Expire(lane, descriptor)) {
        break;
      } else {
        if (TakeRare(lane, descriptor, *next, status)) next++;
        if (!status.ok()) break;
      }
    }
    if (used > 0) lane.reader.Consume(used);
    if (got == 0 || used < got) break;
  }
  return next - out.data();
}

bool Receiver::Locate(Lane& lane, const Descriptor& descriptor, Fragment& fragment) noexcept {
  const PageToken token = PageToken::FromWire(descriptor.token);
  Slot& slot = lane.slots[static_cast<std::size_t>(token.slot())];
  const Buffer* buffer = slot.buffer.get();
  const auto page = static_cast<std::uint32_t>(token.page());
  if (buffer == nullptr || page >= buffer->pages ||
      std::uint32_t{descriptor.offset} + descriptor.length > buffer->page_bytes) [[unlikely]] {
    return false;
  }
  fragment.data_ = buffer->data + std::size_t{page} * buffer->page_bytes + descriptor.offset;
  fragment.token_.token = token;
  fragment.token_.lane = lane.index;
  fragment.token_.epoch = slot.epoch;
  fragment.token_.arrived = HoldClock(lane.time_high | descriptor.time_low);
  fragment.offset_ = descriptor.offset;
  fragment.length_ = descriptor.length;
  slot.received++;
  return true;
}

void Receiver::Begin(Message& message, const Lane& lane, const Descriptor& first) noexcept {
  message.owner_ = this;
  message.count_ = 1;
  message.size_ = first.length;
  message.arrival_mono_ns_ = lane.time_high | first.time_low;
  message.flags_ = first.flags;
  message.ip_header_distance_ = first.ip_header_distance;
}

// Not inlined: it would cost the common case its registers.
[[gnu::noinline]] bool Receiver::TakeRare(Lane& lane, const Descriptor& descriptor,
                                          Message& message, Status& status) {
  switch (descriptor.kind) {
    case DescriptorKind::kFragment: return TakeFragment(lane, descriptor, message, status);
    case DescriptorKind::kSlotMapped: status = MapSlot(lane, descriptor); return false;
    case DescriptorKind::kTime:
      lane.time_high = std::uint64_t{descriptor.time_high} << 32;
      return false;
    case DescriptorKind::kUnbound:
      EndSlots(lane, descriptor.binding);
      Tell(BindingEvent::Kind::kUnbound, descriptor.binding);
      return false;
    case DescriptorKind::kRevoked:
      Revoke(lane, descriptor);
      Tell(BindingEvent::Kind::kRevoked, descriptor.binding);
      return false;
    case DescriptorKind::kExpired:  // see Expire()
      Tell(BindingEvent::Kind::kExpired, descriptor.binding);
      return false;
    case DescriptorKind::kLowWater:
      Tell(BindingEvent::Kind::kLowWater, descriptor.binding);
      return false;
    case DescriptorKind::kHeldLimit: Tell(BindingEvent::Kind::kHeldLimit, 0); return false;
  }
  return false;  // news from a later minor version, which may be ignored
}

bool Receiver::TakeFragment(Lane& lane, const Descriptor& descriptor, Message& message,
                            Status& status) {
  Fragment fragment;
  if (!Locate(lane, descriptor, fragment)) {
    const auto slot = static_cast<std::size_t>(PageToken::FromWire(descriptor.token).slot());
    if (lane.slots[slot].buffer != kGone) {
      status = ended_ =
          Status(Code::kInternal, "rx socket '" + name_ + "': the daemon lent token " +
                                      std::to_string(descriptor.token) +
                                      ", which is outside its buffer: open another rx socket");
      return false;
    }
  }
  if (lane.partial.empty()) lane.partial_first = descriptor;
  lane.partial.push_back(fragment);
  if ((descriptor.flags & kMoreFragments) != 0) return false;
  const bool whole = std::all_of(lane.partial.begin(), lane.partial.end(),
                                 [](const Fragment& part) { return part.data_ != nullptr; });
  if (whole) {
    FinishPartial(lane, message);
  } else {
    DropPartial(lane);
  }
  return whole;
}

// Part of the message is gone; what is left of it goes back.
void Receiver::DropPartial(Lane& lane) {
  for (const Fragment& fragment : lane.partial) {
    if (fragment.data_ != nullptr) Return(std::span(&fragment.token_, 1));
  }
  lane.partial.clear();
}

void Receiver::FinishPartial(Lane& lane, Message& message) {
  Begin(message, lane, lane.partial_first);
  message.first_ = lane.partial.front();
  message.count_ = static_cast<std::uint32_t>(lane.partial.size());
  message.more_ = std::make_unique<Fragment[]>(lane.partial.size());
  std::copy(lane.partial.begin(), lane.partial.end(), message.more_.get());
  message.size_ = 0;
  for (const Fragment& fragment : lane.partial) message.size_ += fragment.length_;
  lane.partial.clear();
}

Status Receiver::MapSlot(Lane& lane, const Descriptor& descriptor) {
  if (descriptor.slot >= kSlotsPerRxSocket) {
    return ended_ = Status(Code::kInternal, "rx socket '" + name_ + "': the daemon named slot " +
                                                std::to_string(descriptor.slot) +
                                                " of 32: open another rx socket");
  }
  auto buffer = map_buffer_(descriptor.binding);
  if (buffer.status().code() == Code::kNotFound) buffer = kGone;
  if (!buffer.ok()) return buffer.status();
  std::lock_guard lock(mutex_);
  EndSlot(lane, descriptor.slot);
  lane.slots[descriptor.slot].buffer = std::move(*buffer);
  lane.slots[descriptor.slot].binding = descriptor.binding;
  return Status();
}

// The slots of a lane that name `binding`, one at most, name nothing from now on.
void Receiver::EndSlots(Lane& lane, std::uint32_t binding) {
  std::lock_guard lock(mutex_);
  for (std::uint8_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
    if (lane.slots[slot].binding == binding) EndSlot(lane, slot);
  }
}

void Receiver::EndSlot(Lane& lane, std::uint8_t at) {
  Slot& slot = lane.slots[at];
  SlotReturns& returns = lane.returns[at];
  const std::uint32_t held = slot.received - returns.returned;
  if (held > 0) {
    lane.former.push_back({std::move(slot.buffer), slot.binding, at, slot.epoch, held, false});
  }
  returns = {0, static_cast<std::uint16_t>(slot.epoch + 1)};
  slot = {.buffer = nullptr, .binding = 0, .received = 0, .epoch = returns.epoch};
}

// The tokens of the binding are void, wherever they are on their way. When our place in the
// ring moves past this, none of them is sent any more, and those that were sent lie in the
// return ring: so the daemon knows when it can give the slot to another binding.
void Receiver::Revoke(Lane& lane, const Descriptor& descriptor) {
  EndSlots(lane, descriptor.binding);
  std::lock_guard lock(mutex_);
  for (Former& former : lane.former) {
    if (former.binding == descriptor.binding) former.revoked = true;
  }
  const auto first_unsent = lane.unsent.begin() + static_cast<std::ptrdiff_t>(lane.sent);
  lane.unsent.erase(std::remove_if(first_unsent, lane.unsent.end(),
                                   [&](std::uint32_t token) {
                                     return PageToken::FromWire(token).slot() ==
                                            SlotId{descriptor.slot};
                                   }),
                    lane.unsent.end());
}

// What is void must not lie in the return ring later than our place in the descriptor ring says
// that we know it. So all that waits to be sent goes first, void or not: until then the daemon
// refuses the void ones.
bool Receiver::Expire(Lane& lane, const Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  if (!lane.unsent.empty()) Send(lane);
  if (!lane.unsent.empty()) return false;
  const std::uint8_t slot = descriptor.slot % kSlotsPerRxSocket;
  if (lane.slots[slot].binding == descriptor.binding) EndSlot(lane, slot);
  for (Former& former : lane.former) {
    if (former.slot != slot || former.binding != descriptor.binding) continue;
    former.expired_until = descriptor.expired_at;
  }
  return true;
}

bool Receiver::Sleep(steady_clock::time_point deadline) {
  bool all_sent;
  {
    std::lock_guard lock(mutex_);
    all_sent = SendAll();
    sleeping_ = true;
  }
  bool ready = false;
  for (Lane& lane : lanes_) ready |= lane.reader.Arm();
  int woken = 0;
  if (!ready) {
    nanoseconds left = std::max<nanoseconds>(deadline - steady_clock::now(), nanoseconds::zero());
    if (!all_sent) left = std::min(left, kRetry);
    const timespec wait = {static_cast<time_t>(left.count() / 1'000'000'000),
                           static_cast<long>(left.count() % 1'000'000'000)};
    pollfd doorbell = {doorbell_.get(), POLLIN, 0};
    woken = ppoll(&doorbell, 1, &wait, nullptr);
  }
  for (Lane& lane : lanes_) lane.reader.Disarm();
  {
    std::lock_guard lock(mutex_);
    sleeping_ = false;
  }
  if (woken > 0) DrainDoorbell();
  return woken >= 0;
}

void Receiver::DrainDoorbell() {
  std::array<char, 64> rings;
  ssize_t n;
  do {
    n = recv(doorbell_.get(), rings.data(), rings.size(), MSG_DONTWAIT);
  } while (n == static_cast<ssize_t>(rings.size()));
  const bool nothing_there = n < 0 && (errno == EAGAIN || errno == EINTR);
  if (n > 0 || nothing_there) return;
  ended_ = Status(Code::kUnavailable,
                  "rx socket '" + name_ + "' has ended, or the daemon is gone: connect again");
}

// Tokens on their way to their lanes: many at a time, because one by one each would have to
// wait for the one before it.
class Receiver::Lot {
 public:
  explicit Lot(Receiver& receiver) noexcept : receiver_(receiver) {}
  ~Lot() { Empty(); }
  void Add(Lane& lane, const HeldToken& held) noexcept {
    SlotReturns& slot = lane.returns[static_cast<std::size_t>(held.token.slot())];
    if (slot.epoch == held.epoch) [[likely]] {
      slot.returned++;
    } else if (!receiver_.TakeFormer(lane, held)) {
      return;
    }
    if (&lane != lane_ || n_ == tokens_.size()) {
      Empty();
      lane_ = &lane;
      n_ = 0;
    }
    tokens_[n_++] = held.token.wire();
  }
  // All of a message. It no longer counts.
  void Add(Lane& lane, Message& message) noexcept {
    if (message.count_ == 1) [[likely]] {
      Add(lane, message.first_.token_);
    } else {
      for (const Fragment& fragment : message.fragments()) Add(lane, fragment.token_);
      message.more_.reset();
    }
    message.owner_ = nullptr;
    message.count_ = 0;
  }

 private:
  void Empty() const noexcept {
    if (lane_) lane_->unsent.insert(lane_->unsent.end(), tokens_.begin(), tokens_.begin() + n_);
  }

  Receiver& receiver_;
  Lane* lane_ = nullptr;
  std::size_t n_ = 0;
  std::array<std::uint32_t, kLot> tokens_;
};

std::vector<BindingEvent> Receiver::TakeEvents() { return std::exchange(events_, {}); }

std::uint64_t Receiver::void_returns() {
  std::lock_guard lock(mutex_);
  return void_returns_;
}

// Each lane says it; the application hears it once. A binding ends once: ids only grow, and all
// lanes say it at much the same time, so the oldest can be forgotten.
void Receiver::Tell(BindingEvent::Kind kind, std::uint32_t binding) {
  constexpr std::size_t kRemembered = 256;
  const BindingEvent event = {kind, BindingId{binding}};
  bool told = false;
  const bool revoked = kind == BindingEvent::Kind::kRevoked;
  if (revoked || kind == BindingEvent::Kind::kUnbound) {
    told = std::exchange(told_[binding][revoked], true);
    if (told_.size() > kRemembered) told_.erase(told_.begin());
  } else {
    told = std::find(events_.begin(), events_.end(), event) != events_.end();
  }
  if (!told) events_.push_back(event);
}

bool Receiver::TakeFormer(Lane& lane, const HeldToken& token) noexcept {
  const auto former = std::find_if(lane.former.begin(), lane.former.end(), [&](const Former& it) {
    return it.epoch == token.epoch && SlotId{it.slot} == token.token.slot();
  });
  if (former == lane.former.end()) return false;  // given back before
  const bool is_void = former->IsVoid(token);
  void_returns_ += is_void;
  if (--former->held == 0) lane.former.erase(former);
  return !is_void;
}

void Receiver::Return(std::span<const HeldToken> tokens) noexcept {
  std::lock_guard lock(mutex_);
  {
    Lot lot(*this);
    for (const HeldToken& held : tokens) {
      if (held.lane < lanes_.size()) lot.Add(lanes_[held.lane], held);
    }
  }
  SendAll();
}

void Receiver::Return(std::span<Message> messages) noexcept {
  bool others = false;
  {
    std::lock_guard lock(mutex_);
    {
      Lot lot(*this);
      for (Message& message : messages) {
        if (message.owner_ == this) {
          lot.Add(LaneOf(message), message);
          forgotten_++;
        } else {
          others |= message.owner_ != nullptr;
        }
      }
    }
    SendAll();
  }
  if (!others) return;
  for (Message& message : messages) message.Return();
}

void Receiver::Flush() noexcept {
  std::lock_guard lock(mutex_);
  SendAll();
}

void Receiver::PutAside(Message& message) noexcept {
  bool last;
  {
    std::lock_guard lock(mutex_);
    Lane& lane = LaneOf(message);
    Lot(*this).Add(lane, message);
    forgotten_++;
    if (sleeping_ || lane.unsent.size() - lane.sent >= kLot) Send(lane);
    last = abandoned_ && forgotten_ == delivered_;
  }
  if (last) delete this;
}

void Receiver::Abandon() noexcept {
  bool last;
  {
    std::lock_guard lock(mutex_);
    abandoned_ = true;
    doorbell_ = UniqueFd();
    last = forgotten_ == delivered_;
  }
  if (last) delete this;
}

void Receiver::Send(Lane& lane) noexcept {
  lane.sent += lane.reader.Return(std::span(lane.unsent).subspan(lane.sent));
  // Moves what is left to the front only when that is less than what goes, so that a token is
  // moved once or so, however long the return ring stays full.
  if (lane.sent >= lane.unsent.size() - lane.sent) {
    lane.unsent.erase(lane.unsent.begin(),
                      lane.unsent.begin() + static_cast<std::ptrdiff_t>(lane.sent));
    lane.sent = 0;
  }
}

bool Receiver::SendAll() noexcept {
  bool all = true;
  for (Lane& lane : lanes_) {
    if (!lane.unsent.empty()) Send(lane);
    all &= lane.unsent.empty();
  }
  return all;
}

}  // namespace sdk
}  // namespace rxtoken
