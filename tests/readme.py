#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The C++ in README.md is that of client/examples/receive.cc, which the build compiles."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parent.parent
shown = re.findall(r'^```cpp\n(.*?)^```$', (root / 'README.md').read_text(), re.M | re.S)
compiled = (root / 'client/examples/receive.cc').read_text()
if len(shown) != 1:
    sys.exit(f'README.md has {len(shown)} blocks of C++, and should have one')
if shown[0] not in compiled:
    sys.exit('README.md shows another program than client/examples/receive.cc:\n' + shown[0])
