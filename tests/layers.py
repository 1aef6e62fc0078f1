#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares every #include in the tree with what each room may see.

usage: layers.py [--self-test]

Prints one line for each include that breaks a rule, and exits with 1 if there is any. With
--self-test it feeds itself includes that must be refused, so that we know that it can.
"""

import os
import re
import sys
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What an include names: one of our rooms, or one of these.
STD = "std"  # <vector>
OS = "os"  # <sys/mman.h>
RTE = "rte"  # DPDK
GRPC = "grpc"  # gRPC, protobuf and what protoc generates from proto/
URCU = "urcu"
THIRD_PARTY = "third party"  # YAML, JSON, command lines
TEST = "test"  # GoogleTest, benchmark
SDK = "client/include"  # "rxtoken/session.h": the installed headers
ABI = "tokens/abi"
TOKENS, DATAPLANE, CONTROL, CLIENT = "tokens", "dataplane", "control", "client"
TOOLS, TESTS, BENCH = "tools", "tests", "bench"
DATAPLANE_API = "dataplane.h"  # the two headers that the control plane may see
ALL = None


class Room(NamedTuple):
    path: str  # a regular expression at the start of the file's path
    sees: set  # ALL: everything


# The first room that matches a file counts.
ROOMS = [
    Room(r"tokens/abi/", {STD, ABI}),
    Room(r"tokens/rcu\.h$", {STD, OS, ABI, TOKENS, URCU}),
    Room(r"tokens/", {STD, OS, ABI, TOKENS}),
    Room(r"dataplane/(dataplane|flow_rule)\.h$", {STD, ABI, TOKENS, DATAPLANE_API}),
    Room(r"dataplane/", {STD, OS, RTE, ABI, TOKENS, DATAPLANE, DATAPLANE_API}),
    Room(r"control/", {STD, OS, GRPC, THIRD_PARTY, ABI, TOKENS, DATAPLANE_API, CONTROL}),
    Room(r"client/include/", {STD, ABI, SDK}),
    Room(r"client/", {STD, OS, GRPC, ABI, SDK, CLIENT}),
    Room(r"tools/", {STD, OS, GRPC, THIRD_PARTY, ABI, SDK, TOOLS}),
    # Only what tests the dataplane, or plays a network card's other end, knows DPDK.
    Room(r"tests/(unit/dataplane/|fuzz/|process/.*_sender\.cc$)", ALL),
    Room(r"tests/(unit/tokens|model)/", {STD, OS, TEST, ABI, TOKENS, TESTS}),
    Room(r"tests/", {STD, OS, GRPC, THIRD_PARTY, TEST, ABI, TOKENS, DATAPLANE_API, CONTROL,
                     CLIENT, SDK, TOOLS, TESTS}),
    Room(r"bench/", ALL),
]

# The one place where the control plane gets hold of a real dataplane.
START = re.compile(r"\bDataplane::Start\(")
MAY_START = re.compile(r"dataplane/|control/main\.cc$|tests/unit/dataplane/|bench/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def kind_of(bracket, name):
    """The room or the kind that an include line names; None if it names nothing we know."""
    if bracket == '"':
        if name in ("dataplane/dataplane.h", "dataplane/flow_rule.h"):
            return DATAPLANE_API
        if re.match(r"rxtoken/v1/.*\.pb\.h$", name):
            return GRPC
        if name.startswith("rxtoken/"):
            return SDK
        for room in (ABI, TOKENS, DATAPLANE, CONTROL, SDK, CLIENT, TOOLS, TESTS, BENCH):
            if name.startswith(room + "/"):
                return room
        return None
    if re.match(r"(rte_|eal_)", name):
        return RTE
    if re.match(r"(grpc|grpcpp|google/protobuf|absl)/|.*\.pb\.h$", name):
        return GRPC
    if name.startswith("urcu"):
        return URCU
    if re.match(r"(yaml-cpp|CLI|nlohmann)/", name):
        return THIRD_PARTY
    if re.match(r"(gtest|gmock|benchmark)/", name):
        return TEST
    if name.startswith("rxtoken/"):
        return SDK
    if re.fullmatch(r"[a-z_]+", name):
        return STD
    return OS if name.endswith(".h") else None


def check(path, text):
    """The complaints about one file."""
    room = next((r for r in ROOMS if re.match(r.path, path)), None)
    if room is None:
        return [f"{path}: in no room of tests/layers.py"]
    complaints = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            bracket, name = match.groups()
            kind = kind_of(bracket, name)
            if kind is None:
                complaints.append(f"{path}:{number}: {name}: not a path from the project's root")
            elif room.sees is not ALL and kind not in room.sees:
                complaints.append(f"{path}:{number}: {name}: this room may not see {kind}")
        if START.search(line.split("//")[0]) and not MAY_START.match(path):
            complaints.append(f"{path}:{number}: only control/main.cc starts the dataplane")
    return complaints


def source_files():
    for top in ("tokens", "dataplane", "control", "client", "tools", "tests", "bench"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            for name in sorted(names):
                if name.endswith((".h", ".cc", ".h.in")):
                    yield os.path.relpath(os.path.join(folder, name), ROOT)


def self_test():
    refused = [
        ("tokens/page.h", "#include <rte_mbuf.h>"),
        ("tokens/page.h", "#include <urcu/urcu-qsbr.h>"),
        ("tokens/page.h", '#include "control/manager.h"'),
        ("tokens/abi/ring.h", "#include <sys/mman.h>"),
        ("tokens/abi/ring.h", '#include "tokens/page.h"'),
        ("dataplane/worker.cc", "#include <grpcpp/grpcpp.h>"),
        ("dataplane/worker.cc", '#include "rxtoken/v1/port.pb.h"'),
        ("dataplane/dataplane.h", "#include <rte_ethdev.h>"),
        ("dataplane/dataplane.h", '#include "dataplane/worker.h"'),
        ("control/ports.cc", "#include <rte_ethdev.h>"),
        ("control/ports.cc", '#include "dataplane/worker.h"'),
        ("control/ports.cc", '#include "client/session.h"'),
        ("control/ports.cc", "  auto d = Dataplane::Start(options);"),
        ("client/session.cc", '#include "dataplane/dataplane.h"'),
        ("client/session.cc", "#include <urcu/urcu-qsbr.h>"),
        ("client/session.cc", '#include "tokens/page.h"'),
        ("client/include/rxtoken/session.h", "#include <grpcpp/channel.h>"),
        ("client/include/rxtoken/session.h", '#include "client/session_impl.h"'),
        ("tools/ctl.cc", '#include "control/config.h"'),
        ("tests/process/e2e_test.cc", "#include <rte_mbuf.h>"),
        ("tests/unit/tokens/page_test.cc", '#include "dataplane/parse.h"'),
        ("tokens/page.h", '#include "page_table.h"'),
        ("stray/file.cc", ""),
    ]
    granted = [
        ("tokens/abi/ring.h", "#include <atomic>"),
        ("tokens/rcu.h", "#include <urcu/urcu-qsbr.h>"),
        ("dataplane/worker.cc", "#include <rte_mbuf.h>"),
        ("control/main.cc", "  auto d = Dataplane::Start(options);"),
        ("control/ports.cc", '#include "dataplane/dataplane.h"'),
        ("client/session.cc", '#include "rxtoken/v1/port.grpc.pb.h"'),
        ("tests/process/memif_sender.cc", "#include <rte_ethdev.h>"),
    ]
    wrong = [f"granted: {case}" for case in refused if not check(*case)]
    wrong += [f"refused: {case}" for case in granted if check(*case)]
    return wrong


def main():
    if sys.argv[1:] == ["--self-test"]:
        complaints = self_test()
    elif not sys.argv[1:]:
        complaints = []
        for path in source_files():
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                complaints += check(path, file.read())
    else:
        print(__doc__, file=sys.stderr)
        return 2
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
