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
  std::uint32_t copied = 0;
  std::array<LendItem, kBurst> items;

  void Start(RxLane* new_lane, BufferPool* new_pool) noexcept {
    lane = new_lane;
    pool = new_pool;
    n = copied = 0;
  }
};

Worker::Worker(std::uint32_t index, int cpu, PollMode poll, const rcu::Pointer<FlowTable>* table)
    : index_(index), cpu_(cpu), poll_(poll), table_(table) {}

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
  if (!holding_.empty() && (!full_burst || round_ % kVisitRounds == 0)) {
    if (received == 0) now_ns_ = clock_.Now();
    busy |= VisitHolding(received == 0 ? 32 : 1);
  }
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
    burst = static_cast<std::uint16_t>(queue.pool->pages().Reserve(kBurst * queue.pages_per_frame) /
                                       queue.pages_per_frame);
    if (burst == 0) return 0;  // the frames wait in the driver's ring
  }
  const std::uint32_t n = rte_eth_rx_burst(queue.port_id, queue.queue, mbufs, burst);
  if (n == 0) return 0;
  now_ns_ = clock_.Now();
  const FlowTable* table = table_->Read();
  if (queue.plan_serial != table->serial()) [[unlikely]] {
    queue.plan = &table->plan(queue.port_index, queue.queue);
    queue.plan_serial = table->serial();
  }
  queue.rx_packets += n;
  if (!queue.plan->empty() && queue.plan->front()->matches_all()) {
    CompiledRule* const rule = queue.plan->front()->Find(FlowKey{});
    RxLane* const lane = rule->targets[index_].lane.load(std::memory_order_relaxed);
    if (lane->content == Content::kFrame) {
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
      run.items[run.n] = {.page = pool.PageOf(data),
                          .offset = static_cast<std::uint16_t>(pool.OffsetOf(data)),
                          .length = mbuf->data_len,
                          .flags = kWholeFrame,
                          .ip_header_distance = 0};
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
  if (queue.pool == nullptr) [[unlikely]] {
    queue.Drop(DropReason::kNoBinding);
    return Recycle(mbuf);
  }
  BufferPool* pool = queue.pool;
  bool copied = false;
  if (mbuf->pool != pool->mempool()) [[unlikely]] {
    // The driver posted it before the queue was bound: to the former binding, whose pages
    // serve as well, or to the sink.
    pool = BufferPool::Of(mbuf->pool);
    if (pool == nullptr) {
      mbuf = CopyIn(queue, mbuf);
      if (mbuf == nullptr) return;
      pool = queue.pool;
      copied = true;
    }
  }

  const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
  ParsedFrame frame;
  const ParseStatus parsed = ParseFrame(data, mbuf->data_len, mbuf->pkt_len, frame);
  if (parsed != ParseStatus::kOk) [[unlikely]] {
    queue.Drop(parsed == ParseStatus::kTruncated ? DropReason::kTruncated : DropReason::kMalformed);
    return Recycle(mbuf);
  }
  CompiledRule* const rule = FlowTable::Lookup(*queue.plan, frame.key);
  if (rule == nullptr) [[unlikely]] {
    queue.Drop(DropReason::kNoRule);
    return Recycle(mbuf);
  }
  RuleTarget& target = rule->targets[index_];
  target.Count(1, mbuf->pkt_len);
  RxLane* const lane = target.lane.load(std::memory_order_relaxed);

  const bool whole = !frame.udp || lane->content == Content::kFrame;
  LendItem item{.page = pool->PageOf(data),
                .offset = static_cast<std::uint16_t>(pool->OffsetOf(data)),
                .length = mbuf->data_len,
                .flags = kWholeFrame,
                .ip_header_distance = 0};
  if (!whole) {
    item.offset = static_cast<std::uint16_t>(item.offset + frame.payload_offset);
    item.length = frame.payload_length;
    item.flags = 0;
    item.ip_header_distance = frame.ip_header_distance;
  }
  if (copied) item.flags |= kCopied;
  if (mbuf->nb_segs != 1) [[unlikely]] {
    Deliver(queue, run);
    run.Start(lane, pool);
    return DeliverChain(queue, *lane, *pool, mbuf, item,
                        whole ? mbuf->pkt_len : frame.payload_length);
  }
  if (run.lane != lane || run.pool != pool || run.n == kBurst) {
    Deliver(queue, run);
    run.Start(lane, pool);
  }
  run.copied += copied;
  run.items[run.n++] = item;
}

// Lends the segments of one frame as the fragments of one message of `bytes` bytes. `first`
// says where it starts.
void Worker::DeliverChain(RxQueue& queue, RxLane& lane, BufferPool& pool, rte_mbuf* mbuf,
                          const LendItem& first, std::uint32_t bytes) {
  std::array<LendItem, kMaxSegments> items;
  std::uint32_t n = 0;
  const std::uint32_t skipped = static_cast<std::uint32_t>(first.offset) -
                                pool.OffsetOf(rte_pktmbuf_mtod(mbuf, const std::uint8_t*));
  if (mbuf->nb_segs > kMaxSegments) {
    DropFor(queue, lane, 1, DropReason::kTooManySegments);
    return Recycle(mbuf);
  }
  std::uint32_t left = bytes;
  rte_mbuf* rest = mbuf;  // what lies behind the payload
  for (; rest != nullptr && (left != 0 || n == 0); rest = rest->next) {
    const auto* const data = rte_pktmbuf_mtod(rest, const std::uint8_t*);
    const bool is_first = n == 0;
    const std::uint32_t skip = is_first ? skipped : 0;
    const std::uint32_t length = std::min(left, rest->data_len - skip);
    left -= length;
    items[n++] = {
        .page = pool.PageOf(data),
        .offset = static_cast<std::uint16_t>(pool.OffsetOf(data) + skip),
        .length = static_cast<std::uint16_t>(length),
        .flags = static_cast<std::uint8_t>(first.flags | (left != 0 ? kMoreFragments : 0)),
        .ip_header_distance = is_first ? first.ip_header_distance : std::uint8_t{0}};
  }
  DropReason refused = DropReason::kCount;
  if (!lane.attached) {
    refused = DropReason::kNotAttached;
  } else if (lane.lane.Room(n) != n) {
    refused = DropReason::kRingFull;
  } else if (!lane.lane.Lend(pool.table(), std::span(items.data(), n), now_ns_)) {
    refused = DropReason::kNoSlot;
  }
  if (refused != DropReason::kCount) {
    DropFor(queue, lane, 1, refused);
    return Recycle(mbuf);
  }
  // Each page now comes back by itself: take the chain apart.
  while (mbuf != rest) {
    rte_mbuf* const next = mbuf->next;
    mbuf->next = nullptr;
    mbuf->nb_segs = 1;
    mbuf = next;
  }
  while (rest != nullptr) {
    rte_mbuf* const next = rest->next;
    rte_pktmbuf_free_seg(rest);
    rest = next;
  }
  lane.lane.counters().messages++;
  lane.lane.counters().copied_messages += (first.flags & kCopied) != 0;
  Lent(lane, n);
}

// Moves a frame into pages of the queue's binding. nullptr: it was dropped.
rte_mbuf* Worker::CopyIn(RxQueue& queue, rte_mbuf* mbuf) {
  rte_mbuf* first = nullptr;
  for (std::uint32_t at = 0; at < mbuf->pkt_len;) {
    rte_mbuf* const page = rte_pktmbuf_alloc(queue.pool->mempool());
    if (page == nullptr || (first != nullptr && rte_pktmbuf_chain(first, page) != 0)) {
      rte_pktmbuf_free(page);
      rte_pktmbuf_free(first);
      rte_pktmbuf_free(mbuf);
      queue.Drop(DropReason::kNoPage);
      return nullptr;
    }
    const auto room = static_cast<std::uint16_t>(
        std::min<std::uint32_t>(rte_pktmbuf_tailroom(page), mbuf->pkt_len - at));
    auto* const to = rte_pktmbuf_mtod(page, std::uint8_t*);
    const void* const from = rte_pktmbuf_read(mbuf, at, room, to);
    if (from != to) std::memcpy(to, from, room);
    page->data_len = room;
    if (first == nullptr) first = page;
    first->pkt_len = at + room;
    at += room;
  }
  rte_pktmbuf_free(mbuf);
  queue.copied_packets++;
  return first;
}

void Worker::Deliver(RxQueue& queue, const Run& run) {
  if (run.n == 0) return;
  RxLane& lane = *run.lane;
  if (!lane.attached) [[unlikely]]
    return DropRun(queue, run, 0, DropReason::kNotAttached);
  const std::uint32_t n = lane.lane.Room(run.n);
  if (n == 0) [[unlikely]]
    return DropRun(queue, run, 0, DropReason::kRingFull);
  if (!lane.lane.Lend(run.pool->table(), std::span(run.items.data(), n), now_ns_)) [[unlikely]] {
    return DropRun(queue, run, 0, DropReason::kNoSlot);
  }
  lane.lane.counters().messages += n;
  if (run.copied != 0) [[unlikely]] {
    for (std::uint32_t i = 0; i < n; i++) {
      lane.lane.counters().copied_messages += (run.items[i].flags & kCopied) != 0;
    }
  }
  Lent(lane, n);
  if (n != run.n) [[unlikely]]
    DropRun(queue, run, n, DropReason::kRingFull);
}

void Worker::DropRun(RxQueue& queue, const Run& run, std::uint32_t from, DropReason reason) {
  DropFor(queue, *run.lane, run.n - from, reason);
  auto give = recycler_.Open(run.pool->table());
  for (std::uint32_t i = from; i < run.n; i++) give(run.items[i].page);
}

void Worker::DropFor(RxQueue& queue, RxLane& lane, std::uint32_t n, DropReason reason) {
  queue.drops[static_cast<std::size_t>(reason)] += n;
  lane.lane.counters().drops[static_cast<std::size_t>(reason)] += n;
}

void Worker::Recycle(rte_mbuf* mbuf) {
  BufferPool* const pool = BufferPool::Of(mbuf->pool);
  if (pool == nullptr || mbuf->nb_segs != 1) return rte_pktmbuf_free(mbuf);
  void* const object = mbuf;
  pool->pages().Push(&object, 1);
}

// ---- publishing and taking back --------------------------------------------------------------

void Worker::Lent(RxLane& lane, std::uint32_t fragments) {
  if (!lane.to_publish) {
    lane.to_publish = true;
    to_publish_.push_back(&lane);
  }
  if (!lane.holding) {
    lane.holding = true;
    holding_.push_back(&lane);
  }
  if (lane.lane.unpublished() >= kLot) {
    lane.lane.Publish();
    lane.lane.Drain(recycler_);
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

// Looks after the next `n` lanes that have something outstanding, in turn. True if one of
// them had returned something or waits for its doorbell.
bool Worker::VisitHolding(std::size_t n) {
  bool busy = false;
  for (n = std::min(n, holding_.size()); n != 0; n--) {
    if (visit_ >= holding_.size()) visit_ = 0;
    RxLane& lane = *holding_[visit_];
    const bool drained = lane.lane.Drain(recycler_) != 0;
    busy |= drained;
    if (lane.lane.WantsDoorbell()) {
      RingDoorbell(lane);
      busy = true;
    }
    // What was returned too often is read and refused before the lane is left alone.
    if (!drained && lane.lane.counters().lent == lane.lane.counters().returned) {
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
// that is put off happens on a later visit, since something is outstanding until it is read.
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

void Worker::AddQueue(Port* port, std::uint32_t port_index, std::uint16_t queue) {
  RxQueue added;
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
  q.pool = pool;
  q.pages_per_frame = 0;
  if (pool != nullptr) {
    if (port->forgets_unfinished_frames()) {
      const std::uint32_t room =
          pool->buffer().page_bytes() - BufferPool::OverheadBytes(pool->buffer().page_bytes());
      q.pages_per_frame = 65535 / room + 1;
    }
    q.port->Attach(queue, pool->mempool());
  } else {
    q.port->Detach(queue);
  }
}

void Worker::Unlist(RxLane& lane) {
  lane.attached = false;
  std::erase(to_publish_, &lane);
  std::erase(holding_, &lane);
  lane.to_publish = lane.holding = false;
}

}  // namespace rxtoken
