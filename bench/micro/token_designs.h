// SPDX-License-Identifier: Apache-2.0
// token_designs.h - rxtoken's counts, and the designs that they replace.
//
// A design lends pages for tokens and takes the tokens back. All of them do it in batches:
// `LendAll(pages, tokens)`, and `ReturnAll(tokens, give)`, which calls give(page) for each
// token that it accepts and answers how many those were. Most are written for one page, as
//
//   Token Lend(page)             Return(token): the page, or kRefused
//
// and Batched<> makes the loops. A page may be lent several times at once.
#pragma once

#include <Judy.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#define URCU_INLINE_SMALL_FUNCTIONS
#include <urcu/rculfhash.h>
#include <urcu/urcu-bp.h>

#include "bench/micro/harness.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/abi/ring.h"
#include "tokens/demand_zero.h"
#include "tokens/lane.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"

namespace rxtoken::micro {

inline constexpr std::uint32_t kRefused = ~0u;
inline constexpr std::uint32_t kMaxBatch = 128;

// Tokens out at once, over all: what fits into the rings.
inline constexpr std::uint32_t kRingEntries = 1024;

using Counts = DemandZeroArray<std::atomic<std::uint32_t>>;

// As after a while of use, so that no page fault is measured.
template <typename T>
DemandZeroArray<T> Touched(std::size_t size) {
  DemandZeroArray<T> array(size);
  if (!array.ok()) Die("not enough memory");
  auto* const bytes = reinterpret_cast<volatile char*>(array.data());
  for (std::size_t at = 0; at < size * sizeof(T); at += 4096) bytes[at] = 0;
  return array;
}

class SpinLock {
 public:
  void lock() noexcept {
    while (locked_.exchange(true, std::memory_order_acquire)) {
      while (locked_.load(std::memory_order_relaxed)) Pause();
    }
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> locked_{false};
};

template <typename Design>
struct Batched : Design {
  using Design::Design;
  using typename Design::Token;

  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    for (std::size_t i = 0; i < pages.size(); i++) tokens[i] = Design::Lend(pages[i]);
  }

  template <typename Give>
  std::uint32_t ReturnAll(std::span<const Token> tokens, Give&& give) noexcept {
    std::uint32_t accepted = 0;
    for (const Token token : tokens) {
      const std::uint32_t page = Design::Return(token);
      if (page == kRefused) continue;
      give(page);
      accepted++;
    }
    return accepted;
  }
};

// The whole batch is fetched before it is worked on.
template <typename Design>
struct Prefetched : Design {
  using Design::Design;
  using typename Design::Token;

  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    for (const std::uint32_t page : pages) Design::Prefetch(page);
    Design::LendAll(pages, tokens);
  }
  template <typename Give>
  std::uint32_t ReturnAll(std::span<const Token> tokens, Give&& give) noexcept {
    for (const std::uint32_t page : tokens) Design::Prefetch(page);
    return Design::ReturnAll(tokens, give);
  }
};

// ---- ours --------------------------------------------------------------------------------------

// A lane of rxtokend, descriptors written and all. Its slot is 0, so a token is its page.
class Ours {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit Ours(std::uint32_t pages)
      : table_(1, pages, nullptr),
        descriptor_memory_(Touched<std::byte>(DescriptorRingBytes(kRingEntries))),
        return_memory_(Touched<std::byte>(ReturnRingBytes(kRingEntries))),
        descriptors_(new (descriptor_memory_.data()) DescriptorRing{}),
        returns_(new (return_memory_.data()) ReturnRing{}),
        reader_(WithEntries(descriptors_), returns_) {
    lane_ = std::make_unique<Lane>(0, &slots_, descriptors_, returns_);
    // The first lending makes the urefs; then they are touched like all else.
    const std::uint32_t last = pages - 1;
    Token token;
    LendAll({&last, 1}, &token);
    for (std::uint32_t at = 0; at < pages; at += 1024) {
      table_.cells()[at].store(0, std::memory_order_relaxed);
      slots_.urefs(0)[at].count.store(0, std::memory_order_relaxed);
    }
    Return(last);
    std::array<Descriptor, kMaxBatch> read;
    consumed_ = static_cast<std::uint32_t>(reader_.Poll(read));
    reader_.Consume(consumed_);
  }

  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    if (!TryLend(pages)) Die("a lane is full");
    std::copy(pages.begin(), pages.end(), tokens);
    // The application reads them at once, at no cost.
    consumed_ += static_cast<std::uint32_t>(pages.size());
    returns_->descriptor_head.store(consumed_, std::memory_order_release);
  }

  // False if the descriptor ring is full.
  bool TryLend(std::span<const std::uint32_t> pages) noexcept {
    const auto n = static_cast<std::uint32_t>(pages.size());
    if (lane_->Room(n) < n) return false;
    std::array<LendItem, kMaxBatch> items;
    for (std::uint32_t i = 0; i < n; i++) {
      items[i] = {.ip_header_distance = 28, .page = pages[i], .offset = 128, .length = 64};
    }
    return lane_->Lend(table_, {items.data(), n}, 0);
  }

  template <typename Give>
  std::uint32_t ReturnAll(std::span<const Token> tokens, Give&& give) noexcept {
    Recycle<Give> recycle{give};
    return lane_->Return(tokens, recycle);
  }

  // What the application put into the return ring; `give` as above.
  template <typename Give>
  void Drain(Give&& give) noexcept {
    Recycle<Give> recycle{give};
    lane_->Drain(recycle, 0);
  }

  std::uint32_t Return(Token token) noexcept {
    std::uint32_t page = kRefused;
    ReturnAll(std::span(&token, 1), [&](std::uint32_t p) { page = p; });
    return page;
  }

  void Prefetch(std::uint32_t page) const noexcept {
    __builtin_prefetch(&table_.cells()[page], 1);
    __builtin_prefetch(&slots_.urefs(0)[page], 1);
  }

  Lane& lane() noexcept { return *lane_; }
  LaneReader& reader() noexcept { return reader_; }  // the application's end

 private:
  template <typename Give>
  struct Recycle {
    Give& give;
    Give& Open(const PageTable&) noexcept { return give; }
  };

  static const DescriptorRing* WithEntries(DescriptorRing* ring) noexcept {
    ring->entries = kRingEntries;
    return ring;
  }

  PageTable table_;
  SlotTable slots_;
  DemandZeroArray<std::byte> descriptor_memory_;
  DemandZeroArray<std::byte> return_memory_;
  DescriptorRing* descriptors_;
  ReturnRing* returns_;
  LaneReader reader_;
  std::unique_ptr<Lane> lane_;
  std::uint32_t consumed_ = 0;
};

// ---- limits, of one thread only: its counts are not atomic
// ------------------------------------------------------------------------------------

struct OneThreadOnly {};

// No check at all: less cannot be done if there is a count for each page.
class Unchecked : public OneThreadOnly {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = false;

  explicit Unchecked(std::uint32_t pages) : counts_(Touched<std::atomic<std::uint32_t>>(pages)) {}

  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    std::atomic<std::uint32_t>* const counts = counts_.data();
    for (const std::uint32_t page : pages) {
      counts[page].store(counts[page].load(std::memory_order_relaxed) + 1,
                         std::memory_order_relaxed);
      *tokens++ = page;
    }
  }
  template <typename Give>
  std::uint32_t ReturnAll(std::span<const Token> tokens, Give&& give) noexcept {
    std::atomic<std::uint32_t>* const counts = counts_.data();
    for (const Token page : tokens) {
      counts[page].store(counts[page].load(std::memory_order_relaxed) - 1,
                         std::memory_order_relaxed);
      give(page);
    }
    return static_cast<std::uint32_t>(tokens.size());
  }

 private:
  Counts counts_;
};

// The same with what an application must be told, as ours tells it.
class UncheckedWithDescriptors : public Unchecked {
 public:
  explicit UncheckedWithDescriptors(std::uint32_t pages)
      : Unchecked(pages), descriptors_(Touched<Descriptor>(kRingEntries)) {}

  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    Unchecked::LendAll(pages, tokens);
    Descriptor* const ring = descriptors_.data();
    for (const std::uint32_t page : pages) {
      Descriptor& descriptor = ring[tail_++ % kRingEntries];
      descriptor = {};
      descriptor.kind = DescriptorKind::kFragment;
      descriptor.ip_header_distance = 28;
      descriptor.token = page;
      descriptor.offset = 128;
      descriptor.length = 64;
    }
  }

 private:
  DemandZeroArray<Descriptor> descriptors_;
  std::uint32_t tail_ = 0;
};

// Tokens travel, and nobody counts.
struct NoState : OneThreadOnly {
  explicit NoState(std::uint32_t) {}
  using Token = std::uint32_t;
  void LendAll(std::span<const std::uint32_t> pages, Token* tokens) noexcept {
    std::copy(pages.begin(), pages.end(), tokens);
  }
  template <typename Give>
  std::uint32_t ReturnAll(std::span<const Token> tokens, Give&&) noexcept {
    return static_cast<std::uint32_t>(tokens.size());
  }
};

// ---- arrays of atomic counts, which any thread may change --------------------------------------

class AtomicCounts {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit AtomicCounts(std::uint32_t pages)
      : counts_(Touched<std::atomic<std::uint32_t>>(pages)) {}

  Token Lend(std::uint32_t page) noexcept {
    counts_[page].fetch_add(1, std::memory_order_relaxed);
    return page;
  }
  void Prefetch(std::uint32_t page) const noexcept { __builtin_prefetch(&counts_[page], 1); }

 protected:
  Counts counts_;
};

// Looks before it subtracts, and so is exact.
struct CompareExchange : AtomicCounts {
  using AtomicCounts::AtomicCounts;

  std::uint32_t Return(Token page) noexcept {
    if (page >= counts_.size()) return kRefused;
    std::uint32_t held = counts_[page].load(std::memory_order_relaxed);
    do {
      if (held == 0) return kRefused;
    } while (!counts_[page].compare_exchange_weak(held, held - 1, std::memory_order_acq_rel,
                                                  std::memory_order_relaxed));
    return page;
  }
};

// Subtracts, looks at the sign, and adds again. Not exact: while one thread has subtracted
// what is not there, another's good token is refused.
struct FetchSubAndSign : AtomicCounts {
  using AtomicCounts::AtomicCounts;

  std::uint32_t Return(Token page) noexcept {
    if (page >= counts_.size()) return kRefused;
    const auto left = counts_[page].fetch_sub(1, std::memory_order_acq_rel) - 1;
    if (static_cast<std::int32_t>(left) < 0) {
      counts_[page].fetch_add(1, std::memory_order_relaxed);
      return kRefused;
    }
    return page;
  }
};

// A rx socket's count and the page's own, in two arrays, as Linux has them.
class TwoAtomicCounts : public CompareExchange {
 public:
  explicit TwoAtomicCounts(std::uint32_t pages)
      : CompareExchange(pages), holders_(Touched<std::atomic<std::uint32_t>>(pages)) {}

  Token Lend(std::uint32_t page) noexcept {
    holders_[page].fetch_add(1, std::memory_order_relaxed);
    return CompareExchange::Lend(page);
  }
  // Refused, too, if others hold the page: it is not free.
  std::uint32_t Return(Token token) noexcept {
    const std::uint32_t page = CompareExchange::Return(token);
    if (page == kRefused) return kRefused;
    return holders_[page].fetch_sub(1, std::memory_order_acq_rel) == 1 ? page : kRefused;
  }

 private:
  Counts holders_;
};

// The token is the address of the page's record, as large as Linux's, and is believed.
class PagePointer {
  struct alignas(64) Page {
    std::atomic<std::uint32_t> count;
    std::uint32_t index;
  };

 public:
  using Token = Page*;
  static constexpr bool kRefuses = false;

  explicit PagePointer(std::uint32_t pages) : pages_(Touched<Page>(pages)) {
    for (std::uint32_t i = 0; i < pages; i++) pages_[i].index = i;
  }
  Token Lend(std::uint32_t page) noexcept {
    pages_[page].count.fetch_add(1, std::memory_order_relaxed);
    return &pages_[page];
  }
  std::uint32_t Return(Token page) noexcept {
    page->count.fetch_sub(1, std::memory_order_acq_rel);
    return page->index;
  }

 private:
  DemandZeroArray<Page> pages_;
};

// ---- maps of what is lent ----------------------------------------------------------------------

// A clean-room stand-in for the kernel's xarray: nodes of 64 behind one lock, the lowest free
// number allocated on lending and erased on return, nodes that come and go with their content.
// The real one does the same in 2.4 times the time.
class RadixTree {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit RadixTree(std::uint32_t) : root_(NewNode(nullptr, 0, 0)) {}

  Token Lend(std::uint32_t page) noexcept {
    const std::lock_guard guard(lock_);
    if (root_->free == 0) Grow();
    Node* node = root_;
    std::uint32_t token = 0;
    for (;;) {
      const auto i = static_cast<unsigned>(std::countr_zero(node->free));
      token = token << kBits | i;
      if (node->shift == 0) {
        node->items[i].page = page + 1;
        node->used++;
        MarkFull(node, i);
        return token;
      }
      Node*& child = node->items[i].child;
      if (child == nullptr) {
        child = NewNode(node, node->shift - kBits, i);
        node->used++;
      }
      node = child;
    }
  }

  std::uint32_t Return(Token token) noexcept {
    const std::lock_guard guard(lock_);
    if (token >> root_->shift >= kFanout) return kRefused;
    Node* node = root_;
    while (node->shift != 0) {
      node = node->items[token >> node->shift & (kFanout - 1)].child;
      if (node == nullptr) return kRefused;
    }
    Item& item = node->items[token & (kFanout - 1)];
    if (item.page == 0) return kRefused;
    const auto page = static_cast<std::uint32_t>(item.page - 1);
    item.page = 0;
    MarkFree(node, token & (kFanout - 1));
    Shrink(node);
    return page;
  }

 private:
  static constexpr unsigned kBits = 6;
  static constexpr std::uint32_t kFanout = 1u << kBits;

  struct Node;
  union Item {
    std::uint64_t page;  // + 1; 0: not lent
    Node* child;
  };
  struct Node {
    std::uint64_t free = ~std::uint64_t{0};  // a bit for each item below which there is room
    Node* parent;
    std::uint32_t used = 0;  // items
    std::uint16_t shift;
    std::uint16_t place;  // in the parent
    std::array<Item, kFanout> items = {};
  };

  Node* NewNode(Node* parent, unsigned shift, unsigned place) {
    if (spare_.empty()) {
      memory_.push_back(std::make_unique<Node>());
      spare_.push_back(memory_.back().get());
    }
    Node* const node = spare_.back();
    spare_.pop_back();
    *node = {};
    node->parent = parent;
    node->shift = static_cast<std::uint16_t>(shift);
    node->place = static_cast<std::uint16_t>(place);
    return node;
  }

  // One level more, on top.
  void Grow() {
    Node* const top = NewNode(nullptr, root_->shift + kBits, 0);
    top->items[0].child = root_;
    top->used = 1;
    top->free &= ~std::uint64_t{1};
    root_->parent = top;
    root_ = top;
  }

  static void MarkFull(Node* node, unsigned i) noexcept {
    while ((node->free &= ~(std::uint64_t{1} << i)) == 0 && node->parent != nullptr) {
      i = node->place;
      node = node->parent;
    }
  }
  static void MarkFree(Node* node, unsigned i) noexcept {
    for (;;) {
      const bool was_full = node->free == 0;
      node->free |= std::uint64_t{1} << i;
      if (!was_full || node->parent == nullptr) return;
      i = node->place;
      node = node->parent;
    }
  }
  // Takes one item off `node`, and empty nodes off the tree.
  void Shrink(Node* node) {
    while (--node->used == 0 && node->parent != nullptr) {
      Node* const parent = node->parent;
      parent->items[node->place].child = nullptr;
      spare_.push_back(node);
      node = parent;
    }
  }

  SpinLock lock_;
  std::vector<std::unique_ptr<Node>> memory_;
  std::vector<Node*> spare_;
  Node* root_;
};

// Page -> count, a lock in each bucket of one cache line.
class HashMap {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit HashMap(std::uint32_t) : buckets_(Touched<Bucket>(kBuckets)) {}

  Token Lend(std::uint32_t page) noexcept {
    Bucket& bucket = BucketOf(page);
    const std::lock_guard guard(bucket.lock);
    Entry* place = nullptr;
    for (Entry& entry : bucket.entries) {
      if (entry.count == 0) {
        place = &entry;
      } else if (entry.page == page) {
        place = &entry;
        break;
      }
    }
    // There are eight buckets for each token that can be out.
    if (place == nullptr) Die("a bucket of the hash map is full");
    place->page = page;
    place->count++;
    return page;
  }

  std::uint32_t Return(Token page) noexcept {
    Bucket& bucket = BucketOf(page);
    const std::lock_guard guard(bucket.lock);
    for (Entry& entry : bucket.entries) {
      if (entry.count != 0 && entry.page == page) {
        entry.count--;
        return page;
      }
    }
    return kRefused;
  }

 private:
  static constexpr std::uint32_t kBuckets = 8 * kRingEntries;

  struct Entry {
    std::uint32_t page;
    std::uint32_t count;
  };
  struct alignas(64) Bucket {
    SpinLock lock;
    std::array<Entry, 7> entries;
  };

  Bucket& BucketOf(std::uint32_t page) noexcept {
    std::uint32_t hash = page * 0x85EB'CA6Bu;
    hash = (hash ^ hash >> 15) * 0xC2B2'AE35u;
    return buckets_[(hash ^ hash >> 16) % kBuckets];
  }

  DemandZeroArray<Bucket> buckets_;
};

// Token -> page in liburcu's lock-free hash table; tokens are numbered.
class LockFreeHash {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit LockFreeHash(std::uint32_t)
      : table_(cds_lfht_new_flavor(kBuckets, kBuckets, kBuckets, 0, &urcu_bp_flavor, nullptr)),
        nodes_(Touched<Node>(kNodes)) {}
  ~LockFreeHash() { cds_lfht_destroy(table_, nullptr); }

  Token Lend(std::uint32_t page) noexcept {
    Node& node = NextNode();
    node.lent.store(true, std::memory_order_relaxed);
    node.token = next_++;
    node.page = page;
    cds_lfht_node_init(&node.node);
    urcu_bp_read_lock();
    cds_lfht_add(table_, Hash(node.token), &node.node);
    urcu_bp_read_unlock();
    return node.token;
  }

  std::uint32_t Return(Token token) noexcept {
    std::uint32_t page = kRefused;
    urcu_bp_read_lock();
    cds_lfht_iter found;
    cds_lfht_lookup(table_, Hash(token), Matches, &token, &found);
    cds_lfht_node* const there = cds_lfht_iter_get_node(&found);
    if (there != nullptr && cds_lfht_del(table_, there) == 0) {
      Node& node = *reinterpret_cast<Node*>(there);
      page = node.page;
      node.lent.store(false, std::memory_order_relaxed);
    }
    urcu_bp_read_unlock();
    return page;
  }

 private:
  static constexpr std::uint32_t kBuckets = 2 * kRingEntries;
  static constexpr std::uint32_t kNodes = 64 * kRingEntries;

  struct Node {
    cds_lfht_node node;  // first
    std::uint32_t token;
    std::uint32_t page;
    std::atomic<bool> lent;
  };

  // Nodes are used again in turn, but for those still lent, and after a grace period: one for
  // half of them.
  Node& NextNode() noexcept {
    for (;; next_++) {
      if (next_ % (kNodes / 2) == 0) urcu_bp_synchronize_rcu();
      Node& node = nodes_[next_ % kNodes];
      if (!node.lent.load(std::memory_order_relaxed)) return node;
    }
  }

  static unsigned long Hash(std::uint32_t token) noexcept {
    return token * 0x9E37'79B9'7F4A'7C15u >> 32;
  }
  static int Matches(cds_lfht_node* node, const void* token) noexcept {
    return reinterpret_cast<Node*>(node)->token == *static_cast<const std::uint32_t*>(token);
  }

  cds_lfht* table_;
  DemandZeroArray<Node> nodes_;
  std::uint32_t next_ = 0;
};

// Page -> count in a Judy array behind a lock.
class Judy {
 public:
  using Token = std::uint32_t;
  static constexpr bool kRefuses = true;

  explicit Judy(std::uint32_t) {}
  ~Judy() { JudyLFreeArray(&array_, PJE0); }

  Token Lend(std::uint32_t page) noexcept {
    const std::lock_guard guard(lock_);
    ++*reinterpret_cast<Word_t*>(JudyLIns(&array_, page, PJE0));
    return page;
  }
  std::uint32_t Return(Token page) noexcept {
    const std::lock_guard guard(lock_);
    auto* const count = reinterpret_cast<Word_t*>(JudyLGet(array_, page, PJE0));
    if (count == nullptr) return kRefused;
    if (--*count == 0) JudyLDel(&array_, page, PJE0);
    return page;
  }

 private:
  SpinLock lock_;
  void* array_ = nullptr;
};

}  // namespace rxtoken::micro
