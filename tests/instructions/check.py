#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks at the machine code of the hot functions, and counts what they execute.

usage: check.py

Compiles token_path.cc as the release build would, with each of g++ and clang++. x86-64 only.
Exit code 77: a tool that it needs is not there.

A count is the difference between a long and a short run, so that what happens once does not
show; it is the same on every machine with the same compiler.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FLAGS = "-std=c++20", "-O3", "-DNDEBUG", "-mprfchw", "-Wall", "-Wextra", "-Werror"
SHORT, LONG = 500, 1500  # lots
LOT = 128  # fragments, as in token_path.cc
# Instructions that tokens cost for a fragment that is lent and returned: decoding, bounds,
# owner, uref, count, and their share of what is done once for each burst. What descriptors,
# rings and the pool cost without tokens comes on top, and is printed.
TOKEN_LIMIT = 40


class Failure(Exception):
    pass


def expect(condition, what):
    if not condition:
        raise Failure(what)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    expect(done.returncode == 0, f"{command[0]} fails: {done.stdout}{done.stderr}")
    return done.stdout


def disassemble(program):
    """The instructions of each function, by address: text without comments."""
    functions, code = {}, {}
    for line in run("objdump", "-d", "--no-show-raw-insn", program).splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            code = functions[match[1]] = {}
        elif match := re.match(r"\s+([0-9a-f]+):\t(.*?)\s*(#.*|<.*)?$", line):
            code[int(match[1], 16)] = re.sub(r"\s+", " ", match[2])
    return functions


def stem(function):
    """Its name without what a compiler appends to a copy that it has specialised."""
    return function.split(".")[0]


def is_locked(instruction):
    """Locked by prefix, or as xchg with memory is without one."""
    return instruction.startswith("lock ") or re.match(r"xchg.*\(", instruction) is not None


def check_rcuref(functions, name, operation):
    """The whole fast path is one locked instruction, a jump on the sign, and a return."""
    # Clang aligns the stack for the slow path first.
    code = [text for text in functions[name].values()
            if text not in ("endbr64", "push %rax", "pop %rax")]
    expect(re.match(rf"lock {operation}l? ", code[0]), f"{name} begins with '{code[0]}'")
    expect(re.match(r"js ", code[1]), f"{name}: '{code[0]}' is followed by '{code[1]}'")
    expect(code[2] == "ret", f"{name}: after the jump comes '{code[2]}'")
    expect(sum(map(is_locked, code)) == 1, f"{name} has more than one locked instruction")
    print(f"{name}: {code[0]}; js; ret")


def profile(program, lots, out):
    """Executions of each instruction, and of each function with what it calls."""
    run("valgrind", "--tool=callgrind", "--dump-instr=yes", "--compress-strings=no",
        "--compress-pos=no", f"--callgrind-out-file={out}", program, str(lots))
    executed, inclusive = {}, {}
    function, call = None, False
    for line in open(out, encoding="utf-8"):
        if line.startswith("fn="):
            function = stem(line[3:].strip())
        elif line.startswith("calls="):
            call = True
        elif line.startswith("0x"):
            address, _, count = line.split()
            inclusive[function] = inclusive.get(function, 0) + int(count)
            if not call:
                executed[int(address, 16)] = int(count)
            call = False
    return executed, inclusive


def check_path(functions, program):
    """No locked instruction is executed for each fragment or lot, and few others."""
    _, short = profile(program, SHORT, program + ".short")
    executed, long = profile(program, LONG, program + ".long")

    path = {address for address, count in executed.items() if count >= LONG}
    on_path = {stem(name) for name, code in functions.items() if path & code.keys()}
    for name in "pool_pop", "lane_lend", "lane_drain":
        expect(name in on_path, f"{name} is not on the path")
    code = {address: text for function in functions.values() for address, text in function.items()}
    locked = [code[address] for address in path & code.keys() if is_locked(code[address])]
    expect(not locked, f"locked instructions on the path: {locked}")

    def per_fragment(name):
        return (long[name] - short[name]) / ((LONG - SHORT) * LOT)

    lend, drain = per_fragment("lane_lend"), per_fragment("lane_drain")
    bare = per_fragment("bare_lend") + per_fragment("bare_drain")
    tokens = lend + drain - bare
    print(f"pop {per_fragment('pool_pop'):.1f}, lend {lend:.1f}, drain {drain:.1f} instructions a "
          f"fragment, none locked; without tokens lend and drain take {bare:.1f}, "
          f"so tokens cost {tokens:.1f}")
    expect(tokens <= TOKEN_LIMIT, f"tokens cost more than {TOKEN_LIMIT} instructions a fragment")


def main():
    if platform.machine() != "x86_64":
        print("skipped: this is not an x86-64")
        return 77
    for tool in "g++", "clang++", "objdump", "valgrind":
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is not installed")
            return 77
    failed = 0
    for compiler in "g++", "clang++":
        with tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "token_path")
            print(f"{compiler}:")
            try:
                run(compiler, *FLAGS, f"-I{ROOT}", ROOT / "tests/instructions/token_path.cc",
                    "-o", program)
                functions = disassemble(program)
                check_rcuref(functions, "rcuref_get", "(add|inc)")
                check_rcuref(functions, "rcuref_put", "(sub|dec)")
                check_path(functions, program)
            except Failure as failure:
                print(f"error: {failure}")
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
