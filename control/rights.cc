// SPDX-License-Identifier: Apache-2.0
#include "control/rights.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace rxtoken {
namespace {

template <typename T>
bool Contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

bool IsOf(const Credentials& credentials, const Tenant& tenant) {
  if (!credentials.certificate_name.empty()) {
    return Contains(tenant.certificate_names, credentials.certificate_name);
  }
  return Contains(tenant.uids, credentials.uid) ||
         std::any_of(credentials.gids.begin(), credentials.gids.end(),
                     [&](gid_t gid) { return Contains(tenant.gids, gid); });
}

std::uint64_t ThreeQuartersOfMemory() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 4 * 3;
}

}  // namespace

std::string UserName(const Credentials& credentials) {
  if (!credentials.certificate_name.empty()) return "certificate:" + credentials.certificate_name;
  return "uid:" + std::to_string(credentials.uid);
}

Limits DefaultLimits() {
  Limits limits;
  const auto set = [&](Resource resource, std::uint64_t amount) {
    limits.amounts[static_cast<std::size_t>(resource)] = amount;
  };
  set(Resource::kSessions, 256);
  set(Resource::kBindings, 1024);
  set(Resource::kBufferBytes, ThreeQuartersOfMemory());
  set(Resource::kRxSockets, 16'384);
  set(Resource::kRingEntries, 1 << 24);
  set(Resource::kHeldFragments, kUnlimited);
  set(Resource::kFlows, 1 << 17);
  set(Resource::kStreams, 48);
  return limits;
}

Result<Rights> Access::RightsOf(const Credentials& credentials) const {
  Rights rights{.user = UserName(credentials), .limits = limits};
  const bool local = credentials.certificate_name.empty();
  rights.admin = local && (credentials.uid == 0 || credentials.uid == geteuid() ||
                           (admin_gid && Contains(credentials.gids, *admin_gid)));
  if (rights.admin || tenants.empty()) return rights;
  const auto tenant = std::find_if(tenants.begin(), tenants.end(),
                                   [&](const Tenant& each) { return IsOf(credentials, each); });
  if (tenant == tenants.end()) {
    return Status(Code::kPermissionDenied,
                  rights.user + " may not use this daemon; it is none of access.tenants");
  }
  rights.tenant = &*tenant;
  rights.limits = tenant->limits;
  return rights;
}

Result<Charge> Charge::Make(const std::shared_ptr<User>& user, const Limits& limits,
                            const std::string& object, const Amounts& amounts) {
  for (std::size_t i = 0; i < amounts.size(); i++) {
    const std::uint64_t limit = limits.amounts[i];
    const std::uint64_t used = user->used[i];
    if (amounts[i] == 0 || (used <= limit && amounts[i] <= limit - used)) continue;
    return Status(Code::kResourceExhausted,
                  object + ": " + user->name + " has " + std::to_string(used) + " of " +
                      std::to_string(limit) + " " + std::string(kResourceNames[i]) +
                      " and asks for " + std::to_string(amounts[i]) +
                      " more; give some back, or have the limit raised");
  }
  Charge charge;
  charge.user_ = user;
  charge.amounts_ = amounts;
  for (std::size_t i = 0; i < amounts.size(); i++) user->used[i] += amounts[i];
  return charge;
}

Charge& Charge::operator=(Charge&& other) noexcept {
  std::swap(user_, other.user_);
  std::swap(amounts_, other.amounts_);
  return *this;
}

Charge::~Charge() {
  if (!user_) return;
  for (std::size_t i = 0; i < amounts_.size(); i++) user_->used[i] -= amounts_[i];
}

Amounts AmountOf(Resource resource, std::uint64_t amount) {
  Amounts amounts = {};
  amounts[static_cast<std::size_t>(resource)] = amount;
  return amounts;
}

}  // namespace rxtoken
