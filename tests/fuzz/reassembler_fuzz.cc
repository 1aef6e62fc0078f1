// SPDX-License-Identifier: Apache-2.0
// reassembler_fuzz.cc - frames from the wire through the parser into a small reassembly table.
//
// Input: records of six bytes, kind, id, offset / 8, length, cut, time. A record makes a fragment
// of a datagram whose bytes follow from its id and their place, so that what comes out can be
// checked; or, of kind kRaw, `length` bytes that follow are a frame as they are.

#include <rte_mempool.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "dataplane/dataplane.h"
#include "dataplane/eal.h"
#include "dataplane/parse.h"
#include "dataplane/reassembler.h"

namespace {

using namespace rxtoken;

enum Kind : std::uint8_t {
  kV6 = 1,
  kMore = 2,
  kRaw = 4,
  kLong = 8,  // 8 * length bytes
  kOptions = 16,
  kPadded = 32,
};

void Require(bool condition) {
  if (!condition) std::abort();
}

// A page of exactly the bytes that it carries: the address sanitizer sees what is read past it.
struct Page {
  alignas(64) rte_mbuf mbuf = {};
  std::unique_ptr<std::uint8_t[]> bytes;
};
constexpr std::uint16_t kOurs = 1;  // in rte_mbuf::port; what the table allocates has another

int pages_out = 0;
rte_mempool* pool;

void Free(rte_mbuf* mbuf) {
  Require(mbuf->next == nullptr && mbuf->nb_segs == 1);
  if (mbuf->port != kOurs) return rte_pktmbuf_free(mbuf);
  delete reinterpret_cast<Page*>(mbuf);
  pages_out--;
}

rte_mbuf* Receive(const std::vector<std::uint8_t>& frame, std::size_t cut) {
  rte_mbuf* head = nullptr;
  rte_mbuf** link = &head;
  std::size_t at = 0;
  do {
    const std::size_t bytes = std::min(cut, frame.size() - at);
    auto* const page = new Page;
    pages_out++;
    page->bytes.reset(new std::uint8_t[bytes]);
    std::copy_n(frame.begin() + static_cast<std::ptrdiff_t>(at), bytes, page->bytes.get());
    rte_mbuf* const mbuf = &page->mbuf;
    mbuf->buf_addr = page->bytes.get();
    mbuf->buf_len = mbuf->data_len = static_cast<std::uint16_t>(bytes);
    mbuf->port = kOurs;
    mbuf->pool = pool;
    mbuf->nb_segs = 1;
    *link = mbuf;
    link = &mbuf->next;
    if (mbuf != head) head->nb_segs++;
    at += bytes;
  } while (at < frame.size());
  head->pkt_len = static_cast<std::uint32_t>(frame.size());
  return head;
}

std::uint8_t ByteOf(std::uint8_t id, std::size_t place) {
  return static_cast<std::uint8_t>(id * 31u + place * 7 + place / 256);
}

void Append16(std::vector<std::uint8_t>& frame, std::size_t value) {
  frame.push_back(static_cast<std::uint8_t>(value >> 8));
  frame.push_back(static_cast<std::uint8_t>(value));
}

// Protocol 253: nothing looks into what it carries.
std::vector<std::uint8_t> Fragment(std::uint8_t kind, std::uint8_t id, std::size_t offset,
                                   std::size_t length) {
  std::vector<std::uint8_t> frame(12, 2);
  const std::size_t options = (kind & kOptions) != 0 ? 8 : 0;
  const std::size_t more = (kind & kMore) != 0 ? 1 : 0;
  if ((kind & kV6) != 0) {
    Append16(frame, 0x86DD);
    frame.insert(frame.end(), {0x60, 0, 0, 0});
    Append16(frame, options + 8 + length);
    frame.insert(frame.end(), {static_cast<std::uint8_t>(options != 0 ? 60 : 44), 64});
    frame.insert(frame.end(), 32, 0xFD);
    if (options != 0) frame.insert(frame.end(), {44, 0, 0, 0, 0, 0, 0, 0});
    frame.insert(frame.end(), {253, 0});
    Append16(frame, offset | more);
    frame.insert(frame.end(), {0, 0, 0, id});
  } else {
    Append16(frame, 0x0800);
    frame.insert(frame.end(), {static_cast<std::uint8_t>(0x45 + options / 4), 0});
    Append16(frame, 20 + options + length);
    frame.insert(frame.end(), {0, id});
    Append16(frame, offset / 8 | more << 13);
    frame.insert(frame.end(), {64, 253, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2});
    frame.insert(frame.end(), options, 1);
  }
  for (std::size_t i = 0; i < length; i++) frame.push_back(ByteOf(id, offset + i));
  return frame;
}

// Looks at a whole datagram, and frees it. `id` < 0: its bytes may be anything.
void Take(rte_mbuf* chain, int id) {
  std::vector<std::uint8_t> frame;
  std::uint32_t segments = 0;
  const std::uint32_t pkt_len = chain->pkt_len;
  const std::uint16_t nb_segs = chain->nb_segs;
  const std::uint32_t first = chain->data_len;
  for (rte_mbuf* mbuf = chain; mbuf != nullptr;) {
    Require(mbuf->data_off + mbuf->data_len <= mbuf->buf_len);
    const auto* const data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
    frame.insert(frame.end(), data, data + mbuf->data_len);
    segments++;
    rte_mbuf* const next = mbuf->next;
    mbuf->next = nullptr;
    mbuf->nb_segs = 1;
    Free(mbuf);
    mbuf = next;
  }
  Require(segments == nb_segs && frame.size() == pkt_len);
  ParsedFrame parsed = {};
  const ParseStatus status = ParseFrame(frame.data(), first, pkt_len, parsed);
  if (id < 0) return;
  Require(status == ParseStatus::kOk && !parsed.is_fragment);
  const bool v6 = parsed.key.family() == IpFamily::kV6;
  std::size_t at = 14 + (v6 ? 40u : (frame[14] & 0x0Fu) * 4);
  if (v6 && frame[20] == 60) at += 8;
  const std::size_t ip_bytes = parse_internal::Load16(&frame[v6 ? 18 : 16]) + (v6 ? 40u : 0u);
  Require(14 + ip_bytes == frame.size());
  for (std::size_t i = 0; at + i < frame.size(); i++) {
    Require(frame[at + i] == ByteOf(static_cast<std::uint8_t>(id), i));
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  Require(StartEal(DataplaneOptions()).ok());
  pool = rte_pktmbuf_pool_create("copies", 255, 0, 0, RTE_PKTMBUF_HEADROOM + 2048, SOCKET_ID_ANY);
  Require(pool != nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::uint32_t kPages = 24;
  {
    Reassembler table({.datagrams = 16,
                       .pages = kPages,
                       .cells = 64,
                       .timeout_ns = 10'000'000,
                       .hash_key = std::array<std::uint64_t, 2>{1, 2}},
                      Free);
    std::uint64_t now_ns = 0;
    while (size >= 6) {
      const std::uint8_t kind = data[0];
      const std::uint8_t id = data[1];
      const std::size_t cut = data[4] == 0 ? 2000 : data[4];
      std::size_t length = data[3];
      now_ns += data[5] * std::uint64_t{50'000};
      std::vector<std::uint8_t> frame;
      const std::size_t offset = data[2] * std::size_t{8};
      data += 6;
      size -= 6;
      if ((kind & kRaw) != 0) {
        length = std::min(length, size);
        frame.assign(data, data + length);
        data += length;
        size -= length;
      } else {
        frame = Fragment(kind, id, offset, (kind & kLong) != 0 ? length * 8 : length);
        if ((kind & kPadded) != 0) frame.resize(frame.size() + 50, 0xEE);
      }
      rte_mbuf* const mbuf = Receive(frame, cut);
      ParsedFrame parsed = {};
      const ParseStatus status = ParseFrame(rte_pktmbuf_mtod(mbuf, const std::uint8_t*),
                                            mbuf->data_len, mbuf->pkt_len, parsed);
      if (status != ParseStatus::kOk || !parsed.is_fragment) {
        for (rte_mbuf* segment = mbuf; segment != nullptr;) {
          rte_mbuf* const next = segment->next;
          segment->next = nullptr;
          segment->nb_segs = 1;
          Free(segment);
          segment = next;
        }
        continue;
      }
      const bool raw = (kind & kRaw) != 0;
      rte_mbuf* const whole = table.Add(mbuf, parsed, raw, now_ns, kPages);
      if (whole != nullptr) Take(whole, raw ? -1 : id);
      Require(table.pages() <= kPages && table.cells() <= 64 && table.datagrams() <= 16);
      Require(pages_out == static_cast<int>(table.pages()));
      table.Expire(now_ns);
    }
  }
  Require(pages_out == 0 && rte_mempool_avail_count(pool) == 255);
  return 0;
}
