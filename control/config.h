// SPDX-License-Identifier: Apache-2.0
// config.h - what the daemon starts with, from a YAML file and from flags.
//
// The nouns and limits are those of the API; a sample is in deploy/. What only the running
// daemon can judge (is there such a port, is the prefix well-formed) is left to it.
//
// Thread-safety: one thread, since users and groups are looked up by name.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "control/rights.h"
#include "control/services.h"
#include "dataplane/dataplane.h"
#include "rxtoken/v1/binding.pb.h"
#include "rxtoken/v1/flow.pb.h"
#include "rxtoken/v1/rx_socket.pb.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// Something asked for, and where: "rxtokend.yaml:12: bindings[0]", "--bind 'b0=p0:0'".
template <typename Request>
struct Item {
  std::string where;
  Request request;
};

struct Config {
  std::string run_dir;              // empty: DefaultRunDir()
  std::optional<gid_t> access_gid;  // of the group that may connect
  Access access;
  TcpOptions tcp;
  DataplaneOptions dataplane;
  std::vector<Item<PortOptions>> ports;
  std::vector<Item<v1::BindRequest>> bindings;
  std::vector<Item<v1::OpenRxSocketRequest>> rx_sockets;
  std::vector<Item<v1::AddFlowRequest>> flows;
};

// Errors: kInvalidArgument  the file cannot be read, or has a key or value that is not
//                           allowed; the message names file, line, key, value, what is allowed
Result<Config> LoadConfig(const std::string& path);
// The same from the file's text; `name` stands for the file in messages.
Result<Config> ParseConfig(const std::string& name, const std::string& text);

// NAME=DEVICE[;queues=N][;ring=N]
Result<Item<PortOptions>> ParsePortFlag(const std::string& text);
// NAME=PORT:QUEUE[,PORT:QUEUE...][,size=BYTES][,page=BYTES][,memory=plain|huge]
// The size is 64 MiB unless it is given.
Result<Item<v1::BindRequest>> ParseBindFlag(const std::string& text);
// A CPU number, or "any": not pinned (-1).
Result<int> ParseWorkerFlag(const std::string& text);

}  // namespace rxtoken
