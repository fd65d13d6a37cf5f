"""The zygote of a run: it has imported torch, torchrun and IPython once, and forks torchrun for the agents.

``python -u -m jupyter_ddp.runtime.zygote <descriptor>``, started by the guard before anything else of the run exists,
so that nothing of it is inherited. It has one thread, runs no operation of torch and asks CUDA nothing: what is
forked from such a process can do everything.

An agent asks with one datagram that carries two descriptors, of a socket and of a log. The zygote forks a `nurse`
for it and has no more to do with it. It is executed with the run's marker in its environment, so all that
descends from it shows that marker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import socket
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from jupyter_ddp.runtime import nurse
from jupyter_ddp.runtime.forked import Fresh
from jupyter_ddp.runtime.pools import QUIET
from jupyter_ddp.runtime.process import MARKER, become_plain, reap

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OF_RANKS: Final = (
    "jupyter_ddp.runtime.worker",
    "jupyter_ddp.runtime.rank",
    "jupyter_ddp.runtime.adapt",
    "jupyter_ddp.runtime.display",
    "jupyter_ddp.runtime.shell",
    "IPython.core.application",
    "IPython.core.magics",
    "IPython.core.oinspect",
)
"""What every rank imports before it has the notebook's module path."""
AHEAD: Final = (
    "cloudpickle",
    "jupyter_ddp.values",
    "jupyter_ddp.runtime.pull",
    "torch",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "encodings.idna",
    "multiprocessing.queues",
    "multiprocessing.popen_fork",
)
"""What ranks and torchrun import later, by the notebook's module path; see `jupyter_ddp.runtime.nurse`."""
SETTINGS: Final = {
    **QUIET,
    # torch shall look for GPUs without initialising CUDA, if anything asks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


NOBODY: Final = "-" * 8
"""Stands for a run's id, and is as long, until `name` says it."""


def start(
    python: str, env: Mapping[str, str], run_id: str, directory: Path, log_path: Path
) -> socket.socket | None:
    """Start a zygote; return the socket on which agents ask it, None if it cannot be started.

    Args:
        python: The ranks' Python.
        env: The ranks' environment.
        run_id: The run, or `NOBODY`.
        directory: Where no file shadows a module.
        log_path: Where it says what goes wrong.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [python, "-u", "-m", "jupyter_ddp.runtime.zygote", str(theirs.fileno())],
            env={**env, **SETTINGS, MARKER: run_id},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            preexec_fn=partial(become_plain, os.getpid(), None),  # noqa: PLW1509 - the guard has one thread
        )
    except OSError:
        ours.close()
        return None
    finally:
        theirs.close()
        os.close(log)
    process.returncode = 0  # the guard collects it, not subprocess
    return ours


def name(zygote: socket.socket, run_id: str) -> None:
    """Tell a zygote that was started for `NOBODY` whose it is."""
    with contextlib.suppress(OSError):  # it is gone: agents will notice
        zygote.send(b"=" + run_id.encode())


def main(descriptor: int) -> None:
    """Import, then fork a nurse for each request, until nobody is left who could ask."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    fresh = Fresh.of_this_process()
    state = nurse.State(fresh, *preload())
    gc.collect()
    gc.freeze()  # so that collections in the ranks leave the shared pages alone
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 16, 2)
        if not word:
            return
        if word.startswith(b"="):
            rename(word[1:])
            continue
        zygote = os.getpid()
        if os.fork() == 0:
            control.close()
            nurse.serve(socket.socket(fileno=descriptors[0]), descriptors[1], zygote, state)
        for one in descriptors:
            os.close(one)
        reap()


def rename(run_id: bytes) -> None:
    """Write the run's id into the environment that this process was executed with, where others look for the marker.

    Raises:
        RuntimeError: It cannot be done: then there must be no zygote.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARKER.encode())
    if place and len(run_id) == len(NOBODY):
        ctypes.memmove(place, run_id, len(run_id))
    with open("/proc/self/environ", "rb") as file:
        if MARKER.encode() + b"=" + run_id not in file.read().split(b"\0"):
            raise RuntimeError("the run's id is not in the environment")


def preload() -> tuple[frozenset[str], int, bool]:
    """Import; return the top-level modules that are there ahead of time, the threads now, and whether CUDA is up."""
    for name in OF_RANKS:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in AHEAD:
        importlib.import_module(name)
    ahead = frozenset(name for name in sys.modules.keys() - before if "." not in name)
    cuda = sys.modules["torch"].cuda
    return ahead, len(os.listdir("/proc/self/task")), bool(cuda.is_initialized())


if __name__ == "__main__":
    main(int(sys.argv[1]))
