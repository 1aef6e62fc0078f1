// SPDX-License-Identifier: Apache-2.0
// worker_fragments.cc - what a worker does with IP fragments.
//
// They are put by while there is other traffic to serve, and then reassembled by the one worker
// that all fragments of their datagram go to. A datagram that is complete is looked up and
// delivered like a frame that arrived in several segments.
//
// A fragment goes to another worker together with its page, of which nothing is lent yet. A page
// with several frames cannot go, since its other frames stay: that fragment is copied by the
// worker that gets it, and goes back.
#include <rte_hash_crc.h>
#include <rte_mbuf.h>

#include <algorithm>
#include <bit>

#include "dataplane/parse.h"
#include "dataplane/worker.h"

namespace rxtoken {
namespace {

// The n-th of the bits that are set.
std::uint32_t NthBit(std::uint32_t bits, std::uint32_t n) noexcept {
  while (n-- != 0) bits &= bits - 1;
  return static_cast<std::uint32_t>(std::countr_zero(bits));
}

std::uint32_t HashOf(const ParsedFrame& frame) noexcept {
  std::uint32_t hash = rte_hash_crc_8byte(frame.key.w[0], frame.fragment.id);
  if (frame.key.family() == IpFamily::kV6) {
    for (const std::size_t i : {2, 3, 4}) hash = rte_hash_crc_8byte(frame.key.w[i], hash);
  }
  return hash;
}

bool IsOf(const rte_mbuf* chain, const BufferPool& pool) noexcept {
  for (; chain != nullptr; chain = chain->next) {
    if (chain->pool == pool.mempool()) return true;
  }
  return false;
}

}  // namespace

void Worker::PutFragmentBy(RxQueue& queue, rte_mbuf* mbuf, const ParsedFrame& frame) {
  // A page that is not a binding's, or of one that is being unbound, is not to be kept.
  if (PoolOf(queue, mbuf) == nullptr) {
    rte_mbuf* const copy = queue.pool == nullptr ? nullptr : CopyInto(*queue.pool, mbuf);
    if (copy == nullptr) {
      queue.Drop(queue.pool == nullptr ? DropReason::kNoBinding : DropReason::kNoPage);
    } else {
      queue.copied_packets++;
    }
    rte_pktmbuf_free(mbuf);
    if (copy == nullptr) return;
    mbuf = copy;
  }
  mbuf->port = queue.port_id;  // by which its worker finds its own queue
  const auto workers = static_cast<std::uint32_t>(std::popcount(queue.port_workers));
  const std::uint32_t home =
      workers == 1 ? index_ : NthBit(queue.port_workers, HashOf(frame) % workers);
  const bool kept = home != index_ ? HandOver(home, mbuf) : fragments_.size() < kFragmentBacklog;
  if (!kept) {
    queue.Drop(DropReason::kFragmentBacklog);
    Recycle(mbuf);
  } else if (home == index_) {
    fragments_.push_back(mbuf);
  }
}

// False: the other worker has too many to do.
bool Worker::HandOver(std::uint32_t peer, rte_mbuf* mbuf) {
  const bool shared = BufferPool::Of(mbuf->pool)->frames_per_page() != 1;
  // What comes back must find room.
  if (shared && lent_out_[peer] == kFragmentBacklog) return false;
  Worker& worker = *(*peers_)[peer];
  if (!worker.inboxes_[index_]->fragments.TryPush(mbuf)) return false;
  lent_out_[peer] += shared;
  handed_over_++;
  // order: release, so that whoever sees the bit sees the fragment.
  worker.mail_.fetch_or(1u << index_, std::memory_order_release);
  return true;
}

bool Worker::ReadInboxes() {
  // order: acquire pairs with the release in HandOver().
  std::uint32_t from = mail_.exchange(0, std::memory_order_acquire);
  for (; from != 0; from &= from - 1) {
    const auto peer = static_cast<std::uint32_t>(std::countr_zero(from));
    Inbox& inbox = *inboxes_[peer];
    while (const std::optional<rte_mbuf*> back = inbox.back.TryPop()) {
      Recycle(*back);
      lent_out_[peer]--;
    }
    while (const std::optional<rte_mbuf*> fragment = inbox.fragments.TryPop()) {
      BufferPool& pool = *BufferPool::Of((*fragment)->pool);
      RxQueue& queue = QueueOf(*fragment);
      const bool shared = pool.frames_per_page() != 1;
      rte_mbuf* kept = nullptr;
      if (fragments_.size() >= kFragmentBacklog) {
        queue.Drop(DropReason::kFragmentBacklog);
      } else if (pool.draining()) {
        queue.Drop(DropReason::kNoBinding);
      } else if (kept = shared ? CopyInto(pool, *fragment) : *fragment; kept == nullptr) {
        queue.Drop(DropReason::kNoPage);
      }
      if (kept != nullptr) fragments_.push_back(kept);
      if (shared) {
        queue.copied_packets += kept != nullptr;
        GiveBack(peer, *fragment);
      } else if (kept == nullptr) {
        Recycle(*fragment);
      }
    }
  }
  return true;
}

// There is room: see HandOver().
void Worker::GiveBack(std::uint32_t peer, rte_mbuf* mbuf) {
  Worker& owner = *(*peers_)[peer];
  owner.inboxes_[index_]->back.TryPush(mbuf);
  // order: as in HandOver().
  owner.mail_.fetch_or(1u << index_, std::memory_order_release);
}

// A fragment whose place in the table is being fetched.
struct Worker::NextFragment {
  rte_mbuf* mbuf;
  RxQueue* queue;
  ParsedFrame frame;
  std::uint64_t hash;
};

Worker::NextFragment Worker::PrepareFragment(rte_mbuf* mbuf) {
  NextFragment next = {.mbuf = mbuf, .queue = &QueueOf(mbuf), .frame = {}, .hash = 0};
  // It was parsed before, where it was received.
  ParseFrame(rte_pktmbuf_mtod(mbuf, const std::uint8_t*), mbuf->data_len, mbuf->pkt_len,
             next.frame);
  next.hash = reassembler_.FetchBucket(next.frame, next.queue->port_index);
  return next;
}

// True if there was something to do.
bool Worker::Reassemble(bool full_burst) {
  constexpr std::size_t kAhead = 4;  // fetched in each step, while one is put into the table
  std::size_t n = fragments_.size();
  if (full_burst) n = std::min<std::size_t>(n, kBurst / 2);
  std::array<NextFragment, 2 * kAhead> next;
  const std::size_t steps = n == 0 ? 0 : n + next.size();
  for (std::size_t i = 0; i < steps; i++) {
    if (i >= next.size()) {
      const NextFragment& fragment = next[i % next.size()];
      if (rte_mbuf* const datagram =
              reassembler_.Add(fragment.mbuf, fragment.frame, fragment.queue->port_index,
                               fragment.hash, now_ns_, fragment_pages_)) {
        DeliverDatagram(*fragment.queue, datagram);
      }
    }
    if (i >= kAhead && i - kAhead < n) {
      reassembler_.FetchEntry(next[(i - kAhead) % next.size()].hash);
    }
    if (i >= n) continue;
    next[i % next.size()] = PrepareFragment(fragments_.front());
    fragments_.pop_front();
  }
  reassembler_.Expire(now_ns_);
  return n != 0;
}

void Worker::DeliverDatagram(RxQueue& queue, rte_mbuf* mbuf) {
  UsePlan(queue);
  ParsedFrame frame;
  const ParseStatus parsed =
      ParseFrame(rte_pktmbuf_mtod(mbuf, const std::uint8_t*), mbuf->data_len, mbuf->pkt_len, frame);
  if (parsed != ParseStatus::kOk) {
    queue.Drop(parsed == ParseStatus::kTruncated ? DropReason::kTruncated : DropReason::kMalformed);
    return Recycle(mbuf);
  }
  if (frame.is_fragment) {  // behind further headers: nobody sends that
    queue.Drop(DropReason::kMalformed);
    return Recycle(mbuf);
  }
  CompiledRule* const rule = FlowTable::Lookup(*queue.plan, frame.key);
  if (rule == nullptr) return DropUnmatched(queue, mbuf);
  for (rte_mbuf* segment = mbuf; segment != nullptr; segment = segment->next) {
    if (Reassembler::IsCopy(segment)) segment->ol_flags |= kCopiedSegment;
  }
  RuleTarget& target = rule->targets[index_];
  target.Count(1, mbuf->pkt_len);
  DeliverToEach(queue, target, mbuf, frame, PoolOf(queue, mbuf));
}

// Incomplete datagrams keep no more than a quarter of the smallest binding of ours.
void Worker::LimitFragments() {
  constexpr std::uint32_t kPart = 4;
  std::uint32_t smallest = ~0u;
  for (const RxQueue& queue : queues_) {
    if (queue.pool == nullptr) continue;
    const BufferPool& pool = *queue.pool;
    smallest = std::min(smallest, pool.buffer().pages() * pool.frames_per_page());
  }
  fragment_pages_ = smallest / kPart;
}

// The first queue of ours that belongs to the frame's port.
RxQueue& Worker::QueueOf(const rte_mbuf* mbuf) noexcept {
  return *std::find_if(queues_.begin(), queues_.end(),
                       [&](const RxQueue& queue) { return queue.port_id == mbuf->port; });
}

void Worker::DropFragments(const BufferPool& pool) {
  while (mail_.load(std::memory_order_relaxed) != 0) ReadInboxes();
  std::erase_if(fragments_, [&](rte_mbuf* mbuf) {
    if (!IsOf(mbuf, pool)) return false;
    QueueOf(mbuf).Drop(DropReason::kNoBinding);
    Recycle(mbuf);
    return true;
  });
  reassembler_.DropIf([&](const rte_mempool* mempool) { return mempool == pool.mempool(); });
}

ReassemblyInfo Worker::reassembly() const noexcept {
  const Reassembler::Counters& c = reassembler_.counters();
  return {.fragments = c.fragments,
          .reassembled = c.reassembled,
          .timed_out = c.timed_out,
          .evicted = c.evicted,
          .overlap = c.overlap,
          .invalid = c.invalid,
          .over_budget = c.over_budget,
          .duplicates = c.duplicates,
          .discarded = c.discarded,
          .no_page = c.no_page,
          .copied_out_bytes = c.copied_out_bytes,
          .handed_over = handed_over_,
          .datagrams = reassembler_.datagrams(),
          .pages = reassembler_.pages()};
}

}  // namespace rxtoken
