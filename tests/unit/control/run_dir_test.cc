// SPDX-License-Identifier: Apache-2.0
#include "control/run_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/unit/control/temp_dir.h"

namespace rxtoken {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

void MakeSocketFile(const std::string& path) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

TEST(RunDir, IsMadeWithItsParents) {
  const TempDir temp;
  const std::string path = temp.path() + "/a/b";
  ASSERT_TRUE(RunDir::Claim(path).ok());
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0700));
  const std::string for_group = temp.path() + "/c";
  ASSERT_TRUE(RunDir::Claim(for_group, getegid()).ok());
  EXPECT_EQ(fs::status(for_group).permissions(), fs::perms(0750));
}

TEST(RunDir, ASecondDaemonIsToldWhoHoldsIt) {
  const TempDir temp;
  const Result<RunDir> first = RunDir::Claim(temp.path());
  ASSERT_TRUE(first.ok());
  const Result<RunDir> second = RunDir::Claim(temp.path());
  EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
  EXPECT_THAT(second.status().message(), HasSubstr(temp.path()));
  EXPECT_THAT(second.status().message(), HasSubstr(std::to_string(getpid())));
}

TEST(RunDir, SocketsOfADeadDaemonAreRemoved) {
  const TempDir temp;
  MakeSocketFile(temp.path() + "/api.sock");
  MakeSocketFile(temp.path() + "/descriptors.sock");
  ASSERT_TRUE(RunDir::Claim(temp.path()).ok());
  EXPECT_FALSE(fs::exists(temp.path() + "/api.sock"));
  EXPECT_FALSE(fs::exists(temp.path() + "/descriptors.sock"));
}

TEST(RunDir, WhatIsNotASocketIsLeftAlone) {
  const TempDir temp;
  std::ofstream(temp.path() + "/api.sock") << "precious";
  const Result<RunDir> run_dir = RunDir::Claim(temp.path());
  EXPECT_EQ(run_dir.status().code(), Code::kFailedPrecondition);
  EXPECT_THAT(run_dir.status().message(), HasSubstr("not a socket"));
  EXPECT_TRUE(fs::exists(temp.path() + "/api.sock"));
}

TEST(RunDir, APathThatIsTooLongForASocketIsRefused) {
  const Result<RunDir> run_dir = RunDir::Claim("/tmp/" + std::string(100, 'x'));
  EXPECT_EQ(run_dir.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(run_dir.status().message(), HasSubstr("1..90"));
}

TEST(RunDir, SocketsGoWithTheDaemon) {
  const TempDir temp;
  {
    const Result<RunDir> run_dir = RunDir::Claim(temp.path());
    ASSERT_TRUE(run_dir.ok());
    MakeSocketFile(run_dir->api_socket().path);
    MakeSocketFile(run_dir->descriptor_socket().path);
  }
  EXPECT_FALSE(fs::exists(temp.path() + "/api.sock"));
  EXPECT_FALSE(fs::exists(temp.path() + "/descriptors.sock"));
  EXPECT_TRUE(RunDir::Claim(temp.path()).ok());
}

}  // namespace
}  // namespace rxtoken
