// SPDX-License-Identifier: Apache-2.0
// test_eal.h - DPDK for the tests of one process, which can start it only once.
#pragma once

#include <gtest/gtest.h>

#include "dataplane/eal.h"

namespace rxtoken {

// Starts DPDK at the first call, with nothing that a machine must have: no huge pages, no rights.
// It stops at exit. Tests that need DPDK begin with ASSERT_TRUE(TestEal().ok()).
inline const Status& TestEal() {
  struct Eal {
    ~Eal() {
      if (status.ok()) StopEal();
    }
    const Status status = StartEal(DataplaneOptions());
  };
  static const Eal eal;
  return eal.status;
}

}  // namespace rxtoken
