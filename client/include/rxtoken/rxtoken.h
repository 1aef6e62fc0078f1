// SPDX-License-Identifier: Apache-2.0
// rxtoken.h - the SDK: receive packets in place, from the buffers that rxtokend receives into.
//
//   Client      a session with the daemon. What is made through it ends with it.
//   RxSocket    an endpoint that flow rules deliver to; lends messages to the application.
//   Message     one received message, read in place and given back.
//
// Errors are values: a function that can fail answers a Status or a Result<T>. Codes are
// those of gRPC, and messages say what to do. kUnavailable always means that the session has
// ended (the daemon stopped, died, or was restarted): start again with Client::Connect(). All
// tokens from before are void then: what is still held can be read, and given back, which sends
// nothing, neither to the former daemon nor to a new one.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rxtoken/message.h"
#include "tokens/abi/limits.h"
#include "tokens/abi/status.h"

namespace rxtoken {
inline namespace sdk {

// The directory of the daemon's sockets: $RXTOKEN_RUN_DIR; else where rxtokend itself puts
// it: $RUNTIME_DIRECTORY, /run/rxtoken for root, $XDG_RUNTIME_DIR/rxtoken,
// /tmp/rxtoken-<uid>. An ordinary user who runs no daemon of his own gets /run/rxtoken if
// the system's daemon is there.
std::string DefaultRunDir();

struct ConnectOptions {
  std::string run_dir = DefaultRunDir();
  std::chrono::milliseconds answer_timeout{10'000};  // that the daemon has to answer
};

enum class Memory {
  kAuto,   // huge pages if the host has enough free ones, else plain
  kPlain,  // 4 KiB pages
  kHuge,   // 2 MiB pages, or an error
};

struct QueueId {
  std::string port;
  std::uint32_t queue = 0;
};

struct BindOptions {
  std::string name;                              // 1 to 64 of letters, digits, '.', '_', '-'
  std::uint64_t buffer_bytes = 0;                // a multiple of page_bytes
  std::uint32_t page_bytes = kDefaultPageBytes;  // 2048, 4096, 16384 or 65536
  // A power of two; each gets at least 2048 bytes of the page, which is free again when all
  // of them were given back.
  std::uint32_t frames_per_page = 1;
  Memory memory = Memory::kAuto;
  std::vector<QueueId> queues = {};  // none of them in a binding yet; see AttachQueues()
};

enum class Content {
  kPayload,  // the payload of a UDP datagram; any other frame whole
  kFrame,    // whole frames from the Ethernet header on, without FCS
};

// What happens to a frame that lies outside the bindings which its RxSocket may use.
enum class Outside {
  kCopy,  // copied into a page of one of them; Message::copied() says so
  kDrop,  // dropped and counted
};

// What happens when a RxSocket's ring is full, or it holds max_held_fragments.
enum class Slow {
  kDropNew,  // what arrives is dropped
  // Above max_held_fragments, what arrives is copied into a private buffer of copy_out_bytes while
  // that has room; Message::copied() says so.
  kCopyOut,
  // Queues whose frames can only be for this RxSocket are not polled until it has room: with memif
  // or a file nothing is lost. What other queues bring is dropped.
  kPause,
};

// What happens when somebody updates or deletes a flow rule of a RxSocket.
enum class Steering {
  kMigrate,  // it is done
  kStrict,   // it is refused with kFailedPrecondition, unless forced
};

struct RxSocketOptions {
  std::string name;  // 1 to 64 of letters, digits, '.', '_', '-'
  Content content = Content::kPayload;
  std::uint32_t ring_entries = kDefaultRingEntries;  // for each worker; a power of two, 64..65536
  std::uint32_t max_held_fragments = 0;    // from each worker; what is more is dropped; 0: no limit
  std::vector<std::string> bindings = {};  // that it may use, by name; empty: any
  Outside outside = Outside::kCopy;
  Steering steering = Steering::kMigrate;
  Slow slow = Slow::kDropNew;
  // A multiple of 4096, up to 256 MiB; only with kCopyOut, which needs max_held_fragments.
  std::uint64_t copy_out_bytes = 0;
  // 100 ms..1 h that a page may be held, from the arrival of the last frame on it that was lent;
  // what is held longer is taken back, see BindingEvent::Kind::kExpired. 0: no limit.
  std::chrono::milliseconds lease = {};
};

inline constexpr std::uint8_t kTcp = 6;
inline constexpr std::uint8_t kUdp = 17;

// Which frames a flow rule is for. What is not set matches everything; Match{} is every frame.
struct Match {
  std::string port = {};                          // name of a port
  std::optional<std::uint32_t> queue = {};        // needs `port`
  std::optional<std::uint16_t> vlan = {};         // 0..4094, of the outermost tag; 0 = untagged
  std::string source = {};                        // "10.0.0.0/8", "2001:db8::1"
  std::string destination = {};                   // as `source`, and of the same family
  std::optional<std::uint8_t> protocol = {};      // IP protocol number: kUdp, kTcp, ...
  std::optional<std::uint16_t> source_port = {};  // not 0; needs `protocol` kUdp or kTcp
  std::optional<std::uint16_t> destination_port = {};  // as `source_port`
};

enum class FlowId : std::uint64_t {};
enum class BindingId : std::uint64_t {};

struct FlowOptions {
  int priority = 0;  // -32768..32767, highest wins; among equals the rule that fixes more bits
  // The port is asked to deliver matching frames to this queue; `rxtokenctl flow list` shows
  // whether it does. The rule works either way.
  std::optional<QueueId> steer_to = {};
};

// Whether a flow rule is changed although a RxSocket that it delivers to is Steering::kStrict.
enum class Force { kNo, kYes };

// What happened to a binding that a RxSocket was lent pages of, or to the RxSocket.
struct BindingEvent {
  enum class Kind {
    // It was unbound. What is held can be read and given back as before. What other workers
    // have lent meanwhile may still come.
    kUnbound,
    // Its drain timeout has passed, and what was held was taken back. It can be read until it
    // is given back here, which sends nothing any more.
    kRevoked,
    // Fragments were held longer than RxSocketOptions::lease and were taken back: their payload
    // may change from now on. They are those of messages whose arrival_mono() lies that far back;
    // giving them back sends nothing.
    kExpired,
    // Less than an eighth of its pages are free, and this RxSocket holds some. Again only after
    // a quarter was free.
    kLowWater,
    // On some worker, RxSocketOptions::max_held_fragments are held, and what arrives is dropped or
    // copied. Not with Slow::kPause.
    // Again only after half of them were given back.
    kHeldLimit,
  };
  Kind kind;
  BindingId binding;  // 0 with kHeldLimit

  friend bool operator==(const BindingEvent&, const BindingEvent&) = default;
};

// A snapshot: lent = returned + outstanding. Messages where it says so, else fragments; drops
// and refusals are by reason, as listed in tokens/abi/counters.h.
struct RxSocketStats {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t copied_messages = 0;
  std::uint64_t lent = 0;
  std::uint64_t returned = 0;
  std::uint64_t revoked = 0;  // part of `returned`
  std::uint64_t outstanding = 0;
  std::uint64_t waiting = 0;  // for one of the 32 slots
  std::uint32_t slots_in_use = 0;
  std::uint64_t void_returns = 0;                 // fragments that were void, and not sent
  std::map<std::string, std::uint64_t> drops;     // messages
  std::map<std::string, std::uint64_t> refusals;  // tokens
};

// A timeout that never passes.
inline constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

// An endpoint that flow rules deliver to.
//
// The destructor closes it: its flow rules are removed, and what is still held goes back to
// its bindings. It may outlive its Client, but then it only answers kUnavailable.
class RxSocket {
 public:
  RxSocket(RxSocket&&) noexcept;
  RxSocket& operator=(RxSocket&&) noexcept;
  ~RxSocket();

  const std::string& name() const noexcept;

  // Receives messages into the front of `out` and answers those. Empty: `timeout` passed, a
  // signal was handled, or there is an event to take. Messages of one flow come in the order
  // of their arrival.
  //
  // First gives back whatever `out` still holds, so that a loop over one array needs nothing
  // else, and sends what waits to be sent (see Flush). Keep a message by moving it out.
  //
  // Units:         zero polls; kForever waits without a limit. A wait polls for 20 us before
  //                it sleeps.
  // Errors:        kInvalidArgument  `out` has no room
  //                kUnavailable      the RxSocket was closed or the daemon is gone; payload
  //                                  that is still held may change from now on
  //                others            a buffer cannot be mapped, and why; call again to retry
  // Thread-safety: one thread at a time; others may give back meanwhile.
  // Blocks:        at most `timeout`, and for a request to the daemon when a binding delivers
  //                for the first time. Polling makes no system call, except that one in 65536
  //                polls that find nothing asks whether the daemon is still there.
  // Allocates:     once for each message of more than one fragment.
  Result<std::span<Message>> Receive(std::span<Message> out, std::chrono::nanoseconds timeout);

  // What happened to bindings since the last call, as far as Receive() has come: each event of
  // each binding once, but those that can come again whenever there was something new.
  //
  // Thread-safety: as Receive(), and not while it runs.   Blocks: never.
  std::vector<BindingEvent> TakeEvents();

  // Gives fragments back by hand, in any order and at any time, and sends them at once. What
  // finds no room in the return ring is kept, and sent by a later call of any function here.
  // A token that this RxSocket does not hold is refused by the daemon and counted in
  // RxSocketStats::refusals.
  //
  // Thread-safety: any thread; a mutex is held for some nanoseconds per token.
  // Blocks:        never.   Allocates: when the return ring is full.
  void Return(std::span<const HeldToken> tokens) noexcept;
  // The same for whole messages.
  void Return(std::span<Message> messages) noexcept;

  // Sends what Message::Return() and ~Message() have put aside. They send 64 at a time, so
  // that a message costs no access to memory that the daemon shares; the rest waits for the
  // next Receive() or Return(), and never while a Receive() sleeps. Call it before a pause.
  //
  // Thread-safety: any thread.   Blocks: never.   Allocates: never.
  void Flush() noexcept;

  // Asks the daemon. Errors: kNotFound if it was closed, kUnavailable.
  Result<RxSocketStats> GetStats() const;

 private:
  friend class Client;
  struct Impl;
  explicit RxSocket(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// A session with the daemon. Bindings, RxSockets and flow rules that are made through it
// belong to it, and end with it: when it is destroyed, and when the process dies.
//
// Thread-safety: all functions, by any thread. Each is one request to the daemon, and waits
//                for its answer. Errors of the daemon come as they are; proto/ lists them.
class Client {
 public:
  // Errors: kUnavailable         no daemon listens in run_dir
  //         kPermissionDenied    its sockets may not be opened
  //         kFailedPrecondition  it speaks another version of the ABI
  static Result<Client> Connect(const ConnectOptions& options = {});

  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  // What names this session in gRPC calls beside those of the SDK: in a request's `session`, or
  // in the metadata `rxtoken-session`. Keep it secret.
  const std::string& session_key() const noexcept;

  // Creates a buffer and lets the queues receive into it, without stopping the port.
  Result<BindingId> Bind(const BindOptions& options);
  // Lets further queues receive into it. One that another binding has is moved, and no frame is
  // lost.
  Status AttachQueues(const std::string& binding, std::span<const QueueId> queues);
  // Ends it. What is held stays readable and returnable; the memory goes with the last of it.
  // What is still held after `drain_timeout`, if that is not zero, is revoked; a second call
  // may set another. At most an hour.
  Status Unbind(const std::string& name, std::chrono::milliseconds drain_timeout = {});

  Result<RxSocket> OpenRxSocket(const RxSocketOptions& options);
  // Reads one that somebody else opened, without a session, and gave the secret of: so that one
  // flow rule can deliver to several processes. It ends with this one.
  Result<RxSocket> AttachRxSocket(const std::string& name, std::string_view attach_secret);

  // Delivers matching frames to `rx_socket`.
  Result<FlowId> AddFlow(const Match& match, const RxSocket& rx_socket,
                         const FlowOptions& options = {});
  // To each of 1 to 32, on the same page. Who is slow drops his own, and holds nobody up.
  Result<FlowId> AddFlow(const Match& match, std::span<const RxSocket* const> rx_sockets,
                         const FlowOptions& options = {});
  // Points a rule at other RxSockets in one step: each frame goes to the former or the new ones.
  Status UpdateFlow(FlowId flow, const RxSocket& rx_socket, Force force = Force::kNo);
  Status UpdateFlow(FlowId flow, std::span<const RxSocket* const> rx_sockets,
                    Force force = Force::kNo);
  Status DeleteFlow(FlowId flow, Force force = Force::kNo);

 private:
  friend class RxSocket;
  struct Connection;
  explicit Client(std::shared_ptr<Connection> connection) noexcept;
  std::shared_ptr<Connection> connection_;  // shared with the RxSockets
};

// For programs that have nothing better to do about an error: prints it and exits with 1.
inline void OrDie(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T OrDie(Result<T> result) {
  OrDie(result.status());
  return std::move(result).value();
}

}  // namespace sdk
}  // namespace rxtoken
