#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the parts beside what they replace: prints one table, and draws it.

usage: bench/micro.py [--program build/release/bench/bench_micro] [--rounds N]
                      [--plot FILE.svg] [--json FILE]

Everything is measured by one process, all cases in turn; each figure is the median of its
rounds, in nanoseconds for one operation. Ki and Mi are the pages of the buffer. At the end the
table says which targets are met.
"""
import argparse
import json
import math
import os
import platform
import subprocess
import sys
import textwrap
from html import escape

LEND, LEND_TWO = 'lend and return, 1 thread', 'lend and return, 2 threads'
PATH, COUNT, POOL = 'pool, lend, ring, return, pool', 'get and put', 'pool, push and pop'
HOT = '16 Ki sequential'
WIDTH = 10  # of a column

# What is wanted: of two cases, the first's time over the second's.
AT_MOST, AT_LEAST = '<=', '>='
TARGETS = [
    (LEND, HOT, 'rxtoken', 'unchecked array', AT_MOST, 1.3),
    (LEND, HOT, 'atomic fetch_sub and sign', 'rxtoken', AT_LEAST, 4),
    (LEND, HOT, '64-way tree, lock', 'rxtoken', AT_LEAST, 8),
    (PATH, '2 threads, batch 32', 'rxtoken', 'the two rings alone', AT_MOST, 3),
    (PATH, '2 threads, batch 32', 'atomic uref and page count', 'rxtoken', AT_LEAST, 5),
    (PATH, '2 threads, batch 32', '64-way tree, lock', 'rxtoken', AT_LEAST, 10),
    (COUNT, '1 thread', 'rxtoken: rcuref', 'plain fetch_add, fetch_sub', AT_MOST, 1.05),
    (COUNT, '2 threads, one count', 'inc_not_zero, dec_and_test', 'rxtoken: rcuref', AT_LEAST, 1.3),
    (POOL, '1 thread', 'rxtoken: page pool', 'rte_mempool, cache 512', AT_MOST, 1.5),
]


def measure(program, rounds):
    """{section: {row: {column: (median, low, high)}}}, in the order of the program."""
    result = subprocess.run([program, f'--rounds={rounds}'], stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f'micro.py: {program} failed')
    sections = {}
    for line in result.stdout.splitlines():
        section, row, column, *figures = line.split('\t')
        sections.setdefault(section, {}).setdefault(row, {})[column] = tuple(map(float, figures))
    return sections


def columns_of(rows):
    return list(dict.fromkeys(column for cells in rows.values() for column in cells))


def print_table(sections):
    for section, rows in sections.items():
        columns = columns_of(rows)
        titles = [textwrap.wrap(column, WIDTH) for column in columns]
        for line in range(max(map(len, titles))):
            words = [title[line] if line < len(title) else '' for title in titles]
            print(f'{section + ", ns" if line == 0 else "":<36}' +
                  ''.join(f' {word:>{WIDTH}}' for word in words))
        for row, cells in rows.items():
            figures = [f'{cells[c][0]:.2f}' if c in cells else '' for c in columns]
            print(f'{row:<36}' + ''.join(f' {figure:>{WIDTH}}' for figure in figures))
        print()


def check_targets(sections):
    print(f"{'target':<80} {'ratio':>6} {'wanted':>8}")
    for section, column, above, below, sign, limit in TARGETS:
        try:
            ratio = sections[section][above][column][0] / sections[section][below][column][0]
        except KeyError:
            continue  # one CPU only
        met = ratio <= limit if sign == AT_MOST else ratio >= limit
        print(f"{f'{column}: {above} / {below}':<80} {ratio:6.2f} {f'{sign} {limit}':>8}  "
              f"{'ok' if met else 'MISSED'}")


# ---- the plot ------------------------------------------------------------------------------------

# What is drawn of each section; the whole of it would be illegible.
DRAWN = {
    LEND: [HOT, '512 Ki random', '16 Mi random'],
    LEND_TWO: [HOT, '512 Ki random', '16 Mi random'],
    PATH: ['1 thread', '2 threads, batch 32', '2 threads, batch 128'],
    COUNT: ['1 thread', '2 threads, one count'],
    POOL: ['1 thread', '2 threads, across'],
}
COLOURS = ['#1b6ca8', '#e07a1f', '#3a923a']
LEFT, RIGHT, ROW = 250, 760, 18


def draw(sections, path):
    """A row for each design, a dot for each column, time on a logarithmic axis."""
    drawn = [(section, [c for c in columns if c in columns_of(sections[section])])
             for section, columns in DRAWN.items() if section in sections]
    figures = [cells[column][0] for section, columns in drawn
               for cells in sections[section].values() for column in columns if column in cells]
    first, last = math.floor(math.log10(min(figures))), math.ceil(math.log10(max(figures)))

    def x(ns):
        return LEFT + (RIGHT - LEFT) * (math.log10(ns) - first) / (last - first)

    body = []

    def text(at_x, at_y, what, extra=''):
        body.append(f'<text x="{at_x:.1f}" y="{at_y:.1f}" {extra}>{escape(what)}</text>')

    y = 10
    for section, columns in drawn:
        y += 24
        text(8, y, section, 'font-weight="bold"')
        at = LEFT
        for colour, column in zip(COLOURS, columns):
            body.append(f'<circle cx="{at}" cy="{y - 4}" r="4" fill="{colour}"/>')
            text(at + 8, y, column)
            at += 30 + 7 * len(column)
        for row, cells in sections[section].items():
            y += ROW
            ours = row.startswith('rxtoken')
            text(LEFT - 10, y + 4, row, f'text-anchor="end" font-weight="{700 if ours else 400}"')
            body.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}" stroke="#eee"/>')
            for colour, column in zip(COLOURS, columns):
                if column in cells:
                    body.append(f'<circle cx="{x(cells[column][0]):.1f}" cy="{y}" r="4" '
                                f'fill="{colour}"><title>{cells[column][0]:.2f} ns</title></circle>')
    y += ROW
    for power in range(first, last + 1):
        for digit in (1, 2, 5) if power < last else (1,):
            ns = digit * 10.0 ** power
            body.insert(0, f'<line x1="{x(ns):.1f}" x2="{x(ns):.1f}" y1="40" y2="{y}" '
                           f'stroke="{"#ccc" if digit == 1 else "#eee"}"/>')
            text(x(ns), y + 14, f'{ns:g}', 'text-anchor="middle"')
    text(RIGHT, y + 28, 'ns for one operation', 'text-anchor="end"')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{RIGHT + 20}" '
                   f'height="{y + 36}" font-family="sans-serif" font-size="12">\n'
                   '<rect width="100%" height="100%" fill="white"/>\n' +
                   '\n'.join(body) + '\n</svg>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser.add_argument('--program',
                        default=os.path.join(root, 'build/release/bench/bench_micro'))
    parser.add_argument('--rounds', type=int, default=41)
    parser.add_argument('--plot', help='draw the table into this file, as SVG')
    parser.add_argument('--json', help='also write the figures to this file')
    options = parser.parse_args()

    sections = measure(options.program, options.rounds)
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, '
          f'medians of {options.rounds} rounds\n')
    print_table(sections)
    check_targets(sections)
    if options.plot:
        draw(sections, options.plot)
    if options.json:
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump(sections, file, indent=1)


if __name__ == '__main__':
    main()
