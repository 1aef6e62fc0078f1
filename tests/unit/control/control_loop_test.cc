// SPDX-License-Identifier: Apache-2.0
#include "control/control_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <future>
#include <thread>

namespace rxtoken {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = ControlLoop::Clock;

class ControlLoopTest : public testing::Test {
 protected:
  std::unique_ptr<ControlLoop> loop_ = ControlLoop::Create().value();
};

TEST_F(ControlLoopTest, AClosureRunsOnTheLoopAndItsAnswerComesBack) {
  std::thread loop_thread([&] { loop_->RunUntilStopped(); });
  const Result<std::thread::id> ran_on = loop_->Run(Clock::now() + seconds(60), [] {
    return Result<std::thread::id>(std::this_thread::get_id());
  });
  ASSERT_TRUE(ran_on.ok());
  EXPECT_EQ(*ran_on, loop_thread.get_id());
  const Status error =
      loop_->Run(Clock::now() + seconds(60), [] { return Status(Code::kNotFound, "no"); });
  EXPECT_EQ(error.code(), Code::kNotFound);
  loop_->Stop();
  loop_thread.join();
}

TEST_F(ControlLoopTest, AClosureWhoseDeadlinePassedIsNotRun) {
  bool ran = false;
  const auto work = [&] {
    ran = true;
    return Status();
  };
  EXPECT_EQ(loop_->Run(Clock::now(), work).code(), Code::kDeadlineExceeded);
  loop_->RunOnce(milliseconds(0));
  EXPECT_FALSE(ran);
}

TEST_F(ControlLoopTest, AClosureThatHasBegunIsWaitedFor) {
  std::promise<void> begun, go_on;
  auto answer = std::async(std::launch::async, [&] {
    return loop_->Run(Clock::now() + milliseconds(1), [&] {
      begun.set_value();
      go_on.get_future().wait();
      return Status();
    });
  });
  std::thread loop_thread([&] { loop_->RunUntilStopped(); });
  // Either the deadline was first, or the answer is that of the closure.
  auto begins = begun.get_future();
  while (begins.wait_for(milliseconds(1)) != std::future_status::ready &&
         answer.wait_for(milliseconds(0)) != std::future_status::ready) {
  }
  go_on.set_value();
  const bool ran = begins.wait_for(milliseconds(0)) == std::future_status::ready;
  EXPECT_EQ(answer.get().code(), ran ? Code::kOk : Code::kDeadlineExceeded);
  loop_->Stop();
  loop_thread.join();
}

TEST_F(ControlLoopTest, AfterStopClosuresAreRefused) {
  auto waiting = std::async(std::launch::async, [&] {
    return loop_->Run(Clock::time_point::max(), [] { return Status(); });
  });
  loop_->Stop();  // before or after the closure was queued
  EXPECT_EQ(waiting.get().code(), Code::kUnavailable);
  EXPECT_EQ(loop_->Run(Clock::time_point::max(), [] { return Status(); }).code(),
            Code::kUnavailable);
  loop_->RunUntilStopped();  // returns at once
}

TEST_F(ControlLoopTest, AWatchedDescriptorIsReportedUntilItUnwatchesItself) {
  const UniqueFd event(eventfd(1, EFD_CLOEXEC));
  int reported = 0;
  ASSERT_TRUE(loop_
                  ->Watch(event.get(), EPOLLIN,
                          [&](std::uint32_t) {
                            if (++reported == 2) loop_->Unwatch(event.get());
                          })
                  .ok());
  for (int i = 0; i < 4; i++) loop_->RunOnce(milliseconds(0));
  EXPECT_EQ(reported, 2);
}

TEST_F(ControlLoopTest, HousekeepingRepeatsWhileItAsksFor) {
  int rounds = 0;
  loop_->SetHousekeeping([&] { return ++rounds < 3; });
  loop_->RunOnce(milliseconds(0));
  loop_->RunOnce(milliseconds(-1));  // these come back without any event
  loop_->RunOnce(milliseconds(-1));
  EXPECT_EQ(rounds, 3);
}

}  // namespace
}  // namespace rxtoken
