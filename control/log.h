// SPDX-License-Identifier: Apache-2.0
// log.h - the daemon's log: one key=value line on stderr for each change of state.
//
//   time=2026-01-31T12:00:00.000Z level=info event=binding_bound binding=b0 id=3
//
// Values with spaces, quotes or control characters are quoted and escaped. Applications cause most
// events, and can do so as often as they like: of each, 100 lines at once are logged, then 10 a
// second. The next line says how many were `held_back`.
//
// Thread-safety: any thread; a line is written by one write(2). Workers do not log.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace rxtoken {

struct LogField {
  LogField(std::string_view key, std::string_view text) : key(key), value(text) {}
  template <std::integral T>
  LogField(std::string_view key, T number) : key(key), value(std::to_string(number)) {}

  std::string_view key;
  std::string value;
};

void LogInfo(std::string_view event, std::initializer_list<LogField> fields = {});
void LogWarning(std::string_view event, std::initializer_list<LogField> fields = {});
void LogError(std::string_view event, std::initializer_list<LogField> fields = {});

// Lets so many lines of a kind pass at once, and then one each period.
//
// Thread-safety: one thread.
class LogLimit {
 public:
  explicit LogLimit(std::chrono::milliseconds period = std::chrono::seconds(1), int burst = 1)
      : period_(period), slack_((burst - 1) * period) {}
  // How many were held back before this one; nothing: hold this one back, too.
  std::optional<std::uint64_t> Pass() {
    const auto now = std::chrono::steady_clock::now();
    if (now + slack_ < next_) {
      held_back_++;
      return std::nullopt;
    }
    next_ = std::max(next_, now) + period_;
    return std::exchange(held_back_, 0);
  }

 private:
  const std::chrono::milliseconds period_;
  const std::chrono::milliseconds slack_;
  std::chrono::steady_clock::time_point next_;
  std::uint64_t held_back_ = 0;
};

// The line without time, as it would be logged. For tests.
std::string FormatLogLine(std::string_view level, std::string_view event,
                          std::initializer_list<LogField> fields);

}  // namespace rxtoken
