// SPDX-License-Identifier: Apache-2.0
#include "control/local_reader.h"

#include <arpa/inet.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "tokens/abi/token.h"

namespace rxtoken {
namespace {

// gRPC clients refuse messages above 4 MiB unless told otherwise.
constexpr std::size_t kMaxBatchBytes = 1 << 20;
constexpr std::int64_t kNsPerSecond = 1'000'000'000;

std::int64_t ClockNs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

// From the headers in front of a UDP payload.
void SetSource(const std::uint8_t* payload, unsigned ip_header_distance, v1::Message& message) {
  const std::uint8_t* const ip = payload - ip_header_distance;
  const bool v4 = ip[0] >> 4 == 4;
  char text[INET6_ADDRSTRLEN];
  inet_ntop(v4 ? AF_INET : AF_INET6, ip + (v4 ? 12 : 8), text, sizeof(text));
  message.set_source(text);
  const std::uint8_t* const udp = payload - 8;
  message.set_source_port(static_cast<std::uint32_t>(udp[0]) << 8 | udp[1]);
}

// Empty if the buffer has no such page.
std::span<const std::uint8_t> PageOf(const BufferView& buffer, std::uint32_t page) {
  const std::uint64_t start = std::uint64_t{page} * buffer.page_bytes;
  if (start >= buffer.bytes) return {};
  return {buffer.data + start, buffer.page_bytes};
}

v1::BindingEvent::Kind EventKind(DescriptorKind kind) {
  switch (kind) {
    case DescriptorKind::kUnbound: return v1::BindingEvent::KIND_UNBOUND;
    case DescriptorKind::kRevoked: return v1::BindingEvent::KIND_REVOKED;
    case DescriptorKind::kExpired: return v1::BindingEvent::KIND_EXPIRED;
    case DescriptorKind::kLowWater: return v1::BindingEvent::KIND_LOW_WATER;
    case DescriptorKind::kHeldLimit: return v1::BindingEvent::KIND_HELD_LIMIT;
    default: return v1::BindingEvent::KIND_UNSPECIFIED;
  }
}

// The end of the tick, by CLOCK_MONOTONIC: of those that the 32 bits can mean the last one.
std::uint64_t ExpiredUntilNs(std::uint32_t expired_at) {
  const auto now = static_cast<std::uint64_t>(ClockNs(CLOCK_MONOTONIC));
  const std::uint32_t age = HoldClock(now) - expired_at;
  return (((now >> 16) - age + 1) << 16) - 1;
}

}  // namespace

LocalReader::LocalReader(const Attachment& attachment) : memory_(attachment.memory) {
  lanes_.reserve(attachment.rings.size());
  for (const auto& [descriptors, returns] : attachment.rings) {
    lanes_.emplace_back(descriptors, returns);
  }
}

LocalReader::ReadResult LocalReader::Read(v1::ReceiveResponse& batch, int max_messages) {
  std::lock_guard lock(mutex_);
  ReadResult result{.closed = closed_, .unknown_binding = {}};
  if (closed_) return result;
  batch_bytes_ = 0;
  realtime_offset_ns_ = ClockNs(CLOCK_REALTIME) - ClockNs(CLOCK_MONOTONIC);
  for (Lane& lane : lanes_) PushReturns(lane);
  // A little of each lane in turn, so that a busy one does not keep the others waiting.
  bool progress = true;
  while (progress) {
    progress = false;
    for (Lane& lane : lanes_) progress |= ReadLane(lane, batch, max_messages, result);
  }
  return result;
}

// True if it took something from the lane.
bool LocalReader::ReadLane(Lane& lane, v1::ReceiveResponse& batch, int max_messages,
                           ReadResult& result) {
  std::array<Descriptor, 16> descriptors;
  const std::size_t n = lane.reader.Poll(descriptors);
  std::size_t used = 0;
  for (; used < n; used++) {
    const Descriptor& descriptor = descriptors[used];
    if (descriptor.kind == DescriptorKind::kTime) {
      lane.time_high = descriptor.time_high;
    } else if (descriptor.kind == DescriptorKind::kSlotMapped) {
      if (!buffers_.contains(descriptor.binding)) {
        result.unknown_binding = descriptor.binding;
        break;
      }
      lane.slots[descriptor.slot % kSlotsPerRxSocket] = descriptor.binding;
    } else if (descriptor.kind != DescriptorKind::kFragment) {
      const bool expired = descriptor.kind == DescriptorKind::kExpired;
      // What comes back after that may hit pages that are lent then: so all that was read before
      // goes first.
      if (expired && (!lane.batch_tokens.empty() || !lane.return_tokens.empty())) break;
      if (descriptor.kind == DescriptorKind::kRevoked) DropTokens(lane, SlotId{descriptor.slot});
      v1::BindingEvent& event = *batch.add_events();
      event.set_binding(descriptor.binding);
      event.set_kind(EventKind(descriptor.kind));
      if (!expired) continue;
      event.set_expired_slot(descriptor.slot);
      SetTime(ExpiredUntilNs(descriptor.expired_at), *event.mutable_expired_until());
    } else {
      if (batch.messages_size() >= max_messages || batch_bytes_ >= kMaxBatchBytes) break;
      AddFragment(lane, descriptor);
      if (descriptor.flags & kMoreFragments) continue;
      batch.mutable_messages()->Add(std::move(lane.partial));
      lane.partial.Clear();
      lane.batch_tokens.insert(lane.batch_tokens.end(), lane.partial_tokens.begin(),
                               lane.partial_tokens.end());
      lane.partial_tokens.clear();
    }
  }
  lane.reader.Consume(used);
  return used > 0;
}

void LocalReader::AddFragment(Lane& lane, const Descriptor& descriptor) {
  const auto token = PageToken::FromWire(descriptor.token);
  const std::uint64_t binding = lane.slots[static_cast<std::size_t>(token.slot())];
  std::span<const std::uint8_t> page;
  if (const auto buffer = buffers_.find(binding); buffer != buffers_.end()) {
    page = PageOf(buffer->second, static_cast<std::uint32_t>(token.page()));
  }
  // A page is out of reach if ReturnTokens gave it back before we came to it and its binding
  // is gone since. The fragment is then shown without its payload.
  const bool readable = std::size_t{descriptor.offset} + descriptor.length <= page.size();

  v1::Message& message = lane.partial;
  if (message.fragments_size() == 0) {
    const std::uint64_t arrival_mono_ns = std::uint64_t{lane.time_high} << 32 | descriptor.time_low;
    SetTime(arrival_mono_ns, *message.mutable_arrival());
    message.set_whole_frame((descriptor.flags & kWholeFrame) != 0);
    const unsigned distance = descriptor.ip_header_distance;
    // At least an IPv4 and a UDP header.
    if (readable && distance >= 28 && distance <= descriptor.offset) {
      SetSource(page.data() + descriptor.offset, distance, message);
    }
  }
  if (descriptor.flags & kCopied) message.set_copied(true);

  v1::Fragment& fragment = *message.add_fragments();
  fragment.set_token(descriptor.token);
  fragment.set_offset(descriptor.offset);
  if (readable) fragment.set_payload(page.data() + descriptor.offset, descriptor.length);
  lane.partial_tokens.push_back(descriptor.token);
  batch_bytes_ += descriptor.length;
}

// A time of CLOCK_MONOTONIC by the wall clock.
void LocalReader::SetTime(std::uint64_t mono_ns, google::protobuf::Timestamp& time) const {
  const std::int64_t ns = static_cast<std::int64_t>(mono_ns) + realtime_offset_ns_;
  time.set_seconds(ns / kNsPerSecond);
  time.set_nanos(static_cast<std::int32_t>(ns % kNsPerSecond));
}

// Given back later, they could hit pages of the binding that gets the slot next.
void LocalReader::DropTokens(Lane& lane, SlotId slot) {
  const auto of_slot = [slot](std::uint32_t token) {
    return PageToken::FromWire(token).slot() == slot;
  };
  std::erase_if(lane.batch_tokens, of_slot);
  std::erase_if(lane.return_tokens, of_slot);
}

void LocalReader::AddBuffer(std::uint64_t binding, BufferView buffer) {
  std::lock_guard lock(mutex_);
  buffers_.try_emplace(binding, std::move(buffer));
}

void LocalReader::Settle(bool give_back) {
  std::lock_guard lock(mutex_);
  for (Lane& lane : lanes_) {
    if (give_back) {
      lane.return_tokens.insert(lane.return_tokens.end(), lane.batch_tokens.begin(),
                                lane.batch_tokens.end());
    }
    lane.batch_tokens.clear();
    PushReturns(lane);
  }
}

void LocalReader::PushReturns(Lane& lane) {
  const std::size_t n = lane.reader.Return(lane.return_tokens);
  lane.return_tokens.erase(lane.return_tokens.begin(),
                           lane.return_tokens.begin() + static_cast<std::ptrdiff_t>(n));
}

bool LocalReader::Arm() {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  bool wait = true;
  for (Lane& lane : lanes_) {
    if (lane.reader.Arm()) wait = false;
  }
  return wait;
}

void LocalReader::Disarm() {
  std::lock_guard lock(mutex_);
  for (Lane& lane : lanes_) lane.reader.Disarm();
}

std::vector<std::uint32_t> LocalReader::TakeUnreturned() {
  std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> tokens;
  for (Lane& lane : lanes_) {
    tokens.insert(tokens.end(), lane.return_tokens.begin(), lane.return_tokens.end());
    lane.return_tokens.clear();
  }
  return tokens;
}

void LocalReader::Forget(std::uint64_t binding) {
  std::lock_guard lock(mutex_);
  buffers_.erase(binding);
}

void LocalReader::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  buffers_.clear();
}

}  // namespace rxtoken
