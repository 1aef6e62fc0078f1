// SPDX-License-Identifier: Apache-2.0
// main.cc - all measurements of bench/micro; bench/micro.py runs it and makes the table.
//
// Question:  what do lending and returning a page cost beside what cannot cost less, and
//            beside the designs that rxtoken replaces? What do its reference count and its
//            page pool cost beside the usual ones?
// Baselines: token_designs.h, refcounts.h and pools.h say what each stands for.
//
// usage: bench_micro [--smoke] [--rounds=N]
//
// All cases take turns, and so all of them live at once: 4 GiB, most of it for the records that
// a design with pointers has of 16 Mi pages. A line for each case: section, row, column, then
// median, 10th and 90th percentile in nanoseconds an operation, and how many chunks were measured;
// tabs in between. With --smoke everything runs for a moment only, on few pages, after each design
// has shown that it refuses what it must.
#include <rte_lcore.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bench/micro/harness.h"
#include "bench/micro/lending.h"
#include "bench/micro/page_sources.h"
#include "bench/micro/pools.h"
#include "bench/micro/refcounts.h"
#include "bench/micro/token_designs.h"
#include "dataplane/eal.h"
#include "tokens/worker_id.h"

namespace rxtoken::micro {
namespace {

// ---- lend and return
// -----------------------------------------------------------------------------

struct Place {
  const char* section;
  std::string column;
};

template <typename Design, typename Source>
void AddOneThread(Bench& bench, const char* row, const Place& place, std::shared_ptr<Design> design,
                  std::unique_ptr<Source> source) {
  const auto loop =
      std::make_shared<OneThread<Design, Source>>(std::move(design), std::move(source));
  bench.Add({.section = place.section,
             .row = row,
             .column = place.column,
             .first = [loop](std::uint64_t n) { (*loop)(n); }});
}

template <typename Design, typename Source>
void AddTwoThreads(Bench& bench, const char* row, const Place& place,
                   std::shared_ptr<Design> design, std::unique_ptr<Source> source,
                   std::uint32_t batch) {
  using Way = WayFor<Design, Source>;
  const auto loop = std::make_shared<TwoThreads<Way, Source>>(
      std::make_unique<Way>(std::move(design)), std::move(source), batch);
  bench.Add({.section = place.section,
             .row = row,
             .column = place.column,
             .first = [loop](std::uint64_t n) { loop->Worker(n); },
             .second = [loop](std::uint64_t n) { loop->Application(n); }});
}

std::string SizeName(std::uint32_t pages) {
  return pages >= 1u << 20 ? std::to_string(pages >> 20) + " Mi"
                           : std::to_string(pages >> 10) + " Ki";
}

// Pages of a buffer in order and at random, without a pool.
void AddLending(Bench& bench, std::uint32_t pages, int threads) {
  const auto add = [&]<typename Design>(const char* row, std::type_identity<Design>) {
    const auto design = std::make_shared<Design>(pages);
    for (const bool random : {false, true}) {
      const Place place = {
          threads == 1 ? "lend and return, 1 thread" : "lend and return, 2 threads",
          SizeName(pages) + (random ? " random" : " sequential")};
      auto source = std::make_unique<EndlessPages>(pages, random);
      if (threads == 1) {
        AddOneThread(bench, row, place, design, std::move(source));
      } else {
        AddTwoThreads(bench, row, place, design, std::move(source), kBatch);
      }
    }
  };
  add("unchecked array", std::type_identity<Unchecked>());
  add("unchecked array, descriptors", std::type_identity<UncheckedWithDescriptors>());
  add("rxtoken", std::type_identity<Ours>());
  if (threads == 1) {
    add("rxtoken, batch prefetched", std::type_identity<Prefetched<Ours>>());
    add("atomic fetch_sub, batch prefetched",
        std::type_identity<Prefetched<Batched<FetchSubAndSign>>>());
  }
  add("atomic fetch_sub and sign", std::type_identity<Batched<FetchSubAndSign>>());
  add("atomic compare-exchange", std::type_identity<Batched<CompareExchange>>());
  add("pointer to page, atomic count", std::type_identity<Batched<PagePointer>>());
  add("hash map, bucket locks", std::type_identity<Batched<HashMap>>());
  add("64-way tree, lock", std::type_identity<Batched<RadixTree>>());
  add("liburcu lfht", std::type_identity<Batched<LockFreeHash>>());
  add("Judy, lock", std::type_identity<Batched<Judy>>());
}

// From the page pool and back to it.
void AddFullPath(Bench& bench, bool two_threads) {
  constexpr const char* kSection = "pool, lend, ring, return, pool";
  constexpr std::uint32_t kPages = 4096;
  const auto add = [&]<typename Design>(const char* row, std::type_identity<Design>) {
    AddOneThread(bench, row, {kSection, "1 thread"}, std::make_shared<Design>(kPages),
                 std::make_unique<PoolOfPages>(kPages));
    if (!two_threads) return;
    AddTwoThreads(bench, row, {kSection, "2 threads, batch 32"}, std::make_shared<Design>(kPages),
                  std::make_unique<PoolOfPages>(kPages), 32);
    AddTwoThreads(bench, row, {kSection, "2 threads, batch 128"}, std::make_shared<Design>(kPages),
                  std::make_unique<PoolOfPages>(kPages), 128);
  };
  if (two_threads) {
    for (const std::uint32_t batch : {32u, 128u}) {
      AddTwoThreads(
          bench, "the two rings alone", {kSection, "2 threads, batch " + std::to_string(batch)},
          std::make_shared<NoState>(kPages), std::make_unique<EndlessPages>(kPages, false), batch);
    }
  }
  add("rxtoken", std::type_identity<Ours>());
  add("atomic uref and page count", std::type_identity<Batched<TwoAtomicCounts>>());
  add("64-way tree, lock", std::type_identity<Batched<RadixTree>>());
}

// ---- reference counts
// ----------------------------------------------------------------------------

void AddRefcounts(Bench& bench, bool two_threads) {
  const auto add = [&]<typename Count>(const char* row, std::type_identity<Count>) {
    for (const int threads : {1, 2}) {
      if (threads == 2 && !two_threads) return;
      const auto count = std::make_shared<Count>();
      Case c{.section = "get and put",
             .row = row,
             .column = threads == 1 ? "1 thread" : "2 threads, one count",
             .first = [count](std::uint64_t n) { GetAndPut(*count, n); }};
      if (threads == 2) c.second = c.first;
      bench.Add(std::move(c));
    }
  };
  add("plain fetch_add, fetch_sub", std::type_identity<PlainCount>());
  add("rxtoken: rcuref", std::type_identity<RcurefCount>());
  add("inc_not_zero, dec_and_test", std::type_identity<IncNotZeroCount>());
}

// ---- page pools
// ----------------------------------------------------------------------------------

void AddPools(Bench& bench, bool two_threads) {
  const auto add = [&](const char* row, auto make_pool) {
    using Pool = typename decltype(make_pool(false))::element_type;
    const auto here = std::make_shared<PushAndPop<Pool>>(make_pool(false));
    bench.Add({.section = "pool, push and pop",
               .row = row,
               .column = "1 thread",
               .first = [here](std::uint64_t n) { (*here)(n); }});
    if (!two_threads) return;
    const auto across = std::make_shared<PopHerePushThere<Pool>>(make_pool(true));
    bench.Add({.section = "pool, push and pop",
               .row = row,
               .column = "2 threads, across",
               .first = [across](std::uint64_t n) { across->Pops(n); },
               .second = [across](std::uint64_t n) { across->Pushes(n); }});
  };
  add("rxtoken: page pool", [](bool shared) { return std::make_unique<OurPool>(shared); });
  add("rte_mempool, cache 512", [](bool) { return std::make_unique<Mempool>(); });
  add("rte_ring SP/SC", [](bool) { return std::make_unique<Ring>(RING_F_SP_ENQ | RING_F_SC_DEQ); });
  add("rte_ring MP/MC", [](bool) { return std::make_unique<Ring>(0); });
  add("rte_stack", [](bool) { return std::make_unique<Stack>(0); });
  add("rte_stack, lock-free", [](bool) { return std::make_unique<Stack>(RTE_STACK_F_LF); });
}

// ---- what must be refused
// ------------------------------------------------------------------------

template <typename Design>
void CheckDesign(const char* name) {
  constexpr std::array<std::uint32_t, 2> kPages = {7, 9};
  std::array<typename Design::Token, 2> tokens;
  Design design(1024);
  const auto expect = [&](typename Design::Token token, std::uint32_t page, const char* what) {
    std::uint32_t given = kRefused;
    const std::uint32_t accepted = design.ReturnAll(
        std::span<const typename Design::Token>(&token, 1), [&](std::uint32_t p) { given = p; });
    if (given != page || accepted != (page != kRefused)) Die(std::string(name) + ": " + what);
  };
  design.LendAll(kPages, tokens.data());
  expect(tokens[0], 7, "a good token is not accepted");
  if constexpr (Design::kRefuses) {
    expect(tokens[0], kRefused, "a token is accepted twice");
    expect(tokens[0] + 5, kRefused, "a token is accepted that was never given");
    expect(tokens[0] + (1u << 26), kRefused, "a token is accepted that is out of range");
  }
  expect(tokens[1], 9, "a good token is not accepted after bad ones");
}

void CheckDesigns() {
  CheckDesign<Unchecked>("unchecked array");
  CheckDesign<Ours>("rxtoken");
  CheckDesign<Prefetched<Ours>>("rxtoken, batch prefetched");
  CheckDesign<Batched<FetchSubAndSign>>("atomic fetch_sub and sign");
  CheckDesign<Batched<CompareExchange>>("atomic compare-exchange");
  CheckDesign<Batched<TwoAtomicCounts>>("atomic uref and page count");
  CheckDesign<Batched<PagePointer>>("pointer to page");
  CheckDesign<Batched<HashMap>>("hash map");
  CheckDesign<Batched<RadixTree>>("64-way tree");
  CheckDesign<Batched<LockFreeHash>>("liburcu lfht");
  CheckDesign<Batched<Judy>>("Judy");
}

int Main(int argc, char** argv) {
  bool smoke = false;
  Bench::Options options;
  for (int i = 1; i < argc; i++) {
    const std::string_view argument = argv[i];
    if (argument == "--smoke") {
      smoke = true;
      options = {.rounds = 1, .chunk_ns = 1e4};
    } else if (argument.starts_with("--rounds=")) {
      options.rounds = std::atoi(argv[i] + std::strlen("--rounds="));
    } else {
      Die("usage: bench_micro [--smoke] [--rounds=N]");
    }
  }
  CheckDesigns();

  const bool two_threads = MayRunOn(1);
  if (!two_threads)
    std::fprintf(stderr, "micro: no CPU 1 here; cases of two threads are left out\n");
  Pin(0);
  this_worker = 0;
  if (Status s = StartEal({}); !s.ok()) Die(s.ToString());
  std::optional<SecondThread> second;
  if (two_threads) {
    second.emplace([] {
      this_worker = 1;
      if (rte_thread_register() != 0) Die("DPDK knows no more threads");
    });
  }
  Bench bench(options, second ? &*second : nullptr);
  for (const std::uint32_t pages : {16u << 10, 512u << 10, 16u << 20}) {
    if (smoke && pages > 16u << 10) continue;
    AddLending(bench, pages, 1);
    if (two_threads) AddLending(bench, pages, 2);
  }
  AddFullPath(bench, two_threads);
  AddRefcounts(bench, two_threads);
  AddPools(bench, two_threads);
  bench.Run();
  return 0;
}

}  // namespace
}  // namespace rxtoken::micro

int main(int argc, char** argv) { return rxtoken::micro::Main(argc, argv); }
