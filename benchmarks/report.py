"""Writes what was measured as a page."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.systems import Ours, OursMpi

if TYPE_CHECKING:
    from benchmarks.results import Line, Options, Results

WHERE = Path(__file__).with_name("RESULTS.md")
OURS = (Ours.name, OursMpi.name)
BUSY = 1.5
NOTES = """\
- *n* is the number of measurements; the range is from the least to the greatest. *ratio* is our median by the
  best peer's: below 1 we are ahead. Peers are ipyparallel, jupyter-distributed and nbdistributed. For the first
  line the ratio and the target are to the bare launcher, which starts no notebook.
- Peers' ranks are resident: they start once, and their later cells need no start. Ours start and end with each
  cell, so a second cell of a peer begins sooner than ours (resident sessions do not exist here yet).
- For jupyter-distributed a page is simulated that subscribes to its live patches; for ipyparallel `%%px`
  streams, its default. nbdistributed calls `pkill -f worker.py` and listens on all interfaces; here `pkill` is
  a stub, and it listens on loopback.
- Latency is from `time.time()` in the rank to the arrival of the message that first has it, on the same
  machine. Bytes are the message contents as on the wire. No browser takes part.
- Interrupt: "nothing left" is for us that no process of the run lives. Peers' ranks stay by design; where they
  go on with the interrupted cell the remark says so, and the figure does not count.
- kill -9: each rank has a child in a session of its own, with an empty environment, which has to go too. Peers
  and bare launchers are killed once. Peers' floods run once, for 20 s at most.
- The growth of a kernel or agent is of its RSS, from before the first byte to its peak.
- Not here: the first line of a warm start (0.3 s, taken by hand), and an empty cell on resident ranks, which do not
  exist yet.
"""


def write(
    where: str, lines: list[Line], results: Results, options: Options, began: float, load: list[float]
) -> str:
    """Write the page; return its text."""
    head = "| what | system | median | range | n | ratio | target | remarks |\n|---|---|---:|---|---:|---:|---|---|"
    table = [row for line in lines for row in _rows(line, results)]
    facts = _machine(options, began, load)
    behind = _behind(lines, results)
    parts = [
        "# Side by side",
        "Written by `make bench` (`python -m benchmarks`). Less is better in every row.",
        facts,
        "\n".join([head, *table]),
        "## Where we are behind\n\n" + ("\n".join(behind) or "Nowhere in this run."),
        "## How to read it\n\n" + NOTES.rstrip(),
    ]
    text = "\n\n".join(parts) + "\n"
    Path(where).write_text(text, encoding="utf-8")
    return text


def _systems(key: str, results: Results) -> list[str]:
    found = [system for k, system in [*results.values, *results.notes] if k == key]
    return sorted(dict.fromkeys(found), key=lambda name: (name not in OURS, found.index(name)))


def _rows(line: Line, results: Results) -> list[str]:
    rows: list[str] = []
    for system in _systems(line.key, results):
        values, notes = results.values.get((line.key, system), []), results.notes.get((line.key, system), [])
        middle = median(values) if values else None
        best = _best(line, results, system) if system in OURS else None
        ratio = target = ""
        if system in OURS and middle is not None:
            ratio = _ratio(middle / best[1]) if best and best[1] > 0 and middle > 0 else ""
            if goal := _goal(line, results, system):
                target = f"≤ {_number(goal)} {_verdict(values, goal)}"
        shown = f"{_number(middle)} {line.unit}" if middle is not None else "–"
        spread = f"{_number(min(values))}–{_number(max(values))}" if len(values) > 1 else ""
        name = f"**{system}**" if system in OURS else system
        what = line.what if not rows else ""
        cells = [
            what,
            name,
            shown,
            spread,
            str(len(values) or ""),
            ratio,
            target,
            "; ".join(notes).replace("|", "/"),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _verdict(values: list[float], goal: float) -> str:
    if min(values) < 0:  # a difference of two times
        return "not told from the noise"
    return "met" if median(values) <= goal else "**missed**"


def _best(line: Line, results: Results, ours: str) -> tuple[str, float] | None:
    """Return the best system that is not ours, with its median."""
    others = {
        system: median(values)
        for (key, system), values in results.values.items()
        if key == line.key and system not in OURS and values
    }
    if line.against:
        others = {system: value for system, value in others.items() if system == line.against[ours]}
    return min(others.items(), key=lambda item: item[1]) if others else None


def _goal(line: Line, results: Results, ours: str) -> float | None:
    if line.against and (values := results.values.get((line.key, line.against[ours]))):
        return median(values)
    return line.target


def _behind(lines: list[Line], results: Results) -> list[str]:
    said = []
    for line in lines:
        for system in OURS:
            values = results.values.get((line.key, system))
            if not values:
                if results.notes.get((line.key, system)):
                    said.append(
                        f"- {line.what}: {system} has no figure: {'; '.join(results.notes[line.key, system])}."
                    )
                continue
            middle, best, goal = median(values), _best(line, results, system), _goal(line, results, system)
            if best and middle > best[1]:
                said.append(
                    f"- {line.what}: {system} {_number(middle)} {line.unit}, {best[0]} {_number(best[1])} {line.unit}."
                )
            if goal and middle > goal and not line.against:
                said.append(
                    f"- {line.what}: {system} {_number(middle)} {line.unit} misses the target {_number(goal)}."
                )
    return said


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _machine(options: Options, began: float, load: list[float]) -> str:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        memory = int(file.readline().split()[1]) / 1024**2
    ours = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jupyter-ddp", "ipykernel", "ipython", "torch")
    ]
    theirs = [
        f"{name} {peers.version(name)}"
        for name in ("ipyparallel", "jupyter-distributed", "nbdistributed", "torch")
    ]
    began_at, minutes = time.strftime("%Y-%m-%d %H:%M", time.gmtime(began)), (time.time() - began) / 60
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    size = options.flood // 1_000_000
    loads = ", ".join(f"{value:.1f}" for value in load)
    lines = [
        f"- {began_at} UTC, {minutes:.0f} min, --repeat {options.repeat}, {size} MB in the rows of memory",
        f"- {os.cpu_count()} cores, {memory:.0f} GB, {system}",
        f"- ours: {', '.join(ours)}, commit {_commit()}; peers: {', '.join(theirs)}",
        f"- load average (1 min) before the first and after each group: {loads}; 1 to 3 of it is its own",
    ]
    if load[0] > BUSY:
        lines.append(
            "- **The machine was busy with other work while this ran: times are worse than on a quiet one.**"
        )
    return "\n".join(lines)


def _commit() -> str:
    command = ["git", "-C", str(peers.ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
