#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks a model with spin, in all its states. Exit code 77: spin is not there.
#
# usage: check.sh MODEL.pml [-DVARIANT...]
set -eu
model=$(realpath "$1")
shift
if ! command -v spin >/dev/null; then
  echo "skipped: spin is not installed"
  exit 77
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
spin -a "$@" "$model"
"${CC:-cc}" -O2 -DSAFETY -DCOLLAPSE -w -o pan pan.c
./pan -m100000 -b | tee report
grep -q 'errors: 0$' report
