// SPDX-License-Identifier: Apache-2.0
// read_only_test.cc - an application cannot write to a buffer or a descriptor ring, whatever it
// does with the descriptors that it gets.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tests/process/harness.h"
#include "tests/process/raw_client.h"

namespace rxtoken::test {
namespace {

void ExpectNoWritableMapping(int fd, std::size_t bytes, const char* how) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EXPECT_EQ(data, MAP_FAILED) << how;
  if (data != MAP_FAILED) munmap(data, bytes);
}

// Tries every way of writing to the memory behind `fd`, which holds `bytes`.
void ExpectReadOnly(int fd, std::size_t bytes) {
  ExpectNoWritableMapping(fd, bytes, "mmap");

  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(data, MAP_FAILED) << std::strerror(errno);
  EXPECT_NE(mprotect(data, bytes, PROT_READ | PROT_WRITE), 0);
  munmap(data, bytes);

  EXPECT_LT(pwrite(fd, "x", 1, 0), 0);
  EXPECT_LT(write(fd, "x", 1), 0);
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, static_cast<off_t>(2 * bytes)), 0);
  EXPECT_NE(fallocate(fd, 0, 0, static_cast<off_t>(2 * bytes)), 0);
  EXPECT_NE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_NE(fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 4096), 0);
  // No seal can be added, so nobody can lock the daemon out either.
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);

  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  EXPECT_NE(truncate(path.c_str(), 0), 0);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (again >= 0) {
    // The owner of a memfd may open it again; that does not lift the seals.
    ExpectNoWritableMapping(again, bytes, "mmap after opening again");
    EXPECT_LT(pwrite(again, "x", 1, 0), 0);
    EXPECT_NE(ftruncate(again, 0), 0);
    close(again);
  }
}

class ReadOnly : public testing::TestWithParam<std::uint32_t> {};

TEST_P(ReadOnly, BufferAndDescriptorRing) {
  Daemon daemon({"--port", "p0=net_null0,size=64"});
  ASSERT_TRUE(daemon.process().Running());
  RawClient client(daemon.run_dir());
  client.Attach(daemon.OpenRxSocket("rx", client.session()).attach_secret());
  const v1::Binding binding = daemon.Bind("b0", "p0", 2048, GetParam());
  const RawBuffer buffer = client.MapBuffer(binding.id());
  ASSERT_FALSE(HasFailure());

  ExpectReadOnly(buffer.fd, buffer.bytes);
  ExpectReadOnly(client.descriptor_fd(), client.lanes() * DescriptorRingBytes(client.entries()));

  // Our own mapping of the buffer cannot be made writable either.
  EXPECT_NE(mprotect(const_cast<std::uint8_t*>(buffer.data), buffer.bytes, PROT_READ | PROT_WRITE),
            0);

  // The return ring is ours to write to, but not to shrink under the daemon.
  EXPECT_NE(ftruncate(client.return_fd(), 0), 0);
  EXPECT_TRUE(daemon.process().Running());
}

INSTANTIATE_TEST_SUITE_P(PageBytes, ReadOnly, testing::Values(2048, 4096, 16384, 65536),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace rxtoken::test
