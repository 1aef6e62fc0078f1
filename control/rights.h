// SPDX-License-Identifier: Apache-2.0
// rights.h - who a caller is, what it may do, and how much it may have.
//
// A user is a local user id, or the name in a certificate. Everything has a user: that of the
// session which made it. To other users, unless they are administrators, it does not exist.
//
//   Access   what the configuration says about users
//   Rights   what it says about one of them
//   User     what one of them has
//   Charge   the part of it that belongs to one object, and goes with the object
//
// Thread-safety: the control thread only.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rxtoken/v1/flow.pb.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// What a user can have so much of.
enum class Resource {
  kSessions,
  kBindings,
  kBufferBytes,
  kRxSockets,
  kRingEntries,    // of all rx sockets, for each worker
  kHeldFragments,  // max_held_fragments of all rx sockets, for each worker
  kFlows,
  kStreams,  // Receive calls that run
};
inline constexpr std::array<std::string_view, 8> kResourceNames = {
    "sessions",     "bindings",       "buffer_bytes", "rx_sockets",
    "ring_entries", "held_fragments", "flows",        "streams"};
using Amounts = std::array<std::uint64_t, kResourceNames.size()>;

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

struct Limits {
  Amounts amounts = {};
  // What a rx socket gets that asks for no max_held_fragments; 0: what is left of
  // held_fragments.
  std::uint32_t default_held_fragments = 0;
};
// For whom the configuration says nothing else. They keep one user from taking everything, and
// are more than a program needs that does not try to.
Limits DefaultLimits();

// Some users, and what they may do.
struct Tenant {
  std::vector<uid_t> uids;
  std::vector<gid_t> gids;
  std::vector<std::string> certificate_names;
  // Whose queues they may bind, and what rules may name. Not there: all.
  std::optional<std::vector<std::string>> ports;
  // Within one of which each of their rules must match. Not there: any, on `ports`.
  std::optional<std::vector<v1::Match>> flows;
  // Of other users, in whose pages they may be lent frames. They can read all that is in these.
  std::vector<std::string> bindings;
  Limits limits = DefaultLimits();
};

// What the kernel, or a certificate, says of a caller.
struct Credentials {
  std::int64_t pid = 0;
  uid_t uid = 0;
  std::vector<gid_t> gids = {};
  std::string certificate_name = {};  // not empty: a remote one, of whom nothing else is known
};

// "uid:1000", "certificate:rx1.example"
std::string UserName(const Credentials& credentials);

struct Rights {
  std::string user;                // as UserName()
  bool admin = false;              // sees and changes what belongs to others
  const Tenant* tenant = nullptr;  // may do only what it says; null: everything
  Limits limits = {};
};

struct Access {
  bool configured = false;  // false: there is only the daemon's own user, and root
  std::optional<gid_t> admin_gid;
  std::vector<Tenant> tenants;  // none: everybody may do everything
  Limits limits = DefaultLimits();

  // Administrators are root, the daemon's own user, and members of the group admin_gid.
  // Errors: kPermissionDenied  there are tenants, and this is none of them
  Result<Rights> RightsOf(const Credentials& credentials) const;
};

// How much of each resource one user has.
struct User {
  std::string name;
  Amounts used = {};
};

// What an object takes of its user's limits, until it goes.
class Charge {
 public:
  Charge() = default;  // nothing, of nobody
  Charge(Charge&& other) noexcept = default;
  Charge& operator=(Charge&& other) noexcept;
  ~Charge();

  // Errors: kResourceExhausted  a limit is reached; names `object`, the limit and what to do
  static Result<Charge> Make(const std::shared_ptr<User>& user, const Limits& limits,
                             const std::string& object, const Amounts& amounts);

  const User* user() const noexcept { return user_.get(); }

 private:
  std::shared_ptr<User> user_;
  Amounts amounts_ = {};
};

// Amounts with one or two of them not zero.
Amounts AmountOf(Resource resource, std::uint64_t amount);

}  // namespace rxtoken
