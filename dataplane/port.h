// SPDX-License-Identifier: Apache-2.0
// port.h - one DPDK port: opened, started, and ready to have buffers attached to its queues.
//
// A queue without a buffer receives into the port's sink pool, so that its frames can be
// counted and dropped.
//
// Thread-safety: the control thread, except Attach and Detach.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dataplane/buffer.h"
#include "dataplane/dataplane.h"
#include "dataplane/exception_path.h"
#include "dataplane/router_pool.h"
#include "tokens/abi/status.h"

struct rte_device;
struct rte_mempool;

namespace rxtoken {

class Port {
 public:
  // Finds the device, configures all its queues and starts it. `index` is the dataplane's
  // number for the port and makes the names of its pools unique.
  // Errors: kInvalidArgument     more queues than the driver has
  //         kNotFound            no driver for such a device, no such device
  //         kPermissionDenied    a capability is missing; it is named
  //         kUnimplemented       a driver that cannot receive into our buffers
  //         kFailedPrecondition  the device is in use, or the driver refused; its log lines
  //         kResourceExhausted   memory_mib is too small for the port's own pools
  //         as ExceptionPath::Open, if one is asked for
  static Result<std::unique_ptr<Port>> Open(const PortOptions& options, std::uint32_t index);

  // Stops and removes the device and frees its pools.
  // Precondition: nobody polls it, and every mbuf taken from sink() is back.
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  std::uint16_t id() const noexcept { return id_; }  // for rte_eth_rx_burst
  const std::string& name() const noexcept { return options_.name; }
  const std::string& driver() const noexcept { return driver_; }  // "net_null"
  std::uint32_t queues() const noexcept { return options_.queues; }
  std::uint32_t ring_entries() const noexcept { return ring_entries_; }
  rte_mempool* sink() const noexcept { return sink_; }
  // Null: frames that no rule matches are dropped.
  ExceptionPath* exception_path() const noexcept { return exception_path_.get(); }

  // The device itself writes to the pages; a buffer must be mapped with MapForDma.
  bool dma() const noexcept { return dma_; }
  // The polling CPU writes the payload: it pays to fetch a page's first data line for writing
  // when the page is recycled. Where it is false that would only cost.
  bool writes_payload() const noexcept { return writes_payload_; }

  // The driver (net_memif) forgets the mbufs of a frame when the pool runs dry in the middle of
  // it, and delivers the rest as a frame of its own. So it must not be polled for more frames
  // than there are surely mbufs for.
  bool forgets_unfinished_frames() const noexcept { return driver_ == "net_memif"; }
  // Of what may be received: with memif the other side decides, with pcap the file.
  std::uint32_t max_frame_bytes() const noexcept { return 65535; }

  // Can `queues` queues of this port receive into a pool of `pages` mbufs? `data_room_bytes` is
  // what one mbuf has of its page, headroom included. `binding` is for messages.
  // Errors: kInvalidArgument, with the least that would do
  Status CheckPages(const std::string& binding, std::uint32_t page_bytes,
                    std::uint32_t data_room_bytes, std::uint64_t pages, std::uint32_t queues) const;

  // Frames that arrive from the next burst on are in mbufs of `pool`, or in those that the
  // driver has posted before: they may still come from the former pool. Precondition:
  // CheckPages. Thread-safety: the thread that polls the queue, between two bursts, or any
  // while nobody polls it (see RouterPool::Attach).
  void Attach(std::uint32_t queue, rte_mempool* pool) noexcept { routers_[queue]->Attach(pool); }
  void Detach(std::uint32_t queue) noexcept { routers_[queue]->Attach(sink_); }

  // Lets the device write to the buffer. For ports with dma() only.
  // Errors: as Buffer::RegisterForDma; kFailedPrecondition if the device cannot map it
  Status MapForDma(Buffer& buffer);
  // Precondition: the device has nothing of the buffer posted any more.
  void UnmapForDma(Buffer& buffer);

  // All but the queues' worker, binding and counters, which are for others to fill in.
  PortInfo info() const;

 private:
  Port(const PortOptions& options, std::uint32_t index) : options_(options), index_(index) {}

  // Open, in two steps; after an error the destructor undoes what there is.
  Status Probe();
  Status Configure(std::uint32_t spare_mbufs);
  Status OpenExceptionPath();

  PortOptions options_;
  std::uint32_t index_;
  rte_device* device_ = nullptr;
  std::uint16_t id_ = 0;
  std::string driver_;
  std::uint32_t ring_entries_ = 0;
  std::uint16_t tx_entries_ = 256;  // the driver changes it to what it can have
  std::uint32_t required_room_bytes_ = 0;
  bool dma_ = false;
  bool writes_payload_ = true;
  rte_mempool* sink_ = nullptr;
  std::vector<std::unique_ptr<RouterPool>> routers_;
  rte_mempool* exception_pool_ = nullptr;
  std::unique_ptr<ExceptionPath> exception_path_;
};

}  // namespace rxtoken
