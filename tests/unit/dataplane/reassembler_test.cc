// SPDX-License-Identifier: Apache-2.0
#include "dataplane/reassembler.h"

#include <gtest/gtest.h>
#include <rte_ip.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "dataplane/buffer_pool.h"
#include "dataplane/sip_hash.h"
#include "tests/sanitized.h"
#include "tests/unit/dataplane/test_eal.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint32_t kMtuData = 1480;

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}
Bytes Be16(std::size_t value) {
  return {static_cast<std::uint8_t>(value >> 8), static_cast<std::uint8_t>(value)};
}

// A UDP datagram that travels in pieces. Its bytes follow from its id.
struct Datagram {
  std::uint32_t bytes;  // of UDP header and payload
  std::uint16_t id = 1;
  bool v6 = false;
  std::uint16_t vlan = 0;
  std::size_t options = 0;  // IPv4: words; IPv6: 8 bytes each, in front of the fragment header
  std::size_t first_options = 0;  // in addition, of the first fragment only

  std::uint8_t At(std::size_t i) const {
    static constexpr std::array<std::uint8_t, 4> kPorts = {0x12, 0x34, 0x56, 0x78};
    if (i < 4) return kPorts[i];
    if (i < 6) return Be16(bytes)[i - 4];
    return static_cast<std::uint8_t>(i * 7 + i / 251 + id * 13u);
  }
  Bytes Data(std::uint32_t offset, std::uint32_t length) const {
    Bytes data(length);
    for (std::uint32_t i = 0; i < length; i++) data[i] = At(offset + i);
    return data;
  }
  Bytes Frame(std::uint32_t offset, std::uint32_t length, bool more) const {
    Bytes ether = Bytes(12, 0x02);
    if (vlan != 0) ether = ether + Be16(0x8100) + Be16(vlan);
    const std::size_t words = options + (offset == 0 ? first_options : 0);
    if (v6) {
      Bytes ip = {0x60, 0, 0, 0};
      ip = ip + Be16(8 * words + 8 + length) +
           Bytes{static_cast<std::uint8_t>(words != 0 ? 60 : 44), 64} + Bytes(32, 0xFD);
      if (words != 0)
        ip = ip + Bytes{44, static_cast<std::uint8_t>(words - 1)} + Bytes(8 * words - 2, 0);
      return ether + Be16(0x86DD) + ip + Bytes{17, 0} + Be16(offset | (more ? 1u : 0u)) +
             Bytes{0, 0} + Be16(id) + Data(offset, length);
    }
    return ether + Be16(0x0800) + Bytes{static_cast<std::uint8_t>(0x45 + words), 0} +
           Be16(20 + 4 * words + length) + Be16(id) + Be16(offset / 8 | (more ? 0x2000u : 0u)) +
           Bytes{64, 17, 0xBA, 0xD0} + Bytes{10, 0, 0, 1, 10, 0, 0, 2} + Bytes(4 * words, 1) +
           Data(offset, length);
  }
  // Each but the last with `each` bytes of data.
  std::vector<Bytes> Frames(std::uint32_t each) const {
    std::vector<Bytes> frames;
    for (std::uint32_t at = 0; at < bytes; at += each) {
      frames.push_back(Frame(at, std::min(each, bytes - at), at + each < bytes));
    }
    return frames;
  }
};

// Nothing may be left in the end: each test ends with all pages in the pool.
class ReassemblerTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kPages = 16384;
  static constexpr std::uint32_t kNoLimit = ~0u;

  void SetUp() override {
    ASSERT_TRUE(TestEal().ok()) << TestEal().message();
    this_worker = 0;
    pool_ = Pool(kPages);
    Use({});
  }
  void TearDown() override {
    reassembler_.reset();
    EXPECT_EQ(pool_->pages().available(), kPages);
    this_worker = kNotAWorker;
  }

  static std::unique_ptr<BufferPool> Pool(std::uint32_t pages) {
    static std::uint32_t last_id = 3000;
    auto buffer = Buffer::Create("b0", std::uint64_t{pages} * 2048, 2048, Memory::kPlain);
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    auto pool = BufferPool::Create(std::move(*buffer), ++last_id);
    EXPECT_TRUE(pool.ok()) << pool.status().message();
    return std::move(*pool);
  }
  void Use(const ReassemblyOptions& options) {
    reassembler_ = std::make_unique<Reassembler>(options, Free);
    ASSERT_TRUE(reassembler_->ok());
  }

  static void Free(rte_mbuf* mbuf) {
    ASSERT_EQ(mbuf->nb_segs, 1u);
    ASSERT_EQ(mbuf->next, nullptr);
    BufferPool* const pool = BufferPool::Of(mbuf->pool);
    pool->EndFrame(pool->PageOf(mbuf->buf_addr));
  }
  static void FreeChain(rte_mbuf* mbuf) {
    while (mbuf != nullptr) {
      rte_mbuf* const next = mbuf->next;
      mbuf->next = nullptr;
      mbuf->nb_segs = 1;
      Free(mbuf);
      mbuf = next;
    }
  }

  // A frame in mbufs of up to `segment` bytes each.
  rte_mbuf* Receive(const Bytes& bytes, std::size_t segment, BufferPool& pool) {
    rte_mbuf* head = nullptr;
    rte_mbuf** link = &head;
    for (std::size_t at = 0; at < bytes.size(); at += segment) {
      rte_mbuf* const mbuf = rte_pktmbuf_alloc(pool.mempool());
      EXPECT_NE(mbuf, nullptr);
      mbuf->data_len = static_cast<std::uint16_t>(std::min(segment, bytes.size() - at));
      std::copy_n(&bytes[at], mbuf->data_len, rte_pktmbuf_mtod(mbuf, std::uint8_t*));
      *link = mbuf;
      link = &mbuf->next;
      if (mbuf != head) head->nb_segs++;
    }
    head->pkt_len = static_cast<std::uint32_t>(bytes.size());
    return head;
  }
  // What the worker does with a fragment that came.
  rte_mbuf* Give(const Bytes& bytes, std::size_t segment = 1600) {
    return GiveFrom(*pool_, bytes, segment);
  }
  rte_mbuf* GiveFrom(BufferPool& pool, const Bytes& bytes, std::size_t segment = 1600) {
    rte_mbuf* const frame = Receive(bytes, segment, pool);
    ParsedFrame parsed;
    EXPECT_EQ(ParseFrame(rte_pktmbuf_mtod(frame, const std::uint8_t*), frame->data_len,
                         frame->pkt_len, parsed),
              ParseStatus::kOk);
    EXPECT_TRUE(parsed.is_fragment);
    rte_mbuf* const datagram = reassembler_->Add(frame, parsed, port_, now_ns_, limit_);
    EXPECT_LE(reassembler_->pages(), limit_);
    return datagram;
  }
  void GiveNothing(const Bytes& bytes, std::size_t segment = 1600) {
    ASSERT_EQ(Give(bytes, segment), nullptr);
  }

  // It is the whole datagram, in a frame like any other; and frees it.
  static void ExpectIs(const Datagram& datagram, rte_mbuf* chain) {
    ASSERT_NE(chain, nullptr);
    Bytes frame;
    std::uint32_t segments = 0;
    for (const rte_mbuf* mbuf = chain; mbuf != nullptr; mbuf = mbuf->next) {
      const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
      EXPECT_LE(mbuf->data_off + mbuf->data_len, mbuf->buf_len);
      frame.insert(frame.end(), data, data + mbuf->data_len);
      segments++;
    }
    EXPECT_EQ(chain->nb_segs, segments);
    ASSERT_EQ(chain->pkt_len, frame.size());
    ParsedFrame parsed;
    ASSERT_EQ(ParseFrame(frame.data(), chain->data_len, chain->pkt_len, parsed), ParseStatus::kOk);
    ASSERT_TRUE(parsed.udp);
    EXPECT_EQ(parsed.payload_offset + parsed.payload_length, frame.size()) << "padding";
    EXPECT_EQ(parsed.key.w[1],
              FlowKey::PortsWord(0x1234, 0x5678, 17, datagram.v6 ? IpFamily::kV6 : IpFamily::kV4,
                                 datagram.vlan));
    const std::size_t udp = frame.size() - datagram.bytes;
    EXPECT_EQ(parsed.payload_offset, udp + 8);
    for (std::size_t i = 0; i < datagram.bytes; i++) {
      ASSERT_EQ(frame[udp + i], datagram.At(i)) << "at " << i;
    }
    const std::size_t ip_header = datagram.vlan != 0 ? 18 : 14;
    const std::size_t options = datagram.options + datagram.first_options;
    EXPECT_EQ(udp - ip_header, datagram.v6 ? 40 + 8 * options : 20 + 4 * options);
    if (!datagram.v6) {
      const auto* const ip = reinterpret_cast<const rte_ipv4_hdr*>(
          rte_pktmbuf_mtod(chain, const std::uint8_t*) + ip_header);
      EXPECT_EQ(ip->fragment_offset, 0u);
      EXPECT_EQ(rte_raw_cksum(ip, rte_ipv4_hdr_len(ip)), 0xFFFFu);
    }
    FreeChain(chain);
  }
  void ExpectPagesHeld(std::uint32_t pages) {
    EXPECT_EQ(reassembler_->pages(), pages);
    EXPECT_EQ(pool_->pages().available(), kPages - pages);
  }
  // As often as it takes to get around.
  void ExpireAll() {
    for (int i = 0; i < 200; i++) reassembler_->Expire(now_ns_);
  }
  const Reassembler::Counters& counters() { return reassembler_->counters(); }

  std::unique_ptr<BufferPool> pool_;
  std::unique_ptr<Reassembler> reassembler_;
  std::uint32_t port_ = 0;
  std::uint32_t limit_ = kNoLimit;
  std::uint64_t now_ns_ = 5'000 * kMs;
};

TEST(SipHash, GivesWhatItsAuthorsPublished) {
  // Key 00..0f, message 00..0e, SipHash-2-4.
  SipHash<2, 4> hash({0x0706050403020100, 0x0f0e0d0c0b0a0908});
  hash.Add(0x0706050403020100);
  EXPECT_EQ(hash.Finish(0x0f0e0d0c0b0a0908), 0xa129ca6149be45e5u);
}

// ---- whole datagrams -------------------------------------------------------------------------

TEST_F(ReassemblerTest, PutsTogetherWhatComesInAnyOrder) {
  std::mt19937 random(1);
  std::uint16_t id = 0;
  for (const std::uint32_t fragments : {2u, 3u, 44u, 64u}) {
    const std::uint32_t each = fragments == 64 ? 1016 : kMtuData;
    for (const bool v6 : {false, true}) {
      for (const std::uint16_t vlan : {0, 7}) {
        for (const int order : {0, 1, 2, 3}) {
          const Datagram datagram{
              .bytes = each * (fragments - 1) + 700, .id = ++id, .v6 = v6, .vlan = vlan};
          std::vector<Bytes> frames = datagram.Frames(each);
          ASSERT_EQ(frames.size(), fragments);
          if (order == 1) std::reverse(frames.begin(), frames.end());
          if (order >= 2) std::shuffle(frames.begin(), frames.end(), random);
          for (std::size_t i = 0; i + 1 < fragments; i++) GiveNothing(frames[i]);
          ExpectPagesHeld(fragments - 1);
          rte_mbuf* const whole = Give(frames.back());
          ASSERT_NE(whole, nullptr);
          EXPECT_EQ(whole->nb_segs, fragments) << "each fragment on its own page";
          for (const rte_mbuf* mbuf = whole; mbuf != nullptr; mbuf = mbuf->next) {
            EXPECT_FALSE(Reassembler::IsCopy(mbuf));
          }
          ExpectIs(datagram, whole);
          ExpectPagesHeld(0);
        }
      }
    }
  }
  EXPECT_EQ(counters().reassembled, id);
  EXPECT_EQ(counters().copied_out_bytes, 0u);
}

TEST_F(ReassemblerTest, PutsTogetherTheLongestThereIs) {
  for (const Datagram& datagram :
       {Datagram{.bytes = 65535 - 20, .id = 1},
        Datagram{.bytes = 65535 - 60, .id = 2, .options = 10},
        Datagram{.bytes = 65535, .id = 3, .v6 = true},
        Datagram{.bytes = 65535 - 8, .id = 4, .v6 = true, .options = 1}}) {
    rte_mbuf* whole = nullptr;
    for (const Bytes& frame : datagram.Frames(1440)) whole = Give(frame);
    ExpectIs(datagram, whole);
  }
  EXPECT_EQ(counters().reassembled, 4u);
}

TEST_F(ReassemblerTest, KeepsTheHeadersOfTheFirstFragment) {
  for (const bool v6 : {false, true}) {
    const Datagram datagram{.bytes = 3000, .v6 = v6, .options = 1, .first_options = 3};
    std::vector<Bytes> frames = datagram.Frames(kMtuData);
    std::reverse(frames.begin(), frames.end());
    GiveNothing(frames[0]);
    GiveNothing(frames[1]);
    ExpectIs(datagram, Give(frames[2]));
  }
}

TEST_F(ReassemblerTest, LeavesEthernetPaddingOut) {
  const Datagram datagram{.bytes = 1480 + 8};
  for (const bool last_first : {false, true}) {
    std::vector<Bytes> frames = datagram.Frames(kMtuData);
    for (Bytes& frame : frames) frame.resize(frame.size() + 26, 0xEE);
    if (last_first) std::swap(frames[0], frames[1]);
    GiveNothing(frames[0]);
    ExpectIs(datagram, Give(frames[1]));
  }
}

TEST_F(ReassemblerTest, TakesFramesOfSeveralSegmentsApart) {
  std::mt19937 random(2);
  for (const bool v6 : {false, true}) {
    const Datagram datagram{.bytes = 30'000, .v6 = v6};
    const std::uint32_t headers = v6 ? 62 : 34;
    // The second: all of the first segment is headers, and the rest starts on the next.
    for (const std::size_t segment : {1000u, headers, 1771u}) {
      std::vector<Bytes> frames = datagram.Frames(segment == headers ? 296 * 2 : 8960);
      if (segment == headers) frames = Datagram{.bytes = 1200, .v6 = v6}.Frames(600);
      for (Bytes& frame : frames) frame.resize(frame.size() + 3 * segment, 0xEE);
      std::shuffle(frames.begin(), frames.end(), random);
      const Datagram expected = segment == headers ? Datagram{.bytes = 1200, .v6 = v6} : datagram;
      for (std::size_t i = 0; i + 1 < frames.size(); i++) GiveNothing(frames[i], segment);
      ASSERT_EQ(pool_->pages().available(), kPages - reassembler_->pages());
      rte_mbuf* const whole = Give(frames.back(), segment);
      if (segment != headers) {
        ExpectIs(expected, whole);
        continue;
      }
      // The UDP header is not in the first segment: a frame that is not served either if it is
      // no fragment.
      ASSERT_NE(whole, nullptr);
      EXPECT_EQ(whole->data_len, v6 ? headers - 8 : headers);
      EXPECT_EQ(whole->pkt_len, whole->data_len + expected.bytes);
      FreeChain(whole);
    }
  }
}

TEST_F(ReassemblerTest, TellsDatagramsApartByAllOfTheKey) {
  const Datagram datagram{.bytes = 2000, .id = 9};
  const Bytes first = datagram.Frame(0, kMtuData, true);
  const auto with = [&](std::size_t at, std::uint8_t value) {
    Bytes other = first;
    other[at] = value;
    return other;
  };
  GiveNothing(first);
  GiveNothing(with(14 + 4, 1));   // id
  GiveNothing(with(14 + 9, 50));  // protocol
  GiveNothing(with(14 + 12, 11));
  GiveNothing(with(14 + 19, 3));
  GiveNothing(Datagram{.bytes = 2000, .id = 9, .vlan = 5}.Frame(0, kMtuData, true));
  GiveNothing(Datagram{.bytes = 2000, .id = 9, .v6 = true}.Frame(0, kMtuData, true));
  Bytes v6 = Datagram{.bytes = 2000, .id = 9, .v6 = true}.Frame(0, kMtuData, true);
  for (const std::size_t at : {14 + 8, 14 + 16, 14 + 24, 14 + 39, 14 + 44, 14 + 47}) {
    Bytes other = v6;
    other[at] ^= 1;
    GiveNothing(other);
  }
  port_ = 1;
  GiveNothing(first);
  EXPECT_EQ(reassembler_->datagrams(), 14u);
  EXPECT_EQ(counters().duplicates, 0u);
  port_ = 0;
  ExpectIs(datagram, Give(datagram.Frame(kMtuData, 520, false)));
}

// ---- what is wrong ---------------------------------------------------------------------------

TEST_F(ReassemblerTest, RefusesFragmentsThatCannotBe) {
  for (const bool v6 : {false, true}) {
    const Datagram datagram{.bytes = 2000, .v6 = v6};
    GiveNothing(datagram.Frame(0, 1480, true));
    GiveNothing(datagram.Frame(1480, 0, false));
    GiveNothing(datagram.Frame(1480, 0, true));
    GiveNothing(datagram.Frame(1480, 12, true));
    GiveNothing(datagram.Frame(1480, 1481, true));
    GiveNothing(datagram.Frame(65528, 1000, false));  // the ping of death
    const std::uint32_t most = 65535 - (v6 ? 0 : 20);
    GiveNothing(datagram.Frame(65528 - 800, 808 - (65536 - most) + 1, false));
    // They do no harm to the datagram.
    ExpectIs(datagram, Give(datagram.Frame(1480, 520, false)));
  }
  EXPECT_EQ(counters().invalid, 12u);
  EXPECT_EQ(counters().reassembled, 2u);
}

TEST_F(ReassemblerTest, RefusesWhatTheFirstOnesOptionsMakeTooLong) {
  const Datagram datagram{.bytes = 65535 - 20, .first_options = 1};
  rte_mbuf* whole = nullptr;
  for (const Bytes& frame : datagram.Frames(kMtuData)) whole = Give(frame);
  EXPECT_EQ(whole, nullptr);
  EXPECT_EQ(counters().invalid, 1u);
  ExpectPagesHeld(0);
}

// What is given makes the datagram go, and the rest of it finds nothing to join.
class DroppedTest : public ReassemblerTest {
 protected:
  struct Piece {
    std::uint32_t offset, length;
    bool more;
  };
  void Drops(const std::vector<Piece>& pieces,
             const std::uint64_t Reassembler::Counters::*counter) {
    for (const bool v6 : {false, true}) {
      for (const std::uint32_t scale : {1u, 40u}) {  // in cells, and in pages
        const Datagram datagram{.bytes = 24 * scale, .id = ++id_, .v6 = v6};
        const std::uint64_t before = counters().*counter;
        const std::uint64_t discarded = counters().discarded;
        for (const Piece& piece : pieces) {
          ASSERT_EQ(counters().*counter, before);
          GiveNothing(datagram.Frame(piece.offset * scale, piece.length * scale, piece.more));
        }
        EXPECT_EQ(counters().*counter, before + 1);
        EXPECT_EQ(reassembler_->datagrams(), 0u);
        ExpectPagesHeld(0);
        EXPECT_EQ(reassembler_->cells(), 0u);
        for (const Bytes& frame : datagram.Frames(8 * scale)) GiveNothing(frame);
        EXPECT_EQ(counters().discarded, discarded + 3);
        now_ns_ += 1100 * kMs;
        rte_mbuf* whole = nullptr;
        for (const Bytes& frame : datagram.Frames(8 * scale)) whole = Give(frame);
        ExpectIs(datagram, whole);
      }
    }
  }
  std::uint16_t id_ = 100;
};

TEST_F(DroppedTest, ByAnyOverlap) {
  const auto overlap = &Reassembler::Counters::overlap;
  Drops({{0, 16, true}, {8, 16, true}}, overlap);  // over the end
  Drops({{8, 16, true}, {0, 16, true}}, overlap);  // over the start
  Drops({{0, 24, true}, {8, 8, true}}, overlap);   // inside
  Drops({{8, 8, true}, {0, 24, true}}, overlap);   // around
  Drops({{0, 16, true}, {0, 8, true}}, overlap);   // a shorter one
  Drops({{0, 8, true}, {0, 16, true}}, overlap);   // a longer one
  Drops({{0, 16, true}, {8, 8, true}}, overlap);   // same end
  Drops({{8, 8, true}, {0, 16, true}}, overlap);
  Drops({{0, 8, true}, {16, 8, false}, {0, 24, true}}, overlap);  // over a hole and two others
  Drops({{0, 8, true}, {16, 8, false}, {8, 16, true}}, overlap);
  Drops({{0, 8, true}, {16, 8, false}, {8, 16, false}}, overlap);  // the last one differs
  Drops({{0, 16, true}, {16, 8, true}, {8, 16, false}}, overlap);
}

TEST_F(DroppedTest, ByTwoEnds) {
  const auto invalid = &Reassembler::Counters::invalid;
  Drops({{16, 8, false}, {8, 8, false}}, invalid);
  Drops({{8, 8, false}, {16, 8, false}}, invalid);
  Drops({{8, 8, false}, {16, 8, true}}, invalid);
  Drops({{16, 8, true}, {8, 8, false}}, invalid);
  Drops({{0, 8, true}, {8, 8, true}, {16, 8, true}, {8, 8, false}}, invalid);
}

TEST_F(ReassemblerTest, DropsATeardrop) {
  const Datagram datagram{.bytes = 1000};
  GiveNothing(datagram.Frame(0, 800, true));
  GiveNothing(datagram.Frame(24, 4, false));  // ends inside the first
  EXPECT_EQ(counters().invalid, 1u);
  ExpectPagesHeld(0);
}

TEST_F(ReassemblerTest, DropsWhatIsInMoreThan64Fragments) {
  const Datagram datagram{.bytes = 65 * 512};
  for (const bool reverse : {false, true}) {
    std::vector<Bytes> frames = datagram.Frames(512);
    if (reverse) std::reverse(frames.begin(), frames.end());
    for (std::size_t i = 0; i < 64; i++) GiveNothing(frames[i]);
    ExpectPagesHeld(64);
    GiveNothing(frames[64]);
    ExpectPagesHeld(0);
    now_ns_ += 1100 * kMs;
  }
  EXPECT_EQ(counters().invalid, 2u);
}

TEST_F(ReassemblerTest, IgnoresExactDuplicates) {
  for (const std::uint32_t each : {40u, kMtuData}) {
    for (const bool reverse : {false, true}) {
      const Datagram datagram{.bytes = 5 * each};
      std::vector<Bytes> frames = datagram.Frames(each);
      if (reverse) std::reverse(frames.begin(), frames.end());
      const std::uint64_t before = counters().duplicates;
      for (std::size_t i = 0; i < 4; i++) {
        for (std::size_t j = 0; j <= i; j++) GiveNothing(frames[j]);
        for (std::size_t j = 0; j <= i; j++) GiveNothing(frames[j]);
      }
      EXPECT_EQ(counters().duplicates, before + 16);
      ExpectIs(datagram, Give(frames[4]));
    }
  }
}

// ---- limits ----------------------------------------------------------------------------------

TEST_F(ReassemblerTest, TimesOutFromTheFirstFragment) {
  Use({.timeout_ns = 100 * kMs});
  const Datagram datagram{.bytes = 3 * kMtuData};
  const std::vector<Bytes> frames = datagram.Frames(kMtuData);
  GiveNothing(frames[0]);
  now_ns_ += 60 * kMs;
  GiveNothing(frames[1]);
  now_ns_ += 39 * kMs;
  ExpireAll();
  ExpectPagesHeld(2);
  now_ns_ += 4 * kMs;
  ExpireAll();
  ExpectPagesHeld(0);
  EXPECT_EQ(counters().timed_out, 1u);

  // One that is not swept before its next fragment comes starts anew.
  GiveNothing(frames[0]);
  GiveNothing(frames[1]);
  now_ns_ += 103 * kMs;
  GiveNothing(frames[2]);
  EXPECT_EQ(counters().timed_out, 2u);
  ExpectPagesHeld(1);
  GiveNothing(frames[1]);
  ExpectIs(datagram, Give(frames[0]));
}

TEST_F(ReassemblerTest, TimesOutAfterHalfAMinute) {
  Use({.timeout_ns = 30'000 * kMs});
  GiveNothing(Datagram{.bytes = 3000}.Frame(0, 1480, true));
  now_ns_ += 29'990 * kMs;
  ExpireAll();
  ExpectPagesHeld(1);
  now_ns_ += 20 * kMs;
  ExpireAll();
  ExpectPagesHeld(0);
}

TEST_F(ReassemblerTest, AFullBucketGivesUpWhatMadeNoProgressForLongest) {
  Use({.datagrams = 8});
  const auto datagram = [](std::uint16_t id) { return Datagram{.bytes = 3 * 800, .id = id}; };
  for (std::uint16_t id = 0; id < 8; id++) {
    GiveNothing(datagram(id).Frame(0, 800, true));
    now_ns_ += kMs;
  }
  GiveNothing(datagram(0).Frame(800, 800, true));  // now the youngest
  now_ns_ += kMs;

  GiveNothing(datagram(8).Frame(0, 800, true));  // for 1
  now_ns_ += kMs;
  GiveNothing(datagram(9).Frame(0, 800, true));  // for 2
  EXPECT_EQ(counters().evicted, 2u);
  EXPECT_EQ(reassembler_->datagrams(), 8u);
  ExpectPagesHeld(9);

  ExpectIs(datagram(0), Give(datagram(0).Frame(1600, 800, false)));
  for (std::uint16_t id = 3; id < 10; id++) {
    GiveNothing(datagram(id).Frame(800, 800, true));
    ExpectIs(datagram(id), Give(datagram(id).Frame(1600, 800, false)));
  }
  EXPECT_EQ(counters().evicted, 2u);
}

TEST_F(ReassemblerTest, WhatWasDroppedIsForgottenAsWell) {
  Use({.datagrams = 8});
  const Datagram bad{.bytes = 2400, .id = 77};
  GiveNothing(bad.Frame(0, 800, true));
  GiveNothing(bad.Frame(400, 800, true));
  EXPECT_EQ(counters().overlap, 1u);
  for (std::uint16_t id = 0; id < 8; id++) {
    now_ns_ += kMs;
    GiveNothing(Datagram{.bytes = 2400, .id = id}.Frame(0, 800, true));
  }
  EXPECT_EQ(counters().evicted, 0u) << "nothing was lost by it";
  EXPECT_EQ(reassembler_->datagrams(), 8u);
}

TEST_F(ReassemblerTest, OverTheBudgetTheOldestGoes) {
  Use({.pages = 100});
  const auto datagram = [](std::uint32_t id) {
    return Datagram{.bytes = 4 * 800, .id = static_cast<std::uint16_t>(id)};
  };
  std::uint32_t completed = 0;
  for (std::uint32_t id = 0; id < 5000; id++) {
    // Each comes in three parts, ten datagrams apart, and a second that never will be whole.
    GiveNothing(datagram(10'000 + id).Frame(0, 800, true));
    GiveNothing(datagram(id).Frame(0, 800, true));
    if (id >= 10) GiveNothing(datagram(id - 10).Frame(800, 800, true));
    if (id >= 10) GiveNothing(datagram(id - 10).Frame(1600, 800, true));
    if (id >= 12) {
      rte_mbuf* const whole = Give(datagram(id - 12).Frame(2400, 800, false));
      completed += whole != nullptr;
      FreeChain(whole);
    }
    EXPECT_LE(reassembler_->pages(), 100u);
    now_ns_ += 10'000;
  }
  EXPECT_GE(completed, 4950u);
  EXPECT_GT(counters().over_budget, 4000u);
}

TEST_F(ReassemblerTest, KeepsToTheCallersLimitAndDropsADatagramThatIsOverItAlone) {
  limit_ = 10;
  const Datagram datagram{.bytes = 12 * 800};
  GiveNothing(Datagram{.bytes = 2400, .id = 2}.Frame(0, 800, true));
  const std::vector<Bytes> frames = datagram.Frames(800);
  for (std::size_t i = 0; i < 10; i++) GiveNothing(frames[i]);
  ExpectPagesHeld(10);
  EXPECT_EQ(counters().over_budget, 1u) << "the other one";
  GiveNothing(frames[10]);
  ExpectPagesHeld(0);
  EXPECT_EQ(counters().over_budget, 2u);
  GiveNothing(frames[11]);
  EXPECT_EQ(counters().discarded, 1u);
  // A frame of more segments than it may keep.
  for (int i = 0; i < 2; i++) {
    GiveNothing(Datagram{.bytes = 9600, .id = 3}.Frame(0, 8800, true), 800);
    EXPECT_EQ(counters().over_budget, 3u);
  }
  ExpectPagesHeld(0);
}

// ---- small fragments ---------------------------------------------------------------------------

TEST_F(ReassemblerTest, SmallFragmentsHoldNoPages) {
  for (const std::uint32_t bytes : {8u, 64u, 248u}) {
    for (std::uint16_t id = 0; id < 500; id++) {
      GiveNothing(Datagram{.bytes = 2000, .id = id, .v6 = true}.Frame(bytes, bytes, true));
    }
  }
  ExpectPagesHeld(0);
  EXPECT_EQ(reassembler_->cells(), 1500u);
  EXPECT_EQ(counters().copied_out_bytes, 500u * (8 + 64 + 248));
  GiveNothing(Datagram{.bytes = 2000, .id = 1000}.Frame(0, 256, true));
  ExpectPagesHeld(1);
}

TEST_F(ReassemblerTest, NeighboursInCellsShareAPageInTheEnd) {
  std::mt19937 random(3);
  for (const bool v6 : {false, true}) {
    for (const std::uint32_t each : {8u, 248u}) {
      const Datagram datagram{.bytes = 63 * each + 5, .v6 = v6};
      std::vector<Bytes> frames = datagram.Frames(each);
      ASSERT_EQ(frames.size(), 64u);
      std::shuffle(frames.begin(), frames.end(), random);
      for (std::size_t i = 0; i < 63; i++) GiveNothing(frames[i]);
      EXPECT_EQ(reassembler_->cells(), 63u);
      ExpectPagesHeld(0);
      rte_mbuf* const whole = Give(frames[63]);
      ASSERT_NE(whole, nullptr);
      EXPECT_EQ(whole->nb_segs, each == 8 ? 1u : 9u);
      for (const rte_mbuf* mbuf = whole; mbuf != nullptr; mbuf = mbuf->next) {
        EXPECT_TRUE(Reassembler::IsCopy(mbuf));
      }
      ExpectIs(datagram, whole);
      EXPECT_EQ(reassembler_->cells(), 0u);
    }
  }
}

TEST_F(ReassemblerTest, OnlySmallOnesOfAMixAreCopied) {
  // 200 bytes | 800 | 200 | 200 | 800 | 100
  const Datagram datagram{.bytes = 2300};
  const std::vector<std::pair<std::uint32_t, std::uint32_t>> parts = {
      {0, 200}, {200, 800}, {1000, 200}, {1200, 200}, {1400, 800}, {2200, 100}};
  for (std::size_t start = 0; start < parts.size(); start++) {
    rte_mbuf* whole = nullptr;
    for (std::size_t i = 0; i < parts.size(); i++) {
      const auto [offset, length] = parts[(start + i * 5) % parts.size()];
      ASSERT_EQ(whole, nullptr);
      whole = Give(datagram.Frame(offset, length, offset + length != 2300));
    }
    ASSERT_NE(whole, nullptr);
    std::vector<bool> copies;
    for (const rte_mbuf* mbuf = whole; mbuf != nullptr; mbuf = mbuf->next) {
      copies.push_back(Reassembler::IsCopy(mbuf));
    }
    EXPECT_EQ(copies, (std::vector<bool>{true, false, true, false, true}));
    ExpectIs(datagram, whole);
  }
}

TEST_F(ReassemblerTest, CopiesGoWhereTheOtherPagesAre) {
  auto other = Pool(64);
  const Datagram datagram{.bytes = 1000};
  EXPECT_EQ(GiveFrom(*pool_, datagram.Frame(0, 800, true)), nullptr);
  rte_mbuf* const whole = GiveFrom(*other, datagram.Frame(800, 200, false));
  ASSERT_NE(whole, nullptr);
  EXPECT_EQ(whole->next->pool, pool_->mempool());
  ExpectIs(datagram, whole);
  // If all is small, to the mempool of the frame that came last.
  EXPECT_EQ(GiveFrom(*pool_, datagram.Frame(0, 80, true)), nullptr);
  rte_mbuf* const small = GiveFrom(*other, datagram.Frame(80, 20, false));
  ASSERT_NE(small, nullptr);
  EXPECT_EQ(small->pool, other->mempool());
  FreeChain(small);
  EXPECT_EQ(other->pages().available(), 64u);
}

TEST_F(ReassemblerTest, ADatagramIsDroppedIfThereIsNoPageForItsCopies) {
  auto other = Pool(64);
  const Datagram datagram{.bytes = 1000};
  EXPECT_EQ(GiveFrom(*pool_, datagram.Frame(800, 200, false)), nullptr);
  rte_mbuf* const frame = Receive(datagram.Frame(0, 800, true), 1600, *other);
  std::vector<void*> rest(63);
  ASSERT_EQ(rte_mempool_get_bulk(other->mempool(), rest.data(), 63), 0);
  ParsedFrame parsed;
  ASSERT_EQ(ParseFrame(rte_pktmbuf_mtod(frame, const std::uint8_t*), frame->data_len,
                       frame->pkt_len, parsed),
            ParseStatus::kOk);
  EXPECT_EQ(reassembler_->Add(frame, parsed, 0, now_ns_, kNoLimit), nullptr);
  EXPECT_EQ(counters().no_page, 1u);
  EXPECT_EQ(reassembler_->datagrams(), 0u);
  EXPECT_EQ(reassembler_->cells(), 0u);
  EXPECT_EQ(reassembler_->pages(), 0u);
  rte_mempool_put_bulk(other->mempool(), rest.data(), 63);
  EXPECT_EQ(other->pages().available(), 64u);
}

TEST_F(ReassemblerTest, WithoutAFreeCellTheOldestGoes) {
  Use({.cells = 64});
  for (std::uint16_t id = 0; id < 1000; id++) {
    GiveNothing(Datagram{.bytes = 2000, .id = id}.Frame(0, 64, true));
    EXPECT_LE(reassembler_->cells(), 64u);
    now_ns_ += 10'000;
  }
  EXPECT_EQ(reassembler_->cells(), 64u);
  EXPECT_EQ(counters().over_budget, 1000u - 64);
  // One with all the cells there are is not its own victim.
  const Datagram datagram{.bytes = 64 * 16, .id = 2000};
  rte_mbuf* whole = nullptr;
  for (const Bytes& frame : datagram.Frames(16)) whole = Give(frame);
  ExpectIs(datagram, whole);
}

TEST_F(ReassemblerTest, LongHeadersAreNotCopied) {
  const Datagram datagram{.bytes = 400, .v6 = true, .options = 20};
  GiveNothing(datagram.Frame(0, 248, true));
  ExpectPagesHeld(1);
  GiveNothing(Datagram{.bytes = 400, .id = 2, .v6 = true, .options = 20}.Frame(248, 152, false));
  ExpectPagesHeld(1);
  ExpectIs(datagram, Give(datagram.Frame(248, 152, false)));
}

// ---- floods and life -------------------------------------------------------------------------

TEST_F(ReassemblerTest, GoodDatagramsGetThroughAFloodOfFirstAndLastOnes) {
  // Each second fragment is missing in the middle, and the table is full of such datagrams.
  for (std::uint32_t i = 0; i < 20'000; i++) {
    const auto id = static_cast<std::uint16_t>(i);
    GiveNothing(Datagram{.bytes = 4000, .id = id, .v6 = true}.Frame(0, 64, true));
    GiveNothing(Datagram{.bytes = 4000, .id = id, .v6 = true}.Frame(3936, 64, false));
    now_ns_ += 1'000;
    if (i % 10 != 0) continue;
    const Datagram good{.bytes = 4000, .id = id};
    GiveNothing(good.Frame(0, 1480, true));
    GiveNothing(good.Frame(1480, 1480, true));
    ExpectIs(good, Give(good.Frame(2960, 1040, false)));
  }
  EXPECT_EQ(counters().reassembled, 2000u);
  ExpectPagesHeld(0);
}

TEST_F(ReassemblerTest, DropsWhatHoldsPagesOfABindingThatGoes) {
  auto other = Pool(64);
  const Datagram mixed{.bytes = 2400, .id = 1}, stays{.bytes = 2400, .id = 2},
      small{.bytes = 300, .id = 3};
  GiveNothing(mixed.Frame(0, 800, true));
  EXPECT_EQ(GiveFrom(*other, mixed.Frame(800, 800, true)), nullptr);
  GiveNothing(stays.Frame(0, 800, true));
  GiveNothing(stays.Frame(800, 800, true));
  EXPECT_EQ(GiveFrom(*other, small.Frame(0, 200, true)), nullptr);

  reassembler_->DropIf([&](const rte_mempool* pool) { return pool == other->mempool(); });

  EXPECT_EQ(other->pages().available(), 64u);
  EXPECT_EQ(reassembler_->datagrams(), 2u);
  ExpectPagesHeld(2);
  ExpectIs(stays, Give(stays.Frame(1600, 800, false)));
  ExpectIs(small, Give(small.Frame(200, 100, false)));
}

TEST_F(ReassemblerTest, ItsEndGivesEverythingBack) {
  for (std::uint16_t id = 0; id < 1000; id++) {
    GiveNothing(Datagram{.bytes = 4000, .id = id}.Frame(800, 800, true));
    GiveNothing(Datagram{.bytes = 4000, .id = id}.Frame(0, 200, true));
  }
  reassembler_.reset();
  EXPECT_EQ(pool_->pages().available(), kPages);
}

// ---- against a model ---------------------------------------------------------------------------

// What a datagram's fragments do, without limits.
struct ModelDatagram {
  std::map<std::uint32_t, std::uint32_t> parts = {};  // offset, length
  std::uint32_t total = 0;
  bool dropped = false;
};

class ModelTest : public ReassemblerTest {
 protected:
  // Returns whether the datagram is complete, and counts.
  bool Expect(ModelDatagram& model, std::uint32_t offset, std::uint32_t length, bool more) {
    const std::uint32_t end = offset + length;
    if (model.dropped) return expected_.discarded++, false;
    const std::uint32_t last =
        model.parts.empty() ? 0 : model.parts.rbegin()->first + model.parts.rbegin()->second;
    if (model.parts.size() == Reassembler::kMaxFragments ||
        (model.total != 0 && end > model.total) ||
        (!more && (model.total != 0 ? end != model.total : end < last))) {
      model = {.dropped = true};
      return expected_.invalid++, false;
    }
    const auto same = model.parts.find(offset);
    if (same != model.parts.end() && same->second == length) return expected_.duplicates++, false;
    for (const auto& [start, bytes] : model.parts) {
      if (start >= end || start + bytes <= offset) continue;
      model = {.dropped = true};
      return expected_.overlap++, false;
    }
    model.parts[offset] = length;
    if (!more) model.total = end;
    std::uint32_t sum = 0;
    for (const auto& [start, bytes] : model.parts) sum += bytes;
    return sum == model.total;
  }
  Reassembler::Counters expected_;
};

TEST_F(ModelTest, AMillionFragmentsAreTreatedAsTheModelSays) {
  const std::uint32_t fragments = kSanitized ? 200'000 : 1'000'000;
  constexpr std::uint32_t kIds = 128;
  std::mt19937 random(4);
  std::map<std::uint32_t, ModelDatagram> model;
  for (std::uint32_t i = 0; i < fragments; i++) {
    const std::uint32_t id = random() % kIds;
    const bool v6 = id % 2 == 1;
    const std::uint32_t unit = id % 4 < 2 ? 16 : 264;  // small ones, and not
    const std::uint32_t parts = 2 + id % 9;
    const Datagram datagram{.bytes = parts * unit - 5,
                            .id = static_cast<std::uint16_t>(id),
                            .v6 = v6,
                            .vlan = static_cast<std::uint16_t>(id % 8 == 0 ? 3 : 0)};
    std::uint32_t offset = random() % parts * unit;
    std::uint32_t length = unit;
    if (random() % 64 == 0) length += 8 * (random() % 3);  // perhaps into the next
    if (random() % 64 == 0) offset += 8;
    bool more = offset + length < datagram.bytes;
    if (!more && offset < datagram.bytes) length = datagram.bytes - offset;
    if (random() % 256 == 0) more = !more;
    if (offset == 0) more = true;  // else it would be no fragment
    if (more) length = (length + 7) / 8 * 8;

    const bool complete = Expect(model[id], offset, length, more);
    rte_mbuf* const whole =
        Give(datagram.Frame(offset, length, more), random() % 8 == 0 ? 100 : 1600);
    ASSERT_EQ(whole != nullptr, complete) << "fragment " << i;
    if (complete) {
      expected_.reassembled++;
      const std::uint32_t total = model[id].total;
      model.erase(id);
      if (total == datagram.bytes) {
        ExpectIs(datagram, whole);
      } else {
        FreeChain(whole);  // whole as its fragments said, though not as its UDP header does
      }
    }
    ASSERT_EQ(counters().duplicates, expected_.duplicates) << "fragment " << i;
    ASSERT_EQ(counters().overlap, expected_.overlap) << "fragment " << i;
    ASSERT_EQ(counters().invalid, expected_.invalid) << "fragment " << i;
    ASSERT_EQ(counters().discarded, expected_.discarded) << "fragment " << i;
    ASSERT_EQ(pool_->pages().available(), kPages - reassembler_->pages());
    if (random() % 2000 == 0) {
      now_ns_ += 1100 * kMs;
      for (const auto& [key, old] : model) expected_.timed_out += !old.dropped;
      model.clear();
      ExpireAll();
      ASSERT_EQ(counters().timed_out, expected_.timed_out);
      ExpectPagesHeld(0);
    }
  }
  EXPECT_EQ(counters().reassembled, expected_.reassembled);
  EXPECT_EQ(counters().fragments, fragments);
  EXPECT_GT(expected_.reassembled, fragments / 20);
  EXPECT_GT(expected_.duplicates, fragments / 20);
  EXPECT_GT(expected_.overlap, 100u);
  EXPECT_GT(expected_.invalid, 100u);
  EXPECT_EQ(counters().evicted + counters().over_budget + counters().no_page, 0u);
}

TEST_F(ReassemblerTest, AMillionFragmentsNeverGetTheTableOverItsLimits) {
  const std::uint32_t fragments = kSanitized ? 200'000 : 1'000'000;
  Use({.datagrams = 64, .pages = 150, .cells = 100, .timeout_ns = 10 * kMs});
  std::mt19937 random(5);
  std::uint64_t completed = 0;
  for (std::uint32_t i = 0; i < fragments; i++) {
    if (i % 64 == 0) limit_ = 80 + random() % 100;
    const std::uint32_t id = random() % 100;
    const std::uint32_t unit = id % 3 == 0 ? 16 : 264;
    const std::uint32_t parts = 2 + id % 5;
    const Datagram datagram{
        .bytes = parts * unit - 3, .id = static_cast<std::uint16_t>(id), .v6 = id % 2 == 0};
    const std::uint32_t offset = random() % parts * unit;
    const std::uint32_t length = std::min(unit, datagram.bytes - offset);
    // Lowering the limit does not drop anything by itself.
    const std::uint32_t before = reassembler_->pages();
    const Bytes frame = datagram.Frame(offset, length, offset + length < datagram.bytes);
    rte_mbuf* const mbuf = Receive(frame, random() % 16 == 0 ? 90 : 1600, *pool_);
    ParsedFrame parsed;
    ASSERT_EQ(ParseFrame(rte_pktmbuf_mtod(mbuf, const std::uint8_t*), mbuf->data_len, mbuf->pkt_len,
                         parsed),
              ParseStatus::kOk);
    rte_mbuf* const whole = reassembler_->Add(mbuf, parsed, 0, now_ns_, limit_);
    ASSERT_LE(reassembler_->pages(), std::max(before, limit_));
    ASSERT_LE(reassembler_->pages(), 150u);
    ASSERT_LE(reassembler_->cells(), 100u);
    ASSERT_LE(reassembler_->datagrams(), 64u);
    if (whole != nullptr) {
      completed++;
      ExpectIs(datagram, whole);
    }
    ASSERT_EQ(pool_->pages().available(), kPages - reassembler_->pages());
    now_ns_ += random() % 20'000;
    reassembler_->Expire(now_ns_);
  }
  EXPECT_EQ(counters().reassembled, completed);
  EXPECT_GT(completed, fragments / 50);
  EXPECT_GT(counters().evicted, 0u);
  EXPECT_GT(counters().over_budget, 0u);
  EXPECT_GT(counters().timed_out, 0u);
}

}  // namespace
}  // namespace rxtoken
