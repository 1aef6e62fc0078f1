// SPDX-License-Identifier: Apache-2.0
// ctl.h - what the verbs of rxtokenctl share: flags, the daemon's API, and how to fail.
#pragma once

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "rxtoken/rxtoken.h"
#include "rxtoken/v1/binding.pb.h"
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
  double timeout = 10;        // seconds that the daemon has for an answer
  std::function<int()> verb;  // what was asked for; answers the exit code
  mutable std::optional<Client> client;

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel("unix:" + run_dir + "/api.sock", grpc::InsecureChannelCredentials());
  }
  // `more`: seconds on top, for what takes its time.
  void SetDeadline(grpc::ClientContext& context, double more = 0) const {
    using std::chrono::system_clock;
    context.set_deadline(system_clock::now() + std::chrono::duration_cast<system_clock::duration>(
                                                   std::chrono::duration<double>(timeout + more)));
  }
  // Lets the call be ours: opens a session, if there is none yet, and names it in the metadata.
  Status AddSession(grpc::ClientContext& context) const;
  // What a call ended with.
  Status ToStatus(const grpc::Status& status) const;
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
  double clearing = 0;  // the kernel does that with a buffer's memory, at 100 MB/s or more
  if constexpr (std::is_same_v<Request, v1::BindRequest>) {
    clearing = static_cast<double>(request.buffer_bytes()) / 100e6;
  }
  ctl.SetDeadline(context, clearing);
  const Status status = ctl.AddSession(context);
  if (!status.ok()) return status;
  return ctl.ToStatus((stub.*method)(&context, request, response));
}

// Checks that a text is a number in [low, high], as it would be written here. CLI11 itself lets
// "nan" pass, and takes "-1" for a very large number.
template <typename T>
CLI::Validator Between(T low, T high) {
  return CLI::Validator(
      [low, high](const std::string& text) -> std::string {
        T value = {};
        const char* const end = text.data() + text.size();
        const auto [last, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc() && last == end && value >= low && value <= high) return "";
        return "'" + text + "' is not allowed: use a number from " + CLI::detail::to_string(low) +
               " to " + CLI::detail::to_string(high);
      },
      "");
}

// Adds --port, --src and so on. `match` must live as long as the verb.
void AddMatchFlags(CLI::App& verb, v1::Match& match, std::int32_t& priority);

// "p0:3" or "p0", which is queue 0.
Result<QueueId> ParseQueue(const std::string& text);

// For sizes: "64MiB" or a number of bytes.
CLI::Option* AddSize(CLI::App& verb, const std::string& flag,
                     const std::function<void(std::uint64_t)>& set, const std::string& what);

// Adds the verb that receives; recv.cc.
void AddRecv(CLI::App& app, Ctl& ctl);

}  // namespace rxtoken
