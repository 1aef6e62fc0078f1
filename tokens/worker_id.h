// SPDX-License-Identifier: Apache-2.0
// worker_id.h - which worker the calling thread is.
#pragma once

#include <cstdint>

namespace rxtoken {

inline constexpr std::uint32_t kNotAWorker = ~0u;

// Set once by each worker thread when it starts: 0 .. kMaxWorkers - 1.
inline thread_local std::uint32_t this_worker = kNotAWorker;

}  // namespace rxtoken
