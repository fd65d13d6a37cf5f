"""From the cell's sending to its first line, everything cold: ranks, launcher, and of peers the engines."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from benchmarks.driver import TooSlow
from benchmarks.results import Line
from benchmarks.rows import HERE, says_here
from benchmarks.systems import PEERS, Bare, JupyterDistributed, Mpirun, NbDistributed, Ours, OursMpi, Torchrun

if TYPE_CHECKING:
    from benchmarks.results import Options, Results
    from benchmarks.systems import Peer, System

BARE = {Ours.name: Torchrun.name, OursMpi.name: Mpirun.name}
LINES = [
    Line("first.print", "first line, cold, print only, 2 ranks", "s", against=BARE),
    Line("first.gloo", "first line, cold, torch + gloo, 2 ranks", "s", against=BARE),
]
PRINT = "print('@here@', flush=True)\n"
GLOO = f"""
import os
for name, value in {{
    "RANK": os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"),
    "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "@PORT@",
}}.items():
    if value is not None: os.environ.setdefault(name, value)
import torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group("gloo")
{PRINT}"""
CODES = {"first.print": PRINT, "first.gloo": GLOO}


def measure(options: Options, results: Results) -> None:
    """Fill the lines; the systems take turns, so that a busy minute is everybody's."""
    first_of_bare(Torchrun(), GLOO, "warm-up", None)  # brings torch's files into memory, for all
    kernels = [kind().start() for kind in (Ours, OursMpi)]
    try:
        _take_turns(kernels, options, results)
    finally:
        for system in kernels:
            system.close()


def _take_turns(kernels: list[System], options: Options, results: Results) -> None:
    for _ in range(options.repeat):
        for key, code in CODES.items():
            for bare in (Torchrun, Mpirun):
                with results.attempt([key], bare.name):
                    first_of_bare(bare(), code, key, results)
            for system in kernels:
                with results.attempt([key], system.name):
                    results.add(key, system.name, first_line(system, code))
        for peer in PEERS:
            if why := peer.available():
                results.note("first.print", peer.name, why)
                continue
            with results.attempt(list(CODES), peer.name):
                first_of_peer(peer(), results)


def first_line(system: System, code: str) -> float:
    """Return the seconds from the sending of a cell to the first line of a rank."""
    sent = time.time()
    request = system.kernel.send(system.cell(code.replace("@PORT@", str(_port()))))
    at = system.kernel.receive(request, until=says_here)[-1].at
    system.kernel.receive(request)
    return at - sent


def first_of_bare(system: Bare, code: str, key: str, results: Results | None) -> None:
    """Measure a launcher on a script."""
    try:
        sent = time.time()
        process = system.run(code.replace("@PORT@", str(_port())))
        for line in process.stdout or ():
            if HERE in line:
                if results:
                    results.add(key, system.name, time.time() - sent)
                process.wait(timeout=30)
                return
        raise TooSlow("it printed nothing: " + (system.directory / "stderr").read_text()[-200:])
    finally:
        system.close()


def first_of_peer(peer: Peer, results: Results) -> None:
    """Measure the start of resident ranks and a first cell; torch and gloo come in a second cell, added to it."""
    sent = time.time()
    peer.open()
    try:
        if not isinstance(peer, JupyterDistributed):
            sent = time.time()
        peer.kernel.run(peer.start_code(), limit=90)
        peer.after_start()
        started = time.time() - sent
        seconds = started + first_line(peer, PRINT)
        results.add("first.print", peer.name, seconds)
        if isinstance(peer, JupyterDistributed):
            results.note("first.print", peer.name, "with the start of its kernel, which starts the ranks")
        if isinstance(peer, NbDistributed):
            results.note("first.print", peer.name, "always starts torch and gloo")
            results.add("first.gloo", peer.name, seconds)
        else:
            results.add("first.gloo", peer.name, seconds + first_line(peer, GLOO))
            results.note("first.gloo", peer.name, "later cells find the ranks running")
    finally:
        peer.close()


def _port() -> int:
    """Return a port below the ephemeral range that nobody of ours uses."""
    return 20_000 + (os.getpid() * 7 + int(time.time() * 10)) % 9_000
