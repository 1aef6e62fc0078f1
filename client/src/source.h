// SPDX-License-Identifier: Apache-2.0
// source.h - who sent a frame, read from its headers.
//
// The headers are whatever came over the network: every read stays inside the given bytes,
// and what makes no sense is answered with a version or a port of 0.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <span>

#include "rxtoken/message.h"

namespace rxtoken {
inline namespace sdk {

// `headers`: from the IP header on to the end of the UDP header.
SourceAddress SourceOfDatagram(std::span<const std::byte> headers) noexcept;

// `frame`: from the Ethernet header on.
SourceAddress SourceOfFrame(std::span<const std::byte> frame) noexcept;

}  // namespace sdk
}  // namespace rxtoken
