// SPDX-License-Identifier: Apache-2.0
// ctl.h - what the verbs of rxtokenctl share: flags, the daemon's API, and how to fail.
#pragma once

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "rxtoken/rxtoken.h"
#include "rxtoken/v1/flow.pb.h"

namespace rxtoken {

// Exit codes.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;  // the daemon refused, or is not there
inline constexpr int kUsage = 2;

// The command line.
struct Ctl {
  std::string run_dir = DefaultRunDir();
  bool json = false;
  std::function<int()> verb;  // what was asked for; answers the exit code

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel("unix:" + run_dir + "/api.sock", grpc::InsecureChannelCredentials());
  }
};

// Prints "rxtokenctl: NOT_FOUND: ..." to stderr; answers kFailed.
int Fail(const Status& status);

// Makes one unary call.
template <typename Stub, typename Request, typename Response>
Status Call(const Ctl& ctl,
            grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
            const Request& request, Response* response) {
  Stub stub(ctl.Channel());
  grpc::ClientContext context;
  const grpc::Status status = (stub.*method)(&context, request, response);
  return status.ok() ? Status()
                     : Status(static_cast<Code>(status.error_code()), status.error_message());
}

// Adds --port, --src and so on. `match` must live as long as the verb.
void AddMatchFlags(CLI::App& verb, v1::Match& match, std::int32_t& priority);

// "p0:3" or "p0", which is queue 0.
Result<QueueId> ParseQueue(const std::string& text);

// Adds the verb that receives; recv.cc.
void AddRecv(CLI::App& app, Ctl& ctl);

}  // namespace rxtoken
