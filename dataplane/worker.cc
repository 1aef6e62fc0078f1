// SPDX-License-Identifier: Apache-2.0
#include "dataplane/worker.h"

#include <pthread.h>
#include <rte_byteorder.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <ctime>
#include <string>

#include "dataplane/parse.h"
#include "tokens/worker_id.h"

namespace rxtoken {

// Frames of one burst that go to the same lane, each on one page of the same pool.
struct Worker::Run {
  RxLane* lane = nullptr;
  BufferPool* pool = nullptr;
  std::uint32_t n = 0;
  std::array<LendItem, kBurst> items;
  std::array<RuleTarget*, kBurst> targets;

  void Start(RxLane* new_lane, BufferPool* new_pool) noexcept {
    lane = new_lane;
    pool = new_pool;
    n = 0;
  }
};

Worker::Worker(std::uint32_t index, int cpu, PollMode poll, const ReassemblyLimits& reassembly,
               const rcu::Pointer<FlowTable>* table,
               const std::vector<std::unique_ptr<Worker>>* peers)
    : index_(index),
      cpu_(cpu),
      poll_(poll),
      table_(table),
      peers_(peers),
      reassembler_({.datagrams = std::bit_ceil(reassembly.datagrams),
                    .pages = reassembly.pages,
                    .cells = reassembly.pages,
                    .timeout_ns = std::uint64_t{reassembly.timeout_ms} * 1'000'000},
                   Recycle) {}

Worker::~Worker() { Stop(); }

Status Worker::Start() {
  if (cpu_ >= 0) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    ::sched_getaffinity(0, sizeof allowed, &allowed);
    if (cpu_ >= CPU_SETSIZE || !CPU_ISSET(static_cast<unsigned>(cpu_), &allowed)) {
      return Status(Code::kInvalidArgument,
                    "worker " + std::to_string(index_) + ": CPU " + std::to_string(cpu_) +
                        " does not exist, or this process may not run on it");
    }
  }
  if (!reassembler_.ok()) {
    return Status(Code::kResourceExhausted,
                  "worker " + std::to_string(index_) +
                      ": no memory for reassembly; lower reassembly.datagrams or reassembly.pages");
  }
  for (std::size_t peer = 0; peer < peers_->size(); peer++) {
    inboxes_.push_back(peer == index_ ? nullptr : std::make_unique<Inbox>());
  }
  lent_out_.resize(peers_->size());
  thread_ = std::thread([this] { Loop(); });
  const std::string name = "rxtoken/w" + std::to_string(index_);
  ::pthread_setname_np(thread_.native_handle(), name.c_str());
  return Status();
}

void Worker::Stop() {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void Worker::Post(void (*run)(Worker&, void*), void* argument) {
  Command command{.run = run, .argument = argument};
  // The ring cannot be full: the control thread waits for each command.
  commands_.TryPush(&command);
  command.done.wait(false, std::memory_order_acquire);
}

void Worker::Loop() {
  this_worker = index_;
  if (cpu_ >= 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(cpu_), &one);
    ::sched_setaffinity(0, sizeof one, &one);
  }
  ::prctl(PR_SET_TIMERSLACK, 1000ul);  // ns: naps end when they should
  rte_thread_register();
  rcu::RegisterReader();
  while (!stop_.load(std::memory_order_relaxed)) {
    const bool busy = Round();
    rcu::Quiescent();
    idle_rounds_ = busy ? 0 : idle_rounds_ + 1;
    if (!busy) Nap();
  }
  reassembler_.DropIf([](const rte_mempool*) { return true; });
  for (rte_mbuf* mbuf : fragments_) Recycle(mbuf);
  rcu::UnregisterReader();
  rte_thread_unregister();
}

// Spins for the first rounds without traffic, then naps, longer and longer. 100 us is less
// than what a ring of 512 takes at 5 million packets a second.
void Worker::Nap() {
  constexpr std::uint32_t kSpinRounds = 2000;
  if (poll_ == PollMode::kBusy || idle_rounds_ < kSpinRounds) return rte_pause();
  const long ns = std::min<long>(100'000, 5'000 + 1'000l * (idle_rounds_ - kSpinRounds));
  const timespec duration{.tv_sec = 0, .tv_nsec = ns};
  ::clock_nanosleep(CLOCK_MONOTONIC, 0, &duration, nullptr);
}

bool Worker::Round() {
  std::uint32_t received = 0;
  bool full_burst = false;
  for (RxQueue& queue : queues_) {
    const std::uint32_t n = Receive(queue);
    received += n;
    full_burst |= n == kBurst;
  }
  round_++;
  // Light traffic: nothing is gained by waiting for a lot.
  if (!full_burst || round_ % kFlushRounds == 0) PublishAll();
  bool busy = received != 0;
  if (mail_.load(std::memory_order_relaxed) != 0) [[unlikely]]
    busy |= ReadInboxes();
  if (!fragments_.empty() || reassembler_.datagrams() != 0) [[unlikely]] {
    if (received == 0) now_ns_ = clock_.Now();
    busy |= Reassemble(full_burst);
  }
  if (!holding_.empty() && (!full_burst || round_ % kVisitRounds == 0)) {
    if (received == 0) now_ns_ = clock_.Now();
    busy |= VisitHolding(received == 0 ? 32 : 1);
  }
  if (round_ % kWaterRounds == 0) TellLowWater();
  RunCommands();
  return busy;
}

void Worker::RunCommands() {
  while (const std::optional<Command*> command = commands_.TryPop()) {
    (*command)->run(*this, (*command)->argument);
    (*command)->done.store(true, std::memory_order_release);
    (*command)->done.notify_one();
  }
}

// ---- receiving -----------------------------------------------------------------------------

std::uint32_t Worker::Receive(RxQueue& queue) {
  rte_mbuf* mbufs[kBurst];
  std::uint16_t burst = kBurst;
  if (queue.pages_per_frame != 0) [[unlikely]] {
    burst = static_cast<std::uint16_t>(queue.pool->Reserve(kBurst * queue.pages_per_frame) /
                                       queue.pages_per_frame);
    if (burst == 0) return 0;  // the frames wait in the driver's ring
  }
  if (queue.pausing != nullptr) [[unlikely]] {
    burst = static_cast<std::uint16_t>(std::min<std::uint32_t>(burst, FramesToAsk(queue)));
    if (burst == 0) return 0;
  }
  const std::uint32_t n = rte_eth_rx_burst(queue.port_id, queue.queue, mbufs, burst);
  if (n == 0) return 0;
  now_ns_ = clock_.Now();
  UsePlan(queue);
  queue.rx_packets += n;
  if (!queue.plan->empty() && queue.plan->front()->matches_all()) {
    CompiledRule* const rule = queue.plan->front()->Find(FlowKey{});
    RxLane* const lane = rule == nullptr ? nullptr : rule->targets[index_].lane;
    if (lane != nullptr && lane->content == Content::kFrame) {
      ReceiveAllFrames(queue, *rule, *lane, mbufs, n);
      return n;
    }
  }
  Run run;
  constexpr std::uint32_t kAhead = 4;
  for (std::uint32_t i = 0; i < std::min(kAhead, n); i++) {
    rte_prefetch0(rte_pktmbuf_mtod(mbufs[i], void*));
  }
  for (std::uint32_t i = 0; i < n; i++) {
    if (i + kAhead < n) rte_prefetch0(rte_pktmbuf_mtod(mbufs[i + kAhead], void*));
    ReceiveFrame(queue, mbufs[i], run);
  }
  Deliver(queue, run);
  return n;
}

// Makes the queue's plan that of the rules as they are now.
void Worker::UsePlan(RxQueue& queue) {
  const FlowTable* table = table_->Read();
  if (queue.plan_serial != table->serial()) [[unlikely]] {
    queue.plan = &table->plan(queue.port_index, queue.queue);
    queue.plan_serial = table->serial();
  }
}

// How many frames the only lane that gets them has room for, each as large as the port takes.
std::uint32_t Worker::FramesToAsk(RxQueue& queue) {
  constexpr std::uint32_t kAnnouncements = 8;  // more than one burst can need
  RxLane& lane = *queue.pausing;
  if (!lane.attached || queue.pool == nullptr) return kBurst;  // dropped, whatever it is
  const std::uint32_t pages = queue.port->max_frame_bytes() / queue.pool->room_bytes() + 1;
  const std::uint32_t room = lane.lane.Room(kBurst * pages + kAnnouncements);
  std::uint32_t frames = lane.lane.Spare(room - std::min(room, kAnnouncements)) / pages;
  if (!lane.waiting.empty()) {
    frames = 0;
  } else if (frames == 0 && room != 0 && lane.lane.outstanding() == 0 && !lane.lane.lease_lost()) {
    frames = 1;  // it can have no more room than it has
  }
  queue.pauses += frames == 0 && !queue.paused;
  queue.paused = frames == 0;
  return frames;
}

// Every frame goes to one rx socket, whole: there is nothing to parse.
void Worker::ReceiveAllFrames(RxQueue& queue, CompiledRule& rule, RxLane& lane, rte_mbuf** mbufs,
                              std::uint32_t n) {
  Run run;
  run.Start(&lane, queue.pool);
  std::uint64_t bytes = 0;
  if (queue.pool != nullptr) {
    const BufferPool& pool = *queue.pool;
    for (; run.n < n; run.n++) {
      const rte_mbuf* const mbuf = mbufs[run.n];
      if (mbuf->pool != pool.mempool() || mbuf->nb_segs != 1 ||
          (mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED) != 0) [[unlikely]] {
        break;
      }
      bytes += mbuf->data_len;
      const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
      run.targets[run.n] = &rule.targets[index_];
      run.items[run.n] = {.flags = kWholeFrame,
                          .page = pool.PageOf(data),
                          .offset = static_cast<std::uint16_t>(pool.OffsetOf(data)),
                          .length = mbuf->data_len};
    }
  }
  const std::uint32_t plain = run.n;
  rule.targets[index_].Count(plain, bytes);
  queue.rx_bytes += bytes;
  for (std::uint32_t i = plain; i < n; i++) ReceiveFrame(queue, mbufs[i], run);
  Deliver(queue, run);
}

// The driver took the VLAN tag out (af_packet does: the kernel hands it over beside the frame).
// Applications get frames as they were on the wire, so it goes back, into the headroom.
void Worker::RestoreVlanTag(rte_mbuf* mbuf) {
  constexpr std::size_t kAddressBytes = 2 * RTE_ETHER_ADDR_LEN;
  auto* const frame = reinterpret_cast<std::uint8_t*>(rte_pktmbuf_prepend(mbuf, RTE_VLAN_HLEN));
  if (frame == nullptr) return;
  std::memmove(frame, frame + RTE_VLAN_HLEN, kAddressBytes);
  const std::array<rte_be16_t, 2> tag = {rte_cpu_to_be_16(RTE_ETHER_TYPE_VLAN),
                                         rte_cpu_to_be_16(mbuf->vlan_tci)};
  std::memcpy(frame + kAddressBytes, tag.data(), sizeof tag);
  mbuf->ol_flags &= ~RTE_MBUF_F_RX_VLAN_STRIPPED;
}

void Worker::ReceiveFrame(RxQueue& queue, rte_mbuf* mbuf, Run& run) {
  if ((mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED) != 0) [[unlikely]]
    RestoreVlanTag(mbuf);
  queue.rx_bytes += mbuf->pkt_len;
  const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
  ParsedFrame frame;
  const ParseStatus parsed = ParseFrame(data, mbuf->data_len, mbuf->pkt_len, frame);
  if (parsed != ParseStatus::kOk) [[unlikely]] {
    queue.Drop(parsed == ParseStatus::kTruncated ? DropReason::kTruncated : DropReason::kMalformed);
    return Recycle(mbuf);
  }
  CompiledRule* rule;
  if (frame.is_fragment) [[unlikely]] {
    const auto certain = FlowTable::LookupFragment(*queue.plan, frame.key);
    if (!certain || (*certain != nullptr && WantsDatagrams((*certain)->targets[index_]))) {
      return PutFragmentBy(queue, mbuf, frame);
    }
    rule = *certain;  // which wants frames as they are on the wire
  } else {
    rule = FlowTable::Lookup(*queue.plan, frame.key);
  }
  if (rule == nullptr) [[unlikely]]
    return DropUnmatched(queue, mbuf);
  BufferPool* const pool = PoolOf(queue, mbuf);
  RuleTarget& target = rule->targets[index_];
  target.Count(1, mbuf->pkt_len);
  RxLane* const lane = target.lane;
  if (lane == nullptr || pool == nullptr || mbuf->nb_segs != 1) [[unlikely]] {
    Deliver(queue, run);  // what came before
    run.n = 0;
    return DeliverToEach(queue, target, mbuf, frame, pool);
  }
  if (run.lane != lane || run.pool != pool || run.n == kBurst) {
    Deliver(queue, run);
    run.Start(lane, pool);
  }
  const bool whole = !frame.udp || lane->content == Content::kFrame;
  const std::uint32_t skip = whole ? 0 : frame.payload_offset;
  run.targets[run.n] = &target;
  run.items[run.n++] = {.flags = whole ? kWholeFrame : std::uint8_t{0},
                        .ip_header_distance = whole ? std::uint8_t{0} : frame.ip_header_distance,
                        .page = pool->PageOf(data),
                        .offset = static_cast<std::uint16_t>(pool->OffsetOf(data) + skip),
                        .length = whole ? mbuf->data_len : frame.payload_length};
}

bool Worker::WantsDatagrams(const RuleTarget& target) noexcept {
  return std::any_of(target.all().begin(), target.all().end(),
                     [](const RxLane* lane) { return lane->content != Content::kFrame; });
}

// The binding that the frame lies in; nullptr: it can only be copied. The driver may have taken
// the memory before the queue got its binding: from the binding that had the queue before, whose
// pages serve as well, or from the sink. And the queue may have moved between two segments.
BufferPool* Worker::PoolOf(const RxQueue& queue, const rte_mbuf* mbuf) noexcept {
  BufferPool* pool = queue.pool;
  if (pool == nullptr || mbuf->pool != pool->mempool()) [[unlikely]] {
    pool = BufferPool::Of(mbuf->pool);
    if (pool != nullptr && pool->draining()) pool = nullptr;
  }
  if (mbuf->nb_segs == 1) [[likely]]
    return pool;  // `next` lies in another line, which is not needed
  for (const rte_mbuf* more = mbuf->next; more != nullptr; more = more->next) {
    if (more->pool != mbuf->pool) pool = nullptr;
  }
  return pool;
}

void Worker::DropUnmatched(RxQueue& queue, rte_mbuf* mbuf) {
  ExceptionPath* const path = queue.port->exception_path();
  if (path == nullptr || !path->Send(mbuf)) {
    queue.Drop(queue.pool == nullptr ? DropReason::kNoBinding : DropReason::kNoRule);
  }
  Recycle(mbuf);
}

void Worker::Deliver(RxQueue& queue, const Run& run) {
  if (run.n == 0) return;
  RxLane& lane = *run.lane;
  BufferPool& pool = *run.pool;
  if (!lane.attached) [[unlikely]]
    return DropRun(queue, run, 0, DropReason::kNotAttached);
  const std::uint32_t room = lane.lane.Room(run.n);
  const std::uint32_t n = lane.lane.Allowance(room);
  const DropReason reason = n == room ? DropReason::kRingFull : lane.lane.WhyNotMore();
  if (n == 0) [[unlikely]] {
    List(lane);  // it may have been told
    return RefuseRun(queue, run, 0, reason);
  }
  const auto items = std::span(run.items.data(), n);
  if ((!lane.waiting.empty() && lane.WaitsFor(pool)) ||
      !lane.lane.Lend(pool.table(), items, now_ns_)) [[unlikely]] {
    std::uint32_t waiting = 0;
    while (waiting < n &&
           Wait(queue, *run.targets[waiting], lane, pool, items.subspan(waiting, 1))) {
      pool.EndFrame(items[waiting++].page);
    }
    if (waiting != n) return DropRun(queue, run, waiting, DropReason::kNoSlot);
  } else {
    if (pool.frames_per_page() != 1) {
      for (const LendItem& item : items) pool.EndFrame(item.page);
    }
    lane.lane.counters().messages += n;
    Lent(lane, n);
  }
  if (n != run.n) [[unlikely]]
    RefuseRun(queue, run, n, reason);
}

// What a lane does not take, it may have copied.
void Worker::RefuseRun(RxQueue& queue, const Run& run, std::uint32_t from, DropReason reason) {
  RxLane& lane = *run.lane;
  if (reason != DropReason::kHeldLimit || lane.copy_out == nullptr) {
    return DropRun(queue, run, from, reason);
  }
  for (std::uint32_t i = from; i < run.n; i++) {
    const LendItem& item = run.items[i];
    const rte_mbuf* const mbuf = run.pool->MbufOf(item.page, item.offset);
    ParsedFrame frame;  // stays empty for a frame that cannot be parsed, which is delivered whole
    ParseFrame(rte_pktmbuf_mtod(mbuf, const std::uint8_t*), mbuf->data_len, mbuf->pkt_len, frame);
    Count(queue, *run.targets[i], lane, CopyOut(queue, *run.targets[i], lane, mbuf, frame), true);
    run.pool->EndFrame(item.page);
  }
}

void Worker::DropRun(RxQueue& queue, const Run& run, std::uint32_t from, DropReason reason) {
  const std::uint32_t n = run.n - from;
  queue.drops[static_cast<std::size_t>(reason)] += n;
  run.lane->lane.counters().drops[static_cast<std::size_t>(reason)] += n;
  for (std::uint32_t i = from; i < run.n; i++) RuleTarget::Add(run.targets[i]->drops, 1);
  BufferPool& pool = *run.pool;
  if (pool.frames_per_page() == 1) {
    auto give = recycler_.Open(pool.table());
    for (std::uint32_t i = from; i < run.n; i++) give(run.items[i].page);
  } else {
    for (std::uint32_t i = from; i < run.n; i++) pool.EndFrame(run.items[i].page);
  }
}

// ---- frames that need more than that -----------------------------------------------------------

// One frame to each rx socket of a rule: in place if it lies in `pool` and the rx socket may use
// that, else as a copy.
void Worker::DeliverToEach(RxQueue& queue, RuleTarget& target, rte_mbuf* mbuf,
                           const ParsedFrame& frame, BufferPool* pool) {
  if (pool != nullptr) KeepChain(*pool, mbuf);
  for (RxLane* const lane : target.all()) {
    bool copied = pool == nullptr || !lane->MayUse(*pool);
    DropReason dropped = copied ? DeliverCopy(queue, target, *lane, mbuf, frame)
                                : DeliverInPlace(queue, target, *lane, *pool, mbuf, frame);
    if (dropped == DropReason::kHeldLimit && lane->copy_out != nullptr) {
      dropped = CopyOut(queue, target, *lane, mbuf, frame);
      copied = true;
    }
    Count(queue, target, *lane, dropped, copied);
  }
  if (pool != nullptr) {
    EndChain(*pool, mbuf);
  } else {
    rte_pktmbuf_free(mbuf);
  }
}

void Worker::Count(RxQueue& queue, RuleTarget& target, RxLane& lane, DropReason dropped,
                   bool copied) {
  if (dropped != DropReason::kCount) {
    queue.Drop(dropped);
    lane.lane.counters().drops[static_cast<std::size_t>(dropped)]++;
    RuleTarget::Add(target.drops, 1);
  } else if (copied) {
    lane.lane.counters().copied_messages++;
    RuleTarget::Add(target.copied, 1);
  }
}

// Lends a frame of `pool` as one message, a fragment for each of its segments. kCount: done.
DropReason Worker::DeliverInPlace(const RxQueue& queue, const RuleTarget& target, RxLane& lane,
                                  BufferPool& pool, const rte_mbuf* mbuf,
                                  const ParsedFrame& frame) {
  if (!lane.attached) return DropReason::kNotAttached;
  if (mbuf->nb_segs > kMaxSegments) return DropReason::kTooManySegments;
  const bool whole = !frame.udp || lane.content == Content::kFrame;
  const std::uint8_t flags = whole ? kWholeFrame : 0;
  std::uint32_t left = whole ? mbuf->pkt_len : frame.payload_length;
  std::uint32_t skip = whole ? 0 : frame.payload_offset;
  std::uint8_t distance = whole ? std::uint8_t{0} : frame.ip_header_distance;
  std::array<LendItem, kMaxSegments> items;
  std::uint32_t n = 0;
  for (; mbuf != nullptr && (left != 0 || n == 0); mbuf = mbuf->next) {
    const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
    const std::uint32_t length = std::min(left, mbuf->data_len - skip);
    left -= length;
    const bool copied = (mbuf->ol_flags & kCopiedSegment) != 0;
    items[n++] = {.flags = static_cast<std::uint8_t>(flags | (left != 0 ? kMoreFragments : 0) |
                                                     (copied ? kCopied : 0)),
                  .ip_header_distance = distance,
                  .page = pool.PageOf(data),
                  .offset = static_cast<std::uint16_t>(pool.OffsetOf(data) + skip),
                  .length = static_cast<std::uint16_t>(length)};
    skip = distance = 0;
  }
  const auto message = std::span<const LendItem>(items.data(), n);
  if (lane.lane.Room(n) != n) return DropReason::kRingFull;
  if (lane.Allowance(pool, n) != n) {
    List(lane);  // it may have been told
    return lane.lane.WhyNotMore();
  }
  if (lane.WaitsFor(pool) || !lane.lane.Lend(pool.table(), message, now_ns_)) {
    return Wait(queue, target, lane, pool, message) ? DropReason::kCount : DropReason::kNoSlot;
  }
  lane.lane.counters().messages++;
  Lent(lane, n);
  return DropReason::kCount;
}

// Delivers a copy, in pages that the rx socket may use. kCount: done.
DropReason Worker::DeliverCopy(RxQueue& queue, const RuleTarget& target, RxLane& lane,
                               const rte_mbuf* mbuf, const ParsedFrame& frame) {
  BufferPool* pool = queue.pool;
  if (lane.restricted && (pool == nullptr || !lane.MayUse(*pool))) {
    if (lane.outside == Outside::kDrop || lane.pools.empty()) return DropReason::kOutside;
    pool = lane.pools.front();
  }
  if (pool == nullptr) return DropReason::kNoBinding;
  return DeliverCopyIn(*pool, queue, target, lane, mbuf, frame);
}

DropReason Worker::DeliverCopyIn(BufferPool& pool, RxQueue& queue, const RuleTarget& target,
                                 RxLane& lane, const rte_mbuf* mbuf, const ParsedFrame& frame) {
  if (!lane.attached) return DropReason::kNotAttached;
  rte_mbuf* const copy = CopyInto(pool, mbuf);
  if (copy == nullptr) return DropReason::kNoPage;
  KeepChain(pool, copy);
  const DropReason dropped = DeliverInPlace(queue, target, lane, pool, copy, frame);
  queue.copied_packets += dropped == DropReason::kCount;
  EndChain(pool, copy);
  return dropped;
}

// For a frame that the lane may not hold: a copy in its own buffer. kCount: done.
DropReason Worker::CopyOut(RxQueue& queue, const RuleTarget& target, RxLane& lane,
                           const rte_mbuf* mbuf, const ParsedFrame& frame) {
  const DropReason dropped = DeliverCopyIn(*lane.copy_out, queue, target, lane, mbuf, frame);
  return dropped == DropReason::kNoPage ? DropReason::kHeldLimit : dropped;
}

// nullptr: no free page.
rte_mbuf* Worker::CopyInto(BufferPool& pool, const rte_mbuf* mbuf) {
  rte_mbuf* const copy = rte_pktmbuf_copy(mbuf, pool.mempool(), 0, mbuf->pkt_len);
  for (rte_mbuf* segment = copy; segment != nullptr; segment = segment->next) {
    // External it is, which rte_pktmbuf_copy() took off.
    segment->ol_flags |= RTE_MBUF_F_EXTERNAL | kCopiedSegment;
  }
  return copy;
}

// A frame of `pool` is about to be lent, perhaps several times. Its pages stay until EndChain():
// between two lendings we also take back, and an application may return, or guess, a token of it.
void Worker::KeepChain(BufferPool& pool, const rte_mbuf* mbuf) {
  if (pool.frames_per_page() != 1) return;  // each frame has a share already
  for (; mbuf != nullptr; mbuf = mbuf->next) pool.TakeShare(index_, pool.PageOf(mbuf->buf_addr));
}

// It was lent as often as it will be: from here on each of its pages comes back by itself.
void Worker::EndChain(BufferPool& pool, rte_mbuf* mbuf) {
  while (mbuf != nullptr) {
    rte_mbuf* const next = mbuf->next;
    mbuf->next = nullptr;
    mbuf->nb_segs = 1;
    mbuf->ol_flags &= ~kCopiedSegment;
    pool.DropShare(pool.PageOf(mbuf->buf_addr));
    mbuf = next;
  }
}

void Worker::Recycle(rte_mbuf* mbuf) {
  BufferPool* const pool = BufferPool::Of(mbuf->pool);
  if (pool == nullptr || mbuf->nb_segs != 1) return rte_pktmbuf_free(mbuf);
  pool->EndFrame(pool->PageOf(mbuf->buf_addr));
}

// ---- waiting for a slot ------------------------------------------------------------------------

// Keeps the fragments of one message until their binding has a slot. False: too many wait.
bool Worker::Wait(const RxQueue& queue, const RuleTarget& target, RxLane& lane, BufferPool& pool,
                  std::span<const LendItem> items) {
  if (lane.waiting.size() + items.size() > kMaxWaiting) return false;
  for (const LendItem& item : items) {
    pool.TakeShare(index_, item.page);
    lane.waiting.push_back({.pool = &pool,
                            .item = item,
                            .time_ns = now_ns_,
                            .queue = static_cast<std::uint32_t>(&queue - queues_.data()),
                            .rule = target.rule});
  }
  List(lane);
  return true;
}

// Delivers what waits and has a slot now, each binding's messages in their order. True if there
// was something.
bool Worker::DeliverWaiting(RxLane& lane) {
  const std::uint64_t releases = lane.lane.slot_releases();
  if (releases == lane.releases_seen) return false;
  lane.releases_seen = releases;
  std::array<LendItem, kMaxSegments> items;
  std::vector<const BufferPool*> stuck;  // must go on waiting, so that order is kept
  std::deque<RxLane::Waiting> left;
  const std::size_t before = lane.waiting.size();
  for (std::size_t at = 0; at < before;) {
    BufferPool& pool = *lane.waiting[at].pool;
    std::uint32_t n = 0;
    do {
      items[n] = lane.waiting[at + n].item;
    } while ((items[n++].flags & kMoreFragments) != 0);
    const auto message = std::span<const LendItem>(items.data(), n);
    const bool room = lane.lane.Room(n) == n && lane.Allowance(pool, n) == n;
    if (!room) lane.releases_seen = ~releases;  // not for want of a slot: try again
    if (room && std::find(stuck.begin(), stuck.end(), &pool) == stuck.end() &&
        lane.lane.Lend(pool.table(), message, lane.waiting[at].time_ns)) {
      for (const LendItem& item : message) pool.DropShare(item.page);
      lane.lane.counters().messages++;
      Lent(lane, n);
    } else {
      stuck.push_back(&pool);
      left.insert(left.end(), lane.waiting.begin() + at, lane.waiting.begin() + at + n);
    }
    at += n;
  }
  lane.waiting = std::move(left);
  return lane.waiting.size() != before;
}

template <typename Predicate>
void Worker::DropWaitingIf(RxLane& lane, Predicate predicate) {
  std::erase_if(lane.waiting, [&](const RxLane::Waiting& waiting) {
    if (!predicate(waiting)) return false;
    waiting.pool->DropShare(waiting.item.page);
    if ((waiting.item.flags & kMoreFragments) != 0) return true;  // counted with the last
    queues_[waiting.queue].Drop(DropReason::kNoSlot);
    lane.lane.counters().drops[static_cast<std::size_t>(DropReason::kNoSlot)]++;
    table_->Read()->ForEach([&](CompiledRule& rule) {
      if (rule.rule.id == waiting.rule) RuleTarget::Add(rule.targets[index_].drops, 1);
    });
    return true;
  });
}

// ---- publishing and taking back --------------------------------------------------------------

// Has the lane published, and visited while it holds something.
void Worker::List(RxLane& lane) {
  if (!lane.to_publish) {
    lane.to_publish = true;
    to_publish_.push_back(&lane);
  }
  if (!lane.holding) {
    lane.holding = true;
    holding_.push_back(&lane);
  }
}

void Worker::Lent(RxLane& lane, std::uint32_t fragments) {
  List(lane);
  if (lane.lane.unpublished() >= kLot) {
    lane.lane.Publish();
    lane.lane.Drain(recycler_, now_ns_);
  }
  lane.lane.PrefetchRing(fragments);
}

void Worker::PublishAll() {
  for (RxLane* lane : to_publish_) {
    if (lane->lane.unpublished() != 0) lane->lane.Publish();
    if (lane->lane.WantsDoorbell()) [[unlikely]]
      RingDoorbell(*lane);
    lane->to_publish = false;
  }
  to_publish_.clear();
}

// Tells those who hold pages of a binding that few are free, once each time that it gets so.
void Worker::TellLowWater() {
  for (std::size_t i = 0; i < queues_.size(); i++) {
    RxQueue& queue = queues_[i];
    if (queue.pool == nullptr) continue;
    BufferPool& pool = *queue.pool;
    const std::uint32_t free = pool.pages().available();
    const std::uint32_t pages = pool.buffer().pages();
    const bool was_low = queue.low_water;
    queue.low_water = free < (was_low ? pages / 4 : pages / 8);
    // Another queue of the binding says it for all.
    const auto before = std::span(queues_).first(i);
    if (was_low || !queue.low_water ||
        std::any_of(before.begin(), before.end(),
                    [&](const RxQueue& other) { return other.pool == &pool; })) {
      continue;
    }
    for (std::size_t at = 0; at < holding_.size(); at++) {
      if (holding_[at]->lane.LowWater(pool.table())) List(*holding_[at]);
    }
  }
}

// Looks after the next `n` lanes that have something outstanding, in turn. True if one of
// them had returned something or waits for its doorbell.
bool Worker::VisitHolding(std::size_t n) {
  bool busy = false;
  for (n = std::min(n, holding_.size()); n != 0; n--) {
    if (visit_ >= holding_.size()) visit_ = 0;
    RxLane& lane = *holding_[visit_];
    const bool drained = lane.lane.Drain(recycler_, now_ns_) != 0;
    busy |= drained;
    if (!lane.waiting.empty()) [[unlikely]]
      busy |= DeliverWaiting(lane);
    if (lane.lane.events_waiting()) [[unlikely]] {
      lane.lane.WriteEvents();
      List(lane);
    }
    if (lane.lane.WantsDoorbell()) {
      RingDoorbell(lane);
      busy = true;
    }
    // What was returned too often is read and refused before the lane is left alone.
    if (!drained && lane.waiting.empty() && lane.lane.Settled()) {
      lane.holding = false;
      holding_[visit_] = holding_.back();
      holding_.pop_back();
    } else {
      visit_++;
    }
  }
  return busy;
}

// An application may ask for doorbells as fast as it likes; it does not get them so. A ring
// that is put off happens on a later visit, since the lane is not settled until it has read.
void Worker::RingDoorbell(RxLane& lane) {
  if (now_ns_ - lane.rung_ns < kDoorbellNs) return;
  lane.rung_ns = now_ns_;
  // Before the ring: once that has woken the application, it may go to sleep again, and its
  // next wish must not count as fulfilled.
  lane.lane.Rung();
  const char ring = 1;
  // A full socket is as good as a ring; a socket, because a pipe's or an eventfd's writer can
  // be made to block by the other side.
  (void)!::send(lane.doorbell, &ring, sizeof ring, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// ---- commands --------------------------------------------------------------------------------

void Worker::AddQueue(Port* port, std::uint32_t port_index, std::uint16_t queue,
                      std::uint32_t port_workers) {
  RxQueue added;
  added.port_workers = port_workers;
  added.port = port;
  added.port_index = port_index;
  added.port_id = port->id();
  added.queue = queue;
  queues_.push_back(added);
}

RxQueue& Worker::FindQueue(const Port* port, std::uint16_t queue) {
  return *std::find_if(queues_.begin(), queues_.end(),
                       [&](const RxQueue& q) { return q.port == port && q.queue == queue; });
}

void Worker::Attach(const Port* port, std::uint16_t queue, BufferPool* pool) {
  RxQueue& q = FindQueue(port, queue);
  if (q.pool != nullptr) q.pool->DropLoose();
  q.pool = pool;
  LimitFragments();
  q.pages_per_frame = 0;
  q.low_water = false;
  if (pool != nullptr) {
    if (port->forgets_unfinished_frames()) {
      q.pages_per_frame = port->max_frame_bytes() / pool->room_bytes() + 1;
    }
    q.port->Attach(queue, pool->mempool());
  } else {
    q.port->Detach(queue);
  }
}

void Worker::SetPausing(const Port* port, std::uint16_t queue, RxLane* lane) {
  RxQueue& q = FindQueue(port, queue);
  q.pausing = lane;
  q.paused = false;
}

void Worker::Unlist(RxLane& lane) {
  lane.attached = false;
  std::erase(to_publish_, &lane);
  std::erase(holding_, &lane);
  lane.to_publish = lane.holding = false;
  DropWaitingIf(lane, [](const RxLane::Waiting&) { return true; });
}

void Worker::Unbound(RxLane& lane, BufferPool& pool) {
  std::erase(lane.pools, &pool);
  DropWaitingIf(lane, [&](const RxLane::Waiting& waiting) { return waiting.pool == &pool; });
  if (lane.lane.Unbound(pool.table())) List(lane);
}

std::uint64_t Worker::Expire(RxLane& lane, std::uint32_t slot, std::uint32_t binding,
                             std::span<const std::uint32_t> pages, std::uint32_t until) {
  now_ns_ = clock_.Now();
  // A ring full, and no more, however fast it is filled.
  for (std::uint32_t n = 0; n <= kMaxRingEntries; n += Lane::kDrainTokens) {
    if (lane.lane.Drain(recycler_, now_ns_) == 0) break;
  }
  const std::uint64_t expired = lane.lane.Expire(slot, binding, pages, until, recycler_);
  List(lane);
  return expired;
}

bool Worker::Revoke(RxLane& lane, const PageTable& table, std::uint32_t budget) {
  const bool done = lane.lane.Revoke(table, budget, recycler_);
  List(lane);
  return done;
}

}  // namespace rxtoken
