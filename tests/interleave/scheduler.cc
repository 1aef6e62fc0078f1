// SPDX-License-Identifier: Apache-2.0
#include "tests/interleave/scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/interleave/engine.h"

namespace rxtoken::interleave {

Outcome Explore(const Bounds& bounds, const std::function<void(Scenario&)>& setup) {
  return Scheduler(bounds).Explore(setup);
}

void Check(bool condition, const char* what) {
  if (condition) return;
  const Scheduler::Inside inside;
  Scheduler::Running().Fail(what);
}

void Yield() {
  const Scheduler::Inside inside;
  Scheduler::Running().Yield();
}

Scheduler::Scheduler(const Bounds& bounds) : bounds_(bounds) {}

Outcome Scheduler::Explore(const std::function<void(Scenario&)>& setup) {
  if (const char* schedule = std::getenv("RXTOKEN_SCHEDULE"); schedule != nullptr) {
    Replay(schedule);
    RunOnce(setup);
    return outcome_;
  }
  do {
    RunOnce(setup);
  } while (outcome_.failure.empty() && NextTrail());
  random_.emplace(1);
  for (std::uint64_t i = 0; i < bounds_.random && outcome_.failure.empty(); i++) {
    trail_.clear();
    one_in_ = 2u << i % 5;
    RunOnce(setup);
  }
  return outcome_;
}

// ---- decisions -------------------------------------------------------------------------------

unsigned Scheduler::Choose(unsigned n, bool free) {
  if (n == 1) return 0;
  if (decided_ == trail_.size()) {
    unsigned taken = 0;
    if (replay_) {
      const auto found = replay_->find(decided_);
      if (found != replay_->end()) taken = found->second;
    } else if (random_ && (free || (*random_)() % one_in_ == 0)) {
      taken = (*random_)() % n;
    }
    trail_.push_back({.alternatives = n, .taken = taken, .free = free});
  }
  const Decision& decision = trail_[decided_++];
  if (decision.alternatives != n || decision.taken >= n) {
    std::fprintf(stderr, "the scenario is not the same each time\n");
    std::abort();
  }
  return decision.taken;
}

// Moves to the next schedule within the bound: the last decision that can be changed is, and
// those after it are open again.
bool Scheduler::NextTrail() {
  const auto deviates = [](const Decision& d) { return !d.free && d.taken != 0; };
  auto deviations = std::count_if(trail_.begin(), trail_.end(), deviates);
  for (; !trail_.empty(); trail_.pop_back()) {
    Decision& last = trail_.back();
    deviations -= deviates(last);
    if (last.taken + 1 < last.alternatives && (last.free || deviations < bounds_.deviations)) {
      last.taken++;
      return true;
    }
  }
  return false;
}

std::string Scheduler::Schedule() const {
  std::string text;
  for (std::size_t i = 0; i < decided_; i++) {
    if (trail_[i].taken == 0) continue;
    if (!text.empty()) text += ',';
    text += std::to_string(i) + ':' + std::to_string(trail_[i].taken);
  }
  return text;
}

void Scheduler::Replay(const char* schedule) {
  replay_.emplace();
  unsigned at = 0;
  unsigned taken = 0;
  for (int n = 0; std::sscanf(schedule, "%u:%u%n", &at, &taken, &n) == 2; schedule += n) {
    (*replay_)[at] = taken;
    if (schedule[n] == ',') n++;
  }
}

void Scheduler::Fail(const std::string& what) {
  if (outcome_.failure.empty()) outcome_.failure = what + " [" + Schedule() + "]";
}

// ---- one run ---------------------------------------------------------------------------------

void Scheduler::RunOnce(const std::function<void(Scenario&)>& setup) {
  running_ = this;
  {
    // All but the threads themselves is simply done.
    const Inside inside;
    Scenario scenario;
    setup(scenario);
    Start(scenario);
    current_ = Choose(threads_, true);
    swapcontext(&main_, &fibers_[current_].context);
    this_worker = kNotAWorker;
    if (!stuck_ && scenario.finally_) scenario.finally_();
  }
  running_ = nullptr;
  for (const Freed& freed : freed_) freed.release(freed.memory, freed.bytes);
  freed_.clear();
}

void Scheduler::Start(const Scenario& scenario) {
  outcome_.schedules++;
  decided_ = 0;
  steps_ = 0;
  stuck_ = false;
  memory_.emplace(
      bounds_.ignore_release, [this](unsigned n) { return Choose(n); },
      [this](const std::string& what) { Fail(what); });
  threads_ = static_cast<unsigned>(scenario.threads_.size());
  for (unsigned t = 0; t < threads_; t++) {
    Fiber& fiber = fibers_[t];
    fiber.body = scenario.threads_[t];
    fiber.ended = fiber.yielded = false;
    fiber.worker = kNotAWorker;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, &Scheduler::Enter, 0);
  }
}

// Where a fiber starts.
void Scheduler::Enter() {
  Scheduler& scheduler = *running_;
  inside_ = false;
  scheduler.fibers_[scheduler.current_].body();
  inside_ = true;
  scheduler.fibers_[scheduler.current_].ended = true;
  const Others others = scheduler.FindOthers(true);
  if (others.n == 0) setcontext(&scheduler.main_);
  scheduler.SwitchTo(others.threads[scheduler.Choose(others.n, true)]);
}

void Scheduler::SwitchTo(unsigned thread) {
  Fiber& from = fibers_[current_];
  from.worker = this_worker;
  current_ = thread;
  this_worker = fibers_[thread].worker;
  swapcontext(&from.context, &fibers_[thread].context);
}

// Threads that can go on beside the current one, the next first.
Scheduler::Others Scheduler::FindOthers(bool also_yielded) const {
  Others others;
  for (unsigned i = 1; i < threads_; i++) {
    const unsigned t = (current_ + i) % threads_;
    if (!fibers_[t].ended && (also_yielded || !fibers_[t].yielded)) others.threads[others.n++] = t;
  }
  return others;
}

void Scheduler::Step(const char* what, std::uintptr_t address) {
  if (++steps_ > kMaxSteps) {
    Fail("no end: threads wait for what does not happen");
    stuck_ = true;
    setcontext(&main_);
  }
  const Others others = FindOthers(false);
  if (const unsigned taken = Choose(1 + others.n); taken != 0) SwitchTo(others.threads[taken - 1]);
  if (replay_) {
    std::fprintf(stderr, "%4zu thread %u: %s %#zx\n", decided_, current_, what,
                 static_cast<std::size_t>(address));
  }
  for (Fiber& fiber : fibers_) fiber.yielded = false;
}

void Scheduler::Yield() {
  Others others = FindOthers(false);
  if (others.n == 0) others = FindOthers(true);
  if (others.n == 0) return;
  fibers_[current_].yielded = true;
  SwitchTo(others.threads[Choose(others.n)]);
}

bool Scheduler::IsPrivate(std::uintptr_t address) const noexcept {
  if (address == reinterpret_cast<std::uintptr_t>(&this_worker)) return true;
  return std::any_of(fibers_.begin(), fibers_.end(), [&](const Fiber& fiber) {
    const auto stack = reinterpret_cast<std::uintptr_t>(fiber.stack.get());
    return address >= stack && address < stack + kStackBytes;
  });
}

void Scheduler::FreeLater(void* memory, std::size_t bytes, void (*release)(void*, std::size_t)) {
  memory_->Free(reinterpret_cast<std::uintptr_t>(memory), bytes);
  freed_.push_back({memory, bytes, release});
}

}  // namespace rxtoken::interleave
