// SPDX-License-Identifier: Apache-2.0
#include "dataplane/buffer_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "tests/sanitized.h"
#include "tests/unit/dataplane/test_eal.h"
#include "tests/unit/tokens/fakes.h"
#include "tokens/lane.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kWorker = 0;

// A binding as a worker uses it: frames are popped, received, lent or dropped, and returned.
class BufferPoolTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(TestEal().ok()) << TestEal().message();
    this_worker = kWorker;
  }
  void TearDown() override { this_worker = kNotAWorker; }

  void Create(std::uint32_t pages, std::uint32_t page_bytes, std::uint32_t frames_per_page) {
    static std::uint32_t last_id = 1000;
    auto buffer =
        Buffer::Create("b0", std::uint64_t{pages} * page_bytes, page_bytes, Memory::kPlain);
    ASSERT_TRUE(buffer.ok()) << buffer.status().message();
    auto pool = BufferPool::Create(std::move(*buffer), ++last_id, frames_per_page);
    ASSERT_TRUE(pool.ok()) << pool.status().message();
    pool_ = std::move(*pool);
  }
  // Empty: the pool has not so many.
  std::vector<rte_mbuf*> Receive(std::uint32_t n) {
    std::vector<rte_mbuf*> mbufs(n);
    if (rte_mempool_get_bulk(pool_->mempool(), reinterpret_cast<void**>(mbufs.data()), n) != 0) {
      return {};
    }
    return mbufs;
  }
  std::uint32_t PageOf(const rte_mbuf* mbuf) { return pool_->PageOf(mbuf->buf_addr); }
  void Lend(Lane& lane, const rte_mbuf* mbuf) {
    const LendItem item = Item(PageOf(mbuf));
    ASSERT_EQ(lane.Room(1), 1u);
    ASSERT_TRUE(lane.Lend(pool_->table(), {&item, 1}, 0));
    lane.Publish();
  }
  void LendOnce(const rte_mbuf* mbuf) {
    Lend(lane_, mbuf);
    pool_->EndFrame(PageOf(mbuf));
  }
  std::uint32_t Return(Lane& lane, std::uint32_t page) {
    const std::uint32_t token = Token(0, page);
    return lane.Return({&token, 1}, recycler_);
  }
  std::uint32_t free_pages() { return pool_->pages().available(); }

  std::unique_ptr<BufferPool> pool_;
  PageRecycler recycler_;
  SlotTable slots_, other_slots_;
  TestRings rings_{kMaxRingEntries}, other_rings_{kMaxRingEntries};
  Lane lane_{kWorker, &slots_, rings_.descriptors(), rings_.returns()};
  Lane other_lane_{kWorker, &other_slots_, other_rings_.descriptors(), other_rings_.returns()};
};

TEST_F(BufferPoolTest, FramesOfAPageLieSideBySideAndComeTogether) {
  Create(8, 16384, 4);
  ASSERT_EQ(pool_->frame_bytes(), 4096u);

  const std::vector<rte_mbuf*> mbufs = Receive(8);

  ASSERT_EQ(mbufs.size(), 8u);
  std::set<const void*> places;
  for (std::size_t i = 0; i < 8; i++) {
    EXPECT_EQ(PageOf(mbufs[i]), PageOf(mbufs[i / 4 * 4]));
    EXPECT_GE(mbufs[i]->buf_len, 4096u - 15 * 64);
    EXPECT_TRUE(places.insert(mbufs[i]->buf_addr).second);
  }
  EXPECT_EQ(free_pages(), 6u);
}

TEST_F(BufferPoolTest, TwoFramesOfAPageComeBackInAnyOrderAndFreeItOnce) {
  Create(4, 4096, 2);
  const std::vector<rte_mbuf*> mbufs = Receive(2);
  const std::uint32_t page = PageOf(mbufs[0]);
  for (const auto order : {std::array{0, 1}, std::array{1, 0}}) {
    const std::vector<rte_mbuf*> again = order[0] == 0 ? mbufs : Receive(2);
    ASSERT_EQ(PageOf(again[0]), page) << "last in, first out";
    LendOnce(again[static_cast<std::size_t>(order[0])]);
    LendOnce(again[static_cast<std::size_t>(order[1])]);
    EXPECT_EQ(free_pages(), 3u);
    EXPECT_EQ(Return(lane_, page), 1u);
    EXPECT_EQ(free_pages(), 3u);
    EXPECT_EQ(Return(lane_, page), 1u);
    EXPECT_EQ(free_pages(), 4u);
    EXPECT_EQ(Return(lane_, page), 0u);
    EXPECT_EQ(free_pages(), 4u);
  }
}

TEST_F(BufferPoolTest, APageStaysWhileTheDriverMayFillTheRestOfIt) {
  Create(4, 4096, 2);
  const std::vector<rte_mbuf*> mbufs = Receive(2);
  const std::uint32_t page = PageOf(mbufs[0]);

  LendOnce(mbufs[0]);
  EXPECT_EQ(Return(lane_, page), 1u);
  EXPECT_EQ(Return(lane_, page), 0u) << "the rx socket does not hold it any more";
  EXPECT_EQ(free_pages(), 3u);

  pool_->EndFrame(page);  // the second frame is dropped
  EXPECT_EQ(free_pages(), 4u);
}

class FanOut : public BufferPoolTest, public testing::WithParamInterface<std::uint32_t> {};

TEST_P(FanOut, APageComesBackAfterTheLastRxSocket) {
  const std::uint32_t frames = GetParam();
  Create(4, 4096, frames);
  const std::vector<rte_mbuf*> mbufs = Receive(frames);
  const std::uint32_t page = PageOf(mbufs[0]);
  for (const rte_mbuf* mbuf : mbufs) {
    Lend(lane_, mbuf);
    Lend(other_lane_, mbuf);
    pool_->EndFrame(page);
  }
  for (std::uint32_t i = 0; i < frames; i++) {
    EXPECT_EQ(free_pages(), 3u);
    EXPECT_EQ(Return(lane_, page), 1u);
    EXPECT_EQ(free_pages(), 3u);
    EXPECT_EQ(Return(other_lane_, page), 1u);
  }
  EXPECT_EQ(free_pages(), 4u);
}

INSTANTIATE_TEST_SUITE_P(FramesPerPage, FanOut, testing::Values(1, 2));

TEST_F(BufferPoolTest, LooseFramesGoBackWhenTheQueueGoes) {
  Create(4, 65536, 32);
  const std::vector<rte_mbuf*> mbufs = Receive(1);
  EXPECT_EQ(free_pages(), 3u);

  pool_->DropLoose();
  EXPECT_EQ(free_pages(), 3u);
  pool_->EndFrame(PageOf(mbufs[0]));

  EXPECT_EQ(free_pages(), 4u);
}

TEST_F(BufferPoolTest, ReservesAndPopsFramesToTheLast) {
  Create(3, 4096, 2);

  EXPECT_EQ(pool_->Reserve(100), 6u);
  EXPECT_EQ(Receive(1).size(), 1u);
  EXPECT_EQ(pool_->Reserve(100), 5u);
  EXPECT_TRUE(Receive(6).empty());
  EXPECT_EQ(Receive(5).size(), 5u);
  EXPECT_EQ(pool_->Reserve(1), 0u);
  EXPECT_TRUE(Receive(1).empty());
}

// Random receiving, lending to one or two rx sockets, dropping and returning, right and wrong,
// by ranges too, against plain counts.
TEST_F(BufferPoolTest, AgreesWithAModelOverManyOperations) {
  constexpr std::uint32_t kPages = 64;
  constexpr std::uint32_t kFrames = 4;
  const std::uint64_t operations = kSanitized ? 1 << 18 : 1 << 24;
  Create(kPages, 16384, kFrames);
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE("--gtest_random_seed=" +
               std::to_string(testing::UnitTest::GetInstance()->random_seed()));
  struct Page {
    std::uint32_t unspent = kFrames;  // in the pool, or with the driver
    std::array<std::uint32_t, 2> held = {};
    bool out = false;
  };
  std::vector<Page> model(kPages);
  std::vector<rte_mbuf*> driver;
  std::array<Lane*, 2> lanes = {&lane_, &other_lane_};
  std::array<LaneReader, 2> readers = {
      LaneReader(rings_.descriptors(), rings_.returns()),
      LaneReader(other_rings_.descriptors(), other_rings_.returns())};
  std::uint32_t out = 0;
  const auto settle = [&](std::uint32_t page) {
    Page& m = model[page];
    if (m.unspent != 0 || m.held[0] != 0 || m.held[1] != 0) return;
    m = Page();
    out--;
  };
  for (std::uint64_t i = 0; i < operations; i++) {
    const std::uint32_t what = random() % 8;
    if (what < 2) {
      const std::uint32_t n = 1 + random() % 6;
      for (rte_mbuf* mbuf : Receive(n)) {
        driver.push_back(mbuf);
        out += !model[PageOf(mbuf)].out;
        model[PageOf(mbuf)].out = true;
      }
    } else if (what < 5 && !driver.empty()) {
      const std::size_t at = random() % driver.size();
      const rte_mbuf* const mbuf = driver[at];
      driver[at] = driver.back();
      driver.pop_back();
      const std::uint32_t page = PageOf(mbuf);
      for (std::size_t s = 0; s < 2; s++) {
        if (random() % 3 == 0) continue;
        Lend(*lanes[s], mbuf);
        model[page].held[s]++;
      }
      pool_->EndFrame(page);
      model[page].unspent--;
      settle(page);
    } else {
      const std::size_t s = random() % 2;
      const std::uint32_t first = random() % kPages;
      const std::uint32_t n = 1 + random() % std::min(4u, kPages - first);
      for (std::uint32_t page = first; page < first + n; page++) {
        const bool held = model[page].held[s] != 0;
        ASSERT_EQ(Return(*lanes[s], page), held ? 1u : 0u) << "page " << page;
        if (!held) continue;
        model[page].held[s]--;
        settle(page);
      }
    }
    ASSERT_EQ(free_pages(), kPages - out) << "after operation " << i;
    if (i % 1024 == 0) {
      for (LaneReader& reader : readers) ReadAll(reader);
    }
  }
}

}  // namespace
}  // namespace rxtoken
