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

class ApiServer {
 public:
  // Listens on the Unix socket `path`. `loop` and `manager` outlive the server, and `manager`
  // is used on the loop only.
  // Errors: kFailedPrecondition  gRPC cannot listen there
  static Result<std::unique_ptr<ApiServer>> Start(ControlLoop& loop, Manager& manager,
                                                  const std::string& path);
  // Stops; running streams end with UNAVAILABLE, other calls have a moment to finish. The
  // loop must still run.
  virtual ~ApiServer() = default;
};

}  // namespace rxtoken
