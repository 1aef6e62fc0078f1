// SPDX-License-Identifier: Apache-2.0
#include "rxtoken/message.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "client/src/receiver.h"
#include "client/src/source.h"

namespace rxtoken {
inline namespace sdk {

std::string SourceAddress::ToString() const {
  if (version == 0) return "-";
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(version == 4 ? AF_INET : AF_INET6, address.data(), text, sizeof(text));
  if (port == 0) return text;
  std::string endpoint(version == 4 ? "" : "[");
  endpoint += text;
  endpoint += version == 4 ? ":" : "]:";
  return endpoint += std::to_string(port);
}

std::size_t Message::CopyTo(std::span<std::byte> out) const noexcept {
  std::size_t copied = 0;
  for (const Fragment& fragment : fragments()) {
    const std::size_t n = std::min(fragment.payload().size(), out.size() - copied);
    if (n > 0) std::memcpy(out.data() + copied, fragment.payload().data(), n);
    copied += n;
  }
  return copied;
}

SourceAddress Message::source() const noexcept {
  if (whole_frame()) return SourceOfFrame(first_.payload());
  // The headers lie in front of the payload, and must not start before the page does.
  if (ip_header_distance_ > first_.offset()) return {};
  return SourceOfDatagram({payload().data() - ip_header_distance_, ip_header_distance_});
}

std::chrono::system_clock::time_point Message::arrival_time() const noexcept {
  using std::chrono::duration_cast;
  using std::chrono::system_clock;
  const auto age = std::chrono::steady_clock::now().time_since_epoch() - arrival_mono();
  return system_clock::now() - duration_cast<system_clock::duration>(age);
}

bool Message::whole_frame() const noexcept { return (flags_ & kWholeFrame) != 0; }
bool Message::copied() const noexcept { return (flags_ & kCopied) != 0; }

void Message::Return() noexcept {
  if (owner_ != nullptr) owner_->PutAside(*this);
}

}  // namespace sdk
}  // namespace rxtoken
