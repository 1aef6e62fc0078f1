// SPDX-License-Identifier: Apache-2.0
// dataplane.h - what the control plane asks of the dataplane.
//
// Objects are named by number: ports by index, bindings and rx sockets by an id that is
// never reused while the process lives. Names, sessions and rights are the control plane's.
//
// Thread-safety: every function is called by the one control thread, unless it says
//                otherwise. A function that changes something returns when all workers act
//                on the change.
// Blocks: for as long as a worker needs to come round, some microseconds.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dataplane/flow_rule.h"
#include "tokens/abi/counters.h"
#include "tokens/abi/limits.h"
#include "tokens/abi/ring.h"
#include "tokens/abi/status.h"
#include "tokens/held.h"
#include "tokens/hold_time.h"

namespace rxtoken {

class BufferPool;

enum class PollMode {
  kAdaptive,  // naps of at most 100 us once nothing has arrived for a while
  kBusy,      // never sleeps
};

enum class Memory {
  kAuto,   // huge pages if enough of them are free, else plain
  kPlain,  // ordinary 4 KiB pages
  kHuge,   // 2 MiB pages, or an error
};

// Of the IP reassembly of one worker.
struct ReassemblyLimits {
  std::uint32_t datagrams = 4096;   // incomplete at once, 64..1048576
  std::uint32_t pages = 8192;       // that they may keep, 64..4194304
  std::uint32_t timeout_ms = 1000;  // 10..30000; what is not complete then is dropped
};

struct DataplaneOptions {
  // One worker for each entry, pinned to that CPU; -1 leaves it to the scheduler. 1 to
  // kMaxWorkers entries.
  std::vector<int> worker_cpus = {-1};
  PollMode poll = PollMode::kAdaptive;
  bool hugepages = false;             // DPDK's own memory in huge pages, and PCI devices probed
  std::uint32_t memory_mib = 256;     // DPDK's own memory; buffers are not part of it
  std::vector<std::string> eal_args;  // handed to DPDK as they are
  ReassemblyLimits reassembly;
};

struct PortOptions {
  std::string name;
  std::string device;                // "net_null0,size=64" or a PCI address "0000:03:00.0"
  std::uint32_t queues = 1;          // receive queues, 1..1024
  std::uint32_t ring_entries = 512;  // of each queue; adjusted to what the driver takes
  std::string exception_tap = {};    // interface for frames that no rule matches; empty: none
};

struct QueueInfo {
  std::uint32_t worker = 0;
  std::uint64_t binding = 0;  // 0: none
  std::uint64_t rx_packets = 0;
  std::uint64_t rx_bytes = 0;
  std::uint64_t copied_packets = 0;
  std::uint64_t pauses = 0;
  std::array<std::uint64_t, kDropReasons> drops = {};
};

struct ExceptionPathInfo {
  std::string interface;
  std::uint64_t to_kernel = 0;  // frames
  std::uint64_t from_kernel = 0;
  std::uint64_t to_kernel_drops = 0;
  std::uint64_t from_kernel_drops = 0;
};

struct PortInfo {
  std::string name;
  std::string device;
  std::string driver;
  std::string mac;
  bool link_up = false;
  std::uint32_t link_mbps = 0;
  std::uint32_t mtu_bytes = 0;
  std::uint32_t ring_entries = 0;
  std::uint64_t rx_packets = 0;
  std::uint64_t rx_bytes = 0;
  std::uint64_t rx_missed = 0;
  std::uint64_t rx_errors = 0;
  std::uint64_t rx_no_buffer = 0;
  std::vector<QueueInfo> queues;
  std::optional<ExceptionPathInfo> exception_path;
};

struct BindingOptions {
  std::string name;  // for messages
  std::uint64_t buffer_bytes = 0;
  std::uint32_t page_bytes = kDefaultPageBytes;
  Memory memory = Memory::kAuto;
  std::uint32_t frames_per_page = 1;  // a power of two; each gets 2048 bytes at least
  std::vector<QueueRef> queues;
};

struct BindingInfo {
  std::uint64_t id = 0;
  bool draining = false;
  std::uint64_t buffer_bytes = 0;
  std::uint32_t page_bytes = 0;
  Memory memory = Memory::kPlain;  // what it got, never kAuto
  std::vector<QueueRef> queues;    // none once it drains
  std::uint32_t pages = 0;
  std::uint32_t pages_free = 0;
  std::uint32_t frames_per_page = 1;
  std::uint64_t saturated_pages = 0;
};

// A binding's buffer. `fd` is sealed: whoever gets it can map it for reading only. It stays
// the dataplane's; `data` is the dataplane's own mapping. Both are there while `memory` is
// held, even if the binding goes.
struct BufferView {
  int fd = -1;
  const std::uint8_t* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t page_bytes = 0;
  Held<const Holdable> memory;
};

enum class Content { kPayload, kFrame };

// What happens to a frame that lies outside the bindings which its rx socket may use.
enum class Outside { kCopy, kDrop };

// What happens to a frame for a rx socket that has no room for it; see Slow in rx_socket.proto.
enum class Slow { kDropNew, kCopyOut, kPause };

struct RxSocketOptions {
  std::string name;  // for messages
  Content content = Content::kPayload;
  std::uint32_t ring_entries = kDefaultRingEntries;
  std::uint32_t max_held_fragments = 0;      // on each worker; 0: no limit
  std::vector<std::uint64_t> bindings = {};  // that it may use, by id; empty: any
  Outside outside = Outside::kCopy;
  Slow slow = Slow::kDropNew;
  std::uint64_t copy_out_bytes = 0;  // of the private buffer of kCopyOut, in pages of 4096
  std::uint64_t lease_ns = 0;  // how long a page may be held; see Dataplane::Expire(); 0: no limit
};

// What an application needs in order to read a rx socket. The descriptors stay the
// dataplane's, except `doorbell`, which the caller closes when it has passed it on.
struct Attachment {
  int descriptor_fd = -1;  // sealed: maps read-only
  int return_fd = -1;
  int doorbell = -1;
  std::uint32_t lanes = 0;
  std::uint32_t entries = 0;
  // The daemon's own mapping, for an application inside it. One pair for each lane; there
  // while `memory` is held, even if the rx socket goes.
  std::vector<std::pair<const DescriptorRing*, ReturnRing*>> rings;
  Held<const Holdable> memory;
};

struct RxSocketInfo {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t lent = 0;  // fragments; lent = returned + outstanding
  std::uint64_t returned = 0;
  std::uint64_t outstanding = 0;
  std::optional<std::uint64_t> audited_outstanding;  // sum over the uref arrays
  std::uint32_t slots_in_use = 0;
  std::uint64_t copied_messages = 0;
  std::uint64_t doorbells = 0;
  std::uint64_t waiting = 0;  // fragments, for a free slot; neither lent nor outstanding
  std::uint64_t revoked = 0;  // fragments; part of `returned`
  std::array<std::uint64_t, kDropReasons> drops = {};
  std::array<std::uint64_t, kRefusals> refusals = {};
  std::array<std::uint64_t, kHoldBuckets> hold_times = {};  // a sample; see HoldBucket()
  std::uint64_t copy_out_binding = 0;   // id of its private buffer, for GetBuffer(); 0: none
  std::vector<QueueRef> paused_queues;  // that wait for it when it has no room
};

// Which pages a rx socket holds. One that it holds under two slots counts twice.
struct HeldInfo {
  std::map<std::uint64_t, std::uint64_t> pages;  // of each binding, by id
  std::uint64_t oldest_ns = 0;                   // age; up to a day and a half
};

// Of one worker; see Reassembly in worker.proto.
struct ReassemblyInfo {
  std::uint64_t fragments = 0;
  std::uint64_t reassembled = 0;
  std::uint64_t timed_out = 0;
  std::uint64_t evicted = 0;
  std::uint64_t overlap = 0;
  std::uint64_t invalid = 0;
  std::uint64_t over_budget = 0;
  std::uint64_t duplicates = 0;
  std::uint64_t discarded = 0;
  std::uint64_t no_page = 0;
  std::uint64_t copied_out_bytes = 0;
  std::uint64_t handed_over = 0;
  std::uint32_t datagrams = 0;
  std::uint32_t pages = 0;
};

struct WorkerInfo {
  int cpu = -1;  // -1: not pinned
  ReassemblyInfo reassembly;
};

struct RuleInfo {
  std::uint64_t id = 0;
  std::uint64_t packets = 0;  // that matched
  std::uint64_t bytes = 0;
  std::uint64_t drops = 0;   // deliveries that failed, one for each rx socket
  std::uint64_t copied = 0;  // deliveries of a copy
  bool in_hardware = false;
  std::string placement_reason;  // why not, in the driver's words; empty without steer_to
};

// A binding that is being made.
struct BindingDraft {
  std::uint64_t id = 0;
  BindingOptions options;
  std::shared_ptr<BufferPool> memory;
};

struct TokenRange {
  std::uint32_t first_token = 0;
  std::uint32_t count = 0;  // first_token + count - 1 <= 2^32 - 1
};

struct RangeResult {
  std::uint64_t released = 0;
  std::array<std::uint64_t, kRefusals> refusals = {};
};

class Dataplane {
 public:
  // Starts DPDK and the workers. Once in a process's life: a second call is refused.
  // Errors: kInvalidArgument     an option out of range, an unknown CPU
  //         kFailedPrecondition  DPDK would not start; the message has its last log lines
  static Result<std::unique_ptr<Dataplane>> Start(const DataplaneOptions& options);

  // Stops workers and ports and gives all memory back.
  virtual ~Dataplane() = default;

  // Opens and starts a port; answers its index, counted from 0.
  // Errors: kInvalidArgument     a number out of range
  //         kNotFound            no such device
  //         kPermissionDenied    a capability is missing; it is named
  //         kFailedPrecondition  the driver refused; its reason
  virtual Result<std::uint32_t> OpenPort(const PortOptions& options) = 0;
  virtual std::size_t ports() const = 0;
  // Precondition: port < ports().
  virtual PortInfo GetPort(std::uint32_t port) = 0;

  // By index.
  virtual std::vector<WorkerInfo> GetWorkers() = 0;

  // A binding is made in three steps, so that whoever asks for much memory, of which Linux
  // zeroes about 1 GiB a second, does not keep the control thread from serving others.
  // Errors: as Bindings.Bind in binding.proto.
  virtual Result<BindingDraft> BeginBind(const BindingOptions& options) = 0;
  // Gets the memory. By any thread; one call waits for another.
  virtual Status Allocate(BindingDraft& draft) = 0;
  // On success takes the memory. A draft that does not come so far is just destroyed, by any
  // thread.
  virtual Status EndBind(BindingDraft& draft) = 0;
  // All three. Answers the binding's id.
  Result<std::uint64_t> Bind(const BindingOptions& options) {
    Result<BindingDraft> draft = BeginBind(options);
    if (!draft.ok()) return draft.status();
    if (Status s = Allocate(*draft); !s.ok()) return s;
    if (Status s = EndBind(*draft); !s.ok()) return s;
    return draft->id;
  }
  // Gives a binding further queues; one that another binding has is moved in one step.
  // Errors: as Bindings.AttachQueues in binding.proto.
  virtual Status AttachQueues(std::uint64_t binding, std::span<const QueueRef> queues) = 0;
  // Errors: kNotFound, kFailedPrecondition (draining already)
  virtual Status Unbind(std::uint64_t binding) = 0;
  // Takes back every fragment of a draining binding; answers how many.
  // Errors: kNotFound, kFailedPrecondition (not draining)
  virtual Result<std::uint64_t> Revoke(std::uint64_t binding) = 0;
  // Frees what drained since the last call; answers the ids that are gone.
  virtual std::vector<std::uint64_t> ReapBindings() = 0;
  // Errors: kNotFound
  virtual Result<BindingInfo> GetBinding(std::uint64_t binding) = 0;
  virtual Result<BufferView> GetBuffer(std::uint64_t binding) = 0;

  // Errors: kInvalidArgument, kNotFound (a binding), kResourceExhausted. Answers the rx socket's
  // id.
  virtual Result<std::uint64_t> OpenRxSocket(const RxSocketOptions& options) = 0;
  // Delivery starts now. Errors: kNotFound, kFailedPrecondition (attached already)
  virtual Result<Attachment> Attach(std::uint64_t rx_socket) = 0;
  // Delivery stops; what is held stays held; the rx socket can be attached again by a reader
  // inside the daemon that goes on with the same rings. Errors: kNotFound
  virtual Status Detach(std::uint64_t rx_socket) = 0;
  // Precondition: no rule names it. Answers how many fragments it still held.
  // Errors: kNotFound
  virtual Result<std::uint64_t> CloseRxSocket(std::uint64_t rx_socket) = 0;
  // Gives back the memory that rx sockets used, but not since the last call. Once a second.
  virtual void TrimMemory() = 0;
  // Errors: kNotFound
  virtual Result<RxSocketInfo> GetRxSocket(std::uint64_t rx_socket, bool audit) = 0;
  // Looks at the urefs itself, without asking the workers: some 0.3 ms for each GiB of 4 KiB
  // pages of the bindings that the rx socket has something of. Errors: kNotFound
  virtual Result<HeldInfo> GetHeld(std::uint64_t rx_socket) = 0;
  // Takes back what it holds longer than its lease; how many fragments. Costs as much as GetHeld()
  // if that is none. Precondition: it has a lease. Errors: kNotFound
  virtual Result<std::uint64_t> Expire(std::uint64_t rx_socket) = 0;

  // Takes rules away, and adds rules or changes those with the same ids, which keep their
  // counters unless the match changed. The cost follows what changes, not how many rules there
  // are. Preconditions: the ids in `gone` are rules' and not in `set`; every rule names 1 to
  // kMaxFanOut open rx sockets, ports and queues that exist; no two rules have the same match
  // and priority, before the change, after it, or in between.
  virtual void ChangeRules(std::span<const std::uint64_t> gone, std::span<const FlowRule> set) = 0;
  // Precondition: there is such a rule.
  virtual RuleInfo GetRule(std::uint64_t id) = 0;
  // In the order in which the worker tries them.
  virtual std::vector<RuleInfo> GetRules() = 0;

  // One fragment of each token of each range; one result for each range. With
  // `all_or_nothing`, nothing is returned if a token is refused: then only refusals are
  // reported. What the application returns at the same time by its rings may be refused in
  // favour of this. Errors: kNotFound
  virtual Result<std::vector<RangeResult>> ReturnTokens(std::uint64_t rx_socket,
                                                        std::span<const TokenRange> ranges,
                                                        bool all_or_nothing) = 0;
};

}  // namespace rxtoken
