// SPDX-License-Identifier: Apache-2.0
// table.h - aligned columns for people: names to the left, numbers to the right.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace rxtoken {

class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

  // One cell for each column. An empty one is shown as "-".
  template <typename... Cells>
  void Add(const Cells&... cells) {
    rows_.push_back({Text(cells)...});
  }

  bool empty() const { return rows_.size() == 1; }

  friend std::ostream& operator<<(std::ostream& out, const Table& table) {
    const std::size_t columns = table.rows_[0].size();
    std::vector<std::size_t> widths(columns, 0);
    std::vector<bool> numbers(columns, table.rows_.size() > 1);
    for (std::size_t r = 0; r < table.rows_.size(); r++) {
      for (std::size_t c = 0; c < columns; c++) {
        const std::string& cell = table.rows_[r][c];
        widths[c] = std::max(widths[c], cell.size());
        if (r > 0 && !IsNumber(cell)) numbers[c] = false;
      }
    }
    for (const auto& row : table.rows_) {
      std::string line;
      for (std::size_t c = 0; c < columns; c++) {
        const std::string padding(widths[c] - row[c].size(), ' ');
        line += numbers[c] ? padding + row[c] : row[c] + padding;
        line += "  ";
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out << line << '\n';
    }
    return out;
  }

 private:
  template <typename T>
  static std::string Text(const T& cell) {
    std::ostringstream text;
    text << cell;
    return text.str().empty() ? "-" : text.str();
  }
  static bool IsNumber(const std::string& cell) {
    return std::all_of(cell.begin(), cell.end(),
                       [](unsigned char c) { return std::isdigit(c) || c == '.' || c == '-'; });
  }

  std::vector<std::vector<std::string>> rows_;
};

}  // namespace rxtoken
