// SPDX-License-Identifier: Apache-2.0
#include "control/log.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace rxtoken
