#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes sure that the Debian 12 packages are there that rxtoken is built from, and with
# --tests also those that only its tests use. Installs what is missing if it may.
#
# usage: deploy/install.sh [--tests]
set -eu

build_packages='
  cmake
  g++
  libcli11-dev
  libdpdk-dev
  libgrpc++-dev
  libprotobuf-dev
  liburcu-dev
  libyaml-cpp-dev
  ninja-build
  nlohmann-json3-dev
  pkg-config
  protobuf-compiler
  protobuf-compiler-grpc
'
test_packages='
  binutils
  clang
  clang-format
  clang-tidy
  iproute2
  libbenchmark-dev
  libclang-rt-14-dev
  libgmock-dev
  libgtest-dev
  libjudy-dev
  openssl
  python3
  spin
  valgrind
'

packages=$build_packages
case "${1-}" in
  '') ;;
  --tests) packages="$packages $test_packages" ;;
  *) echo "usage: $0 [--tests]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "install.sh: this is not a Debian system; install the equivalents of:" $packages >&2
  exit 1
fi

missing=
for package in $packages; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
  echo "install.sh: these packages are missing; as root, run:" >&2
  echo "  apt-get install -y --no-install-recommends$missing" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -o Acquire::Retries=3 update -q
# shellcheck disable=SC2086  # a list of words
apt-get -o Acquire::Retries=3 install -q -y --no-install-recommends $missing
