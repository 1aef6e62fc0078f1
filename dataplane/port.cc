// SPDX-License-Identifier: Apache-2.0
#include "dataplane/port.h"

#include <linux/capability.h>
#include <net/if.h>
#include <rte_bus.h>
#include <rte_dev.h>
#include <rte_devargs.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "dataplane/eal.h"
#include "tokens/abi/limits.h"

namespace rxtoken {
namespace {

constexpr std::uint32_t kMaxQueues = 1024;
constexpr std::uint32_t kMaxRingEntries = 32768;
constexpr std::uint32_t kMaxRoomBytes = 65535;  // an mbuf has 16 bits for it
constexpr std::uint32_t kSpareSinkMbufs = 1024;
// A full-sized frame must fit into one mbuf of the sink. Devices round what is left behind
// the headroom down to 1 or 2 KiB.
constexpr std::uint32_t kSinkRoomBytes = kMinPageBytes;
constexpr std::uint32_t kDmaRoomBytes = RTE_PKTMBUF_HEADROOM + 2048;

// Drivers that do not take an mbuf from their queue's pool for each frame.
struct UnusableDriver {
  std::string_view name;  // how it begins
  std::string_view why;
};
constexpr UnusableDriver kUnusableDrivers[] = {
    {"net_af_xdp", "it keeps frames in the pool's own memory; use net_af_packet"},
    {"net_virtio_user", "its peer cannot write to our buffers; use net_memif or net_vhost"},
    {"net_vmxnet3", "it needs a pool with memory of its own"},
    {"net_mlx4", "it registers the pool's own memory with the device"},
    {"mlx5", "it registers the pool's own memory with the device"},
    {"net_sfc", "it looks inside the pool"},
};

Status CheckUsable(const std::string& who, std::string_view driver) {
  for (const UnusableDriver& unusable : kUnusableDrivers) {
    if (driver.starts_with(unusable.name)) {
      return {Code::kUnimplemented,
              who + "driver " + std::string(driver) +
                  " cannot receive into bound buffers: " + std::string(unusable.why)};
    }
  }
  return {};
}

// A device as the user names it: "net_null0,size=64".
class Device {
 public:
  explicit Device(const std::string& text)
      : name_(text.substr(0, text.find(','))),
        arguments_(name_.size() < text.size() ? text.substr(name_.size() + 1) : "") {}

  const std::string& name() const { return name_; }
  bool Is(std::string_view driver) const { return name_.starts_with(driver); }

  // The value of "key=value" among the arguments.
  std::optional<std::string> Get(std::string_view key) const {
    for (std::string_view rest = arguments_; !rest.empty();) {
      const std::string_view pair = rest.substr(0, rest.find(','));
      if (pair.size() > key.size() && pair.starts_with(key) && pair[key.size()] == '=') {
        return std::string(pair.substr(key.size() + 1));
      }
      rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    }
    return std::nullopt;
  }
  unsigned long GetNumber(std::string_view key, unsigned long otherwise) const {
    const auto value = Get(key);
    return value ? std::strtoul(value->c_str(), nullptr, 0) : otherwise;
  }

 private:
  std::string name_;
  std::string arguments_;
};

// net_pcap with infinite_rx=1 reads its file once, keeps all frames in mbufs of the sink and
// copies them from there for ever.
bool KeepsFile(const Device& device) {
  return device.Is("net_pcap") && device.GetNumber("infinite_rx", 0) == 1;
}

// What one mbuf must hold, headroom included. These drivers write that much without looking
// at the mbuf; others cut a frame into as many mbufs as it takes.
std::uint64_t RequiredRoom(const Device& device, const std::string& driver,
                           const rte_eth_dev_info& info, bool dma) {
  if (dma) return kDmaRoomBytes;
  if (KeepsFile(device)) return kSinkRoomBytes;
  std::uint64_t bytes = info.min_rx_bufsize;
  if (driver == "net_null") bytes = device.GetNumber("size", 64);
  // A slot of the kernel's ring holds a frame behind a header of its own.
  if (driver == "net_af_packet") bytes = device.GetNumber("framesz", 2048) - 32;
  return RTE_PKTMBUF_HEADROOM + bytes;
}

// The kernel's network interface that the device receives from, if it does.
std::optional<std::string> ExistingInterface(const Device& device) {
  if (device.Is("net_af_packet")) return device.Get("iface");
  if (!device.Is("net_pcap")) return std::nullopt;
  for (const char* key : {"iface", "rx_iface", "rx_iface_in"}) {
    if (auto interface = device.Get(key)) return interface;
  }
  return std::nullopt;
}

struct Capability {
  unsigned bit;
  std::string_view name;
};
constexpr Capability kNetAdmin = {CAP_NET_ADMIN, "CAP_NET_ADMIN"};
constexpr Capability kNetRaw = {CAP_NET_RAW, "CAP_NET_RAW"};

std::uint64_t EffectiveCapabilities() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("CapEff:")) return std::strtoull(line.c_str() + 7, nullptr, 16);
  }
  return 0;
}

// The driver would fail as well, but seldom say why.
Status CheckRights(const std::string& who, const Device& device) {
  std::vector<Capability> needed;
  if (device.Is("net_af_packet")) needed = {kNetRaw, kNetAdmin};
  if (device.Is("net_tap") || device.Is("net_tun")) needed = {kNetAdmin};
  if (device.Is("net_pcap") && ExistingInterface(device)) needed = {kNetRaw};
  const std::uint64_t effective = EffectiveCapabilities();
  std::string missing;
  for (const Capability& capability : needed) {
    if ((effective >> capability.bit & 1) != 0) continue;
    missing.append(missing.empty() ? "" : " and ").append(capability.name);
  }
  if (!missing.empty()) {
    return {Code::kPermissionDenied,
            who + "device '" + device.name() + "' needs " + missing +
                ", which this process does not have; run it as root or grant it once with "
                "setcap cap_net_raw,cap_net_admin+ep <this program>"};
  }
  if ((device.Is("net_tap") || device.Is("net_tun")) && access("/dev/net/tun", R_OK | W_OK) != 0) {
    const std::string reason = std::strerror(errno);
    return {Code::kPermissionDenied, who + "device '" + device.name() +
                                         "' needs to read and write /dev/net/tun (" + reason +
                                         "); give this user the right to, or run as root"};
  }
  return {};
}

// "vdev" or "pci"; empty if no network driver of DPDK knows such a device.
std::string BusOf(const Device& device) {
  LogCapture log;
  rte_devargs devargs = {};
  std::string bus;
  if (rte_devargs_parse(&devargs, device.name().c_str()) == 0) bus = rte_bus_name(devargs.bus);
  rte_devargs_reset(&devargs);
  (void)log.Take();  // a failure is answered by the caller
  const bool network = bus == "pci" || (bus == "vdev" && device.Is("net_"));
  return network ? bus : "";
}

Status CheckOptions(const PortOptions& options) {
  const std::string who = "port '" + options.name + "': ";
  if (options.queues < 1 || options.queues > kMaxQueues) {
    return {Code::kInvalidArgument, who + "queues is " + std::to_string(options.queues) +
                                        "; use 1 to " + std::to_string(kMaxQueues)};
  }
  if (options.ring_entries < 1 || options.ring_entries > kMaxRingEntries) {
    return {Code::kInvalidArgument, who + "ring_entries is " +
                                        std::to_string(options.ring_entries) + "; use 1 to " +
                                        std::to_string(kMaxRingEntries)};
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Port>> Port::Open(const PortOptions& options, std::uint32_t index) {
  if (Status status = CheckOptions(options); !status.ok()) return status;
  const Device device(options.device);
  Status last;
  for (std::uint32_t spare = kSpareSinkMbufs;; spare *= 2) {
    std::unique_ptr<Port> port(new Port(options, index));
    Status status = port->Probe();
    const bool probed = status.ok();
    if (probed) status = port->Configure(spare);
    if (status.ok()) {
      if (status = port->OpenExceptionPath(); !status.ok()) return status;
      return port;
    }
    {
      LogCapture log;
      port.reset();
      (void)log.Take();  // complaints about what was not there yet
    }
    // How many mbufs a kept file takes shows only when they suffice. When DPDK's memory is
    // used up, the driver's own complaint says more.
    if (!probed || !KeepsFile(device)) return status;
    if (status.code() == Code::kResourceExhausted && !last.ok()) {
      return Status(last.code(), last.message() + " (raise memory_mib, or use a smaller file)");
    }
    if (status.code() != Code::kFailedPrecondition) return status;
    last = std::move(status);
  }
}

Status Port::Probe() {
  const Device device(options_.device);
  const std::string who = "port '" + options_.name + "': ";
  const std::string bus = BusOf(device);
  if (bus.empty()) {
    return {Code::kNotFound, who + "no driver for device '" + device.name() +
                                 "'; use a PCI address, or a name such as net_null0, net_pcap0, "
                                 "net_af_packet0, net_memif0, net_tap0"};
  }
  if (bus == "pci" && rte_eal_has_pci() == 0) {
    return {Code::kFailedPrecondition, who + "device '" + device.name() +
                                           "' is a PCI device; start with huge pages, or with "
                                           "the DPDK arguments -a " +
                                           device.name()};
  }
  if (Status status = CheckUsable(who, device.name()); !status.ok()) return status;
  if (Status status = CheckRights(who, device); !status.ok()) return status;
  if (auto interface = ExistingInterface(device);
      interface && if_nametoindex(interface->c_str()) == 0) {
    return {Code::kNotFound, who + "there is no network interface '" + *interface + "'"};
  }
  const char* const name = device.name().c_str();
  if (rte_eth_dev_get_port_by_name(name, &id_) == 0) {
    return {Code::kFailedPrecondition, who + "device '" + device.name() +
                                           "' belongs to another port already; number devices of "
                                           "a kind, as in net_null0, net_null1"};
  }

  LogCapture log;
  const int error = rte_dev_probe(options_.device.c_str());
  rte_eth_dev_info info = {};
  if (error == 0 && rte_eth_dev_get_port_by_name(name, &id_) == 0) {
    rte_eth_dev_info_get(id_, &info);
  }
  if (info.device == nullptr) {
    return {error == -ENODEV ? Code::kNotFound : Code::kFailedPrecondition,
            who + "cannot open device '" + options_.device + "'" + log.Take()};
  }
  device_ = info.device;
  dma_ = bus != "vdev";
  driver_ = info.driver_name;
  return CheckUsable(who, driver_);
}

Status Port::Configure(std::uint32_t spare_mbufs) {
  const Device device(options_.device);
  const std::string who = "port '" + options_.name + "': ";
  rte_eth_dev_info info = {};
  rte_eth_dev_info_get(id_, &info);

  if (options_.queues > info.max_rx_queues) {
    return {Code::kInvalidArgument,
            who + "queues is " + std::to_string(options_.queues) + ", and device '" +
                options_.device + "' has " + std::to_string(info.max_rx_queues) +
                (driver_ == "net_af_packet"
                     ? "; append ,qpairs=" + std::to_string(options_.queues) + " to the device"
                     : "")};
  }
  if (driver_ == "net_af_packet" && options_.queues < info.max_rx_queues) {
    return {Code::kInvalidArgument,
            who + "queues is " + std::to_string(options_.queues) + " and qpairs is " +
                std::to_string(info.max_rx_queues) +
                ": the kernel would spread frames to queues that nobody reads; make them equal"};
  }
  const std::uint64_t room = RequiredRoom(device, driver_, info, dma_);
  if (room > kMaxRoomBytes) {
    return {Code::kInvalidArgument, who + "device '" + options_.device + "' writes frames of " +
                                        std::to_string(room - RTE_PKTMBUF_HEADROOM) +
                                        " bytes, which no page can hold; the most is " +
                                        std::to_string(kMaxRoomBytes - RTE_PKTMBUF_HEADROOM)};
  }
  required_room_bytes_ = static_cast<std::uint32_t>(room);

  LogCapture log;
  const auto refused = [&](const char* what, int error) {
    // Many drivers know no other code than -1.
    const std::string reason = error == -1 ? "" : " (" + std::string(std::strerror(-error)) + ")";
    return Status(Code::kFailedPrecondition,
                  who + "driver " + driver_ + " does not " + what + reason + log.Take());
  };

  // Some drivers want as many queues to send with; only an exception path uses one of them.
  const auto rx_queues = static_cast<std::uint16_t>(options_.queues);
  const auto tx_queues = std::min(rx_queues, info.max_tx_queues);
  rte_eth_conf conf = {};
  conf.rxmode.offloads = info.rx_offload_capa & RTE_ETH_RX_OFFLOAD_SCATTER;
  // The kernel strips VLAN tags in any case, and the driver cannot put them back into our
  // mbufs, so that it complains about each. The worker can: see Worker::RestoreVlanTag.
  if (driver_ == "net_af_packet") conf.rxmode.offloads |= RTE_ETH_RX_OFFLOAD_VLAN_STRIP;
  const std::uint64_t rss =
      info.flow_type_rss_offloads & (RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP | RTE_ETH_RSS_TCP);
  if (rx_queues > 1 && rss != 0) {
    conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
    conf.rx_adv_conf.rss_conf.rss_hf = rss;
  }
  if (int error = rte_eth_dev_configure(id_, rx_queues, tx_queues, &conf); error != 0) {
    return refused("take its configuration", error);
  }
  auto rx_entries = static_cast<std::uint16_t>(options_.ring_entries);
  if (int error = rte_eth_dev_adjust_nb_rx_tx_desc(id_, &rx_entries, &tx_entries_); error != 0) {
    return refused("take any ring size", error);
  }
  ring_entries_ = rx_entries;

  // Drivers that post mbufs keep a ring full of them for each queue.
  const std::string number = std::to_string(index_);
  const int numa_node = rte_eth_dev_socket_id(id_);
  const std::uint32_t sink_mbufs = options_.queues * ring_entries_ + spare_mbufs;
  const auto sink_room = static_cast<std::uint16_t>(std::max(kSinkRoomBytes, required_room_bytes_));
  sink_ = rte_pktmbuf_pool_create(("rxtoken_sink" + number).c_str(), sink_mbufs, 0, 0, sink_room,
                                  numa_node);
  if (sink_ == nullptr) {
    return {Code::kResourceExhausted,
            who + "DPDK's own memory has no room for " + std::to_string(sink_mbufs) +
                " frames of " + std::to_string(sink_room) +
                " bytes, which the port needs for itself; raise memory_mib, or use fewer queues "
                "or ring_entries" +
                log.Take()};
  }
  for (std::uint16_t queue = 0; queue < rx_queues; ++queue) {
    const std::string name = "rxtoken_r" + number + "_" + std::to_string(queue);
    routers_.push_back(RouterPool::Create(name, sink_, numa_node));
    if (routers_.back() == nullptr) {
      return {Code::kResourceExhausted, who + "DPDK's own memory has no room for the pool of " +
                                            "queue " + std::to_string(queue) +
                                            "; raise memory_mib, or use fewer queues"};
    }
    if (int error = rte_eth_rx_queue_setup(id_, queue, rx_entries, SOCKET_ID_ANY, nullptr,
                                           routers_.back()->pool());
        error != 0) {
      return refused("set up a receive queue", error);
    }
  }
  for (std::uint16_t queue = 0; queue < tx_queues; ++queue) {
    if (int error = rte_eth_tx_queue_setup(id_, queue, tx_entries_, SOCKET_ID_ANY, nullptr);
        error != 0) {
      return refused("set up a send queue", error);
    }
  }
  if (int error = rte_eth_dev_start(id_); error != 0) return refused("start", error);
  if (int error = rte_eth_promiscuous_enable(id_); error != 0 && error != -ENOTSUP) {
    return refused("receive frames for other addresses", error);
  }

  // net_null leaves the page as it is unless it is told to copy; net_ring hands over the
  // sender's mbufs.
  writes_payload_ =
      !dma_ && driver_ != "net_ring" && (driver_ != "net_null" || device.GetNumber("copy", 0) != 0);
  return {};
}

// The driver may keep as many mbufs as its queue has entries, until it needs those again.
Status Port::OpenExceptionPath() {
  if (options_.exception_tap.empty()) return {};
  const std::string who = "port '" + options_.name + "': ";
  rte_eth_dev_info info = {};
  rte_eth_dev_info_get(id_, &info);
  if (info.nb_tx_queues == 0) {
    return {Code::kUnimplemented, who + "driver " + driver_ + " cannot send, as exception_tap '" +
                                      options_.exception_tap + "' needs; leave that out"};
  }
  const std::uint32_t mbufs = tx_entries_ + 2u * ExceptionPath::kBurst;
  std::uint16_t mtu = 0;
  rte_eth_dev_get_mtu(id_, &mtu);
  const std::uint32_t room = RTE_PKTMBUF_HEADROOM + ExceptionPath::RoomBytes(mtu);
  exception_pool_ =
      rte_pktmbuf_pool_create(("rxtoken_tap" + std::to_string(index_)).c_str(), mbufs, 0, 0,
                              static_cast<std::uint16_t>(room), rte_eth_dev_socket_id(id_));
  if (exception_pool_ == nullptr) {
    return {Code::kResourceExhausted, who + "DPDK's own memory has no room for " +
                                          std::to_string(mbufs) + " frames of " +
                                          std::to_string(room) + " bytes, which exception_tap '" +
                                          options_.exception_tap + "' needs; raise memory_mib"};
  }
  auto path = ExceptionPath::Open(options_.exception_tap, {.port = options_.name,
                                                           .index = index_,
                                                           .port_id = id_,
                                                           .tx_queue = 0,
                                                           .pool = exception_pool_});
  if (!path.ok()) return path.status();
  exception_path_ = std::move(*path);
  return {};
}

Port::~Port() {
  exception_path_.reset();  // it sends
  if (device_ != nullptr) {
    rte_eth_promiscuous_disable(id_);  // net_af_packet would leave the interface so
    rte_eth_dev_stop(id_);
    rte_dev_remove(device_);
  }
  routers_.clear();
  rte_mempool_free(sink_);
  rte_mempool_free(exception_pool_);
}

Status Port::CheckPages(const std::string& binding, std::uint32_t page_bytes,
                        std::uint32_t data_room_bytes, std::uint64_t pages,
                        std::uint32_t queues) const {
  const std::string who = "binding '" + binding + "': ";
  const std::string port = "port '" + name() + "' (" + driver_ + ")";
  if (data_room_bytes < required_room_bytes_) {
    std::string remedy = "; let the device use smaller frames";
    const std::uint32_t overhead = page_bytes - data_room_bytes;
    for (std::uint32_t larger : {4096u, 16384u, 65536u}) {
      if (larger <= page_bytes || larger < required_room_bytes_ + overhead) continue;
      remedy = "; use page_bytes " + std::to_string(larger);
      break;
    }
    return {Code::kInvalidArgument,
            who + "a page of " + std::to_string(page_bytes) + " bytes has room for a frame of " +
                std::to_string(data_room_bytes - RTE_PKTMBUF_HEADROOM) + " bytes, and " + port +
                " writes up to " + std::to_string(required_room_bytes_ - RTE_PKTMBUF_HEADROOM) +
                " bytes" + remedy};
  }
  const std::uint64_t entries = std::uint64_t{ring_entries_} * queues;
  const std::uint64_t least = (entries * 3 + 1) / 2;
  if (pages < least) {
    return {Code::kInvalidArgument,
            who + std::to_string(pages) + " pages are too few for the " + std::to_string(entries) +
                " receive descriptors of its queues of " + port + "; use at least " +
                std::to_string(least) + " pages (buffer_bytes " +
                std::to_string(least * page_bytes) + "), or a port with fewer ring_entries"};
  }
  return {};
}

Status Port::MapForDma(Buffer& buffer) {
  if (Status status = buffer.RegisterForDma(); !status.ok()) return status;
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  if (rte_dev_dma_map(device_, buffer.data(), address, buffer.mapped_bytes()) != 0) {
    return {Code::kFailedPrecondition, "port '" + name() + "': device '" + options_.device +
                                           "' cannot map the buffer (" + rte_strerror(rte_errno) +
                                           "); bind it to the kernel driver vfio-pci"};
  }
  return {};
}

void Port::UnmapForDma(Buffer& buffer) {
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  rte_dev_dma_unmap(device_, buffer.data(), address, buffer.mapped_bytes());
}

PortInfo Port::info() const {
  PortInfo info;
  info.name = options_.name;
  info.device = options_.device;
  info.driver = driver_;
  info.ring_entries = ring_entries_;
  info.queues.resize(options_.queues);

  rte_ether_addr mac = {};
  rte_eth_macaddr_get(id_, &mac);
  char text[RTE_ETHER_ADDR_FMT_SIZE];
  rte_ether_format_addr(text, sizeof text, &mac);
  info.mac = text;
  std::transform(info.mac.begin(), info.mac.end(), info.mac.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });

  rte_eth_link link = {};
  rte_eth_link_get_nowait(id_, &link);
  info.link_up = link.link_status == RTE_ETH_LINK_UP;
  info.link_mbps = link.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN ? 0 : link.link_speed;
  std::uint16_t mtu = 0;
  rte_eth_dev_get_mtu(id_, &mtu);
  info.mtu_bytes = mtu;

  rte_eth_stats stats = {};
  rte_eth_stats_get(id_, &stats);
  info.rx_packets = stats.ipackets;
  info.rx_bytes = stats.ibytes;
  info.rx_missed = stats.imissed;
  info.rx_errors = stats.ierrors;
  info.rx_no_buffer = stats.rx_nombuf;
  if (exception_path_ != nullptr) info.exception_path = exception_path_->info();
  return info;
}

}  // namespace rxtoken
