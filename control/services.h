// SPDX-License-Identifier: Apache-2.0
// services.h - the gRPC server: the five services of rxtoken.v1, health and reflection.
//
// Thread-safety: Start, Stop and the destructor belong to one thread. Handlers run on gRPC's
//                threads; they post to the control loop and wait for its answer.
#pragma once

#include <memory>
#include <string>

#include "control/control_loop.h"
#include "control/manager.h"
#include "tokens/abi/status.h"

namespace rxtoken {

inline constexpr std::size_t kMaxApiConnections = 1024;

class ApiServer {
 public:
  // Listens on the Unix socket `path`. `loop`, which runs, and `manager` outlive the
  // server, and `manager` is used on the loop only.
  // At most kMaxApiConnections at a time, or an eighth of the descriptors that the process may
  // have if that is less, and half of that from one user. More are closed at once.
  // Errors: kFailedPrecondition  the socket file cannot be made
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<ApiServer>> Start(ControlLoop& loop, Manager& manager,
                                                  const std::string& path);
  // Stops; running streams end with UNAVAILABLE, other calls have a moment to finish. The
  // loop must still run.
  virtual ~ApiServer() = default;
};

}  // namespace rxtoken
