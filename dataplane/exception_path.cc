// SPDX-License-Identifier: Apache-2.0
#include "dataplane/exception_path.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <pthread.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_mbuf.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tokens/worker_id.h"

namespace rxtoken {
namespace {

constexpr char kTunDevice[] = "/dev/net/tun";

std::uint16_t MtuOf(std::uint16_t port_id) {
  std::uint16_t mtu = RTE_ETHER_MTU;
  rte_eth_dev_get_mtu(port_id, &mtu);
  return mtu;
}

void Add(std::atomic<std::uint64_t>& counter, std::uint64_t n) noexcept {
  // order: relaxed; statistics, with one writer.
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

ifreq Named(const std::string& interface) {
  ifreq request = {};
  interface.copy(request.ifr_name, IFNAMSIZ - 1);
  return request;
}

}  // namespace

std::uint32_t ExceptionPath::RoomBytes(std::uint16_t mtu_bytes) noexcept {
  constexpr std::uint32_t kMost = 65535 - RTE_PKTMBUF_HEADROOM;  // an mbuf has 16 bits for it
  return std::min(kMost, mtu_bytes + RTE_ETHER_HDR_LEN + 2u * RTE_VLAN_HLEN);
}

ExceptionPath::ExceptionPath(const std::string& interface, const Outlet& outlet)
    : interface_(interface),
      outlet_(outlet),
      room_bytes_(RoomBytes(MtuOf(outlet.port_id))),
      places_(new std::byte[std::size_t{kMaxWorkers} * kInboxFrames * room_bytes_]) {}

Result<std::unique_ptr<ExceptionPath>> ExceptionPath::Open(const std::string& interface,
                                                           const Outlet& outlet) {
  // The kernel takes "tap%d" for a pattern.
  if (interface.empty() || interface.size() >= IFNAMSIZ || interface == "." || interface == ".." ||
      interface.find_first_of("/:% \t\n") != std::string::npos) {
    return Status(Code::kInvalidArgument,
                  "port '" + outlet.port + "': exception_tap is '" + interface +
                      "'; a name of an interface has 1 to 15 characters, and none of '/', ':', "
                      "'%' and blanks");
  }
  std::unique_ptr<ExceptionPath> path(new ExceptionPath(interface, outlet));
  if (Status status = path->OpenTap(); !status.ok()) return status;
  if (Status status = path->SetUp(); !status.ok()) return status;
  path->thread_ = std::thread([p = path.get()] { p->Loop(); });
  const std::string name = "rxtoken/x" + std::to_string(outlet.index);
  ::pthread_setname_np(path->thread_.native_handle(), name.c_str());
  return path;
}

Status ExceptionPath::OpenTap() {
  const std::string who = "port '" + outlet_.port + "': exception_tap '" + interface_ + "': ";
  tap_ = ::open(kTunDevice, O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap_ < 0) {
    const bool forbidden = errno == EACCES || errno == EPERM;
    return Status(forbidden ? Code::kPermissionDenied : Code::kFailedPrecondition,
                  who + "cannot open " + kTunDevice + " (" + std::strerror(errno) + "); " +
                      (forbidden ? "give this user the right to read and write it, or run as root"
                                 : "load the kernel's module tun, or pass the device into the "
                                   "container"));
  }
  ifreq request = Named(interface_);
  request.ifr_flags = static_cast<short>(IFF_TAP | IFF_NO_PI | IFF_TUN_EXCL);
  if (::ioctl(tap_, TUNSETIFF, &request) != 0) {
    switch (errno) {
      case EPERM:
        return Status(Code::kPermissionDenied,
                      who +
                          "making it needs CAP_NET_ADMIN, which this process does not have; run "
                          "it as root or grant it once with setcap cap_net_raw,cap_net_admin+ep "
                          "<this program>");
      case EBUSY:
      case EINVAL:  // one that is no tap
        return Status(Code::kAlreadyExists,
                      who +
                          "there is an interface of that name already; choose another one, or "
                          "remove that with ip link delete " +
                          interface_);
      default:
        return Status(Code::kFailedPrecondition,
                      who + "the kernel does not make it (" + std::strerror(errno) + ")");
    }
  }
  wake_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) {
    return Status(Code::kResourceExhausted, who + "no eventfd (" + std::strerror(errno) + ")");
  }
  return Status();
}

Status ExceptionPath::SetUp() {
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const auto set = [&](unsigned long request_code, const char* what, ifreq& request) {
    if (socket >= 0 && ::ioctl(socket, request_code, &request) == 0) return Status();
    return Status(Code::kFailedPrecondition, "port '" + outlet_.port + "': exception_tap '" +
                                                 interface_ +
                                                 "': the kernel does not take the port's " + what +
                                                 " (" + std::strerror(errno) + ")");
  };
  ifreq address = Named(interface_);
  rte_ether_addr mac = {};
  rte_eth_macaddr_get(outlet_.port_id, &mac);
  address.ifr_hwaddr.sa_family = ARPHRD_ETHER;
  std::memcpy(address.ifr_hwaddr.sa_data, mac.addr_bytes, RTE_ETHER_ADDR_LEN);
  ifreq mtu = Named(interface_);
  mtu.ifr_mtu = MtuOf(outlet_.port_id);

  Status status = set(SIOCSIFHWADDR, "MAC address", address);
  if (status.ok()) status = set(SIOCSIFMTU, "MTU", mtu);
  ifreq flags = Named(interface_);
  if (status.ok()) status = set(SIOCGIFFLAGS, "state 'up'", flags);
  flags.ifr_flags = static_cast<short>(flags.ifr_flags | IFF_UP);
  if (status.ok()) status = set(SIOCSIFFLAGS, "state 'up'", flags);
  if (socket >= 0) ::close(socket);
  return status;
}

ExceptionPath::~ExceptionPath() {
  if (thread_.joinable()) {
    stop_ = true;
    ::eventfd_write(wake_, 1);
    thread_.join();
  }
  if (tap_ >= 0) ::close(tap_);
  if (wake_ >= 0) ::close(wake_);
}

ExceptionPathInfo ExceptionPath::info() const {
  // order: relaxed; statistics.
  constexpr auto kOrder = std::memory_order_relaxed;
  ExceptionPathInfo info{.interface = interface_,
                         .to_kernel = to_kernel_.load(kOrder),
                         .from_kernel = from_kernel_.load(kOrder),
                         .to_kernel_drops = to_kernel_drops_.load(kOrder),
                         .from_kernel_drops = from_kernel_drops_.load(kOrder)};
  for (const Inbox& inbox : inboxes_) info.to_kernel_drops += inbox.drops.load(kOrder);
  return info;
}

// ---- the workers' side -----------------------------------------------------------------------

bool ExceptionPath::Send(const rte_mbuf* frame) noexcept {
  Inbox& inbox = inboxes_[this_worker];
  const std::uint32_t tail = inbox.tail.load(std::memory_order_relaxed);
  // order: acquire pairs with the release in ToKernel(): the place has been read.
  const std::uint32_t waiting = tail - inbox.head.load(std::memory_order_acquire);
  if (frame->pkt_len > room_bytes_ || waiting == kInboxFrames) {
    Add(inbox.drops, 1);
    return false;
  }
  std::byte* to = Place(this_worker, tail);
  for (const rte_mbuf* segment = frame; segment != nullptr; segment = segment->next) {
    std::memcpy(to, rte_pktmbuf_mtod(segment, const std::byte*), segment->data_len);
    to += segment->data_len;
  }
  inbox.lengths[tail % kInboxFrames] = frame->pkt_len;
  // order: sequentially consistent, like what Sleep() does: either the thread sees the frame
  // before it sleeps, or we see that it is about to.
  inbox.tail.store(tail + 1);
  if (asleep_.load()) Wake();
  return true;
}

void ExceptionPath::Wake() noexcept {
  // The first worker that comes does it. An eventfd blocks only near 2^64.
  if (asleep_.exchange(false)) ::eventfd_write(wake_, 1);
}

// ---- the thread ------------------------------------------------------------------------------

// Stays awake for a while after each frame, so that a worker with a stream of them does not
// make a system call for each.
void ExceptionPath::Loop() {
  constexpr timespec kNap = {.tv_sec = 0, .tv_nsec = 50'000};
  constexpr int kNaps = 20;
  ::prctl(PR_SET_TIMERSLACK, 1000ul);  // ns: naps end when they should
  for (int idle = 0; !stop_;) {
    bool worked = ToKernel();
    worked |= FromKernel();
    idle = worked ? 0 : idle + 1;
    if (worked) continue;
    if (idle > kNaps) {
      Sleep();
      continue;
    }
    pollfd tap = {.fd = tap_is_gone_ ? -1 : tap_, .events = POLLIN, .revents = 0};
    ::ppoll(&tap, 1, &kNap, nullptr);
  }
}

bool ExceptionPath::ToKernel() {
  bool worked = false;
  for (std::size_t worker = 0; worker < kMaxWorkers; worker++) {
    Inbox& inbox = inboxes_[worker];
    std::uint32_t head = inbox.head.load(std::memory_order_relaxed);
    // order: acquire pairs with the store in Send(): the frames are there.
    const std::uint32_t tail = inbox.tail.load(std::memory_order_acquire);
    worked |= head != tail;
    while (head != tail) {
      const ssize_t length = inbox.lengths[head % kInboxFrames];
      const bool taken =
          ::write(tap_, Place(worker, head), static_cast<std::size_t>(length)) == length;
      Add(taken ? to_kernel_ : to_kernel_drops_, 1);
      head++;
      // order: release: we have read the place before the worker may write to it again.
      inbox.head.store(head, std::memory_order_release);
    }
  }
  return worked;
}

// What the port does not take at once is dropped, as it is on a link that is too slow.
bool ExceptionPath::FromKernel() {
  rte_mbuf* mbufs[kBurst];
  std::uint16_t n = 0;
  std::uint64_t too_long = 0;
  while (n < kBurst) {
    rte_mbuf* const mbuf = rte_pktmbuf_alloc(outlet_.pool);
    if (mbuf == nullptr) break;  // the frames wait in the tap
    const ssize_t length = ::read(tap_, rte_pktmbuf_mtod(mbuf, void*), room_bytes_);
    if (length <= 0 || length > static_cast<ssize_t>(room_bytes_)) {
      rte_pktmbuf_free(mbuf);
      if (length <= 0) {
        tap_is_gone_ |= length < 0 && errno == EBADFD;
        break;
      }
      too_long++;
      continue;
    }
    mbuf->data_len = static_cast<std::uint16_t>(length);
    mbuf->pkt_len = static_cast<std::uint32_t>(length);
    mbufs[n++] = mbuf;
  }
  const std::uint16_t sent =
      n == 0 ? n : rte_eth_tx_burst(outlet_.port_id, outlet_.tx_queue, mbufs, n);
  rte_pktmbuf_free_bulk(mbufs + sent, n - sent);
  Add(from_kernel_, sent);
  Add(from_kernel_drops_, n - sent + too_long);
  return n != 0 || too_long != 0;
}

bool ExceptionPath::InboxesAreEmpty() const noexcept {
  for (const Inbox& inbox : inboxes_) {
    if (inbox.tail.load() != inbox.head.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

void ExceptionPath::Sleep() {
  // order: sequentially consistent; see Send().
  asleep_.store(true);
  if (InboxesAreEmpty()) {
    pollfd fds[] = {{.fd = wake_, .events = POLLIN, .revents = 0},
                    {.fd = tap_is_gone_ ? -1 : tap_, .events = POLLIN, .revents = 0}};
    ::poll(fds, 2, -1);
  }
  asleep_.store(false);
  eventfd_t ignored;
  ::eventfd_read(wake_, &ignored);
}

}  // namespace rxtoken
