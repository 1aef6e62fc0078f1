// SPDX-License-Identifier: Apache-2.0
// parse.h - from the bytes of a frame to the key of its flow and the place of its payload.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dataplane/flow_rule.h"
#include "tokens/abi/counters.h"

namespace rxtoken {

enum class ParseStatus : std::uint8_t { kOk, kTruncated, kMalformed };

struct ParsedFrame {
  FlowKey key;
  std::uint16_t payload_offset;  // from the start of the frame; UDP only, else 0
  std::uint16_t payload_length;  // UDP only, else 0
  std::uint8_t ip_header_distance;  // payload_offset - start of the IP header; UDP only
  bool udp;                      // a whole UDP datagram: payload_* are set
};

}  // namespace rxtoken
