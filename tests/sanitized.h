// SPDX-License-Identifier: Apache-2.0
// sanitized.h - whether a sanitizer watches: then everything takes several times as long.
#pragma once

namespace rxtoken {

#if defined(RXTOKEN_TSAN) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace rxtoken
