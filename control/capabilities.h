// SPDX-License-Identifier: Apache-2.0
// capabilities.h - gives up what the process may do but does not need any more.
//
// Thread-safety: one thread, once; other threads may run, and lose theirs, too.
#pragma once

#include <cstdint>

#include "tokens/abi/status.h"

namespace rxtoken {

// A capability's bit: CapabilityBit(CAP_NET_ADMIN).
constexpr std::uint64_t CapabilityBit(int capability) { return std::uint64_t{1} << capability; }

// Leaves each thread of the process with no capability but those in `kept` that it has, and with
// none to be gained by running another program.
// Errors: kInternal  a thread does not take part, because it blocks all signals; it is named
Status KeepCapabilities(std::uint64_t kept);

}  // namespace rxtoken
