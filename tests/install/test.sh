#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs a build into a directory of its own, and builds the README's example from there: with
# find_package, and with pkg-config. The programs must start, and say that no daemon is there.
#
# usage: test.sh BUILD_DIRECTORY
set -eu
build=$1
source=$(cd "$(dirname "$0")/../.." && pwd)
example=$source/client/examples/receive.cc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >"$work/log" || { cat "$work/log"; exit 1; }

cmake -S "$source/tests/install" -B "$work/cmake" -DEXAMPLE="$example" \
  -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/cmake"

PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name rxtoken.pc)")
export PKG_CONFIG_PATH
libraries=$(pkg-config --variable=libdir rxtoken)
# shellcheck disable=SC2046  # a list of words
c++ -std=c++20 -Wall -Wextra -Wpedantic -Werror "$example" -o "$work/consumer" \
  $(pkg-config --cflags --libs rxtoken) -Wl,-rpath,"$libraries"

export RXTOKEN_RUN_DIR="$work/nobody"
for program in "$work/cmake/consumer" "$work/consumer"; do
  if "$program" 2>"$work/log" || ! grep -q "$RXTOKEN_RUN_DIR" "$work/log"; then
    echo "$program did not say that no daemon is there, but:"
    cat "$work/log"
    exit 1
  fi
done

# The installed programs find what they need.
"$work"/prefix/bin/rxtokend --version
"$work"/prefix/bin/rxtokenctl --help >/dev/null
