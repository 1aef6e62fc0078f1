// SPDX-License-Identifier: Apache-2.0
// exception_path.h - the way of frames that no flow rule matches: to the kernel through a tap
// interface, and from the kernel through that interface out of the port.
//
//   worker -- Send: a copy --> inbox -- write() --> tap --> kernel
//   port <-- rte_eth_tx_burst -- mbuf <-- read() -- tap <-- kernel
//
// A thread of its own makes the system calls and waits for the kernel. It gets copies of
// frames, so that the pages of a binding never leave the worker that received them.
//
// Thread-safety: Send by any worker, the rest by the control thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "dataplane/dataplane.h"
#include "tokens/abi/limits.h"
#include "tokens/abi/status.h"

struct rte_mbuf;
struct rte_mempool;

namespace rxtoken {

class ExceptionPath {
 public:
  static constexpr std::uint16_t kBurst = 32;  // mbufs that it takes at once

  // The port that the path belongs to.
  struct Outlet {
    std::string port;             // its name, for messages
    std::uint32_t index = 0;      // its number, for the thread's name
    std::uint16_t port_id = 0;    // DPDK's number
    std::uint16_t tx_queue = 0;   // nobody else sends with it
    rte_mempool* pool = nullptr;  // for frames to be sent; RoomBytes() each, behind the headroom
  };

  // Bytes of the longest frame that goes through: what the port's MTU allows, with two VLAN tags.
  static std::uint32_t RoomBytes(std::uint16_t mtu_bytes) noexcept;

  // Makes the tap interface, gives it the port's MAC address and MTU, sets it up, and starts.
  // Precondition: the port is started.
  // Errors: kInvalidArgument     not a name for an interface
  //         kPermissionDenied    no right to /dev/net/tun, or CAP_NET_ADMIN is missing
  //         kAlreadyExists       there is an interface of that name
  //         kFailedPrecondition  no /dev/net/tun; the kernel refuses the address or the MTU
  static Result<std::unique_ptr<ExceptionPath>> Open(const std::string& interface,
                                                     const Outlet& outlet);

  // Removes the interface. Precondition: no worker uses it any more; the port is not stopped yet,
  // and the pool is freed only when the driver has given its mbufs back.
  ~ExceptionPath();
  ExceptionPath(const ExceptionPath&) = delete;
  ExceptionPath& operator=(const ExceptionPath&) = delete;

  // Copies a frame, of one or more segments, on its way to the kernel. False, and counted as a
  // drop, if it is longer than RoomBytes() or 256 frames of the calling worker are waiting
  // already. Precondition: called by a worker.
  // Blocks: never. A system call only to wake the thread, which stays awake for 1 ms after its
  // last frame.   Allocates: never.
  bool Send(const rte_mbuf* frame) noexcept;

  ExceptionPathInfo info() const;

 private:
  static constexpr std::uint32_t kInboxFrames = 256;

  // Copies of one worker's frames, waiting for the thread.
  struct Inbox {
    // [w]
    alignas(kWriterAlignBytes) std::atomic<std::uint32_t> tail{0};
    std::atomic<std::uint64_t> drops{0};
    std::array<std::uint32_t, kInboxFrames> lengths;
    // [thread]
    alignas(kWriterAlignBytes) std::atomic<std::uint32_t> head{0};
  };

  ExceptionPath(const std::string& interface, const Outlet& outlet);
  Status OpenTap();
  Status SetUp();

  std::byte* Place(std::size_t worker, std::uint32_t number) const noexcept {
    return places_.get() + (worker * kInboxFrames + number % kInboxFrames) * room_bytes_;
  }
  void Wake() noexcept;

  void Loop();
  bool ToKernel();    // true if there was something to do
  bool FromKernel();  // as above
  bool InboxesAreEmpty() const noexcept;
  void Sleep();

  // [control] before the thread starts, then constant
  const std::string interface_;
  const Outlet outlet_;
  const std::uint32_t room_bytes_;
  int tap_ = -1;
  int wake_ = -1;  // eventfd
  // Room for kInboxFrames of each worker that there could be. Memory that is not written to
  // costs nothing.
  const std::unique_ptr<std::byte[]> places_;

  std::array<Inbox, kMaxWorkers> inboxes_;
  alignas(kWriterAlignBytes) std::atomic<bool> asleep_{false};
  std::atomic<bool> stop_{false};

  // [thread], for others to read
  alignas(kWriterAlignBytes) std::atomic<std::uint64_t> to_kernel_{0};
  std::atomic<std::uint64_t> from_kernel_{0};
  std::atomic<std::uint64_t> to_kernel_drops_{0};  // by the kernel
  std::atomic<std::uint64_t> from_kernel_drops_{0};

  bool tap_is_gone_ = false;  // [thread] somebody deleted the interface
  std::thread thread_;        // the last: it uses the others
};

}  // namespace rxtoken
