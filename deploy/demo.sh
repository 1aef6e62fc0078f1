#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds rxtoken and shows it at work: rxtokend receives into a registered buffer and lends
# each packet, in place, to a receiver in another process for ten seconds. Needs no root
# (except to install missing packages), no huge pages and no NIC.
#
# usage: deploy/demo.sh             generated packets of 1500 bytes (net_null)
#        deploy/demo.sh pcap FILE   the packets of a capture, over and over
set -eu
cd "$(dirname "$0")/.."

usage() {
  echo "usage: deploy/demo.sh [pcap FILE]" >&2
  exit 2
}

case "$#:${1-}" in
  0:) device=net_null0,size=1500,copy=1 ;;
  2:pcap)
    [ -r "$2" ] || { echo "demo.sh: cannot read '$2'; give a capture file" >&2; exit 1; }
    # net_pcap splits its arguments at commas, and keeps all frames of the file in the buffer.
    case $2 in *,*) echo "demo.sh: '$2' has a comma in its name; rename it" >&2; exit 1 ;; esac
    device="net_pcap0,rx_pcap=$(realpath "$2"),infinite_rx=1" ;;
  *) usage ;;
esac

deploy/install.sh
if ! { cmake -B build/demo -G Ninja -DCMAKE_BUILD_TYPE=Release -DRXTOKEN_TESTS=OFF \
         -DRXTOKEN_BENCH=OFF && cmake --build build/demo --target rxtokend rxtokenctl; } \
       >build-demo.log 2>&1; then
  tail -20 build-demo.log >&2
  echo "demo.sh: the build failed; all of its output is in build-demo.log" >&2
  exit 1
fi
rm -f build-demo.log

run_dir=$(mktemp -d)
daemon=
receiver=
stop() {
  [ -z "$receiver" ] || kill "$receiver" 2>/dev/null || true
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
  wait
  rm -rf "$run_dir"
}
trap stop EXIT
trap 'exit 1' INT TERM
ctl() { build/demo/tools/rxtokenctl --run-dir "$run_dir" "$@"; }

build/demo/control/rxtokend --run-dir "$run_dir" --port "p0=$device" 2>"$run_dir/log" &
daemon=$!
tries=0
until ctl health >/dev/null 2>&1; do
  tries=$((tries + 1))
  if ! kill -0 "$daemon" 2>/dev/null || [ "$tries" = 100 ]; then
    cat "$run_dir/log" >&2
    exit 1
  fi
  sleep 0.1
done

echo "rxtokend receives on $device; a receiver in another process reads for ten seconds."
ctl bind b0 p0:0 --buffer 64MiB >/dev/null
ctl recv --socket demo --frames --count --seconds 10 &
receiver=$!
sleep 9
ctl stats
wait "$receiver"
receiver=
kill "$daemon"
wait "$daemon"
daemon=
echo "rxtokend has stopped."
