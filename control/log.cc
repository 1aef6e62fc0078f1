// SPDX-License-Identifier: Apache-2.0
#include "control/log.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <mutex>

namespace rxtoken {
namespace {

constexpr std::chrono::milliseconds kEventPeriod{100};
constexpr int kEventBurst = 100;

std::string Now() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm utc;
  gmtime_r(&now.tv_sec, &utc);
  std::array<char, 40> text;
  const std::size_t n = strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  snprintf(text.data() + n, text.size() - n, ".%03ldZ", now.tv_nsec / 1'000'000);
  return text.data();
}

bool NeedsQuotes(std::string_view value) {
  return value.empty() || std::any_of(value.begin(), value.end(), [](char c) {
           return static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=' || c == '\\';
         });
}

void AppendValue(std::string& line, std::string_view value) {
  if (!NeedsQuotes(value)) {
    line += value;
    return;
  }
  line += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      line += '\\';
      line += c;
    } else if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) < ' ') {
      line += '?';
    } else {
      line += c;
    }
  }
  line += '"';
}

// Whether a line of this event is written, and how many were held back before it.
std::optional<std::uint64_t> Pass(std::string_view event) {
  static std::mutex mutex;
  static std::map<std::string_view, LogLimit> limits;  // by event, all literals
  const std::lock_guard lock(mutex);
  return limits.try_emplace(event, kEventPeriod, kEventBurst).first->second.Pass();
}

void Log(std::string_view level, std::string_view event, std::initializer_list<LogField> fields) {
  const std::optional<std::uint64_t> held_back = Pass(event);
  if (!held_back) return;
  std::string line = "time=" + Now() + " " + FormatLogLine(level, event, fields);
  if (*held_back != 0) line += " held_back=" + std::to_string(*held_back);
  line += '\n';
  // Nobody can be told that the log cannot be written.
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

std::string FormatLogLine(std::string_view level, std::string_view event,
                          std::initializer_list<LogField> fields) {
  std::string line = "level=";
  line += level;
  line += " event=";
  line += event;
  for (const LogField& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    AppendValue(line, field.value);
  }
  return line;
}

void LogInfo(std::string_view event, std::initializer_list<LogField> fields) {
  Log("info", event, fields);
}
void LogWarning(std::string_view event, std::initializer_list<LogField> fields) {
  Log("warning", event, fields);
}
void LogError(std::string_view event, std::initializer_list<LogField> fields) {
  Log("error", event, fields);
}

}  // namespace rxtoken
