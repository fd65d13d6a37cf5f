"""``kill -9`` of one process: when all else has gone. Each rank has a child in its own session, without environment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.driver import TooSlow
from benchmarks.processes import Process, find, marked, wait_gone
from benchmarks.results import Line
from benchmarks.rows import Meeting
from benchmarks.systems import PEERS, Bare, Mpirun, Ours, OursMpi, Torchrun

if TYPE_CHECKING:
    from benchmarks.results import Options, Results
    from benchmarks.systems import System

VICTIMS = ["kernel", "agent", "guard", "launcher", "rank"]
LINES = [Line(f"kill.{victim}", f"kill -9 of the {victim} → nothing left", "s", 1) for victim in VICTIMS]
LIMIT = 5.0
CHILD = "subprocess.Popen(['sleep', '600'], start_new_session=True, env={}, stdout=-3, stderr=-3).pid"


def measure(options: Options, results: Results) -> None:
    """Fill the lines."""
    for kind in (Ours, OursMpi):
        for _ in range(options.repeat):
            with results.attempt(["kill.kernel"], kind.name):
                system = kind().start()
                try:
                    for victim in reversed(VICTIMS):  # the kernel last
                        kill(system, victim, results)
                finally:
                    system.close()
    for peer in PEERS:
        if why := peer.available():
            results.note("kill.kernel", peer.name, why)
            continue
        with results.attempt(["kill.kernel"], peer.name):
            started = peer().start()
            try:
                kill(started, "kernel", results)
            finally:
                started.close()
    for bare in (Torchrun, Mpirun):
        for victim in ("launcher", "rank"):
            with results.attempt([f"kill.{victim}"], bare.name):
                kill_bare(bare(), victim, results)


def code_of(meeting: Meeting) -> str:
    """Return what the ranks do: sleep, with a child that is hard to find."""
    return f"import subprocess\n{meeting.arrive(CHILD)}time.sleep(600)\n"


def kill(system: System, victim: str, results: Results) -> None:
    """Kill one process of a running cell."""
    meeting = Meeting()
    request = system.kernel.send(system.cell(code_of(meeting)))
    come = meeting.all(system.ranks)
    time.sleep(0.3)
    children = [child for pid in come.values() if (child := system.kernel.adopt(int(pid)))]
    processes = [*system.kernel.processes(), *children]
    kernel = system.kernel.pid
    target = find(kernel) if victim == "kernel" else _find(processes, victim, kernel, list(come))
    meeting.close()
    _kill(target, processes, f"kill.{victim}", system.name, results)
    if victim != "kernel":
        system.kernel.receive(request)


def kill_bare(system: Bare, victim: str, results: Results) -> None:
    """Kill the launcher or a rank of a launcher without a notebook."""
    meeting = Meeting()
    children: list[Process] = []
    try:
        process = system.run(code_of(meeting))
        come = meeting.all(system.ranks)
        time.sleep(0.3)
        children = [child for pid in come.values() if (child := find(int(pid)))]
        target = find(process.pid if victim == "launcher" else min(come))
        _kill(target, [*marked(system.token), *children], f"kill.{victim}", system.name, results)
    finally:
        for child in children:
            child.kill()
        system.close()
        meeting.close()


def _kill(target: Process | None, processes: list[Process], key: str, name: str, results: Results) -> None:
    if target is None:
        raise TooSlow("the process was not found")
    now = time.time()
    target.kill()
    gone, left = wait_gone([process for process in processes if process != target], LIMIT)
    if left:
        results.note(key, name, f"{len(left)} of {len(processes)} processes are left after {LIMIT:.0f} s")
    else:
        results.add(key, name, gone - now)


def _find(processes: list[Process], victim: str, kernel: int, ranks: list[int]) -> Process | None:
    """Find the guard (the kernel's child), the agent (its child), the launcher (the agent's), a rank."""
    if victim == "rank":
        return find(min(ranks))
    parent = kernel
    for name in ("guard", "agent", "launcher"):
        found = next((process for process in processes if process.ppid == parent), None)
        if found is None or name == victim:
            return found
        parent = found.pid
    return None
