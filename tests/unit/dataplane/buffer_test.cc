// SPDX-License-Identifier: Apache-2.0
#include "dataplane/buffer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "tests/unit/dataplane/test_eal.h"

namespace rxtoken {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kBytes = 1 << 20;

std::unique_ptr<Buffer> Make(std::uint64_t bytes = kBytes, std::uint32_t page_bytes = 4096) {
  auto buffer = Buffer::Create("b0", bytes, page_bytes, Memory::kPlain);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  return buffer.ok() ? std::move(*buffer) : nullptr;
}

TEST(Buffer, HasTheSizesAskedFor) {
  for (const std::uint32_t page_bytes : {2048u, 4096u, 16384u, 65536u}) {
    const auto buffer = Make(kBytes, page_bytes);
    ASSERT_NE(buffer, nullptr);
    EXPECT_EQ(buffer->bytes(), kBytes);
    EXPECT_EQ(buffer->page_bytes(), page_bytes);
    EXPECT_EQ(1u << buffer->page_shift(), page_bytes);
    EXPECT_EQ(buffer->pages(), kBytes / page_bytes);
    EXPECT_EQ(buffer->memory(), Memory::kPlain);
    struct stat file = {};
    ASSERT_EQ(fstat(buffer->fd(), &file), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(file.st_size), kBytes);
  }
}

TEST(Buffer, HoldsAnOddNumberOfSmallPages) {
  const auto buffer = Make(3 * 2048, 2048);

  ASSERT_NE(buffer, nullptr);
  EXPECT_EQ(buffer->pages(), 3u);
  EXPECT_EQ(buffer->bytes(), 3u * 2048);
}

TEST(Buffer, IsThereInFull) {
  const auto buffer = Make();
  ASSERT_NE(buffer, nullptr);
  struct stat file = {};
  ASSERT_EQ(fstat(buffer->fd(), &file), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(file.st_blocks) * 512, kBytes);
}

TEST(Buffer, RefusesSizesThatMakeNoPages) {
  struct Case {
    std::uint64_t bytes;
    std::uint32_t page_bytes;
    std::string message;
  };
  for (const Case& c : {
           Case{kBytes, 3000, "page_bytes is 3000; use 2048, 4096, 16384 or 65536"},
           Case{kBytes, 0, "page_bytes is 0"},
           Case{kBytes, 8192, "page_bytes is 8192"},
           Case{0, 4096, "buffer_bytes is 0"},
           Case{4097, 4096, "buffer_bytes is 4097; use a multiple of page_bytes, which is 4096"},
           Case{(std::uint64_t{1} << 39) + 4096, 4096, "up to 549755813888"},
           Case{~std::uint64_t{0}, 4096, "buffer_bytes is 18446744073709551615"},
           Case{~std::uint64_t{4095}, 4096, "up to 549755813888"},
       }) {
    const auto buffer = Buffer::Create("b0", c.bytes, c.page_bytes, Memory::kAuto);
    EXPECT_EQ(buffer.status().code(), Code::kInvalidArgument) << c.message;
    EXPECT_THAT(buffer.status().message(), AllOf(HasSubstr("binding 'b0'"), HasSubstr(c.message)));
  }
}

TEST(Buffer, RefusesMoreMemoryThanThereIs) {
  const std::uint64_t huge = std::uint64_t{1} << 38;  // 256 GiB

  const auto plain = Buffer::Create("b0", huge, 65536, Memory::kPlain);
  const auto pages = Buffer::Create("b0", huge, 65536, Memory::kHuge);
  const auto any = Buffer::Create("b0", huge, 65536, Memory::kAuto);

  EXPECT_EQ(plain.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(pages.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(any.status().code(), Code::kResourceExhausted);
  EXPECT_THAT(plain.status().message(), AllOf(HasSubstr("262144 MiB"), HasSubstr("available")));
  EXPECT_THAT(pages.status().message(), HasSubstr("vm.nr_hugepages"));
}

TEST(Buffer, TakesHugePagesWhenThereAreEnough) {
  const auto buffer = Buffer::Create("b0", kBytes, 4096, Memory::kHuge);
  if (!buffer.ok()) GTEST_SKIP() << buffer.status().message();

  EXPECT_EQ((*buffer)->memory(), Memory::kHuge);
  EXPECT_EQ((*buffer)->bytes(), kBytes);
  EXPECT_EQ((*buffer)->pages(), kBytes / 4096);
  EXPECT_EQ((*buffer)->mapped_bytes(), 2u << 20);
  const auto any = Buffer::Create("b1", kBytes, 4096, Memory::kAuto);
  ASSERT_TRUE(any.ok());
  void* map = mmap(nullptr, 2u << 20, PROT_READ | PROT_WRITE, MAP_SHARED, (*buffer)->fd(), 0);
  EXPECT_EQ(map, MAP_FAILED);
}

TEST(Buffer, ShowsTheOwnersWritesToAReader) {
  const auto buffer = Make();
  ASSERT_NE(buffer, nullptr);
  void* map = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, buffer->fd(), 0);
  ASSERT_NE(map, MAP_FAILED) << std::strerror(errno);

  std::memcpy(buffer->data() + kBytes - 5, "hello", 5);

  EXPECT_EQ(std::memcmp(static_cast<char*>(map) + kBytes - 5, "hello", 5), 0);
  munmap(map, kBytes);
}

// Everything that somebody who was given the fd may try.
class SealedBuffer : public testing::TestWithParam<Memory> {
 protected:
  void SetUp() override {
    auto buffer = Buffer::Create("b0", 2u << 20, 4096, GetParam());
    if (GetParam() == Memory::kHuge && !buffer.ok()) GTEST_SKIP() << buffer.status().message();
    ASSERT_TRUE(buffer.ok()) << buffer.status().message();
    buffer_ = std::move(*buffer);
    std::memset(buffer_->data(), 0x5A, buffer_->bytes());
    fd_ = dup(buffer_->fd());
    ASSERT_GE(fd_, 0);
  }
  void TearDown() override {
    if (buffer_ == nullptr) return;
    close(fd_);
    EXPECT_TRUE(std::all_of(buffer_->data(), buffer_->data() + buffer_->bytes(),
                            [](std::uint8_t byte) { return byte == 0x5A; }));
    struct stat file = {};
    ASSERT_EQ(fstat(buffer_->fd(), &file), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(file.st_size), buffer_->mapped_bytes());
  }

  std::unique_ptr<Buffer> buffer_;
  int fd_ = -1;
};

INSTANTIATE_TEST_SUITE_P(Memory, SealedBuffer, testing::Values(Memory::kPlain, Memory::kHuge),
                         [](const auto& info) {
                           return info.param == Memory::kPlain ? "Plain" : "Huge";
                         });

TEST_P(SealedBuffer, CannotBeMappedForWriting) {
  const std::size_t bytes = buffer_->mapped_bytes();
  EXPECT_EQ(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(mmap(nullptr, bytes, PROT_WRITE, MAP_SHARED, fd_, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
}

TEST_P(SealedBuffer, CannotBeMadeWritableOnceItIsMapped) {
  void* map = mmap(nullptr, buffer_->mapped_bytes(), PROT_READ, MAP_SHARED, fd_, 0);
  ASSERT_NE(map, MAP_FAILED);
  EXPECT_EQ(mprotect(map, buffer_->mapped_bytes(), PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ(madvise(map, buffer_->mapped_bytes(), MADV_REMOVE), -1);
  munmap(map, buffer_->mapped_bytes());
}

TEST_P(SealedBuffer, CannotBeWrittenThroughTheFd) {
  char byte = 0;
  EXPECT_EQ(write(fd_, &byte, 1), -1);
  EXPECT_EQ(pwrite(fd_, &byte, 1, 100), -1);
  const int source = memfd_create("source", MFD_CLOEXEC);
  ASSERT_GE(source, 0);
  ASSERT_EQ(write(source, "evil", 4), 4);
  off_t from = 0;
  EXPECT_EQ(sendfile(fd_, source, &from, 4), -1);
  loff_t in = 0, out = 0;
  EXPECT_EQ(copy_file_range(source, &in, fd_, &out, 4, 0), -1);
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  ASSERT_EQ(write(pipe_fds[1], "evil", 4), 4);
  EXPECT_EQ(splice(pipe_fds[0], nullptr, fd_, &out, 4, 0), -1);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  close(source);
}

TEST_P(SealedBuffer, CannotBeResizedOrPunched) {
  const auto bytes = static_cast<off_t>(buffer_->mapped_bytes());
  EXPECT_EQ(ftruncate(fd_, 0), -1);
  EXPECT_EQ(ftruncate(fd_, bytes * 2), -1);
  EXPECT_EQ(fallocate(fd_, 0, 0, bytes * 2), -1);
  EXPECT_EQ(fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes), -1);
  EXPECT_EQ(fallocate(fd_, FALLOC_FL_ZERO_RANGE, 0, bytes), -1);
}

TEST_P(SealedBuffer, CannotBeUnsealedOrSealedFurther) {
  EXPECT_EQ(fcntl(fd_, F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(fcntl(fd_, F_GET_SEALS) & F_SEAL_SEAL, F_SEAL_SEAL);
}

TEST_P(SealedBuffer, IsAsSealedWhenItIsOpenedAnew) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(again, 0);
  char byte = 0;
  EXPECT_EQ(mmap(nullptr, buffer_->mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, again, 0),
            MAP_FAILED);
  EXPECT_EQ(pwrite(again, &byte, 1, 0), -1);
  EXPECT_EQ(ftruncate(again, 0), -1);
  close(again);
  EXPECT_EQ(open(path.c_str(), O_RDWR | O_TRUNC | O_CLOEXEC), -1);

  const int read_only = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(read_only, 0);
  EXPECT_EQ(
      mmap(nullptr, buffer_->mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, read_only, 0),
      MAP_FAILED);
  close(read_only);
}

TEST(Buffer, DoesNotChangeThroughAPrivateMapping) {
  const auto buffer = Make();
  ASSERT_NE(buffer, nullptr);
  void* map = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, buffer->fd(), 0);
  ASSERT_NE(map, MAP_FAILED);

  std::memset(map, 0xFF, 4096);

  EXPECT_EQ(buffer->data()[0], 0);
  munmap(map, 4096);
}

TEST(Buffer, CanBeMadeKnownToDpdkMoreThanOnce) {
  ASSERT_TRUE(TestEal().ok()) << TestEal().message();
  const auto buffer = Make();
  ASSERT_NE(buffer, nullptr);

  EXPECT_TRUE(buffer->RegisterForDma().ok());
  EXPECT_TRUE(buffer->RegisterForDma().ok());
}

TEST(Buffer, LeavesNothingBehind) {
  const auto lowest_free_fd = [] {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(fd);
    return fd;
  };
  const int before = lowest_free_fd();
  { const auto buffer = Make(); }
  EXPECT_EQ(lowest_free_fd(), before);
}

}  // namespace
}  // namespace rxtoken
