"""Memory: of the kernel and the agent in a flood of output, and of a big array that goes to four ranks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from benchmarks.processes import proportional, resident
from benchmarks.results import Line
from benchmarks.rows import Meeting, says_here
from benchmarks.systems import IPyParallel, JupyterDistributed, Mpirun, NbDistributed, Ours, OursMpi

if TYPE_CHECKING:
    from benchmarks.results import Options, Results
    from benchmarks.systems import System

LINES = [
    Line("flood.kernel", "growth of the kernel in a flood of output from 2 ranks", "MB", 50),
    Line("flood.agent", "growth of the agent in the flood", "MB", 50),
    Line("flood.time", "the flood: first byte → cell over", "s"),
    Line("array.time", "a numpy array to 4 ranks: time beyond the same cell without it", "s", 0.1),
    Line("array.memory", "a numpy array in 4 ranks: memory of all (PSS), in copies", "copies", 1.05),
]
MB = 1_000_000
PEER_LIMIT = 20.0
MOST = 3_000 * MB


def measure(options: Options, results: Results) -> None:
    """Fill the lines."""
    for kind in (Ours, IPyParallel, JupyterDistributed, NbDistributed):
        if why := kind.available():
            results.note("flood.kernel", kind.name, why)
            continue
        times = options.repeat if kind is Ours else 1
        for _ in range(times):
            with results.attempt(["flood.time"], kind.name):
                system = kind().start()
                try:
                    flood(system, options, results)
                finally:
                    system.close()
    with results.attempt(["array.time", "array.memory"], OursMpi.name):
        array(OursMpi(4), options, results)
    with results.attempt(["array.time", "array.memory"], IPyParallel.name):
        array_pushed(IPyParallel(4), options, results)
    for peer in (JupyterDistributed, NbDistributed):
        results.note("array.time", peer.name, "offers no way to send a variable to the ranks")
    with results.attempt(["array.time", "array.memory"], "pickle file"):
        array_in_a_file(options, results)


class Watch(threading.Thread):
    """Samples memory while a flood goes on; it gives the sign to begin. Ends a kernel that takes too much."""

    def __init__(self, system: System, meeting: Meeting) -> None:
        super().__init__(daemon=True)
        self.system, self.meeting = system, meeting
        self.begun = 0.0
        self.over = threading.Event()
        self.before: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.stopped = False

    def run(self) -> None:
        """Wait for the ranks, begin, sample."""
        self.meeting.all(self.system.ranks, limit=60)
        time.sleep(0.3)
        pids = {"kernel": self.system.kernel.pid}
        if isinstance(self.system, Ours):
            processes = self.system.kernel.processes()
            guard = next(process.pid for process in processes if process.ppid == pids["kernel"])
            pids["agent"] = next(process.pid for process in processes if process.ppid == guard)
        self.before = {name: resident(pid) for name, pid in pids.items()}
        self.most = dict(self.before)
        self.begun = time.time()
        self.meeting.go()
        while not self.over.wait(0.02):
            for name, pid in pids.items():
                self.most[name] = max(self.most[name], resident(pid))
            if self.most["kernel"] > MOST:
                self.stopped = True
                return


def flood(system: System, options: Options, results: Results) -> None:
    """Let two ranks write as fast as they can."""
    meeting = Meeting()
    rounds = options.flood // system.ranks // 10_000
    code = (
        f"import sys\n{meeting.arrive()}{meeting.wait()}"
        f"_b = ('x' * 99 + chr(10)) * 100\nfor _ in range({rounds}): sys.stdout.write(_b)\nsys.stdout.flush()\n"
    )
    watch = Watch(system, meeting)
    request = system.kernel.send(system.cell(code))
    watch.start()
    end = None
    limit = 120.0 if isinstance(system, Ours) else PEER_LIMIT
    try:
        end = system.kernel.receive(
            request, limit=limit, keep=False, until=lambda m: watch.stopped or m.ends()
        )[-1]
    finally:
        watch.over.set()
        watch.join()
        for name, before in watch.before.items():
            results.add(f"flood.{name}", system.name, (watch.most[name] - before) / MB)
        if end is None:
            results.note("flood.kernel", system.name, f"in the first {limit:.0f} s")
        meeting.close()
    if watch.stopped:
        results.note("flood.kernel", system.name, "stopped by us at 3 GB")
    else:
        results.add("flood.time", system.name, end.at - watch.begun)


def array(system: System, options: Options, results: Results) -> None:
    """Run a cell with the array and the same cell without it."""
    system.start()
    try:
        system.kernel.run(f"import numpy\nbig = numpy.ones({options.flood // 8})\nsmall = numpy.ones(512)")
        for _ in range(options.repeat):
            empty = _with(system, "small")
            filled = _with(system, "big")
            results.add("array.time", system.name, filled[0] - empty[0])
            results.add("array.memory", system.name, (filled[1] - empty[1]) / options.flood)
        results.note(
            "array.time", system.name, "the difference of two whole starts, so no finer than their noise"
        )
    finally:
        system.close()


def _with(system: System, name: str) -> tuple[float, int]:
    """Return the time to the first line and the memory of the ranks once each has read every page."""
    meeting = Meeting()
    code = (
        f"import numpy\n{name}[::512].sum()\nprint('@here@', flush=True)\n{meeting.arrive()}{meeting.wait()}"
    )
    sent = time.time()
    request = system.kernel.send(system.cell(code))
    at = system.kernel.receive(request, until=says_here)[-1].at
    memory = sum(proportional(pid) for pid in meeting.all(system.ranks))
    meeting.go()
    system.kernel.receive(request)
    meeting.close()
    return at - sent, memory


def array_pushed(system: IPyParallel, options: Options, results: Results) -> None:
    """Push the array to engines that run."""
    if why := system.available():
        results.note("array.time", system.name, why)
        return
    system.start()
    try:
        system.kernel.run(f"import numpy\nbig = numpy.ones({options.flood // 8})")
        system.kernel.run("view.execute('import numpy')")
        meeting = Meeting()
        system.kernel.run(system.cell(meeting.arrive()))
        pids = list(meeting.come())
        meeting.close()
        before = sum(map(proportional, pids))
        for _ in range(options.repeat):
            sent = time.time()
            system.kernel.run("view.push({'big': big}, block=True)")
            results.add("array.time", system.name, time.time() - sent)
        system.kernel.run(system.cell("big[::512].sum();"))
        results.add("array.memory", system.name, (sum(map(proportional, pids)) - before) / options.flood)
    finally:
        system.close()


def array_in_a_file(options: Options, results: Results) -> None:
    """What people do without any of these: dump it to a file, load it in each rank."""
    for _ in range(options.repeat):
        system, meeting = Mpirun(4), Meeting()
        file = str(system.directory / "big.pickle")
        try:
            maker = Mpirun(1)
            dump = (
                f"import numpy, pickle, time\nbig = numpy.ones({options.flood // 8})\nt = time.time()\n"
                f"with open({file!r}, 'wb') as f: pickle.dump(big, f, protocol=5)\nprint(time.time() - t, flush=True)"
            )
            spent = float(maker.run(dump).communicate()[0])
            maker.close()
            load = (
                "import numpy, os, pickle, time\n"
                "lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
                "empty = int([line for line in lines if line.startswith('Pss:')][0].split()[1]) * 1024\n"
                f"t = time.time()\nwith open({file!r}, 'rb') as f: big = pickle.load(f)\nt = time.time() - t\n"
                f"big[::512].sum()\n{meeting.arrive('[t, empty]')}{meeting.wait()}"
            )
            system.run(load)
            come = {
                pid: [float(x) for x in text.strip("[]").split(",")] for pid, text in meeting.all(4).items()
            }
            memory = sum(proportional(pid) - empty for pid, (_, empty) in come.items())
            results.add("array.time", "pickle file", spent + max(seconds for seconds, _ in come.values()))
            results.add("array.memory", "pickle file", memory / options.flood)
            meeting.go()
            system.process.wait(timeout=30)  # type: ignore[union-attr]
        finally:
            system.close()
            meeting.close()
