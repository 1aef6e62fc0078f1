// SPDX-License-Identifier: Apache-2.0
// lane_fuzz.cc - an application that writes into its return rings whatever it likes, beside one
// that returns what it holds. After each step, what both hold is what a model made of maps says,
// and each page is lent or free.
//
// Input: records of six bytes: what is done, by which of two workers, an argument, and a word that
// is written or says more. The hostile application's rings have no room behind them, so that the
// address sanitizer sees what is read there.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <vector>

#include "tokens/abi/lane_reader.h"
#include "tokens/abi/ring.h"
#include "tokens/lane.h"
#include "tokens/page_table.h"
#include "tokens/slot_table.h"

namespace {

using namespace rxtoken;

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint32_t kBindings = 3;
constexpr std::uint32_t kPages = 24;
constexpr std::uint32_t kEntries = kMinRingEntries;

void Require(bool condition) {
  if (!condition) std::abort();
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename Ring>
std::unique_ptr<Ring, Free> MakeRing(std::size_t entry_bytes) {
  const std::size_t bytes = sizeof(Ring) + kEntries * entry_bytes;
  void* const memory = std::aligned_alloc(alignof(Ring), bytes);
  std::memset(memory, 0, bytes);
  return std::unique_ptr<Ring, Free>(new (memory) Ring{});
}

struct Binding {
  explicit Binding(std::uint32_t id) : table(id, kPages, this) {
    for (std::uint32_t page = 0; page < kPages; page++) free.insert(page);
  }
  PageTable table;
  std::set<std::uint32_t> free;
  bool unbound = false;
};

struct Recycler {
  struct Run {
    Binding* binding;
    void operator()(std::uint32_t page) const { Require(binding->free.insert(page).second); }
  };
  Run Open(const PageTable& table) { return {static_cast<Binding*>(table.pool())}; }
};

std::uint64_t Sum(const std::array<std::uint64_t, kRefusals>& refusals) {
  return std::accumulate(refusals.begin(), refusals.end(), std::uint64_t{0});
}
struct Application {
  struct Half {
    Half(std::uint32_t worker, SlotTable* slots)
        : descriptors(MakeRing<DescriptorRing>(sizeof(Descriptor))),
          returns(MakeRing<ReturnRing>(sizeof(std::uint32_t))) {
      descriptors->entries = kEntries;
      lane = std::make_unique<Lane>(worker, slots, descriptors.get(), returns.get());
      reader = std::make_unique<LaneReader>(descriptors.get(), returns.get());
    }
    std::unique_ptr<DescriptorRing, Free> descriptors;
    std::unique_ptr<ReturnRing, Free> returns;
    std::unique_ptr<Lane> lane;
    std::unique_ptr<LaneReader> reader;
    std::map<std::uint32_t, std::uint32_t> held;  // fragments, by token
  };

  SlotTable slots;
  std::array<Half, kWorkers> halves{{{0, &slots}, {1, &slots}}};
};

class World {
 public:
  World() {
    for (auto& binding : bindings_) binding = std::make_unique<Binding>(++last_binding_);
  }

  void Step(std::uint8_t what, std::uint8_t argument, std::uint32_t word) {
    const std::uint32_t worker = what >> 7;
    Application::Half& hostile = hostile_.halves[worker];
    Binding& binding = *bindings_[argument % kBindings];
    ReturnRing& ring = *hostile.returns;
    switch (what % 16) {
      case 0: Lend(hostile_, worker, binding, word); break;
      case 1: Lend(honest_, worker, binding, word); break;
      case 2: hostile.lane->Publish(); break;
      case 3: ring.tokens()[argument % kEntries] = argument < 128 ? word : Near(word); break;
      case 4: ring.tail = word; break;
      case 5: ring.tail = hostile.descriptors->return_head + argument; break;
      case 6: ring.descriptor_head = word; break;
      case 7: ring.descriptor_head = hostile.descriptors->tail - argument; break;
      case 8: ring.waiting = word; break;
      case 9: Drain(hostile); break;
      case 10: ReturnHonestly(honest_.halves[worker], argument); break;
      case 11: Sweep(hostile, argument); break;
      case 12: End(binding, argument); break;
      case 13: hostile_.slots.Trim(); break;
      case 14: Tell(hostile); break;
      case 15: ReturnHeld(hostile, argument, word); break;
    }
    Check();
  }

 private:
  // A token of a page that is there, or nearly.
  static std::uint32_t Near(std::uint32_t word) {
    return (word >> 16) % 4 << kPageBits | word % (kPages + 2);
  }

  // Pages that nobody holds, or that this worker lends already.
  void Lend(Application& to, std::uint32_t worker, Binding& binding, std::uint32_t word) {
    if (binding.unbound) return;
    Application::Half& half = to.halves[worker];
    std::vector<LendItem> items;
    for (std::uint32_t n = word % 4 + 1; n != 0; n--) {
      word = word * 1'664'525 + 1'013'904'223;
      const std::uint32_t page = (word >> 16) % kPages;
      if (!binding.free.contains(page) &&
          !PageTable::LentBy(PageTable::OwnerBits(worker), binding.table.cells()[page])) {
        continue;
      }
      LendItem item = {};
      item.page = page;
      items.push_back(item);
    }
    const std::uint32_t room = half.lane->Room(static_cast<std::uint32_t>(items.size()));
    items.resize(std::min<std::size_t>(items.size(), room));
    if (items.empty() || !half.lane->Lend(binding.table, items, ++now_)) return;
    const std::uint32_t tail = half.descriptors->tail + half.lane->unpublished();
    for (std::uint32_t i = 1; i <= items.size(); i++) {
      const Descriptor& descriptor = half.descriptors->descriptors()[(tail - i) % kEntries];
      const std::uint32_t page = items[items.size() - i].page;
      Require(descriptor.kind == DescriptorKind::kFragment);
      Require((descriptor.token & (kMaxPagesPerBuffer - 1)) == page);
      half.held[descriptor.token]++;
      binding.free.erase(page);
    }
  }

  // What the lane reads is accepted if the model holds it, each token as often.
  void Drain(Application::Half& half) {
    Lane& lane = *half.lane;
    const std::uint32_t head = half.descriptors->return_head;
    const std::uint32_t tail = half.returns->tail;
    const bool lie = tail - head > kEntries;
    const std::uint32_t n = lie ? 0 : tail - head;
    std::uint32_t accepted = 0;
    std::uint32_t out_of_range = 0;
    for (std::uint32_t i = 0; i < n; i++) {
      const std::uint32_t token = half.returns->tokens()[(head + i) % kEntries];
      const auto held = half.held.find(token);
      out_of_range += (token & (kMaxPagesPerBuffer - 1)) >= kPages;
      if (held == half.held.end()) continue;
      accepted++;
      if (--held->second == 0) half.held.erase(held);
    }
    const LaneCounters before = lane.counters();
    Require(lane.Drain(recycler_, ++now_) == n);
    Require(lane.counters().returned == before.returned + accepted);
    Require(Sum(lane.counters().refusals) == Sum(before.refusals) + n - accepted + lie);
    const auto refused = [&](Refusal reason) {
      const auto i = static_cast<std::size_t>(reason);
      return lane.counters().refusals[i] - before.refusals[i];
    };
    Require(refused(Refusal::kSlotNotInUse) + refused(Refusal::kOutOfRange) +
                refused(Refusal::kStale) >=
            out_of_range);
    Require(half.descriptors->return_head == tail);
  }

  void ReturnHonestly(Application::Half& half, std::uint32_t most) {
    std::array<Descriptor, kEntries> all;
    half.lane->Publish();
    half.reader->Consume(half.reader->Poll(all));
    std::vector<std::uint32_t> tokens;
    for (const auto& [token, count] : half.held) tokens.insert(tokens.end(), count, token);
    tokens.resize(std::min<std::size_t>({tokens.size(), most, kEntries}));
    Require(half.reader->Return(tokens) == tokens.size());
    Drain(half);
    Require(Sum(half.lane->counters().refusals) == 0);
  }

  // As the application would, once more than it may.
  void ReturnHeld(Application::Half& half, std::uint32_t skip, std::uint32_t times) {
    if (half.held.empty()) return;
    const auto held = std::next(half.held.begin(), skip % half.held.size());
    const std::uint32_t tail = half.descriptors->return_head;
    const std::uint32_t n = held->second + times % 2;
    if (n > kEntries) return;
    for (std::uint32_t i = 0; i < n; i++) {
      half.returns->tokens()[(tail + i) % kEntries] = held->first;
    }
    half.returns->tail = tail + n;
  }

  void Sweep(Application::Half& half, std::uint32_t budget) {
    while (!half.lane->Sweep(budget + 1, recycler_)) {
    }
    half.held.clear();
  }

  // The binding ends, whatever the applications do about it, and another one begins.
  void End(Binding& binding, std::uint32_t budget) {
    binding.unbound = true;
    for (Application* application : {&hostile_, &honest_}) {
      for (Application::Half& half : application->halves) {
        half.lane->Unbound(binding.table);
        const std::uint64_t outstanding = half.lane->outstanding();
        while (!half.lane->Revoke(binding.table, budget + 1, recycler_)) {
        }
        std::uint64_t taken = outstanding - half.lane->outstanding();
        // By the tokens of its slots.
        std::erase_if(half.held, [&](const auto& entry) {
          const auto& [token, count] = entry;
          if (half.lane->Check(token) == Refusal::kCount) return false;
          taken -= count;
          return true;
        });
        Require(taken == 0);
      }
    }
    Require(binding.free.size() == kPages);
    for (Application* application : {&hostile_, &honest_}) {
      for (Application::Half& half : application->halves) half.lane->Forget(binding.table);
      application->slots.Forget(binding.table.binding());
    }
    *std::find_if(bindings_.begin(), bindings_.end(), [&](const auto& other) {
      return other.get() == &binding;
    }) = std::make_unique<Binding>(++last_binding_);
  }

  static void Tell(Application::Half& half) {
    half.lane->WriteEvents();
    if (half.lane->WantsDoorbell()) half.lane->Rung();
    if (half.lane->Settled()) Require(half.held.empty());
  }

  void Check() {
    for (Application* application : {&hostile_, &honest_}) {
      for (Application::Half& half : application->halves) {
        std::uint64_t held = 0;
        for (const auto& [token, count] : half.held) held += count;
        const LaneCounters& counters = half.lane->counters();
        Require(half.lane->outstanding() == held);
        Require(half.lane->Audit() == held);
        Require(counters.lent == counters.returned + held);
        for (const auto& [token, count] : half.held) {
          Require(half.lane->Check(token) == Refusal::kCount);
        }
      }
    }
    for (const auto& binding : bindings_) {
      for (std::uint32_t page = 0; page < kPages; page++) {
        const bool lent = PageTable::Lent(binding->table.cells()[page]) != 0;
        Require(lent != binding->free.contains(page));
      }
    }
  }

  Recycler recycler_;
  Application hostile_;
  Application honest_;
  std::array<std::unique_ptr<Binding>, kBindings> bindings_;
  std::uint32_t last_binding_ = 0;
  std::uint64_t now_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  World world;
  for (; size >= 6; data += 6, size -= 6) {
    std::uint32_t word;
    std::memcpy(&word, data + 2, sizeof(word));
    world.Step(data[0], data[1], word);
  }
  return 0;
}
