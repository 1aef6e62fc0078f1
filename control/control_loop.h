// SPDX-License-Identifier: Apache-2.0
// control_loop.h - the one control thread's loop: file descriptors, and closures from RPCs.
//
// Everything that the managers do happens here, one thing after the other, so that they
// need no lock.
//
// Thread-safety: Run() and Stop() may be called by any thread, Run() not by the one that
//                runs the loop; the rest belongs to the thread that runs the loop, or to
//                the one that sets it up before.
// Blocks: Run() until the closure has run.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "control/unique_fd.h"
#include "tokens/abi/status.h"

namespace rxtoken {

class ControlLoop {
 public:
  using Clock = std::chrono::steady_clock;

  // Errors: kResourceExhausted  no file descriptors left
  static Result<std::unique_ptr<ControlLoop>> Create();

  // Runs `work` on the loop and answers what it answers: a Status or a Result.
  // Errors: kDeadlineExceeded  the loop was busy until `deadline`; `work` was not run
  //         kUnavailable       the loop has stopped; `work` was not run
  template <typename Work>
  std::invoke_result_t<Work&> Run(Clock::time_point deadline, Work work) {
    std::optional<std::invoke_result_t<Work&>> answer;
    const Status status = Post(deadline, [&] { answer.emplace(work()); });
    if (!status.ok()) return status;
    return *std::move(answer);
  }

  // RunUntilStopped() returns once the closure or event at hand is done.
  void Stop();

  // Calls `on_event` with epoll events whenever `fd` has one of `events`. It may Unwatch()
  // any descriptor.
  Status Watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> on_event);
  void Unwatch(int fd);

  // Called after each round; true asks for the next round within kHousekeepingPeriod even
  // if nothing happens.
  void SetHousekeeping(std::function<bool()> housekeeping);
  static constexpr std::chrono::milliseconds kHousekeepingPeriod{10};

  // One round: waits for at most `timeout` (negative: for ever), then does what there is.
  void RunOnce(std::chrono::milliseconds timeout);
  void RunUntilStopped();

 private:
  struct Task {
    std::function<void()> work;
    enum { kQueued, kRunning, kDone, kRefused } state = kQueued;
    std::condition_variable changed;
  };

  ControlLoop(UniqueFd epoll, UniqueFd wake);
  Status Post(Clock::time_point deadline, std::function<void()> work);
  void RunTasks();

  // Set by Create().
  UniqueFd epoll_;
  UniqueFd wake_;  // eventfd: a task was queued, or Stop() called

  // Guarded by mutex_. Tasks live on the stack of the thread that waits for them.
  std::mutex mutex_;
  std::deque<Task*> tasks_;
  bool stopped_ = false;

  // The loop's thread only.
  std::unordered_map<int, std::shared_ptr<std::function<void(std::uint32_t)>>> watched_;
  std::function<bool()> housekeeping_;
  bool housekeeping_due_ = false;
};

// Calls a function on the loop when its time has come. It has its descriptor from the start, so
// that it works when there is none left.
class Timer {
 public:
  // `loop` outlives the timer.
  // Errors: kResourceExhausted  no file descriptors left
  static Result<Timer> Create(ControlLoop& loop, std::function<void()> on_time);
  Timer(Timer&&) = default;
  ~Timer();

  // Once, after `delay`, and then again every `period`, if that is not zero. Replaces what was
  // set before.
  void Set(std::chrono::milliseconds delay, std::chrono::milliseconds period = {});

 private:
  Timer(ControlLoop& loop, UniqueFd fd) : loop_(&loop), fd_(std::move(fd)) {}

  ControlLoop* loop_;
  UniqueFd fd_;  // not valid: moved from
};

}  // namespace rxtoken
