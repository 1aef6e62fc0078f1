// SPDX-License-Identifier: Apache-2.0
// reassembly.cc - what is left of good datagrams under a flood of fragments.
//
// Question:  how many datagrams does the reassembly table complete while others fill it with
//            fragments that never will be whole, what does a fragment cost then, how many pages
//            does the flood hold, and how long does it hurt after its end?
// Baselines: rte_ip_frag of DPDK, small and large, with short and long timeouts: the same stream,
//            the same mbufs. Linux, as it comes: the same stream through a tap, one after the
//            other as fast as it takes them, so that its 30 s pass more slowly than for others;
//            its time is that of a write to the tap, with the system call.
// What would change our mind: less than 99 % at ten times the good traffic, 95 % at fifty times,
//            90 % with fragments 2 ms apart or under a flood of two fragments each; more than
//            120 ns; more than 10 ms.
//
// usage: bench_reassembly [--smoke]
//
// Linux is left out, with a word why, without the rights to make a network namespace and a tap.
//
// The clock is simulated, the calls are real. Good traffic is 150 000 fragments a second; flood
// fragments carry as much as good ones do, since those hold pages (except `tiny`). They flood for
// 0.2 s; good traffic goes on for 1.1 s. A time is the median of bursts of 32 during the flood, of
// frames whose headers were parsed; of five rounds the median, least and most. Of the rest, the
// worst. `known key`: the flood is made for the table's hash key, and aims at the buckets of all
// good datagrams; so it is in `aimed` for all, but they have other keys.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <rte_cycles.h>
#include <rte_ether.h>
#include <rte_ip.h>
#include <rte_ip_frag.h>
#include <rte_mbuf.h>
#include <rte_udp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dataplane/buffer_pool.h"
#include "dataplane/dataplane.h"
#include "dataplane/eal.h"
#include "dataplane/parse.h"
#include "dataplane/reassembler.h"
#include "dataplane/sip_hash.h"
#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint32_t kPages = 128 << 10;
constexpr std::uint32_t kBurst = 32;
constexpr std::uint32_t kGoodPerSecond = 150'000;  // fragments
constexpr std::uint32_t kDataBytes = 1480;
constexpr std::uint32_t kDestination = RTE_BE32(0x0a000002);
constexpr std::array<std::uint64_t, 2> kKnownKey = {0x0123456789abcdef, 0xfedcba9876543210};

[[noreturn]] void Die(std::string_view why) {
  std::fprintf(stderr, "%.*s\n", static_cast<int>(why.size()), why.data());
  std::exit(1);
}

// ---- traffic ---------------------------------------------------------------------------------

enum class Flood { kNone, kRandom, kTwoFragments, kTiny, kAimed };

struct Case {
  const char* name;
  std::uint32_t fragments;  // of a good datagram
  std::uint64_t spread_ns;  // in which its fragments arrive, in any order; 0: back to back
  std::uint32_t times;      // flood fragments for each good one
  Flood flood;
};

constexpr Case kCases[] = {
    {"3 fragments, no flood", 3, 0, 0, Flood::kNone},
    {"3, 10x", 3, 0, 10, Flood::kRandom},
    {"3, 10x tiny", 3, 0, 10, Flood::kTiny},
    {"3, 50x", 3, 0, 50, Flood::kRandom},
    {"3 within 2 ms, 10x", 3, 2 * kMs, 10, Flood::kRandom},
    {"3 within 0.2 ms, 10x of two", 3, kMs / 5, 10, Flood::kTwoFragments},
    {"44, no flood", 44, 0, 0, Flood::kNone},
    {"44, 10x", 44, 0, 10, Flood::kRandom},
    {"44, 50x", 44, 0, 50, Flood::kRandom},
    {"3 within 0.2 ms, 10x aimed", 3, kMs / 5, 10, Flood::kAimed},
};

struct Piece {
  std::uint64_t time_ns;
  std::uint32_t source;
  std::uint16_t id;
  std::uint16_t offset;
  std::uint16_t bytes;
  bool more;
  std::int32_t datagram;  // negative: flood
};

struct Stream {
  std::vector<Piece> pieces;             // by time
  std::vector<std::uint64_t> datagrams;  // when the first piece of each is due
  std::uint64_t flood_end_ns;
};

// Whether a datagram is in one of 16 of 512 buckets if the key is kKnownKey.
bool Aimed(std::uint32_t source, std::uint16_t id) {
  SipHash<1, 3> hash(kKnownKey);
  hash.Add(source | std::uint64_t{kDestination} << 32);
  hash.Add(FlowKey::PortsWord(0, 0, 17, IpFamily::kV4, 0) | id);
  return hash.Finish(std::uint64_t{20} << 56) % 512 < 16;
}

Stream Make(const Case& c, std::uint64_t flood_ns, std::uint64_t after_ns) {
  std::mt19937 random(1);
  Stream stream{.pieces = {}, .datagrams = {}, .flood_end_ns = flood_ns};
  const std::uint64_t every_ns = 1'000'000'000ull * c.fragments / kGoodPerSecond;
  std::uint16_t id = 0;
  for (std::uint64_t at = 0; at < flood_ns + after_ns; at += every_ns) {
    const std::uint32_t source = rte_cpu_to_be_32(0x0a000100 + random() % 64);
    do id += 7;
    while (c.flood == Flood::kAimed && !Aimed(source, id));
    const auto datagram = static_cast<std::int32_t>(stream.datagrams.size());
    stream.datagrams.push_back(at);
    for (std::uint32_t i = 0; i < c.fragments; i++) {
      const bool more = i + 1 != c.fragments;
      const std::uint64_t delay = c.spread_ns == 0 ? i * 1200 : random() % c.spread_ns;
      stream.pieces.push_back({.time_ns = at + delay,
                               .source = source,
                               .id = id,
                               .offset = static_cast<std::uint16_t>(i * kDataBytes),
                               .bytes = static_cast<std::uint16_t>(more ? kDataBytes : 1000),
                               .more = more,
                               .datagram = datagram});
    }
  }
  const double gap_ns = c.times == 0 ? 0 : 1e9 / kGoodPerSecond / c.times;
  for (double at = 0; c.times != 0 && at < static_cast<double>(flood_ns); at += gap_ns) {
    Piece piece{.time_ns = static_cast<std::uint64_t>(at),
                .source = 0,
                .id = 0,
                .offset = 0,
                .bytes = c.flood == Flood::kTiny ? std::uint16_t{24} : std::uint16_t{kDataBytes},
                .more = true,
                .datagram = -1};
    do {
      piece.source = rte_cpu_to_be_32(0x0b000000 | (random() & 0xFFFFFF));
      piece.id = static_cast<std::uint16_t>(random());
    } while (c.flood == Flood::kAimed && !Aimed(piece.source, piece.id));
    stream.pieces.push_back(piece);
    if (c.flood != Flood::kTwoFragments) continue;
    at += gap_ns;
    piece.offset = piece.bytes;
    piece.time_ns += 100;
    stream.pieces.push_back(piece);
  }
  std::stable_sort(stream.pieces.begin(), stream.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.time_ns < b.time_ns; });
  return stream;
}

constexpr std::uint32_t kHeaderBytes = sizeof(rte_ether_hdr) + sizeof(rte_ipv4_hdr);

void WriteHeaders(const Piece& piece, std::uint8_t* frame) {
  std::memset(frame, 0, kHeaderBytes);
  frame[12] = 0x08;
  auto* const ip = reinterpret_cast<rte_ipv4_hdr*>(frame + sizeof(rte_ether_hdr));
  ip->version_ihl = 0x45;
  ip->total_length = rte_cpu_to_be_16(static_cast<std::uint16_t>(sizeof *ip + piece.bytes));
  ip->packet_id = rte_cpu_to_be_16(piece.id);
  ip->fragment_offset =
      rte_cpu_to_be_16(static_cast<std::uint16_t>(piece.offset / 8 | (piece.more ? 0x2000 : 0)));
  ip->time_to_live = 64;
  ip->next_proto_id = 17;
  ip->src_addr = piece.source;
  ip->dst_addr = kDestination;
}

rte_mbuf* Receive(BufferPool& pool, const Piece& piece) {
  rte_mbuf* const mbuf = rte_pktmbuf_alloc(pool.mempool());
  if (mbuf == nullptr) return nullptr;
  auto* const frame = reinterpret_cast<std::uint8_t*>(
      rte_pktmbuf_append(mbuf, static_cast<std::uint16_t>(kHeaderBytes + piece.bytes)));
  WriteHeaders(piece, frame);
  mbuf->l2_len = sizeof(rte_ether_hdr);
  mbuf->l3_len = sizeof(rte_ipv4_hdr);
  // So that we know which one comes out.
  std::memcpy(frame, &piece.datagram, sizeof piece.datagram);
  return mbuf;
}

// ---- tables ------------------------------------------------------------------------------------

class Ours {
 public:
  Ours(std::uint32_t datagrams, bool known_key)
      : table_({.datagrams = datagrams,
                .pages = 2 * datagrams,
                .cells = 2 * datagrams,
                .hash_key = known_key ? std::optional(kKnownKey) : std::nullopt},
               Free) {
    if (!table_.ok()) Die("no memory");
  }
  void Parse(std::span<rte_mbuf* const> frames) {
    for (std::size_t i = 0; i < frames.size(); i++) {
      ParseFrame(rte_pktmbuf_mtod(frames[i], const std::uint8_t*), frames[i]->data_len,
                 frames[i]->pkt_len, parsed_[i]);
    }
  }
  std::size_t AddBurst(std::span<rte_mbuf* const> frames, const Piece* pieces, rte_mbuf** whole) {
    // As a worker does: a bucket is fetched first, then what it says.
    constexpr std::size_t kAhead = 4;
    std::array<std::uint64_t, kBurst> hashes;
    std::size_t done = 0;
    for (std::size_t i = 0; i < frames.size() + 2 * kAhead; i++) {
      if (i < frames.size()) hashes[i] = table_.FetchBucket(parsed_[i], 0);
      if (i >= kAhead && i - kAhead < frames.size()) table_.FetchEntry(hashes[i - kAhead]);
      if (i < 2 * kAhead) continue;
      const std::size_t at = i - 2 * kAhead;
      rte_mbuf* const datagram =
          table_.Add(frames[at], parsed_[at], 0, hashes[at], kMs + pieces[at].time_ns, kPages);
      if (datagram != nullptr) whole[done++] = datagram;
    }
    return done;
  }
  void EndBurst(std::uint64_t now_ns) { table_.Expire(now_ns); }

 private:
  // As a worker does.
  static void Free(rte_mbuf* mbuf) {
    BufferPool* const pool = BufferPool::Of(mbuf->pool);
    pool->EndFrame(pool->PageOf(mbuf->buf_addr));
  }

  Reassembler table_;
  std::array<ParsedFrame, kBurst> parsed_;
};

class RteIpFrag {
 public:
  RteIpFrag(std::uint32_t entries, std::uint64_t timeout_ns)
      : table_(
            rte_ip_frag_table_create(entries / kWays, kWays, entries, timeout_ns, SOCKET_ID_ANY)) {
    if (table_ == nullptr) Die("rte_ip_frag_table_create fails");
    death_row_.cnt = 0;
  }
  ~RteIpFrag() { rte_ip_frag_table_destroy(table_); }
  void Parse(std::span<rte_mbuf* const>) {}  // the mbufs say where headers are
  std::size_t AddBurst(std::span<rte_mbuf* const> frames, const Piece* pieces, rte_mbuf** whole) {
    std::size_t done = 0;
    for (std::size_t i = 0; i < frames.size(); i++) {
      rte_mbuf* const datagram = rte_ipv4_frag_reassemble_packet(
          table_, &death_row_, frames[i], kMs + pieces[i].time_ns,
          rte_pktmbuf_mtod_offset(frames[i], rte_ipv4_hdr*, sizeof(rte_ether_hdr)));
      if (datagram != nullptr) whole[done++] = datagram;
    }
    return done;
  }
  void EndBurst(std::uint64_t) { rte_ip_frag_free_death_row(&death_row_, 0); }

 private:
  static constexpr std::uint32_t kWays = 16;

  rte_ip_frag_tbl* table_;
  rte_ip_frag_death_row death_row_;
};

// ---- measuring -------------------------------------------------------------------------------

struct Figures {
  double goodput;       // percent, of those sent during the flood
  double ns;            // a fragment, during the flood
  std::uint32_t pages;  // most that were held
  double recovery_ms;   // after the flood's end, when the last one that was lost was sent
};

Figures Judge(const Stream& stream, const std::vector<bool>& complete) {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t last_lost_ns = 0;
  for (std::size_t i = 0; i < complete.size(); i++) {
    if (stream.datagrams[i] < stream.flood_end_ns) {
      sent++;
      received += complete[i];
    } else if (!complete[i]) {
      last_lost_ns = stream.datagrams[i] - stream.flood_end_ns;
    }
  }
  return {.goodput = 100.0 * static_cast<double>(received) / static_cast<double>(sent),
          .ns = 0,
          .pages = 0,
          .recovery_ms = static_cast<double>(last_lost_ns) / kMs};
}

double MedianNs(std::vector<std::uint64_t>& cycles) {
  const auto median = cycles.begin() + static_cast<std::ptrdiff_t>(cycles.size() / 2);
  std::nth_element(cycles.begin(), median, cycles.end());
  return static_cast<double>(*median) * 1e9 / static_cast<double>(rte_get_tsc_hz()) / kBurst;
}

template <typename Table>
Figures Measure(Table table, BufferPool& pool, const Stream& stream) {
  std::vector<bool> complete(stream.datagrams.size());
  std::vector<std::uint64_t> cycles;  // of each burst in the flood
  std::uint32_t pages = 0;
  for (std::size_t at = 0; at < stream.pieces.size(); at += kBurst) {
    std::size_t n = std::min<std::size_t>(kBurst, stream.pieces.size() - at);
    const Piece* const pieces = &stream.pieces[at];
    std::array<rte_mbuf*, kBurst> frames, whole;
    for (std::size_t i = 0; i < n; i++) frames[i] = Receive(pool, pieces[i]);
    // Without a page the rest of a burst is lost.
    n = static_cast<std::size_t>(std::find(frames.begin(), frames.begin() + n, nullptr) -
                                 frames.begin());
    if (n == 0) continue;
    table->Parse({frames.data(), n});
    const std::uint64_t start = rte_rdtsc();
    const std::size_t done = table->AddBurst({frames.data(), n}, pieces, whole.data());
    table->EndBurst(kMs + pieces[n - 1].time_ns);
    if (n == kBurst && pieces[n - 1].time_ns < stream.flood_end_ns)
      cycles.push_back(rte_rdtsc() - start);
    for (std::size_t i = 0; i < done; i++) {
      std::int32_t datagram;
      std::memcpy(&datagram, rte_pktmbuf_mtod(whole[i], const void*), sizeof datagram);
      complete[static_cast<std::size_t>(datagram)] = true;
      rte_pktmbuf_free(whole[i]);
    }
    pages = std::max(pages, kPages - pool.pages().available());
  }
  Figures figures = Judge(stream, complete);
  figures.ns = MedianNs(cycles);
  figures.pages = pages;
  return figures;
}

// ---- Linux -----------------------------------------------------------------------------------

// A tap in a network namespace of this thread's own, and a UDP socket.
class Kernel {
 public:
  static constexpr std::uint16_t kPort = 5000;

  // False: errno says why there is none.
  bool Open() {
    if (::unshare(CLONE_NEWNET) != 0) return false;
    tap_ = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    socket_ = ::socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (tap_ < 0 || socket_ < 0) return false;
    ifreq request{};
    std::strcpy(request.ifr_name, "tap0");
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    if (::ioctl(tap_, TUNSETIFF, &request) != 0) return false;
    if (::ioctl(socket_, SIOCGIFHWADDR, &request) != 0) return false;
    std::memcpy(mac_.data(), request.ifr_hwaddr.sa_data, mac_.size());
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = kDestination;
    std::memcpy(&request.ifr_addr, &address, sizeof address);
    if (::ioctl(socket_, SIOCSIFADDR, &request) != 0) return false;
    request.ifr_flags = IFF_UP;
    if (::ioctl(socket_, SIOCSIFFLAGS, &request) != 0) return false;
    address.sin_port = rte_cpu_to_be_16(kPort);
    const int bytes = 64 << 20;
    return ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes) == 0 &&
           ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  ~Kernel() {
    ::close(tap_);
    ::close(socket_);
  }

  void Send(const Piece& piece, std::uint16_t udp_bytes) {
    std::array<std::uint8_t, kHeaderBytes + kDataBytes> frame;
    WriteHeaders(piece, frame.data());
    std::copy(mac_.begin(), mac_.end(), frame.begin());
    auto* const ip = reinterpret_cast<rte_ipv4_hdr*>(frame.data() + sizeof(rte_ether_hdr));
    ip->hdr_checksum = rte_ipv4_cksum(ip);
    if (piece.offset == 0) {
      const rte_udp_hdr udp = {.src_port = 0,
                               .dst_port = rte_cpu_to_be_16(kPort),
                               .dgram_len = rte_cpu_to_be_16(udp_bytes),
                               .dgram_cksum = 0};
      std::memcpy(ip + 1, &udp, sizeof udp);
      std::memcpy(frame.data() + kHeaderBytes + sizeof udp, &piece.datagram, sizeof piece.datagram);
    }
    if (::write(tap_, frame.data(), kHeaderBytes + piece.bytes) < 0) Die("write to the tap fails");
  }

  void Receive(std::vector<bool>& complete) {
    std::int32_t datagram;
    while (::recv(socket_, &datagram, sizeof datagram, MSG_TRUNC) > 0) {
      complete[static_cast<std::size_t>(datagram)] = true;
    }
  }

 private:
  int tap_ = -1;
  int socket_ = -1;
  std::array<std::uint8_t, 6> mac_ = {};
};

// In a thread of its own, whose namespace goes with it.
Figures KernelRun(BufferPool&, const Stream& stream) {
  Figures figures;
  std::thread([&] {
    Kernel kernel;
    if (!kernel.Open()) Die(std::string("no tap: ") + std::strerror(errno));
    // The last piece by offset says how long a datagram is.
    std::vector<std::uint16_t> udp_bytes(stream.datagrams.size());
    for (const Piece& piece : stream.pieces) {
      if (piece.datagram >= 0 && !piece.more) {
        udp_bytes[static_cast<std::size_t>(piece.datagram)] =
            static_cast<std::uint16_t>(piece.offset + piece.bytes);
      }
    }
    std::vector<bool> complete(stream.datagrams.size());
    std::vector<std::uint64_t> cycles;
    for (std::size_t at = 0; at < stream.pieces.size(); at += kBurst) {
      const std::size_t n = std::min<std::size_t>(kBurst, stream.pieces.size() - at);
      const std::uint64_t start = rte_rdtsc();
      for (const Piece& piece : std::span(stream.pieces).subspan(at, n)) {
        kernel.Send(piece, piece.datagram < 0
                               ? std::uint16_t{2 * kDataBytes}
                               : udp_bytes[static_cast<std::size_t>(piece.datagram)]);
      }
      if (n == kBurst && stream.pieces[at].time_ns < stream.flood_end_ns)
        cycles.push_back(rte_rdtsc() - start);
      kernel.Receive(complete);
    }
    figures = Judge(stream, complete);
    figures.ns = MedianNs(cycles);
  }).join();
  return figures;
}

// Why the kernel's reassembly cannot be measured; empty if it can be.
std::string WhyNoKernel() {
  std::string why;
  std::thread([&] {
    if (!Kernel().Open()) why = std::strerror(errno);
  }).join();
  return why;
}

using Run = std::function<Figures(BufferPool&, const Stream&)>;
struct Column {
  const char* name;
  Run run;
};

Run OursRun(std::uint32_t datagrams, bool known_key = false) {
  return [=](BufferPool& pool, const Stream& stream) {
    return Measure(std::make_unique<Ours>(datagrams, known_key), pool, stream);
  };
}
Run RteRun(std::uint32_t entries, std::uint64_t timeout_ns) {
  return [=](BufferPool& pool, const Stream& stream) {
    return Measure(std::make_unique<RteIpFrag>(entries, timeout_ns), pool, stream);
  };
}

int Main(int argc, char** argv) {
  const bool smoke = argc == 2 && std::string_view(argv[1]) == "--smoke";
  if (argc > 1 && !smoke) Die("usage: bench_reassembly [--smoke]");
  const Status status = StartEal(DataplaneOptions());
  if (!status.ok()) Die(status.message());
  this_worker = 0;
  auto buffer = Buffer::Create("frames", std::uint64_t{kPages} * 2048, 2048, Memory::kPlain);
  if (!buffer.ok()) Die(buffer.status().message());
  auto pool = BufferPool::Create(std::move(*buffer), 1);
  if (!pool.ok()) Die(pool.status().message());

  std::vector<Column> columns = {
      {"rte 4096, 1 s", RteRun(4096, 1000 * kMs)},
      {"rte 4096, 10 ms", RteRun(4096, 10 * kMs)},
      {"rte 65536, 1 s", RteRun(65536, 1000 * kMs)},
      {"rte 65536, 10 ms", RteRun(65536, 10 * kMs)},
      {"ours 4096, 1 s", OursRun(4096)},
      {"ours 16384, 1 s", OursRun(16384)},
      {"known key 4096, 1 s", OursRun(4096, true)},
  };
  if (const std::string why = WhyNoKernel(); why.empty()) {
    columns.push_back({"Linux", KernelRun});
  } else {
    std::fprintf(stderr, "Linux is left out, there is no tap: %s\n", why.c_str());
  }
  // All take turns, so that what else the machine does hits all.
  std::vector<std::vector<Figures>> figures[std::size(kCases)];
  for (auto& row : figures) row.resize(columns.size());
  for (std::uint32_t round = 0; round < (smoke ? 1u : 5u); round++) {
    for (std::size_t row = 0; row < std::size(kCases); row++) {
      const Stream stream =
          smoke ? Make(kCases[row], 4 * kMs, 4 * kMs) : Make(kCases[row], 200 * kMs, 1100 * kMs);
      for (std::size_t i = 0; i < columns.size(); i++) {
        figures[row][i].push_back(columns[i].run(**pool, stream));
        if ((*pool)->pages().available() != kPages) {
          Die(std::string(columns[i].name) + " keeps mbufs");
        }
      }
    }
  }
  const auto print = [&](const char* what, auto value, auto cell) {
    std::printf("\n| %s |", what);
    for (const Column& column : columns) std::printf(" %s |", column.name);
    std::printf("\n|---|");
    for (std::size_t i = 0; i < columns.size(); i++) std::printf("---:|");
    std::printf("\n");
    for (std::size_t row = 0; row < std::size(kCases); row++) {
      std::printf("| %s |", kCases[row].name);
      for (std::vector<Figures>& rounds : figures[row]) {
        std::sort(rounds.begin(), rounds.end(),
                  [&](const Figures& a, const Figures& b) { return a.*value < b.*value; });
        cell(rounds);
      }
      std::printf("\n");
    }
  };
  using Rounds = std::vector<Figures>;
  print("goodput, %", &Figures::goodput,
        [](const Rounds& rounds) { std::printf(" %.2f |", rounds.front().goodput); });
  print("ns for a fragment", &Figures::ns, [](const Rounds& rounds) {
    std::printf(" %.0f (%.0f-%.0f) |", rounds[rounds.size() / 2].ns, rounds.front().ns,
                rounds.back().ns);
  });
  // Linux counts bytes of its own.
  print("pages held at most", &Figures::pages, [](const Rounds& rounds) {
    if (rounds.back().pages == 0) {
      std::printf(" |");
    } else {
      std::printf(" %u |", rounds.back().pages);
    }
  });
  print("ms to recover", &Figures::recovery_ms,
        [](const Rounds& rounds) { std::printf(" %.1f |", rounds.back().recovery_ms); });
  (*pool).reset();
  StopEal();
  return 0;
}

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) { return rxtoken::Main(argc, argv); }
