#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks a model with spin, in all its states. `holds`: no assertion fails in any of them, and
# nothing was left out for want of depth or memory. `fails`: an assertion does fail.
# Exit code 77: spin is not there.
#
# usage: check.sh holds|fails MODEL.pml [-DVARIANT...]
set -eu
expected=$1
model=$(realpath "$2")
shift 2
if ! command -v spin >/dev/null; then
  echo "skipped: spin is not installed"
  exit 77
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
spin -a "$@" "$model"
"${CC:-cc}" -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=1024 -w -o pan pan.c
./pan -m10000 -b >report || true
cat report
case $expected in
  holds) grep -q 'errors: 0$' report && ! grep -q -e 'not completed' -e 'too small' report ;;
  fails) grep -q 'assertion violated' report ;;
  *) echo "check.sh: '$expected' is neither holds nor fails" >&2; exit 2 ;;
esac
