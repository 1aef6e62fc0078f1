// SPDX-License-Identifier: Apache-2.0
// fake_dataplane.h - a dataplane without packets: it remembers what it was told, and has real
// rings and buffers into which a test puts what a worker would.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/unique_fd.h"
#include "dataplane/dataplane.h"
#include "tokens/abi/token.h"

namespace rxtoken {

class FakeDataplane : public Dataplane {
 public:
  // The one that rules are steered to in hardware.
  static constexpr std::uint32_t kHardwareQueue = 3;

  struct Memory : Holdable {
    explicit Memory(std::size_t size) : fd(memfd_create("fake", MFD_CLOEXEC)), bytes(size) {
      EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(size)), 0);
      data = static_cast<std::uint8_t*>(
          mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
    }
    ~Memory() override { munmap(data, bytes); }
    UniqueFd fd;
    std::size_t bytes;
    std::uint8_t* data;
  };
  struct Buffer {
    BindingOptions options;
    Held<Memory> memory;
    std::uint8_t* data = nullptr;
    bool draining = false;
  };
  struct Socket {
    RxSocketOptions options;
    bool attached = false;
    UniqueFd doorbell;  // the worker's end
    Held<Memory> memory;
    DescriptorRing* descriptors = nullptr;
    ReturnRing* returns = nullptr;
  };

  Result<std::uint32_t> OpenPort(const PortOptions& options) override {
    ports_.push_back(options);
    return static_cast<std::uint32_t>(ports_.size() - 1);
  }
  std::size_t ports() const override { return ports_.size(); }
  PortInfo GetPort(std::uint32_t port) override {
    PortInfo info;
    info.device = ports_[port].device;
    info.queues.resize(ports_[port].queues);
    if (!ports_[port].exception_tap.empty()) {
      info.exception_path = ExceptionPathInfo{ports_[port].exception_tap, 1, 2, 3, 4};
    }
    return info;
  }

  std::vector<WorkerInfo> GetWorkers() override {
    return {{.cpu = 2, .reassembly = {.fragments = 5, .overlap = 1, .pages = 3}}};
  }
  Result<BindingDraft> BeginBind(const BindingOptions& options) override {
    return BindingDraft{.id = next_id_++, .options = options, .memory = nullptr};
  }
  Status Allocate(BindingDraft&) override { return Status(); }
  Status EndBind(BindingDraft& draft) override {
    Buffer& buffer = buffers[draft.id];
    buffer.options = draft.options;
    buffer.memory = Held(std::make_unique<Memory>(draft.options.buffer_bytes));
    buffer.data = buffer.memory->data;
    return Status();
  }
  Status AttachQueues(std::uint64_t binding, std::span<const QueueRef> queues) override {
    for (auto& [id, buffer] : buffers) {
      std::erase_if(buffer.options.queues, [&](const QueueRef& queue) {
        return std::find(queues.begin(), queues.end(), queue) != queues.end();
      });
    }
    std::vector<QueueRef>& own = buffers.at(binding).options.queues;
    own.insert(own.end(), queues.begin(), queues.end());
    return Status();
  }
  Result<std::uint64_t> Revoke(std::uint64_t binding) override {
    calls.push_back("Revoke " + buffers.at(binding).options.name);
    return 9;
  }
  Status Unbind(std::uint64_t binding) override {
    buffers.at(binding).draining = true;
    calls.push_back("Unbind " + buffers.at(binding).options.name);
    return Status();
  }
  std::vector<std::uint64_t> ReapBindings() override {
    std::vector<std::uint64_t> gone;
    for (const auto& [id, buffer] : buffers) {
      if (buffer.draining && drained.contains(id)) gone.push_back(id);
    }
    for (const std::uint64_t id : gone) buffers.erase(id);
    return gone;
  }
  Result<BindingInfo> GetBinding(std::uint64_t binding) override {
    BindingInfo info;
    info.id = binding;
    info.draining = buffers.at(binding).draining;
    info.buffer_bytes = buffers.at(binding).options.buffer_bytes;
    info.page_bytes = buffers.at(binding).options.page_bytes;
    if (!info.draining) info.queues = buffers.at(binding).options.queues;
    info.frames_per_page = buffers.at(binding).options.frames_per_page;
    info.pages = static_cast<std::uint32_t>(info.buffer_bytes / info.page_bytes);
    info.saturated_pages = 11;
    return info;
  }
  Result<BufferView> GetBuffer(std::uint64_t binding) override {
    const auto found = buffers.find(binding);
    if (found == buffers.end()) return Status(Code::kNotFound, "no such binding");
    const Buffer& buffer = found->second;
    return BufferView{buffer.memory->fd.get(), buffer.data, buffer.options.buffer_bytes,
                      buffer.options.page_bytes, buffer.memory};
  }

  Result<std::uint64_t> OpenRxSocket(const RxSocketOptions& options) override {
    const std::uint64_t id = next_id_++;
    Socket& socket = sockets[id];
    socket.options = options;
    const std::size_t ring_bytes = DescriptorRingBytes(options.ring_entries);
    socket.memory = Held(std::make_unique<Memory>(ring_bytes * 2));
    socket.descriptors = reinterpret_cast<DescriptorRing*>(socket.memory->data);
    socket.descriptors->entries = options.ring_entries;
    socket.returns = reinterpret_cast<ReturnRing*>(socket.memory->data + ring_bytes);
    return id;
  }
  Result<Attachment> Attach(std::uint64_t rx_socket) override {
    Socket& socket = sockets.at(rx_socket);
    if (socket.attached) return Status(Code::kFailedPrecondition, "attached already");
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    socket.attached = true;
    socket.doorbell = UniqueFd(ends[0]);
    return Attachment{socket.memory->fd.get(),
                      socket.memory->fd.get(),
                      ends[1],
                      1,
                      socket.options.ring_entries,
                      {{socket.descriptors, socket.returns}},
                      socket.memory};
  }
  Status Detach(std::uint64_t rx_socket) override {
    sockets.at(rx_socket).attached = false;
    return Status();
  }
  Result<std::uint64_t> CloseRxSocket(std::uint64_t rx_socket) override {
    for (const FlowRule& rule : rules) {
      EXPECT_EQ(std::count(rule.rx_sockets.begin(), rule.rx_sockets.end(), rx_socket), 0);
    }
    calls.push_back("CloseRxSocket " + sockets.at(rx_socket).options.name);
    sockets.erase(rx_socket);
    return 7;
  }
  void TrimMemory() override {}
  Result<RxSocketInfo> GetRxSocket(std::uint64_t, bool audit) override {
    RxSocketInfo info;
    if (audit) info.audited_outstanding = 3;
    info.waiting = 4;
    info.revoked = 5;
    info.hold_times[2] = 6;
    info.hold_times[kHoldBuckets - 1] = 1;
    return info;
  }
  Result<HeldInfo> GetHeld(std::uint64_t) override { return held; }
  Result<std::uint64_t> Expire(std::uint64_t rx_socket) override {
    calls.push_back("Expire " + sockets.at(rx_socket).options.name);
    return 8;
  }

  void ChangeRules(std::span<const std::uint64_t> gone, std::span<const FlowRule> set) override {
    for (const std::uint64_t id : gone) {
      EXPECT_EQ(std::erase_if(rules, [&](const FlowRule& rule) { return rule.id == id; }), 1u);
      calls.push_back("rule " + std::to_string(id) + " gone");
    }
    for (const FlowRule& rule : set) {
      const auto old = std::find_if(rules.begin(), rules.end(),
                                    [&](const FlowRule& other) { return other.id == rule.id; });
      if (old == rules.end()) {
        rules.push_back(rule);
      } else {
        *old = rule;
        calls.push_back("rule " + std::to_string(rule.id) + " changed");
      }
    }
  }
  RuleInfo GetRule(std::uint64_t id) override {
    for (RuleInfo& info : GetRules()) {
      if (info.id == id) return info;
    }
    ADD_FAILURE() << "no rule " << id;
    return RuleInfo();
  }
  // Newest first, so that a test can tell this order from that of the ids.
  std::vector<RuleInfo> GetRules() override {
    std::vector<RuleInfo> list;
    for (auto rule = rules.rbegin(); rule != rules.rend(); ++rule) {
      RuleInfo info;
      info.id = rule->id;
      info.packets = rule->id * 10;
      info.bytes = rule->id * 100;
      info.drops = rule->id * 1000;
      info.copied = rule->id * 10000;
      if (rule->steer_to) info.in_hardware = rule->steer_to->queue == kHardwareQueue;
      if (rule->steer_to && !info.in_hardware) info.placement_reason = "not that queue";
      list.push_back(std::move(info));
    }
    return list;
  }
  Result<std::vector<RangeResult>> ReturnTokens(std::uint64_t, std::span<const TokenRange> ranges,
                                                bool all_or_nothing) override {
    std::vector<RangeResult> results;
    returned_all_or_nothing = all_or_nothing;
    for (const TokenRange& range : ranges) {
      returned.push_back({range.first_token, range.count});
      results.push_back({.released = range.count, .refusals = {}});
    }
    return results;
  }

  // -- what a worker would do ---------------------------------------------------------------
  void Publish(std::uint64_t rx_socket, const Descriptor& descriptor) {
    DescriptorRing& ring = *sockets.at(rx_socket).descriptors;
    const std::uint32_t tail = ring.tail.load();
    ring.descriptors()[tail & (ring.entries - 1)] = descriptor;
    ring.tail.store(tail + 1);
  }
  void MapSlot(std::uint64_t rx_socket, std::uint8_t slot, std::uint64_t binding) {
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kSlotMapped;
    descriptor.slot = slot;
    descriptor.binding = binding;
    Publish(rx_socket, descriptor);
  }
  // Puts `payload` at `offset` of the page that the token names in `binding`.
  void Lend(std::uint64_t rx_socket, std::uint64_t binding, std::uint32_t token,
            std::uint16_t offset, std::string_view payload, std::uint8_t flags = 0) {
    Buffer& buffer = buffers.at(binding);
    const auto page = static_cast<std::size_t>(PageToken::FromWire(token).page());
    std::memcpy(buffer.data + page * buffer.options.page_bytes + offset, payload.data(),
                payload.size());
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kFragment;
    descriptor.flags = flags;
    descriptor.token = token;
    descriptor.offset = offset;
    descriptor.length = static_cast<std::uint16_t>(payload.size());
    Publish(rx_socket, descriptor);
  }
  // Tokens in the return ring; they are taken out.
  std::vector<std::uint32_t> DrainReturns(std::uint64_t rx_socket) {
    Socket& socket = sockets.at(rx_socket);
    std::vector<std::uint32_t> tokens;
    std::uint32_t head = socket.descriptors->return_head.load();
    const std::uint32_t tail = socket.returns->tail.load();
    for (; head != tail; head++) {
      tokens.push_back(socket.returns->tokens()[head & (socket.options.ring_entries - 1)].load());
    }
    socket.descriptors->return_head.store(head);
    return tokens;
  }

  std::map<std::uint64_t, Buffer> buffers;
  std::map<std::uint64_t, Socket> sockets;
  HeldInfo held;  // of every rx socket
  std::vector<FlowRule> rules;
  std::set<std::uint64_t> drained;  // bindings whose pages are all back
  std::vector<std::pair<std::uint32_t, std::uint32_t>> returned;
  bool returned_all_or_nothing = false;  // the last of them
  std::vector<std::string> calls;        // that took something away, in order

 private:
  std::vector<PortOptions> ports_;
  std::uint64_t next_id_ = 1;
};

}  // namespace rxtoken
