// SPDX-License-Identifier: Apache-2.0
// scheduler.h - runs a scenario's threads under every schedule, up to a bound.
//
// Scenarios are compiled with the thread sanitizer's instrumentation, but linked with hooks.cc
// in place of its runtime. So the headers under test run as they are: at each atomic operation
// another thread may go on, and a load may find any value that the memory model of C++ lets it
// find (memory.h); each plain access is checked for a race, and for memory that is freed.
//
// A schedule is written as where it deviates from the plain one, in which each thread runs
// until it ends or yields and loads find the newest value: "17:1,23:2" takes alternative 1 at
// the 17th decision and 2 at the 23rd. RXTOKEN_SCHEDULE=17:1,23:2 in the environment runs only
// that one, and prints each step.
//
// Thread-safety: none; a scenario's threads are fibers of the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace rxtoken::interleave {

inline constexpr unsigned kMaxThreads = 4;

struct Bounds {
  // All schedules with so many deviations: switches away from a thread that could go on,
  // loads of an old value, compare-exchanges that fail for nothing. Who goes on when a thread
  // has ended is free.
  unsigned deviations = 3;
  // Beyond that, so many schedules that deviate at random.
  std::uint64_t random = 2000;
  // Takes every release for relaxed. What needs one must fail then.
  bool ignore_release = false;
};

// One run: the state that threads share, and what they do.
class Scenario {
 public:
  // Lives until the run is over.
  template <typename T, typename... Args>
  T& Make(Args&&... args) {
    auto made = std::make_shared<T>(std::forward<Args>(args)...);
    state_.push_back(made);
    return *made;
  }
  void Thread(std::function<void()> body) { threads_.push_back(std::move(body)); }
  // Runs when all threads have ended, and sees all that they did.
  void Finally(std::function<void()> body) { finally_ = std::move(body); }

 private:
  friend class Scheduler;
  std::vector<std::shared_ptr<void>> state_;
  std::vector<std::function<void()>> threads_;
  std::function<void()> finally_;
};

struct Outcome {
  std::uint64_t schedules = 0;
  std::string failure;  // empty: none; else what went wrong first, and the schedule
};

// Sets a scenario up for each schedule and runs it. `setup` does the same each time.
Outcome Explore(const Bounds& bounds, const std::function<void(Scenario&)>& setup);

// ---- inside a scenario's threads ------------------------------------------------------------

// Fails the run if `condition` does not hold. Also in Finally().
void Check(bool condition, const char* what);

// Lets others go on, because this thread cannot before they did something.
void Yield();

}  // namespace rxtoken::interleave
