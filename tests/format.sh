#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fails if clang-format would change a file. Exit code 77: clang-format is not there.
set -eu
cd "$(dirname "$0")/.."
if ! command -v clang-format >/dev/null; then
  echo "skipped: clang-format is not installed"
  exit 77
fi
find tokens dataplane control client tools tests bench -name '*.h' -o -name '*.cc' |
  xargs clang-format --dry-run --Werror
