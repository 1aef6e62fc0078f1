// SPDX-License-Identifier: Apache-2.0
// hardware_flow.h - a flow rule that a port applies itself: it delivers matching frames to the
// rule's queue (rte_flow).
//
// That only places frames. Which rx socket gets one is decided by the worker in any case, so
// that a port which refuses a rule, or matches less than it says, costs a copy and no frame.
//
// Thread-safety: the control thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dataplane/flow_rule.h"
#include "dataplane/port.h"
#include "tokens/abi/status.h"

struct rte_flow;

namespace rxtoken {

class HardwareFlow {
 public:
  // Asks the driver for what `rule` says. A rule for a protocol of either IP family is two to
  // a driver, and both must be taken.
  //
  // Drivers count priorities from 0, the highest, and many know no other. So a priority of 0
  // or more becomes 0, and -n becomes n. Where rules of priorities above 0 overlap, the driver
  // chooses the queue.
  //
  // Precondition: `rule.steer_to` is a queue of `port`, and the match is not for another one.
  // Errors: kUnimplemented       the driver cannot do that, or cannot place frames at all
  //         kFailedPrecondition  it refuses for another reason
  //         The message is the driver's.
  static Result<std::unique_ptr<HardwareFlow>> Install(const Port& port, const FlowRule& rule);

  // The port delivers as before. Precondition: the port is open.
  ~HardwareFlow();
  HardwareFlow(const HardwareFlow&) = delete;
  HardwareFlow& operator=(const HardwareFlow&) = delete;

 private:
  explicit HardwareFlow(std::uint16_t port_id) : port_id_(port_id) {}
  Status Add(const Port& port, const FlowRule& rule, IpFamily family);

  const std::uint16_t port_id_;
  std::vector<rte_flow*> flows_;
};

}  // namespace rxtoken
