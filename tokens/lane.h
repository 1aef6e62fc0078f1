// SPDX-License-Identifier: Apache-2.0
// lane.h - one worker's side of one rx socket: lends fragments, takes them back, counts.
//
// The heart of rxtoken. Everything a lane writes on the path has one writer, its worker:
//
//   state                        written by             read by
//   -----                        ----------             -------
//   cell (PageTable)             the page's owner       any thread, statistics
//   uref (SlotTable)             the page's owner       any thread, statistics
//   descriptor ring              this lane              the application
//   return ring                  the application        this lane, which trusts nothing in it
//   everything else              this lane              nobody
//
// so that lending and returning need no locked instruction. A fragment that is lent holds
// its page through `uref`, this rx socket's count, and the lower half of `cell`, the count
// over all rx sockets. Returning checks, in this order and before it writes anything: the
// slot is in use on this lane; the buffer has the page; this worker has lent the page; this
// rx socket holds it.
//
// Hot path: Lend, Return, Drain.   Thread-safety: the lane's worker only.
// Allocates: never, but address space for urefs when a slot is taken.   Blocks: never.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tokens/abi/counters.h"
#include "tokens/abi/ring.h"
#include "tokens/abi/token.h"
#include "tokens/hold_time.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"

namespace rxtoken {

struct LaneCounters {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t lent = 0;      // fragments
  std::uint64_t returned = 0;  // fragments
  std::uint64_t copied_messages = 0;
  std::uint64_t doorbells = 0;
  std::uint64_t revoked = 0;  // fragments; part of `returned`
  std::array<std::uint64_t, kDropReasons> drops = {};
  std::array<std::uint64_t, kRefusals> refusals = {};
  std::array<std::uint64_t, kHoldBuckets> hold_times = {};  // of the first token of each lot
};

// A piece of a message, ready to be lent: the front of its descriptor, without slot and time.
struct LendItem {
  DescriptorKind kind = DescriptorKind::kFragment;
  std::uint8_t flags = 0;  // kMoreFragments and so on
  std::uint8_t ip_header_distance = 0;
  std::uint8_t unused = 0;
  std::uint32_t page;
  std::uint16_t offset;  // bytes from the start of the page
  std::uint16_t length;
};
static_assert(offsetof(LendItem, page) == offsetof(Descriptor, token));
static_assert(offsetof(LendItem, offset) == offsetof(Descriptor, offset));
static_assert(sizeof(LendItem) == offsetof(Descriptor, time_low));

// What takes back a page on which nothing is lent any more. Pages come back in runs of one
// binding: `recycler.Open(table)` answers an object that is called with each page index.
template <typename R>
concept Recycler = requires(R& recycler, const PageTable& table, std::uint32_t page) {
  recycler.Open(table)(page);
};

class Lane {
 public:
  // `slots` and the rings, which are zero apart from their header, outlive the lane.
  // `max_held`: fragments that may be outstanding here; 0: no limit.
  Lane(std::uint32_t worker, SlotTable* slots, DescriptorRing* descriptors, ReturnRing* returns,
       std::uint32_t max_held = 0)
      : worker_(worker),
        slots_(slots),
        descriptors_(descriptors),
        returns_(returns),
        mask_(descriptors->entries - 1),
        max_held_(max_held) {}
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // ---- lending ---------------------------------------------------------------------------

  // How many of `wanted` more fragments the ring has room for, beside what may have to be
  // announced in front of them.
  std::uint32_t Room(std::uint32_t wanted) noexcept {
    if (events_ != 0 && !WriteEvents()) [[unlikely]]
      return 0;
    constexpr std::uint32_t kAnnouncements = 2;  // a slot and a time
    std::uint32_t free = mask_ + 1 - (tail_ - head_seen_);
    if (free < wanted + kAnnouncements) [[unlikely]] {
      free = FreeDescriptors();
      if (free < wanted + kAnnouncements) {
        return free > kAnnouncements ? free - kAnnouncements : 0;
      }
    }
    return wanted;
  }

  // How many of `wanted` more fragments may be outstanding. If not all, the application is told,
  // once until half of what it may hold is back.
  std::uint32_t Allowance(std::uint32_t wanted) noexcept {
    const std::uint32_t n = Spare(wanted);
    if (n < wanted && !lease_lost() && !std::exchange(limit_told_, true)) [[unlikely]] {
      AddEvent(DescriptorKind::kHeldLimit, 0, 0);
    }
    return n;
  }
  // The same, and nobody is told.
  std::uint32_t Spare(std::uint32_t wanted) noexcept {
    if (lease_lost()) [[unlikely]] {
      ReleaseKept();
      if (lease_lost()) return 0;
    }
    if (max_held_ == 0) return wanted;
    std::uint64_t held = counters_.lent - counters_.returned;
    if (held + wanted > max_held_ && uncounted_ != nullptr) held -= OutstandingOf(*uncounted_);
    if (held <= max_held_ / 2) limit_told_ = false;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(wanted, max_held_ - std::min<std::uint64_t>(held, max_held_)));
  }

  // What is lent of `table` does not count against `max_held`.
  void set_uncounted(const PageTable* table) noexcept { uncounted_ = table; }

  // The application does not know yet that fragments which it held have expired. It gets nothing
  // until it does: so one that stands still keeps one slot for each binding that it held of.
  bool lease_lost() const noexcept { return (expired_slots_ & unread_slots_) != 0; }
  // Why Allowance() was less than wanted.
  DropReason WhyNotMore() const noexcept {
    return lease_lost() ? DropReason::kLeaseLost : DropReason::kHeldLimit;
  }

  // Lends `items`, all on pages of `table` that this worker received, and all of them whole
  // messages or the fragments of one. `time_ns` is when they arrived. False, with nothing
  // done: no slot is free. Precondition: Room() for all of them.
  bool Lend(const PageTable& table, std::span<const LendItem> items,
            std::uint64_t time_ns) noexcept {
    if (!Prepare(table)) [[unlikely]]
      return false;
    if (const auto high = static_cast<std::uint32_t>(time_ns >> 32); high != time_high_)
        [[unlikely]] {
      AnnounceTime(high);
    }
    SlotView& view = views_[lending_slot_];
    // Locals: a store through cells or urefs may alias our members, as far as the compiler
    // knows, and would make it load them again for each fragment.
    std::atomic<std::uint32_t>* const cells = view.cells;
    Uref* const urefs = view.urefs;
    const std::uint32_t lent_at = HoldClock(time_ns);
    const std::uint32_t owner = PageTable::OwnerBits(worker_);
    const std::uint64_t slot_bits = std::uint64_t{lending_slot_} << (kPageBits + 32);
    const std::uint64_t time_low = time_ns << 32;
    Descriptor* const ring = descriptors_->descriptors();
    const std::uint32_t mask = mask_;
    std::uint32_t tail = tail_;
    std::uint64_t bytes = 0;
    for (const LendItem& item : items) {
      std::uint64_t front;
      std::uint32_t back;
      std::memcpy(&front, &item, sizeof front);
      std::memcpy(&back, &item.offset, sizeof back);
      const std::size_t page = front >> 32;
      const std::uint32_t cell = cells[page].load(std::memory_order_relaxed);
      std::uint32_t taken = cell + 1;
      if (cell - owner >= PageTable::kMaxLent - 1) [[unlikely]]
        taken = Take(table, owner, cell);
      cells[page].store(taken, std::memory_order_relaxed);
      Uref& uref = urefs[page];
      uref.count.store(uref.count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      uref.lent_at.store(lent_at, std::memory_order_relaxed);
      const std::uint64_t words[2] = {front | slot_bits, back | time_low};
      std::memcpy(static_cast<void*>(&ring[tail & mask]), words, sizeof(words));
      tail++;
      bytes += back >> 16;
    }
    tail_ = tail;
    view.outstanding += items.size();
    counters_.lent += items.size();
    counters_.bytes += bytes;
    return true;
  }

  // Fetches for writing the part of the ring that the next `n` fragments will fill.
  void PrefetchRing(std::uint32_t n) const noexcept {
    const Descriptor* const ring = descriptors_->descriptors();
    for (std::uint32_t i = 0; i < n; i += 64 / sizeof(Descriptor)) {
      __builtin_prefetch(&ring[(tail_ + i) & mask_], 1);
    }
  }

  std::uint32_t unpublished() const noexcept { return tail_ - published_; }

  // Lets the application see what was lent.
  void Publish() noexcept {
    // order: release pairs with the application's acquire: descriptors and payload first.
    descriptors_->tail.store(tail_, std::memory_order_release);
    published_ = tail_;
  }

  // True if the application sleeps although something is published. To be asked again until
  // the application has read everything: its wish may become visible to us after we asked,
  // without having seen our tail. A fence in Publish() would settle it there and then, but
  // waits for all descriptors to reach the other core.
  bool WantsDoorbell() const noexcept {
    const std::uint32_t wish = returns_->waiting.load(std::memory_order_relaxed);
    return wish != 0 && wish != rung_ &&
           returns_->descriptor_head.load(std::memory_order_relaxed) != published_;
  }
  // The doorbell that the application wishes for now is about to be rung. Not afterwards: it
  // may have woken, and wish for the next one already.
  void Rung() noexcept {
    rung_ = returns_->waiting.load(std::memory_order_relaxed);
    counters_.doorbells++;
  }

  // ---- returning -------------------------------------------------------------------------

  // Takes back at most kDrainTokens of what the application has put into its return ring;
  // how many tokens were read. `now_ns`: the time, by the clock of Lend().
  static constexpr std::uint32_t kDrainTokens = 256;
  template <Recycler R>
  std::uint32_t Drain(R& recycler, std::uint64_t now_ns) noexcept {
    // order: acquire pairs with the application's release: the tokens are there, and its
    // reads of the payload are over.
    const std::uint32_t tail = returns_->tail.load(std::memory_order_acquire);
    std::uint32_t n = tail - return_head_;
    if (n == 0) return 0;
    if (n > mask_ + 1) [[unlikely]] {
      Refuse(Refusal::kBadRing);
      n = 0;
      return_head_ = tail;  // take its word for where the ring goes on
    }
    n = std::min(n, kDrainTokens);
    std::array<std::uint32_t, kDrainTokens> tokens;  // copied once; it may change them now
    const std::atomic<std::uint32_t>* const ring = returns_->tokens();
    for (std::uint32_t i = 0; i < n; i++) {
      tokens[i] = ring[(return_head_ + i) & mask_].load(std::memory_order_relaxed);
    }
    return_head_ += n;
    // order: release: the tokens were read before their place is free.
    descriptors_->return_head.store(return_head_, std::memory_order_release);
    if (n != 0) SampleHoldTime(tokens[0], now_ns);
    Return(std::span(tokens.data(), n), recycler);
    return n;
  }

  // One fragment of each token back. What is refused changes nothing but a counter.
  // How many were accepted.
  template <Recycler R>
  std::uint32_t Return(std::span<const std::uint32_t> tokens, R& recycler) noexcept {
    std::uint32_t accepted = 0;
    for (std::size_t i = 0; i < tokens.size();) {
      const std::uint32_t slot = tokens[i] >> kPageBits;
      SlotView& view = views_[slot];
      if (view.outstanding == 0) [[unlikely]] {
        Refuse(Reason(slot, Refusal::kSlotNotInUse));
        i++;
        continue;
      }
      const std::uint32_t n = ReturnRun(view, tokens, slot, i, recycler);
      accepted += n;
      if (view.outstanding == 0) ReleaseSlot(slot);
    }
    counters_.returned += accepted;
    return accepted;
  }

  // What Return() would do with `token`, without doing it; kCount: accept it.
  Refusal Check(std::uint32_t token) const noexcept {
    const std::uint32_t slot = token >> kPageBits;
    const std::uint32_t page = token & (kMaxPagesPerBuffer - 1);
    const SlotView& view = views_[slot];
    if (view.outstanding == 0) return Reason(slot, Refusal::kSlotNotInUse);
    if (page >= view.pages) return Refusal::kOutOfRange;
    const std::uint32_t owner = PageTable::OwnerBits(worker_);
    const std::uint32_t cell = view.cells[page].load(std::memory_order_relaxed);
    if (!PageTable::LentBy(owner, cell)) return NotLent(slot, owner, cell);
    if (view.urefs[page].count.load(std::memory_order_relaxed) == 0) {
      return Reason(slot, Refusal::kNotHeld);
    }
    return Refusal::kCount;
  }

  // All or nothing, over as many lanes as tokens belong to: each token is reserved first, then
  // all are committed, or all cancelled. A token that is in a batch twice is reserved twice,
  // so it must be held twice. Meanwhile the lane may lend and return, but not Sweep().
  //
  // Takes a fragment of `token` out of what can be returned. Not kCount: why it is refused;
  // then nothing was done.
  Refusal Reserve(std::uint32_t token) noexcept {
    const Refusal refusal = Check(token);
    if (refusal == Refusal::kCount) {
      std::atomic<std::uint32_t>& held = UrefOf(token).count;
      held.store(held.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
    }
    return refusal;
  }
  void Cancel(std::span<const std::uint32_t> reserved) noexcept {
    for (const std::uint32_t token : reserved) {
      std::atomic<std::uint32_t>& held = UrefOf(token).count;
      held.store(held.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  }
  template <Recycler R>
  void Commit(std::span<const std::uint32_t> reserved, R& recycler) noexcept {
    Cancel(reserved);
    Return(reserved, recycler);
  }

  void Refuse(Refusal reason) noexcept { counters_.refusals[static_cast<std::size_t>(reason)]++; }

  // Takes back all that is outstanding, whatever the application does, looking at no more
  // than `budget` pages. True when nothing is left; else call again, with nothing lent or
  // returned in between.
  template <Recycler R>
  bool Sweep(std::uint32_t budget, R& recycler) noexcept {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      if (views_[slot].outstanding != 0 && !SweepSlot(slot, budget, recycler)) return false;
    }
    return true;
  }

  // The same for what is outstanding of one binding, nothing of which is lent any more;
  // returns may come in between. The application is told which slot's tokens are void; before
  // it has read that, the slot is not given to another binding, whose pages it would return.
  template <Recycler R>
  bool Revoke(const PageTable& table, std::uint32_t budget, R& recycler) noexcept {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      SlotView& view = views_[slot];
      if (view.table != &table || view.outstanding == 0) continue;
      const std::uint32_t bit = 1u << slot;
      if ((kept_slots_ & ~expired_slots_ & bit) == 0) {
        Keep(slot);
        expired_slots_ &= ~bit;
        AddEvent(DescriptorKind::kRevoked, slot, table.binding());
      }
      const std::uint64_t before = view.outstanding;
      const bool done = SweepSlot(slot, budget, recycler);
      counters_.revoked += before - view.outstanding;
      if (!done) return false;
    }
    return true;
  }

  // Takes back those of `pages` that are lent under `slot` for `binding`, and not after `until`,
  // a time of HoldClock(). Late returns of them must not hit what is lent later, so if there are
  // any, nothing more is lent under the slot until the application knows, as with Revoke(); what
  // was lent under it after `until` stays outstanding. How many fragments.
  template <Recycler R>
  std::uint64_t Expire(std::uint32_t slot, std::uint32_t binding,
                       std::span<const std::uint32_t> pages, std::uint32_t until,
                       R& recycler) noexcept {
    SlotView& view = views_[slot];
    if (view.outstanding == 0 || view.table->binding() != binding) return 0;
    const std::uint64_t before = view.outstanding;
    {
      auto&& give = recycler.Open(*view.table);
      for (const std::uint32_t page : pages) {
        if (page >= view.pages) continue;
        const Uref& uref = view.urefs[page];
        if (!IsAfter(uref.lent_at.load(std::memory_order_relaxed), until)) {
          TakeBack(view, page, give);
        }
      }
    }
    const std::uint64_t expired = before - view.outstanding;
    if (expired == 0) return 0;
    counters_.revoked += expired;
    TellExpired(slot, until);
    return expired;
  }

  // The binding was unbound: an application that knows it is told. True if there was something
  // to tell.
  bool Unbound(const PageTable& table) noexcept {
    const auto known = std::find_if(views_.begin(), views_.end(),
                                    [&](const SlotView& view) { return view.table == &table; });
    if (known == views_.end()) return false;
    AddEvent(DescriptorKind::kUnbound, 0, table.binding());
    return true;
  }

  // Few pages of the binding are free: an application that holds some of them is told. True if
  // there was something to tell.
  bool LowWater(const PageTable& table) noexcept {
    const bool holds = std::any_of(views_.begin(), views_.end(), [&](const SlotView& view) {
      return view.table == &table && view.outstanding != 0;
    });
    if (holds) AddEvent(DescriptorKind::kLowWater, 0, table.binding());
    return holds;
  }

  bool events_waiting() const noexcept { return events_ != 0; }
  // True if the lane can be left alone until something is lent or told: nothing is outstanding,
  // the application has read everything, and slots that were kept are free again, for which
  // other workers may wait.
  bool Settled() noexcept {
    ReleaseKept();  // although others are in use
    return counters_.lent == counters_.returned && events_ == 0 && kept_slots_ == 0 &&
           returns_->descriptor_head.load(std::memory_order_relaxed) == tail_;
  }
  // Slots of the rx socket that became unused so far, by any worker.
  std::uint64_t slot_releases() noexcept {
    ReleaseKept();
    return slots_->releases();
  }
  // Writes what the application has not been told for want of room. True if nothing is left.
  bool WriteEvents() noexcept {
    std::uint32_t written = 0;
    for (; written < events_ && FreeDescriptors() != 0; written++) {
      const Descriptor& event = waiting_events_[written];
      descriptors_->descriptors()[tail_++ & mask_] = event;
      if (event.kind == DescriptorKind::kRevoked || event.kind == DescriptorKind::kExpired) {
        told_at_[event.slot] = tail_;
      }
    }
    std::copy(waiting_events_.begin() + written, waiting_events_.begin() + events_,
              waiting_events_.begin());
    events_ -= written;
    return events_ == 0;
  }

  // The binding is about to go. Precondition: nothing of it is outstanding here.
  void Forget(const PageTable& table) noexcept {
    for (SlotView& view : views_) {
      if (view.table == &table) view = SlotView{};
    }
  }

  // ---- the rest --------------------------------------------------------------------------

  void Close(CloseReason reason) noexcept {
    descriptors_->closed.store(static_cast<std::uint32_t>(reason), std::memory_order_release);
  }

  // Fragments; counted apart from lent and returned, so that the three can be compared.
  std::uint64_t outstanding() const noexcept {
    std::uint64_t n = 0;
    for (const SlotView& view : views_) n += view.outstanding;
    return n;
  }

  // The same, from the uref arrays themselves: the pages of this worker only.
  std::uint64_t Audit() const noexcept {
    std::uint64_t n = 0;
    for (const SlotView& view : views_) {
      if (view.outstanding == 0) continue;
      for (std::uint32_t page = 0; page < view.pages; page++) {
        if (PageTable::LentBy(PageTable::OwnerBits(worker_),
                              view.cells[page].load(std::memory_order_relaxed))) {
          n += view.urefs[page].count.load(std::memory_order_relaxed);
        }
      }
    }
    return n;
  }

  LaneCounters& counters() noexcept { return counters_; }

 private:
  static constexpr std::uint32_t kNoSlot = kSlotsPerRxSocket;  // names no binding

  // Precondition: Check() accepts the token, or accepted it before it was reserved.
  Uref& UrefOf(std::uint32_t token) const noexcept {
    return views_[token >> kPageBits].urefs[token & (kMaxPagesPerBuffer - 1)];
  }

  // One token of each lot is enough to see how long pages are held, and costs next to nothing.
  void SampleHoldTime(std::uint32_t token, std::uint64_t now_ns) noexcept {
    if (Check(token) != Refusal::kCount) return;
    const std::uint32_t lent_at = UrefOf(token).lent_at.load(std::memory_order_relaxed);
    counters_.hold_times[HoldBucket(HoldTicks(lent_at, HoldClock(now_ns)))]++;
  }

  // One slot as this lane sees it.
  struct SlotView {
    std::uint64_t outstanding = 0;  // fragments lent by this lane
    std::uint32_t pages = 0;
    std::atomic<std::uint32_t>* cells = nullptr;
    Uref* urefs = nullptr;
    const PageTable* table = nullptr;
  };

  std::uint64_t OutstandingOf(const PageTable& table) const noexcept {
    std::uint64_t n = 0;
    for (const SlotView& view : views_) n += view.table == &table ? view.outstanding : 0;
    return n;
  }

  // Descriptors that may be written, as the application says now.
  std::uint32_t FreeDescriptors() noexcept {
    // order: acquire pairs with the application's release: it has read what we overwrite.
    const std::uint32_t head = returns_->descriptor_head.load(std::memory_order_acquire);
    // A head that is not between the last one and the tail is a lie, and changes nothing.
    if (tail_ - head <= tail_ - head_seen_) head_seen_ = head;
    return mask_ + 1 - (tail_ - head_seen_);
  }

  // Gives up the kept slots under which nothing is outstanding, once the application knows that
  // they ended. What it returned before it knew is in its return ring then, and must have been
  // refused.
  void ReleaseKept() noexcept {
    if (kept_slots_ == 0 || events_ != 0) return;
    FreeDescriptors();
    for (std::uint32_t slots = unread_slots_; slots != 0; slots &= slots - 1) {
      const auto slot = static_cast<std::uint32_t>(std::countr_zero(slots));
      if (static_cast<std::int32_t>(head_seen_ - told_at_[slot]) >= 0) {
        unread_slots_ &= ~(1u << slot);
      }
    }
    // order: acquire keeps the load behind that of the head.
    if (returns_->tail.load(std::memory_order_acquire) != return_head_) return;
    for (std::uint32_t slots = kept_slots_ & ~unread_slots_; slots != 0; slots &= slots - 1) {
      const auto slot = static_cast<std::uint32_t>(std::countr_zero(slots));
      if (views_[slot].outstanding != 0) continue;
      kept_slots_ &= ~(1u << slot);
      expired_slots_ &= ~(1u << slot);
      views_[slot] = SlotView{};  // to be announced again
      slots_->Release(slot, worker_);
    }
  }

  // Nothing is lent under the slot until the application has read the event that comes now.
  void Keep(std::uint32_t slot) noexcept {
    kept_slots_ |= 1u << slot;
    unread_slots_ |= 1u << slot;
    if (lending_slot_ == slot) lending_slot_ = kNoSlot;
  }

  // What is said again before the application could be told is one event. So there is always
  // room: a slot is given to a binding only when no event waits, and each has one of each kind.
  void AddEvent(DescriptorKind kind, std::uint32_t slot, std::uint32_t binding,
                std::uint32_t expired_at = 0) noexcept {
    Descriptor event{};
    event.kind = kind;
    event.slot = static_cast<std::uint8_t>(slot);
    event.binding = binding;
    event.expired_at = expired_at;
    const auto end = waiting_events_.begin() + events_;
    const auto waiting = std::find_if(waiting_events_.begin(), end, [&](const Descriptor& other) {
      return other.kind == kind && other.slot == event.slot && other.binding == binding;
    });
    *waiting = event;
    events_ += waiting == end;
    WriteEvents();
  }

  // What expires in several calls is one event.
  void TellExpired(std::uint32_t slot, std::uint32_t until) noexcept {
    const bool told = (expired_slots_ & 1u << slot) != 0;
    if (told && expired_at_[slot] == until) return;
    expired_at_[slot] = until;
    Keep(slot);
    expired_slots_ |= 1u << slot;
    AddEvent(DescriptorKind::kExpired, slot, views_[slot].table->binding(), until);
  }

  // Takes back all that we have lent of a page under a slot, if there is something.
  template <typename Give>
  void TakeBack(SlotView& view, std::uint32_t page, Give& give) noexcept {
    const std::uint32_t cell = view.cells[page].load(std::memory_order_relaxed);
    if (!PageTable::LentBy(PageTable::OwnerBits(worker_), cell)) return;
    const std::uint32_t held = view.urefs[page].count.load(std::memory_order_relaxed);
    if (held == 0) return;
    view.urefs[page].count.store(0, std::memory_order_relaxed);
    view.outstanding -= held;
    counters_.returned += held;
    if (PageTable::Saturated(cell)) return;
    view.cells[page].store(cell - held, std::memory_order_relaxed);
    if (PageTable::Lent(cell) == held) give(page);
  }

  // Takes back what is outstanding under one slot, as Sweep() does.
  template <Recycler R>
  bool SweepSlot(std::uint32_t slot, std::uint32_t& budget, R& recycler) noexcept {
    SlotView& view = views_[slot];
    {
      auto&& give = recycler.Open(*view.table);
      for (; view.outstanding != 0; sweep_page_++) {
        if (sweep_page_ >= view.pages) sweep_page_ = 0;  // returns may have ended another sweep
        if (budget == 0) return false;
        budget--;
        TakeBack(view, sweep_page_, give);
      }
    }
    sweep_page_ = 0;
    ReleaseSlot(slot);
    return true;
  }

  // Nothing is outstanding under the slot any more.
  void ReleaseSlot(std::uint32_t slot) noexcept {
    if ((kept_slots_ & 1u << slot) == 0) slots_->Release(slot, worker_);
  }

  // Makes lending_slot_ a slot of `table`, announced and in use. False: there is none.
  bool Prepare(const PageTable& table) noexcept {
    const SlotView& view = views_[lending_slot_];
    if (view.table == &table && view.outstanding != 0) [[likely]]
      return true;
    return PrepareSlow(table);
  }

  [[gnu::noinline]] bool PrepareSlow(const PageTable& table) noexcept {
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      SlotView& view = views_[slot];
      if (view.table != &table || (kept_slots_ & 1u << slot) != 0) continue;
      if (view.outstanding != 0 || slots_->Rejoin(slot, worker_, table.binding())) {
        view.urefs = slots_->urefs(slot);  // other ones, if it had another name in between
        lending_slot_ = slot;
        return true;
      }
      view = SlotView{};  // another binding has the slot now
    }
    ReleaseKept();
    const std::optional<std::uint32_t> slot = slots_->Acquire(worker_, table, kept_slots_);
    if (!slot) return false;
    lending_slot_ = *slot;
    views_[*slot] = SlotView{.outstanding = 0,
                             .pages = table.pages(),
                             .cells = table.cells(),
                             .urefs = slots_->urefs(*slot),
                             .table = &table};
    Descriptor mapped{};
    mapped.kind = DescriptorKind::kSlotMapped;
    mapped.slot = static_cast<std::uint8_t>(*slot);
    mapped.binding = table.binding();
    descriptors_->descriptors()[tail_++ & mask_] = mapped;
    return true;
  }

  [[gnu::noinline]] void AnnounceTime(std::uint32_t high) noexcept {
    time_high_ = high;
    Descriptor time{};
    time.kind = DescriptorKind::kTime;
    time.time_high = high;
    descriptors_->descriptors()[tail_++ & mask_] = time;
  }

  // What seldom happens: the page has not been this worker's before, or its count saturates.
  [[gnu::noinline]] static std::uint32_t Take(const PageTable& table, std::uint32_t owner,
                                              std::uint32_t cell) noexcept {
    return table.Taken(owner, cell);
  }

  // Takes a fragment back from a page that is not lent by us, which is refused, or that is
  // saturated: then its cell stays as it is. True if it was accepted.
  [[gnu::noinline, gnu::cold]] bool ReturnRare(std::uint32_t slot, std::uint32_t owner,
                                               std::uint32_t cell,
                                               std::atomic<std::uint32_t>& uref) noexcept {
    if (!PageTable::LentBy(owner, cell)) {
      Refuse(NotLent(slot, owner, cell));
      return false;
    }
    const std::uint32_t held = uref.load(std::memory_order_relaxed);
    if (held == 0) {
      Refuse(Reason(slot, Refusal::kNotHeld));
      return false;
    }
    uref.store(held - 1, std::memory_order_relaxed);
    return true;
  }

  // Why a page is refused that is not LentBy() us. Its uref is not looked at: another worker
  // may lend the page now, and changes cell and uref one after the other.
  Refusal NotLent(std::uint32_t slot, std::uint32_t owner, std::uint32_t cell) const noexcept {
    const bool ours = PageTable::Owner(cell) == owner;
    return Reason(slot, ours ? Refusal::kNotHeld : Refusal::kWrongOwner);
  }

  // Why a page is refused that is not held under `slot`: `reason`, or that it was taken back.
  Refusal Reason(std::uint32_t slot, Refusal reason) const noexcept {
    return (kept_slots_ & 1u << slot) != 0 ? Refusal::kStale : reason;
  }

  // Tokens from `i` on, as long as they are of `slot`. Moves `i` behind them.
  template <Recycler R>
  std::uint32_t ReturnRun(SlotView& view, std::span<const std::uint32_t> tokens, std::uint32_t slot,
                          std::size_t& i, R& recycler) noexcept {
    std::atomic<std::uint32_t>* const cells = view.cells;
    Uref* const urefs = view.urefs;
    const std::uint32_t pages = view.pages;
    const std::uint32_t owner = PageTable::OwnerBits(worker_);
    const std::uint32_t slot_bits = slot << kPageBits;
    std::uint32_t refused = 0;
    auto&& give = recycler.Open(*view.table);
    std::size_t at = i;
    for (; at < tokens.size(); at++) {
      const std::uint32_t page = tokens[at] ^ slot_bits;
      if (page >= pages) [[unlikely]] {
        if (tokens[at] >> kPageBits != slot) break;
        Refuse(Refusal::kOutOfRange);
        refused++;
        continue;
      }
      const std::uint32_t cell = cells[page].load(std::memory_order_relaxed);
      const std::uint32_t lent = cell - owner;  // 1 .. kMaxLent if we have lent it
      if (lent - 1 >= PageTable::kMaxLent - 1) [[unlikely]] {
        refused += !ReturnRare(slot, owner, cell, urefs[page].count);
        continue;
      }
      const std::uint32_t held = urefs[page].count.load(std::memory_order_relaxed);
      if (held == 0) [[unlikely]] {
        Refuse(Reason(slot, Refusal::kNotHeld));
        refused++;
        continue;
      }
      urefs[page].count.store(held - 1, std::memory_order_relaxed);
      cells[page].store(cell - 1, std::memory_order_relaxed);
      if (lent == 1) give(page);
    }
    const std::uint32_t accepted = static_cast<std::uint32_t>(at - i) - refused;
    i = at;
    view.outstanding -= accepted;
    return accepted;
  }

  const std::uint32_t worker_;
  SlotTable* const slots_;
  DescriptorRing* const descriptors_;
  ReturnRing* const returns_;
  const std::uint32_t mask_;
  const std::uint32_t max_held_;
  const PageTable* uncounted_ = nullptr;

  std::uint32_t tail_ = 0;         // next descriptor to write
  std::uint32_t published_ = 0;    // tail as the application knows it
  std::uint32_t head_seen_ = 0;    // how far the application was, when we last looked
  std::uint32_t return_head_ = 0;  // next returned token to read
  std::uint32_t lending_slot_ = kNoSlot;
  std::uint32_t time_high_ = 0;
  std::uint32_t rung_ = 0;
  std::uint32_t sweep_page_ = 0;
  std::uint32_t events_ = 0;  // that wait for room
  // Slots of which pages were taken back, a bit for each: kept until the application knows, and
  // nothing is outstanding under them.
  std::uint32_t kept_slots_ = 0;
  std::uint32_t expired_slots_ = 0;  // of those, by Expire()
  std::uint32_t unread_slots_ = 0;   // of those, which the application does not know
  std::array<std::uint32_t, kSlotsPerRxSocket> told_at_;     // behind the descriptor that says so
  std::array<std::uint32_t, kSlotsPerRxSocket> expired_at_;  // as that says
  LaneCounters counters_;
  bool limit_told_ = false;
  std::array<Descriptor, 4 * kSlotsPerRxSocket + 1> waiting_events_;
  std::array<SlotView, kSlotsPerRxSocket + 1> views_;  // the last is that of kNoSlot
};

}  // namespace rxtoken
