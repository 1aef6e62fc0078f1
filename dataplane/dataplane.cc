// SPDX-License-Identifier: Apache-2.0
#include "dataplane/dataplane.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <future>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "dataplane/buffer.h"
#include "dataplane/buffer_pool.h"
#include "dataplane/eal.h"
#include "dataplane/flow_table.h"
#include "dataplane/hardware_flow.h"
#include "dataplane/port.h"
#include "dataplane/rx_socket.h"
#include "dataplane/worker.h"
#include "tokens/rcu.h"

namespace rxtoken {
namespace {

struct Binding {
  std::string name;
  std::shared_ptr<BufferPool> pool;
  std::vector<QueueRef> queues;
  std::vector<Port*> dma_ports;  // that have the buffer mapped
  bool takes_copies = false;     // of frames that any worker receives
};

// A binding whose pages are all home. To give much memory back takes Linux a while, which the
// control thread does not wait for.
struct Leaving {
  BindingInfo last;
  std::future<void> freed;
};

// What a port said when it was asked to apply a rule.
struct Placement {
  FlowRule rule;
  std::unique_ptr<HardwareFlow> flow;  // null: it refused
  std::string refusal;

  // Nothing of it is new to the port.
  bool IsOf(const FlowRule& other) const {
    return rule.match == other.match && rule.priority == other.priority &&
           rule.steer_to == other.steer_to;
  }
};

// By the clock of the workers.
std::uint64_t NowNs() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

std::future<void> FreeElsewhere(std::shared_ptr<BufferPool> pool) {
  try {
    return std::async(std::launch::async, [pool = std::move(pool)]() mutable { pool.reset(); });
  } catch (const std::system_error&) {  // there is no thread to be had, and the pool is gone
    std::promise<void> done;
    done.set_value();
    return done.get_future();
  }
}

Status NoSuch(const char* what, std::uint64_t id) {
  return Status(Code::kNotFound, std::string("no ") + what + " with id " + std::to_string(id));
}

RuleInfo CountersOf(const CompiledRule& rule) {
  RuleInfo info = rule.before;
  info.id = rule.rule.id;
  for (const RuleTarget& target : rule.targets) {
    info.packets += target.packets.load(std::memory_order_relaxed);
    info.bytes += target.bytes.load(std::memory_order_relaxed);
    info.drops += target.drops.load(std::memory_order_relaxed);
    info.copied += target.copied.load(std::memory_order_relaxed);
  }
  return info;
}

class DataplaneImpl final : public Dataplane {
 public:
  explicit DataplaneImpl(const DataplaneOptions& options);
  ~DataplaneImpl() override;
  Status StartWorkers();

  Result<std::uint32_t> OpenPort(const PortOptions& options) override;
  std::size_t ports() const override { return ports_.size(); }
  PortInfo GetPort(std::uint32_t port) override;
  std::vector<WorkerInfo> GetWorkers() override;

  Result<BindingDraft> BeginBind(const BindingOptions& options) override;
  Status Allocate(BindingDraft& draft) override;
  Status EndBind(BindingDraft& draft) override;
  Status AttachQueues(std::uint64_t binding, std::span<const QueueRef> queues) override;
  Status Unbind(std::uint64_t binding) override;
  Result<std::uint64_t> Revoke(std::uint64_t binding) override;
  std::vector<std::uint64_t> ReapBindings() override;
  Result<BindingInfo> GetBinding(std::uint64_t binding) override;
  Result<BufferView> GetBuffer(std::uint64_t binding) override;

  Result<std::uint64_t> OpenRxSocket(const RxSocketOptions& options) override;
  Result<Attachment> Attach(std::uint64_t rx_socket) override;
  Status Detach(std::uint64_t rx_socket) override;
  Result<std::uint64_t> CloseRxSocket(std::uint64_t rx_socket) override;
  void TrimMemory() override;
  Result<RxSocketInfo> GetRxSocket(std::uint64_t rx_socket, bool audit) override;
  Result<HeldInfo> GetHeld(std::uint64_t rx_socket) override;
  Result<std::uint64_t> Expire(std::uint64_t rx_socket) override;

  void ChangeRules(std::span<const std::uint64_t> gone, std::span<const FlowRule> set) override;
  RuleInfo GetRule(std::uint64_t id) override;
  std::vector<RuleInfo> GetRules() override;

  Result<std::vector<RangeResult>> ReturnTokens(std::uint64_t rx_socket,
                                                std::span<const TokenRange> ranges,
                                                bool all_or_nothing) override;

 private:
  struct OpenedPort {
    std::unique_ptr<Port> port;
    std::vector<std::uint32_t> workers;   // of each queue
    std::vector<std::uint64_t> bindings;  // of each queue; 0: none
  };

  Worker& WorkerOf(const QueueRef& queue) {
    return *workers_[ports_[queue.port].workers[queue.queue]];
  }
  // `who` begins the messages: "binding 'b0': ".
  Status CheckQueues(const std::string& who, std::span<const QueueRef> queues) const;
  Status CheckFree(const std::string& who, std::span<const QueueRef> queues) const;
  Status CheckPages(const BindingOptions& options) const;
  Status MapForDma(Binding& binding, std::span<const QueueRef> queues, Buffer& buffer);
  void SetTakers(Binding& binding);
  void PointQueues(std::uint64_t id, Binding& binding, std::span<const QueueRef> queues);
  void DetachQueues(Binding& binding);
  static void AddLanes(CompiledRule& rule, std::uint32_t workers,
                       const std::vector<RxSocket*>& sockets);
  void Forget(std::uint32_t id, const PageTable& table);
  static Status GetMemory(BindingDraft& draft);
  Status AddCopyOut(RxSocket& socket);
  void UpdatePausing();
  std::unique_ptr<CompiledRule> Compile(const FlowRule& rule);
  void Place(std::span<const std::uint64_t> gone, std::span<const FlowRule> set);
  RuleInfo InfoOf(const CompiledRule& rule) const;
  std::uint64_t Close(RxSocket& socket, CloseReason reason);

  FlowRules flow_rules_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<OpenedPort> ports_;
  std::uint32_t next_queue_worker_ = 0;
  std::map<std::uint64_t, Binding> bindings_;
  std::uint32_t last_binding_ = 0;
  std::mutex allocation_;  // what memory there is, is asked before it is taken
  std::map<std::uint64_t, Leaving> leaving_;
  std::map<std::uint64_t, std::unique_ptr<RxSocket>> rx_sockets_;
  std::uint64_t last_rx_socket_ = 0;
  std::map<std::uint64_t, std::unique_ptr<CompiledRule>> rules_;
  std::map<std::uint64_t, Placement> placements_;  // of rules with steer_to, by rule id
  std::uint32_t pausers_ = 0;                      // rx sockets with Slow::kPause
  std::map<QueueRef, RxSocket*> pausing_;          // queues, and what they wait for
};

DataplaneImpl::DataplaneImpl(const DataplaneOptions& options) {
  for (std::uint32_t i = 0; i < options.worker_cpus.size(); i++) {
    workers_.push_back(std::make_unique<Worker>(i, options.worker_cpus[i], options.poll,
                                                options.reassembly, &flow_rules_.table(),
                                                &workers_));
  }
}

Status DataplaneImpl::StartWorkers() {
  for (auto& worker : workers_) {
    if (Status s = worker->Start(); !s.ok()) return s;
  }
  return Status();
}

// Applications learn it first, then frames stop, then memory goes.
DataplaneImpl::~DataplaneImpl() {
  for (auto& [id, socket] : rx_sockets_) Close(*socket, CloseReason::kDaemonStopped);
  for (auto& worker : workers_) worker->Stop();
  placements_.clear();
  ports_.clear();
  bindings_.clear();
  leaving_.clear();
  rx_sockets_.clear();
  StopEal();
}

// ---- ports -----------------------------------------------------------------------------------

Result<std::uint32_t> DataplaneImpl::OpenPort(const PortOptions& options) {
  const auto index = static_cast<std::uint32_t>(ports_.size());
  Result<std::unique_ptr<Port>> port = Port::Open(options, index);
  if (!port.ok()) return port.status();
  OpenedPort& opened = ports_.emplace_back();
  opened.port = std::move(*port);
  opened.bindings.resize(opened.port->queues());
  std::uint32_t port_workers = 0;
  for (std::uint32_t queue = 0; queue < opened.port->queues(); queue++) {
    opened.workers.push_back(next_queue_worker_++ % static_cast<std::uint32_t>(workers_.size()));
    port_workers |= 1u << opened.workers.back();
  }
  for (std::uint32_t queue = 0; queue < opened.port->queues(); queue++) {
    WorkerOf({index, queue}).Call([&](Worker& w) {
      w.AddQueue(opened.port.get(), index, static_cast<std::uint16_t>(queue), port_workers);
    });
  }
  return index;
}

PortInfo DataplaneImpl::GetPort(std::uint32_t port) {
  OpenedPort& opened = ports_[port];
  PortInfo info = opened.port->info();
  info.queues.resize(opened.port->queues());
  for (std::uint32_t queue = 0; queue < info.queues.size(); queue++) {
    QueueInfo& q = info.queues[queue];
    q.worker = opened.workers[queue];
    q.binding = opened.bindings[queue];
    WorkerOf({port, queue}).Call([&](Worker& w) {
      const RxQueue& rx = w.FindQueue(opened.port.get(), static_cast<std::uint16_t>(queue));
      q.rx_packets = rx.rx_packets;
      q.rx_bytes = rx.rx_bytes;
      q.copied_packets = rx.copied_packets;
      q.pauses = rx.pauses;
      q.drops = rx.drops;
    });
  }
  return info;
}

std::vector<WorkerInfo> DataplaneImpl::GetWorkers() {
  std::vector<WorkerInfo> workers;
  for (auto& worker : workers_) {
    WorkerInfo& info = workers.emplace_back();
    info.cpu = worker->cpu();
    worker->Call([&](Worker& w) { info.reassembly = w.reassembly(); });
  }
  return workers;
}

// ---- bindings --------------------------------------------------------------------------------

Status DataplaneImpl::CheckQueues(const std::string& who, std::span<const QueueRef> queues) const {
  std::set<QueueRef> seen;
  for (const QueueRef& ref : queues) {
    if (ref.port >= ports_.size()) {
      return Status(Code::kNotFound, who + "no port with index " + std::to_string(ref.port));
    }
    const OpenedPort& opened = ports_[ref.port];
    const std::string queue =
        "queue " + std::to_string(ref.queue) + " of port '" + opened.port->name() + "'";
    if (ref.queue >= opened.port->queues()) {
      return Status(Code::kNotFound, who + queue + " does not exist; the port has " +
                                         std::to_string(opened.port->queues()) + " queues");
    }
    if (!seen.insert(ref).second) {
      return Status(Code::kInvalidArgument, who + queue + " is named twice");
    }
  }
  return Status();
}

Status DataplaneImpl::CheckFree(const std::string& who, std::span<const QueueRef> queues) const {
  for (const QueueRef& ref : queues) {
    const OpenedPort& opened = ports_[ref.port];
    if (opened.bindings[ref.queue] == 0) continue;
    return Status(Code::kFailedPrecondition,
                  who + "queue " + std::to_string(ref.queue) + " of port '" + opened.port->name() +
                      "' has a binding already, id " + std::to_string(opened.bindings[ref.queue]) +
                      "; unbind that first, or move the queue with AttachQueues");
  }
  return Status();
}

// Whether every port can receive into such a buffer.
Status DataplaneImpl::CheckPages(const BindingOptions& options) const {
  const std::uint32_t frame_bytes = options.page_bytes / options.frames_per_page;
  const std::uint32_t room =
      frame_bytes - BufferPool::OverheadBytes(frame_bytes) + RTE_PKTMBUF_HEADROOM;
  const std::uint64_t frames = options.buffer_bytes / frame_bytes;
  for (std::uint32_t port = 0; port < ports_.size(); port++) {
    const auto queues = static_cast<std::uint32_t>(
        std::count_if(options.queues.begin(), options.queues.end(),
                      [&](const QueueRef& ref) { return ref.port == port; }));
    if (queues == 0) continue;
    if (Status s = ports_[port].port->CheckPages(options.name, frame_bytes, room, frames, queues);
        !s.ok()) {
      return s;
    }
  }
  return Status();
}

// Maps the buffer for the ports that write by DMA and have it not yet. On failure the caller
// unmaps what is.
Status DataplaneImpl::MapForDma(Binding& binding, std::span<const QueueRef> queues,
                                Buffer& buffer) {
  for (const QueueRef& ref : queues) {
    Port* const port = ports_[ref.port].port.get();
    const auto& mapped = binding.dma_ports;
    if (!port->dma() || std::find(mapped.begin(), mapped.end(), port) != mapped.end()) continue;
    if (Status s = port->MapForDma(buffer); !s.ok()) return s;
    binding.dma_ports.push_back(port);
  }
  return Status();
}

Result<BindingDraft> DataplaneImpl::BeginBind(const BindingOptions& options) {
  const std::string who = "binding '" + options.name + "': ";
  if (Status s = CheckQueues(who, options.queues); !s.ok()) return s;
  if (Status s = CheckFree(who, options.queues); !s.ok()) return s;
  if (Status s = Buffer::CheckSizes(options.name, options.buffer_bytes, options.page_bytes);
      !s.ok()) {
    return s;
  }
  const std::uint32_t most = options.page_bytes / BufferPool::kMinFrameBytes;
  if (!std::has_single_bit(options.frames_per_page) || options.frames_per_page > most) {
    return Status(Code::kInvalidArgument,
                  who + "frames_per_page is " + std::to_string(options.frames_per_page) +
                      "; use a power of two up to " + std::to_string(most) +
                      ", which leaves each " + std::to_string(BufferPool::kMinFrameBytes) +
                      " bytes of a page of " + std::to_string(options.page_bytes));
  }
  if (Status s = CheckPages(options); !s.ok()) return s;
  if (last_binding_ == std::numeric_limits<std::uint32_t>::max()) {
    return Status(Code::kResourceExhausted, "binding ids are used up; restart the daemon");
  }
  return BindingDraft{.id = ++last_binding_, .options = options, .memory = nullptr};
}

Status DataplaneImpl::Allocate(BindingDraft& draft) {
  const std::lock_guard lock(allocation_);
  return GetMemory(draft);
}

Status DataplaneImpl::GetMemory(BindingDraft& draft) {
  const BindingOptions& options = draft.options;
  Result<std::unique_ptr<Buffer>> buffer =
      Buffer::Create(options.name, options.buffer_bytes, options.page_bytes, options.memory);
  if (!buffer.ok()) return buffer.status();
  Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(
      std::move(*buffer), static_cast<std::uint32_t>(draft.id), options.frames_per_page);
  if (!pool.ok()) {
    return Status(pool.status().code(),
                  "binding '" + options.name + "': " + pool.status().message());
  }
  draft.memory = std::move(*pool);
  return Status();
}

Status DataplaneImpl::EndBind(BindingDraft& draft) {
  const std::vector<QueueRef>& queues = draft.options.queues;
  const std::string who = "binding '" + draft.options.name + "': ";
  if (Status s = CheckFree(who, queues); !s.ok()) return s;
  Binding binding;
  binding.name = draft.options.name;
  Buffer& memory = draft.memory->buffer();
  if (Status s = MapForDma(binding, queues, memory); !s.ok()) {
    for (Port* port : binding.dma_ports) port->UnmapForDma(memory);
    return s;
  }
  binding.pool = std::move(draft.memory);
  PointQueues(draft.id, bindings_[draft.id] = std::move(binding), queues);
  return Status();
}

// Tells the pool which workers take its pages now, and has them all leave to each other what they
// are not to keep: a worker that takes none any more may have all.
void DataplaneImpl::SetTakers(Binding& binding) {
  std::uint32_t takers = 0;
  for (const QueueRef& ref : binding.queues) takers |= 1u << WorkerOf(ref).index();
  for (const auto& worker : workers_) {
    if (binding.takes_copies) takers |= 1u << worker->index();
  }
  PagePool& pages = binding.pool->pages();
  pages.SetTakers(takers);
  for (auto& worker : workers_) {
    worker->Call([&](Worker&) { pages.Settle(); });
  }
}

// Points queues, which may have another binding, at this one's pool.
void DataplaneImpl::PointQueues(std::uint64_t id, Binding& binding,
                                std::span<const QueueRef> queues) {
  std::set<Binding*> changed = {&binding};
  for (const QueueRef& ref : queues) {
    if (const std::uint64_t other = ports_[ref.port].bindings[ref.queue]; other != 0) {
      changed.insert(&bindings_.at(other));
      std::erase(bindings_.at(other).queues, ref);
    }
    binding.queues.push_back(ref);
  }
  bool copied_into = false;
  for (const QueueRef& ref : binding.queues) {
    copied_into |= ports_[ref.port].port->writes_payload();
  }
  binding.pool->set_copied_into(copied_into);
  for (const QueueRef& ref : queues) {
    WorkerOf(ref).Call([&](Worker& w) {
      w.Attach(ports_[ref.port].port.get(), static_cast<std::uint16_t>(ref.queue),
               binding.pool.get());
    });
    ports_[ref.port].bindings[ref.queue] = id;
  }
  for (Binding* each : changed) SetTakers(*each);
}

Status DataplaneImpl::AttachQueues(std::uint64_t id, std::span<const QueueRef> queues) {
  const auto it = bindings_.find(id);
  if (it == bindings_.end()) return NoSuch("binding", id);
  Binding& binding = it->second;
  const std::string who = "binding '" + binding.name + "': ";
  if (binding.pool->draining()) return Status(Code::kFailedPrecondition, who + "it is draining");
  if (queues.empty()) {
    return Status(Code::kInvalidArgument, who + "no queue given; name at least one");
  }
  if (Status s = CheckQueues(who, queues); !s.ok()) return s;
  std::vector<QueueRef> added;
  std::copy_if(queues.begin(), queues.end(), std::back_inserter(added),
               [&](const QueueRef& ref) { return ports_[ref.port].bindings[ref.queue] != id; });
  Buffer& buffer = binding.pool->buffer();
  BindingOptions options{.name = binding.name,
                         .buffer_bytes = buffer.bytes(),
                         .page_bytes = buffer.page_bytes(),
                         .frames_per_page = binding.pool->frames_per_page(),
                         .queues = binding.queues};
  options.queues.insert(options.queues.end(), added.begin(), added.end());
  if (Status s = CheckPages(options); !s.ok()) return s;
  // A port that has the buffer mapped keeps it so until the binding goes.
  if (Status s = MapForDma(binding, added, buffer); !s.ok()) return s;
  PointQueues(id, binding, added);
  return Status();
}

void DataplaneImpl::DetachQueues(Binding& binding) {
  for (const QueueRef& ref : binding.queues) {
    WorkerOf(ref).Call([&](Worker& w) {
      w.Attach(ports_[ref.port].port.get(), static_cast<std::uint16_t>(ref.queue), nullptr);
    });
    ports_[ref.port].bindings[ref.queue] = 0;
  }
  binding.queues.clear();
}

// From here on nothing of it is lent: not by its queues, nor to rx sockets that may use it.
Status DataplaneImpl::Unbind(std::uint64_t id) {
  const auto it = bindings_.find(id);
  if (it == bindings_.end()) return NoSuch("binding", id);
  BufferPool& pool = *it->second.pool;
  if (pool.draining()) {
    return Status(Code::kFailedPrecondition,
                  "binding with id " + std::to_string(id) + " is draining already");
  }
  pool.set_draining();
  DetachQueues(it->second);
  // The first round ends what they may still hand over, the second what was handed over.
  for (int round = 0; round < 2; round++) {
    for (auto& worker : workers_) worker->Call([&](Worker& w) { w.DropFragments(pool); });
  }
  for (auto& worker : workers_) {
    worker->Call([&](Worker& w) {
      for (auto& [socket_id, socket] : rx_sockets_) w.Unbound(socket->lane(w.index()), pool);
      pool.DropLoose();  // a worker without a queue of it may have copied into it
    });
  }
  return Status();
}

Result<std::uint64_t> DataplaneImpl::Revoke(std::uint64_t id) {
  constexpr std::uint32_t kSweepPages = 16384;
  if (leaving_.contains(id)) return std::uint64_t{0};
  const auto it = bindings_.find(id);
  if (it == bindings_.end()) return NoSuch("binding", id);
  BufferPool& pool = *it->second.pool;
  if (!pool.draining()) {
    return Status(Code::kFailedPrecondition,
                  "binding with id " + std::to_string(id) + " is not draining; unbind it first");
  }
  std::uint64_t revoked = 0;
  for (auto& worker : workers_) {
    for (auto& entry : rx_sockets_) {
      RxSocket& socket = *entry.second;
      for (bool done = false; !done;) {
        worker->Call([&](Worker& w) {
          RxLane& lane = socket.lane(w.index());
          const std::uint64_t before = lane.lane.counters().revoked;
          done = w.Revoke(lane, pool.table(), kSweepPages);
          revoked += lane.lane.counters().revoked - before;
        });
      }
    }
  }
  return revoked;
}

// No lane knows the binding any more, and its slots are free.
void DataplaneImpl::Forget(std::uint32_t id, const PageTable& table) {
  for (auto& worker : workers_) {
    worker->Call([&](Worker& w) {
      for (auto& [socket_id, socket] : rx_sockets_) socket->lane(w.index()).lane.Forget(table);
    });
  }
  for (auto& [socket_id, socket] : rx_sockets_) socket->slots().Forget(id);
}

std::vector<std::uint64_t> DataplaneImpl::ReapBindings() {
  constexpr std::uint64_t kFreedAtOnce = 32 << 20;  // some 10 ms
  std::vector<std::uint64_t> gone;
  for (auto it = bindings_.begin(); it != bindings_.end();) {
    Binding& binding = it->second;
    if (!binding.pool->draining() ||
        binding.pool->pages().available() != binding.pool->buffer().pages()) {
      ++it;
      continue;
    }
    const std::uint64_t id = it->first;
    Forget(static_cast<std::uint32_t>(id), binding.pool->table());
    for (Port* port : binding.dma_ports) port->UnmapForDma(binding.pool->buffer());
    if (binding.pool->buffer().bytes() <= kFreedAtOnce) {
      gone.push_back(id);
    } else {
      BindingInfo last = *GetBinding(id);
      leaving_[id] = {.last = std::move(last), .freed = FreeElsewhere(std::move(binding.pool))};
    }
    it = bindings_.erase(it);
  }
  std::erase_if(leaving_, [&](const auto& entry) {
    const bool freed =
        entry.second.freed.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    if (freed) gone.push_back(entry.first);
    return freed;
  });
  return gone;
}

Result<BindingInfo> DataplaneImpl::GetBinding(std::uint64_t id) {
  if (const auto leaving = leaving_.find(id); leaving != leaving_.end())
    return leaving->second.last;
  const auto it = bindings_.find(id);
  if (it == bindings_.end()) return NoSuch("binding", id);
  const Binding& binding = it->second;
  const Buffer& buffer = binding.pool->buffer();
  return BindingInfo{.id = id,
                     .draining = binding.pool->draining(),
                     .buffer_bytes = buffer.bytes(),
                     .page_bytes = buffer.page_bytes(),
                     .memory = buffer.memory(),
                     .queues = binding.queues,
                     .pages = buffer.pages(),
                     .pages_free = binding.pool->pages().available(),
                     .frames_per_page = binding.pool->frames_per_page(),
                     .saturated_pages = binding.pool->table().saturated()};
}

Result<BufferView> DataplaneImpl::GetBuffer(std::uint64_t id) {
  const auto it = bindings_.find(id);
  if (it == bindings_.end()) return NoSuch("binding", id);
  const Held<Buffer>& buffer = it->second.pool->memory();
  return BufferView{.fd = buffer->fd(),
                    .data = buffer->data(),
                    .bytes = buffer->bytes(),
                    .page_bytes = buffer->page_bytes(),
                    .memory = buffer};
}

// ---- rx sockets ------------------------------------------------------------------------------

Result<std::uint64_t> DataplaneImpl::OpenRxSocket(const RxSocketOptions& options) {
  Result<std::unique_ptr<RxSocket>> socket =
      RxSocket::Open(options, static_cast<std::uint32_t>(workers_.size()));
  if (!socket.ok()) return socket.status();
  for (const std::uint64_t id : options.bindings) {
    const auto it = bindings_.find(id);
    if (it == bindings_.end() || it->second.pool->draining()) return NoSuch("binding", id);
    for (std::uint32_t w = 0; w < workers_.size(); w++) {
      (*socket)->lane(w).pools.push_back(it->second.pool.get());
    }
    if (options.outside == Outside::kCopy && !it->second.takes_copies) {
      it->second.takes_copies = true;
      SetTakers(it->second);
    }
  }
  if (options.slow == Slow::kCopyOut) {
    if (Status s = AddCopyOut(**socket); !s.ok()) return s;
  }
  pausers_ += options.slow == Slow::kPause;
  rx_sockets_[++last_rx_socket_] = std::move(*socket);
  return last_rx_socket_;
}

// A binding without queues, which nobody but the rx socket is lent pages of: nothing of it is left
// when that is closed.
Status DataplaneImpl::AddCopyOut(RxSocket& socket) {
  const RxSocketOptions& options = socket.options();
  Result<BindingDraft> draft = BeginBind({.name = options.name,
                                          .buffer_bytes = options.copy_out_bytes,
                                          .memory = Memory::kPlain,
                                          .queues = {}});
  if (!draft.ok()) return draft.status();
  // Does not wait for bindings, which may be much larger.
  if (Status s = GetMemory(*draft); !s.ok()) return s;
  if (Status s = EndBind(*draft); !s.ok()) return s;
  Binding& binding = bindings_.at(draft->id);
  binding.takes_copies = true;
  binding.pool->set_copied_into(true);
  SetTakers(binding);
  socket.SetCopyOut(*binding.pool);
  return Status();
}

Result<Attachment> DataplaneImpl::Attach(std::uint64_t id) {
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  RxSocket& socket = *it->second;
  if (socket.attached()) {
    return Status(Code::kFailedPrecondition,
                  "rx socket '" + socket.options().name +
                      "' has an application attached already; open another one");
  }
  Result<Attachment> attachment = socket.Attach();
  if (!attachment.ok()) return attachment.status();
  for (auto& worker : workers_) {
    worker->Call([&](Worker& w) {
      RxLane& lane = socket.lane(w.index());
      lane.doorbell = socket.doorbell();
      lane.attached = true;
    });
  }
  return attachment;
}

Status DataplaneImpl::Detach(std::uint64_t id) {
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  RxSocket& socket = *it->second;
  for (auto& worker : workers_) {
    worker->Call([&](Worker& w) {
      RxLane& lane = socket.lane(w.index());
      lane.attached = false;
      lane.doorbell = -1;
    });
  }
  socket.Detach();
  return Status();
}

// Answers how many fragments were still held. A worker looks at some thousand pages between
// two rounds, so that other rx sockets do not notice.
std::uint64_t DataplaneImpl::Close(RxSocket& socket, CloseReason reason) {
  constexpr std::uint32_t kSweepPages = 16384;
  std::uint64_t reclaimed = 0;
  for (auto& worker : workers_) {
    bool done = false;
    worker->Call([&](Worker& w) {
      RxLane& lane = socket.lane(w.index());
      w.Unlist(lane);
      lane.lane.Close(reason);
      reclaimed += lane.lane.outstanding();
    });
    while (!done) {
      worker->Call(
          [&](Worker& w) { done = socket.lane(w.index()).lane.Sweep(kSweepPages, w.recycler()); });
    }
  }
  socket.Detach();
  return reclaimed;
}

Result<std::uint64_t> DataplaneImpl::CloseRxSocket(std::uint64_t id) {
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  const std::uint64_t reclaimed = Close(*it->second, CloseReason::kClosed);
  const BufferPool* const copy_out = it->second->copy_out();
  pausers_ -= it->second->options().slow == Slow::kPause;
  rx_sockets_.erase(it);
  if (copy_out != nullptr) bindings_.erase(copy_out->table().binding());
  return reclaimed;
}

void DataplaneImpl::TrimMemory() {
  for (auto& [id, socket] : rx_sockets_) socket->slots().Trim();
}

Result<RxSocketInfo> DataplaneImpl::GetRxSocket(std::uint64_t id, bool audit) {
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  RxSocket& socket = *it->second;
  RxSocketInfo info;
  if (audit) info.audited_outstanding = 0;
  for (auto& worker : workers_) {
    worker->Call([&](Worker& w) {
      Lane& lane = socket.lane(w.index()).lane;
      const LaneCounters& c = lane.counters();
      info.messages += c.messages;
      info.bytes += c.bytes;
      info.lent += c.lent;
      info.returned += c.returned;
      info.outstanding += lane.outstanding();
      info.copied_messages += c.copied_messages;
      info.doorbells += c.doorbells;
      info.waiting += socket.lane(w.index()).waiting.size();
      info.revoked += c.revoked;
      for (std::size_t i = 0; i < kDropReasons; i++) info.drops[i] += c.drops[i];
      for (std::size_t i = 0; i < kRefusals; i++) info.refusals[i] += c.refusals[i];
      for (std::size_t i = 0; i < kHoldBuckets; i++) info.hold_times[i] += c.hold_times[i];
      if (audit) *info.audited_outstanding += lane.Audit();
    });
  }
  info.slots_in_use = socket.slots().in_use();
  for (const auto& [queue, paused_by] : pausing_) {
    if (paused_by == &socket) info.paused_queues.push_back(queue);
  }
  if (socket.copy_out() != nullptr) info.copy_out_binding = socket.copy_out()->table().binding();
  return info;
}

Result<HeldInfo> DataplaneImpl::GetHeld(std::uint64_t id) {
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  HeldInfo info;
  std::uint32_t oldest = 0;
  const std::uint32_t now = HoldClock(NowNs());
  it->second->slots().ForEachHeld(
      [&](std::uint32_t, std::uint32_t binding, std::uint32_t, std::uint32_t, std::uint32_t since) {
        info.pages[binding]++;
        oldest = std::max(oldest, HoldTicks(since, now));
      });
  info.oldest_ns = HoldClockNs(oldest);
  return info;
}

// Finds the pages itself, and has their workers, which look again, take them back in lots that
// other rx sockets do not notice.
Result<std::uint64_t> DataplaneImpl::Expire(std::uint64_t id) {
  constexpr std::size_t kLot = 1024;
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  RxSocket& socket = *it->second;
  const std::uint32_t until = HoldClock(NowNs() - socket.options().lease_ns);
  struct Place {
    std::uint32_t worker;
    std::uint32_t slot;
    std::uint32_t binding;
    auto operator<=>(const Place&) const = default;
  };
  std::map<Place, std::vector<std::uint32_t>> old;  // pages
  socket.slots().ForEachHeld([&](std::uint32_t slot, std::uint32_t binding, std::uint32_t page,
                                 std::uint32_t, std::uint32_t since) {
    if (IsAfter(since, until)) return;
    const auto found = bindings_.find(binding);
    if (found == bindings_.end()) return;
    const PageTable& table = found->second.pool->table();
    const std::uint32_t cell = table.cells()[page].load(std::memory_order_relaxed);
    // Nobody's, if it was given back just now.
    const std::uint32_t worker = (PageTable::Owner(cell) >> 16) - 1;
    if (worker < workers_.size()) old[{worker, slot, binding}].push_back(page);
  });
  std::uint64_t expired = 0;
  for (const auto& entry : old) {
    const Place& place = entry.first;
    const std::vector<std::uint32_t>& pages = entry.second;
    for (std::size_t at = 0; at < pages.size(); at += kLot) {
      const auto lot = std::span(pages).subspan(at, std::min(kLot, pages.size() - at));
      workers_[place.worker]->Call([&](Worker& w) {
        expired += w.Expire(socket.lane(w.index()), place.slot, place.binding, lot, until);
      });
    }
  }
  return expired;
}

// ---- rules -----------------------------------------------------------------------------------

// A rule that changes is made anew, so that workers see the whole of it or nothing; what the old
// one counted is carried over.
void DataplaneImpl::ChangeRules(std::span<const std::uint64_t> gone,
                                std::span<const FlowRule> set) {
  std::vector<std::unique_ptr<CompiledRule>> replaced;
  for (const std::uint64_t id : gone) {
    const auto rule = rules_.find(id);
    flow_rules_.Remove(*rule->second);
    replaced.push_back(std::move(rule->second));
    rules_.erase(rule);
  }
  for (const FlowRule& rule : set) {
    std::unique_ptr<CompiledRule>& compiled = rules_[rule.id];
    std::unique_ptr<CompiledRule> old = std::exchange(compiled, Compile(rule));
    flow_rules_.Insert(*compiled);
    if (old == nullptr) continue;
    if (old->rule.match != rule.match || old->rule.priority != rule.priority) {
      flow_rules_.Remove(*old);
    }
    replaced.push_back(std::move(old));
  }
  flow_rules_.Publish();
  // Now no worker uses the rules that are gone, or the lanes that they named.
  for (const auto& old : replaced) {
    const auto rule = rules_.find(old->rule.id);
    if (rule == rules_.end() || rule->second->rule.match != old->rule.match) continue;
    rule->second->before = CountersOf(*old);
  }
  Place(gone, set);
  UpdatePausing();
}

// Finds the queues of which every rule leads to the same rx socket, and that is to pause them. All
// rules are looked at, but only as long as there is such a rx socket. A port with an exception path
// has no such queue: the kernel would wait as well.
void DataplaneImpl::UpdatePausing() {
  if (pausers_ == 0 && pausing_.empty()) return;
  std::map<QueueRef, RxSocket*> pausing;
  for (std::uint32_t port = 0; port < ports_.size(); port++) {
    if (ports_[port].port->exception_path() != nullptr) continue;
    for (std::uint32_t queue = 0; queue < ports_[port].port->queues(); queue++) {
      std::set<std::uint64_t> receivers;
      for (const auto& [id, compiled] : rules_) {
        const FlowRule& rule = compiled->rule;
        if (rule.match.port.value_or(port) != port || rule.match.queue.value_or(queue) != queue) {
          continue;
        }
        receivers.insert(rule.rx_sockets.begin(), rule.rx_sockets.end());
        if (receivers.size() > 1) break;
      }
      if (receivers.size() != 1) continue;
      const auto socket = rx_sockets_.find(*receivers.begin());
      if (socket == rx_sockets_.end()) continue;
      if (socket->second->options().slow == Slow::kPause) {
        pausing[{port, queue}] = socket->second.get();
      }
    }
  }
  std::swap(pausing, pausing_);  // what it was
  for (std::uint32_t port = 0; port < ports_.size(); port++) {
    for (std::uint32_t queue = 0; queue < ports_[port].port->queues(); queue++) {
      const QueueRef ref{port, queue};
      const auto now = pausing_.find(ref);
      RxSocket* const socket = now == pausing_.end() ? nullptr : now->second;
      const auto before = pausing.find(ref);
      if ((before == pausing.end() ? nullptr : before->second) == socket) continue;
      WorkerOf(ref).Call([&](Worker& w) {
        w.SetPausing(ports_[port].port.get(), static_cast<std::uint16_t>(queue),
                     socket == nullptr ? nullptr : &socket->lane(w.index()));
      });
    }
  }
}

// Asks ports to apply what is new or changed. What is gone is taken out first: it could be in
// the way.
void DataplaneImpl::Place(std::span<const std::uint64_t> gone, std::span<const FlowRule> set) {
  for (const std::uint64_t id : gone) placements_.erase(id);
  for (const FlowRule& rule : set) {
    const auto old = placements_.find(rule.id);
    if (old != placements_.end() && !old->second.IsOf(rule)) placements_.erase(old);
  }
  for (const FlowRule& rule : set) {
    if (!rule.steer_to || placements_.contains(rule.id)) continue;
    auto flow = HardwareFlow::Install(*ports_[rule.steer_to->port].port, rule);
    Placement& placement = placements_[rule.id];
    placement.rule = rule;
    if (flow.ok()) {
      placement.flow = std::move(*flow);
    } else {
      placement.refusal = flow.status().message();
    }
  }
}

std::unique_ptr<CompiledRule> DataplaneImpl::Compile(const FlowRule& rule) {
  auto compiled = std::make_unique<CompiledRule>();
  compiled->rule = rule;
  std::vector<RxSocket*> sockets;
  for (const std::uint64_t id : rule.rx_sockets) sockets.push_back(rx_sockets_.at(id).get());
  AddLanes(*compiled, static_cast<std::uint32_t>(workers_.size()), sockets);
  return compiled;
}

void DataplaneImpl::AddLanes(CompiledRule& rule, std::uint32_t workers,
                             const std::vector<RxSocket*>& sockets) {
  for (std::uint32_t w = 0; w < workers; w++) {
    for (RxSocket* socket : sockets) rule.lanes.push_back(&socket->lane(w));
  }
  for (std::uint32_t w = 0; w < workers; w++) {
    const auto lanes =
        std::span<RxLane* const>(rule.lanes).subspan(w * sockets.size(), sockets.size());
    rule.targets[w].rule = rule.rule.id;
    if (lanes.size() == 1 && !lanes[0]->restricted) {
      rule.targets[w].lane = lanes[0];
    } else {
      rule.targets[w].lanes = lanes;
    }
  }
}

RuleInfo DataplaneImpl::InfoOf(const CompiledRule& rule) const {
  RuleInfo info = CountersOf(rule);
  const auto placement = placements_.find(info.id);
  if (placement != placements_.end()) {
    info.in_hardware = placement->second.flow != nullptr;
    info.placement_reason = placement->second.refusal;
  }
  return info;
}

RuleInfo DataplaneImpl::GetRule(std::uint64_t id) { return InfoOf(*rules_.at(id)); }

std::vector<RuleInfo> DataplaneImpl::GetRules() {
  std::vector<RuleInfo> rules;
  for (const CompiledRule* rule : flow_rules_.InOrder()) rules.push_back(InfoOf(*rule));
  return rules;
}

// ---- tokens ----------------------------------------------------------------------------------

// Each token goes to the worker that owns its page, which is found by asking them in turn.
// What no worker accepts is refused for the reason that came furthest.
Result<std::vector<RangeResult>> DataplaneImpl::ReturnTokens(std::uint64_t id,
                                                             std::span<const TokenRange> ranges,
                                                             bool all_or_nothing) {
  constexpr std::size_t kChunk = 8192;  // tokens that a worker looks at between two rounds
  const auto it = rx_sockets_.find(id);
  if (it == rx_sockets_.end()) return NoSuch("rx socket", id);
  RxSocket& socket = *it->second;
  struct Pending {
    std::uint32_t token;
    std::size_t range;
    Refusal reason = Refusal::kSlotNotInUse;
  };
  std::size_t tokens = 0;
  for (const TokenRange& range : ranges) tokens += range.count;
  std::vector<RangeResult> results(ranges.size());
  std::vector<Pending> pending;
  bool refused = false;
  std::vector<std::vector<std::uint32_t>> reserved(workers_.size());
  // Now, so that no worker allocates.
  for (auto& of_worker : reserved) of_worker.reserve(all_or_nothing ? tokens : kChunk);
  const auto flush = [&] {
    for (auto& worker : workers_) {
      worker->Call([&](Worker& w) {
        Lane& lane = socket.lane(w.index()).lane;
        std::vector<std::uint32_t>& accepted = reserved[w.index()];
        std::erase_if(pending, [&](Pending& p) {
          const Refusal refusal = lane.Reserve(p.token);
          if (refusal == Refusal::kCount) {
            accepted.push_back(p.token);
            results[p.range].released++;
            return true;
          }
          p.reason = std::max(p.reason, refusal);
          const bool last = w.index() + 1 == workers_.size();
          if (last) {
            lane.Refuse(p.reason);
            results[p.range].refusals[static_cast<std::size_t>(p.reason)]++;
            refused = true;
          }
          return last;
        });
        if (!all_or_nothing) {
          lane.Commit(accepted, w.recycler());
          accepted.clear();
        }
      });
    }
  };
  for (std::size_t range = 0; range < ranges.size(); range++) {
    for (std::uint32_t i = 0; i < ranges[range].count; i++) {
      pending.push_back({ranges[range].first_token + i, range});
      if (pending.size() == kChunk) flush();
    }
  }
  flush();
  if (!all_or_nothing) return results;

  for (auto& worker : workers_) {
    std::span<const std::uint32_t> left = reserved[worker->index()];
    while (!left.empty()) {
      const auto lot = left.first(std::min(left.size(), kChunk));
      left = left.subspan(lot.size());
      worker->Call([&](Worker& w) {
        Lane& lane = socket.lane(w.index()).lane;
        if (refused) {
          lane.Cancel(lot);
        } else {
          lane.Commit(lot, w.recycler());
        }
      });
    }
  }
  if (refused) {
    for (RangeResult& result : results) result.released = 0;
  }
  return results;
}

}  // namespace

Result<std::unique_ptr<Dataplane>> Dataplane::Start(const DataplaneOptions& options) {
  const std::size_t workers = options.worker_cpus.size();
  if (workers == 0 || workers > kMaxWorkers) {
    return Status(Code::kInvalidArgument,
                  std::to_string(workers) + " workers; use 1 to " + std::to_string(kMaxWorkers));
  }
  if (Status s = StartEal(options); !s.ok()) return s;
  auto dataplane = std::make_unique<DataplaneImpl>(options);
  if (Status s = dataplane->StartWorkers(); !s.ok()) return s;
  return Result<std::unique_ptr<Dataplane>>(std::move(dataplane));
}

}  // namespace rxtoken
