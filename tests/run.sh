#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds everything on a Debian 12 machine and runs every test: the release build, then what
# the address, undefined behaviour and thread sanitizers watch. One ctest runs them all, and
# its summary is the last that is printed.
#
# usage: tests/run.sh [--quick]     --quick: the release build only
set -eu
cd "$(dirname "$0")/.."

presets='release asan tsan'
case "${1-}" in
  '') ;;
  --quick) presets=release ;;
  *) echo "usage: $0 [--quick]" >&2; exit 2 ;;
esac

deploy/install.sh --tests

launcher=
if command -v ccache >/dev/null; then launcher=ccache; fi

for preset in $presets; do
  cmake --preset "$preset" -DRXTOKEN_WERROR=ON -DCMAKE_CXX_COMPILER_LAUNCHER=$launcher
  cmake --build --preset "$preset"
done

# A directory above the three builds, so that there is one summary.
echo "subdirs($presets)" >build/CTestTestfile.cmake
ctest --test-dir build --output-on-failure --parallel "$(nproc)"
