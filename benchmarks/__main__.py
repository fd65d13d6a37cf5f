"""``python -m benchmarks [rows …] [--repeat N] [--full]``: measures, and writes ``benchmarks/RESULTS.md``."""

from __future__ import annotations

import argparse
import os
import time

from benchmarks import peers, report
from benchmarks.results import Line, Options, Results
from benchmarks.rows import first_line, interrupt, kill, memory, output

GROUPS = {
    "output": output,
    "interrupt": interrupt,
    "kill": kill,
    "first-line": first_line,
    "memory": memory,
}


def main() -> int:
    """Measure what was asked for. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--full", action="store_true", help="1 GB in the rows of memory instead of 200 MB")
    parser.add_argument(
        "--output", default=str(report.WHERE), help="the file to write (benchmarks/RESULTS.md)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(GROUPS):
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    peers.prepare()
    options, results = Options(repeat=max(1, arguments.repeat), full=arguments.full), Results()
    began, load = time.time(), [os.getloadavg()[0]]
    lines: list[Line] = []
    text = ""
    chosen = [name for name in GROUPS if name in (arguments.rows or GROUPS)]
    for name in chosen:
        print(name, flush=True)
        GROUPS[name].measure(options, results)
        load.append(os.getloadavg()[0])
        lines += GROUPS[name].LINES
        text = report.write(arguments.output, lines, results, options, began, load)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
