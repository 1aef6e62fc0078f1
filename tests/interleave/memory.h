// SPDX-License-Identifier: Apache-2.0
// memory.h - the memory that a scenario's threads see.
//
// Every atomic location keeps all values that were stored in it, in order. Each thread has a
// vector clock of what happened before where it is. A load may find any value that is not
// older than the newest one that happened before it, or than what the thread saw there last;
// a read-modify-write finds the newest. Acquire takes over the clock that the value's release,
// or one that its chain of read-modify-writes goes on from, has published. Sequentially
// consistent operations also go through one clock that they all share, which is a little more
// than C++ promises: something that only fails without it is not found.
//
// Plain accesses that overlap, one of them a write, must be ordered by the same clocks.
//
// Thread-safety: none. `t` is the thread that does it; t's clock moves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/interleave/scheduler.h"

namespace rxtoken::interleave {

class Memory {
 public:
  // `choose(n)` picks one of n alternatives, 0 being the plain one. `fail` is told what is
  // wrong.
  Memory(bool ignore_release, std::function<unsigned(unsigned)> choose,
         std::function<void(const std::string&)> fail);

  // Orders are numbered as the compiler does it: __ATOMIC_RELAXED and so on.
  std::uint64_t Load(unsigned t, std::uintptr_t address, unsigned bytes, int order);
  void Store(unsigned t, std::uintptr_t address, unsigned bytes, std::uint64_t value, int order);
  template <typename F>  // new = f(old)
  std::uint64_t Modify(unsigned t, std::uintptr_t address, unsigned bytes, int order, F f) {
    const std::uint64_t old = Newest(t, address, bytes, order);
    Append(t, address, bytes, f(old), order, true);
    return old;
  }
  std::uint64_t Newest(unsigned t, std::uintptr_t address, unsigned bytes, int order);
  void Fence(unsigned t, int order);

  void Plain(unsigned t, std::uintptr_t address, std::size_t bytes, bool write);
  // Whoever touches it from now on is wrong.
  void Free(std::uintptr_t address, std::size_t bytes) { freed_.emplace_back(address, bytes); }

  // A mutex, or anything else that threads have one after the other.
  void Enter(unsigned t, std::uintptr_t mutex) { Join(threads_[t].now, mutexes_[mutex]); }
  void Leave(unsigned t, std::uintptr_t mutex);

 private:
  using Clock = std::array<std::uint32_t, kMaxThreads>;
  struct Thread {
    Clock now{};
    Clock fenced{};   // now, at the last release fence
    Clock pending{};  // what relaxed loads would have acquired, for an acquire fence
  };
  struct Value {
    std::uint64_t value;
    Clock released;
    unsigned thread;
    std::uint32_t when;  // on the thread's own clock
  };
  struct Location {
    std::vector<Value> values;
    std::array<std::size_t, kMaxThreads> seen{};  // the value that each thread saw last
  };
  struct Access {
    unsigned thread;
    std::uint32_t when;
    std::uint8_t bytes;  // of the eight, a bit each
    bool write;
  };

  static void Join(Clock& to, const Clock& from);
  bool Releases(int order) const;
  Location& At(unsigned t, std::uintptr_t address, unsigned bytes);
  void Acquire(unsigned t, const Value& value, int order);
  void Append(unsigned t, std::uintptr_t address, unsigned bytes, std::uint64_t value, int order,
              bool chained);
  void CheckFreed(unsigned t, std::uintptr_t address, std::size_t bytes);

  const bool ignore_release_;
  const std::function<unsigned(unsigned)> choose_;
  const std::function<void(const std::string&)> fail_;
  std::array<Thread, kMaxThreads> threads_;
  Clock consistent_{};
  std::unordered_map<std::uintptr_t, Location> locations_;
  std::unordered_map<std::uintptr_t, std::vector<Access>> accesses_;  // by eight bytes
  std::unordered_map<std::uintptr_t, Clock> mutexes_;
  std::vector<std::pair<std::uintptr_t, std::size_t>> freed_;
};

}  // namespace rxtoken::interleave
