// SPDX-License-Identifier: Apache-2.0
// reassembler.h - IP fragments to whole datagrams, in the pages they arrived on.
//
// Made to keep working under a flood of fragments that never become datagrams. A table of
// 8-way buckets under a keyed hash (SipHash-1-3: collisions cannot be computed); a full bucket
// drops the datagram in it that made no progress for longest, after Brouer's idea of 2013 to
// clean where one is, so there is no list of all to look after. Newcomers are never refused: a
// datagram lives for about entries / flood rate, and its fragments come in microseconds. Datagrams
// of one fragment are not preferred as victims; floods of two fragments each then take the good
// ones (measured: 92 % goodput instead of 100). Over the budget of pages, or of cells, the oldest
// of the next 16 goes, not a random one (which measured 3 to 11 % worse).
//
// The fragments of a datagram are a list by offset through mbuf->next, which is the result when
// it is complete. Overlaps drop the datagram and all that comes for it until it would have timed
// out (RFC 5722; for IPv4 as well). Fragments of less than 256 bytes are copied to cells of our
// own, so that a flood of small ones holds no pages.
//
// Hot path: yes.   Thread-safety: none; belongs to one worker.
// Allocates: on construction; and pages for what was in cells, of the mempool that it came from.
// Memory: 144 bytes for each datagram, 576 for each cell.
#pragma once

#include <rte_mbuf.h>

#include <array>
#include <cstdint>
#include <optional>

#include "dataplane/parse.h"
#include "tokens/demand_zero.h"

namespace rxtoken {

struct ReassemblyOptions {
  std::uint32_t datagrams = 4096;            // in progress at a time; a power of two, at least 8
  std::uint32_t pages = 8192;                // mbufs that they may hold
  std::uint32_t cells = 8192;                // small fragments that are kept as copies; at least 64
  std::uint64_t timeout_ns = 1'000'000'000;  // from the first fragment; 10 ms to 30 s
  std::optional<std::array<std::uint64_t, 2>> hash_key = {};  // random if not set
};

class Reassembler {
 public:
  static constexpr std::uint32_t kMaxFragments = 64;  // of a datagram
  static constexpr std::uint32_t kCopiedBelow = 256;  // bytes of data

  struct Counters {
    std::uint64_t fragments = 0;    // that came
    std::uint64_t reassembled = 0;  // datagrams
    // Datagrams that were dropped: not complete in time, or before another needed the place; two
    // fragments overlap; they contradict each other or are too many; no pages or cells left in
    // the budget; the pool had no page for what was in cells.
    std::uint64_t timed_out = 0;
    std::uint64_t evicted = 0;
    std::uint64_t overlap = 0;
    std::uint64_t invalid = 0;  // and fragments with an impossible length or offset
    std::uint64_t over_budget = 0;
    std::uint64_t no_page = 0;
    // Fragments that were dropped: they were there already, or their datagram was dropped before.
    std::uint64_t duplicates = 0;
    std::uint64_t discarded = 0;
    std::uint64_t copied_out_bytes = 0;  // data of small fragments
  };

  // `free` takes one mbuf each time, a chain of one.
  Reassembler(const ReassemblyOptions& options, void (*free)(rte_mbuf*));
  ~Reassembler();
  Reassembler(const Reassembler&) = delete;
  Reassembler& operator=(const Reassembler&) = delete;

  // False: there was no memory, and nothing else may be called.
  bool ok() const noexcept { return buckets_.ok() && entries_.ok() && cells_.ok(); }

  // Takes over a frame that ParseFrame() called a fragment. When it is the datagram's last
  // missing one, returns the datagram: a frame with the headers of the first fragment, which now
  // speak of a whole datagram (an IPv6 fragment header is gone), in a chain of the fragments'
  // data, without any padding. Its mbufs may be of several mempools. Else nullptr: kept, or
  // dropped and counted.
  //
  // Not more than min(options.pages, page_limit) mbufs are kept; each segment of a frame is one.
  // A limit that is not the same each time costs others their datagrams.
  // `now_ns` must not go backwards.
  rte_mbuf* Add(rte_mbuf* frame, const ParsedFrame& parsed, std::uint32_t port,
                std::uint64_t now_ns, std::uint32_t page_limit) {
    return Add(frame, parsed, port, FetchBucket(parsed, port), now_ns, page_limit);
  }
  // The same, for who fetches some fragments ahead, in two steps, and passes the hash.
  rte_mbuf* Add(rte_mbuf* frame, const ParsedFrame& parsed, std::uint32_t port, std::uint64_t hash,
                std::uint64_t now_ns, std::uint32_t page_limit);

  // What Add() will need. They change nothing.
  std::uint64_t FetchBucket(const ParsedFrame& parsed, std::uint32_t port) const noexcept;
  void FetchEntry(std::uint64_t hash) const noexcept;

  // Whether a segment of what Add() returned is a copy, of one or several small fragments.
  static bool IsCopy(const rte_mbuf* segment) noexcept { return segment->hash.usr == kCopy; }

  // Drops what is too old in the next few buckets. Constant work.
  void Expire(std::uint64_t now_ns);

  // Drops each datagram that holds an mbuf of a mempool for which `predicate(pool)` is true.
  // Walks the whole table.
  template <typename Predicate>
  void DropIf(Predicate predicate) {
    for (std::uint32_t slot = 0; slot < slots(); slot++) {
      for (const rte_mbuf* piece = Holding(slot); piece != nullptr; piece = piece->next) {
        if (IsCell(piece) || !predicate(piece->pool)) continue;
        counters_.evicted++;
        Remove(slot);
        break;
      }
    }
  }

  const Counters& counters() const noexcept { return counters_; }
  std::uint32_t datagrams() const noexcept { return datagrams_; }  // in progress
  std::uint32_t pages() const noexcept { return pages_; }          // mbufs held
  std::uint32_t cells() const noexcept { return cells_held_; }     // in use

 private:
  static constexpr std::uint32_t kWays = 8;
  static constexpr std::uint32_t kNoSlot = ~0u;
  static constexpr std::uint32_t kCopy = ~0u;  // no fragment is 65535 bytes at offset 65535

  // What a look-up, the choice of a victim and FetchEntry() need of eight entries.
  struct alignas(64) Bucket {
    std::array<std::uint16_t, kWays> tag;       // of the hash; 0: free
    std::array<std::uint16_t, kWays> started;   // 2^20 ns
    std::array<std::uint32_t, kWays> progress;  // 2^10 ns, of the last fragment
    std::array<rte_mbuf*, kWays> tail;          // the last piece by offset
  };
  static_assert(sizeof(Bucket) == 128);

  struct alignas(64) Entry {
    std::array<std::uint64_t, 2> w;  // of the key
    rte_mbuf* head;                  // the pieces by offset
    std::uint32_t port;
    std::uint16_t total;     // bytes of data; 0: not known yet
    std::uint16_t received;  // bytes of data
    std::uint16_t end;       // of the last fragment there is
    std::uint16_t pages;     // mbufs, among the pieces
    std::uint16_t cells;     // copies, among the pieces
    // Of the first fragment.
    std::uint16_t header_bytes;  // in front of its data
    std::uint16_t next_header;
    std::uint8_t ip_header;
    std::uint8_t fragments;
    bool dropped;  // what still comes for it goes the same way
    std::array<std::uint64_t, 3> w6;
  };
  static_assert(sizeof(Entry) == 128);

  // A copy of a small fragment, behind what looks like its mbuf, but is of no mempool.
  // Nine lines, so that cells spread over all sets of the caches.
  struct alignas(64) Cell {
    static constexpr std::size_t kBytes = 576 - sizeof(rte_mbuf);

    rte_mbuf* mbuf() noexcept { return reinterpret_cast<rte_mbuf*>(memory.data()); }
    std::uint8_t* bytes() noexcept { return memory.data() + sizeof(rte_mbuf); }

    std::array<std::uint8_t, 576> memory;
  };
  static_assert(sizeof(Cell) == 576);

  // What is noted in an mbuf: hash.usr is the driver's RSS hash, which nobody reads here; it
  // lies in the line that has data_off and data_len, and drivers do not expect it to stay.
  static void SetPlace(rte_mbuf* piece, std::uint32_t offset,
                       std::uint32_t fragment_bytes) noexcept {
    piece->hash.usr = offset | fragment_bytes << 16;
  }
  static std::uint32_t OffsetOf(const rte_mbuf* piece) noexcept { return piece->hash.usr & 0xFFFF; }
  // Of the whole fragment if this is its first segment, else 0.
  static std::uint32_t FragmentBytes(const rte_mbuf* piece) noexcept {
    return piece->hash.usr >> 16;
  }
  static bool IsCell(const rte_mbuf* piece) noexcept { return piece->pool == nullptr; }

  // An entry: way slot % kWays of bucket slot / kWays.
  std::uint32_t slots() const noexcept { return (bucket_mask_ + 1) * kWays; }
  std::uint16_t& TagOf(std::uint32_t slot) const noexcept {
    return buckets_[slot / kWays].tag[slot % kWays];
  }
  // The pieces it holds; nullptr as well if it is free.
  const rte_mbuf* Holding(std::uint32_t slot) const noexcept {
    return TagOf(slot) == 0 ? nullptr : entries_[slot].head;
  }

  std::uint64_t Hash(const ParsedFrame& parsed, std::uint32_t port) const noexcept;
  Bucket& BucketOf(std::uint64_t hash) const noexcept {
    return buckets_[static_cast<std::uint32_t>(hash) & bucket_mask_];
  }
  static std::uint32_t Matches(const Bucket& bucket, std::uint16_t tag) noexcept;
  std::uint32_t Victim(const Bucket& bucket) const noexcept;
  bool Expired(std::uint32_t slot) const noexcept;
  std::uint32_t FindOrTake(const ParsedFrame& parsed, std::uint32_t port, std::uint64_t hash);
  void Evict(std::uint32_t slot, std::uint64_t& counter);
  void EvictOldest(std::uint32_t except);
  void Condemn(std::uint32_t slot, std::uint64_t& counter);
  void Remove(std::uint32_t slot);
  void FreePieces(std::uint32_t slot);

  rte_mbuf* KeepPages(Entry& entry, rte_mbuf* frame, const IpFragment& fragment);
  rte_mbuf* KeepCopy(Entry& entry, rte_mbuf* frame, const IpFragment& fragment);
  rte_mbuf* Finish(std::uint32_t slot, rte_mempool* pool);
  bool ReplaceCells(Entry& entry, rte_mempool* pool);
  void FreeCell(rte_mbuf* cell) noexcept;
  void FreeMbuf(rte_mbuf* mbuf);
  void FreeFrame(rte_mbuf* frame);

  const std::uint32_t bucket_mask_;
  const std::uint32_t max_pages_;
  const std::uint32_t timeout_;  // 2^20 ns
  std::array<std::uint64_t, 2> hash_key_;
  void (*const free_)(rte_mbuf*);
  DemandZeroArray<Bucket> buckets_;
  DemandZeroArray<Entry> entries_;
  DemandZeroArray<Cell> cells_;
  std::uint32_t fresh_cells_ = 0;      // from here on no cell was used yet
  std::uint32_t free_cell_ = kNoSlot;  // the last one that was freed; hash.usr: the one before
  std::uint32_t cells_held_ = 0;
  std::uint32_t pages_ = 0;
  // These two are not neighbours: compilers then change both in one go, and wait for what was
  // stored one by one.
  std::uint32_t datagrams_ = 0;  // without those dropped
  std::uint32_t swept_ = 0;      // bucket, of Expire()
  std::uint32_t hand_ = 0;       // bucket, of EvictOldest()
  std::uint32_t entries_used_ = 0;
  std::uint64_t now_ns_ = 0;
  Counters counters_;
};

}  // namespace rxtoken
