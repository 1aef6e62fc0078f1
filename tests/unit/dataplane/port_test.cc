// SPDX-License-Identifier: Apache-2.0
#include "dataplane/port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "dataplane/buffer.h"
#include "tests/unit/dataplane/test_eal.h"

namespace rxtoken {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Frame = std::vector<std::uint8_t>;

constexpr auto kDeadline = std::chrono::seconds(20);

struct PoolDeleter {
  void operator()(rte_mempool* pool) const { rte_mempool_free(pool); }
};
using Pool = std::unique_ptr<rte_mempool, PoolDeleter>;

struct MbufDeleter {
  void operator()(rte_mbuf* mbuf) const { rte_pktmbuf_free(mbuf); }
};
using Mbuf = std::unique_ptr<rte_mbuf, MbufDeleter>;

Frame Bytes(const rte_mbuf* mbuf) {
  Frame bytes;
  for (; mbuf != nullptr; mbuf = mbuf->next) {
    const auto* data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
    bytes.insert(bytes.end(), data, data + mbuf->data_len);
  }
  return bytes;
}

Frame PatternFrame(std::size_t bytes, std::uint8_t seed) {
  Frame frame(bytes);
  for (std::size_t i = 0; i < bytes; ++i) frame[i] = static_cast<std::uint8_t>(seed + i * 7);
  return frame;
}

class PortTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(TestEal().ok()) << TestEal().message();
    std::string pattern = (std::filesystem::temp_directory_path() / "rxtoken-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override {
    std::error_code ignored;
    if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
  }

  static PortOptions Options(const std::string& device, std::uint32_t queues = 1,
                             std::uint32_t ring_entries = 512) {
    PortOptions options;
    options.name = "p0";
    options.device = device;
    options.queues = queues;
    options.ring_entries = ring_entries;
    return options;
  }
  static std::unique_ptr<Port> OpenPort(const PortOptions& options, std::uint32_t index = 0) {
    auto port = Port::Open(options, index);
    EXPECT_TRUE(port.ok()) << port.status().message();
    return port.ok() ? std::move(*port) : nullptr;
  }
  static std::unique_ptr<Port> OpenPort(const std::string& device, std::uint32_t queues = 1) {
    return OpenPort(Options(device, queues));
  }
  static Status OpenError(const PortOptions& options) { return Port::Open(options, 0).status(); }

  // A plain pool over a buffer: mbuf i receives into page i.
  static Pool MakePool(const Buffer& buffer, const char* name) {
    rte_pktmbuf_extmem memory = {};
    memory.buf_ptr = buffer.data();
    memory.buf_iova = reinterpret_cast<rte_iova_t>(buffer.data());
    memory.buf_len = buffer.bytes();
    memory.elt_size = static_cast<std::uint16_t>(buffer.page_bytes());
    return Pool(rte_pktmbuf_pool_create_extbuf(name, buffer.pages(), 0, 0, memory.elt_size,
                                               SOCKET_ID_ANY, &memory, 1));
  }
  static std::unique_ptr<Buffer> MakeBuffer(std::uint64_t bytes, std::uint32_t page_bytes) {
    auto buffer = Buffer::Create("b0", bytes, page_bytes, Memory::kPlain);
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    return buffer.ok() ? std::move(*buffer) : nullptr;
  }
  static bool Inside(const Buffer& buffer, const rte_mbuf* mbuf) {
    const auto* data = rte_pktmbuf_mtod(mbuf, const std::uint8_t*);
    return data >= buffer.data() && data + mbuf->data_len <= buffer.data() + buffer.bytes();
  }

  // The next frame of a queue; null if none comes.
  static Mbuf Receive(const Port& port, std::uint16_t queue = 0) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    rte_mbuf* mbuf = nullptr;
    while (rte_eth_rx_burst(port.id(), queue, &mbuf, 1) == 0) {
      if (std::chrono::steady_clock::now() > deadline) return nullptr;
    }
    return Mbuf(mbuf);
  }

  std::string WritePcap(const std::string& name, const std::vector<Frame>& frames) {
    const std::string path = directory_ / name;
    std::ofstream file(path, std::ios::binary);
    const auto word = [&file](std::uint32_t value) {
      file.write(reinterpret_cast<const char*>(&value), sizeof value);
    };
    for (std::uint32_t value : {0xA1B2C3D4u, 0x0004'0002u, 0u, 0u, 65535u, 1u}) word(value);
    for (const Frame& frame : frames) {
      const auto bytes = static_cast<std::uint32_t>(frame.size());
      for (std::uint32_t value : {0u, 0u, bytes, bytes}) word(value);
      file.write(reinterpret_cast<const char*>(frame.data()), bytes);
    }
    return path;
  }

  std::filesystem::path directory_;
};

TEST_F(PortTest, TellsWhatItIs) {
  const auto port = OpenPort("net_null0,size=64", 3);
  ASSERT_NE(port, nullptr);

  const PortInfo info = port->info();

  EXPECT_EQ(info.name, "p0");
  EXPECT_EQ(info.device, "net_null0,size=64");
  EXPECT_EQ(info.driver, "net_null");
  EXPECT_THAT(info.mac, testing::MatchesRegex("([0-9a-f]{2}:){5}[0-9a-f]{2}"));
  EXPECT_TRUE(info.link_up);
  EXPECT_EQ(info.ring_entries, 512u);
  EXPECT_EQ(info.queues.size(), 3u);
  EXPECT_EQ(info.rx_packets, 0u);
}

TEST_F(PortTest, KnowsWhetherTheCpuWritesThePayload) {
  EXPECT_FALSE(OpenPort("net_null0")->writes_payload());
  EXPECT_FALSE(OpenPort("net_null0,size=64,copy=0")->writes_payload());
  EXPECT_TRUE(OpenPort("net_null0,size=64,copy=1")->writes_payload());
  EXPECT_TRUE(OpenPort("net_pcap0,rx_pcap=" + WritePcap("a.pcap", {}))->writes_payload());
  EXPECT_FALSE(OpenPort("net_null0,copy=1")->dma());
}

TEST_F(PortTest, ReceivesIntoItsSinkUntilAQueueIsAttached) {
  const auto port = OpenPort("net_null0,size=64,copy=1", 2);
  const auto buffer = MakeBuffer(1 << 22, 4096);
  const Pool pool = MakePool(*buffer, "b0");
  ASSERT_NE(port, nullptr);
  ASSERT_NE(pool, nullptr);

  EXPECT_EQ(Receive(*port, 0)->pool, port->sink());
  EXPECT_EQ(Receive(*port, 1)->pool, port->sink());

  port->Attach(1, pool.get());
  EXPECT_EQ(Receive(*port, 0)->pool, port->sink());
  const Mbuf mbuf = Receive(*port, 1);
  EXPECT_EQ(mbuf->pool, pool.get());
  EXPECT_TRUE(Inside(*buffer, mbuf.get()));

  port->Detach(1);
  EXPECT_EQ(Receive(*port, 1)->pool, port->sink());
}

TEST_F(PortTest, LosesNoMbuf) {
  auto port = OpenPort("net_null0,size=64");
  const auto buffer = MakeBuffer(1 << 22, 4096);
  const Pool pool = MakePool(*buffer, "b0");
  ASSERT_NE(port, nullptr);
  const unsigned sink_mbufs = rte_mempool_avail_count(port->sink());

  for (int round = 0; round < 3; ++round) {
    (void)Receive(*port);
    port->Attach(0, pool.get());
    (void)Receive(*port);
    port->Detach(0);
  }

  EXPECT_EQ(rte_mempool_avail_count(port->sink()), sink_mbufs);
  EXPECT_EQ(rte_mempool_avail_count(pool.get()), buffer->pages());
}

TEST_F(PortTest, ReportsNoFrameWhenThePoolIsEmpty) {
  const auto port = OpenPort("net_null0,size=64");
  const auto buffer = MakeBuffer(4 * 4096, 4096);
  const Pool pool = MakePool(*buffer, "b0");
  ASSERT_NE(port, nullptr);
  port->Attach(0, pool.get());

  std::vector<Mbuf> held;
  for (int i = 0; i < 4; ++i) held.push_back(Receive(*port));
  rte_mbuf* mbuf = nullptr;
  EXPECT_EQ(rte_eth_rx_burst(port->id(), 0, &mbuf, 1), 0);

  held.pop_back();
  EXPECT_NE(Receive(*port), nullptr);
}

TEST_F(PortTest, ReceivesTheFramesOfAFile) {
  const std::vector<Frame> frames = {PatternFrame(60, 1), PatternFrame(1514, 2),
                                     PatternFrame(5000, 3)};
  const auto port = OpenPort("net_pcap0,rx_pcap=" + WritePcap("a.pcap", frames));
  const auto buffer = MakeBuffer(1 << 22, 2048);
  const Pool pool = MakePool(*buffer, "b0");
  ASSERT_NE(port, nullptr);
  ASSERT_TRUE(port->CheckPages("b0", 2048, 2048, buffer->pages(), 1).ok());
  port->Attach(0, pool.get());

  for (const Frame& frame : frames) {
    const Mbuf mbuf = Receive(*port);
    ASSERT_NE(mbuf, nullptr);
    EXPECT_EQ(Bytes(mbuf.get()), frame);
    for (const rte_mbuf* m = mbuf.get(); m != nullptr; m = m->next) {
      EXPECT_TRUE(Inside(*buffer, m));
    }
  }
}

TEST_F(PortTest, RepeatsAFileOfMoreFramesThanARingHolds) {
  std::vector<Frame> frames;
  for (int i = 0; i < 4000; ++i) frames.push_back(PatternFrame(60, static_cast<std::uint8_t>(i)));
  const auto port = OpenPort("net_pcap0,infinite_rx=1,rx_pcap=" + WritePcap("a.pcap", frames));
  const auto buffer = MakeBuffer(1 << 22, 4096);
  const Pool pool = MakePool(*buffer, "b0");
  ASSERT_NE(port, nullptr);
  port->Attach(0, pool.get());

  for (int i = 0; i < 10000; ++i) {
    const Mbuf mbuf = Receive(*port);
    ASSERT_NE(mbuf, nullptr);
    ASSERT_EQ(Bytes(mbuf.get()), frames[static_cast<std::size_t>(i) % frames.size()]);
  }
}

TEST_F(PortTest, SaysWhyAFileCannotBeRepeated) {
  const std::string jumbo = WritePcap("a.pcap", {PatternFrame(5000, 1)});

  const Status status = OpenError(Options("net_pcap0,infinite_rx=1,rx_pcap=" + jumbo));

  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("Multiseg mbufs are not supported"));
}

// The driver cuts a frame to what the pool says, not to what the mbuf has: the router must say
// what the attached pool does.
TEST_F(PortTest, StatesTheDataRoomOfThePoolThatIsAttached) {
  const std::string socket = directory_ / "memif.sock";
  const std::string common = ",socket-abstract=no,socket=" + socket;
  auto receiver = OpenPort(Options("net_memif0,role=server" + common), 0);
  auto sender = OpenPort(Options("net_memif1,role=client" + common), 1);
  ASSERT_NE(receiver, nullptr);
  ASSERT_NE(sender, nullptr);
  const auto small = MakeBuffer(1 << 21, 2048);
  const auto large = MakeBuffer(1 << 23, 16384);
  const Pool small_pool = MakePool(*small, "small");
  const Pool large_pool = MakePool(*large, "large");
  const Pool source(rte_pktmbuf_pool_create("source", 64, 0, 0, 9000, SOCKET_ID_ANY));
  ASSERT_NE(source, nullptr);

  const Frame frame = PatternFrame(8000, 9);
  const auto send_and_receive = [&]() -> Mbuf {
    rte_mbuf* mbuf = rte_pktmbuf_alloc(source.get());
    std::memcpy(rte_pktmbuf_append(mbuf, static_cast<std::uint16_t>(frame.size())), frame.data(),
                frame.size());
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (rte_eth_tx_burst(sender->id(), 0, &mbuf, 1) == 0) {  // until the link is up
      if (std::chrono::steady_clock::now() > deadline) return nullptr;
    }
    return Receive(*receiver);
  };

  receiver->Attach(0, small_pool.get());
  const Mbuf chain = send_and_receive();
  receiver->Attach(0, large_pool.get());
  const Mbuf whole = send_and_receive();
  receiver->Attach(0, small_pool.get());
  const Mbuf chain_again = send_and_receive();

  ASSERT_NE(chain, nullptr);
  ASSERT_NE(whole, nullptr);
  ASSERT_NE(chain_again, nullptr);
  EXPECT_EQ(Bytes(chain.get()), frame);
  EXPECT_EQ(Bytes(whole.get()), frame);
  EXPECT_EQ(Bytes(chain_again.get()), frame);
  EXPECT_EQ(chain->nb_segs, 5);  // of 1920 bytes
  EXPECT_EQ(whole->nb_segs, 1);
  EXPECT_EQ(chain_again->nb_segs, 5);

  EXPECT_TRUE(std::filesystem::exists(socket));
  sender.reset();
  receiver.reset();
  EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST_F(PortTest, CanBeOpenedAgainAfterItWasClosed) {
  for (int round = 0; round < 3; ++round) {
    const auto port = OpenPort("net_null0", 4);
    ASSERT_NE(port, nullptr);
    EXPECT_NE(Receive(*port, 3), nullptr);
  }
}

TEST_F(PortTest, RefusesADeviceThatIsOpen) {
  const auto port = OpenPort("net_null0");
  ASSERT_NE(port, nullptr);

  const Status second = OpenError(Options("net_null0,size=100"));

  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
  EXPECT_THAT(second.message(), AllOf(HasSubstr("port 'p0'"), HasSubstr("net_null1")));
  EXPECT_NE(Receive(*port), nullptr);  // the first is unharmed
}

TEST_F(PortTest, RefusesWhatItCannotOpen) {
  struct Case {
    PortOptions options;
    Code code;
    std::string message;
  };
  const std::string file = "net_pcap0,rx_pcap=" + WritePcap("a.pcap", {});
  for (const Case& c : {
           Case{Options("net_bogus0"), Code::kNotFound, "no driver for device 'net_bogus0'"},
           Case{Options(""), Code::kNotFound, "no driver for device ''"},
           Case{Options("crypto_null0"), Code::kNotFound, "no driver for device"},
           Case{Options("0000:ff:1f.7"), Code::kFailedPrecondition, "start with huge pages"},
           Case{Options("net_pcap0,rx_pcap=/nowhere"), Code::kFailedPrecondition, "/nowhere"},
           Case{Options("net_pcap0,infinite_rx=1,rx_pcap=/nowhere"), Code::kFailedPrecondition,
                "/nowhere"},
           Case{Options("net_null0,sice=64"), Code::kFailedPrecondition, "net_null0,sice=64"},
           Case{Options("net_af_xdp0,iface=lo"), Code::kUnimplemented, "use net_af_packet"},
           Case{Options("net_virtio_user0"), Code::kUnimplemented, "use net_memif"},
           Case{Options(file, 2), Code::kInvalidArgument, "queues is 2"},
           Case{Options("net_null0", 0), Code::kInvalidArgument, "use 1 to 1024"},
           Case{Options("net_null0", 1025), Code::kInvalidArgument, "use 1 to 1024"},
           Case{Options("net_null0", 1, 0), Code::kInvalidArgument, "ring_entries is 0"},
           Case{Options("net_null0", 1, 70000), Code::kInvalidArgument, "ring_entries is 70000"},
           Case{Options("net_null0,size=65536"), Code::kInvalidArgument, "65536 bytes"},
           Case{Options("net_null0", 64, 32768), Code::kResourceExhausted, "raise memory_mib"},
       }) {
    const Status status = OpenError(c.options);
    EXPECT_EQ(status.code(), c.code) << status.ToString();
    EXPECT_THAT(status.message(), AllOf(HasSubstr("port 'p0': "), HasSubstr(c.message)));
  }
  EXPECT_EQ(rte_eth_dev_count_avail(), 0);  // nothing is left of them
}

TEST_F(PortTest, RefusesPagesThatAreTooSmallForTheDriver) {
  const auto port = OpenPort("net_null0,size=3000,copy=1");
  ASSERT_NE(port, nullptr);
  constexpr std::uint64_t kPages = 4096;

  EXPECT_TRUE(port->CheckPages("b0", 4096, 3128, kPages, 1).ok());
  const Status small = port->CheckPages("b0", 2048, 2048, kPages, 1);
  const Status coloured = port->CheckPages("b0", 4096, 3127, kPages, 1);

  EXPECT_EQ(small.code(), Code::kInvalidArgument);
  EXPECT_THAT(small.message(), AllOf(HasSubstr("binding 'b0'"), HasSubstr("port 'p0'"),
                                     HasSubstr("3000 bytes"), HasSubstr("use page_bytes 4096")));
  EXPECT_EQ(coloured.code(), Code::kInvalidArgument);
  EXPECT_THAT(coloured.message(), HasSubstr("use page_bytes 16384"));
}

TEST_F(PortTest, RefusesAPoolThatTheRingsWouldEmpty) {
  const auto port = OpenPort(Options("net_null0", 2, 1024));
  ASSERT_NE(port, nullptr);

  EXPECT_TRUE(port->CheckPages("b0", 4096, 4096, 1536, 1).ok());
  EXPECT_TRUE(port->CheckPages("b0", 4096, 4096, 3072, 2).ok());
  const Status status = port->CheckPages("b0", 4096, 4096, 3071, 2);

  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("3071 pages"), HasSubstr("at least 3072 pages"),
                                      HasSubstr("buffer_bytes 12582912")));
}

TEST_F(PortTest, WantsAPageForASlotOfTheKernelsRing) {
  const auto port = Port::Open(Options("net_af_packet0,iface=lo"), 0);
  if (port.status().code() == Code::kPermissionDenied) GTEST_SKIP() << port.status().message();
  ASSERT_TRUE(port.ok()) << port.status().message();

  EXPECT_EQ((*port)->CheckPages("b0", 2048, 2048, 4096, 1).code(), Code::kInvalidArgument);
  EXPECT_TRUE((*port)->CheckPages("b0", 4096, 3136, 4096, 1).ok());
}

TEST_F(PortTest, FindsNoInterfaceOfThatName) {
  const Status status = OpenError(Options("net_af_packet0,iface=nosuch0"));
  if (status.code() == Code::kPermissionDenied) GTEST_SKIP() << status.message();

  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("no network interface 'nosuch0'"));
}

TEST_F(PortTest, WantsAllQueuesOfTheKernelsFanout) {
  const Status more = OpenError(Options("net_af_packet0,iface=lo", 2));
  if (more.code() == Code::kPermissionDenied) GTEST_SKIP() << more.message();
  const Status fewer = OpenError(Options("net_af_packet0,iface=lo,qpairs=2", 1));

  EXPECT_EQ(more.code(), Code::kInvalidArgument);
  EXPECT_THAT(more.message(), HasSubstr("append ,qpairs=2"));
  EXPECT_EQ(fewer.code(), Code::kInvalidArgument);
  EXPECT_THAT(fewer.message(), HasSubstr("make them equal"));
}

using PortDeathTest = PortTest;

TEST_F(PortDeathTest, NamesTheCapabilityThatIsMissing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto open_without_rights = [](const char* device) {
    // Giving up the user ID of root gives up its capabilities.
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) std::exit(2);
    std::fprintf(stderr, "[%s]", OpenError(Options(device)).ToString().c_str());
    std::exit(0);
  };
  EXPECT_EXIT(open_without_rights("net_af_packet0,iface=lo"), testing::ExitedWithCode(0),
              "\\[PERMISSION_DENIED: port 'p0': .*CAP_NET_RAW and CAP_NET_ADMIN.*setcap");
  EXPECT_EXIT(open_without_rights("net_tap0"), testing::ExitedWithCode(0),
              "\\[PERMISSION_DENIED: port 'p0': .*CAP_NET_ADMIN.*setcap");
  EXPECT_EXIT(open_without_rights("net_pcap0,iface=lo"), testing::ExitedWithCode(0),
              "\\[PERMISSION_DENIED: port 'p0': .*CAP_NET_RAW.*setcap");
}

TEST_F(PortTest, GivesAnMbufBackToItsHomeThroughTheRouter) {
  const Pool home(rte_pktmbuf_pool_create("home", 8, 0, 0, 2048, SOCKET_ID_ANY));
  const Pool other(rte_pktmbuf_pool_create("other", 8, 0, 0, 4096, SOCKET_ID_ANY));
  ASSERT_NE(home, nullptr);
  ASSERT_NE(other, nullptr);
  const auto router = RouterPool::Create("router", home.get(), SOCKET_ID_ANY);
  ASSERT_NE(router, nullptr);
  EXPECT_EQ(rte_mempool_avail_count(router->pool()), 8u);
  EXPECT_EQ(rte_pktmbuf_data_room_size(router->pool()), 2048);

  void* objects[3];
  ASSERT_EQ(rte_mempool_get_bulk(router->pool(), objects, 3), 0);
  EXPECT_EQ(rte_mempool_avail_count(home.get()), 5u);
  router->Attach(other.get());
  EXPECT_EQ(router->target(), other.get());
  EXPECT_EQ(rte_pktmbuf_data_room_size(router->pool()), 4096);
  rte_mempool_put_bulk(router->pool(), objects, 3);

  EXPECT_EQ(rte_mempool_avail_count(home.get()), 8u);
  EXPECT_EQ(rte_mempool_avail_count(other.get()), 8u);
  EXPECT_EQ(RouterPool::Create("router", home.get(), SOCKET_ID_ANY), nullptr);  // name taken
}

}  // namespace
}  // namespace rxtoken
