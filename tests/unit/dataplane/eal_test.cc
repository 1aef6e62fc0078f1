// SPDX-License-Identifier: Apache-2.0
#include "dataplane/eal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rte_lcore.h>
#include <rte_log.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>

#include "tests/unit/dataplane/test_eal.h"

namespace rxtoken {
namespace {

using testing::HasSubstr;

TEST(Eal, LeavesTheCallingThreadOnItsCpus) {
  cpu_set_t before, after;
  CPU_ZERO(&before);
  CPU_ZERO(&after);
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);

  ASSERT_TRUE(TestEal().ok()) << TestEal().message();

  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  EXPECT_EQ(rte_lcore_count(), 1u);  // no idle threads beside
}

TEST(Eal, StartsOnlyOnceInAProcess) {
  ASSERT_TRUE(TestEal().ok()) << TestEal().message();

  const Status second = StartEal(DataplaneOptions());

  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
  EXPECT_THAT(second.message(), HasSubstr("only once"));
}

TEST(EalDeathTest, SaysWhatDpdkSaysWhenItDoesNotStart) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own
  EXPECT_EXIT(
      {
        DataplaneOptions options;
        options.eal_args = {"--vdev=net_no_such_driver0"};
        const Status status = StartEal(options);
        std::fprintf(stderr, "[%s]", status.ToString().c_str());
        std::exit(0);
      },
      testing::ExitedWithCode(0),
      "\\[FAILED_PRECONDITION: DPDK does not start with "
      ".*--no-huge.*--vdev=net_no_such_driver0.*failed to parse device");
}

TEST(LogCapture, TakesTheLastLinesOnce) {
  ASSERT_TRUE(TestEal().ok()) << TestEal().message();
  LogCapture log;

  for (int i = 1; i <= 9; ++i) rte_log(RTE_LOG_ERR, RTE_LOGTYPE_EAL, "line %d\n", i);

  EXPECT_EQ(log.Take(), ": line 4; line 5; line 6; line 7; line 8; line 9");
  EXPECT_EQ(log.Take(), "");
}

TEST(LogCapture, LetsThroughWhatIsNotTaken) {
  ASSERT_TRUE(TestEal().ok()) << TestEal().message();
  testing::internal::CaptureStderr();
  {
    LogCapture log;
    rte_log(RTE_LOG_ERR, RTE_LOGTYPE_EAL, "during\n");
  }
  rte_log(RTE_LOG_ERR, RTE_LOGTYPE_EAL, "after\n");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "during\nafter\n");
}

}  // namespace
}  // namespace rxtoken
