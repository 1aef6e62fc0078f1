// SPDX-License-Identifier: Apache-2.0
// worker.h - the thread that polls receive queues, lends what arrives and takes it back.
//
//   one round:  receive a burst from each queue -> parse, look up, lend; put IP fragments by
//               reassemble those, if the burst was full no more than half as many as it could hold
//               publish lanes with enough to show, or all of them when traffic is light
//               take returned tokens back from lanes that are due
//               run one command of the control thread
//
// The work of a round follows what happened in it, not how many rx sockets exist: only
// lanes with something unpublished, or with something outstanding, are on a list. Lots of 64
// for publishing and draining, although bursts are of 32, are worth 1.6 ns of 13.9 a packet;
// larger ones keep more pages in flight than the cache has room for; see bench/macro.
//
// Thread-safety: Call, Start and Stop by the control thread; all else by the worker.
// Blocks: never, except for naps of at most 100 us when idle in PollMode::kAdaptive.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "dataplane/buffer_pool.h"
#include "dataplane/dataplane.h"
#include "dataplane/flow_table.h"
#include "dataplane/parse.h"
#include "dataplane/port.h"
#include "dataplane/reassembler.h"
#include "dataplane/tsc_clock.h"
#include "tokens/lane.h"
#include "tokens/rcu.h"
#include "tokens/spsc_ring.h"

namespace rxtoken {

// A lane and what its worker needs to serve it. [w] except where it says otherwise.
struct RxLane {
  RxLane(std::uint32_t worker, SlotTable* slots, DescriptorRing* descriptors, ReturnRing* returns,
         const RxSocketOptions& options)
      : lane(worker, slots, descriptors, returns, options.max_held_fragments),
        content(options.content),
        restricted(!options.bindings.empty()),
        outside(options.outside) {}

  // A fragment of a message that waits for a free slot.
  struct Waiting {
    BufferPool* pool;
    LendItem item;
    std::uint64_t time_ns;
    // To be told if it is dropped. A rule may be gone by then.
    std::uint32_t queue;  // place in Worker::queues_
    std::uint64_t rule;   // id
  };

  bool MayUse(const BufferPool& pool) const noexcept {
    return !restricted || std::find(pools.begin(), pools.end(), &pool) != pools.end();
  }
  bool WaitsFor(const BufferPool& pool) const noexcept {
    return std::any_of(waiting.begin(), waiting.end(),
                       [&](const Waiting& w) { return w.pool == &pool; });
  }

  // How many of `n` more fragments of a pool it may be lent.
  std::uint32_t Allowance(const BufferPool& pool, std::uint32_t n) noexcept {
    if (&pool == copy_out) return lane.lease_lost() ? 0 : n;
    return lane.Allowance(n);
  }

  Lane lane;
  const Content content;
  const bool restricted;  // to `pools`
  const Outside outside;
  BufferPool* copy_out = nullptr;   // for what it may not hold; nullptr: that is dropped
  std::vector<BufferPool*> pools;   // of the bindings that it may use and that are not draining
  std::deque<Waiting> waiting;      // whole messages, in order of arrival
  std::uint64_t releases_seen = 0;  // of slots, when we last looked whether one is free
  bool attached = false;            // an application reads the rings
  bool to_publish = false;          // on Worker::to_publish_
  bool holding = false;             // on Worker::holding_
  int doorbell = -1;                // not owned
  std::uint64_t rung_ns = 0;
};

// A receive queue of a port, polled by one worker. [w]
struct RxQueue {
  Port* port = nullptr;
  std::uint32_t port_index = 0;
  std::uint16_t port_id = 0;
  std::uint16_t queue = 0;
  BufferPool* pool = nullptr;  // the binding; nullptr: none
  // Not 0: the driver must find that many free pages for each frame of a burst.
  std::uint32_t pages_per_frame = 0;
  bool low_water = false;  // few pages are free, and applications were told
  // The only lane that its frames can be for, if they are to wait while that has no room.
  RxLane* pausing = nullptr;
  bool paused = false;
  std::uint64_t pauses = 0;
  // The workers that poll the port, as bits: among them each datagram that comes in fragments has
  // one that reassembles it.
  std::uint32_t port_workers = 0;
  const FlowTable::Plan* plan = nullptr;
  std::uint64_t plan_serial = 0;  // of the table that `plan` belongs to
  std::uint64_t rx_packets = 0;
  std::uint64_t rx_bytes = 0;
  std::uint64_t copied_packets = 0;
  std::array<std::uint64_t, kDropReasons> drops = {};

  void Drop(DropReason reason) noexcept { drops[static_cast<std::size_t>(reason)]++; }
};

class Worker {
 public:
  // `table` outlives the worker, and so do its `peers`, all workers by index, while they run.
  // `cpu` -1: wherever the scheduler puts it.
  Worker(std::uint32_t index, int cpu, PollMode poll, const ReassemblyLimits& reassembly,
         const rcu::Pointer<FlowTable>* table, const std::vector<std::unique_ptr<Worker>>* peers);
  ~Worker();

  // Errors: kInvalidArgument  no such CPU, or we may not use it
  Status Start();
  void Stop();

  // Runs `f(worker)` on the worker, between two rounds, and returns when it has run.
  template <typename F>
  void Call(F f) {
    Post([](Worker& worker, void* argument) { (*static_cast<F*>(argument))(worker); }, &f);
  }

  // ---- inside Call() ----------------------------------------------------------------------
  void AddQueue(Port* port, std::uint32_t port_index, std::uint16_t queue,
                std::uint32_t port_workers);
  // Points a queue at a binding's pool, or at none.
  void Attach(const Port* port, std::uint16_t queue, BufferPool* pool);
  // The queue waits for the lane, or for none.
  void SetPausing(const Port* port, std::uint16_t queue, RxLane* lane);
  // Nothing is delivered to the lane any more, and nothing waits for it.
  void Unlist(RxLane& lane);
  // The binding is being unbound: nothing of it waits any more, and the application is told.
  void Unbound(RxLane& lane, BufferPool& pool);
  // Takes back what the lane was lent of a draining binding, looking at no more than `budget`
  // pages; true when nothing is left.
  bool Revoke(RxLane& lane, const PageTable& table, std::uint32_t budget);
  // Drops the fragments of the pool that are not handed over, or complete, yet: once all workers
  // have done so, and again, none keeps a page of it.
  void DropFragments(const BufferPool& pool);
  ReassemblyInfo reassembly() const noexcept;
  // Takes back those of `pages` that the lane was lent at `until` or before, but not what it has
  // given back already; how many fragments. As Lane::Expire.
  std::uint64_t Expire(RxLane& lane, std::uint32_t slot, std::uint32_t binding,
                       std::span<const std::uint32_t> pages, std::uint32_t until);
  // Precondition: the worker polls it.
  RxQueue& FindQueue(const Port* port, std::uint16_t queue);
  PageRecycler& recycler() noexcept { return recycler_; }

  std::uint32_t index() const noexcept { return index_; }
  int cpu() const noexcept { return cpu_; }

 private:
  static constexpr std::uint16_t kBurst = 32;
  static constexpr std::uint32_t kMaxSegments = 64;     // of a frame
  static constexpr std::uint32_t kLot = 64;             // fragments from drain to drain
  static constexpr std::uint32_t kFlushRounds = 8;      // a lot waits no longer than this
  static constexpr std::uint32_t kVisitRounds = 4;      // between visits of lanes that hold pages
  static constexpr std::uint32_t kWaterRounds = 256;    // between looks how many pages are free
  static constexpr std::uint64_t kDoorbellNs = 50'000;  // an application cannot have more
  static constexpr std::size_t kMaxWaiting = 256;       // fragments of a lane, for a free slot

  static constexpr std::uint32_t kFragmentBacklog = 256;
  // In `ol_flags` of a segment: it is a copy. A flag of the transmit side, which no received
  // frame has.
  static constexpr std::uint64_t kCopiedSegment = RTE_MBUF_F_TX_UDP_SEG;

  // What one worker leaves for another.
  struct Inbox {
    SpscRing<rte_mbuf*, kFragmentBacklog> fragments;
    SpscRing<rte_mbuf*, kFragmentBacklog> back;  // fragments of shared pages, which were copied
  };

  struct Command {
    void (*run)(Worker&, void*);
    void* argument;
    std::atomic<bool> done{false};
  };

  // One burst on its way to the lanes: frames for the same lane, one after the other.
  struct Run;

  void Post(void (*run)(Worker&, void*), void* argument);
  void Loop();
  bool Round();  // true if there was something to do
  void RunCommands();
  void Nap();

  std::uint32_t Receive(RxQueue& queue);
  static std::uint32_t FramesToAsk(RxQueue& queue);
  void UsePlan(RxQueue& queue);
  void ReceiveAllFrames(RxQueue& queue, CompiledRule& rule, RxLane& lane, rte_mbuf** mbufs,
                        std::uint32_t n);
  void ReceiveFrame(RxQueue& queue, rte_mbuf* mbuf, Run& run);
  static BufferPool* PoolOf(const RxQueue& queue, const rte_mbuf* mbuf) noexcept;
  static bool WantsDatagrams(const RuleTarget& target) noexcept;
  static rte_mbuf* CopyInto(BufferPool& pool, const rte_mbuf* mbuf);
  void DropUnmatched(RxQueue& queue, rte_mbuf* mbuf);
  static void RestoreVlanTag(rte_mbuf* mbuf);
  void Deliver(RxQueue& queue, const Run& run);
  void RefuseRun(RxQueue& queue, const Run& run, std::uint32_t from, DropReason reason);
  void DropRun(RxQueue& queue, const Run& run, std::uint32_t from, DropReason reason);
  void DeliverToEach(RxQueue& queue, RuleTarget& target, rte_mbuf* mbuf, const ParsedFrame& frame,
                     BufferPool* pool);
  DropReason DeliverInPlace(const RxQueue& queue, const RuleTarget& target, RxLane& lane,
                            BufferPool& pool, const rte_mbuf* mbuf, const ParsedFrame& frame);
  DropReason DeliverCopy(RxQueue& queue, const RuleTarget& target, RxLane& lane,
                         const rte_mbuf* mbuf, const ParsedFrame& frame);
  DropReason DeliverCopyIn(BufferPool& pool, RxQueue& queue, const RuleTarget& target, RxLane& lane,
                           const rte_mbuf* mbuf, const ParsedFrame& frame);
  DropReason CopyOut(RxQueue& queue, const RuleTarget& target, RxLane& lane, const rte_mbuf* mbuf,
                     const ParsedFrame& frame);
  static void Count(RxQueue& queue, RuleTarget& target, RxLane& lane, DropReason dropped,
                    bool copied);
  // worker_fragments.cc
  void PutFragmentBy(RxQueue& queue, rte_mbuf* mbuf, const ParsedFrame& frame);
  bool HandOver(std::uint32_t peer, rte_mbuf* mbuf);
  void GiveBack(std::uint32_t peer, rte_mbuf* mbuf);
  bool ReadInboxes();
  bool Reassemble(bool full_burst);
  struct NextFragment;
  NextFragment PrepareFragment(rte_mbuf* mbuf);
  void LimitFragments();
  void DeliverDatagram(RxQueue& queue, rte_mbuf* mbuf);
  RxQueue& QueueOf(const rte_mbuf* mbuf) noexcept;

  void KeepChain(BufferPool& pool, const rte_mbuf* mbuf);
  static void EndChain(BufferPool& pool, rte_mbuf* mbuf);
  static void Recycle(rte_mbuf* mbuf);
  bool Wait(const RxQueue& queue, const RuleTarget& target, RxLane& lane, BufferPool& pool,
            std::span<const LendItem> items);
  bool DeliverWaiting(RxLane& lane);
  template <typename Predicate>
  void DropWaitingIf(RxLane& lane, Predicate predicate);

  void List(RxLane& lane);
  void Lent(RxLane& lane, std::uint32_t fragments);
  void PublishAll();
  bool VisitHolding(std::size_t n);
  void TellLowWater();
  void RingDoorbell(RxLane& lane);

  // [ctl] before Start, then constant
  const std::uint32_t index_;
  const int cpu_;
  const PollMode poll_;
  const rcu::Pointer<FlowTable>* const table_;
  const std::vector<std::unique_ptr<Worker>>* const peers_;

  // [peers>w]
  std::vector<std::unique_ptr<Inbox>> inboxes_;                    // by peer; none of our own
  alignas(kWriterAlignBytes) std::atomic<std::uint32_t> mail_{0};  // bits of peers that left some

  // [ctl>w]
  std::atomic<bool> stop_{false};
  SpscRing<Command*, 16> commands_;
  std::thread thread_;

  // [w]
  TscClock clock_;
  std::uint64_t now_ns_ = 0;
  std::vector<RxQueue> queues_;
  std::vector<RxLane*> to_publish_;
  std::vector<RxLane*> holding_;
  std::size_t visit_ = 0;  // place in holding_
  std::uint32_t round_ = 0;
  std::uint32_t idle_rounds_ = 0;
  PageRecycler recycler_;
  Reassembler reassembler_;
  std::deque<rte_mbuf*> fragments_;      // to be reassembled here
  std::vector<std::uint32_t> lent_out_;  // frames of shared pages that a peer copies, by peer
  std::uint32_t fragment_pages_ = 0;     // that reassembly may keep
  std::uint64_t handed_over_ = 0;
};

}  // namespace rxtoken
