"""What a rank prints: how soon, how big and how fast it reaches the notebook, and whether all of it is kept."""

from __future__ import annotations

import re
import time
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.results import Line
from benchmarks.rows import Meeting
from benchmarks.systems import IPyParallel, JupyterDistributed, NbDistributed, Ours

if TYPE_CHECKING:
    from benchmarks.driver import Message
    from benchmarks.results import Options, Results
    from benchmarks.systems import System

LINES = [
    Line("latency.median", "print in a rank → message on iopub, 20 prints/s a rank, median", "ms", 3),
    Line("latency.p95", "the same, p95", "ms", 10),
    Line("latency80.median", "print in a rank → message on iopub, 40 prints/s a rank, median", "ms"),
    Line("latency80.p95", "the same, p95", "ms"),
    Line("bytes", "contents on iopub for 1000 flushed lines × 2 ranks (0.154 MB)", "× payload", 2.5),
    Line("lines.10k", "10,000 lines × 2 ranks: first print → cell over", "s", 0.4),
    Line("lines.100k", "100,000 lines × 2 ranks: first print → cell over", "s", 3),
]
SYSTEMS: list[type[System]] = [Ours, IPyParallel, JupyterDistributed, NbDistributed]
STAMPS = 60
STAMPED = re.compile(rb"@(\d{9,}\.\d+)@")
NUMBERED = re.compile(rb"(\d+) (\d{6}) x{20}")
WIDTH = 77
SLOW = 8.0
"""A cell that takes so many seconds is not repeated, and not tried ten times as big."""


def measure(options: Options, results: Results) -> None:
    """Fill the lines."""
    keys = [line.key for line in LINES]
    for kind in SYSTEMS:
        if why := kind.available():
            results.note(keys[0], kind.name, why)
            continue
        with results.attempt(keys, kind.name):
            system = kind().start()
            try:
                for _ in range(options.repeat):
                    latency(system, "latency", 0.05, results)
                for _ in range(options.repeat):
                    latency(system, "latency80", 0.025, results)
                for _ in range(options.repeat):
                    size(system, options, results)
                for _ in range(options.repeat):
                    if lines(system, 10_000, "lines.10k", options, results) > SLOW:
                        results.note("lines.100k", system.name, "not tried, as 10,000 take so long")
                        break
                else:
                    for _ in range(options.repeat):
                        if lines(system, 100_000, "lines.100k", options, results) > SLOW:
                            break
            finally:
                system.close()


def latency(system: System, key: str, pause: float, results: Results) -> None:
    """Have each rank print the time, and see when that is in a message for the first time."""
    code = (
        "import random, time\n"
        f"for _ in range({STAMPS}):\n"
        "    print(f'@{time.time()!r}@', flush=True)\n"
        f"    time.sleep({pause} * random.uniform(0.7, 1.3))\n"
    )
    seen: dict[bytes, float] = {}
    sent = time.time()  # nbdistributed sends earlier cells' text again
    for message in system.kernel.run(system.cell(code)):
        for stamp in STAMPED.findall(message.content):
            if float(stamp) > sent:
                seen.setdefault(stamp, message.at - float(stamp))
    delays = sorted(1000 * delay for delay in seen.values())
    if len(delays) < STAMPS * system.ranks:
        results.note(f"{key}.median", system.name, f"{len(delays)} of {STAMPS * system.ranks} prints arrived")
    results.add(f"{key}.median", system.name, median(delays))
    results.add(f"{key}.p95", system.name, delays[int(len(delays) * 0.95)])


def size(system: System, options: Options, results: Results) -> None:
    """Count the bytes of all contents of a cell's messages."""
    code = f"for i in range(1000): print(f'line {{i:06d}} ' + 'x' * {WIDTH - 13}, flush=True)"
    messages = system.kernel.run(system.cell(code), limit=options.limit)
    total = sum(len(message.content) for message in messages if message.kind != "execute_input")
    results.add("bytes", system.name, total / (1000 * system.ranks * WIDTH))


def lines(system: System, count: int, key: str, options: Options, results: Results) -> float:
    """Have each rank print many lines; see whether all of them are there."""
    meeting = Meeting()
    width = f"'x' * ({WIDTH - 9} - len(_t))"
    code = (
        f"{meeting.arrive('repr(time.time())')}"
        f"_t = str(os.getpid())\n"
        f"for i in range({count}): print(f'{{_t}} {{i:06d}} ' + {width})\n"
    )
    messages = system.kernel.run(system.cell(code), limit=options.limit)
    first = min(float(text) for text in meeting.come().values())
    meeting.close()
    duration = messages[-1].at - first
    results.add(key, system.name, duration)
    lost = _lost_on_disk(system, count) if isinstance(system, Ours) else _lost(messages, count * system.ranks)
    if lost:
        where = "on disk" if isinstance(system, Ours) else "in the notebook"
        results.note(key, system.name, f"{lost} of {count * system.ranks} lines are not {where}")
    elif isinstance(system, Ours):
        results.note(key, system.name, "every line on disk, in order")
    return duration


def _lost_on_disk(system: Ours, count: int) -> int:
    run = system.runs()[-1]
    files = list(run.rglob("rank*.stdout"))
    lost = count * (system.ranks - len(files))
    for file in files:
        numbers = [int(number) for _, number in NUMBERED.findall(file.read_bytes())]
        lost += count - len(numbers) if numbers != list(range(count)) else 0
        if len(numbers) == count and numbers != list(range(count)):
            lost += 1  # out of order
    return lost


def _lost(messages: list[Message], count: int) -> int:
    found: set[tuple[bytes, bytes]] = set()
    for message in reversed(messages):
        if message.kind != "execute_input":
            found.update(NUMBERED.findall(message.content))
        if len(found) >= count:
            return 0
    return count - len(found)
