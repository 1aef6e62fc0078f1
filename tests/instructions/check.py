#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks at the machine code of the hot functions, and counts what they execute.

usage: check.py TOKEN_PATH

TOKEN_PATH is the program that token_path.cc makes. x86-64 only. Exit code 77: a tool that it
needs is not there.

A count is the difference between a long and a short run, so that what happens once does not
show; it is the same on every machine with the same compiler.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

SHORT, LONG = 1000, 3000  # lots
LOT = 32
# Instructions for a fragment that is lent and returned, one by one as they were when this
# was written (g++ 12: 72.1, clang 14: 64.8), and a little for other compilers.
PAIR_LIMIT = 80
# What of it is tokens: decoding, bounds, owner, uref and count, and the share of a lot's
# fixed part. The rest is what descriptors and free pages cost without them.
TOKEN_LIMIT = 50


class Failure(Exception):
    pass


def expect(condition, what):
    if not condition:
        raise Failure(what)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def disassemble(program, function):
    """The instructions of one function, by address: text without comments."""
    listing = run("objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", program)
    found = {}
    for line in listing.splitlines():
        match = re.match(r"\s+([0-9a-f]+):\t(.*?)\s*(#.*|<.*)?$", line)
        if match:
            found[int(match[1], 16)] = re.sub(r"\s+", " ", match[2])
    expect(found, f"{function} is not in the program")
    return found


def is_locked(instruction):
    """Locked by prefix, or as xchg with memory is without one."""
    return instruction.startswith("lock ") or re.match(r"xchg.*\(", instruction) is not None


def check_rcuref(program, function, operation):
    """The whole fast path is one locked instruction, a jump on the sign, and a return."""
    # Clang aligns the stack for the slow path first.
    code = [text for text in disassemble(program, function).values()
            if text not in ("endbr64", "push %rax", "pop %rax")]
    expect(re.match(rf"lock {operation}l? ", code[0]), f"{function} begins with '{code[0]}'")
    expect(re.match(r"js ", code[1]), f"{function}: '{code[0]}' is followed by '{code[1]}'")
    expect(code[2] == "ret", f"{function}: after the jump comes '{code[2]}'")
    expect(sum(map(is_locked, code)) == 1, f"{function} has more than one locked instruction")
    print(f"{function}: {code[0]}; js; ret")


def profile(program, lots, directory):
    """Executions of each instruction, and of each function with what it calls."""
    out = os.path.join(directory, str(lots))
    run("valgrind", "--tool=callgrind", "--dump-instr=yes", "--compress-strings=no",
        "--compress-pos=no", f"--callgrind-out-file={out}", program, str(lots), str(LOT))
    executed, inclusive = {}, {}
    function, call = None, False
    for line in open(out, encoding="utf-8"):
        if line.startswith("fn="):
            function = line[3:].strip().split(".")[0]  # without what the compiler appends
        elif line.startswith("calls="):
            call = True
        elif line.startswith("0x"):
            address, _, count = line.split()
            inclusive[function] = inclusive.get(function, 0) + int(count)
            if not call:
                executed[int(address, 16)] = int(count)
            call = False
    return executed, inclusive


def check_lane(program):
    with tempfile.TemporaryDirectory() as directory:
        _, short = profile(program, SHORT, directory)
        executed, long = profile(program, LONG, directory)

    # The path is what is executed for each fragment or lot.
    path = {address for address, count in executed.items() if count >= LONG}
    code = {}
    for line in run("objdump", "-d", "--no-show-raw-insn", program).splitlines():
        match = re.match(r"\s+([0-9a-f]+):\t(.*)", line)
        if match:
            code[int(match[1], 16)] = re.sub(r"\s+", " ", match[2])
    for function in "lane_lend", "lane_return":
        expect(path & disassemble(program, function).keys(), f"{function} is not on the path")
    locked = [code[address] for address in path & code.keys() if is_locked(code[address])]
    expect(not locked, f"locked instructions on the path: {locked}")

    def per_fragment(function):
        return (long[function] - short[function]) / ((LONG - SHORT) * LOT)

    lend, give_back = per_fragment("lane_lend"), per_fragment("lane_return")
    bare = per_fragment("bare_lend") + per_fragment("bare_return")
    print(f"lend {lend:.1f} + return {give_back:.1f} = {lend + give_back:.1f} instructions, no "
          f"locked one; without tokens {bare:.1f}, so tokens cost {lend + give_back - bare:.1f}")
    expect(lend + give_back <= PAIR_LIMIT, f"a pair takes more than {PAIR_LIMIT} instructions")
    expect(lend + give_back - bare <= TOKEN_LIMIT,
           f"tokens cost more than {TOKEN_LIMIT} instructions a pair")


def main():
    if platform.machine() != "x86_64":
        print("skipped: this is not an x86-64")
        return 77
    for tool in "objdump", "valgrind":
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is not installed")
            return 77
    program = sys.argv[1]
    try:
        check_rcuref(program, "rcuref_get", "(add|inc)")
        check_rcuref(program, "rcuref_put", "(sub|dec)")
        check_lane(program)
    except Failure as failure:
        print(f"error: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
