// SPDX-License-Identifier: Apache-2.0
// no_log.cc - the daemon's log, for fuzzers: a line for each change of state would be most of what
// they do.
#include "control/log.h"

namespace rxtoken {

void LogInfo(std::string_view, std::initializer_list<LogField>) {}
void LogWarning(std::string_view, std::initializer_list<LogField>) {}
void LogError(std::string_view, std::initializer_list<LogField>) {}

}  // namespace rxtoken
