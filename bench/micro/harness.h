// SPDX-License-Identifier: Apache-2.0
// harness.h - measures short cases, of one thread or two, beside each other on a busy machine.
//
// All cases take turns in chunks of a millisecond, for many rounds, so that whatever else the
// machine does falls on all of them alike. A chunk in which one of its threads was preempted
// is done again. A figure is the median of a case's chunks.
#pragma once

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tokens/abi/limits.h"

namespace rxtoken::micro {

[[noreturn]] inline void Die(const std::string& what) {
  std::fprintf(stderr, "micro: %s\n", what.c_str());
  std::exit(1);
}

inline void Pause() { __builtin_ia32_pause(); }

inline void Pin(unsigned cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (::sched_setaffinity(0, sizeof one, &one) != 0)
    Die("cannot run on CPU " + std::to_string(cpu));
}

inline bool MayRunOn(unsigned cpu) {
  cpu_set_t allowed;
  return ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_ISSET(cpu, &allowed);
}

// How often the calling thread was preempted.
inline long Preemptions() {
  rusage usage;
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// Does that many operations, a multiple of kOperationsUnit.
using Operations = std::function<void(std::uint64_t)>;
inline constexpr std::uint64_t kOperationsUnit = 256;

struct Case {
  std::string section, row, column;
  Operations first;        // on CPU 0
  Operations second = {};  // at the same time on CPU 1, as many; empty: one thread
};

// The thread on CPU 1. It sleeps while only one is needed.
class SecondThread {
 public:
  // `prepare` runs there first.
  explicit SecondThread(std::function<void()> prepare)
      : thread_([this, prepare = std::move(prepare)] {
          Pin(1);
          prepare();
          Serve();
        }) {}
  ~SecondThread() {
    Start(nullptr, 0);
    thread_.join();
  }

  // Wakes the thread for `operations`, and returns when it is about to begin.
  void Start(const Operations* operations, std::uint64_t n) {
    operations_ = operations;
    n_ = n;
    step_.store(kStarting, std::memory_order_release);
    step_.notify_one();
    while (operations != nullptr && step_.load(std::memory_order_acquire) != kReady) Pause();
  }
  // Lets it begin.
  void Go() { step_.store(kGoing, std::memory_order_release); }
  // Waits for its end; whether it was preempted.
  bool Join() {
    while (step_.load(std::memory_order_acquire) != kIdle) Pause();
    return preempted_;
  }

 private:
  enum Step { kIdle, kStarting, kReady, kGoing };

  void Serve() {
    for (;;) {
      step_.wait(kIdle, std::memory_order_acquire);
      if (operations_ == nullptr) return;
      step_.store(kReady, std::memory_order_release);
      while (step_.load(std::memory_order_acquire) != kGoing) Pause();
      const long before = Preemptions();
      (*operations_)(n_);
      preempted_ = Preemptions() != before;
      step_.store(kIdle, std::memory_order_release);
    }
  }

  alignas(kWriterAlignBytes) std::atomic<Step> step_{kIdle};
  const Operations* operations_ = nullptr;
  std::uint64_t n_ = 0;
  bool preempted_ = false;
  std::thread thread_;  // last: it uses the others
};

class Bench {
 public:
  struct Options {
    int rounds = 31;
    double chunk_ns = 1e6;
  };

  // `second` may be null if no case needs it.
  Bench(Options options, SecondThread* second) : options_(options), second_(second) {}

  void Add(Case c) { cases_.push_back({std::move(c), 0, {}}); }

  // Measures what was added, and prints a line for each.
  void Run() {
    for (Measured& m : cases_) m.per_chunk = OperationsPerChunk(m.c);
    for (int round = 0; round < options_.rounds; round++) {
      for (Measured& m : cases_) {
        (void)Time(m.c, Whole(static_cast<double>(m.per_chunk) / 8));  // its own cache lines
        m.samples.push_back(Sample(m.c, m.per_chunk));
      }
    }
    for (Measured& m : cases_) Print(m);
  }

 private:
  struct Measured {
    Case c;
    std::uint64_t per_chunk;
    std::vector<double> samples;  // ns an operation
  };

  static std::uint64_t Whole(double operations) {
    const auto units = static_cast<std::uint64_t>(operations / double{kOperationsUnit});
    return std::max<std::uint64_t>(units, 1) * kOperationsUnit;
  }

  std::uint64_t OperationsPerChunk(const Case& c) {
    std::uint64_t n = kOperationsUnit;
    for (;; n *= 2) {
      const double ns = Time(c, n).first;
      if (ns >= options_.chunk_ns / 4)
        return Whole(static_cast<double>(n) * options_.chunk_ns / ns);
    }
  }

  // Nanoseconds an operation in a chunk without preemption, or in the last of five.
  double Sample(const Case& c, std::uint64_t n) {
    for (int attempt = 1;; attempt++) {
      const auto [ns, preempted] = Time(c, n);
      if (!preempted || attempt == 5) return ns / static_cast<double>(n);
    }
  }

  // Nanoseconds until both threads are done, and whether one was preempted.
  std::pair<double, bool> Time(const Case& c, std::uint64_t n) {
    using Clock = std::chrono::steady_clock;
    const bool two = static_cast<bool>(c.second);
    if (two) second_->Start(&c.second, n);
    const long before = Preemptions();
    const Clock::time_point start = Clock::now();
    if (two) second_->Go();
    c.first(n);
    bool preempted = two && second_->Join();
    const Clock::time_point end = Clock::now();
    preempted |= Preemptions() != before;
    return {std::chrono::duration<double, std::nano>(end - start).count(), preempted};
  }

  void Print(Measured& m) const {
    std::vector<double>& s = m.samples;
    std::sort(s.begin(), s.end());
    std::printf("%s\t%s\t%s\t%.3f\t%.3f\t%.3f\t%zu\n", m.c.section.c_str(), m.c.row.c_str(),
                m.c.column.c_str(), s[s.size() / 2], s[s.size() / 10], s[s.size() * 9 / 10],
                s.size());
    std::fflush(stdout);
  }

  Options options_;
  SecondThread* second_;
  std::vector<Measured> cases_;
};

}  // namespace rxtoken::micro
