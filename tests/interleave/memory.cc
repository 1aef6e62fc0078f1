// SPDX-License-Identifier: Apache-2.0
#include "tests/interleave/memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace rxtoken::interleave {
namespace {

bool Acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }

std::string Where(std::uintptr_t address) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), " at %#zx", static_cast<std::size_t>(address));
  return text.data();
}

}  // namespace

Memory::Memory(bool ignore_release, std::function<unsigned(unsigned)> choose,
               std::function<void(const std::string&)> fail)
    : ignore_release_(ignore_release), choose_(std::move(choose)), fail_(std::move(fail)) {
  for (unsigned t = 0; t < kMaxThreads; t++) threads_[t].now[t] = 1;
}

void Memory::Join(Clock& to, const Clock& from) {
  for (unsigned t = 0; t < kMaxThreads; t++) to[t] = std::max(to[t], from[t]);
}

bool Memory::Releases(int order) const {
  return !ignore_release_ &&
         (order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST);
}

// A location starts with what the memory holds, which happened before everything.
Memory::Location& Memory::At(unsigned t, std::uintptr_t address, unsigned bytes) {
  CheckFreed(t, address, bytes);
  Location& location = locations_[address];
  if (location.values.empty()) {
    std::uint64_t value = 0;
    std::memcpy(&value, reinterpret_cast<const void*>(address), bytes);
    location.values.push_back({.value = value, .released = {}, .thread = 0, .when = 0});
  }
  return location;
}

void Memory::Acquire(unsigned t, const Value& value, int order) {
  Join(threads_[t].pending, value.released);
  if (Acquires(order)) Join(threads_[t].now, value.released);
}

std::uint64_t Memory::Load(unsigned t, std::uintptr_t address, unsigned bytes, int order) {
  Location& location = At(t, address, bytes);
  Thread& thread = threads_[t];
  if (order == __ATOMIC_SEQ_CST) Join(thread.now, consistent_);
  const std::size_t n = location.values.size();
  std::size_t oldest = n - 1;
  while (oldest > location.seen[t] &&
         thread.now[location.values[oldest].thread] < location.values[oldest].when) {
    oldest--;
  }
  const std::size_t found = n - 1 - choose_(static_cast<unsigned>(n - oldest));
  location.seen[t] = found;
  Acquire(t, location.values[found], order);
  if (order == __ATOMIC_SEQ_CST) Join(consistent_, thread.now);
  return location.values[found].value;
}

std::uint64_t Memory::Newest(unsigned t, std::uintptr_t address, unsigned bytes, int order) {
  Location& location = At(t, address, bytes);
  if (order == __ATOMIC_SEQ_CST) Join(threads_[t].now, consistent_);
  location.seen[t] = location.values.size() - 1;
  Acquire(t, location.values.back(), order);
  return location.values.back().value;
}

void Memory::Store(unsigned t, std::uintptr_t address, unsigned bytes, std::uint64_t value,
                   int order) {
  if (order == __ATOMIC_SEQ_CST) Join(threads_[t].now, consistent_);
  Append(t, address, bytes, value, order, false);
}

// `chained`: by a read-modify-write, which hands on what the value before it has released.
void Memory::Append(unsigned t, std::uintptr_t address, unsigned bytes, std::uint64_t value,
                    int order, bool chained) {
  Location& location = At(t, address, bytes);
  Thread& thread = threads_[t];
  Value next{.value = value,
             .released = Releases(order) ? thread.now : thread.fenced,
             .thread = t,
             .when = thread.now[t]};
  if (chained) Join(next.released, location.values.back().released);
  location.values.push_back(next);
  location.seen[t] = location.values.size() - 1;
  std::memcpy(reinterpret_cast<void*>(address), &value, bytes);
  if (order == __ATOMIC_SEQ_CST) Join(consistent_, thread.now);
  thread.now[t]++;
}

void Memory::Fence(unsigned t, int order) {
  Thread& thread = threads_[t];
  if (Acquires(order)) Join(thread.now, thread.pending);
  if (order == __ATOMIC_SEQ_CST) {
    Join(thread.now, consistent_);
    Join(consistent_, thread.now);
  }
  if (Releases(order)) thread.fenced = thread.now;
  thread.now[t]++;
}

void Memory::Plain(unsigned t, std::uintptr_t address, std::size_t bytes, bool write) {
  CheckFreed(t, address, bytes);
  const Thread& thread = threads_[t];
  const std::uintptr_t end = address + bytes;
  for (std::uintptr_t eight = address & ~std::uintptr_t{7}; eight < end; eight += 8) {
    std::uint8_t mask = 0;
    for (unsigned i = 0; i < 8; i++) {
      if (eight + i < address || eight + i >= end) continue;
      mask = static_cast<std::uint8_t>(mask | 1 << i);
      if (write) locations_.erase(eight + i);  // whatever was atomic there is no more
    }
    std::vector<Access>& accesses = accesses_[eight];
    for (const Access& other : accesses) {
      if (other.thread != t && (other.bytes & mask) != 0 && (other.write || write) &&
          thread.now[other.thread] < other.when) {
        fail_(std::string("race: nothing orders the ") + (write ? "write" : "read") +
              " of thread " + std::to_string(t) + " after the " + (other.write ? "write" : "read") +
              " of thread " + std::to_string(other.thread) + Where(address));
      }
    }
    std::erase_if(accesses, [&](const Access& mine) {
      return mine.thread == t && (mine.bytes & ~mask) == 0 && (write || !mine.write);
    });
    accesses.push_back({.thread = t, .when = thread.now[t], .bytes = mask, .write = write});
  }
}

void Memory::Leave(unsigned t, std::uintptr_t mutex) {
  mutexes_[mutex] = threads_[t].now;
  threads_[t].now[t]++;
}

void Memory::CheckFreed(unsigned t, std::uintptr_t address, std::size_t bytes) {
  for (const auto& [start, length] : freed_) {
    if (address < start + length && start < address + bytes)
      fail_("thread " + std::to_string(t) + " uses memory that is freed" + Where(address));
  }
}

}  // namespace rxtoken::interleave
