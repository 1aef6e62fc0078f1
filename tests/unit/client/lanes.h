// SPDX-License-Identifier: Apache-2.0
// lanes.h - the daemon's side of a rx socket, played by a test: lanes in ordinary memory, a
// buffer, and a doorbell.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/src/receiver.h"
#include "tokens/abi/ring.h"

namespace rxtoken {

// Memory that starts as zeros, aligned for a ring.
class Zeroed {
 public:
  explicit Zeroed(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
    std::memset(data_.get(), 0, bytes);
  }
  std::byte* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

// One lane, as its worker sees it.
class TestLane {
 public:
  explicit TestLane(std::uint32_t entries)
      : entries_(entries),
        descriptor_memory_(DescriptorRingBytes(entries)),
        return_memory_(ReturnRingBytes(entries)),
        descriptors_(new (descriptor_memory_.get()) DescriptorRing{}),
        returns_(new (return_memory_.get()) ReturnRing{}) {
    descriptors_->magic = kAbiMagic;
    descriptors_->abi_major = kAbiMajor;
    descriptors_->entries = entries;
  }

  Receiver::RingPair rings() const { return {descriptors_, returns_}; }

  void Publish(const Descriptor& descriptor) {
    descriptors_->descriptors()[tail_++ & (entries_ - 1)] = descriptor;
    // order: release, as a worker does: pairs with LaneReader::Poll.
    descriptors_->tail.store(tail_, std::memory_order_release);
  }
  void MapSlot(std::uint8_t slot, std::uint32_t binding) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kSlotMapped;
    descriptor.slot = slot;
    descriptor.binding = binding;
    Publish(descriptor);
  }
  void Tell(DescriptorKind kind, std::uint32_t binding) {
    Descriptor descriptor = {};
    descriptor.kind = kind;
    descriptor.binding = binding;
    Publish(descriptor);
  }
  void Unbind(std::uint32_t binding) { Tell(DescriptorKind::kUnbound, binding); }
  void Revoke(std::uint8_t slot, std::uint32_t binding) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kRevoked;
    descriptor.slot = slot;
    descriptor.binding = binding;
    Publish(descriptor);
  }
  void Expire(std::uint8_t slot, std::uint32_t binding, std::uint32_t until) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kExpired;
    descriptor.slot = slot;
    descriptor.binding = binding;
    descriptor.expired_at = until;
    Publish(descriptor);
  }
  void SetTime(std::uint32_t time_high) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kTime;
    descriptor.time_high = time_high;
    Publish(descriptor);
  }
  void Lend(PageToken token, std::uint16_t offset, std::uint16_t length, std::uint8_t flags = 0,
            std::uint8_t ip_header_distance = 0, std::uint32_t time_low = 0) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kFragment;
    descriptor.flags = flags;
    descriptor.ip_header_distance = ip_header_distance;
    descriptor.token = token.wire();
    descriptor.offset = offset;
    descriptor.length = length;
    descriptor.time_low = time_low;
    Publish(descriptor);
  }

  // What the application returned since the last call, as a worker would drain it.
  std::vector<std::uint32_t> TakeReturned() {
    // order: acquire and release as a worker's; pair with LaneReader::Return.
    const std::uint32_t tail = returns_->tail.load(std::memory_order_acquire);
    std::vector<std::uint32_t> tokens;
    for (; return_head_ != tail; return_head_++) {
      tokens.push_back(
          returns_->tokens()[return_head_ & (entries_ - 1)].load(std::memory_order_relaxed));
    }
    descriptors_->return_head.store(return_head_, std::memory_order_release);
    return tokens;
  }
  // Descriptors that the application has not consumed.
  std::uint32_t backlog() const {
    return tail_ - returns_->descriptor_head.load(std::memory_order_acquire);
  }
  bool waited_for() const { return returns_->waiting.load(std::memory_order_seq_cst) != 0; }
  void Close(CloseReason reason) {
    descriptors_->closed.store(static_cast<std::uint32_t>(reason), std::memory_order_release);
  }

 private:
  const std::uint32_t entries_;
  Zeroed descriptor_memory_;
  Zeroed return_memory_;
  DescriptorRing* const descriptors_;
  ReturnRing* const returns_;
  std::uint32_t tail_ = 0;
  std::uint32_t return_head_ = 0;
};

constexpr std::uint32_t kBinding = 7;
constexpr std::uint32_t kPages = 64;

// A receiver, its lanes and the one binding that it can map.
class TestSocket {
 public:
  explicit TestSocket(std::size_t lanes = 1, std::uint32_t entries = kMinRingEntries)
      : memory_(std::size_t{kPages} * kDefaultPageBytes) {
    std::vector<Receiver::RingPair> rings;
    for (std::size_t i = 0; i < lanes; i++) {
      lanes_.push_back(std::make_unique<TestLane>(entries));
      rings.push_back(lanes_.back()->rings());
    }
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    doorbell_.emplace(ends[0]);
    buffer_ = std::make_shared<Buffer>();
    buffer_->data = memory_.get();
    buffer_->pages = kPages;
    buffer_->page_bytes = kDefaultPageBytes;
    receiver_ = new Receiver("test", rings, {}, UniqueFd(ends[1]),
                             [this](std::uint64_t binding) { return Map(binding); });
  }
  ~TestSocket() { Abandon(); }

  TestLane& lane(std::size_t i = 0) { return *lanes_[i]; }
  Receiver& receiver() { return *receiver_; }
  std::byte* page(std::uint32_t page) {
    return memory_.get() + std::size_t{page} * kDefaultPageBytes;
  }
  void Write(std::uint32_t to_page, std::uint16_t offset, std::span<const std::uint8_t> bytes) {
    std::memcpy(page(to_page) + offset, bytes.data(), bytes.size());
  }

  // What Receive() answers at once; fails the test if it is an error.
  std::span<Message> ReceiveNow(std::span<Message> out) {
    auto received = receiver().Receive(out, std::chrono::nanoseconds(0));
    if (!received.ok()) {
      ADD_FAILURE() << received.status().ToString();
      return {};
    }
    return *received;
  }

  void RingDoorbell() { EXPECT_EQ(send(doorbell_->get(), "!", 1, MSG_NOSIGNAL), 1); }
  void CloseDoorbell() { doorbell_.reset(); }
  void Abandon() {
    if (receiver_ != nullptr) std::exchange(receiver_, nullptr)->Abandon();
  }
  void RefuseToMap(Status status) { refusal_ = std::move(status); }
  // The buffer as the slots share it: how many of them do.
  long mappings() const { return buffer_.use_count() - 1; }

 private:
  Result<std::shared_ptr<const Buffer>> Map(std::uint64_t binding) {
    if (!refusal_.ok()) return refusal_;
    if (binding != kBinding) return Status(Code::kNotFound, "no such binding");
    return std::shared_ptr<const Buffer>(buffer_);
  }

  Zeroed memory_;
  std::vector<std::unique_ptr<TestLane>> lanes_;
  std::optional<UniqueFd> doorbell_;
  std::shared_ptr<Buffer> buffer_;
  Status refusal_;
  Receiver* receiver_;
};

inline PageToken Token(std::uint32_t page, std::uint8_t slot = 0) {
  return PageToken(SlotId{slot}, PageIndex{page});
}

}  // namespace rxtoken
