#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the whole path beside its baselines and prints one table.

usage: bench/macro.py [--program build/release/bench/bench_macro] [--repetitions N]
                      [--seconds S] [--only TEXT] [--json FILE]

Every measurement is a process of its own; all of them are interleaved, and each figure is a
median. A row's ratio is its packets a second over those of `bare` for the same source.
"""
import argparse
import json
import os
import platform
import resource
import statistics
import struct
import subprocess
import sys
import tempfile

def checksum(header):
    total = sum(struct.unpack('>%dH' % (len(header) // 2), header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(number, size, flows, more_fragments=False):
    """An Ethernet frame of `size` bytes of one of `flows` UDP flows."""
    flow = number * 7 % flows
    payload = bytes((number + i) & 0xFF for i in range(size - 42))
    ip = struct.pack('>BBHHHBBHBBBBBBBB', 0x45, 0, size - 14, number & 0xFFFF,
                     0x2000 if more_fragments else 0, 64, 17, 0,
                     10, 0, flow >> 8, flow & 0xFF, 10, 1, 0, 0)
    ip = ip[:10] + struct.pack('>H', checksum(ip)) + ip[12:]
    udp = struct.pack('>HHHH', 10000 + flow, 7000, size - 34, 0)
    return bytes([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]) + ip + udp + payload


def write_pcap(path, size, frames=64, flows=16, fragments=0):
    """Between any two frames `fragments` others, each the first of a datagram of its own."""
    # Few frames: net_pcap keeps them all in the queue's pool, and more would not stay in
    # the cache.
    with open(path, 'wb') as file:
        file.write(struct.pack('<IHHiIII', 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))

        def write(data):
            file.write(struct.pack('<IIII', 0, 0, len(data), len(data)) + data)
        for number in range(frames):
            write(frame(number, size, flows))
            for i in range(fragments):
                write(frame(number * fragments + i, 34 + 512, 1, more_fragments=True))


def cases(directory):
    """(source, name, device, arguments of bench_macro)"""
    sources = [('null 64 B copy=0', 'net_null0,size=64,copy=0', []),
               ('null 1500 B copy=1', 'net_null0,size=1500,copy=1', [])]
    for size in (64, 1500):
        path = os.path.join(directory, f'{size}.pcap')
        write_pcap(path, size)
        sources.append((f'pcap {size} B, 16 flows',
                        f'net_pcap0,rx_pcap={path},infinite_rx=1', ['rules=16']))
    for source, device, rules in sources:
        yield source, 'bare', device, ['bare']
        for hold in (256, 4096, 65536):
            yield source, f'hold {hold}', device, ['hold', f'hold={hold}']
            yield source, f'ours {hold}', device, ['ours', f'hold={hold}'] + rules
    source, device, _ = sources[1]
    for pool, name in (('ours', ''), ('ring', ', ring of DPDK')):
        yield (source, f'hold 4096, lumps{name}', device,
               ['hold', 'hold=4096', 'lump=4096', 'pages=65536', f'pool={pool}'])
    source, device, rules = sources[2]
    yield source, 'ours 4096, 16 rx sockets', device, ['ours', 'hold=4096', 'sockets=16'] + rules
    yield source, 'ours 4096, 1000 idle', device, ['ours', 'hold=4096', 'idle=1000'] + rules
    source = 'pcap 64 B, 1024 frames'
    for flows, rules in ((10, 10), (1000, 10000)):
        path = os.path.join(directory, f'{flows}.pcap')
        write_pcap(path, 64, 1024, flows)
        device = f'net_pcap0,rx_pcap={path},infinite_rx=1'
        if rules == 10:
            yield source, 'bare', device, ['bare']
        yield source, f'ours 256, {rules} rules', device, ['ours', 'hold=256', f'rules={rules}']
    yield (source, 'ours 256, 10000 changing', device,
           ['ours', 'hold=256', 'rules=10000', 'updates=1'])
    # More datagrams than the table for reassembly has room for.
    source = 'pcap 64 B, each with 10 fragments'
    path = os.path.join(directory, 'fragments.pcap')
    write_pcap(path, 64, 1024, 16, 10)
    device = f'net_pcap0,rx_pcap={path},infinite_rx=1'
    yield source, 'bare', device, ['bare', 'pages=65536']
    yield source, 'hold 8192', device, ['hold', 'hold=8192', 'pages=65536']  # as the table does
    yield source, 'ours 256', device, ['ours', 'hold=256', 'rules=16', 'pages=65536']


def measure(program, device, arguments, seconds):
    command = [program, arguments[0], device, f'seconds={seconds}'] + arguments[1:]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 + seconds)
    if result.returncode != 0:
        sys.exit(f"macro.py: {' '.join(command)}\n{result.stderr}")
    return tuple(map(float, result.stdout.split()))  # delivered, dropped, longest gap


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser.add_argument('--program',
                        default=os.path.join(root, 'build/release/bench/bench_macro'))
    parser.add_argument('--repetitions', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=0.5)
    parser.add_argument('--only', default='', help='sources whose name has this text')
    parser.add_argument('--json', help='also write the figures to this file')
    options = parser.parse_args()
    if os.cpu_count() < 2:
        sys.exit('macro.py: one CPU only; the worker and the application need one each')
    # Each rx socket takes three descriptors.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    with tempfile.TemporaryDirectory() as directory:
        wanted = [case for case in cases(directory) if options.only in case[0]]
        runs = {case[:2]: [] for case in wanted}
        for _ in range(options.repetitions):
            for source, name, device, arguments in wanted:
                runs[source, name].append(
                    measure(options.program, device, arguments, options.seconds))

    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, '
          f'{options.repetitions} x {options.seconds} s, medians')
    print(f"{'source':<33} {'case':<26} {'Mpps':>8} {'ns':>7} {'/ bare':>7} {'/ hold':>7} "
          f"{'min..max Mpps':>16} {'ring full':>9} {'gap us':>7}")
    rows = []
    for (source, name), values in runs.items():
        rates = sorted(rate for rate, _, _ in values)
        median = statistics.median(rates)
        dropped = statistics.median(drop for _, drop, _ in values)
        gap = statistics.median(gap for _, _, gap in values)
        bare = statistics.median(rate for rate, _, _ in runs[source, 'bare'])
        hold = runs.get((source, name.split(',')[0].replace('ours', 'hold')))
        hold = statistics.median(rate for rate, _, _ in hold) if hold and name[0] == 'o' else None
        share = dropped / (dropped + median)
        rows.append({'source': source, 'case': name, 'mpps': median, 'ratio_bare': median / bare,
                     'ratio_hold': median / hold if hold else None, 'min': rates[0],
                     'max': rates[-1], 'ring_full_share': share, 'longest_gap_us': gap})
        print(f"{source:<33} {name:<26} {median:8.2f} {1e3 / median:7.1f} {median / bare:7.2f} "
              f"{f'{median / hold:.2f}' if hold else '':>7} "
              f"{f'{rates[0]:.2f}..{rates[-1]:.2f}':>16} {100 * share:8.1f}% {gap:7.0f}")
    if options.json:
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump(rows, file, indent=1)


if __name__ == '__main__':
    main()
