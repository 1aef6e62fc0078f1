// SPDX-License-Identifier: Apache-2.0
// lending.h - loops that lend pages and take them back, on one thread and between two.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "bench/micro/batch_ring.h"
#include "bench/micro/harness.h"
#include "bench/micro/token_designs.h"

namespace rxtoken::micro {

inline constexpr std::uint32_t kBatch = 32;

// One thread: of 256 tokens that are out, the 32 oldest come back and 32 others go.
template <typename Design, typename Source>
class OneThread {
 public:
  OneThread(std::shared_ptr<Design> design, std::unique_ptr<Source> source)
      : design_(std::move(design)), source_(std::move(source)) {
    for (std::size_t at = 0; at < out_.size(); at += kBatch) Lend(&out_[at]);
  }

  void operator()(std::uint64_t n) {
    for (; n != 0; n -= kBatch) {
      Token* const lot = &out_[next_];
      next_ = (next_ + kBatch) % out_.size();
      {
        auto&& give = source_->Open();
        if (design_->ReturnAll(std::span<const Token>(lot, kBatch), give) != kBatch) {
          Die("a good token was refused");
        }
      }
      Lend(lot);
    }
  }

 private:
  using Token = typename Design::Token;

  void Lend(Token* tokens) {
    std::array<std::uint32_t, kBatch> pages;
    if (!source_->Take(pages)) Die("no page is left");
    design_->LendAll(pages, tokens);
  }

  std::shared_ptr<Design> design_;
  std::unique_ptr<Source> source_;
  std::array<Token, 256> out_;
  std::size_t next_ = 0;
};

// What tells the application of a fragment, in the designs that are not ours: as large as ours.
template <typename Token>
struct alignas(sizeof(Descriptor)) Message {
  Token token;
  std::uint16_t offset;
  std::uint16_t length;
  std::uint32_t time;
};

// ---- ways between the two threads ---------------------------------------------------------------
//
//   worker:       TrySend(pages)      lends them and tells; false: no room now
//                 Collect(source)     takes back what has come
//   application:  Serve(at_most)      reads and gives back; how many

// The real thing: both ends of a lane.
class ByLane {
 public:
  explicit ByLane(std::shared_ptr<Ours> ours) : ours_(std::move(ours)) {}

  bool TrySend(std::span<const std::uint32_t> pages) noexcept {
    if (!ours_->TryLend(pages)) return false;
    ours_->lane().Publish();
    return true;
  }
  template <typename Source>
  void Collect(Source& source) noexcept {
    ours_->Drain(source.Open());
  }
  std::uint32_t Serve(std::uint32_t at_most) noexcept {
    std::array<Descriptor, kMaxBatch> descriptors;
    std::array<std::uint32_t, kMaxBatch> tokens;
    std::uint32_t n = 0;
    const std::size_t read = ours_->reader().Poll({descriptors.data(), at_most});
    for (std::size_t i = 0; i < read; i++) {
      if (descriptors[i].kind == DescriptorKind::kFragment) tokens[n++] = descriptors[i].token;
    }
    if (read == 0) return 0;
    ours_->reader().Consume(read);
    for (std::uint32_t done = 0; done < n;) {
      done += static_cast<std::uint32_t>(
          ours_->reader().Return(std::span<const std::uint32_t>(&tokens[done], n - done)));
    }
    return n;
  }

 private:
  std::shared_ptr<Ours> ours_;
};

template <typename Design>
class ByRing {
 protected:
  using Token = typename Design::Token;

  explicit ByRing(std::shared_ptr<Design> design) : design_(std::move(design)) {}

  bool LendAndSend(std::span<const std::uint32_t> pages) noexcept {
    if (!out_.HasRoom(static_cast<std::uint32_t>(pages.size()))) return false;
    std::array<Token, kMaxBatch> tokens;
    std::array<Message<Token>, kMaxBatch> messages;
    design_->LendAll(pages, tokens.data());
    for (std::size_t i = 0; i < pages.size(); i++) {
      messages[i] = {.token = tokens[i], .offset = 128, .length = 64, .time = 0};
    }
    out_.Push({messages.data(), pages.size()});
    return true;
  }
  std::uint32_t Receive(std::span<Token> tokens) noexcept {
    std::array<Message<Token>, kMaxBatch> messages;
    const std::uint32_t n = out_.Pop({messages.data(), tokens.size()});
    for (std::uint32_t i = 0; i < n; i++) tokens[i] = messages[i].token;
    return n;
  }
  void SendHome(std::span<const std::uint32_t> words) noexcept {
    while (!home_.HasRoom(static_cast<std::uint32_t>(words.size()))) Pause();
    home_.Push(words);
  }

  std::shared_ptr<Design> design_;
  BatchRing<Message<Token>, kRingEntries> out_;
  BatchRing<std::uint32_t, kRingEntries> home_;  // tokens, or pages that are free
};

// The worker counts both ways, as ours does, and tokens travel back to it.
template <typename Design>
class ToTheWorker : ByRing<Design> {
  using Token = typename Design::Token;

 public:
  explicit ToTheWorker(std::shared_ptr<Design> design) : ByRing<Design>(std::move(design)) {}

  bool TrySend(std::span<const std::uint32_t> pages) noexcept { return this->LendAndSend(pages); }
  template <typename Source>
  void Collect(Source& source) noexcept {
    std::array<Token, Lane::kDrainTokens> tokens;
    const std::uint32_t n = this->home_.Pop(tokens);
    auto&& give = source.Open();
    this->design_->ReturnAll(std::span<const Token>(tokens.data(), n), give);
  }
  std::uint32_t Serve(std::uint32_t at_most) noexcept {
    std::array<Token, kMaxBatch> tokens;
    const std::uint32_t n = this->Receive({tokens.data(), at_most});
    if (n != 0) this->SendHome({tokens.data(), n});
    return n;
  }
};

// The application's thread returns tokens itself, as one does to Linux. Pages that are free
// travel back if they are needed.
template <typename Design, bool kPagesBack>
class OnTheSpot : ByRing<Design> {
  using Token = typename Design::Token;

 public:
  explicit OnTheSpot(std::shared_ptr<Design> design) : ByRing<Design>(std::move(design)) {}

  bool TrySend(std::span<const std::uint32_t> pages) noexcept { return this->LendAndSend(pages); }
  template <typename Source>
  void Collect(Source& source) noexcept {
    if constexpr (!kPagesBack) return;
    std::array<std::uint32_t, Lane::kDrainTokens> pages;
    const std::uint32_t n = this->home_.Pop(pages);
    auto&& give = source.Open();
    for (std::uint32_t i = 0; i < n; i++) give(pages[i]);
  }
  std::uint32_t Serve(std::uint32_t at_most) noexcept {
    std::array<Token, kMaxBatch> tokens;
    std::array<std::uint32_t, kMaxBatch> pages;
    const std::uint32_t n = this->Receive({tokens.data(), at_most});
    if (n == 0) return 0;
    std::uint32_t* end = pages.data();
    const std::uint32_t accepted = this->design_->ReturnAll(
        std::span<const Token>(tokens.data(), n), [&end](std::uint32_t page) { *end++ = page; });
    if (accepted != n) Die("a good token was refused");
    if constexpr (kPagesBack) this->SendHome({pages.data(), n});
    return n;
  }
};

// Who counts in a design, and so how its tokens travel.
template <typename Design, typename Source>
using WayFor = std::conditional_t<
    std::is_base_of_v<Ours, Design>, ByLane,
    std::conditional_t<std::is_base_of_v<OneThreadOnly, Design>, ToTheWorker<Design>,
                       OnTheSpot<Design, Source::kNeedsPagesBack>>>;

// The two threads: what each does of n fragments.
template <typename Way, typename Source>
class TwoThreads {
 public:
  TwoThreads(std::unique_ptr<Way> way, std::unique_ptr<Source> source, std::uint32_t batch)
      : way_(std::move(way)), source_(std::move(source)), batch_(batch) {}

  void Worker(std::uint64_t n) {
    std::array<std::uint32_t, kMaxBatch> memory;
    const std::span<std::uint32_t> pages(memory.data(), batch_);
    bool taken = false;
    for (std::uint64_t sent = 0; sent < n;) {
      way_->Collect(*source_);
      if (!taken) taken = source_->Take(pages);
      if (taken && way_->TrySend(pages)) {
        taken = false;
        sent += batch_;
      } else {
        Pause();
      }
    }
    // The application may wait for room.
    rounds_++;
    while (rounds_served_.load(std::memory_order_acquire) != rounds_) way_->Collect(*source_);
  }

  void Application(std::uint64_t n) {
    while (n != 0) {
      const std::uint32_t served =
          way_->Serve(static_cast<std::uint32_t>(std::min<std::uint64_t>(batch_, n)));
      n -= served;
      if (served == 0) Pause();
    }
    rounds_served_.fetch_add(1, std::memory_order_release);
  }

 private:
  std::unique_ptr<Way> way_;
  std::unique_ptr<Source> source_;
  const std::uint32_t batch_;
  std::uint64_t rounds_ = 0;
  alignas(kWriterAlignBytes) std::atomic<std::uint64_t> rounds_served_{0};
};

}  // namespace rxtoken::micro
