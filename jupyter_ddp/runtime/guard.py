"""The guard of a local run: starts its agents, and sees to it that nothing outlives its owner or its agents.

``python -m jupyter_ddp.runtime.guard <run directory> <pid of the owner>``, with the owner's pipe as
standard input (it only means "I live") and the doorbell as standard output; or
``--wait <pid of the owner>``, see `waiting`. The owner is watched by its pid too: a
child that it forked may hold the pipe open long after its death.

The agents in turn watch the guard: they hold the read end of a pipe whose only write end is here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.runtime import waiting, zygote
from jupyter_ddp.runtime.process import (
    become_subreaper,
    die_with_parent,
    is_alive,
    kill_all,
    news_of_children,
    raise_file_limit,
    reap,
)

if TYPE_CHECKING:
    import socket

PATIENCE: Final = 0.5
"""Seconds in which agents end by themselves, with their logs, before the guard ends everything."""


def main(arguments: list[str]) -> None:
    """Guard one run until nothing of it is left; ``--wait`` in the place of its directory has it handed over later."""
    owner = int(arguments[1])
    if arguments[0] == "--wait":
        handed = waiting.wait(owner)
        if handed is None:
            return
        run_dir = handed.run_dir
        spec = _take_spec(run_dir)
        spec["payload"] = handed.numbers.get(spec["payload"])
        asks = handed.give_id(spec["run_id"])
    else:
        run_dir = Path(arguments[0])
        spec = _take_spec(run_dir)
        # First of all: it is the slowest, and nothing of the run is there yet that it could inherit.
        asks = None
        if spec.get("why_exec") == "":
            env = spec["env"] | spec["early_env"]
            asks = zygote.start(spec["python"], env, spec["run_id"], run_dir, run_dir / "zygote.log")
    _guard(spec, run_dir, owner, asks)


def _take_spec(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "spec.json"
    spec: dict[str, Any] = json.loads(path.read_bytes())
    path.unlink()  # it has the environment, secrets and all
    return spec


def _guard(spec: dict[str, Any], run_dir: Path, owner: int, asks: socket.socket | None) -> None:
    spec["file_limit"] = raise_file_limit()
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(1, False)
    life, hold = os.pipe()
    start = partial(_start_agent, spec, run_dir=run_dir, life=life, hold=hold, asks=asks)
    from jupyter_ddp.runtime import agent  # noqa: F401 - once for all agents, while the zygote imports

    agents: dict[int, int] = {}
    try:
        for node in range(spec["nnodes"]):
            agents[start(node)] = node
    except OSError as error:
        kill_all(spec["run_id"])
        cure = ": this user has too many processes, end some or raise the limit (ulimit -u)"
        sys.exit(f"no agent could be started ({error.strerror}){cure if error.errno == errno.EAGAIN else ''}")
    os.close(life)
    if spec["payload"] is not None:
        os.close(spec["payload"])  # the agents have it: it goes when they and the ranks have let go
    if asks is not None:
        asks.close()
    os.close(1)  # the doorbell's end of file means: no agent is left
    _watch(spec["run_id"], agents, owner, hold)
    kill_all(spec["run_id"])
    from shutil import rmtree  # when nobody waits for it

    rmtree(os.path.dirname(spec["sockets"][0]), ignore_errors=True)


def _start_agent(
    spec: dict[str, Any],
    node: int,
    *,
    run_dir: Path,
    life: int,
    hold: int,
    asks: socket.socket | None,
) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(guard, signal.SIGTERM)
        become_subreaper()
        os.close(hold)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(run_dir / f"agent-{node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.set_inheritable(1, False)
        from jupyter_ddp.runtime.agent import Agent

        Agent(spec, node, run_dir, life=life, doorbell=1, zygote=asks).run()
        code = 0
    except BaseException:  # noqa: BLE001 - the last stop of this process: told in its log
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _watch(run_id: str, agents: dict[int, int], owner: int, hold: int) -> None:
    """Return when all agents have ended, or when their time is up."""
    selector = selectors.DefaultSelector()
    news = news_of_children()
    selector.register(news, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    with contextlib.suppress(OSError, AttributeError):  # Linux
        selector.register(os.pidfd_open(owner), selectors.EVENT_READ)
    living = set(agents)
    deadline: float | None = None
    while living:
        wait = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in selector.select(wait):
            if key.fd == news:
                os.read(news, 4096)
                continue
            selector.unregister(key.fd)  # the pipe's end of file, or the owner's end
            deadline = deadline or _let_go(hold)
        if deadline is None and not is_alive(owner):
            deadline = _let_go(hold)
        for pid, code in reap().items():
            if pid not in living:  # an orphan of an agent that is gone
                continue
            living.discard(pid)
            if code and deadline is None:
                deadline = time.monotonic() + (PATIENCE if agents[pid] == 0 else 20 * PATIENCE)
        if deadline is not None and time.monotonic() >= deadline:
            kill_all(run_id)
            return


def _let_go(hold: int) -> float:
    """Tell the agents that the owner is gone; return until when they have time."""
    with contextlib.suppress(OSError):
        os.close(hold)
    return time.monotonic() + PATIENCE


if __name__ == "__main__":
    main(sys.argv[1:])
