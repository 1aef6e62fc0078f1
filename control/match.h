// SPDX-License-Identifier: Apache-2.0
// match.h - from the API's Match to the dataplane's FlowMatch.
//
// Thread-safety: pure functions.
#pragma once

#include <string>

#include "dataplane/flow_rule.h"
#include "rxtoken/v1/flow.pb.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// "10.0.0.0/8", "192.0.2.1" (= /32), "2001:db8::/32"; empty is any address.
// `field` names the field in messages.
// Errors: kInvalidArgument  not an address, length out of range, bits set below the prefix
Result<IpPrefix> ParsePrefix(const std::string& field, const std::string& text);

// Everything of `match` but port and queue, which only the manager knows; it is only
// checked that a queue comes with a port.
// Errors: kInvalidArgument  as Flows.AddFlow in flow.proto
Result<FlowMatch> ParseMatch(const v1::Match& match);

// Whether every frame that `inner` matches is one that `outer` matches.
bool Covers(const FlowMatch& outer, const FlowMatch& inner);

}  // namespace rxtoken
