// SPDX-License-Identifier: Apache-2.0
#include "dataplane/reassembler.h"

#include <rte_ip.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

#include "dataplane/sip_hash.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kMaxIpBytes = 65535;
constexpr std::uint32_t kFragmentHeaderBytes = 8;

constexpr unsigned kStartedShift = 20;
constexpr unsigned kProgressShift = 10;

// All ways of a bucket at once.
using Ways16 [[gnu::vector_size(16)]] = std::uint16_t;
using Ways16Halves [[gnu::vector_size(16)]] = std::uint64_t;
using Ways32 [[gnu::vector_size(32)]] = std::uint32_t;

std::array<std::uint64_t, 2> RandomKey() {
  std::array<std::uint64_t, 2> key;
  // So few bytes are never refused once the system has started.
  (void)!::getrandom(key.data(), sizeof key, 0);
  return key;
}

bool IsV6(const ParsedFrame& parsed) noexcept { return parsed.key.family() == IpFamily::kV6; }

// What the packet would have in front of its data if it were whole, as far as its length field
// counts it.
std::uint32_t CountedHeaderBytes(bool v6, std::uint32_t ip_header, std::uint32_t data) noexcept {
  return data - ip_header - (v6 ? sizeof(rte_ipv6_hdr) + kFragmentHeaderBytes : 0);
}

// The key's second word: a fragment's id is where ports would be.
std::uint64_t KeyWord(const ParsedFrame& parsed) noexcept {
  return parsed.key.w[1] | parsed.fragment.id;
}

std::uint16_t TagFor(std::uint64_t hash) noexcept {
  return std::max<std::uint16_t>(1, static_cast<std::uint16_t>(hash >> 48));
}

bool Possible(const ParsedFrame& parsed) noexcept {
  const IpFragment& fragment = parsed.fragment;
  return fragment.data_bytes != 0 && (!fragment.more || fragment.data_bytes % 8 == 0) &&
         CountedHeaderBytes(IsV6(parsed), fragment.ip_header, fragment.data) +
                 fragment.offset_bytes + fragment.data_bytes <=
             kMaxIpBytes;
}

}  // namespace

Reassembler::Reassembler(const ReassemblyOptions& options, void (*free)(rte_mbuf*))
    : bucket_mask_(options.datagrams / kWays - 1),
      max_pages_(options.pages),
      timeout_(static_cast<std::uint32_t>((options.timeout_ns >> kStartedShift) + 1)),
      hash_key_(options.hash_key.has_value() ? *options.hash_key : RandomKey()),
      free_(free),
      buckets_(options.datagrams / kWays),
      entries_(options.datagrams),
      cells_(options.cells) {}

Reassembler::~Reassembler() {
  if (!ok()) return;
  for (std::uint32_t slot = 0; slot < slots(); slot++) {
    if (TagOf(slot) != 0) Remove(slot);
  }
}

rte_mbuf* Reassembler::Add(rte_mbuf* frame, const ParsedFrame& parsed, std::uint32_t port,
                           std::uint64_t hash, std::uint64_t now_ns, std::uint32_t page_limit) {
  const IpFragment& fragment = parsed.fragment;
  now_ns_ = now_ns;
  counters_.fragments++;
  if (!Possible(parsed)) {
    counters_.invalid++;
    FreeFrame(frame);
    return nullptr;
  }
  const std::uint32_t slot = FindOrTake(parsed, port, hash);
  Entry& entry = entries_[slot];
  const std::uint32_t offset = fragment.offset_bytes;
  const std::uint32_t end = offset + fragment.data_bytes;
  if (entry.dropped) {
    counters_.discarded++;
    FreeFrame(frame);
    return nullptr;
  }
  if (entry.fragments == kMaxFragments || (entry.total != 0 && end > entry.total) ||
      (!fragment.more && (entry.total != 0 ? end != entry.total : end < entry.end))) {
    // With 64 that are not the whole it never will be, whatever comes now.
    Condemn(slot, counters_.invalid);
    FreeFrame(frame);
    return nullptr;
  }

  // Where it goes in the list; mostly behind the last.
  rte_mbuf** at = nullptr;
  if (entry.head != nullptr && offset < entry.end) {
    std::uint32_t covered = 0;
    for (at = &entry.head; *at != nullptr && OffsetOf(*at) < offset; at = &(*at)->next) {
      if (FragmentBytes(*at) != 0) covered = OffsetOf(*at) + FragmentBytes(*at);
    }
    const rte_mbuf* const next = *at;
    if (covered <= offset && next != nullptr && OffsetOf(next) == offset &&
        FragmentBytes(next) == fragment.data_bytes) {
      // Its bytes are not compared: if they differ we cannot know which are right, and to drop
      // the datagram would only make a forger's work easier.
      counters_.duplicates++;
      FreeFrame(frame);
      return nullptr;
    }
    if (covered > offset || (next != nullptr && OffsetOf(next) < end)) {
      Condemn(slot, counters_.overlap);
      FreeFrame(frame);
      return nullptr;
    }
  }

  rte_mempool* const pool = frame->pool;
  const std::uint32_t segments = frame->nb_segs;
  const std::uint32_t header_bytes = offset == 0 ? fragment.data : 0;
  rte_mbuf* first;
  if (fragment.data_bytes < kCopiedBelow &&
      fragment.data + fragment.data_bytes <= frame->data_len &&
      header_bytes + fragment.data_bytes <= Cell::kBytes) {
    while (cells_held_ == cells_.size()) EvictOldest(slot);
    first = KeepCopy(entry, frame, fragment);
  } else {
    const std::uint32_t limit = std::min(max_pages_, page_limit);
    if (entry.pages + segments > limit) {
      Condemn(slot, counters_.over_budget);
      FreeFrame(frame);
      return nullptr;
    }
    while (pages_ + segments > limit) EvictOldest(slot);
    first = KeepPages(entry, frame, fragment);
  }
  rte_mbuf* last = first;
  if (segments != 1) {
    while (last->next != nullptr) last = last->next;
  }
  rte_mbuf*& tail = buckets_[slot / kWays].tail[slot % kWays];
  if (at != nullptr) {
    last->next = *at;
    *at = first;
  } else {
    if (entry.head == nullptr) {
      entry.head = first;
    } else {
      tail->next = first;
    }
    tail = last;
    entry.end = static_cast<std::uint16_t>(end);
  }
  if (offset == 0) {
    entry.header_bytes = fragment.data;
    entry.ip_header = static_cast<std::uint8_t>(fragment.ip_header);
    entry.next_header = fragment.next_header;
  }
  if (!fragment.more) entry.total = static_cast<std::uint16_t>(end);
  entry.received = static_cast<std::uint16_t>(entry.received + fragment.data_bytes);
  entry.fragments++;
  buckets_[slot / kWays].progress[slot % kWays] =
      static_cast<std::uint32_t>(now_ns >> kProgressShift);
  return entry.received == entry.total ? Finish(slot, pool) : nullptr;
}

// ---- the table -----------------------------------------------------------------------------

bool Reassembler::Expired(std::uint32_t slot) const noexcept {
  const std::uint16_t age = static_cast<std::uint16_t>(
      (now_ns_ >> kStartedShift) - buckets_[slot / kWays].started[slot % kWays]);
  return age > timeout_;
}

std::uint64_t Reassembler::Hash(const ParsedFrame& parsed, std::uint32_t port) const noexcept {
  const auto& w = parsed.key.w;
  SipHash<1, 3> hash(hash_key_);
  hash.Add(w[0]);
  hash.Add(KeyWord(parsed));
  if (!IsV6(parsed)) return hash.Finish(std::uint64_t{20} << 56 | port);
  hash.Add(w[2]);
  hash.Add(w[3]);
  hash.Add(w[4]);
  return hash.Finish(std::uint64_t{44} << 56 | port);
}

std::uint64_t Reassembler::FetchBucket(const ParsedFrame& parsed,
                                       std::uint32_t port) const noexcept {
  const std::uint64_t hash = Hash(parsed, port);
  const Bucket& bucket = BucketOf(hash);
  __builtin_prefetch(&bucket, 1);
  __builtin_prefetch(&bucket.tail, 1);
  return hash;
}

void Reassembler::FetchEntry(std::uint64_t hash) const noexcept {
  const Bucket& bucket = BucketOf(hash);
  const std::uint32_t matches = Matches(bucket, TagFor(hash));
  const std::uint32_t way =
      matches != 0 ? static_cast<std::uint32_t>(std::countr_zero(matches)) : Victim(bucket);
  const auto slot = static_cast<std::uint32_t>(&bucket - buckets_.data()) * kWays + way;
  __builtin_prefetch(&entries_[slot], 1);
  // Something is put behind it, or it is freed. If there is none this is any address.
  const auto tail = reinterpret_cast<std::uintptr_t>(bucket.tail[way]);
  __builtin_prefetch(
      reinterpret_cast<const void*>(tail + (matches != 0 ? offsetof(rte_mbuf, next) : 0)), 1);
}

// A bit for each way with that tag.
std::uint32_t Reassembler::Matches(const Bucket& bucket, std::uint16_t tag) noexcept {
  const Ways16 equal = std::bit_cast<Ways16>(bucket.tag) == tag;
  const Ways16 bits = equal & Ways16{1, 2, 4, 8, 16, 32, 64, 128};
  // The sum of all, in the uppermost.
  const auto halves = std::bit_cast<Ways16Halves>(bits);
  return static_cast<std::uint32_t>((halves[0] + halves[1]) * 0x0001'0001'0001'0001 >> 48);
}

// A free way, or the one that made no progress for longest. Without branches: nobody can guess.
std::uint32_t Reassembler::Victim(const Bucket& bucket) const noexcept {
  const auto now = static_cast<std::uint32_t>(now_ns_ >> kProgressShift);
  // Of nine minutes, which is more than any entry lives, the upper bits can go.
  Ways32 age;
  std::memcpy(&age, bucket.progress.data(), sizeof age);
  age = (now - age) << 3;
  age |= __builtin_convertvector(std::bit_cast<Ways16>(bucket.tag) == 0, Ways32);
  age = (age & ~7u) | Ways32{0, 1, 2, 3, 4, 5, 6, 7};
  std::uint32_t victim = 0;
  for (std::uint32_t i = 0; i < kWays; i++) victim = std::max(victim, age[i]);
  return victim % kWays;
}

// The datagram's entry, perhaps a new one.
std::uint32_t Reassembler::FindOrTake(const ParsedFrame& parsed, std::uint32_t port,
                                      std::uint64_t hash) {
  const auto& w = parsed.key.w;
  const std::uint64_t w1 = KeyWord(parsed);
  const bool v6 = IsV6(parsed);
  const std::uint16_t tag = TagFor(hash);
  Bucket& bucket = BucketOf(hash);
  const auto first = static_cast<std::uint32_t>(&bucket - buckets_.data()) * kWays;

  for (std::uint32_t ways = Matches(bucket, tag); ways != 0; ways &= ways - 1) {
    const std::uint32_t slot = first + static_cast<std::uint32_t>(std::countr_zero(ways));
    const Entry& entry = entries_[slot];
    if (entry.w[0] != w[0] || entry.w[1] != w1 || entry.port != port) continue;
    if (v6 && !std::equal(entry.w6.begin(), entry.w6.end(), w.begin() + 2)) continue;
    if (!Expired(slot)) return slot;
    Evict(slot, counters_.timed_out);
    break;
  }
  const std::uint32_t way = Victim(bucket);
  if (bucket.tag[way] != 0) Evict(first + way, counters_.evicted);
  bucket.tag[way] = tag;
  bucket.started[way] = static_cast<std::uint16_t>(now_ns_ >> kStartedShift);
  bucket.progress[way] = static_cast<std::uint32_t>(now_ns_ >> kProgressShift);
  Entry& entry = entries_[first + way];
  entry.w = {w[0], w1};
  entry.head = nullptr;
  entry.port = port;
  entry.total = entry.received = entry.end = entry.pages = entry.cells = 0;
  entry.fragments = 0;
  entry.dropped = false;
  if (v6) std::copy_n(w.begin() + 2, 3, entry.w6.begin());
  datagrams_++;
  entries_used_++;
  return first + way;
}

void Reassembler::Expire(std::uint64_t now_ns) {
  constexpr std::uint32_t kBuckets = 4;
  if (entries_used_ == 0) return;
  now_ns_ = now_ns;
  for (std::uint32_t i = 0; i < kBuckets; i++) {
    const std::uint32_t first = (swept_++ & bucket_mask_) * kWays;
    for (std::uint32_t slot = first; slot < first + kWays; slot++) {
      if (TagOf(slot) != 0 && Expired(slot)) Evict(slot, counters_.timed_out);
    }
  }
}

// One that was dropped before is not counted again.
void Reassembler::Evict(std::uint32_t slot, std::uint64_t& counter) {
  if (!entries_[slot].dropped) counter++;
  Remove(slot);
}

// Of the next few entries. What they hold is not looked at: whoever filled the table with what
// holds no pages pays for each of those that go in vain.
// Precondition: there is one besides `except`.
void Reassembler::EvictOldest(std::uint32_t except) {
  constexpr std::uint32_t kEnough = 16;  // entries
  const auto now = static_cast<std::uint32_t>(now_ns_ >> kProgressShift);
  std::uint32_t seen = 0;
  std::uint32_t oldest = 0;
  std::uint32_t victim = kNoSlot;
  for (std::uint32_t scanned = 0; scanned <= bucket_mask_ && seen < kEnough; scanned++) {
    const std::uint32_t first = (hand_++ & bucket_mask_) * kWays;
    const Bucket& bucket = buckets_[first / kWays];
    for (std::uint32_t i = 0; i < kWays; i++) {
      if (bucket.tag[i] == 0 || first + i == except) continue;
      seen++;
      const std::uint32_t age = now - bucket.progress[i];
      if (victim != kNoSlot && age <= oldest) continue;
      oldest = age;
      victim = first + i;
    }
  }
  Evict(victim, counters_.over_budget);
}

// Drops what the entry has; it stays for what may still come.
void Reassembler::Condemn(std::uint32_t slot, std::uint64_t& counter) {
  counter++;
  FreePieces(slot);
  entries_[slot].dropped = true;
  datagrams_--;
}

void Reassembler::Remove(std::uint32_t slot) {
  Entry& entry = entries_[slot];
  FreePieces(slot);
  if (!entry.dropped) datagrams_--;
  entries_used_--;
  TagOf(slot) = 0;
}

void Reassembler::FreePieces(std::uint32_t slot) {
  Entry& entry = entries_[slot];
  const rte_mbuf* const tail = buckets_[slot / kWays].tail[slot % kWays];
  for (rte_mbuf* piece = entry.head; piece != nullptr;) {
    // The second line of the last one's mbuf is not touched: in a flood few have another.
    rte_mbuf* const next = piece == tail ? nullptr : std::exchange(piece->next, nullptr);
    if (IsCell(piece)) {
      FreeCell(piece);
    } else {
      free_(piece);
    }
    piece = next;
  }
  entry.head = nullptr;
  pages_ -= entry.pages;
  entry.pages = entry.cells = 0;
}

// ---- pieces ----------------------------------------------------------------------------------

// Makes a frame the chain of what it has of the datagram's data.
rte_mbuf* Reassembler::KeepPages(Entry& entry, rte_mbuf* frame, const IpFragment& fragment) {
  if (frame->nb_segs == 1) {
    frame->data_off = static_cast<std::uint16_t>(frame->data_off + fragment.data);
    frame->data_len = fragment.data_bytes;
    SetPlace(frame, fragment.offset_bytes, fragment.data_bytes);
    entry.pages++;
    pages_++;
    return frame;
  }
  rte_mbuf* first = nullptr;
  rte_mbuf** link = &first;
  std::uint32_t skip = fragment.data;
  std::uint32_t left = fragment.data_bytes;
  std::uint32_t offset = fragment.offset_bytes;
  std::uint32_t pages = 0;
  for (rte_mbuf* mbuf = frame; mbuf != nullptr;) {
    rte_mbuf* const next = mbuf->next;
    const std::uint32_t bytes = std::min(left, mbuf->data_len - skip);
    // The datagram's first is kept for its headers even if its data is elsewhere.
    if (bytes == 0 && !(mbuf == frame && offset == 0)) {
      FreeMbuf(mbuf);
    } else {
      mbuf->data_off = static_cast<std::uint16_t>(mbuf->data_off + skip);
      mbuf->data_len = static_cast<std::uint16_t>(bytes);
      mbuf->nb_segs = 1;
      mbuf->ol_flags &= ~RTE_MBUF_F_RX_RSS_HASH;
      SetPlace(mbuf, offset, first == nullptr ? fragment.data_bytes : 0);
      *link = mbuf;
      link = &mbuf->next;
      pages++;
    }
    skip = 0;
    left -= bytes;
    offset += bytes;
    mbuf = next;
  }
  *link = nullptr;
  entry.pages = static_cast<std::uint16_t>(entry.pages + pages);
  pages_ += pages;
  return first;
}

// Copies its data, and for the first fragment what is in front of it, and frees the frame.
// Precondition: a cell is free and has room.
rte_mbuf* Reassembler::KeepCopy(Entry& entry, rte_mbuf* frame, const IpFragment& fragment) {
  Cell* cell;
  if (free_cell_ != kNoSlot) {
    cell = &cells_[free_cell_];
    free_cell_ = cell->mbuf()->hash.usr;
  } else {
    cell = &cells_[fresh_cells_++];
  }
  cells_held_++;
  entry.cells++;
  const std::uint32_t skip = fragment.offset_bytes == 0 ? 0u : fragment.data;
  const std::uint32_t headers = fragment.data - skip;
  std::memcpy(cell->bytes(), rte_pktmbuf_mtod_offset(frame, const void*, skip),
              headers + fragment.data_bytes);
  rte_mbuf* const mbuf = cell->mbuf();
  mbuf->buf_addr = cell->bytes();
  mbuf->data_off = static_cast<std::uint16_t>(headers);
  mbuf->data_len = fragment.data_bytes;
  SetPlace(mbuf, fragment.offset_bytes, fragment.data_bytes);
  counters_.copied_out_bytes += fragment.data_bytes;
  FreeFrame(frame);
  return mbuf;
}

// The datagram is complete: takes it out of the table. `pool` serves copies of it if all of it
// is in cells.
rte_mbuf* Reassembler::Finish(std::uint32_t slot, rte_mempool* pool) {
  Entry& entry = entries_[slot];
  const bool v6 = static_cast<IpFamily>((entry.w[1] >> 40) & 0xFF) == IpFamily::kV6;
  const std::uint32_t ip_bytes =
      CountedHeaderBytes(v6, entry.ip_header, entry.header_bytes) + entry.total;
  // The first one's headers may be longer than those of the others.
  if (ip_bytes > kMaxIpBytes) {
    counters_.invalid++;
    Remove(slot);
    return nullptr;
  }
  if (entry.cells != 0 && !ReplaceCells(entry, pool)) {
    counters_.no_page++;
    Remove(slot);
    return nullptr;
  }
  rte_mbuf* const head = entry.head;
  head->nb_segs = entry.pages;
  entry.head = nullptr;  // it is the caller's
  Remove(slot);
  counters_.reassembled++;

  std::uint32_t header_bytes = entry.header_bytes;
  auto* frame = rte_pktmbuf_mtod(head, std::uint8_t*) - header_bytes;
  if (v6) {
    frame[entry.next_header] = static_cast<std::uint8_t>(entry.w[1] >> 32);  // the protocol
    header_bytes -= kFragmentHeaderBytes;
    std::memmove(frame + kFragmentHeaderBytes, frame, header_bytes);
    frame += kFragmentHeaderBytes;
    auto* const ip = reinterpret_cast<rte_ipv6_hdr*>(frame + entry.ip_header);
    ip->payload_len = rte_cpu_to_be_16(static_cast<std::uint16_t>(ip_bytes));
  } else {
    auto* const ip = reinterpret_cast<rte_ipv4_hdr*>(frame + entry.ip_header);
    ip->total_length = rte_cpu_to_be_16(static_cast<std::uint16_t>(ip_bytes));
    ip->fragment_offset = 0;
    ip->hdr_checksum = 0;
    ip->hdr_checksum = rte_ipv4_cksum(ip);
  }
  head->data_off = static_cast<std::uint16_t>(head->data_off - header_bytes);
  head->data_len = static_cast<std::uint16_t>(head->data_len + header_bytes);
  head->pkt_len = header_bytes + entry.total;
  return head;
}

// Moves what is in cells to mbufs, neighbours to the same one. False: there are none.
bool Reassembler::ReplaceCells(Entry& entry, rte_mempool* pool) {
  for (const rte_mbuf* piece = entry.head; piece != nullptr; piece = piece->next) {
    if (!IsCell(piece)) {
      pool = piece->pool;
      break;
    }
  }
  for (rte_mbuf** at = &entry.head; *at != nullptr; at = &(*at)->next) {
    if (!IsCell(*at)) continue;
    rte_mbuf* const copy = rte_pktmbuf_alloc(pool);
    if (copy == nullptr) return false;
    entry.pages++;
    pages_++;
    copy->hash.usr = kCopy;
    copy->next = *at;
    *at = copy;
    // The first one's headers are in front of its data here too.
    std::uint32_t headers = at == &entry.head ? entry.header_bytes : 0;
    copy->data_off = static_cast<std::uint16_t>(copy->data_off + headers);
    while (rte_mbuf* const cell = copy->next) {
      if (!IsCell(cell) || cell->data_len > rte_pktmbuf_tailroom(copy)) break;
      std::memcpy(rte_pktmbuf_mtod_offset(copy, std::uint8_t*, copy->data_len) - headers,
                  rte_pktmbuf_mtod(cell, const std::uint8_t*) - headers, headers + cell->data_len);
      copy->data_len = static_cast<std::uint16_t>(copy->data_len + cell->data_len);
      headers = 0;
      copy->next = std::exchange(cell->next, nullptr);
      FreeCell(cell);
      entry.cells--;
    }
  }
  return true;
}

void Reassembler::FreeCell(rte_mbuf* cell) noexcept {
  const auto index = static_cast<std::uint32_t>(reinterpret_cast<Cell*>(cell) - cells_.data());
  cell->hash.usr = free_cell_;
  free_cell_ = index;
  cells_held_--;
}

void Reassembler::FreeMbuf(rte_mbuf* mbuf) {
  mbuf->next = nullptr;
  mbuf->nb_segs = 1;
  free_(mbuf);
}

void Reassembler::FreeFrame(rte_mbuf* frame) {
  if (frame->nb_segs == 1) return free_(frame);
  while (frame != nullptr) {
    rte_mbuf* const next = frame->next;
    FreeMbuf(frame);
    frame = next;
  }
}

}  // namespace rxtoken
