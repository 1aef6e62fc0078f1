#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes small mistakes in tokens/, one at a time, and shows that a test fails for each.

usage: mutations.py [--list] [WORD]

Works on a copy of the tree. WORD: only the mistakes whose name contains it. Takes minutes, so
it is not one of the tests.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    name: str
    file: str
    old: str  # must be there once
    new: str
    test: str  # file:filter


MUTATIONS = [
    Mutation("descriptors are published without their order", "tokens/lane.h",
             "descriptors_->tail.store(tail_, std::memory_order_release)",
             "descriptors_->tail.store(tail_, std::memory_order_relaxed)",
             "interleave/lane_test.cc:Lane.CarriesEverythingThereAndBack"),
    Mutation("a command is pushed without its order", "tokens/spsc_ring.h",
             "tail_.store(tail + 1, std::memory_order_release)",
             "tail_.store(tail + 1, std::memory_order_relaxed)",
             "interleave/spsc_ring_test.cc:SpscRing.CarriesEverythingInOrder"),
    Mutation("a batch is put without its order", "tokens/batch_stack.h",
             "std::memory_order_release, std::memory_order_relaxed",
             "std::memory_order_relaxed, std::memory_order_relaxed",
             "interleave/page_pool_test.cc:BatchStack.GivesEachBatchToOneThread"),
    Mutation("a batch is stolen without its order", "tokens/batch_stack.h",
             "std::uint64_t old = head_.load(std::memory_order_acquire)",
             "std::uint64_t old = head_.load(std::memory_order_relaxed)",
             "interleave/page_pool_test.cc:PagePool.GivesEachObjectToOneThread"),
    Mutation("the tag of the batch stack stays as it is", "tokens/batch_stack.h",
             "(old & kTag) + (std::uint64_t{1} << 32)", "old & kTag",
             "interleave/page_pool_test.cc:BatchStack.GivesEachBatchToOneThread"),
    Mutation("nobody asks who owns the page", "tokens/lane.h",
             "const std::uint32_t lent = cell - owner;",
             "const std::uint32_t lent = PageTable::Lent(cell);",
             "unit/tokens/lane_test.cc:LaneTest.RefusesATokenOfAnotherWorker"),
    Mutation("nobody asks whether the page is held", "tokens/lane.h",
             "if (held == 0) [[unlikely]] {", "if (false) {",
             "model/lane_model_test.cc:LaneModel.RandomSequencesDoWhatTheModelDoes"),
    Mutation("one page too many is in range", "tokens/lane.h",
             "if (page >= pages) [[unlikely]]", "if (page > pages) [[unlikely]]",
             "unit/tokens/lane_test.cc:LaneTest.RefusesAPageThatTheBufferDoesNotHave"),
    Mutation("a reservation takes nothing out", "tokens/lane.h",
             "held.store(held.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);",
             "held.store(held.load(std::memory_order_relaxed), std::memory_order_relaxed);",
             "model/lane_model_test.cc:LaneModel.RandomSequencesDoWhatTheModelDoes"),
    Mutation("a page's count does not saturate", "tokens/page_table.h",
             "(lent >= kMaxLent - 1 ? kMaxLent : lent + 1)", "(lent + 1)",
             "unit/tokens/saturated_page_test.cc:SaturatedPage.*"),
    Mutation("rcuref saturates one reference too late", "tokens/rcuref.h",
             "if (word < kSaturatedZone) return true;", "if (word <= kSaturatedZone) return true;",
             "unit/tokens/rcuref_test.cc:Rcuref.*"),
    Mutation("the last put does not compare", "tokens/rcuref.h",
             "return word_.compare_exchange_strong(word, kDead, std::memory_order_acquire,\n"
             "                                           std::memory_order_relaxed);",
             "word_.store(kDead, std::memory_order_relaxed); return true;",
             "interleave/rcuref_test.cc:Rcuref.HasOneLastPut"),
    Mutation("nobody waits for late returns of what expired", "tokens/lane.h",
             "if (returns_->tail.load(std::memory_order_acquire) != return_head_) return;", "",
             "model/lane_model_test.cc:LaneModel.RandomSequencesDoWhatTheModelDoes"),
    Mutation("nobody waits until the application knows what expired", "tokens/lane.h",
             "slots = kept_slots_ & ~unread_slots_;", "slots = kept_slots_;",
             "model/lane_model_test.cc:LaneModel.RandomSequencesDoWhatTheModelDoes"),
    Mutation("a slot is lent from on although something of it expired", "tokens/lane.h",
             "if (lending_slot_ == slot) lending_slot_ = kNoSlot;", "",
             "unit/tokens/lane_test.cc:LeaseTest.*"),
    Mutation("a slot is released before the last write", "tokens/slot_table.h",
             "slots_[slot].word.fetch_and(~Bit(worker), std::memory_order_release)",
             "slots_[slot].word.fetch_and(~Bit(worker), std::memory_order_relaxed)",
             "interleave/slot_table_test.cc:SlotTable.GivesASlotToOneBindingAtATime"),
    Mutation("a slot is given away while it is looked at", "tokens/slot_table.h",
             "kTaken = kBusy | kRead | kWorkers", "kTaken = kBusy | kWorkers",
             "unit/tokens/slot_table_test.cc:SlotTableTest.ASlotKeepsItsBindingWhileItIsLookedAt"),
    Mutation("a slot is trimmed although it is used", "tokens/slot_table.h",
             "if (word != 0 && (word & kTaken) == 0 &&", "if (word != 0 &&",
             "unit/tokens/slot_table_test.cc:SlotTableTest.TrimsNoSlotThatIsUsedNowOrWasInBetween"),
]


def run(*command, check=True):
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} fails:\n{done.stdout}{done.stderr}")
    return done


PROGRAMS = {"interleave": "interleave_tests", "model": "model_tests", "unit/tokens": "unit_tokens"}


class Tree:
    """A copy of the sources, with a build of its own. Tests that find nothing are left out."""

    def __init__(self, directory):
        self.source = pathlib.Path(directory) / "source"
        self.build = pathlib.Path(directory) / "build"
        shutil.copytree(ROOT, self.source, ignore=shutil.ignore_patterns("build*", ".git"))
        wanted = {m.test.split(":")[0] for m in MUTATIONS}
        for room in PROGRAMS:
            for file in (self.source / "tests" / room).glob("*_test.cc"):
                if f"{room}/{file.name}" not in wanted:
                    file.unlink()
        launcher = "ccache" if shutil.which("ccache") else ""
        run("cmake", "-G", "Ninja", "-S", self.source, "-B", self.build, "-DRXTOKEN_BENCH=OFF",
            "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1",
            f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}")

    def failures(self, test):
        """The tests that fail, by name; builds what they need first."""
        file, filter_ = test.split(":")
        program = PROGRAMS[file.rpartition("/")[0]]
        run("cmake", "--build", self.build, "--target", program)
        done = run(self.build / "tests" / program, f"--gtest_filter={filter_}", check=False)
        if "[  PASSED  ] 0 tests" in done.stdout and done.returncode == 0:
            sys.exit(f"there is no test {test}")
        failed = sorted(set(re.findall(r"\[  FAILED  \] ([\w/]+\.[\w/]+)", done.stdout)))
        return failed or (["(it crashed)"] if done.returncode != 0 else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only show what there is")
    parser.add_argument("word", nargs="?", default="")
    arguments = parser.parse_args()
    mutations = [m for m in MUTATIONS if arguments.word in m.name]
    for m in mutations:
        found = (ROOT / m.file).read_text().count(m.old)
        if found != 1:
            sys.exit(f"{m.file} has {found} times what '{m.name}' changes: {m.old}")
    if arguments.list:
        for m in mutations:
            print(f"{m.name} ({m.file}): {m.test}")
        return 0

    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(directory)
        for test in sorted({m.test for m in mutations}):
            if failed := tree.failures(test):
                sys.exit(f"without any mistake, {test} fails: {failed}")
        print("| mistake in | what | fails |\n|---|---|---|", flush=True)
        for m in mutations:
            file = tree.source / m.file
            text = file.read_text()
            file.write_text(text.replace(m.old, m.new))
            failed = tree.failures(m.test)
            file.write_text(text)
            missed += not failed
            names = ", ".join(f"`{name}`" for name in failed) or "**nothing**"
            print(f"| `{m.file}` | {m.name} | {names} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
