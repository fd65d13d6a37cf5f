"""An interrupt: when the cell is over, and what goes on afterwards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.driver import TooSlow
from benchmarks.processes import wait_gone
from benchmarks.results import Line
from benchmarks.rows import Meeting, says_here
from benchmarks.systems import NOTEBOOKS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.results import Options, Results
    from benchmarks.systems import System

LINES = [
    Line("interrupt.python", "interrupt → cell over, ranks sleep in Python", "s", 0.5),
    Line("interrupt.python.gone", "the same → nothing left of the run", "s", 0.5),
    Line("interrupt.ignored", "interrupt → cell over, ranks ignore SIGINT and SIGTERM", "s", 1),
    Line("interrupt.ignored.gone", "the same → nothing left of the run", "s", 1),
]
LIMIT = 10.0
CODES = {
    "interrupt.python": "",
    "interrupt.ignored": "import signal\nfor _s in (2, 15): signal.signal(_s, signal.SIG_IGN)\n",
}


def measure(options: Options, results: Results) -> None:
    """Fill the lines."""
    for kind in NOTEBOOKS:
        if why := kind.available():
            results.note(LINES[0].key, kind.name, why)
            continue
        for key, code in CODES.items():
            with results.attempt([key], kind.name):
                system = kind().start()
                try:
                    for _ in range(options.repeat):
                        interrupt(system, key, code, results)
                finally:
                    system.close()


def interrupt(system: System, key: str, code: str, results: Results) -> None:
    """Interrupt a cell whose ranks beat like hearts, and see when it is over and whether they have stopped."""
    meeting = Meeting()
    before = {process.pid for process in system.kernel.processes()}
    beat = "while True: os.utime(_p); time.sleep(0.02)\n"
    request = system.kernel.send(system.cell(f"{code}{meeting.arrive()}print('@here@', flush=True)\n{beat}"))
    system.kernel.receive(request, until=says_here)
    meeting.all(system.ranks)
    time.sleep(0.5)
    started = [process for process in system.kernel.processes() if process.pid not in before]
    now = time.time()
    system.kernel.interrupt()
    over = system.kernel.receive(request, limit=LIMIT)[-1].at
    seconds = over - now
    if not system.resident:
        results.add(key, system.name, seconds)
        gone, living = wait_gone(started, 5.0)
        if living:
            results.note(f"{key}.gone", system.name, f"{len(living)} processes are left after 5 s")
        else:
            results.add(f"{key}.gone", system.name, max(over, gone) - now)
        meeting.close()
        return
    time.sleep(0.5)
    going = sum(_beats(path) for path in meeting.path.iterdir())
    dead = before - {process.pid for process in system.kernel.processes()}
    meeting.close()
    if going:
        results.note(key, system.name, f"cell over after {seconds:.2f} s, but {going} ranks go on with it")
    else:
        results.add(key, system.name, seconds)
    if dead:
        results.note(key, system.name, f"{len(dead)} of its resident processes died")
    if going or dead:
        raise TooSlow("measured once, as the session was of no more use")


def _beats(path: Path) -> bool:
    first = path.stat().st_mtime_ns
    time.sleep(0.3)
    return path.stat().st_mtime_ns != first
