// SPDX-License-Identifier: Apache-2.0
#include "control/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

namespace rxtoken {
namespace {

TEST(Log, ALineIsKeysAndValues) {
  EXPECT_EQ(FormatLogLine("info", "binding_bound", {{"binding", "b0"}, {"id", 3}}),
            "level=info event=binding_bound binding=b0 id=3");
}

TEST(Log, ValuesThatWouldBeMisreadAreQuoted) {
  EXPECT_EQ(
      FormatLogLine("info", "e", {{"a", "x y"}, {"b", ""}, {"c", "q\"\\"}, {"d", "1\n2\x01"}}),
      R"(level=info event=e a="x y" b="" c="q\"\\" d="1\n2?")");
}

TEST(Log, OfOneEventOnlySoManyLinesAreWritten) {
  const auto lines = [] {
    testing::internal::CaptureStderr();
    for (int i = 0; i < 10'000; i++) LogInfo("flood");
    LogInfo("another");
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("event=another"), std::string::npos);
    return std::count(log.begin(), log.end(), '\n');
  };
  EXPECT_GT(lines(), 100);
  EXPECT_LT(lines(), 5'000);  // unless writing them takes minutes
}

TEST(LogLimit, LetsTheFirstOnesPassAndCountsTheOthers) {
  LogLimit limit(std::chrono::hours(1), 3);
  for (int i = 0; i < 3; i++) EXPECT_EQ(limit.Pass(), 0u);
  EXPECT_EQ(limit.Pass(), std::nullopt);
}

}  // namespace
}  // namespace rxtoken
