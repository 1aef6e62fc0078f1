// SPDX-License-Identifier: Apache-2.0
// attach.h - the messages of the descriptor socket, over which file descriptors travel.
//
// A SOCK_SEQPACKET Unix socket beside the gRPC one. One connection is one session: when it
// ends, for whatever reason, everything the session owns goes with it.
//
//   application                                   daemon
//   kHello                                 ->
//                                          <-     kWelcome    session
//   kAttach     secret of OpenRxSocket     ->
//                                          <-     kAttached   + 3 fds: descriptor rings,
//                                                 return rings, doorbell socket
//   kMapBuffer  id of a binding            ->
//                                          <-     kBuffer     + 1 fd: the buffer, read-only
//
// Every message is one AttachMessage; unused fields are zero. The daemon answers each
// request with one message, which must be read before the next request; a refusal is the
// answer's kind with `code` not 0 and no descriptor. A message that is not of this form ends
// the connection, as does one that comes before its time, and 5 to 10 s without kHello.
//
// The doorbell is one end of a Unix stream socket: a byte arrives when the application has
// asked for one (ReturnRing::waiting) and something was published; end of file means that
// the rx socket has ended.
#pragma once

#include <array>
#include <cstdint>

#include "tokens/abi/ring.h"

namespace rxtoken {

enum class AttachKind : std::uint32_t {
  kHello = 1,
  kWelcome = 2,
  kAttach = 3,
  kAttached = 4,
  kMapBuffer = 5,
  kBuffer = 6,
};

struct AttachMessage {
  std::uint32_t magic;         // kAbiMagic
  std::uint16_t abi_major;     // kAbiMajor
  std::uint16_t abi_minor;     // kAbiMinor
  std::uint32_t kind;          // AttachKind
  std::uint32_t code;          // answers: Code; 0 = granted
  std::array<char, 32> key;    // kWelcome: session, kAttach: secret; 32 hex digits, no NUL
  std::uint64_t id;            // kAttached: rx socket; kMapBuffer, kBuffer: binding
  std::uint64_t bytes;         // kBuffer: size of the buffer
  std::uint32_t page_bytes;    // kBuffer
  std::uint32_t lanes;         // kAttached: how many rings each of the first two fds holds
  std::uint32_t entries;       // kAttached: entries of each ring
  std::uint32_t reserved;      // zero
  std::array<char, 168> text;  // answers with code not 0: NUL-terminated reason
};
static_assert(sizeof(AttachMessage) == 248);
static_assert(offsetof(AttachMessage, key) == 16);
static_assert(offsetof(AttachMessage, id) == 48);
static_assert(offsetof(AttachMessage, text) == 80);

}  // namespace rxtoken
