// SPDX-License-Identifier: Apache-2.0
// services.h - the gRPC server: the six services of rxtoken.v1, health and reflection.
//
// Thread-safety: Start, Stop and the destructor belong to one thread. Handlers run on gRPC's
//                threads; they post to the control loop and wait for its answer.
#pragma once

#include <memory>
#include <string>

#include "control/control_loop.h"
#include "control/manager.h"
#include "control/run_dir.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// A TCP socket for the API, besides the Unix one.
struct TcpOptions {
  std::string address;  // ADDRESS:PORT; empty: there is none
  std::string
      certificate;        // files in PEM: ours with those up to its root, its key, and the root of
  std::string key;        // those that clients must have. All three, or none: then only on a
  std::string client_ca;  // loopback address.
};

inline constexpr std::size_t kMaxApiConnections = 1024;

class ApiServer {
 public:
  // Listens in `place`, where nothing is yet. `loop`, which runs, and `manager` outlive the
  // server, and `manager` is used on the loop only.
  // At most kMaxApiConnections at a time, or an eighth of the descriptors that the process may
  // have if that is less, and half of that from one user. More are closed at once.
  // Errors: kInvalidArgument     an address that is none, or may not be used without a certificate;
  //                              a file that cannot be read
  //         kFailedPrecondition  the socket file cannot be made, or the address not be had
  //         kResourceExhausted   no file descriptors left
  static Result<std::unique_ptr<ApiServer>> Start(ControlLoop& loop, Manager& manager,
                                                  const SocketPlace& place,
                                                  const TcpOptions& tcp = {});
  // What it listens on by TCP; empty: nothing.
  virtual std::string tcp_address() const = 0;
  // Stops; running streams end with UNAVAILABLE, other calls have a moment to finish. The
  // loop must still run.
  virtual ~ApiServer() = default;
};

}  // namespace rxtoken
