// SPDX-License-Identifier: Apache-2.0
// lane_model_test.cc - random sequences of operations on lanes, slots and page pools, each
// compared with a model made of maps.
//
// Several rx sockets, bindings and workers, all on one thread. The seed is printed; the same
// seed, in RXTOKEN_SEED, gives the same sequence. A sequence that fails is made as short as
// can be found, and printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/sanitized.h"
#include "tests/unit/tokens/fakes.h"
#include "tokens/abi/lane_reader.h"
#include "tokens/lane.h"
#include "tokens/page_pool.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr std::size_t kSequences = kSanitized ? 4 : 50;
constexpr std::size_t kSteps = 20'000;  // of each sequence

constexpr std::uint32_t kWorkers = 3;
constexpr std::uint32_t kRxSockets = 3;
constexpr std::uint32_t kBindings = 44;    // more than there are slots
constexpr std::uint32_t kBigBindings = 4;  // the first ones: pages for all workers
constexpr std::uint32_t kEntries = kMinRingEntries;

// SplitMix64: a new one for each operation costs nothing.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    std::uint64_t z = state_ += 0x9E37'79B9'7F4A'7C15;
    z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9;
    z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EB;
    return z ^ (z >> 31);
  }
  std::uint32_t Below(std::uint64_t n) { return static_cast<std::uint32_t>(Next() % n); }
  bool Percent(std::uint32_t p) { return Below(100) < p; }
  template <typename Container>
  auto Pick(const Container& from) {
    return *std::next(from.begin(), Below(from.size()));
  }

 private:
  std::uint64_t state_;
};

enum class Action {
  kLend,
  kPublish,
  kRead,
  kReturn,
  kReturnAll,
  kDrain,
  kLie,
  kClose,
  kRebind,
  kMove,
  kTrim,
  kExpire
};

// Everything an operation does follows from its seed and the state it meets, so that a
// sequence is still one when some of its operations are left out.
struct Operation {
  Action action;
  std::uint64_t seed;
};

// What has happened at least once, so that we know that the sequences get everywhere.
struct Coverage {
  std::uint64_t lent = 0, returned = 0, no_room = 0, no_slot = 0, no_page = 0, announced = 0,
                swept = 0, rebound = 0, trimmed = 0, all_returned = 0, all_refused = 0, expired = 0,
                lease_lost = 0, event_waited = 0;
  std::array<std::uint64_t, kRefusals> refusals = {};
};

// A page that came back to the pool.
struct Back {
  std::uint32_t binding;
  std::uint32_t page;
  friend auto operator<=>(const Back&, const Back&) = default;
};

struct Binding {
  Binding(std::uint32_t id, std::uint32_t n_pages, bool shared)
      : table(id, n_pages, this), pages(n_pages) {
    std::vector<void*> objects;
    for (std::uint32_t page = 0; page < n_pages; page++) {
      objects.push_back(Object(page));
      free.insert(page);
    }
    pool = std::make_unique<PagePool>(objects);
    pool->SetTakers(shared ? ~0u : 1);
  }
  static void* Object(std::uint32_t page) {
    return reinterpret_cast<void*>(std::uintptr_t{page} + 1);
  }
  static std::uint32_t Page(void* object) {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(object) - 1);
  }

  PageTable table;
  std::unique_ptr<PagePool> pool;
  // model
  struct PageState {
    std::optional<std::uint32_t> owner;
    std::uint32_t lent = 0;  // fragments, over all rx sockets
  };
  std::vector<PageState> pages;
  std::set<std::uint32_t> free;
};

class Recycler {
 public:
  struct Run {
    Binding* binding;
    std::vector<Back>* back;
    void operator()(std::uint32_t page) const {
      back->push_back({binding->table.binding(), page});
      void* const object = Binding::Object(page);
      binding->pool->Push(&object, 1);
    }
  };
  Run Open(const PageTable& table) { return {static_cast<Binding*>(table.pool()), &back_}; }
  std::vector<Back> Take() { return std::exchange(back_, {}); }

 private:
  std::vector<Back> back_;
};

struct TestLane {
  TestLane(std::uint32_t worker, SlotTable* slots)
      : rings(kEntries, worker),
        lane(worker, slots, rings.descriptors(), rings.returns()),
        reader(rings.descriptors(), rings.returns()) {}

  TestRings rings;
  Lane lane;
  LaneReader reader;
  // model: what the worker has written and the application has not consumed
  std::deque<Descriptor> unread;
  std::uint32_t published = 0;  // so many of them
  std::uint32_t consumed = 0;   // index of the first of them
  std::uint32_t head_seen = 0;  // as the worker believes
  // model: what the descriptors have said
  std::map<std::uint32_t, Binding*> names;  // of slots
  std::uint64_t time_high = 0;
  // model: tokens that are outstanding, and those that the application knows of
  std::map<std::uint32_t, std::uint32_t> held;
  std::vector<std::uint32_t> known;
  std::map<std::uint32_t, std::uint32_t> lent_at;  // last, of tokens
  // model: slots of which something expired, until the application knows and nothing is left
  struct Kept {
    std::uint32_t until;
    std::optional<std::uint32_t> told_at;  // index behind the event, once that is written
    bool unread;
  };
  std::map<std::uint32_t, Kept> kept;
  std::deque<std::uint32_t> untold;  // slots whose event waits for room
  LaneCounters counters;

  std::uint64_t Outstanding(std::uint32_t slot) const {
    std::uint64_t n = 0;
    for (auto it = held.lower_bound(Token(slot, 0));
         it != held.end() && it->first >> kPageBits == slot; ++it) {
      n += it->second;
    }
    return n;
  }
  std::uint64_t Outstanding() const {
    std::uint64_t n = 0;
    for (const auto& [token, count] : held) n += count;
    return n;
  }
  bool lease_lost() const {
    return std::any_of(kept.begin(), kept.end(), [](const auto& k) { return k.second.unread; });
  }
  std::uint32_t tail() const { return consumed + static_cast<std::uint32_t>(unread.size()); }
};

struct RxSocket {
  RxSocket() {
    for (std::uint32_t w = 0; w < kWorkers; w++) {
      lanes.push_back(std::make_unique<TestLane>(w, &slots));
    }
  }
  // Slots under which something is outstanding, on any lane, or that one keeps.
  std::set<std::uint32_t> UsedSlots() const {
    std::set<std::uint32_t> used;
    for (const auto& lane : lanes) {
      for (const auto& [token, count] : lane->held) used.insert(token >> kPageBits);
      for (const auto& [slot, kept] : lane->kept) used.insert(slot);
    }
    return used;
  }

  SlotTable slots;
  std::vector<std::unique_ptr<TestLane>> lanes;
};

// The real thing and the model, side by side.
class World {
 public:
  // `log`: Log() is wanted.
  World(Coverage* coverage, bool log) : coverage_(coverage) {
    if (!log) log_.setstate(std::ios::badbit);  // discards what is written to it
    Random random(0);
    for (std::uint32_t i = 0; i < kBindings; i++) bindings_.push_back(NewBinding(i, random));
    for (std::uint32_t i = 0; i < kRxSockets; i++) {
      rx_sockets_.push_back(std::make_unique<RxSocket>());
    }
  }
  ~World() { this_worker = kNotAWorker; }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // What differs after the operation; empty: nothing.
  std::string Do(const Operation& operation) {
    Random random(operation.seed);
    socket_ = random.Below(kRxSockets);
    worker_ = random.Below(kWorkers);
    this_worker = worker_;
    written_ = 0;
    log_.str("");
    switch (operation.action) {
      case Action::kLend: Lend(random); break;
      case Action::kPublish: Publish(); break;
      case Action::kRead: Read(random); break;
      case Action::kReturn: Return(random); break;
      case Action::kReturnAll: ReturnAll(random); break;
      case Action::kDrain: Drain(); break;
      case Action::kLie: Lie(random); break;
      case Action::kClose: Close(random); break;
      case Action::kRebind: Rebind(random); break;
      case Action::kMove: Move(random); break;
      case Action::kTrim: Trim(); break;
      case Action::kExpire: Expire(random); break;
    }
    for (const auto& rx_socket : rx_sockets_) {
      for (const auto& lane : rx_socket->lanes) ReleaseKept(*lane);
    }
    if (recycler_.Take() != back_) Differ("pages that came back");
    back_.clear();
    for (std::uint32_t k = 0; k < kRxSockets; k++) {
      for (std::uint32_t w = 0; w < kWorkers; w++) CompareCounters(*rx_sockets_[k]->lanes[w]);
    }
    return std::exchange(difference_, {});
  }

  // The same for everything there is.
  std::string CompareAll() {
    for (const auto& rx_socket : rx_sockets_) CompareUrefs(*rx_socket);
    for (const auto& binding : bindings_) {
      if (binding->pool->available() != binding->free.size()) Differ("pages in the pool");
      for (std::uint32_t page = 0; page < binding->pages.size(); page++) {
        const auto& model = binding->pages[page];
        const std::uint32_t cell =
            model.owner ? PageTable::OwnerBits(*model.owner) | model.lent : 0;
        if (binding->table.cells()[page] != cell) Differ("a page's cell");
        if ((model.lent == 0) != binding->free.contains(page)) Differ("the model itself");
      }
    }
    return std::exchange(difference_, {});
  }

  std::string Log() const {
    std::ostringstream line;
    line << "socket " << socket_ << " worker " << worker_ << ": " << log_.str();
    return line.str();
  }

 private:
  TestLane& lane() { return *rx_sockets_[socket_]->lanes[worker_]; }

  std::unique_ptr<Binding> NewBinding(std::uint32_t i, Random& random) {
    const bool big = i < kBigBindings;
    const std::uint32_t pages = big ? 700 + random.Below(800) : 1 + random.Below(40);
    return std::make_unique<Binding>(++last_binding_, pages, big);
  }
  Binding& PickBinding(Random& random) {
    if (random.Percent(30)) return *bindings_[random.Below(kBigBindings)];
    // Mostly one that this worker uses more than others do: the pages of a small one stay
    // with the worker that frees them.
    const std::uint32_t i =
        kBigBindings + random.Below((kBindings - kBigBindings) / kWorkers) * kWorkers + worker_;
    return *bindings_[random.Percent(70) ? i : random.Below(kBindings)];
  }
  void Differ(const std::string& what) {
    if (difference_.empty()) difference_ = what;
  }

  // ---- operations ----------------------------------------------------------------------------

  void Lend(Random& random) {
    Binding& binding = PickBinding(random);
    TestLane& to = lane();
    std::vector<LendItem> items;
    std::vector<std::uint32_t> popped;
    for (std::uint32_t n = 1 + random.Below(6); items.size() < n;) {
      std::optional<std::uint32_t> page;
      if (random.Percent(30)) page = PageLentBy(worker_, binding, random);
      if (!page) {
        page = Pop(binding);
        if (!page) break;
        popped.push_back(*page);
      }
      items.push_back(Item(*page, static_cast<std::uint16_t>(random.Below(1500)),
                           static_cast<std::uint16_t>(random.Below(2000)),
                           static_cast<std::uint8_t>(random.Below(8)),
                           static_cast<std::uint8_t>(random.Below(256))));
    }
    if (to.lane.lease_lost() != to.lease_lost()) Differ("whether a lease was lost");
    if ((to.lane.Allowance(7) == 0) != to.lease_lost()) Differ("allowance");
    if (to.lease_lost()) {
      coverage_->lease_lost++;
      items.clear();
    }
    if (!items.empty()) {
      const auto wanted = static_cast<std::uint32_t>(items.size());
      const std::uint32_t room = to.lane.Room(wanted);
      if (room != ExpectedRoom(to, wanted)) Differ("room in the descriptor ring");
      if (room < wanted) coverage_->no_room++;
      items.resize(std::min(room, wanted));
    }
    if (!items.empty()) {
      const std::uint64_t time =
          (std::uint64_t{random.Below(3)} << 32) | static_cast<std::uint32_t>(random.Next());
      if (LendItems(to, binding, items, time)) {
        log_ << "lend " << items.size() << " of binding " << binding.table.binding();
      } else {
        items.clear();
      }
    }
    for (const std::uint32_t page : popped) {
      if (binding.pages[page].lent != 0) continue;
      void* const object = Binding::Object(page);
      binding.pool->Push(&object, 1);
      binding.free.insert(page);
    }
  }

  bool LendItems(TestLane& to, Binding& binding, const std::vector<LendItem>& items,
                 std::uint64_t time) {
    const std::uint32_t unpublished = to.lane.unpublished();
    if (!to.lane.Lend(binding.table, items, time)) {
      const std::set<std::uint32_t> used = rx_sockets_[socket_]->UsedSlots();
      if (used.size() != kSlotsPerRxSocket) Differ("refused for want of a slot");
      for (const auto& lane : rx_sockets_[socket_]->lanes) {
        for (const auto& [token, count] : lane->held) {
          const std::uint32_t slot = token >> kPageBits;
          if (lane->names[slot] == &binding && !to.kept.contains(slot)) {
            Differ("refused with a slot");
          }
        }
      }
      if (to.lane.unpublished() != unpublished) Differ("descriptors of a refused lend");
      log_ << "lend: no slot for binding " << binding.table.binding();
      coverage_->no_slot++;
      return false;
    }
    // What it wrote: announcements, then the items.
    const std::uint32_t written = to.lane.unpublished() - unpublished;
    if (written < items.size() || written > items.size() + 2) {
      Differ("number of descriptors");
      return true;
    }
    for (std::uint32_t i = 0; i < written; i++) {
      const Descriptor& descriptor =
          to.rings.descriptors()->descriptors()[to.tail() & (kEntries - 1)];
      to.unread.push_back(descriptor);
      const std::size_t announcements = written - items.size();
      if (i < announcements) {
        Hear(to, descriptor, binding);
      } else {
        CompareFragment(to, descriptor, items[i - announcements], binding, time);
      }
    }
    to.counters.lent += items.size();
    coverage_->lent += items.size();
    return true;
  }

  void Hear(TestLane& to, const Descriptor& descriptor, Binding& binding) {
    if (descriptor.kind == DescriptorKind::kTime) {
      to.time_high = descriptor.time_high;
      return;
    }
    coverage_->announced++;
    if (descriptor.kind != DescriptorKind::kSlotMapped) return Differ("kind of announcement");
    if (descriptor.binding != binding.table.binding()) Differ("announced binding");
    for (const auto& lane : rx_sockets_[socket_]->lanes) {
      const bool kept = lane->kept.contains(descriptor.slot);
      const bool used = lane->Outstanding(descriptor.slot) != 0 || kept;
      if (used && (lane.get() == &to || lane->names[descriptor.slot] != &binding)) {
        Differ("announced a slot that is in use");
      }
    }
    to.names[descriptor.slot] = &binding;
  }

  void CompareFragment(TestLane& to, const Descriptor& descriptor, const LendItem& item,
                       Binding& binding, std::uint64_t time) {
    const std::uint32_t slot = descriptor.token >> kPageBits;
    const auto name = to.names.find(slot);
    if (descriptor.kind != DescriptorKind::kFragment || name == to.names.end() ||
        name->second != &binding || descriptor.token != Token(slot, item.page) ||
        descriptor.offset != item.offset || descriptor.length != item.length ||
        descriptor.flags != item.flags ||
        descriptor.ip_header_distance != item.ip_header_distance ||
        (to.time_high << 32 | descriptor.time_low) != time) {
      Differ("a fragment's descriptor");
    }
    if (to.kept.contains(slot)) Differ("lent under a slot that is kept");
    to.held[descriptor.token]++;
    to.lent_at[descriptor.token] = HoldClock(time);
    to.counters.bytes += item.length;
    binding.pages[item.page].owner = worker_;
    binding.pages[item.page].lent++;
  }

  void Publish() {
    log_ << "publish";
    lane().lane.Publish();
    lane().published = static_cast<std::uint32_t>(lane().unread.size());
    if (lane().rings.descriptors()->tail != lane().tail()) Differ("the descriptor ring's tail");
  }

  void Read(Random& random) {
    TestLane& from = lane();
    std::vector<Descriptor> polled(random.Below(2 * kEntries));
    const std::size_t n = from.reader.Poll(polled);
    if (n != std::min<std::size_t>(from.published, polled.size())) {
      return Differ("number of descriptors polled");
    }
    for (std::size_t i = 0; i < n; i++) {
      if (std::memcmp(&polled[i], &from.unread[i], sizeof(Descriptor)) != 0) {
        Differ("a descriptor in the ring");
      }
    }
    const std::size_t consumed = random.Percent(70) ? n : random.Below(n + 1);
    for (std::size_t i = 0; i < consumed; i++) {
      if (polled[i].kind == DescriptorKind::kFragment) from.known.push_back(polled[i].token);
    }
    from.reader.Consume(consumed);
    from.unread.erase(from.unread.begin(),
                      from.unread.begin() + static_cast<std::ptrdiff_t>(consumed));
    from.published -= static_cast<std::uint32_t>(consumed);
    from.consumed += static_cast<std::uint32_t>(consumed);
    log_ << "read " << consumed << " of " << n;
  }

  void Return(Random& random) {
    TestLane& to = lane();
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t n = 1 + random.Below(40); tokens.size() < n;) {
      tokens.push_back(PickToken(to, tokens, random));
    }
    log_ << "return" << std::hex;
    for (const std::uint32_t token : tokens) log_ << " " << token;
    log_ << std::dec << ";";
    if (random.Percent(30)) {
      // As the control plane does it.
      if (to.lane.Check(tokens[0]) != ExpectedRefusal(to, tokens[0])) Differ("check of a token");
      const std::uint32_t accepted = to.lane.Return(tokens, recycler_);
      if (accepted != ExpectReturn(to, tokens)) Differ("number of accepted tokens");
      return;
    }
    const std::size_t queued = to.reader.Return(tokens);
    to.known.insert(to.known.end(), tokens.begin() + static_cast<std::ptrdiff_t>(queued),
                    tokens.end());
    if (random.Percent(50)) Drain();
  }

  // All of some tokens, or none.
  void ReturnAll(Random& random) {
    TestLane& to = lane();
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t n = 1 + random.Below(6); tokens.size() < n;) {
      tokens.push_back(PickToken(to, tokens, random));
    }
    // What is held may be returned, each as often as it is held.
    std::map<std::uint32_t, std::uint32_t> held = to.held;
    std::vector<std::uint32_t> reserved;
    bool refused = false;
    for (const std::uint32_t token : tokens) {
      Refusal expected = ExpectedRefusal(to, token);
      if (expected == Refusal::kCount && held.at(token)-- == 0) {
        expected = to.kept.contains(token >> kPageBits) ? Refusal::kStale : Refusal::kNotHeld;
        held.at(token) = 0;
      }
      const Refusal refusal = to.lane.Reserve(token);
      if (refusal != expected) Differ("reservation of a token");
      if (refusal == Refusal::kCount) reserved.push_back(token);
      refused |= refusal != Refusal::kCount;
    }
    log_ << (refused ? "refuse " : "return ") << tokens.size() << " as a whole";
    if (!refused) {
      coverage_->all_returned++;
      to.lane.Commit(tokens, recycler_);
      if (ExpectReturn(to, tokens) != tokens.size()) Differ("the model itself");
      return;
    }
    coverage_->all_refused++;
    to.lane.Cancel(reserved);
    for (const std::uint32_t token : reserved) to.known.push_back(token);
    if (to.lane.Audit() != to.Outstanding()) Differ("urefs after a refusal");
  }

  std::uint32_t PickToken(TestLane& to, const std::vector<std::uint32_t>& batch, Random& random) {
    const std::uint32_t dice = random.Below(100);
    if (dice < 75 && !to.known.empty()) {
      std::swap(to.known[random.Below(to.known.size())], to.known.back());
      const std::uint32_t token = to.known.back();
      to.known.pop_back();
      return token;
    }
    if (dice < 82 && !batch.empty()) return random.Pick(batch);
    if (dice < 90) {
      const TestLane& other = *rx_sockets_[random.Below(kRxSockets)]->lanes[random.Below(kWorkers)];
      if (!other.held.empty()) return random.Pick(other.held).first;
    }
    if (dice < 96 && !to.held.empty()) {
      return Token(random.Pick(to.held).first >> kPageBits, random.Below(2000));
    }
    return static_cast<std::uint32_t>(random.Next());
  }

  void Drain() {
    TestLane& from = lane();
    // The ring's words, whoever wrote them.
    const std::uint32_t head = from.rings.descriptors()->return_head;
    const std::uint32_t tail = from.rings.returns()->tail;
    std::vector<std::uint32_t> tokens;
    if (tail - head > kEntries) {
      from.counters.refusals[static_cast<std::size_t>(Refusal::kBadRing)]++;
    } else {
      for (std::uint32_t i = head; i != tail; i++) {
        tokens.push_back(from.rings.returns()->tokens()[i & (kEntries - 1)]);
      }
    }
    log_ << " drain " << tokens.size();
    if (from.lane.Drain(recycler_, 0) != tokens.size()) Differ("number of drained tokens");
    ExpectReturn(from, tokens);
    if (from.rings.descriptors()->return_head != tail) Differ("the return ring's head");
  }

  // Writes nonsense into the words that the application can write.
  void Lie(Random& random) {
    TestLane& from = lane();
    if (random.Percent(50)) {
      // Not between what it has consumed and the tail: that would only harm itself.
      const std::uint32_t gap = static_cast<std::uint32_t>(
          kEntries - from.unread.size() + random.Below(random.Percent(50) ? 8 : ~0u));
      const std::uint32_t head =
          random.Percent(50) ? from.consumed - 1 - random.Below(100) : from.tail() + 1 + gap;
      if (from.tail() - head <= from.tail() - from.consumed) return;
      log_ << "lie about the head";
      from.rings.returns()->descriptor_head.store(head);
    } else {
      const std::uint32_t head = from.rings.descriptors()->return_head;
      const std::uint32_t tail =
          head + (random.Percent(50) ? random.Below(kEntries + 2)
                                     : static_cast<std::uint32_t>(random.Next()));
      log_ << "lie about the tail ";
      from.rings.returns()->tail.store(tail);
      Drain();
    }
  }

  // The rx socket goes, and another one comes.
  void Close(Random& random) {
    log_ << "close";
    const std::uint32_t budget = 1 + random.Below(2000);
    for (worker_ = 0; worker_ < kWorkers; worker_++) {
      this_worker = worker_;
      TestLane& from = lane();
      from.lane.Close(CloseReason::kClosed);
      if (!from.reader.closed()) Differ("closed");
      const std::uint64_t pages = kSlotsPerRxSocket * 1500;
      for (std::uint64_t calls = 0; !from.lane.Sweep(budget, recycler_); calls++) {
        if (calls > pages / budget + 1) return Differ("sweep does not end");
      }
      std::vector<Back> expected;
      for (const auto& [token, count] : std::exchange(from.held, {})) {
        TakeBack(*from.names[token >> kPageBits], token, count, expected);
        from.counters.returned += count;
        coverage_->swept += count;
      }
      std::vector<Back> swept = recycler_.Take();
      std::sort(swept.begin(), swept.end());
      std::sort(expected.begin(), expected.end());
      if (swept != expected) Differ("pages that were swept");
      CompareCounters(from);
    }
    worker_ = 0;
    CompareUrefs(*rx_sockets_[socket_]);
    rx_sockets_[socket_] = std::make_unique<RxSocket>();
  }

  // A binding goes, once all its pages are back, and another one comes.
  void Rebind(Random& random) {
    const std::uint32_t i = random.Below(kBindings);
    Binding& binding = *bindings_[i];
    log_ << "rebind " << binding.table.binding();
    for (const auto& rx_socket : rx_sockets_) {
      for (worker_ = 0; worker_ < kWorkers; worker_++) {
        this_worker = worker_;
        TestLane& from = *rx_socket->lanes[worker_];
        std::vector<std::uint32_t> tokens;
        for (const auto& [token, count] : from.held) {
          if (from.names[token >> kPageBits] == &binding) tokens.insert(tokens.end(), count, token);
        }
        if (from.lane.Return(tokens, recycler_) != tokens.size()) Differ("returning it all");
        ExpectReturn(from, tokens);
      }
    }
    worker_ = 0;
    if (binding.pool->available() != binding.pages.size()) Differ("the pool is not full");
    for (const auto& rx_socket : rx_sockets_) {
      for (const auto& lane : rx_socket->lanes) {
        lane->lane.Forget(binding.table);
        std::erase_if(lane->names, [&](const auto& name) { return name.second == &binding; });
      }
      rx_socket->slots.Forget(binding.table.binding());
    }
    // Every object can be had, and only once.
    for (this_worker = 0; this_worker < kWorkers; this_worker++) {
      while (Pop(binding)) {
      }
    }
    this_worker = kNotAWorker;
    while (Pop(binding)) {
    }
    if (!binding.free.empty()) Differ("objects of the pool");
    bindings_[i] = NewBinding(i, random);
    coverage_->rebound++;
  }

  // Pages go from one worker, or from outside, to another, as when a driver stops a queue.
  void Move(Random& random) {
    Binding& binding = *bindings_[random.Below(kBigBindings)];
    log_ << "move pages of binding " << binding.table.binding();
    const auto pick = [&] {
      const std::uint32_t worker = random.Below(kWorkers + 1);
      return worker == kWorkers ? kNotAWorker : worker;
    };
    this_worker = pick();
    std::vector<void*> objects(random.Below(binding.pages.size()));
    if (!binding.pool->Pop(objects.data(), static_cast<std::uint32_t>(objects.size()))) return;
    for (void* object : objects) {
      if (binding.free.erase(Binding::Page(object)) != 1) Differ("moved pages");
    }
    this_worker = pick();
    binding.pool->Push(objects.data(), static_cast<std::uint32_t>(objects.size()));
    for (void* object : objects) binding.free.insert(Binding::Page(object));
  }

  // Leases end of what is held under one slot, wherever the control thread looked.
  void Expire(Random& random) {
    TestLane& from = lane();
    if (from.held.empty()) return;
    const std::uint32_t slot = random.Pick(from.held).first >> kPageBits;
    Binding& binding = *from.names.at(slot);
    const std::uint32_t until = from.lent_at.at(random.Pick(from.held).first);
    std::vector<std::uint32_t> pages;
    for (std::uint32_t n = 1 + random.Below(60); pages.size() < n;) {
      pages.push_back(random.Percent(80) ? random.Pick(from.held).first & (kMaxPagesPerBuffer - 1)
                                         : random.Below(2000));
    }
    std::uint32_t expected = 0;
    for (const std::uint32_t page : pages) {
      const auto held = from.held.find(Token(slot, page));
      if (held == from.held.end() || from.lent_at.at(held->first) > until) continue;
      expected += held->second;
      TakeBack(binding, held->first, held->second, back_);
      from.held.erase(held);
    }
    const std::uint32_t unpublished = from.lane.unpublished();
    if (from.lane.Expire(slot, binding.table.binding(), pages, until, recycler_) != expected) {
      Differ("fragments that expired");
    }
    log_ << "expire " << expected << " of slot " << slot << " until " << until;
    from.counters.returned += expected;
    from.counters.revoked += expected;
    coverage_->expired += expected;
    if (expected != 0) {
      const auto old = from.kept.find(slot);
      if (old == from.kept.end() || old->second.until != until) {
        from.kept[slot] = {.until = until, .told_at = {}, .unread = true};
        if (std::find(from.untold.begin(), from.untold.end(), slot) == from.untold.end()) {
          from.untold.push_back(slot);
          WriteEvents(from);
        }
      }
    }
    if (from.lane.unpublished() - unpublished != written_) Differ("number of events");
  }

  // Those of the model, which must lie in the ring.
  void WriteEvents(TestLane& to) {
    SeeHead(to);
    for (written_ = 0; !to.untold.empty() && to.tail() - to.head_seen != kEntries; written_++) {
      const std::uint32_t slot = to.untold.front();
      const Descriptor& event = to.rings.descriptors()->descriptors()[to.tail() & (kEntries - 1)];
      if (event.kind != DescriptorKind::kExpired || event.slot != slot ||
          event.expired_at != to.kept.at(slot).until) {
        Differ("an event");
      }
      to.unread.push_back(event);
      to.kept.at(slot).told_at = to.tail();
      to.untold.pop_front();
    }
    coverage_->event_waited += to.untold.size();
  }

  // As the worker does it all the time.
  static void ReleaseKept(TestLane& of) {
    of.lane.slot_releases();
    if (of.kept.empty() || !of.untold.empty()) return;
    SeeHead(of);
    for (auto& [slot, kept] : of.kept) {
      if (static_cast<std::int32_t>(of.head_seen - *kept.told_at) >= 0) kept.unread = false;
    }
    if (of.rings.returns()->tail != of.rings.descriptors()->return_head) return;
    std::erase_if(of.kept, [&](const auto& entry) {
      const bool released = !entry.second.unread && of.Outstanding(entry.first) == 0;
      if (released) of.names.erase(entry.first);
      return released;
    });
  }

  // The memory of slots that are not used goes; nothing else happens.
  void Trim() {
    log_ << "trim";
    RxSocket& rx_socket = *rx_sockets_[socket_];
    const std::set<std::uint32_t> used = rx_socket.UsedSlots();
    for (int i = 0; i < 2; i++) rx_socket.slots.Trim();
    for (std::uint32_t slot = 0; slot < kSlotsPerRxSocket; slot++) {
      const bool there = rx_socket.slots.urefs(slot) != nullptr;
      if (there != used.contains(slot)) Differ("memory of a slot");
      coverage_->trimmed += !there;
    }
  }

  // ---- the model -----------------------------------------------------------------------------

  std::optional<std::uint32_t> Pop(Binding& binding) {
    void* object = nullptr;
    if (!binding.pool->Pop(&object, 1)) {
      coverage_->no_page++;
      return std::nullopt;
    }
    const std::uint32_t page = Binding::Page(object);
    if (binding.free.erase(page) != 1) Differ("the pool gave a page that it cannot have");
    return page;
  }

  // A page of `binding` that `worker` has lent to somebody.
  std::optional<std::uint32_t> PageLentBy(std::uint32_t worker, const Binding& binding,
                                          Random& random) {
    const TestLane& some = *rx_sockets_[random.Below(kRxSockets)]->lanes[worker];
    if (some.held.empty()) return std::nullopt;
    const std::uint32_t token = random.Pick(some.held).first;
    if (some.names.at(token >> kPageBits) != &binding) return std::nullopt;
    return token & (kMaxPagesPerBuffer - 1);
  }

  static void SeeHead(TestLane& to) {
    const std::uint32_t head = to.rings.returns()->descriptor_head;
    if (to.tail() - head <= to.tail() - to.head_seen) to.head_seen = head;
  }

  std::uint32_t ExpectedRoom(TestLane& to, std::uint32_t wanted) {
    if (!to.untold.empty()) {
      WriteEvents(to);
      if (!to.untold.empty()) return 0;
    }
    const auto room = [&] {
      const std::uint32_t free = kEntries - (to.tail() - to.head_seen);
      return std::min(wanted, free < 2 ? 0 : free - 2);
    };
    if (room() < wanted) SeeHead(to);
    return room();
  }

  // kCount: it is accepted. The slot is in use.
  Refusal ExpectedRefusalInSlot(TestLane& from, std::uint32_t token) {
    const Binding& binding = *from.names.at(token >> kPageBits);
    const std::uint32_t page = token & (kMaxPagesPerBuffer - 1);
    if (page >= binding.pages.size()) return Refusal::kOutOfRange;
    if (from.held.contains(token)) return Refusal::kCount;
    if (from.kept.contains(token >> kPageBits)) return Refusal::kStale;
    const bool ours = binding.pages[page].owner == from.rings.descriptors()->worker;
    return ours ? Refusal::kNotHeld : Refusal::kWrongOwner;
  }
  Refusal ExpectedRefusal(TestLane& from, std::uint32_t token) {
    const std::uint32_t slot = token >> kPageBits;
    if (from.Outstanding(slot) != 0) return ExpectedRefusalInSlot(from, token);
    return from.kept.contains(slot) ? Refusal::kStale : Refusal::kSlotNotInUse;
  }

  // Does in the model what a return of `tokens` does; how many are accepted. Successive
  // tokens of one slot are judged by whether it was in use in front of the first.
  std::uint32_t ExpectReturn(TestLane& from, const std::vector<std::uint32_t>& tokens) {
    std::uint32_t accepted = 0;
    bool in_use = false;
    for (std::size_t i = 0; i < tokens.size(); i++) {
      const std::uint32_t token = tokens[i];
      const std::uint32_t slot = token >> kPageBits;
      if (!in_use || slot != tokens[i - 1] >> kPageBits) in_use = from.Outstanding(slot) != 0;
      const Refusal refusal =
          in_use ? ExpectedRefusalInSlot(from, token) : ExpectedRefusal(from, token);
      if (refusal != Refusal::kCount) {
        from.counters.refusals[static_cast<std::size_t>(refusal)]++;
        coverage_->refusals[static_cast<std::size_t>(refusal)]++;
        continue;
      }
      TakeBack(*from.names.at(slot), token, 1, back_);
      if (--from.held.at(token) == 0) from.held.erase(token);
      accepted++;
    }
    from.counters.returned += accepted;
    coverage_->returned += accepted;
    return accepted;
  }

  static void TakeBack(Binding& binding, std::uint32_t token, std::uint32_t fragments,
                       std::vector<Back>& back) {
    const std::uint32_t page = token & (kMaxPagesPerBuffer - 1);
    binding.pages[page].lent -= fragments;
    if (binding.pages[page].lent != 0) return;
    binding.free.insert(page);
    back.push_back({binding.table.binding(), page});
  }

  // ---- comparing -----------------------------------------------------------------------------

  void CompareCounters(TestLane& at) {
    const LaneCounters& real = at.lane.counters();
    if (real.lent != at.counters.lent) Differ("fragments lent");
    if (real.bytes != at.counters.bytes) Differ("bytes lent");
    if (real.returned != at.counters.returned) Differ("fragments returned");
    if (real.revoked != at.counters.revoked) Differ("fragments revoked");
    if (real.refusals != at.counters.refusals) Differ("refusals");
    if (at.lane.outstanding() != real.lent - real.returned) Differ("fragments outstanding");
  }

  void CompareUrefs(const RxSocket& rx_socket) {
    std::map<std::uint32_t, std::uint32_t> held;  // over all lanes: each page has one owner
    for (const auto& lane : rx_socket.lanes) {
      if (lane->lane.Audit() != lane->Outstanding()) Differ("sum of the urefs");
      held.insert(lane->held.begin(), lane->held.end());
    }
    const std::set<std::uint32_t> used = rx_socket.UsedSlots();
    if (rx_socket.slots.in_use() != used.size()) Differ("slots in use");
    for (const std::uint32_t slot : used) {
      const Binding* binding = nullptr;
      for (const auto& lane : rx_socket.lanes) {
        if (lane->Outstanding(slot) != 0) binding = lane->names.at(slot);
      }
      for (std::uint32_t page = 0; binding != nullptr && page < binding->pages.size(); page++) {
        const auto it = held.find(Token(slot, page));
        const std::uint32_t expected = it == held.end() ? 0 : it->second;
        if (rx_socket.slots.urefs(slot)[page].count != expected) Differ("a uref");
      }
    }
  }

  Coverage* const coverage_;
  std::uint32_t last_binding_ = 0;
  std::vector<std::unique_ptr<Binding>> bindings_;
  std::vector<std::unique_ptr<RxSocket>> rx_sockets_;
  Recycler recycler_;
  // of the operation that is being done
  std::uint32_t socket_ = 0;
  std::uint32_t worker_ = 0;
  std::vector<Back> back_;     // pages that the model expects back
  std::uint32_t written_ = 0;  // events, by the last WriteEvents()
  std::string difference_;
  std::ostringstream log_;
};

std::vector<Operation> Sequence(std::uint64_t seed) {
  Random random(seed);
  std::vector<Operation> operations;
  bool rising = true;  // more is lent than returned
  while (operations.size() < kSteps) {
    if (random.Below(3000) == 0) rising = !rising;
    const std::uint32_t dice = random.Below(1000);
    const std::uint32_t lend = rising ? 500 : 150;
    Action action = Action::kReturn;
    if (dice < lend) {
      action = Action::kLend;
    } else if (dice < lend + 150) {
      action = Action::kPublish;
    } else if (dice < lend + 300) {
      action = Action::kRead;
    } else if (dice < lend + 350) {
      action = Action::kDrain;
    } else if (dice < lend + 365) {
      action = Action::kLie;
    } else if (dice < lend + 366) {
      action = Action::kClose;
    } else if (dice < lend + 370) {
      action = Action::kRebind;
    } else if (dice < lend + 375) {
      action = Action::kMove;
    } else if (dice < lend + 377) {
      action = Action::kTrim;
    } else if (dice < lend + 400) {
      action = Action::kReturnAll;
    } else if (dice < lend + 405) {
      action = Action::kExpire;
    }
    operations.push_back({action, random.Next()});
  }
  return operations;
}

struct Failure {
  std::size_t step;
  std::string what;
};

// `log`: what each operation did.
std::optional<Failure> RunSequence(const std::vector<Operation>& operations, Coverage* coverage,
                                   std::deque<std::string>* log = nullptr) {
  World world(coverage, log != nullptr);
  for (std::size_t i = 0; i < operations.size(); i++) {
    std::string what = world.Do(operations[i]);
    if (what.empty() && (i % 256 == 0 || i + 1 == operations.size())) what = world.CompareAll();
    if (log != nullptr) log->push_back(world.Log());
    if (!what.empty()) return Failure{i, what};
  }
  return std::nullopt;
}

// Leaves out what the failure does not need, in ever smaller pieces.
std::vector<Operation> Shrink(std::vector<Operation> operations) {
  Coverage ignored;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (std::size_t piece = operations.size() / 2; piece != 0; piece /= 2) {
    for (std::size_t at = 0; at + piece <= operations.size();) {
      if (std::chrono::steady_clock::now() > deadline) return operations;
      std::vector<Operation> fewer = operations;
      const auto from = fewer.begin() + static_cast<std::ptrdiff_t>(at);
      fewer.erase(from, from + static_cast<std::ptrdiff_t>(piece));
      if (const std::optional<Failure> failure = RunSequence(fewer, &ignored)) {
        fewer.resize(failure->step + 1);
        operations = std::move(fewer);
      } else {
        at += piece;
      }
    }
  }
  return operations;
}

std::string Explain(std::uint64_t seed, const Failure& failure, std::vector<Operation> operations) {
  operations.resize(failure.step + 1);
  operations = Shrink(std::move(operations));
  Coverage ignored;
  std::deque<std::string> log;
  const std::optional<Failure> shrunk = RunSequence(operations, &ignored, &log);
  std::ostringstream text;
  text << "RXTOKEN_SEED=" << seed << ": step " << failure.step << ": " << failure.what
       << " differs from the model.\nShrunk to " << operations.size() << " operations, of which "
       << (shrunk ? shrunk->what : "nothing") << " differs after the last of:\n";
  for (std::size_t i = log.size() > 40 ? log.size() - 40 : 0; i < log.size(); i++) {
    text << "  " << i << ": " << log[i] << "\n";
  }
  return text.str();
}

TEST(LaneModel, RandomSequencesDoWhatTheModelDoes) {
  const char* const given = std::getenv("RXTOKEN_SEED");
  const std::uint64_t first =
      given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device()();
  std::printf("seeds: RXTOKEN_SEED=%llu and the %zu after it\n",
              static_cast<unsigned long long>(first), kSequences - 1);
  std::fflush(stdout);
  Coverage coverage;

  for (std::uint64_t seed = first; seed < first + kSequences; seed++) {
    const std::vector<Operation> operations = Sequence(seed);
    const std::optional<Failure> failure = RunSequence(operations, &coverage);
    ASSERT_FALSE(failure) << Explain(seed, *failure, operations);
  }

  if (kSanitized) return;  // too few sequences for what follows
  EXPECT_NE(coverage.lent, 0u);
  EXPECT_NE(coverage.returned, 0u);
  EXPECT_NE(coverage.no_room, 0u);
  EXPECT_NE(coverage.no_slot, 0u);
  EXPECT_NE(coverage.no_page, 0u);
  EXPECT_NE(coverage.announced, 0u);
  EXPECT_NE(coverage.swept, 0u);
  EXPECT_NE(coverage.rebound, 0u);
  EXPECT_NE(coverage.trimmed, 0u);
  EXPECT_NE(coverage.all_returned, 0u);
  EXPECT_NE(coverage.all_refused, 0u);
  EXPECT_NE(coverage.expired, 0u);
  EXPECT_NE(coverage.lease_lost, 0u);
  EXPECT_NE(coverage.event_waited, 0u);
  for (std::size_t i = 0; i < kRefusals; i++) {
    if (static_cast<Refusal>(i) == Refusal::kBadRing) continue;  // not counted by token
    EXPECT_NE(coverage.refusals[i], 0u) << kRefusalNames[i];
  }
  std::printf(
      "lent %llu returned %llu swept %llu announced %llu no_room %llu no_slot %llu no_page %llu "
      "rebound %llu expired %llu\n",
      static_cast<unsigned long long>(coverage.lent),
      static_cast<unsigned long long>(coverage.returned),
      static_cast<unsigned long long>(coverage.swept),
      static_cast<unsigned long long>(coverage.announced),
      static_cast<unsigned long long>(coverage.no_room),
      static_cast<unsigned long long>(coverage.no_slot),
      static_cast<unsigned long long>(coverage.no_page),
      static_cast<unsigned long long>(coverage.rebound),
      static_cast<unsigned long long>(coverage.expired));
}

}  // namespace
}  // namespace rxtoken
