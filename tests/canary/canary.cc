// SPDX-License-Identifier: Apache-2.0
// canary.cc - mistakes that a sanitizer must report, so that we know that it can.
//
// usage: canary use_after_free | overflow | race | rcu | rcu_without_grace_period
//
// `rcu` is the correct twin of the last one, and must not be reported.
#include <atomic>
#include <climits>
#include <cstdio>
#include <string_view>
#include <thread>

#include "tokens/rcu.h"

namespace rxtoken {
namespace {

int UseAfterFree() {
  // Volatile, or the compiler sees the mistake first.
  int* volatile value = new int(1);
  delete value;
  return *value;  // NOLINT: the mistake
}

int Overflow() {
  volatile int one = 1;
  return INT_MAX + one;  // NOLINT: the mistake
}

int Race() {
  int value = 0;
  std::thread other([&] { value++; });
  value++;  // NOLINT: the mistake
  other.join();
  return value;
}

// A reader follows a pointer, the updater replaces it and writes to the old object.
int Rcu(bool grace_period) {
  int first = 1;
  int second = 2;
  rcu::Pointer<int> pointer;
  pointer.Exchange(&first);

  // order: relaxed, all three: they must not order what the test is about.
  std::atomic<bool> has_read{false};
  std::atomic<bool> stop{false};
  int sum = 0;
  std::thread reader([&] {
    rcu::RegisterReader();
    while (!stop.load(std::memory_order_relaxed)) {
      sum += *pointer.Read() & 1;
      has_read.store(true, std::memory_order_relaxed);
      rcu::Quiescent();
    }
    rcu::UnregisterReader();
  });

  while (!has_read.load(std::memory_order_relaxed)) std::this_thread::yield();
  pointer.Exchange(&second);
  if (grace_period) rcu::WaitForReaders();
  first = 3;
  stop.store(true, std::memory_order_relaxed);
  reader.join();
  return sum;
}

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) {
  const std::string_view mistake = argc == 2 ? argv[1] : "";
  int result = 0;
  if (mistake == "use_after_free") {
    result = rxtoken::UseAfterFree();
  } else if (mistake == "overflow") {
    result = rxtoken::Overflow();
  } else if (mistake == "race") {
    result = rxtoken::Race();
  } else if (mistake == "rcu") {
    result = rxtoken::Rcu(true);
  } else if (mistake == "rcu_without_grace_period") {
    result = rxtoken::Rcu(false);
  } else {
    std::fprintf(stderr,
                 "usage: canary use_after_free | overflow | race | rcu | "
                 "rcu_without_grace_period\n");
    return 2;
  }
  std::printf("finished: %d\n", result);
  return 0;
}
