// SPDX-License-Identifier: Apache-2.0
#include "tokens/demand_zero.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "tests/unit/tokens/fakes.h"

namespace rxtoken {
namespace {

using Array = DemandZeroArray<std::uint32_t>;

TEST(DemandZeroArray, IsZeroEverywhere) {
  const Array array(100'000);

  ASSERT_TRUE(array.ok());
  for (std::size_t i = 0; i < array.size(); i++) ASSERT_EQ(array[i], 0u) << i;
}

TEST(DemandZeroArray, TakesMemoryOnlyWhereItIsWritten) {
  const Array array(std::size_t{1} << 27);  // 512 MiB
  ASSERT_TRUE(array.ok());
  // With transparent huge pages a single write may take 2 MiB: not what this is about.
  madvise(array.data(), array.size() * sizeof(std::uint32_t), MADV_NOHUGEPAGE);

  array[0] = 1;
  array[array.size() / 2] = 2;
  array[array.size() - 1] = 3;

  EXPECT_EQ(ResidentBytes(array.data(), array.size() * sizeof(std::uint32_t)),
            3 * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

TEST(DemandZeroArray, IsNotOkWithoutAddressSpace) {
  const Array array(std::numeric_limits<std::size_t>::max() / sizeof(std::uint32_t));

  EXPECT_FALSE(array.ok());
}

TEST(DemandZeroArray, IsNotOkUntilItHasASize) { EXPECT_FALSE(Array().ok()); }

TEST(DemandZeroArray, MovesWithItsContent) {
  Array first(10);
  first[3] = 33;

  Array second(std::move(first));
  Array third;
  third = std::move(second);

  EXPECT_FALSE(first.ok());   // NOLINT: a moved-from array is empty
  EXPECT_FALSE(second.ok());  // NOLINT
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third.size(), 10u);
  EXPECT_EQ(third[3], 33u);
}

}  // namespace
}  // namespace rxtoken
