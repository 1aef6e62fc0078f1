// SPDX-License-Identifier: Apache-2.0
#include "control/control_loop.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <string>

namespace rxtoken {

Result<std::unique_ptr<ControlLoop>> ControlLoop::Create() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = wake.get();
  if (!epoll.valid() || !wake.valid() ||
      epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return Status(Code::kResourceExhausted,
                  std::string("control loop: cannot make its file descriptors: ") +
                      strerror(errno) + "; raise the limit of open files (ulimit -n)");
  }
  return std::unique_ptr<ControlLoop>(new ControlLoop(std::move(epoll), std::move(wake)));
}

ControlLoop::ControlLoop(UniqueFd epoll, UniqueFd wake)
    : epoll_(std::move(epoll)), wake_(std::move(wake)) {}

Status ControlLoop::Post(Clock::time_point deadline, std::function<void()> work) {
  Task task;
  task.work = std::move(work);
  std::unique_lock lock(mutex_);
  if (stopped_) return Status(Code::kUnavailable, "the daemon is stopping");
  tasks_.push_back(&task);
  eventfd_write(wake_.get(), 1);
  const auto left_queue = [&] { return task.state != Task::kQueued; };
  if (!task.changed.wait_until(lock, deadline, left_queue)) {
    std::erase(tasks_, &task);
    return Status(Code::kDeadlineExceeded,
                  "the control loop was busy until the deadline; nothing was changed");
  }
  // A closure that has begun is waited for: it may use what lies on our stack.
  task.changed.wait(lock, [&] { return task.state != Task::kRunning; });
  if (task.state == Task::kRefused) return Status(Code::kUnavailable, "the daemon is stopping");
  return Status();
}

void ControlLoop::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  for (Task* task : tasks_) {
    task->state = Task::kRefused;
    task->changed.notify_one();
  }
  tasks_.clear();
  eventfd_write(wake_.get(), 1);
}

Status ControlLoop::Watch(int fd, std::uint32_t events,
                          std::function<void(std::uint32_t)> on_event) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status(Code::kResourceExhausted,
                  std::string("control loop: cannot watch a descriptor: ") + strerror(errno));
  }
  watched_[fd] = std::make_shared<std::function<void(std::uint32_t)>>(std::move(on_event));
  return Status();
}

void ControlLoop::Unwatch(int fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watched_.erase(fd);
}

void ControlLoop::SetHousekeeping(std::function<bool()> housekeeping) {
  housekeeping_ = std::move(housekeeping);
}

void ControlLoop::RunOnce(std::chrono::milliseconds timeout) {
  if (housekeeping_due_ && (timeout.count() < 0 || timeout > kHousekeepingPeriod)) {
    timeout = kHousekeepingPeriod;
  }
  std::array<epoll_event, 16> events;
  const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                           static_cast<int>(timeout.count()));
  for (int i = 0; i < n; i++) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    if (fd == wake_.get()) {
      eventfd_t count;
      eventfd_read(wake_.get(), &count);
      RunTasks();
      continue;
    }
    // An earlier event of this round may have unwatched it. If the number was even taken
    // again, its new owner reads nothing and goes on: all descriptors are non-blocking.
    const auto watched = watched_.find(fd);
    if (watched == watched_.end()) continue;
    const auto on_event = watched->second;  // lives on if it unwatches itself
    (*on_event)(events[static_cast<std::size_t>(i)].events);
  }
  if (housekeeping_) housekeeping_due_ = housekeeping_();
}

void ControlLoop::RunUntilStopped() {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return;
    }
    RunOnce(std::chrono::milliseconds(-1));
  }
}

void ControlLoop::RunTasks() {
  std::unique_lock lock(mutex_);
  // Only what is there now: descriptors get their turn in between.
  for (std::size_t left = tasks_.size(); left > 0 && !tasks_.empty(); left--) {
    Task* task = tasks_.front();
    tasks_.pop_front();
    task->state = Task::kRunning;
    lock.unlock();
    task->work();
    lock.lock();
    task->state = Task::kDone;
    task->changed.notify_one();
  }
  if (!tasks_.empty()) eventfd_write(wake_.get(), 1);
}

Result<Timer> Timer::Create(ControlLoop& loop, std::function<void()> on_time) {
  UniqueFd timer(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer.valid()) {
    return Status(Code::kResourceExhausted,
                  std::string("control loop: cannot make a timer: ") + strerror(errno));
  }
  const int fd = timer.get();
  const Status watched = loop.Watch(fd, EPOLLIN, [fd, on_time = std::move(on_time)](std::uint32_t) {
    std::uint64_t times;
    if (read(fd, &times, sizeof(times)) == sizeof(times)) on_time();
  });
  if (!watched.ok()) return watched;
  return Timer(loop, std::move(timer));
}

Timer::~Timer() {
  if (fd_.valid()) loop_->Unwatch(fd_.get());
}

void Timer::Set(std::chrono::milliseconds delay, std::chrono::milliseconds period) {
  const auto to_timespec = [](std::chrono::milliseconds time) {
    return timespec{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  };
  // A value of zero would stop it.
  const itimerspec spec = {.it_interval = to_timespec(period),
                           .it_value = to_timespec(std::max(delay, std::chrono::milliseconds(1)))};
  timerfd_settime(fd_.get(), 0, &spec, nullptr);
}

}  // namespace rxtoken
