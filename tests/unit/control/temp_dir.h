// SPDX-License-Identifier: Apache-2.0
// temp_dir.h - a directory that goes with the test.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace rxtoken {

class TempDir {
 public:
  TempDir() {
    const char* const base = getenv("TMPDIR");
    path_ = std::string(base != nullptr ? base : "/tmp") + "/rxtoken-XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace rxtoken
