// SPDX-License-Identifier: Apache-2.0
// engine.h - the scheduler, as the hooks see it.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/interleave/memory.h"
#include "tests/interleave/scheduler.h"
#include "tokens/worker_id.h"

namespace rxtoken::interleave {

class Scheduler {
 public:
  explicit Scheduler(const Bounds& bounds);

  Outcome Explore(const std::function<void(Scenario&)>& setup);

  // The scheduler of the scenario whose thread is running; nullptr when none is, or when what
  // is running is the scheduler itself.
  static Scheduler* Active() noexcept { return inside_ ? nullptr : running_; }
  static Scheduler& Running() noexcept { return *running_; }

  // While one of these lives, what is running counts as the scheduler.
  class Inside {
   public:
    Inside() noexcept : before_(std::exchange(inside_, true)) {}
    ~Inside() { inside_ = before_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const bool before_;
  };

  // ---- by the running thread, Inside ------------------------------------------------------
  unsigned current() const noexcept { return current_; }
  Memory& memory() noexcept { return *memory_; }
  // Another thread may go on here.
  void Step(const char* what, std::uintptr_t address);
  void Yield();
  // One of `n` alternatives; anything but 0 is a deviation, unless it is `free`.
  unsigned Choose(unsigned n, bool free = false);
  void Fail(const std::string& what);
  // Memory that each thread has for itself: a stack, or `this_worker`.
  bool IsPrivate(std::uintptr_t address) const noexcept;
  // Frees `memory` by `release` when the run is over, and watches it until then.
  void FreeLater(void* memory, std::size_t bytes, void (*release)(void*, std::size_t));

 private:
  static constexpr std::size_t kStackBytes = 256 << 10;
  static constexpr unsigned kMaxSteps = 20'000;

  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
    std::function<void()> body;
    std::uint32_t worker = kNotAWorker;
    bool ended = false;
    bool yielded = false;
  };
  struct Decision {
    unsigned alternatives;
    unsigned taken;
    bool free;
  };
  struct Others {
    std::array<unsigned, kMaxThreads> threads;
    unsigned n = 0;
  };
  struct Freed {
    void* memory;
    std::size_t bytes;
    void (*release)(void*, std::size_t);
  };

  void RunOnce(const std::function<void(Scenario&)>& setup);
  bool NextTrail();
  void Start(const Scenario& scenario);
  std::string Schedule() const;
  void Replay(const char* schedule);
  static void Enter();
  void SwitchTo(unsigned thread);
  Others FindOthers(bool also_yielded) const;

  inline static Scheduler* running_ = nullptr;
  inline static bool inside_ = false;

  const Bounds bounds_;
  Outcome outcome_;
  // How decisions are made: first as the trail has them, then plainly, or at random, or as a
  // schedule to be replayed says.
  std::vector<Decision> trail_;
  std::size_t decided_ = 0;
  std::optional<std::minstd_rand> random_;
  unsigned one_in_ = 2;
  std::optional<std::map<std::size_t, unsigned>> replay_;

  // of the current run
  std::optional<Memory> memory_;
  std::array<Fiber, kMaxThreads> fibers_;
  unsigned threads_ = 0;
  unsigned current_ = 0;
  unsigned steps_ = 0;
  bool stuck_ = false;
  ucontext_t main_;
  std::vector<Freed> freed_;
};

}  // namespace rxtoken::interleave
