// SPDX-License-Identifier: Apache-2.0
// eal.h - starts and stops DPDK, and catches what it logs.
#pragma once

#include <string>

#include "dataplane/dataplane.h"
#include "tokens/abi/status.h"

namespace rxtoken {

// Starts DPDK without touching the machine: with the default options it needs no huge pages,
// no rights and no files, and no device is probed before a port asks for it. The calling
// thread keeps its CPU affinity, and no other threads for work are made: workers are threads
// of ours that call rte_thread_register().
//
// Errors: kFailedPrecondition  the second call in this process, even after StopEal(); or DPDK
//                              refused: the message ends with its last log lines
// Thread-safety: one thread only.   Blocks: about 0.15 s.
Status StartEal(const DataplaneOptions& options);

// Precondition: every port is closed and every pool freed.
void StopEal();

// Collects what DPDK logs while it lives, so that an error can say why. What was not taken by
// then goes to the standard error stream, as does everything DPDK logs at other times.
//
// Thread-safety: one at a time.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  // The last lines, as an appendix for a message: ": line; line", or empty.
  std::string Take();
};

}  // namespace rxtoken
